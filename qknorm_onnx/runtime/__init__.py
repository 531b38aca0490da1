"""ONNX Runtime sessions and what runs where in them."""
