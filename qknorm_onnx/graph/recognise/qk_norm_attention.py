"""From a core to a match: both chains read, both preparations made one spec, the masks turned into numbers where they are."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Core
from qknorm_onnx.graph.match.fragments import CacheAppend, Chain, Repeat
from qknorm_onnx.graph.match.located import HEADS_SECOND, Located, Unreadable
from qknorm_onnx.graph.match.qk_norm_match import Plain, Preparation, QKNormMatch, Recognition, Visibility
from qknorm_onnx.graph.recognise.attention.output import has_merged_axes, output_of
from qknorm_onnx.graph.recognise.chains.chain import read_prepared, read_values
from qknorm_onnx.graph.recognise.chains.preparation import PreparedSide, projected, read_side
from qknorm_onnx.graph.recognise.masks.mask import MaskContext
from qknorm_onnx.graph.recognise.masks.visibility import read_visibility
from qknorm_onnx.graph.recognise.rotaries.tables import same_table
from qknorm_onnx.graph.recognise.unread.lookalikes import norm_behind
from qknorm_onnx.graph.recognise.unread.unread import divided_by_norms
from qknorm_onnx.graph.symbolic.terms import Linear
from qknorm_onnx.graph.walk.naming import attention_name
from qknorm_onnx.graph.walk.readings import record
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec, SpecError, normalises, rotates

BUFFER_HINT = (
    "hide key j from the new token i where j > earlier entries + i, by comparing positions in the graph (transformers' masks "
    "do); a mask that the caller gives cannot be seen to do so"
)


def recognise_attention(core: Core, masks: MaskContext) -> Recognition:
    """What the attention around `core` is: a match, plain attention, or QK-Norm attention that cannot be rewritten."""
    name = attention_name(core)
    chains = read_prepared(core.query, core.query_steps), read_prepared(core.key, core.key_steps)
    problem = next((found for chain in chains if (found := _unread_norm(chain)) is not None), None)
    if not any(chain.normalised for chain in chains):
        return problem or divided_by_norms(core.node) or Plain(name)
    if problem is not None:
        return problem
    if core.refusal is not None:
        return core.refusal
    values = read_values(core.value)
    shared = _are_prepared_keys(values, chains[1])
    query, key = read_side(chains[0], "query"), read_side(chains[1], "key", keys_as_values=shared)
    if isinstance(query, Unreadable) or isinstance(key, Unreadable):
        return query if isinstance(query, Unreadable) else key  # type: ignore[return-value]
    return _compose(name, core, query, key, values, masks, keys_as_values=shared)


def _are_prepared_keys(values: Chain, keys: Chain) -> bool:
    """Whether v is k itself, norm and rotary embedding included."""
    steps = [step.source.value for step in keys.steps if not isinstance(step.fragment, Repeat)]
    prepared: set[ir.Value] = set()
    for item in keys.path:
        if item.value in steps:
            break
        prepared.add(item.value)
    return any(item.value in prepared for item in values.path)


def _unread_norm(chain: Chain) -> Unreadable | None:
    """A chain (or a stream of it) that ends without a norm, although something like one lies further back."""
    if chain.norm is not None:
        return None
    if chain.streams is not None:
        return next((found for part in chain.streams.chains if (found := _unread_norm(part)) is not None), None)
    found = chain.stop or norm_behind(chain.path[-1].value)
    if found is not None and chain.stop is None:
        record(norm_behind, chain.path[-1], "declined", "unread", why=found.reason)
    return found


def _compose(
    name: str,
    core: Core,
    query: PreparedSide,
    key: PreparedSide,
    values: Chain,
    masks: MaskContext,
    *,
    keys_as_values: bool,
) -> Recognition:
    problem = _unlike_heads(core, query, key, values)
    if problem is not None:
        return problem
    caches = _caches(core, key, values)
    if isinstance(caches, Unreadable):
        return caches
    first = caches[0].first if caches is not None else None
    visibility = read_visibility(core, masks, cached=caches is not None, first=first)
    if first is not None and not _hides_the_rest(core, visibility, first):
        return Unreadable(
            "it reads a buffer of which no mask is seen to hide what lies behind the new keys", core.node, BUFFER_HINT
        )
    apart = keys_as_values or not _one_preparation(query.preparation, key.preparation)
    try:
        spec = _spec(core, query, key, visibility, apart=apart)
    except SpecError as error:
        return Unreadable(f"its parts contradict each other: {error}", core.node, "change what the message names")
    return QKNormMatch(
        name=name,
        core=core,
        spec=spec,
        query=_with_score_factors(query.preparation, core),
        key=key.preparation,
        value=None if keys_as_values else projected(values, values.steps),
        visibility=visibility,
        caches=caches,
        prepared_apart=apart,
    )


def _unlike_heads(core: Core, query: PreparedSide, key: PreparedSide, values: Chain) -> Unreadable | None:
    """A refusal where heads do not go together, or are not to be told from other things in the output."""
    value_heads = projected(values, values.steps).static("H")
    if query.repeat != 1 or value_heads != key.preparation.spec.num_heads:
        return Unreadable(
            "its queries, keys and values are repeated differently", core.node, "repeat the heads of keys and values alike"
        )
    if has_merged_axes(output_of(core.output)):
        reason = "its output keeps batch and heads, or heads and positions, in one axis"
        return Unreadable(
            reason, core.node, "reshape the output to (batch, heads, positions, values) behind the product with the values"
        )
    return None


def _hides_the_rest(core: Core, visibility: Visibility, first: Linear) -> bool:
    """Whether queries from position `first` of a buffer on see nothing that lies behind the keys written with them."""
    return visibility.is_causal and (not core.is_causal or first == Linear())


def _caches(core: Core, key: PreparedSide, values: Chain) -> tuple[CacheAppend, CacheAppend] | Unreadable | None:
    """The caches of keys and values: both or none. Those of the core's own operator stand behind all preparation."""
    if core.past is not None:
        return _operator_caches(core, key)
    if core.presents is not None and any(value.uses() or value.is_graph_output() for value in core.presents):
        reason = "it returns its keys and values as a new cache without reading an old one"
        return Unreadable(reason, core.node, "give it an empty past, or join keys with the past in front of it")
    value_cache = next((fragment for fragment in values.fragments() if isinstance(fragment, CacheAppend)), None)
    if key.cache is None and value_cache is None:
        return None
    if key.cache is None or value_cache is None:
        hint = "cache both, or none; keys are cached behind their norm and rotary embedding, not in front of them"
        return Unreadable("only one of its keys and values is seen to have a cache", core.node, hint)
    if key.cache.first != value_cache.first:
        hint = "write new keys and new values at the same positions"
        return Unreadable("its keys and values are not cached in the same places", core.node, hint)
    return key.cache, value_cache


