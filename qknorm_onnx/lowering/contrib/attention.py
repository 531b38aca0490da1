"""Cache, softmax and values in one of ONNX Runtime's own operators: GroupQueryAttention or MultiHeadAttention.

What they accept and compute was found by running them (onnxruntime 1.32, CPU) against the float64 reference; their
documentation says less. What is relied on, and what is kept away from them:

- GroupQueryAttention wants heads of a multiple of 8 values, as large for values as for keys, and as many new keys as
  queries. Its window counts the token itself (from 1.24 on). Behind a cache it takes several tokens of several rows only where
  `query_seqlens` says how many are new; one row or one token it takes without, behind a cache with a length per row too.
- With a cache MultiHeadAttention writes its result through the present outputs: they are asked for even if nobody reads
  them. Its `unidirectional` counts from the last key, where a spec counts from the first: a mask says it instead.
- Neither broadcasts the lengths of a bias. A row that sees nothing is NaN in the one, and in older versions of the other.
- GroupQueryAttention divides by zero, and ends the process, where the batch is empty. Before 1.26 it writes behind a
  fixed-size cache where a length is too large: they are looked at in front of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_attention import Mask
from qknorm_onnx.graph.canonical.body_builder import BodyBuilder, Dim, RuntimeSize
from qknorm_onnx.graph.canonical.body_cache import count, entries_after, never_from_the_end
from qknorm_onnx.graph.canonical.body_signature import BodySignature
from qknorm_onnx.graph.canonical.function_body import Inputs, head_size_of, precision_of
from qknorm_onnx.graph.onnxruntime_release import CONTRIB_DOMAIN, GROUPED_ATTRIBUTES, GROUPED_INPUTS, MULTI_BIAS_SINCE
from qknorm_onnx.lowering.emit.head_layout import HeadTensor, same_size
from qknorm_onnx.lowering.emit.target import LoweringRequest, RefusedLoweringError
from qknorm_onnx.lowering.emit.whole_mask import whole_mask, without_empty_rows
from qknorm_onnx.spec.qk_norm_spec import UNLIMITED_WINDOW, AttentionSpec, QKNormSpec, rotates

HEAD_MULTIPLE: Final = 8
_HALF: Final = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

# Places of GroupQueryAttention's inputs behind query, key, value, past_key, past_value.
_SEQLENS, _TOTAL, COS, SIN, _BIAS, _SINK, Q_WEIGHT, K_WEIGHT, _NEW = 5, 6, 7, 8, 10, 11, 14, 15, 16

_WINDOW: Final = "local_window_size that counts the token itself"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContribCore:
    """The operator that serves an attention.

    dtype: the type it computes its operands in.
    causal: whether causality (and with it the left window) is the operator's own; else the mask says both.
    """

    operator: Literal["GroupQueryAttention", "MultiHeadAttention"]
    dtype: ir.DataType
    causal: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormInCore:
    """What GroupQueryAttention does to q and k itself: inputs by their place, and attributes."""

    inputs: dict[int, ir.Value]
    attributes: Mapping[str, Any]


def is_causal(spec: AttentionSpec) -> bool:
    """Whether a query sees no key behind its own position."""
    return spec.is_causal or spec.right_window_size == 0


def choose_core(body: BodyBuilder, request: LoweringRequest) -> ContribCore:
    """The operator for the attention of a `QKNormAttention`. Raises RefusedLoweringError where neither fits."""
    assert isinstance(request.spec, QKNormSpec), "a rotary node has no attention"
    spec, signature = request.spec.attention, request.signature
    precision = precision_of(signature, spec)
    if precision.compute == ir.DataType.DOUBLE:
        raise RefusedLoweringError("the contrib operators have no float64")
    if precision.attention == ir.DataType.DOUBLE:
        raise RefusedLoweringError("the contrib operators compute the softmax in float32, and the spec asks for float64")
    if spec.logit_clamp:
        raise RefusedLoweringError("no contrib operator clamps logits")
    sizes = [head_size_of(body, signature, *given) for given in _heads(spec, request.inputs)]
    grouped, multi = _grouped_refusal(request, spec, sizes), _multi_head_refusal(request, spec, sizes)
    if not grouped and (is_causal(spec) or multi):
        dtype = _grouped_dtype(request)
        return ContribCore(operator="GroupQueryAttention", dtype=dtype, causal=is_causal(spec))
    if multi:
        raise RefusedLoweringError(f"{grouped}, and {multi}")
    dtype = precision.io if request.provider == "cuda" else precision.attention
    return ContribCore(operator="MultiHeadAttention", dtype=dtype)


def _grouped_dtype(request: LoweringRequest) -> ir.DataType:
    """The type that GroupQueryAttention computes in.

    On the CPU half-precision caches are read as they are; all else is more exact, and as fast, in float32. So is a bias,
    whose lowest number may not fit into the narrow type.
    """
    io, bias = precision_of(request.signature).io, request.inputs.get("attention_bias")
    as_it_is = io == ir.DataType.FLOAT16 and "past_key" in request.inputs and (bias is None or bias.dtype == ir.DataType.BOOL)
    return io if as_it_is or request.provider == "cuda" else ir.DataType.FLOAT


def _heads(spec: AttentionSpec, inputs: Inputs) -> list[tuple[str, ir.Value, int]]:
    return [("query", inputs["query"], spec.q_num_heads), ("value", inputs["value"], spec.kv_num_heads)]


def _grouped_refusal(request: LoweringRequest, spec: AttentionSpec, sizes: list[Dim]) -> str:
    """Why GroupQueryAttention is not this attention; empty where it is."""
    inputs, causal, size = request.inputs, is_causal(spec), sizes[0]
    if not isinstance(size, int) or size != sizes[1]:
        return "GroupQueryAttention needs key and value heads of one size that is known"
    if size % HEAD_MULTIPLE:
        return f"GroupQueryAttention needs heads of a multiple of {HEAD_MULTIPLE} values, and these have {size}"
    if "query_offset" in inputs:
        return "GroupQueryAttention has no query_offset"
    if not _as_many_keys_as_queries(request):
        return "GroupQueryAttention needs as many new keys as queries, which the shapes do not say"
    if not causal and "past_key" in inputs:
        return "GroupQueryAttention with a cache is causal"
    if request.provider == "cuda":
        return _grouped_refusal_on_cuda(request, spec) or _missing_in_release(request, spec)
    return _missing_in_release(request, spec)


def _missing_in_release(request: LoweringRequest, spec: AttentionSpec) -> str:
    """What the onnxruntime that the file is for does not know of GroupQueryAttention."""
    inputs = request.inputs
    needed = {
        _BIAS: "attention_bias" in inputs or not is_causal(spec),
        _SINK: "head_sink" in inputs,
        _NEW: _needs_query_seqlens(inputs),
    }
    since = dict(GROUPED_INPUTS[place] for place, wanted in needed.items() if wanted)
    since |= {} if is_causal(spec) else {"causal": GROUPED_ATTRIBUTES["causal"]}
    if is_causal(spec) and spec.left_window_size != UNLIMITED_WINDOW:
        since[_WINDOW] = GROUPED_ATTRIBUTES["local_window_size"]
    for name, version in since.items():
        if request.lacks(version):
            first = ".".join(map(str, version))
            return f"GroupQueryAttention of onnxruntime {request.release} has no {name}, which is there from {first} on"
    return ""


def _grouped_refusal_on_cuda(request: LoweringRequest, spec: AttentionSpec) -> str:
    """What the kernel for CUDA lacks, or what nobody has tried there."""
    if precision_of(request.signature).io not in _HALF:
        return "GroupQueryAttention on CUDA has float16 and bfloat16 only"
    if "attention_bias" in request.inputs:
        return "GroupQueryAttention on CUDA is not known to take a mask"
    return "" if is_causal(spec) else "GroupQueryAttention on CUDA is not known to serve attention in both directions"


def _multi_head_refusal(request: LoweringRequest, spec: AttentionSpec, sizes: list[Dim]) -> str:
    """Why MultiHeadAttention is not this attention; empty where it is."""
    inputs = request.inputs
    if spec.group_size != 1:
        return "MultiHeadAttention shares no keys between heads"
    if spec.softcap:
        return "MultiHeadAttention has no soft cap"
    if "head_sink" in inputs:
        return "MultiHeadAttention has no sink"
    if "cache_length" in inputs:
        return "MultiHeadAttention has no fixed-size cache with a length per row"
    if "past_key" in inputs and (sizes[0] != sizes[1] or not isinstance(sizes[0], int)):
        return "MultiHeadAttention with a cache needs key and value heads of one size that is known"
    if request.lacks(MULTI_BIAS_SINCE) and ("attention_bias" in inputs or _hides_by_position(spec)):
        first = ".".join(map(str, MULTI_BIAS_SINCE))
        return f"MultiHeadAttention of onnxruntime {request.release} has no bias that heads share, which is there from {first} on"
    return _multi_head_refusal_on_cuda(request) if request.provider == "cuda" else ""


def _hides_by_position(spec: AttentionSpec) -> bool:
    return spec.is_causal or not spec.left_window_size == spec.right_window_size == UNLIMITED_WINDOW


def _multi_head_refusal_on_cuda(request: LoweringRequest) -> str:
    io, bias = precision_of(request.signature).io, request.inputs.get("attention_bias")
    if io == ir.DataType.BFLOAT16:
        return "MultiHeadAttention on CUDA is not known to have bfloat16"
    if bias is not None and bias.dtype == ir.DataType.FLOAT and io != ir.DataType.FLOAT:
        return "MultiHeadAttention on CUDA takes a bias of the tensors' type, and this one is float32"
    return ""


def _as_many_keys_as_queries(request: LoweringRequest) -> bool:
    """Whether the new keys are known to be as many as the queries; one rotary table for both says it too."""
    assert isinstance(request.spec, QKNormSpec), "a rotary node has no keys"
    if rotates(request.spec.rotary.order):
        return True
    return same_size(request.inputs["query"], request.inputs["key"], axis=1)


def emit_core(
    core: ContribCore,
    query: HeadTensor,
    key: HeadTensor,
    request: LoweringRequest,
    *,
    norm_in_core: NormInCore | None = None,
) -> list[ir.Value]:
    """Y, present_key and present_value, of prepared queries and keys, or of raw ones that the operator itself prepares."""
    assert isinstance(request.spec, QKNormSpec), "a rotary node has no attention"
    body, spec = query.body, request.spec.attention
    inputs, signature = request.inputs, request.signature
    io = precision_of(signature, spec).io
    size = head_size_of(body, signature, "value", inputs["value"], spec.kv_num_heads)
    operands = [body.cast(x, core.dtype) for x in (query.as_flat(), key.as_flat(), inputs["value"])]
    mask = Mask()
    if not core.causal or "attention_bias" in inputs:
        mask = whole_mask(body, spec, inputs, signature, dtype=core.dtype, four_axes=True)
    past = [body.cast(inputs[name], core.dtype) if name in inputs else None for name in ("past_key", "past_value")]
    if core.operator == "GroupQueryAttention":
        outputs = _grouped(body, core, spec, [*operands, *past], mask, request, norm_in_core)
    else:
        outputs = _multi_head(body, spec, [*operands, None, None, mask.added, *past], signature)
    y = without_empty_rows(HeadTensor(body, spec.q_num_heads, size, "y", flat=outputs[0]), mask)
    return [body.cast(value, io) for value in (y.as_flat(), *outputs[1:])][: signature.num_outputs]


def _multi_head(
    body: BodyBuilder, spec: AttentionSpec, operands: list[ir.Value | None], signature: BodySignature
) -> list[ir.Value]:
    while operands[-1] is None:
        operands.pop()
    keeps = signature.num_outputs > 1 or len(operands) == 8
    names = ["attention", *(["all_keys", "all_values"] if keeps else [])]
    scale = operator_scale(spec)
    return list(
        body.ops("MultiHeadAttention", *operands, names=names, domain=CONTRIB_DOMAIN, num_heads=spec.q_num_heads, scale=scale)
    )


def _grouped(
    body: BodyBuilder,
    core: ContribCore,
    spec: AttentionSpec,
    operands: list[ir.Value | None],
    mask: Mask,
    request: LoweringRequest,
    norm_in_core: NormInCore | None,
) -> list[ir.Value]:
    sink = request.inputs.get("head_sink")
    places = dict(enumerate(operands)) | _lengths(body, request)
    places |= {_BIAS: mask.added, _SINK: None if sink is None else body.cast(sink, core.dtype)}
    places |= norm_in_core.inputs if norm_in_core else {}
    last = max(place for place, value in places.items() if value is not None)
    window = spec.left_window_size if core.causal else UNLIMITED_WINDOW
    outputs = body.ops(
        "GroupQueryAttention",
        *[places.get(place) for place in range(last + 1)],
        names=["attention", "all_keys", "all_values"],  # not optional in versions before 1.32
        domain=CONTRIB_DOMAIN,
        num_heads=spec.q_num_heads,
        kv_num_heads=spec.kv_num_heads,
        scale=operator_scale(spec),
        softcap=spec.softcap or None,
        local_window_size=None if window == UNLIMITED_WINDOW else window + 1,
        causal=None if core.causal else 0,
        **(norm_in_core.attributes if norm_in_core else {}),
    )
    return list(outputs)


def operator_scale(spec: AttentionSpec) -> float:
    """The operators' `scale`. They take 0 for their default: q is multiplied in front of them where it is not positive."""
    return spec.scale if spec.scale > 0 else 1.0


