"""ONNX Runtime's own fused attention as a contestant: the norms as operators of their own in front of it.

Operators and their inputs as onnxruntime documents them (docs/ContribOperators.md, version 1.32).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from qknorm_onnx.spec.qk_norm_spec import rotates, rotates_after_norm
from qknorm_onnx.speed.contestant import Contestant, LeftOutError
from qknorm_onnx.speed.onnx_contestants import OPSET, PRESENT_OF, BoundSession
from qknorm_onnx.speed.problem import CACHES, Problem, Tensor, Tensors, rotary_tables, with_room

CONTRIB_DOMAIN: Final = "com.microsoft"
# `seqlens_k` is the number of all tokens of each row, the new ones included, less one.
LENGTH_INPUTS: Final = ("seqlens_k", "total_sequence_length")


def grouped_query(problem: Problem, inputs: Tensors, threads: int) -> Contestant:
    """SimplifiedLayerNormalization of q and k, then GroupQueryAttention with its rotary; past and present are two buffers."""
    return _grouped_query(problem, inputs, threads, shared=False)


def grouped_query_shared(problem: Problem, inputs: Tensors, threads: int) -> Contestant:
    """The same with one buffer of fixed size for past and present."""
    return _grouped_query(problem, inputs, threads, shared=True)


def multi_head(problem: Problem, inputs: Tensors, threads: int) -> Contestant:
    """SimplifiedLayerNormalization of q and k, then MultiHeadAttention, without a mask."""
    spec = problem.spec
    plain = not rotates(spec.rotary.order) and not spec.attention.is_causal and spec.attention.group_size == 1
    if not (plain and _rms_of_heads(problem)):
        raise LeftOutError("MultiHeadAttention serves attention without rotary, mask and shared heads here")
    attend = helper.make_node(
        "MultiHeadAttention",
        ["query_rows", "key_rows", "value"],
        ["Y"],
        domain=CONTRIB_DOMAIN,
        num_heads=spec.attention.q_num_heads,
        scale=spec.attention.scale,
    )
    model = _model(problem, inputs, [*_norms(problem), attend], {})
    return BoundSession(model, inputs, threads=threads).contestant


def _grouped_query(problem: Problem, inputs: Tensors, threads: int, *, shared: bool) -> Contestant:
    attention = problem.spec.attention
    if not rotates_after_norm(problem.spec.rotary.order) or not attention.is_causal or not _rms_of_heads(problem):
        raise LeftOutError("GroupQueryAttention serves causal attention with RMS norm of heads before the rotary")
    total = problem.cached + problem.new
    given = with_room(_in_float32(inputs), problem.cached, problem.new) if shared else _with_past(problem, inputs)
    given["seqlens_k"] = np.full(problem.batch, total - 1, dtype=np.int32)
    given["total_sequence_length"] = np.array(total, dtype=np.int32)
    cos, sin = rotary_tables(total, problem.head_size)
    attend = helper.make_node(
        "GroupQueryAttention",
        ["query_rows", "key_rows", "value", *CACHES, *LENGTH_INPUTS, "cos_cache", "sin_cache"],
        ["Y", "present_key", "present_value"],
        domain=CONTRIB_DOMAIN,
        num_heads=attention.q_num_heads,
        kv_num_heads=attention.kv_num_heads,
        do_rotary=1,
        scale=attention.scale,
    )
    model = _model(problem, given, [*_norms(problem), attend], {"cos_cache": cos, "sin_cache": sin})
    return BoundSession(model, given, threads=threads, in_place=PRESENT_OF if shared else {}).contestant


def _rms_of_heads(problem: Problem) -> bool:
    norm = problem.spec.norm
    wanted = dataclasses.replace(norm, q_kind="rms", k_kind="rms", axis="head", epsilon_mode="inside_sqrt", groups=1)
    return norm == wanted and not problem.temperature


def _in_float32(inputs: Tensors) -> Tensors:
    return {name: array.astype(np.float32) for name, array in inputs.items()}


def _with_past(problem: Problem, inputs: Tensors) -> Tensors:
    """Inputs in float32 with a past, empty where nothing is cached."""
    empty = np.zeros((problem.batch, problem.spec.attention.kv_num_heads, 0, problem.head_size), dtype=np.float32)
    return dict.fromkeys(CACHES, empty) | _in_float32(inputs)


def _norms(problem: Problem) -> list[onnx.NodeProto]:
    """query, key -> query_rows, key_rows of the same shape, each head normalised."""
    norm, nodes = problem.spec.norm, []
    for name, epsilon in (("query", norm.q_epsilon), ("key", norm.k_epsilon)):
        nodes += [
            helper.make_node("Reshape", [name, f"{name}_heads"], [f"{name}_bshd"]),
            helper.make_node(
                "SimplifiedLayerNormalization",
                [f"{name}_bshd", f"{name[0]}_norm_weight"],
                [f"{name}_normed"],
                axis=-1,
                epsilon=epsilon,
                stash_type=1,
            ),
            helper.make_node("Reshape", [f"{name}_normed", "flat"], [f"{name}_rows"]),
        ]
    return nodes


def _model(problem: Problem, inputs: Tensors, nodes: list[Any], tables: Tensors) -> ir.Model:
    attention, size = problem.spec.attention, problem.head_size
    weights = {name: inputs[name] for name in ("q_norm_weight", "k_norm_weight")}
    shapes = {
        "query_heads": np.array([0, 0, attention.q_num_heads, size]),
        "key_heads": np.array([0, 0, attention.kv_num_heads, size]),
        "flat": np.array([0, 0, -1]),
    }
    used = {name for node in nodes for name in node.input}
    feeds = [_value(name, array) for name, array in inputs.items() if name in used and name not in weights]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in (weights | shapes | tables).items()]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in nodes[-1].output]
    graph = helper.make_graph(nodes, "benchmark", feeds, results, constants)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB_DOMAIN, 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10))


def _value(name: str, array: Tensor) -> onnx.ValueInfoProto:
    """A graph input with symbolic batch and lengths and the array's last dimension."""
    shape = [f"{name}_{axis}" for axis in range(array.ndim - 1)] + list(array.shape[-1:])
    if name in CACHES:
        shape[1] = array.shape[1]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)
