"""What one QK-Norm attention means: frozen values that everything else reads.

The vocabulary is ONNX's own where ONNX has one (Attention-25, RMSNormalization-23, RotaryEmbedding-23). Each field that
becomes an ONNX attribute says so in its metadata; `attributes.py`, the C++ header and the documentation are generated
from it. `reference.py` says what each field computes.

Floats are rounded to float32 on construction, as ONNX attributes are: a spec read back is equal to the one that was written.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final, Literal, assert_never, get_args

import numpy as np

NormKind = Literal["none", "rms", "layer", "l2"]
NormAxis = Literal["head", "hidden"]
EpsilonMode = Literal["inside_sqrt", "clamp", "outside_sqrt"]
NormWeightOrder = Literal["before_cast", "after_cast"]
RotaryOrder = Literal["none", "after_norm", "before_norm"]
SoftmaxPrecision = Literal["float32", "float64", "float16", "bfloat16"]

UNLIMITED_WINDOW: Final = -1
LARGEST_INTEGER: Final = 1 << 40  # sums and products of a few such sizes stay inside int64


def normalises(kind: NormKind) -> bool:
    """Whether there is a norm."""
    match kind:
        case "none":
            return False
        case "rms" | "layer" | "l2":
            return True
        case _:
            assert_never(kind)


def spans_heads(axis: NormAxis) -> bool:
    """Whether a normalised row holds all heads of a token, not one."""
    match axis:
        case "head":
            return False
        case "hidden":
            return True
        case _:
            assert_never(axis)


def rounds_before_weight(order: NormWeightOrder) -> bool:
    """Whether a normalised row is rounded to the tensor's type before its gain multiplies."""
    match order:
        case "before_cast":
            return False
        case "after_cast":
            return True
        case _:
            assert_never(order)


def rotates_before_norm(order: RotaryOrder) -> bool:
    """Whether the norm gets rotated rows."""
    match order:
        case "none" | "after_norm":
            return False
        case "before_norm":
            return True
        case _:
            assert_never(order)


def rotates_after_norm(order: RotaryOrder) -> bool:
    """Whether what the norm (if there is one) makes is rotated."""
    match order:
        case "none" | "before_norm":
            return False
        case "after_norm":
            return True
        case _:
            assert_never(order)


def rotates(order: RotaryOrder) -> bool:
    """Whether there is a rotary embedding, and so tables."""
    return rotates_before_norm(order) or rotates_after_norm(order)


def needs_float64(precision: SoftmaxPrecision) -> bool:
    """Whether logits and softmax need float64 in a node of a narrower type; float32 is always there."""
    match precision:
        case "float64":
            return True
        case "float32" | "float16" | "bfloat16":
            return False
        case _:
            assert_never(precision)


class SpecError(ValueError):
    """A spec, or the inputs given for it, contradict each other. The message says what to change."""


