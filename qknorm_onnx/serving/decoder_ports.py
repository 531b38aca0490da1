"""What the graph of a decoder takes and gives: its caches, and whether its logits are of all new tokens or of the last."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

import onnx_ir as ir

from qknorm_onnx.errors import InputError

KEY, VALUE = "past_key_values.{}.key", "past_key_values.{}.value"
PRESENT_KEY, PRESENT_VALUE = "present.{}.key", "present.{}.value"
TOKEN_INPUTS: Final = ("input_ids", "attention_mask", "position_ids")
LOGITS: Final = "logits"
LogitsKept = Literal["all", "last"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Heads and head size of one layer's cache, (B, num_heads, entries, head_size)."""

    num_heads: int
    head_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderPorts:
    """`caches`: of each layer; `last_logits`: whether logits are (B, 1, vocabulary), of each row's last token, or of all."""

    caches: tuple[CacheSize, ...]
    vocabulary: int
    last_logits: bool

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have caches of one size."""
        return len(set(self.caches)) == 1


def read_ports(model: ir.Model) -> DecoderPorts:
    """The ports of a decoder with its cache. Raises InputError where `model` is none; the message says what it lacks."""
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    for name in ("input_ids", KEY.format(0)):
        if name not in inputs:
            raise InputError(
                f"this is no decoder with its cache: it has no input {name!r} (export with --with-past, or to a folder)"
            )
    if LOGITS not in outputs:
        raise InputError(f"this is no language model: it has no output {LOGITS!r}")
    caches: list[CacheSize] = []
    while (key := inputs.get(KEY.format(len(caches)))) is not None:
        caches.append(CacheSize(num_heads=_size(key, 1), head_size=_size(key, 3)))
    known = {*TOKEN_INPUTS, *(form.format(layer) for layer in range(len(caches)) for form in (KEY, VALUE))}
    if others := [name for name in inputs if name not in known]:
        raise InputError(f"the model has inputs that generation does not know: {', '.join(map(str, others))}")
    logits = outputs[LOGITS]
    return DecoderPorts(caches=tuple(caches), vocabulary=_size(logits, 2), last_logits=_static(logits, 1) == 1)


def _size(value: ir.Value, axis: int) -> int:
    size = _static(value, axis)
    if size is None:
        raise InputError(f"the model does not say how large axis {axis} of {value.name!r} is")
    return size


def _static(value: ir.Value, axis: int) -> int | None:
    size = value.shape[axis] if value.shape is not None and len(value.shape) > axis else None
    return size if isinstance(size, int) else None
