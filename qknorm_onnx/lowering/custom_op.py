"""Target `custom-op`: the canonical node stays, with its function body, and runs natively where a kernel is registered."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_signature import IR_DTYPES
from qknorm_onnx.graph.canonical.function_body import MINIMUM_OPSET, Inputs
from qknorm_onnx.graph.canonical.known_fields import BODY_FIELDS
from qknorm_onnx.lowering.emit.target import Target
from qknorm_onnx.spec.attributes import Spec
from qknorm_onnx.spec.cuda_support import CUDA_DTYPES, cuda_refusal, head_sizes
from qknorm_onnx.spec.signature import KERNEL_DTYPES

CUSTOM_OP: Final = Target(name="custom-op", minimum_opset=MINIMUM_OPSET, known_fields=BODY_FIELDS, fallback="primitive")


def kernel_refusal(spec: Spec, inputs: Inputs, provider: str) -> str | None:
    """Why no kernel serves a node of a type that has kernels on `provider`: an ONNX Runtime session would refuse the model."""
    first = next(iter(inputs.values()))
    names = [name for name in CUDA_DTYPES if IR_DTYPES[name] == first.dtype]
    if provider != "cuda" or not names:
        return None
    widths = {name: value.shape[2] for name, value in inputs.items() if value.shape is not None and len(value.shape) == 3}
    known = {name: width for name, width in widths.items() if isinstance(width, int)}
    return cuda_refusal(spec, dtype=names[0], head_sizes=head_sizes(spec, known))


def kernel_note(op_type: str, dtype: ir.DataType | None, provider: str) -> str:
    """What to say about a kept node of this type: empty where the native library has a kernel for it."""
    served = [dtypes for key, dtypes in KERNEL_DTYPES.items() if key == (op_type, provider)]
    if any(IR_DTYPES[name] == dtype for dtypes in served for name in dtypes):
        return ""
    kind = "an unknown type" if dtype is None else dtype.name.lower()
    return f"no native {provider} kernel for {kind}: runs as its function body"
