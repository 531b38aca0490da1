"""Target `ort`: ONNX Runtime's own operators (domain com.microsoft), on the CPU and on CUDA."""
