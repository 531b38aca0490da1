"""What a lowering target is: who turns canonical nodes into other operators, and where to go when it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder
from qknorm_onnx.graph.canonical.body_signature import BodySignature
from qknorm_onnx.graph.canonical.function_body import Inputs
from qknorm_onnx.graph.canonical.known_fields import KnownFields
from qknorm_onnx.graph.onnxruntime_release import Release
from qknorm_onnx.spec.attributes import Spec
from qknorm_onnx.spec.targets import TargetName


class RefusedLoweringError(Exception):
    """A target cannot express one node; the message is the reason, a sentence without a full stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emitted:
    """The values that replace a node's outputs (None: the node stays), and what is worth saying about how they are computed."""

    outputs: Sequence[ir.Value] | None
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweringRequest:
    """One canonical node: its meaning, its inputs by name, and the versions and the provider that it is lowered for.

    release: the onnxruntime that the file is for; None: whichever the node needs.
    """

    spec: Spec
    inputs: Inputs
    signature: BodySignature
    opset: int
    provider: str
    release: Release | None = None

    def lacks(self, since: tuple[int, int]) -> bool:
        """Whether the file is for an onnxruntime older than `since`."""
        return self.release is not None and self.release.version < since


# Appends the nodes to the builder. Raises RefusedLoweringError where the target cannot say what the spec means.
Emit = Callable[[BodyBuilder, LoweringRequest], Emitted]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One entry of the registry.

    emit: how a node is replaced; None keeps it, with its function body.
    known_fields: spec fields that `emit` understands; all others are refused before it is called.
    fallback: the target that is tried where this one refuses; "" for none.
    """

    name: TargetName
    minimum_opset: int
    known_fields: KnownFields
    emit: Emit | None = None
    fallback: TargetName | Literal[""] = ""

    def __post_init__(self) -> None:
        if not self.name or self.name == self.fallback:
            raise ValueError(f"a target needs a name, and a fallback other than itself; got {self.name!r}, {self.fallback!r}")
        if self.minimum_opset < 18:
            raise ValueError(f"target {self.name}: minimum_opset is {self.minimum_opset}; function bodies need 18")
        if not self.known_fields:
            raise ValueError(f"target {self.name}: known_fields is empty, so that every spec would be refused")
