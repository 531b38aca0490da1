"""The native custom-op library for ONNX Runtime and where it lies."""
