"""Output shapes of the operators, and what is wrong with the shapes of their inputs.

A dimension is an int, the name of a symbol (ONNX `dim_param`), or None where nothing is known. Only a contradiction
between two known numbers is an error: a graph is checked with what it declares, a run with all of it.

The kernels check the same rules in the same order and say the same sentences (`custom_ops/kernels/cpu/check.cc`);
`tests/native/test_same_rules.py` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qknorm_onnx.spec.qk_norm_spec import (
    QKNormRotarySpec,
    QKNormSpec,
    RotarySpec,
    SpecError,
    normalises,
    rotates,
    spans_heads,
)

Dim = int | str | None
Shape = Sequence[Dim]
Shapes = Mapping[str, Shape]


def infer_attention_outputs(spec: QKNormSpec, shapes: Shapes) -> dict[str, list[Dim]]:
    """Shapes of Y, present_key and present_value of `QKNormAttention`. Raises SpecError on a contradiction."""
    check_attention_inputs(spec, shapes)
    attention = spec.attention
    batch, num_queries, _ = shapes["query"]
    head_size = divide(shapes["key"][2], attention.kv_num_heads)
    value_size = divide(shapes["value"][2], attention.kv_num_heads)
    total = _total_keys(shapes)
    return {
        "Y": [batch, num_queries, _times(value_size, attention.q_num_heads)],
        "present_key": [batch, attention.kv_num_heads, total, head_size],
        "present_value": [batch, attention.kv_num_heads, total, value_size],
    }


def infer_rotary_outputs(spec: QKNormRotarySpec, shapes: Shapes) -> dict[str, list[Dim]]:
    """Shape of Y of `QKNormRotary`. Raises SpecError on a contradiction."""
    check_rotary_inputs(spec, shapes)
    return {"Y": list(shapes["x"])}


def check_attention_inputs(spec: QKNormSpec, shapes: Shapes) -> None:
    """Raises SpecError, naming the input, if `shapes` (by input name; absent inputs left out) contradict `spec`."""
    spec.check()
    attention = spec.attention
    q_heads, kv_heads = attention.q_num_heads, attention.kv_num_heads
    _check_projections(spec, shapes)
    query, key = shapes["query"], shapes["key"]
    head_size = divide(query[2], q_heads)
    _check_heads_not_empty("value", shapes["value"], divide(shapes["value"][2], kv_heads))
    table_heads = q_heads if q_heads == kv_heads else 1
    _check_norm("query", "q_norm", shapes, spec.query_preparation)
    _check_tables(spec.rotary, shapes, query, head_size, num_heads=table_heads)
    if "q_scale" in shapes:
        check_broadcast("q_scale", shapes["q_scale"], [query[0], q_heads, query[1], head_size])
    _check_norm("key", "k_norm", shapes, spec.key_preparation)
    _check_tables(spec.rotary, shapes, key, head_size, num_heads=table_heads)
    _check_cache(spec, shapes)
    if "attention_bias" in shapes:
        _check_bias(shapes, q_heads)
    if "head_sink" in shapes:
        _check_exact("head_sink", shapes["head_sink"], [q_heads])


def check_cache_length(shapes: Shapes, lengths: Sequence[int]) -> int:
    """T for the values of `cache_length`, all of `shapes` (that `check_attention_inputs` passed) being numbers.

    Raises SpecError, naming the row or the bias, if the buffers have no such entries or the bias more columns than T.
    """
    past, new = (shapes[name][axis] for name, axis in (("past_key", 2), ("key", 1)))
    assert isinstance(past, int) and isinstance(new, int), "a run knows its sizes"
    for row, valid in enumerate(lengths):
        if not 0 <= valid <= past:
            raise SpecError(
                f"cache_length[{row}] is {valid}; it must be within 0 .. {past}, as many entries as past_key "
                f"{_text(shapes['past_key'])} has"
            )
    total = max(past, max(lengths, default=0) + new) if lengths else past
    bias = shapes.get("attention_bias", ())
    columns = bias[-1] if bias else 1
    if isinstance(columns, int) and columns > max(total, 1):
        raise SpecError(f"attention_bias has shape {_text(bias)}; there are {total} keys")
    return total


def check_rotary_inputs(spec: QKNormRotarySpec, shapes: Shapes) -> None:
    """Raises SpecError, naming the input, if `shapes` of a `QKNormRotary` contradict `spec`."""
    spec.check()
    _check_given(("x",), shapes)
    x = shapes["x"]
    _check_rank("x", x, 3)
    _check_split("x", x, spec.num_heads)
    head_size = divide(x[2], spec.num_heads)
    _check_norm("x", "", shapes, spec)
    _check_tables(spec.rotary, shapes, x, head_size, num_heads=spec.num_heads)
    if "scale" in shapes:
        check_broadcast("scale", shapes["scale"], [x[0], spec.num_heads, x[1], head_size])


def divide(size: Dim, parts: int) -> Dim:
    """`size` / `parts` where it is a number, else unknown."""
    return size // parts if isinstance(size, int) else None


def _times(size: Dim, factor: int) -> Dim:
    return size * factor if isinstance(size, int) else None


def _total_keys(shapes: Shapes) -> Dim:
    new = shapes["key"][1]
    if "past_key" not in shapes:
        return new
    past = shapes["past_key"][2]
    if past == 0:
        return new
    if "cache_length" in shapes:
        return past if new == 0 else None  # no shape says how many are valid
    return past + new if isinstance(past, int) and isinstance(new, int) else None


def _check_projections(spec: QKNormSpec, shapes: Shapes) -> None:
    _check_given(("query", "key", "value"), shapes)
    query, key, value = shapes["query"], shapes["key"], shapes["value"]
    q_heads, kv_heads = spec.attention.q_num_heads, spec.attention.kv_num_heads
    for name, shape, heads in (("query", query, q_heads), ("key", key, kv_heads), ("value", value, kv_heads)):
        _check_rank(name, shape, 3)
        _check_split(name, shape, heads)
        if _differ(shape[0], query[0]):
            raise SpecError(f"{name} has shape {_text(shape)}; its batch size must be the query's, {query[0]}")
    head_size, of_key = divide(query[2], q_heads), divide(key[2], kv_heads)
    if _differ(of_key, head_size):
        raise SpecError(f"key has shape {_text(key)}, head size {of_key}; {head_size} is expected, as in query {_text(query)}")
    if _differ(value[1], key[1]):
        raise SpecError(f"value has shape {_text(value)}; it needs as many positions as key {_text(key)}")
    if rotates(spec.rotary.order) and _differ(key[1], query[1]):
        raise SpecError(
            f"key has shape {_text(key)}; with a rotary embedding it shares the tables of the query and needs "
            f"{query[1]} positions"
        )


def _differ(given: Dim, expected: Dim) -> bool:
    """Whether both are numbers, and not the same."""
    return isinstance(given, int) and isinstance(expected, int) and given != expected


def _check_given(names: Sequence[str], shapes: Shapes) -> None:
    for name in names:
        if name not in shapes:
            raise SpecError(f"input {name} is missing")


def _check_rank(name: str, shape: Shape, rank: int) -> None:
    if len(shape) != rank:
        raise SpecError(f"{name} has shape {_text(shape)}; it needs {rank} dimensions")


def _check_split(name: str, shape: Shape, num_heads: int) -> None:
    if isinstance(shape[2], int) and shape[2] % num_heads:
        raise SpecError(f"{name} has shape {_text(shape)}; its last dimension must split into {num_heads} heads")


def _check_heads_not_empty(name: str, shape: Shape, head_size: Dim) -> None:
    if head_size == 0:
        raise SpecError(f"{name} has shape {_text(shape)}; its heads are empty")


def _check_exact(name: str, shape: Shape, expected: Shape) -> None:
    if len(shape) != len(expected) or any(map(_differ, shape, expected)):
        raise SpecError(f"{name} has shape {_text(shape)}; {_text(expected)} is expected")


def check_broadcast(name: str, shape: Shape, target: Shape) -> None:
    """Raises SpecError if `shape` cannot be broadcast to `target`."""
    paired = zip(reversed(shape), reversed(target), strict=False)
    clash = any(isinstance(a, int) and isinstance(b, int) and a not in (1, b) for a, b in paired)
    if len(shape) > len(target) or clash:
        raise SpecError(f"{name} has shape {_text(shape)}; it must be broadcastable to {_text(target)}")


def _check_norm(x_name: str, prefix: str, shapes: Shapes, spec: QKNormRotarySpec) -> None:
    """What the norm of one input needs: heads that are not empty, whole groups, and the norm's own parameters."""
    x = shapes[x_name]
    head_size = divide(x[2], spec.num_heads)
    _check_heads_not_empty(x_name, x, head_size)
    row = x[2] if spans_heads(spec.axis) else head_size
    if isinstance(row, int) and row % spec.groups:
        raise SpecError(f"norm_groups {spec.groups} does not divide the {row} values of a normalised row of {x_name}")
    for part in ("weight", "bias"):
        name = f"{prefix}_{part}" if prefix else part
        if name in shapes:
            _check_norm_parameter(name, shapes[name], spec.num_heads, head_size, normalised=normalises(spec.kind))


