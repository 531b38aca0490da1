"""The onnx_ir passes that turn recognised attention into canonical nodes."""
