"""Export PyTorch models with QK-Norm attention to ONNX, one node per attention, proven equal to PyTorch.

The public door. Everything is imported at first use: `import qknorm_onnx` needs neither torch nor onnxruntime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qknorm_onnx.checked_export.export import export, export_folder
    from qknorm_onnx.custom_ops import library_path
    from qknorm_onnx.errors import FusionRequiredError, InputError, QKNormError
    from qknorm_onnx.graph.fusion_report import Declined, FusedAttention, FusionReport, Refused
    from qknorm_onnx.pipeline import Program, fuse
    from qknorm_onnx.runtime.session import create_session
    from qknorm_onnx.serving.fused_folder import fuse_folder
    from qknorm_onnx.serving.generate import Generation, generate
    from qknorm_onnx.spec.canonical import canonical
    from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec, SpecError
    from qknorm_onnx.torch_export.operators.modules import QKNormAttention
    from qknorm_onnx.torch_export.operators.translation import translation_table
    from qknorm_onnx.validation.validate import ParityReport, validate

__all__ = [
    "AttentionSpec",
    "Declined",
    "FusedAttention",
    "FusionReport",
    "FusionRequiredError",
    "Generation",
    "InputError",
    "NormSpec",
    "ParityReport",
    "Program",
    "QKNormAttention",
    "QKNormError",
    "QKNormRotarySpec",
    "QKNormSpec",
    "Refused",
    "RotarySpec",
    "SpecError",
    "canonical",
    "create_session",
    "export",
    "export_folder",
    "fuse",
    "fuse_folder",
    "generate",
    "library_path",
    "translation_table",
    "validate",
]

__version__ = "0.1.0"

_HOME_OF = {
    "AttentionSpec": "spec.qk_norm_spec",
    "Declined": "graph.fusion_report",
    "FusedAttention": "graph.fusion_report",
    "FusionReport": "graph.fusion_report",
    "FusionRequiredError": "errors",
    "Generation": "serving.generate",
    "InputError": "errors",
    "NormSpec": "spec.qk_norm_spec",
    "ParityReport": "validation.validate",
    "Program": "pipeline",
    "QKNormAttention": "torch_export.operators.modules",
    "QKNormError": "errors",
    "QKNormRotarySpec": "spec.qk_norm_spec",
    "QKNormSpec": "spec.qk_norm_spec",
    "Refused": "graph.fusion_report",
    "RotarySpec": "spec.qk_norm_spec",
    "SpecError": "spec.qk_norm_spec",
    "canonical": "spec.canonical",
    "create_session": "runtime.session",
    "export": "checked_export.export",
    "export_folder": "checked_export.export",
    "fuse": "pipeline",
    "fuse_folder": "serving.fused_folder",
    "generate": "serving.generate",
    "library_path": "custom_ops",
    "translation_table": "torch_export.operators.translation",
    "validate": "validation.validate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