def _check_norm_parameter(name: str, shape: Shape, num_heads: int, head_size: Dim, *, normalised: bool) -> None:
    if not normalised:
        raise SpecError(f"{name} is given, but there is no norm for it")
    if isinstance(head_size, int) and all(isinstance(dim, int) for dim in shape):
        allowed = [[head_size], [num_heads, head_size], [num_heads * head_size]]
        if list(shape) not in allowed:
            shared, split, flat = map(_text, allowed)
            raise SpecError(f"{name} has shape {_text(shape)}; {shared}, {split} or {flat} is expected")


def _check_tables(rotary: RotarySpec, shapes: Shapes, x: Shape, head_size: Dim, *, num_heads: int) -> None:
    present = [name for name in ("cos", "sin") if name in shapes]
    if not rotates(rotary.order):
        if present:
            raise SpecError(f"{present[0]} is given, but rotary_order is 'none'")
        return
    if len(present) != 2:
        raise SpecError("rotary_order is set: the inputs cos and sin are both needed")
    size = rotary.rotated_size(head_size) if isinstance(head_size, int) else None
    for name in present:
        _check_table(name, shapes[name], x, num_heads=num_heads, size=size)
    if _differ(shapes["cos"][-1], shapes["sin"][-1]):
        raise SpecError(f"cos has shape {_text(shapes['cos'])} and sin {_text(shapes['sin'])}; their widths must be equal")


