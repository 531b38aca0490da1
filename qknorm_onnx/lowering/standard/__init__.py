"""Target `onnx`: the standard operators of opset 23 and newer."""
