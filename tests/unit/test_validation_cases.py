"""The inputs a model is judged on: matched with the graph, varied in size, and of the example's kind."""

from __future__ import annotations

import types

import numpy as np
import onnx_ir as ir
import pytest

from qknorm_onnx.errors import InputError
from qknorm_onnx.validation.candidate import rounded_inputs
from qknorm_onnx.validation.cases.made import make_cases
from qknorm_onnx.validation.cases.inputs import match_inputs
from qknorm_onnx.validation.cases.untried import untried

IDS = np.array([[5, 9, 101, 7], [8, 8, 100, 6]])
FLAGS = np.array([[0, 1, 1, 1], [1, 1, 1, 1]])
X = np.random.default_rng(0).normal(2.0, 3.0, size=(2, 4, 8))


def graph(**shapes) -> ir.Model:
    inputs = [ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT)) for name, shape in shapes.items()]
    return ir.Model(ir.Graph(inputs, [], nodes=[], opset_imports={"": 20}), ir_version=10)


def cases_of(model, **examples):
    return {case.name: case.inputs for case in make_cases(match_inputs(model, list(examples.items())), seeds=2)}


def test_inputs_go_by_name_and_the_rest_in_order():
    model = graph(b=["n", 4], past_0=["n", 2], past_1=["n", 3])
    leaves = [("past[0]", np.zeros((1, 2))), ("b", np.zeros((1, 4))), ("past[1]", np.zeros((1, 3)))]
    assert [found.leaf for found in match_inputs(model, leaves)] == [1, 0, 2]
    with pytest.raises(InputError, match=r"takes past_0, past_1, which .* \(b\) do not give"):
        match_inputs(model, leaves[1:2])
    with pytest.raises(InputError, match="not clear which"):
        match_inputs(model, [*leaves, ("c", np.zeros(1))])
    with pytest.raises(InputError, match="rank 2"):
        match_inputs(graph(b=["n", 4]), [("b", np.zeros(3))])


def test_every_dynamic_dimension_is_varied_and_no_other():
    cases = cases_of(graph(ids=["batch", "seq"], x=["batch", "seq", 8], fixed=[3]), ids=IDS, x=X, fixed=np.ones(3))
    sizes = {name: inputs["x"].shape[:2] for name, inputs in cases.items()}
    assert sizes["batch 1"] == (1, 4)
    assert sizes["batch 3"] == (3, 4)
    assert sizes["length 1"] == (2, 1)
    assert sizes["longer"] == (2, 9)
    assert sizes["batch 3, longer"] == (3, 9)
    for inputs in cases.values():
        assert inputs["ids"].shape == inputs["x"].shape[:2]
        assert inputs["x"].shape[2:] == (8,)
        assert inputs["fixed"].shape == (3,)
    static = cases_of(graph(x=[2, 4, 8]), x=X)
    assert {inputs["x"].shape for inputs in static.values()} == {(2, 4, 8)}
    assert "batch 1" not in static


def test_a_sum_of_lengths_stays_one():
    model = graph(x=["b", "s", 8], past=["b", "p", 8], mask=["b", ir.SymbolicDim("p + s")])
    cases = cases_of(model, x=X, past=np.zeros((2, 3, 8)), mask=np.ones((2, 7)))
    for inputs in cases.values():
        assert inputs["mask"].shape[1] == inputs["x"].shape[1] + inputs["past"].shape[1]


def test_new_values_are_of_the_examples_kind():
    model = graph(ids=["b", "s"], position=["b", "s"], flags=["b", "s"], mask=["b", "s"], seen=["b", "s"], x=["b", "s", 8])
    position, seen = np.arange(4)[None].repeat(2, 0), np.array([[True, False, True, True]] * 2)
    mask = np.where(seen, 0.0, -np.inf)
    cases = cases_of(model, ids=IDS, position=position, flags=FLAGS, mask=mask, seen=seen, x=X)
    longer = cases["batch 3, longer"]
    assert longer["ids"].min() >= 5
    assert longer["ids"].max() <= 101
    assert longer["position"].tolist() == [list(range(9))] * 3
    assert set(np.unique(longer["flags"])) == {0, 1}
    assert longer["seen"][0].tolist() == [True, False, True, True, True, False, True, True, True]
    assert np.array_equal(np.isfinite(longer["mask"]), longer["seen"])
    assert longer["x"].std() == pytest.approx(3.0, rel=0.2)
    assert not np.array_equal(cases["random values 0"]["x"], cases["random values 1"]["x"])
    assert cases["example"]["ids"] is IDS