def _operator_caches(core: Core, key: PreparedSide) -> tuple[CacheAppend, CacheAppend] | Unreadable:
    """past and present of an attention operator; without outputs for them, nobody reads what would be cached."""
    assert core.past is not None
    if core.presents is None:
        return Unreadable("it reads cached keys, but does not return them", core.node, "return present keys and values too")
    if key.repeat != 1 or key.cache is not None:
        return Unreadable(
            "its cache holds keys that were already repeated", core.node, "cache keys before their heads are repeated"
        )
    sizes = {**core.key.sizes, "S": ir.SymbolicDim(None)}
    pasts = [Located(value, HEADS_SECOND, sizes) for value in core.past]
    presents = [Located(value, HEADS_SECOND, sizes) for value in core.presents]
    key_cache, value_cache = (CacheAppend(*pair, core.node) for pair in zip(pasts, presents, strict=True))
    return key_cache, value_cache


def _one_preparation(query: Preparation, key: Preparation) -> bool:
    """Whether one node can prepare both: same kind of statistics, same rotary with the same tables."""
    q, k = query.spec, key.spec
    if normalises(q.kind) and normalises(k.kind):
        one_axis = q.axis == k.axis or 1 in (q.num_heads, k.num_heads)
        if not one_axis or (q.groups, q.epsilon_mode, q.weight_order) != (k.groups, k.epsilon_mode, k.weight_order):
            return False
        if q.rotary.order != k.rotary.order:
            return False
    if (query.rotary is None) != (key.rotary is None):
        return False
    if query.rotary is None or key.rotary is None:
        return True
    same_pairs = dataclasses.replace(q.rotary, order="after_norm") == dataclasses.replace(k.rotary, order="after_norm")
    cos, sin = (query.rotary.cos, key.rotary.cos), (query.rotary.sin, key.rotary.sin)
    return same_pairs and same_table(*cos) and same_table(*sin)


def _spec(core: Core, query: PreparedSide, key: PreparedSide, visibility: Visibility, *, apart: bool) -> QKNormSpec:
    heads = query.preparation.spec.num_heads
    attention = AttentionSpec(
        q_num_heads=heads,
        kv_num_heads=key.preparation.spec.num_heads,
        scale=snapped(core.scale * query.number * key.number),
        softcap=core.softcap,
        logit_clamp=core.logit_clamp,
        is_causal=visibility.is_causal,
        left_window_size=visibility.left_window_size,
        right_window_size=visibility.right_window_size,
    )
    if apart:
        return QKNormSpec(attention=attention)
    q, k = query.preparation.spec, key.preparation.spec
    leading = q if normalises(q.kind) and (q.num_heads > 1 or not normalises(k.kind)) else k
    norm = NormSpec(
        q_kind=q.kind,
        k_kind=k.kind,
        axis=leading.axis,
        groups=leading.groups,
        q_epsilon=q.epsilon,
        k_epsilon=k.epsilon,
        epsilon_mode=leading.epsilon_mode,
        weight_order=leading.weight_order,
    )
    return QKNormSpec(attention=attention, norm=norm, rotary=leading.rotary if rotates(leading.rotary.order) else RotarySpec())


def _with_score_factors(query: Preparation, core: Core) -> Preparation:
    """Factors of the logits that are constant along the keys, as factors of the queries."""
    scale = dataclasses.replace(query.scale, factors=(*query.scale.factors, *core.factors))
    return dataclasses.replace(query, scale=scale)


def snapped(scale: float) -> float:
    """A scale that was split into float32 roots, as the root of an integer or its reciprocal where it is one to 1e-6."""
    if scale <= 0.0 or not math.isfinite(scale):
        return scale
    for nearest in (1 / math.sqrt(max(1, round(scale**-2))), math.sqrt(max(1, round(scale**2))), 1 / max(1, round(1 / scale))):
        if abs(scale / nearest - 1) < 1e-6:
            return nearest
    return scale
