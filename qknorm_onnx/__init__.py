"""Export PyTorch models with QK-Norm attention to ONNX, one node per attention, proven equal to PyTorch."""