def test_adversarial_values_do_what_they_are_for():
    cases = cases_of(graph(x=["b", "s", 8]), x=X)
    assert (np.square(cases["large values"]["x"]).sum(-1) > 65504).all()
    assert np.isfinite(rounded_inputs(cases["large values"], "float16")["x"]).all()
    assert (cases["zero rows"]["x"] == 0).all(-1).any()
    assert not (cases["zero rows"]["x"] == 0).all()
    large = cases["large means"]["x"]
    assert abs(large.mean()) > 20 * large.std()
    assert np.abs(cases["small values"]["x"]).max() < 0.1
    assert "zero rows" not in cases_of(graph(ids=["b", "s"]), ids=IDS), "token ids have no zero rows"


def test_inputs_are_rounded_to_the_type_and_clipped_to_its_range():
    rounded = rounded_inputs({"x": np.array([1 + 2.0**-12, 1e6, -np.inf]), "i": np.array([2**20 + 1])}, "float16")
    assert rounded["x"].tolist() == [1.0, 65504.0, -np.inf]
    assert rounded["x"].dtype == np.float64
    assert rounded["i"].tolist() == [2**20 + 1]
    assert rounded_inputs({"x": np.array([1 + 2.0**-9])}, "bfloat16")["x"].tolist() == [1.0]


@pytest.mark.parametrize("dtype", [np.bool_, np.int64])
@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 4, 4)])
def test_a_mask_that_hides_nothing_is_tried_with_padding(dtype, shape):
    model = graph(ids=["b", "s"], mask=["b", *([1, "s"] if len(shape) == 4 else []), "s"])
    cases = cases_of(model, ids=IDS, mask=np.ones(shape, dtype))
    padded = cases["padding"]["mask"]
    assert padded.dtype == dtype
    assert (padded[0, ..., -1] == 0).all()
    assert padded[0, ..., :-1].all()
    assert padded[1:].all()
    assert all(inputs["mask"].all() for name, inputs in cases.items() if name != "padding")


@pytest.mark.parametrize("mask", [FLAGS, np.ones((2, 1), np.int64), np.ones(4, np.bool_)])
def test_no_padding_where_the_example_has_it_or_there_is_no_room(mask):
    symbols = ["b", "s"][-mask.ndim :] if mask.shape[-1] > 1 else ["b", 1]
    assert "padding" not in cases_of(graph(ids=["b", "s"], mask=symbols), ids=IDS, mask=mask)


class Windowed:
    """As much of a module as is asked: one part with a configuration."""

    def __init__(self, window):
        self.config = types.SimpleNamespace(sliding_window=window, max_window_layers=28)

    def modules(self):
        yield self


def notes_of(model, module, **examples):
    inputs = match_inputs(model, list(examples.items()))
    return list(untried(inputs, list(make_cases(inputs)), module=module, model=model))


def test_a_window_that_no_sequence_fills_is_named():
    model = graph(x=["b", "s", 8])  # "longer" has 9
    assert notes_of(model, Windowed(8), x=X) == []
    (note,) = notes_of(model, Windowed(9), x=X)
    assert "up to 9" in note
    assert "window of 9 " in note
    node = ir.Node("ai.qknorm", "QKNormAttention", [], [ir.AttrInt64("left_window_size", 40)])
    model.graph.append(node)
    (note,) = notes_of(model, Windowed(None), x=X)
    assert "window of 40 " in note
    assert notes_of(graph(x=[2, 4, 8]), Windowed(9), x=X) == [], "no length can vary: the example is all there is"


def test_inputs_that_keep_the_example_are_named():
    model = graph(x=["b", "s", 8], start=[], position=["b", "s"])
    (note,) = notes_of(model, Windowed(None), x=X, start=np.array(5), position=np.broadcast_to(np.arange(4), (2, 4)))
    assert "start, position" in note
