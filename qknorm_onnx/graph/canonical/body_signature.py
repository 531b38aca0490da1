"""What a function body is made for, besides the spec: the types of a node's inputs and the few sizes that shape the body."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Final

import onnx_ir as ir

from qknorm_onnx.spec.attributes import Spec, to_attributes
from qknorm_onnx.spec.signature import Dtype

IR_DTYPES: Final[dict[Dtype, ir.DataType]] = {
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
# The inputs whose last dimension decides which nodes a body has: head sizes, widths of tables and gains.
_SIZED_INPUTS: Final = frozenset({"query", "key", "value", "x", "cos", "sin", "weight", "q_norm_weight", "k_norm_weight"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputSignature:
    """Type, rank and (of projections, tables, gains) last dimension of one input; None where not known or not needed."""

    dtype: ir.DataType
    rank: int | None = None
    last_dim: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BodySignature:
    """The inputs of one node in the operator's order (None: absent, trailing ones left out) and how many outputs it has."""

    names: tuple[str, ...]
    inputs: tuple[InputSignature | None, ...]
    num_outputs: int = 1

    def __getitem__(self, name: str) -> InputSignature | None:
        """The input called `name`, None where it is absent."""
        return self.inputs[self.names.index(name)] if name in self.names else None


def signature_of(values: dict[str, ir.Value | None], *, num_outputs: int) -> BodySignature:
    """The signature of a node with these inputs, by name in the operator's order.

    Raises:
        ValueError: an input's type is not known.
    """
    while values and list(values.values())[-1] is None:
        values = dict(list(values.items())[:-1])
    return BodySignature(
        names=tuple(values),
        inputs=tuple(None if value is None else _input_signature(name, value) for name, value in values.items()),
        num_outputs=num_outputs,
    )


def body_key(spec: Spec, signature: BodySignature) -> str:
    """A text that is equal for equal bodies and for no others, stable between runs."""
    parts = [
        None if given is None else [name, given.dtype.name, given.rank, given.last_dim]
        for name, given in zip(signature.names, signature.inputs, strict=True)
    ]
    text = json.dumps([to_attributes(spec), parts, signature.num_outputs], sort_keys=True)
    first = signature.inputs[0]
    assert first is not None, "the first input is required"
    return f"{first.dtype.name.lower()}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _input_signature(name: str, value: ir.Value) -> InputSignature:
    if value.dtype is None:
        raise ValueError(f"the type of input {name} (value {value.name!r}) is not known: run shape inference on the model first")
    shape = value.shape
    rank = None if shape is None else shape.rank()
    last = shape[-1] if shape is not None and rank and name in _SIZED_INPUTS else None
    return InputSignature(dtype=value.dtype, rank=rank, last_dim=last if isinstance(last, int) else None)
