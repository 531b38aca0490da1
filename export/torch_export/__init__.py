"""From PyTorch to ONNX: the torch operator, modules built from a spec, the exporter and the Hugging Face readers."""