def _lengths(body: BodyBuilder, request: LoweringRequest) -> dict[int, ir.Value]:
    """The inputs that say how many keys each row has, new ones included, and how many of them are new."""
    inputs = request.inputs
    query, past, cache_length = inputs["query"], inputs.get("past_key"), inputs.get("cache_length")
    num_new = body.size(inputs["key"], 1, name="num_new_keys").vector
    total = num_new
    if past is not None:
        num_past = body.size(past, 2, name="num_past_keys").vector
        total = body.op("Add", num_past, num_new, name="num_keys")
        if cache_length is not None:
            total = entries_after(body, cache_length, past, num_new)
    found = {_TOTAL: _int32(body, total)}
    batch = body.size(query, 0, name="batch").vector
    if past is not None and cache_length is not None:
        found[_SEQLENS] = _int32(body, _last_keys(body, past, cache_length, num_new))
    else:
        last = body.op("Sub", found[_TOTAL], body.constant(np.array([1], dtype=np.int32), name="one"), name="last_key")
        found[_SEQLENS] = body.op("Expand", last, batch, name="last_key_of_row")
    if _needs_query_seqlens(inputs):
        found[_NEW] = body.op("Expand", _int32(body, num_new), batch, name="num_new_of_row")
    return found


def _last_keys(body: BodyBuilder, past: ir.Value, cache_length: ir.Value, num_new: ir.Value) -> ir.Value:
    """The place of each row's last key, failing in the runtime where the past has no such length.

    onnxruntime before 1.26 does not look at the lengths: it writes behind the cache, and ends the process.
    """
    most = body.op("Add", body.size(past, 2, name="capacity").vector, body.ints(1), name="number_of_lengths")
    lengths = count(body, RuntimeSize(vector=most), name="length_of_past")
    known = body.op("Gather", lengths, never_from_the_end(body, cache_length), name="length_of_row")
    return body.op("Sub", body.op("Add", known, num_new, name="keys_of_row"), body.ints(1), name="last_key_of_row")


def _needs_query_seqlens(inputs: Inputs) -> bool:
    """Whether several new tokens of several rows may meet a cache, growing or with a length per row."""
    return "past_key" in inputs and not _one_at_a_time(inputs["query"])


def _one_at_a_time(query: ir.Value) -> bool:
    """Whether there is one row or one token: then versions without `query_seqlens` serve both kinds of cache too."""
    return query.shape is not None and 1 in (query.shape[0], query.shape[1])


def _int32(body: BodyBuilder, value: ir.Value) -> ir.Value:
    return body.cast(value, ir.DataType.INT32)
