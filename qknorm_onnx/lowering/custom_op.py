"""Target `custom-op`: the canonical node stays, with its function body, and runs natively where a kernel is registered."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.body_signature import IR_DTYPES
from qknorm_onnx.graph.function_body import MINIMUM_OPSET
from qknorm_onnx.graph.known_fields import BODY_FIELDS
from qknorm_onnx.lowering.target import Target
from qknorm_onnx.spec.signature import KERNEL_DTYPES

CUSTOM_OP: Final = Target(name="custom-op", minimum_opset=MINIMUM_OPSET, known_fields=BODY_FIELDS)


def kernel_note(op_type: str, dtype: ir.DataType | None, provider: str) -> str:
    """What to say about a kept node of this type: empty where the native library has a kernel for it."""
    served = [dtypes for key, dtypes in KERNEL_DTYPES.items() if key == (op_type, provider)]
    if any(IR_DTYPES[name] == dtype for dtypes in served for name in dtypes):
        return ""
    kind = "an unknown type" if dtype is None else dtype.name.lower()
    return f"no native {provider} kernel for {kind}: runs as its function body"
