"""What happened to each attention of a model, as values: `qk.Program.report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qknorm_onnx.errors import without_controls
from qknorm_onnx.spec.one_line import one_line
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec
from qknorm_onnx.spec.targets import DEFAULT_TARGET


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a graph fixes around an attention, and its spec does not say.

    module: path of the module that it was traced from; "" where the file does not say it.
    has_mask: a mask or bias is an input of the attention. num_keys: past and new ones, where the number is fixed. is_decode:
    there is one query, at the last key.
    """

    has_mask: bool
    num_keys: int | None
    is_decode: bool
    module: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAttention:
    """One attention that is now one node. `target` is what it was lowered to; `source_nodes` are the nodes it replaced.

    query_preparation, key_preparation: where queries and keys are prepared differently, `spec` says nothing of it: each has
    a `QKNormRotary` of its own, or one for each stream that it is joined from.
    """

    name: str
    spec: QKNormSpec
    target: str = DEFAULT_TARGET
    source_nodes: tuple[str, ...] = ()
    note: str = ""  # e.g. why the asked-for target could not serve it, or `unverified` and why
    query_preparation: tuple[QKNormRotarySpec, ...] = ()
    key_preparation: tuple[QKNormRotarySpec, ...] = ()
    surroundings: Surroundings | None = None  # None: not known

    @property
    def line(self) -> str:
        """What it computes, in one line for people."""
        return one_line(self.spec, query=self.query_preparation, key=self.key_preparation)

    def __str__(self) -> str:
        return without_controls(f"{self.name}: {self.line}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declined:
    """QK-Norm attention that was not recognised: why, the node where the walk stopped, and what would make it match."""

    name: str
    reason: str
    node: str
    hint: str

    def __str__(self) -> str:
        return without_controls(f"{self.name}: declined at {self.node}: {self.reason}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """A rewrite whose proof failed. The attention was left as it was."""

    name: str
    reason: str
    max_difference: float

    def __str__(self) -> str:
        return without_controls(f"{self.name}: refused: {self.reason} (largest difference {self.max_difference:.2g})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionReport:
    """All attention of a model. `notes` say what was done to the model around it (mended exports, refused targets), `needs` in
    one line what a runtime must have to load it.
    """

    fused: tuple[FusedAttention, ...] = ()
    declined: tuple[Declined, ...] = ()
    refused: tuple[Refused, ...] = ()
    plain: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    needs: str = ""

    def joined(self, other: FusionReport) -> FusionReport:
        """The entries of both, those of `other` behind; a note that both have stands once."""
        notes = tuple(note for note in other.notes if note not in self.notes)
        return FusionReport(
            fused=self.fused + other.fused,
            declined=self.declined + other.declined,
            refused=self.refused + other.refused,
            plain=self.plain + other.plain,
            notes=self.notes + notes,
        )

    def with_notes(self, notes: Sequence[str]) -> FusionReport:
        """The same with `notes` behind its own."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    @property
    def complete(self) -> bool:
        """Whether there is QK-Norm attention and all of it is fused."""
        return bool(self.fused) and not self.declined and not self.refused

    def summary(self, fused_word: str = "fused") -> str:
        """For example `fused 28 of 28 QK-Norm attentions`; `fused_word` stands for what was done to them."""
        total = len(self.fused) + len(self.declined) + len(self.refused)
        if not total:
            plain = f"; {len(self.plain)} attention(s) without it" if self.plain else ""
            return f"no QK-Norm attention found{plain}"
        return f"{fused_word} {len(self.fused)} of {total} QK-Norm attentions"

    @property
    def absence(self) -> str:
        """What was read and what was not, where no attention is fused, declined or refused."""
        if self.plain:
            names = ", ".join(self.plain[:3]) + (", ..." if len(self.plain) > 3 else "")
            return f"{len(self.plain)} attention(s) were found ({names}), and no norm of their queries or keys was seen"
        return (
            "nothing in this model was seen to be attention, neither a softmax between two products of computed tensors nor an "
            "attention operator that is known; of queries and keys nothing was read"
        )
