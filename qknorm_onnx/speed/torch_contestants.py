"""PyTorch as a contestant: the attention as its users write it, with `scaled_dot_product_attention`, and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np

from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, rotates_after_norm, rotates_before_norm, spans_heads
from qknorm_onnx.speed.contestant import Contestant, LeftOutError
from qknorm_onnx.speed.problem import CACHES, PARAMETERS, Problem, Tensor, Tensors, with_room

if TYPE_CHECKING:
    import torch

    Values = dict[str, torch.Tensor]


def import_torch() -> Any:
    """The torch module; InputError says how to install it where it is missing."""
    try:
        import torch
    except ImportError as error:
        raise InputError("the benchmark compares with torch, which is missing; run: pip install 'qknorm-onnx[torch]'") from error
    return torch


def eager(problem: Problem, inputs: Tensors, _threads: int) -> Contestant:
    """Operator by operator; a cache is of fixed size and written in place. The threads are those of `torch_threads`.

    Raises:
        InputError: torch is missing.
    """
    return _contestant(problem, inputs, compiled=False)


def compiled(problem: Problem, inputs: Tensors, _threads: int) -> Contestant:
    """The same through torch.compile with static shapes. Raises LeftOutError where it does not compile."""
    return _contestant(problem, inputs, compiled=True)


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """PyTorch's number of threads, which is one for the whole process, for a while."""
    torch = import_torch()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _contestant(problem: Problem, inputs: Tensors, *, compiled: bool) -> Contestant:
    pytorch = import_torch()
    if problem.cached and problem.new > 1:
        raise LeftOutError("several new tokens behind cached ones need a mask in scaled_dot_product_attention")
    given = with_room(inputs, problem.cached, problem.new) if problem.cached else inputs
    values: Values = {name: pytorch.from_numpy(np.array(array)) for name, array in given.items() if name != "cache_length"}
    wide = [name for name in (*PARAMETERS, "cos", "sin") if name in values]
    values |= {name: values[name].to(values["query"].dtype) for name in wide}  # as the weights of a model in that type are
    sides = (problem.spec.query_preparation, problem.spec.key_preparation)  # made here: torch.compile cannot trace it
    attend = attention
    if compiled:
        pytorch.compiler.reset()  # else the sizes of earlier cases count as recompilations, of which there may be few
        attend = pytorch.compile(attention, dynamic=False, fullgraph=True)
    results: list[torch.Tensor] = []

    def call() -> None:
        with pytorch.inference_mode():
            results[:] = [attend(problem, sides, values)]

    def output() -> Tensor:
        y: Tensor = results[0].numpy()
        return y

    if compiled:
        try:
            call()
        except pytorch._dynamo.exc.TorchDynamoException as error:
            raise LeftOutError(f"torch.compile failed: {str(error).splitlines()[0]}") from error
    return Contestant(call, output)


def attention(problem: Problem, sides: tuple[QKNormRotarySpec, QKNormRotarySpec], values: Values) -> torch.Tensor:
    """Y (B, S, Hq*D); `sides` prepare queries and keys. The new keys and values are written behind the cached ones."""
    from torch.nn.functional import scaled_dot_product_attention

    spec = problem.spec
    query = _prepared(sides[0], values, "query")
    if "q_scale" in values:
        query = query * values["q_scale"]
    key = _prepared(sides[1], values, "key")
    value = _heads(values["value"], spec.attention.kv_num_heads).transpose(1, 2)
    if problem.cached:
        total = problem.cached + problem.new
        for name, new in zip(CACHES, (key, value), strict=True):
            values[name][:, :, problem.cached : total] = new
        key, value = (values[name][:, :, :total] for name in CACHES)
    # One new token sees everything: its mask is no mask.
    causal = spec.attention.is_causal and problem.new > 1
    grouped = spec.attention.group_size > 1
    y = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=spec.attention.scale, enable_gqa=grouped)
    return y.transpose(1, 2).flatten(2)


def _heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads)


def _prepared(spec: QKNormRotarySpec, values: Values, name: str) -> torch.Tensor:
    """Norm and rotary of the query or key: (B, H, S, D)."""
    x, weight, bias = values[name], values.get(f"{name[0]}_norm_weight"), values.get(f"{name[0]}_norm_bias")
    if spans_heads(spec.axis):
        x = _heads(_normed(spec, x, weight, bias), spec.num_heads)
    else:
        x = _heads(x, spec.num_heads)
        x = _rotated(x, values) if rotates_before_norm(spec.rotary.order) else x
        x = _normed(spec, x, weight, bias)
    x = _rotated(x, values) if rotates_after_norm(spec.rotary.order) else x
    return x.transpose(1, 2)


def _normed(spec: QKNormRotarySpec, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    from torch.nn import functional

    size = x.shape[-1:]
    match spec.kind:
        case "none":
            return x
        case "rms":
            return functional.rms_norm(x, size, weight, spec.epsilon)
        case "layer":
            return functional.layer_norm(x, size, weight, bias, spec.epsilon)
        case "l2":
            return functional.normalize(x, dim=-1, eps=spec.epsilon)
        case _:
            assert_never(spec.kind)


def _rotated(x: torch.Tensor, values: Values) -> torch.Tensor:
    """Both halves of each head turned by the tables (S, D / 2)."""
    import torch

    cos, sin = (values[name].unsqueeze(1) for name in ("cos", "sin"))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
