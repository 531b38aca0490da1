"""The chain of q or k as one preparation: norm, weight, bias, rotary, and what is left for the logits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import CacheAppend, Chain, Factor, Norm, Offset, Repeat, Rotary, Step, Streams
from qknorm_onnx.graph.match.located import PROJECTED, Layout, Located, Unreadable
from qknorm_onnx.graph.match.qk_norm_match import Gain, Preparation, Role
from qknorm_onnx.graph.recognise.unread.lookalikes import ROUNDED
from qknorm_onnx.graph.walk.constants import constant, number, producer
from qknorm_onnx.graph.walk.head_groups import has_split_heads
from qknorm_onnx.graph.walk.layout import letters_of
from qknorm_onnx.spec.qk_norm_spec import NormWeightOrder, QKNormRotarySpec, RotaryOrder, RotarySpec, rotates_after_norm

FragmentT = TypeVar("FragmentT", CacheAppend, Norm, Offset, Repeat, Rotary, Streams)
QUERIES_HINT = "multiply the queries instead of the keys, last, or make it the weight of the norm"
SPLIT_HINT = "normalise and scale while the heads are one axis, and split them in two for the product"
STREAMS_HINT = "join the streams first, then repeat, cache and scale all of them alike"
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedSide:
    """A preparation, the number that its factors put on the logits, and what belongs to the attention itself."""

    preparation: Preparation
    number: float
    repeat: int
    cache: CacheAppend | None
    norm: Norm | None


def read_side(chain: Chain, role: Role, *, keys_as_values: bool = False) -> PreparedSide | Unreadable:
    """The preparation that `chain` spells. With `keys_as_values` all factors stay in the keys, because others read them."""
    steps = _relevant(chain)
    source = projected(chain, steps)
    problem = _misplaced(steps, role) or _unfit(source, chain.start) or _rounded(chain, source)
    if problem is not None:
        return problem
    factors = _sort_factors(steps, role, keep_in_weight=keys_as_values)
    parts = _parts(_first(steps, Streams), role)
    if isinstance(factors, Unreadable) or isinstance(parts, Unreadable):
        return factors if isinstance(factors, Unreadable) else parts  # type: ignore[return-value]
    weight, scale, factor = factors
    norm, bias, repeat = _first(steps, Norm), _first(steps, Offset), _first(steps, Repeat)
    if norm is not None:
        weight = Gain(weight.factors, weight.number * norm.weight_factor)
    elif not weight.trivial:
        reason = "its keys are multiplied by a factor, but not normalised"
        return Unreadable(reason, chain.start.value.producer(), QUERIES_HINT)
    preparation = Preparation(
        source=source,
        spec=_spec(steps, weight, source),
        weight=weight,
        bias=bias.parameter if bias is not None else None,
        scale=scale,
        rotary=_first(steps, Rotary),
        parts=tuple(part.preparation for part in parts),
    )
    return PreparedSide(
        preparation=preparation,
        number=factor * (parts[0].number if parts else 1.0),
        repeat=repeat.count if repeat is not None else 1,
        cache=_first(steps, CacheAppend),
        norm=norm,
    )


def _unfit(source: Located, start: Located) -> Unreadable | None:
    """Why the heads cannot be taken out of `source`, from which `start` is made."""
    place = source.value.producer() or start.value.producer()
    if source.static("H") is None or source.static("D") is None:
        return Unreadable("the number or the size of its heads is not fixed", place, "export with fixed heads")
    if any(len(letters) > 1 and any(letter.isdigit() for letter in letters) for letters in source.layout):
        reason = "it takes its heads out of an axis that was merged with others"
        return Unreadable(reason, place, "split packed projections along an axis of their own, or with Split")
    if has_split_heads(source.layout) and not _are_neighbours(source.layout):
        reason = "its heads are two axes that are apart where it is projected"
        return Unreadable(reason, place, "project to (batch, positions, heads * values), and split the heads there")
    if "BH" in source.layout:
        reason = "its batch and its heads are one axis already where it is projected"
        return Unreadable(reason, place, "project to (batch, positions, heads * values), and split the heads there")
    return None


def _rounded(chain: Chain, source: Located) -> Unreadable | None:
    """A refusal where a wide model rounds to a half type on the way; a half model may well compute its attention wider."""
    path = chain.path[: 1 + next(index for index, item in enumerate(chain.path) if item is source)]
    if path[0].value.dtype in NARROW or source.value.dtype in NARROW or _is_projected_from_half(source.value):
        return None
    for item in path:
        value: ir.Value | None = item.value
        while value is not None and (node := producer(value, *_MOVES)) is not None and value is not source.value:
            if value.dtype in NARROW:
                return Unreadable(ROUNDED[0], node, ROUNDED[1])
            value = node.inputs[0]
    return None


def _is_projected_from_half(value: ir.Value) -> bool:
    """Whether a projection widens what it reads: a half model on a provider without kernels for its type, roundings between.

    Its weight was widened too: each of its values is one of float16.
    """
    for _ in range(PROJECTION_STEPS):
        node = value.producer()
        if node is None or node.op_type not in (*_MOVES, "MatMul", "Gemm", "Add"):
            return False
        operands = [item for item in node.inputs if item is not None]
        computed = [item for item in operands if item.const_value is None and constant(item) is None]
        if node.op_type in ("MatMul", "Gemm"):
            return any(map(_is_half, operands))
        if not computed:
            return False
        value = computed[0]
    return False


def _is_half(value: ir.Value) -> bool:
    """Whether `value` was widened, or is a weight that float16 holds as it is."""
    cast = producer(value, "Cast")
    if cast is not None and cast.inputs[0] is not None and cast.inputs[0].dtype in NARROW:
        return True
    tensor = value.const_value
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return False
    array = tensor.numpy()
    with np.errstate(over="ignore"):
        return bool(array.size) and np.array_equal(array, array.astype(np.float16).astype(np.float32))


PROJECTION_STEPS = 8

# What a rotary embedding passes behind its sum, before it is known for one.
_MOVES = ("Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze")


def _are_neighbours(layout: Layout) -> bool:
    """Whether K and G are two axes side by side, so that they are one without moving anything."""
    return any(pair == ("K", "G") for pair in itertools.pairwise(layout))


def _spec(steps: Sequence[Step], weight: Gain, source: Located) -> QKNormRotarySpec:
    heads, norm, rotary = source.static("H"), _first(steps, Norm), _first(steps, Rotary)
    assert heads is not None, "checked by _unfit"
    turned = _rotary_spec(rotary, rotary_order(steps))
    if norm is None:
        return QKNormRotarySpec(num_heads=heads, rotary=turned)
    return QKNormRotarySpec(
        num_heads=heads,
        kind=norm.kind,
        epsilon=norm.epsilon,
        axis=norm.axis,
        groups=norm.groups,
        epsilon_mode=norm.mode,
        weight_order=_weight_order(norm, weight, source),
        rotary=turned,
    )


def _parts(streams: Streams | None, role: Role) -> tuple[PreparedSide, ...] | Unreadable:
    """The streams' own preparations; numbers in them must be equal, to become the scale."""
    if streams is None:
        return ()
    parts: list[PreparedSide] = []
    for chain in streams.chains:
        part = read_side(chain, role)
        if isinstance(part, Unreadable):
            return part
        if part.repeat != 1 or part.cache is not None or not part.preparation.scale.trivial:
            return Unreadable("its streams are repeated, cached or scaled each on its own", streams.node, STREAMS_HINT)
        parts.append(part)
    if len({part.number for part in parts}) > 1:
        return Unreadable("its streams are scaled differently", streams.node, STREAMS_HINT)
    return tuple(parts)


