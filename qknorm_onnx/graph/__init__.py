"""QK-Norm attention in ONNX graphs: canonical nodes, their function bodies, recognisers and passes."""