def attribute(onnx_name: str, doc: str, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that is stored as the ONNX attribute `onnx_name`."""
    return dataclasses.field(default=default, metadata={"onnx_name": onnx_name, "doc": doc})


def round_to_float32(value: float) -> float:
    """The float32 nearest to `value`, as a Python float: the only floats an ONNX attribute can hold."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)


def _epsilon_inside_refusal(kind: NormKind) -> str:
    """Why no epsilon can be under the root of this kind; empty where one can."""
    match kind:
        case "none" | "rms" | "layer":
            return ""
        case "l2":
            return (
                "x / sqrt(sum(x^2) + eps) has one spelling: kind 'rms' with eps / D and a weight of 1 / sqrt(D); "
                "use epsilon_mode 'clamp' or 'outside_sqrt' for kind 'l2'"
            )
        case _:
            assert_never(kind)


def _check_epsilon_mode(mode: EpsilonMode, kinds: tuple[NormKind, ...]) -> None:
    match mode:
        case "inside_sqrt":
            for kind in kinds:
                reason = _epsilon_inside_refusal(kind)
                _require(not reason, reason)
        case "clamp" | "outside_sqrt":
            pass
        case _:
            assert_never(mode)


def _require_choice(owner: str, field: str, value: object, choices: Any) -> None:
    allowed = get_args(choices)
    _require(value in allowed, f"{owner}.{field} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def _round_fields(instance: object, *names: str) -> None:
    for name in names:
        value = float(getattr(instance, name))
        rounded = round_to_float32(value)
        _require(math.isfinite(rounded), f"{type(instance).__name__}.{name} is {value}; it must be a finite float32")
        object.__setattr__(instance, name, rounded)


def _require_bounded(instance: object, *names: str) -> None:
    for name in (name for name in names if abs(getattr(instance, name)) > LARGEST_INTEGER):
        raise SpecError(f"{type(instance).__name__}.{name} is {getattr(instance, name)}; beyond 2^40 is out of range")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec:
    """How q and k are normalised. x is one row of D values (`head`), of H*D values (`hidden`), or one of their groups.

    | kind | inside_sqrt | clamp | outside_sqrt |
    |---|---|---|---|
    | rms | x / sqrt(mean(x^2) + eps) | x / max(sqrt(mean(x^2)), eps) | x / (sqrt(mean(x^2)) + eps) |
    | layer | as rms, with x - mean(x) for x | | |
    | l2 | refused: it is `rms` with eps / D and a weight of 1 / sqrt(D) | x / max(norm(x), eps) | x / (norm(x) + eps) |

    An all-zero (for `layer`: constant) row gives zeros in every mode, also where eps is 0.
    """

    q_kind: NormKind = attribute("q_norm", "norm of the queries", default="none")
    k_kind: NormKind = attribute("k_norm", "norm of the keys", default="none")
    axis: NormAxis = attribute(
        "norm_axis", "`head`: over the D values of a head; `hidden`: over all heads, before the head split", default="head"
    )
    groups: int = attribute("norm_groups", "number of groups of consecutive values with statistics of their own", default=1)
    q_epsilon: float = attribute("q_epsilon", "epsilon of the query norm", default=0.0)
    k_epsilon: float = attribute("k_epsilon", "epsilon of the key norm", default=0.0)
    epsilon_mode: EpsilonMode = attribute(
        "epsilon_mode",
        "where epsilon enters the denominator: under the root, as its lower bound, added to it",
        default="inside_sqrt",
    )
    weight_order: NormWeightOrder = attribute(
        "norm_weight_order",
        "`after_cast`: the normalised row is rounded to the input's type before the weight multiplies; `before_cast`: it is not",
        default="before_cast",
    )

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises SpecError where a value is unknown or two contradict each other, also if it got past the constructor."""
        _require_choice("NormSpec", "q_kind", self.q_kind, NormKind)
        _require_choice("NormSpec", "k_kind", self.k_kind, NormKind)
        _require_choice("NormSpec", "axis", self.axis, NormAxis)
        _require_choice("NormSpec", "epsilon_mode", self.epsilon_mode, EpsilonMode)
        _require_choice("NormSpec", "weight_order", self.weight_order, NormWeightOrder)
        _require_bounded(self, "groups")
        _require(self.groups >= 1, f"NormSpec.groups is {self.groups}; it must be at least 1")
        _round_fields(self, "q_epsilon", "k_epsilon")
        _require(
            self.q_epsilon >= 0 and self.k_epsilon >= 0,
            f"NormSpec epsilons are {self.q_epsilon} and {self.k_epsilon}; they must not be negative",
        )
        _check_epsilon_mode(self.epsilon_mode, (self.q_kind, self.k_kind))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Which values of a head are rotated, in which pairs, and whether before or after the norm.

    With R rotated values of D (R = `embedding_dim`, or D where that is 0), they are x[offset : offset + R], split into
    `sections` blocks of R / sections. Inside a block of r values the pairs are (x[i], x[i + r/2]), or (x[2i], x[2i + 1])
    with `interleaved`: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
    """

    order: RotaryOrder = attribute("rotary_order", "where the rotary embedding is applied", default="none")
    interleaved: bool = attribute("rotary_interleaved", "pairs are neighbours instead of the two halves", default=False)
    embedding_dim: int = attribute("rotary_embedding_dim", "number of rotated values R, 0 for the whole head", default=0)
    offset: int = attribute("rotary_offset", "first rotated value of the head", default=0)
    sections: int = attribute("rotary_sections", "blocks that are rotated each on its own (2-D rotary)", default=1)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises SpecError where a value is unknown or two contradict each other, also if it got past the constructor."""
        _require_choice("RotarySpec", "order", self.order, RotaryOrder)
        _require_bounded(self, "embedding_dim", "offset", "sections")
        _require(self.embedding_dim >= 0, f"RotarySpec.embedding_dim is {self.embedding_dim}; it must not be negative")
        _require(self.offset >= 0, f"RotarySpec.offset is {self.offset}; it must not be negative")
        _require(self.sections >= 1, f"RotarySpec.sections is {self.sections}; it must be at least 1")
        _require(
            self.embedding_dim % (2 * self.sections) == 0,
            f"RotarySpec.embedding_dim {self.embedding_dim} must be a multiple of 2 * sections = {2 * self.sections}",
        )
        _require(
            self.offset == 0 or self.embedding_dim > 0,
            f"RotarySpec.offset {self.offset} needs embedding_dim: the whole head cannot be rotated from an offset",
        )

    def rotated_size(self, head_size: int) -> int:
        """Number of rotated values R of a head of `head_size`; SpecError if they do not fit or do not pair up."""
        size = self.embedding_dim or head_size
        _require(
            self.offset + size <= head_size,
            f"rotary_offset {self.offset} + rotary_embedding_dim {size} exceeds the head size {head_size}",
        )
        _require(
            size % (2 * self.sections) == 0,
            f"{size} rotated values cannot be split into {self.sections} section(s) of pairs: make the head size even "
            "or set rotary_embedding_dim",
        )
        return size


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Heads, logits and visibility. logit = clamp(scale * q.k), then the soft cap, then bias and masks, then softmax."""

    q_num_heads: int = attribute("q_num_heads", "number of query heads")
    kv_num_heads: int = attribute("kv_num_heads", "number of key / value heads; query head h reads h // (q / kv)")
    scale: float = attribute("scale", "factor of the dot product")
    softcap: float = attribute("softcap", "cap * tanh(logit / cap), before the mask; 0 is off", default=0.0)
    logit_clamp: float = attribute("logit_clamp", "logits are clamped to +- this; 0 is off", default=0.0)
    is_causal: bool = attribute("is_causal", "a query at position p sees keys up to p", default=False)
    left_window_size: int = attribute(
        "left_window_size", "a query at p sees keys from p - this; -1 is off", default=UNLIMITED_WINDOW
    )
    right_window_size: int = attribute(
        "right_window_size", "a query at p sees keys up to p + this; -1 is off", default=UNLIMITED_WINDOW
    )
    softmax_precision: SoftmaxPrecision = attribute(
        "softmax_precision", "least precise type that the logits and the softmax are computed in", default="float32"
    )

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises SpecError where a value is unknown or two contradict each other, also if it got past the constructor."""
        _require_bounded(self, "q_num_heads", "kv_num_heads", "left_window_size", "right_window_size")
        _require(self.q_num_heads >= 1, f"q_num_heads is {self.q_num_heads}; it must be at least 1")
        _require(self.kv_num_heads >= 1, f"kv_num_heads is {self.kv_num_heads}; it must be at least 1")
        _require(
            self.q_num_heads % self.kv_num_heads == 0,
            f"q_num_heads {self.q_num_heads} is not a multiple of kv_num_heads {self.kv_num_heads}",
        )
        _round_fields(self, "scale", "softcap", "logit_clamp")
        _require(self.softcap >= 0, f"softcap is {self.softcap}; it must not be negative (0 is off)")
        _require(self.logit_clamp >= 0, f"logit_clamp is {self.logit_clamp}; it must not be negative (0 is off)")
        for name in ("left_window_size", "right_window_size"):
            size = getattr(self, name)
            _require(size >= UNLIMITED_WINDOW, f"{name} is {size}; it must be at least 0, or -1 for no window")
        _require_choice("AttentionSpec", "softmax_precision", self.softmax_precision, SoftmaxPrecision)

    @property
    def group_size(self) -> int:
        """Query heads that share one key / value head."""
        return self.q_num_heads // self.kv_num_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNormSpec:
    """The meaning of one `ai.qknorm::QKNormAttention` node. Which optional inputs it has is the node's own affair."""

    attention: AttentionSpec
    norm: NormSpec = dataclasses.field(default_factory=NormSpec)
    rotary: RotarySpec = dataclasses.field(default_factory=RotarySpec)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises SpecError where a value is unknown or two contradict each other, also if it got past the constructor."""
        self.attention.check()
        self.norm.check()
        self.rotary.check()
        _require(
            self.has_norm or not rotates_before_norm(self.rotary.order),
            "rotary order 'before_norm' needs a norm; without one use 'after_norm'",
        )
        _require(
            not rotates_before_norm(self.rotary.order) or not spans_heads(self.norm.axis),
            "rotary order 'before_norm' needs norm axis 'head': a hidden norm runs before the head split",
        )

    @property
    def has_norm(self) -> bool:
        """Whether q or k is normalised by this node itself."""
        return normalises(self.norm.q_kind) or normalises(self.norm.k_kind)

    @property
    def query_preparation(self) -> QKNormRotarySpec:
        """What happens to the queries before the dot product, as the spec of a `QKNormRotary` node."""
        return self._preparation(self.norm.q_kind, self.norm.q_epsilon, self.attention.q_num_heads)

    @property
    def key_preparation(self) -> QKNormRotarySpec:
        """What happens to the keys before the dot product, as the spec of a `QKNormRotary` node."""
        return self._preparation(self.norm.k_kind, self.norm.k_epsilon, self.attention.kv_num_heads)

    def _preparation(self, kind: NormKind, epsilon: float, num_heads: int) -> QKNormRotarySpec:
        # One side may be un-normed (k-only norms): its rotary then has no order to speak of.
        self.check()
        normed = normalises(kind)
        order: RotaryOrder = self.rotary.order if normed or not rotates(self.rotary.order) else "after_norm"
        mode: EpsilonMode = self.norm.epsilon_mode if normed else "inside_sqrt"
        return QKNormRotarySpec(
            num_heads=num_heads,
            kind=kind,
            epsilon=epsilon,
            axis=self.norm.axis,
            groups=self.norm.groups,
            epsilon_mode=mode,
            weight_order=self.norm.weight_order,
            rotary=dataclasses.replace(self.rotary, order=order),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNormRotarySpec:
    """The meaning of one `ai.qknorm::QKNormRotary` node: the norm and rotary of one tensor of heads. Fields as in `NormSpec`."""

    num_heads: int = attribute("num_heads", "number of heads of x")
    kind: NormKind = attribute("norm", "norm of x", default="none")
    epsilon: float = attribute("epsilon", "epsilon of the norm", default=0.0)
    axis: NormAxis = attribute("norm_axis", "as in QKNormAttention", default="head")
    groups: int = attribute("norm_groups", "as in QKNormAttention", default=1)
    epsilon_mode: EpsilonMode = attribute("epsilon_mode", "as in QKNormAttention", default="inside_sqrt")
    weight_order: NormWeightOrder = attribute("norm_weight_order", "as in QKNormAttention", default="before_cast")
    rotary: RotarySpec = dataclasses.field(default_factory=RotarySpec)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises SpecError where a value is unknown or two contradict each other, also if it got past the constructor."""
        self.rotary.check()
        _require_bounded(self, "num_heads")
        _require(self.num_heads >= 1, f"num_heads is {self.num_heads}; it must be at least 1")
        norm = NormSpec(
            q_kind=self.kind,
            k_kind=self.kind,
            axis=self.axis,
            groups=self.groups,
            q_epsilon=self.epsilon,
            k_epsilon=self.epsilon,
            epsilon_mode=self.epsilon_mode,
            weight_order=self.weight_order,
        )
        object.__setattr__(self, "epsilon", norm.q_epsilon)