def _relevant(chain: Chain) -> tuple[Step, ...]:
    """The steps that belong to the attention: up to the norm and a rotary behind it, or without a norm up to the first offset."""
    kinds = [type(step.fragment) for step in chain.steps]
    if Streams in kinds:
        return chain.steps
    if Norm in kinds:
        end = kinds.index(Norm) + 1
        if end < len(kinds) and Rotary not in kinds[:end] and Rotary in kinds[end:]:
            end = kinds.index(Rotary) + 1
        return chain.steps[:end]
    end = kinds.index(Offset) if Offset in kinds else len(kinds)
    if Rotary in kinds[:end]:  # factors in front of a rotary embedding without a norm are somebody else's
        end = max(kinds.index(kind) for kind in (Rotary, Repeat, CacheAppend) if kind in kinds[:end]) + 1
    return chain.steps[:end]


def projected(chain: Chain, steps: Sequence[Step]) -> Located:
    """What the steps are applied to, taken as far back as only layout operators lie between, if it is (B, S, H*D) there.

    Where batch and heads are one axis, or heads two, it is taken from before they were so.
    """
    source = steps[-1].source if steps else chain.start
    begin = next(index for index, item in enumerate(chain.path) if item is source)
    others = {id(step.source) for step in chain.steps[len(steps) :]}
    best = source
    for item in chain.path[begin:]:
        if id(item) in others:
            break
        if item.layout == PROJECTED or "BH" in best.layout or has_split_heads(best.layout):
            best = item
    return best


def rotary_order(steps: Sequence[Step]) -> RotaryOrder:
    """Where the rotary embedding stands."""
    kinds = [type(step.fragment) for step in steps]
    if Rotary not in kinds:
        return "none"
    if Norm in kinds and kinds.index(Norm) < kinds.index(Rotary):
        return "before_norm"
    return "after_norm"


def _first(steps: Sequence[Step], kind: type[FragmentT]) -> FragmentT | None:
    return next((step.fragment for step in steps if isinstance(step.fragment, kind)), None)


