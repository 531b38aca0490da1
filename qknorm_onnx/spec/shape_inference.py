"""Output shapes of the operators, and what is wrong with the shapes of their inputs.

A dimension is an int, the name of a symbol (ONNX `dim_param`), or None where nothing is known. Only a contradiction
between two known numbers is an error: a graph is checked with what it declares, a run with all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec, RotarySpec, SpecError

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
    attention = spec.attention
    for name in ("query", "key", "value"):
        _check_rank(name, shapes, 3)
    query, key, value = shapes["query"], shapes["key"], shapes["value"]
    _check_split("query", query, attention.q_num_heads)
    _check_split("key", key, attention.kv_num_heads)
    _check_split("value", value, attention.kv_num_heads)
    head_size = divide(query[2], attention.q_num_heads)
    _check_dim("key", "head size", divide(key[2], attention.kv_num_heads), head_size)
    for name in ("key", "value"):
        _check_dim(name, "batch size", shapes[name][0], query[0])
    _check_dim("value", "number of positions", value[1], key[1])
    _check_norm_parameter("q_norm", shapes, attention.q_num_heads, head_size, normalised=spec.norm.q_kind != "none")
    _check_norm_parameter("k_norm", shapes, attention.kv_num_heads, head_size, normalised=spec.norm.k_kind != "none")
    _check_groups(spec.norm.groups, spec.norm.axis == "hidden", [query[2], key[2]], head_size)
    num_heads = attention.q_num_heads if attention.q_num_heads == attention.kv_num_heads else 1
    _check_tables(spec.rotary, shapes, query, head_size, num_heads=num_heads)
    if spec.rotary.order != "none":
        _check_dim("key", "number of positions, which share the rotary tables of the query,", key[1], query[1])
    _check_cache(spec, shapes)
    if "q_scale" in shapes:
        check_broadcast("q_scale", shapes["q_scale"], [query[0], attention.q_num_heads, query[1], head_size])
    if "attention_bias" in shapes:
        check_broadcast(
            "attention_bias", shapes["attention_bias"], [query[0], attention.q_num_heads, query[1], _total_keys(shapes)]
        )
    if "head_sink" in shapes:
        _check_exact("head_sink", shapes["head_sink"], [attention.q_num_heads])


def check_rotary_inputs(spec: QKNormRotarySpec, shapes: Shapes) -> None:
    """Raises SpecError, naming the input, if `shapes` of a `QKNormRotary` contradict `spec`."""
    _check_rank("x", shapes, 3)
    x = shapes["x"]
    _check_split("x", x, spec.num_heads)
    head_size = divide(x[2], spec.num_heads)
    _check_norm_parameter("", shapes, spec.num_heads, head_size, normalised=spec.kind != "none")
    _check_groups(spec.groups, spec.axis == "hidden", [x[2]], head_size)
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
    if "cache_length" in shapes:
        return past
    if past == 0:
        return new
    return past + new if isinstance(past, int) and isinstance(new, int) else None


def _check_rank(name: str, shapes: Shapes, rank: int) -> None:
    if name not in shapes:
        raise SpecError(f"input {name} is missing")
    if len(shapes[name]) != rank:
        raise SpecError(f"{name} has shape {_text(shapes[name])}; it needs {rank} dimensions")


def _check_dim(name: str, what: str, given: Dim, expected: Dim) -> None:
    if isinstance(given, int) and isinstance(expected, int) and given != expected:
        raise SpecError(f"{name} has {what} {given}; {expected} is expected")


def _check_split(name: str, shape: Shape, num_heads: int) -> None:
    if isinstance(shape[2], int) and shape[2] % num_heads:
        raise SpecError(f"{name} has shape {_text(shape)}; its last dimension must split into {num_heads} heads")


def _check_exact(name: str, shape: Shape, expected: Shape) -> None:
    clash = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, expected, strict=False))
    if len(shape) != len(expected) or clash:
        raise SpecError(f"{name} has shape {_text(shape)}; {_text(expected)} is expected")


def check_broadcast(name: str, shape: Shape, target: Shape) -> None:
    """Raises SpecError if `shape` cannot be broadcast to `target`."""
    paired = zip(reversed(shape), reversed(target), strict=False)
    clash = any(isinstance(a, int) and isinstance(b, int) and a not in (1, b) for a, b in paired)
    if len(shape) > len(target) or clash:
        raise SpecError(f"{name} has shape {_text(shape)}; it must be broadcastable to {_text(target)}")


def _check_norm_parameter(prefix: str, shapes: Shapes, num_heads: int, head_size: Dim, *, normalised: bool) -> None:
    for part in ("weight", "bias"):
        name = f"{prefix}_{part}" if prefix else part
        if name not in shapes:
            continue
        if not normalised:
            raise SpecError(f"{name} is given, but the spec has no norm for it")
        shape = shapes[name]
        if isinstance(head_size, int) and all(isinstance(dim, int) for dim in shape):
            allowed = [[head_size], [num_heads, head_size], [num_heads * head_size]]
            if list(shape) not in allowed:
                raise SpecError(f"{name} has shape {_text(shape)}; one of {', '.join(map(_text, allowed))} is expected")


def _check_groups(groups: int, hidden: bool, widths: Sequence[Dim], head_size: Dim) -> None:
    for width in widths if hidden else [head_size]:
        if isinstance(width, int) and width % groups:
            raise SpecError(f"norm_groups {groups} does not divide the {width} values of a normalised row")


def _check_tables(rotary: RotarySpec, shapes: Shapes, x: Shape, head_size: Dim, *, num_heads: int) -> None:
    present = [name for name in ("cos", "sin") if name in shapes]
    if rotary.order == "none":
        if present:
            raise SpecError(f"{present[0]} is given, but rotary_order is 'none'")
        return
    if len(present) != 2:
        raise SpecError("rotary_order is set: the inputs cos and sin are both needed")
    size = rotary.rotated_size(head_size) if isinstance(head_size, int) else None
    for name in present:
        shape = shapes[name]
        expected: list[Dim] = {2: [x[1]], 3: [x[0], x[1]], 4: [x[0], num_heads, x[1]]}.get(len(shape), [])
        if not expected:
            raise SpecError(f"{name} has shape {_text(shape)}; (S, W), (B, S, W) or (B, H, S, W) is expected")
        check_broadcast(name, shape[:-1], expected)
        _check_dim(name, "number of positions", shape[-2], x[1])
        if isinstance(size, int) and isinstance(shape[-1], int) and shape[-1] not in (size, size // 2):
            raise SpecError(
                f"{name} has shape {_text(shape)}; its last dimension must be {size // 2} or {size}, for {size} rotated values"
            )
    if isinstance(shapes["cos"][-1], int) and isinstance(shapes["sin"][-1], int) and shapes["cos"][-1] != shapes["sin"][-1]:
        raise SpecError(f"cos has shape {_text(shapes['cos'])} and sin {_text(shapes['sin'])}; their widths must be equal")


def _check_cache(spec: QKNormSpec, shapes: Shapes) -> None:
    if ("past_key" in shapes) != ("past_value" in shapes):
        raise SpecError("past_key and past_value must be given together")
    if "cache_length" in shapes and "past_key" not in shapes:
        raise SpecError("cache_length needs past_key and past_value, the buffers that it speaks of")
    if "query_offset" in shapes and "past_key" in shapes:
        raise SpecError("query_offset is for attention without a cache; past_key already says where the queries are")
    batch, heads = shapes["query"][0], spec.attention.kv_num_heads
    for name in ("cache_length", "query_offset"):
        if name in shapes:
            _check_exact(name, shapes[name], [batch])
    if "past_key" in shapes:
        length = shapes["past_key"][2] if len(shapes["past_key"]) == 4 else None
        for past, new in (("past_key", "key"), ("past_value", "value")):
            _check_exact(past, shapes[past], [batch, heads, length, divide(shapes[new][2], heads)])


def _text(shape: Shape) -> str:
    return "(" + ", ".join("?" if dim is None else str(dim) for dim in shape) + ")"
