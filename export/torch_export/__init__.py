"""From PyTorch to ONNX: the torch operators, modules built from a spec, the exporter and the Hugging Face readers."""

from __future__ import annotations

import importlib.util

from qknorm_onnx.errors import InputError

if __name__ != "qknorm_onnx.torch_export":
    raise ImportError(f"import qknorm_onnx.torch_export, not {__name__}: the folder is not a package of its own")

if importlib.util.find_spec("torch") is None:
    raise InputError("PyTorch is not installed: pip install 'qknorm-onnx[torch]'")