def _misplaced(steps: Sequence[Step], role: Role) -> Unreadable | None:
    """Fragments in an order that no spec can express."""
    kinds = [type(step.fragment) for step in steps]
    for kind, name in ((Repeat, "repeated"), (CacheAppend, "appended to a cache"), (Offset, "shifted")):
        if kinds.count(kind) > 1:
            return Unreadable(f"its {role} is {name} twice", steps[0].source.value.producer(), "make it one step")
    if Offset in kinds and Rotary in kinds and Norm in kinds and kinds.index(Offset) < kinds.index(Rotary) < kinds.index(Norm):
        offset = steps[kinds.index(Offset)].fragment
        assert isinstance(offset, Offset)
        reason = f"something is added to its {role} after the rotary embedding"
        return Unreadable(reason, offset.node, "add it before the rotary embedding, as the bias of the norm")
    split = next((item for step in steps if isinstance(item := step.fragment, Factor | Offset) and _is_split(item)), None)
    if split is not None:
        return Unreadable(f"its {role} has a weight or bias for each head, and heads as two axes", split.node, SPLIT_HINT)
    prepared = [index for index, kind in enumerate(kinds) if kind in (Norm, Rotary)]
    if CacheAppend in kinds and prepared and min(prepared) < kinds.index(CacheAppend):
        append = steps[kinds.index(CacheAppend)].fragment
        assert isinstance(append, CacheAppend)
        reason = "its cache holds keys from before the norm or the rotary embedding"
        return Unreadable(reason, append.node, "append keys to the cache after their norm and rotary embedding")
    return None


def _is_split(item: Factor | Offset) -> bool:
    return has_split_heads(item.parameter.layout)


def _sort_factors(steps: Sequence[Step], role: Role, *, keep_in_weight: bool) -> tuple[Gain, Gain, float] | Unreadable:
    """The factors as (weight of the norm, factor of the queries, number for the logits)."""
    order = rotary_order(steps)
    kinds = [type(step.fragment) for step in steps]
    after_cache = kinds.index(CacheAppend) if CacheAppend in kinds else len(kinds)
    weight: list[Factor] = []
    scale: list[Factor] = []
    total, weight_number = 1.0, 1.0
    for index, step in enumerate(steps):
        factor = step.fragment
        if not isinstance(factor, Factor):
            continue
        value = number(factor.parameter.value)
        between = not rotates_after_norm(order) or index > kinds.index(Rotary)
        before_bias = Offset in kinds and index > kinds.index(Offset)
        stored = before_bias or index > after_cache or keep_in_weight
        if value is not None and value != 0.0:
            if stored and Offset in kinds[index:]:
                reason = f"its {role} is scaled after a bias was added, and kept so in a cache"
                return Unreadable(reason, factor.node, QUERIES_HINT)
            value = 1.0 / value if factor.inverse else value
            weight_number, total = (weight_number * value, total) if stored else (weight_number, total * value)
            continue
        place = _place(factor, role, normalised=Norm in kinds, between=between, shifted=Offset in kinds[index:])
        if isinstance(place, Unreadable):
            return place
        (weight if place == "weight" else scale).append(factor)
    return Gain(tuple(weight), weight_number), Gain(tuple(scale)), total


def _place(factor: Factor, role: Role, *, normalised: bool, between: bool, shifted: bool) -> str | Unreadable:
    """Whether a tensor is part of the norm's weight or a factor of the finished queries."""
    letters = set(letters_of(factor.parameter.layout))
    if letters & set("0123456789"):
        reason = "it is multiplied by a factor that is not the same for all attentions of the tensor"
        return Unreadable(reason, factor.node, "split packed queries and keys before they are scaled")
    if role == "query" and (letters & {"B", "S"} or not normalised):
        return "scale"
    if letters & {"B", "S"}:
        reason = "its keys are multiplied by a factor of their own for each position"
        return Unreadable(reason, factor.node, QUERIES_HINT)
    per_value = "D" in letters
    if normalised and not shifted and (between or not per_value) and (per_value or role == "key"):
        return "weight"
    if role == "query":
        return "scale"
    if not normalised:
        return Unreadable("its keys are multiplied by a tensor, but not normalised", factor.node, QUERIES_HINT)
    reason = "its keys are multiplied by a tensor after their rotary embedding or bias"
    return Unreadable(reason, factor.node, QUERIES_HINT)


def _weight_order(norm: Norm | None, weight: Gain, source: Located) -> NormWeightOrder:
    """Whether x is rounded to the model's type before the weight multiplies; a wide type does not show it."""
    if norm is None or source.value.dtype not in NARROW or not weight.factors:
        return "before_cast"
    node = weight.factors[-1].node
    if node is None or node.op_type == "LayerNormalization":
        return "before_cast"
    return "after_cast" if node.outputs[0].dtype in NARROW else "before_cast"


def _rotary_spec(rotary: Rotary | None, order: RotaryOrder) -> RotarySpec:
    if rotary is None:
        return RotarySpec()
    return RotarySpec(
        order=order,
        interleaved=rotary.interleaved,
        embedding_dim=rotary.size,
        offset=rotary.offset,
        sections=rotary.sections,
    )
