"""What is known of a module beside its example: what its inputs do, and which of its weights the file holds."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qknorm_onnx.validation.cases.inputs import match_inputs
from qknorm_onnx.validation.modes.observation import Observation, Observer
from qknorm_onnx.validation.shared_weights import (
    FileWeights,
    SharedWeights,
    compare_tables,
    is_projection,
    projections_in_both,
    scaled_model,
)


class Reader(torch.nn.Module):
    """Picks rows by ids and by positions, and writes at a place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(50, 8)
        self.places = torch.nn.Parameter(torch.randn(12, 8))
        self.q_proj = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, positions, slot, cache):
        x = self.q_proj(self.words(ids) + self.places[positions])
        return self.head(x), cache.index_copy(1, slot, x)


def observed():
    module = Reader()
    inputs = (torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]]), torch.tensor([4, 5, 6]), torch.zeros(1, 9, 8))
    with torch.no_grad(), (observer := Observer(module, dict(enumerate(inputs)))):
        module(*inputs)
        expected = float(module.q_proj(module.words(inputs[0]) + module.places[inputs[1]]).square().mean().sqrt())
    return module, observer.observation(), expected


def test_inputs_that_pick_rows_and_inputs_that_say_where_to_write_are_told():
    _, seen, size = observed()
    assert seen.rows == {0: 50, 1: 12}
    assert seen.written == {2}
    assert set(seen.tables) == {"words.weight", "places"}
    assert seen.result_sizes["q_proj.weight"] == pytest.approx(size, rel=1e-5)


def test_a_branch_of_torch_cond_is_seen():
    words = torch.nn.Embedding(7, 2)
    ids = torch.tensor([1, 2])
    with torch.no_grad(), (observer := Observer(words, {0: ids})):
        torch.cond(ids.sum() > 0, lambda i: words(i), lambda i: words(i) * 2, (ids,))
    assert observer.observation().rows == {0: 7}


def test_names_of_projections():
    projections = (
        "model.layers.0.self_attn.q_proj.weight",
        "k_proj.bias",
        "W_q.weight",
        "attn.qkv.weight",
        "to_k.weight",
        "wq.weight",
    )
    others = ("q_norm.weight", "k_norm.weight", "v_proj.weight", "table.weight", "o_proj.weight", "mask.weight", "block.weight")
    assert [name for name in (*projections, *others) if is_projection(name)] == list(projections)


def file_of(**arrays) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20})
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        tensor = ir.tensor(array, name=name)
        graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        )
    return ir.Model(graph, ir_version=10)


RANDOM = np.random.default_rng(0)
Q, K = (RANDOM.normal(size=(8, 6)).astype(np.float32) for _ in range(2))
SQUARE = RANDOM.normal(size=(6, 6)).astype(np.float32)
BIAS = RANDOM.normal(size=6).astype(np.float32)


def test_weights_are_found_by_value_in_either_form_and_in_the_types_of_the_file():
    weights = FileWeights(file_of(a=Q.T, b=K.astype(np.float16), c=SQUARE.T, d=BIAS))
    assert [[value.name for value in weights.equal(array)] for array in (Q, K, SQUARE, BIAS, Q + 1)] == [
        ["a"],
        ["b"],
        ["c"],
        ["d"],
        [],
    ]


def test_a_projection_is_scaled_with_its_bias_or_not_at_all():
    named = {"q_proj.weight": Q.T, "q_proj.bias": BIAS, "k_proj.weight": K.T, "v_proj.weight": SQUARE}
    assert projections_in_both(file_of(a=Q, b=BIAS, c=K, d=SQUARE), named.items()) == (
        "q_proj.weight",
        "q_proj.bias",
        "k_proj.weight",
    )
    assert projections_in_both(file_of(a=Q, c=K), named.items()) == ("k_proj.weight",), "the bias of q is not in the file"
    assert projections_in_both(file_of(a=Q, b=BIAS), named.items()) == ("q_proj.weight", "q_proj.bias")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scaling_rounds_as_a_module_in_the_type_does(dtype):
    model = file_of(a=Q.T, other=SQUARE)
    scaled = scaled_model(model, {"q": Q}, {"q": 2.0**-16}, np.dtype(dtype))
    expected = (torch.from_numpy(Q).to(getattr(torch, np.dtype(dtype).name)) * 2.0**-16).float().numpy().T
    assert np.array_equal(scaled.graph.initializers["a"].const_value.numpy(), expected)
    assert np.array_equal(scaled.graph.initializers["other"].const_value.numpy(), SQUARE)
    assert np.array_equal(model.graph.initializers["a"].const_value.numpy(), Q.T), "the model itself is left alone"


def test_every_row_of_a_table_is_compared_in_every_copy_of_it():
    table = RANDOM.normal(size=(5000, 4)).astype(np.float32)
    wrong = table.copy()
    wrong[4999, 2] *= 1.001
    found = list(compare_tables(file_of(right=table, head=wrong.T, foreign=table[::-1]), {"words": table}))
    assert {difference.initializer: difference.rows for difference in found} == {"right": (), "head": (4999,)}
    half = list(compare_tables(file_of(right=table.astype(np.float16)), {"words": table}))
    assert [difference.rows for difference in half] == [()], "rounded to the type of the file it is the same"


def test_the_report_has_a_row_for_each_table_and_names_those_not_found():
    module, seen, _ = observed()
    words = module.words.weight.detach().numpy().copy()
    words[3] += 1
    shared = SharedWeights.of(file_of(table=words, q=module.q_proj.weight.detach().numpy().T), module, seen)
    (row,) = shared.table_rows("float32", "native")
    assert (row.verdict, row.output, row.case) == ("failed", "words.weight", "tables")
    assert "initializer table differs in 1 rows: 3" in row.reason
    assert list(shared.untried()) == [
        "table places was not found among the file's initializers: its rows are tried by tokens only"
    ]
    assert shared.scalable == (), "its bias is not there"


def test_what_was_seen_goes_by_the_names_of_the_graph():
    module, seen, _ = observed()
    model = ir.Model(
        ir.Graph(
            [
                ir.Value(name=name, shape=ir.Shape(["b", "s"]), type=ir.TensorType(ir.DataType.INT64))
                for name in ("positions", "ids")
            ],
            [],
            nodes=[],
            opset_imports={"": 20},
        ),
        ir_version=10,
    )
    leaves = [("ids", np.zeros((1, 3), np.int64)), ("positions", np.array([[0, 1, 2]]))]
    inputs = match_inputs(model, leaves)
    shared = SharedWeights.of(file_of(), module, Observation(rows=seen.rows))
    assert shared.domain(inputs, (0, 1), windows=(4,)).rows == {"ids": 50, "positions": 12}