def _check_table(name: str, shape: Shape, x: Shape, *, num_heads: int, size: int | None) -> None:
    expected: list[Dim] = {2: [x[1]], 3: [x[0], x[1]], 4: [x[0], num_heads, x[1]]}.get(len(shape), [])
    if not expected:
        raise SpecError(f"{name} has shape {_text(shape)}; (S, W), (B, S, W) or (B, H, S, W) is expected")
    if isinstance(size, int) and isinstance(shape[-1], int) and shape[-1] not in (size, size // 2):
        raise SpecError(
            f"{name} has shape {_text(shape)}; its last dimension must be {size // 2} or {size}, for {size} rotated values"
        )
    if _differ(shape[-2], x[1]):
        raise SpecError(
            f"{name} has shape {_text(shape)}; its last dimension but one must be the {x[1]} positions of the new tokens"
        )
    check_broadcast(name, shape, [*expected, shape[-1]])


def _check_cache(spec: QKNormSpec, shapes: Shapes) -> None:
    if ("past_key" in shapes) != ("past_value" in shapes):
        raise SpecError("past_key and past_value must be given together")
    if "cache_length" in shapes and "past_key" not in shapes:
        raise SpecError("cache_length needs past_key and past_value, the buffers that it speaks of")
    if "query_offset" in shapes and "past_key" in shapes:
        raise SpecError("query_offset is for attention without a cache; past_key already says where the queries are")
    batch, heads = shapes["query"][0], spec.attention.kv_num_heads
    if "past_key" in shapes:
        _check_rank("past_key", shapes["past_key"], 4)
        length = shapes["past_key"][2]
        for past, new in (("past_key", "key"), ("past_value", "value")):
            _check_exact(past, shapes[past], [batch, heads, length, divide(shapes[new][2], heads)])
    for name in ("cache_length", "query_offset"):
        if name in shapes:
            _check_exact(name, shapes[name], [batch])


def _check_bias(shapes: Shapes, q_heads: int) -> None:
    query, key, bias = shapes["query"], shapes["key"], shapes["attention_bias"]
    if "cache_length" not in shapes or not bias:
        check_broadcast("attention_bias", bias, [query[0], q_heads, query[1], _total_keys(shapes)])
        return
    check_broadcast("attention_bias", bias, [query[0], q_heads, query[1], bias[-1]])
    columns, past, new = bias[-1], shapes["past_key"][2], key[1]
    most = past + new if isinstance(past, int) and isinstance(new, int) else None
    if isinstance(columns, int) and most is not None and columns > max(most, 1):
        raise SpecError(f"attention_bias has shape {_text(bias)}; there are at most {most} keys")


def _text(shape: Shape) -> str:
    return "(" + ", ".join("?" if dim is None else str(dim) for dim in shape) + ")"
