"""Files with a cache as optimum names it, and the merged decoder that transformers.js loads: both written here, by hand."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import torch
from onnx import helper

from tests.foreign.foreign_models import qwen3

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 16


class WithPast(torch.nn.Module):
    """Tensors in optimum's order: tokens, mask, positions, then keys and values of each layer; logits and the same, longer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids, *past):
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        return (output.logits, *(tensor for layer in output.past_key_values.layers for tensor in (layer.keys, layer.values)))


def decoder(attention: str) -> WithPast:
    """A `Qwen3ForCausalLM` with its cache."""
    return WithPast(qwen3(attention).module.model).eval()


def names(prefix: str) -> list[str]:
    """Names of a cache: `past_key_values.0.key` or `present.0.key`."""
    return [f"{prefix}.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]


def inputs(batch: int, past: int, new: int, *, padded: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens behind a random past; the first `padded` keys of the last row are masked."""
    generator = torch.Generator().manual_seed(batch + 10 * past + 100 * new)
    mask = torch.ones(batch, past + new, dtype=torch.int64)
    mask[-1, :padded] = 0
    fed = {
        "input_ids": torch.randint(0, 96, (batch, new), generator=generator),
        "attention_mask": mask,
        "position_ids": torch.arange(past, past + new).expand(batch, new).contiguous(),
    }
    shape = (batch, KV_HEADS, past, HEAD_SIZE)
    return fed | {name: torch.randn(shape, generator=generator) for name in names("past_key_values")}


def file_of(module: WithPast, example: dict[str, torch.Tensor], opset: int) -> onnx.ModelProto:
    """The older exporter's file; without a past where the example has none."""
    axes = {
        "input_ids": {0: "batch", 1: "sequence"},
        "position_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "total"},
    }
    axes |= {name: {0: "batch", 2: "past"} for name in names("past_key_values")}
    axes |= {name: {0: "batch", 2: "total"} for name in names("present")} | {"logits": {0: "batch", 1: "sequence"}}
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(example.values()), buffer, dynamo=False, opset_version=opset, input_names=list(example),
            output_names=["logits", *names("present")], dynamic_axes=axes,
        )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


def merged(without: onnx.ModelProto, with_past: onnx.ModelProto) -> onnx.ModelProto:
    """One file of two: an If over `use_cache_branch`, whose bodies share the weights of the graph around them.

    Values in the bodies that become results are called as those of the If are, as optimum's merge_decoders leaves them.
    """
    weights = {tensor.name: tensor for tensor in with_past.graph.initializer}
    other = {tensor.name: tensor for tensor in without.graph.initializer}
    names = {name: f"no_past/{name}" for name, tensor in other.items() if name in weights and tensor != weights[name]}
    for name, tensor in other.items():
        weights[names.get(name, name)] = onnx.TensorProto.FromString(tensor.SerializeToString())
        weights[names.get(name, name)].name = names.get(name, name)
    outputs = [value.name for value in with_past.graph.output]
    branches = {
        "then_branch": _body("with_past", with_past.graph, {}),
        "else_branch": _body("no_past", without.graph, names),
    }
    switch = helper.make_node("If", ["use_cache_branch"], outputs, name="optimum::if", **branches)
    flag = helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    around = [*with_past.graph.input, flag]
    graph = helper.make_graph([switch], "merged", around, list(with_past.graph.output), initializer=list(weights.values()))
    return helper.make_model(graph, opset_imports=with_past.opset_import, ir_version=with_past.ir_version)


def _body(name: str, graph: onnx.GraphProto, renamed: dict[str, str]) -> onnx.GraphProto:
    """A branch with all nodes of `graph`, which reads inputs and weights from around it."""
    body = helper.make_graph(list(graph.node), name, [], list(graph.output))
    for node in body.node:
        node.input[:] = [renamed.get(operand, operand) for operand in node.input]
    return body


def run_all(model: onnx.ModelProto, fed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs, by onnxruntime without its optimizer."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    known = {value.name for value in session.get_inputs()}
    return session.run(None, {name: array for name, array in fed.items() if name in known})
