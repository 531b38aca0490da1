"""The inputs a model is judged on: matched with the graph, varied in size, and of the example's kind."""

from __future__ import annotations

import types

import numpy as np
import onnx_ir as ir
import pytest

from qknorm_onnx.errors import InputError
from qknorm_onnx.validation.candidate import rounded_inputs
from qknorm_onnx.validation.cases.domain import Domain, windows_of
from qknorm_onnx.validation.cases.inputs import match_inputs
from qknorm_onnx.validation.cases.made import make_cases
from qknorm_onnx.validation.cases.untried import untried

IDS = np.array([[5, 9, 101, 7], [8, 8, 100, 6]])
FLAGS = np.array([[0, 1, 1, 1], [1, 1, 1, 1]])
X = np.random.default_rng(0).normal(2.0, 3.0, size=(2, 4, 8))


def graph(**shapes) -> ir.Model:
    inputs = [ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT)) for name, shape in shapes.items()]
    return ir.Model(ir.Graph(inputs, [], nodes=[], opset_imports={"": 20}), ir_version=10)


def cases_of(model, domain=None, **examples):
    return {case.name: case.inputs for case in make_cases(match_inputs(model, list(examples.items())), domain=domain, seeds=2)}


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


def test_a_large_cache_is_tried_alone_and_in_float32():
    """Cached keys pass no norm: their logits are hundreds, whose steps in a half type decide a row."""
    inputs = match_inputs(graph(x=["b", "s", 8], past_key=["b", "p", 8]), [("x", X), ("past_key", np.abs(X[:, :3]))])
    cases = {case.name: case for case in make_cases(inputs)}
    large, cached = cases["large values"], cases["large cache"]
    assert np.abs(large.inputs["x"]).max() > 100 > np.abs(large.inputs["past_key"]).max() and large.in_half
    assert np.abs(cached.inputs["past_key"]).max() > 100 > np.abs(cached.inputs["x"]).max() and not cached.in_half
    assert "large cache" not in cases_of(graph(x=["b", "s", 8]), x=X)
    assert "large values" not in cases_of(graph(past_key=["b", "p", 8]), past_key=X)


def test_inputs_are_rounded_to_the_type_and_clipped_to_its_range():
    rounded = rounded_inputs({"x": np.array([1 + 2.0**-12, 1e6, -np.inf]), "i": np.array([2**20 + 1])}, "float16")
    assert rounded["x"].tolist() == [1.0, 65504.0, -np.inf]
    assert rounded["x"].dtype == np.float64
    assert rounded["i"].tolist() == [2**20 + 1]
    assert rounded_inputs({"x": np.array([1 + 2.0**-9])}, "bfloat16")["x"].tolist() == [1.0]


PADDING = ("left padding", "right padding", "inner padding", "a row of padding")
OF_ONE = ("left padding, batch 1", "inner padding, batch 1")


def padding_cases(model, **examples):
    made = make_cases(match_inputs(model, list(examples.items())))
    return {case.name: case for case in made if case.name in (*PADDING, *OF_ONE)}


@pytest.mark.parametrize("dtype", [np.bool_, np.int64])
def test_a_mask_that_hides_nothing_is_tried_with_padding_of_every_kind(dtype):
    model = graph(ids=["b", "s"], mask=["b", "s"])
    cases = padding_cases(model, ids=IDS, mask=np.ones((2, 4), dtype))
    assert tuple(cases) == (*PADDING, *OF_ONE)
    alone = [cases.pop(name).inputs["mask"] for name in OF_ONE]
    assert all(mask.shape[0] == 1 and mask.any() and not mask.all() for mask in alone), "the only row is padded"
    masks = {name: case.inputs["mask"] for name, case in cases.items()}
    assert all(mask.dtype == dtype and mask.shape == cases[name].inputs["ids"].shape for name, mask in masks.items())
    assert not masks["left padding"][0, :3].any() and masks["left padding"][0, 3:].all()
    assert not masks["left padding"][1, 0] and masks["left padding"][1, 1:].all(), "other rows, other padding"
    assert masks["right padding"][:, :3].all() and not masks["right padding"][:, -1].any()
    inner = masks["inner padding"]
    assert inner[:, 0].all() and inner[:, -1].all() and not inner.all(1).any()
    assert not masks["a row of padding"][1].any() and masks["a row of padding"][0].all()


def test_rows_of_padding_are_told_by_what_other_padding_changes():
    model = graph(ids=["b", "s"], mask=["b", "s"])
    cases = padding_cases(model, ids=IDS, mask=np.ones((2, 4), np.int64))
    assert cases["inner padding"].with_other_padding is None, "every query sees a key: every row is judged"
    left = cases["left padding"]
    changed = left.inputs["ids"] != left.with_other_padding["ids"]
    assert np.array_equal(changed, left.inputs["mask"] == 0)


def test_padding_reaches_into_the_cache_and_positions_are_counted_from_the_first_token():
    model = graph(ids=["b", "s"], mask=["b", ir.SymbolicDim("p + s")], position=["b", "s"], past_key=["b", "p", 8])
    examples = {"ids": IDS, "mask": np.ones((2, 7), np.int64), "position": np.arange(3, 7)[None].repeat(2, 0)}
    left = padding_cases(model, **examples, past_key=np.random.default_rng(1).normal(size=(2, 3, 8)))["left padding"]
    hidden = left.inputs["mask"] == 0
    assert hidden.sum(1).tolist() == [5, 1]
    other = left.with_other_padding
    assert np.array_equal((left.inputs["past_key"] != other["past_key"]).any(-1), hidden[:, :3])
    assert np.array_equal(left.inputs["ids"] != other["ids"], hidden[:, 3:])
    assert left.inputs["position"][0].tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert left.inputs["position"][1].tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_a_mask_of_four_axes_is_tried_with_single_hidden_keys():
    model = graph(ids=["b", "s"], mask=["b", 1, "s", "s"])
    cases = cases_of(model, ids=IDS, mask=np.ones((2, 1, 4, 4), np.bool_))
    assert not cases["last key hidden"]["mask"][0, ..., -1].any() and cases["last key hidden"]["mask"][1].all()
    assert not cases["second key hidden"]["mask"][0, ..., 1].any()
    causal = np.where(np.tril(np.ones((4, 4), np.bool_)), 0.0, -np.inf)[None, None].repeat(2, 0)
    cases = cases_of(model, ids=IDS, mask=causal)
    assert "last key hidden" not in cases, "the example hides it from all but one"
    assert np.isneginf(cases["second key hidden"]["mask"][0, ..., 1]).all()
    assert not np.isneginf(cases["second key hidden"]["mask"][..., 0]).any(), "every query still sees a key"


@pytest.mark.parametrize("mask", [np.ones((2, 1), np.int64), np.ones(4, np.bool_)])
def test_no_padding_where_there_is_no_room_or_no_row(mask):
    symbols = ["b", "s"][-mask.ndim :] if mask.shape[-1] > 1 else ["b", 1]
    assert not set(PADDING) & set(cases_of(graph(ids=["b", "s"], mask=symbols), ids=IDS, mask=mask))


def test_an_empty_past_starts_counting_at_zero():
    model = graph(ids=["b", "s"], position=["b", "s"], past_key=["b", 2, "p", 8], mask=["b", ir.SymbolicDim("p + s")])
    position = np.arange(3, 7)[None].repeat(2, 0)
    cases = cases_of(model, ids=IDS, position=position, past_key=np.ones((2, 2, 3, 8)), mask=np.ones((2, 7), np.int64))
    empty = cases["empty past"]
    assert empty["past_key"].shape == (2, 2, 0, 8)
    assert empty["mask"].shape == empty["ids"].shape == (2, 4)
    assert empty["position"].tolist() == [[0, 1, 2, 3]] * 2
    assert cases["empty past, one token"]["ids"].shape == (1, 1)
    context = cases_of(graph(x=["b", "s", 8], context=["b", "n", 8]), x=X, context=X)
    assert not any("past" in name for name in context), "a context is no cache: without a key there is no attention"


def test_tokens_are_drawn_from_the_whole_table_where_one_is_known():
    model = graph(ids=["b", "s"])
    assert "whole vocabulary" not in cases_of(model, ids=IDS)
    cases = cases_of(model, Domain(rows={"ids": 400}), ids=IDS)
    assert {0, 399} <= set(cases["first and last token"]["ids"].ravel())
    drawn = [cases[name]["ids"] for name in ("whole vocabulary", "whole vocabulary, again")]
    assert len(np.unique(drawn[0])) >= 256
    assert np.array_equal(np.unique(np.concatenate(drawn, None)), np.arange(400))


def test_an_arange_of_tokens_is_no_position():
    arange = np.arange(12).reshape(2, 6)
    assert {i.kind for i in match_inputs(graph(input_ids=["b", "s"]), [("input_ids", arange)])} == {"tokens"}
    (ids,) = Domain(rows={"words": 50}).refined(match_inputs(graph(words=["b", "s"]), [("words", arange)]))
    assert ids.kind == "tokens", "the module picks rows of a table with them"
    (position,) = Domain(rows={"position_ids": 50}).refined(
        match_inputs(graph(position_ids=["b", "s"]), [("position_ids", arange)])
    )
    assert position.kind == "positions", "a table of positions is one, too"


def test_positions_are_shifted_restarted_and_repeated():
    model = graph(ids=["b", "s"], position=["b", "s"])
    position = np.arange(4)[None].repeat(2, 0)
    cases = cases_of(model, ids=IDS, position=position)
    assert cases["positions shifted"]["position"].tolist() == [[7, 8, 9, 10], [2, 3, 4, 5]]
    assert cases["positions restarted"]["position"].tolist() == [[0, 1, 0, 1]] * 2
    assert cases["positions repeated"]["position"].tolist() == [[0, 0, 1, 1]] * 2
    bounded = cases_of(model, Domain(rows={"position": 8}), ids=IDS, position=position)
    assert bounded["positions far"]["position"].max() == 7, "a table of 8 rows has no position 300"
    written = cases_of(model, Domain(written=frozenset({"position"})), ids=IDS, position=position)
    assert "positions shifted" in written
    assert not {"positions restarted", "positions repeated"} & set(written), "a place that is written twice may hold either"
    for name, rows in {"positions anywhere": 400, "in a table": 8}.items():
        domain = Domain(rows={"position": rows} if name == "in a table" else {})
        anywhere = cases_of(model, domain, ids=IDS, position=position)["positions anywhere"]["position"]
        assert (np.diff(anywhere) > 0).all() and anywhere.max() < rows and not np.array_equal(*anywhere)


def test_projections_are_scaled_to_sizes_near_every_epsilon():
    domain = Domain(scalable={"q_proj.weight": 0.5, "k_proj.weight": 3.0})
    cases = [case for case in make_cases(match_inputs(graph(x=["b", "s", 8]), [("x", X)]), domain=domain) if case.weights]
    assert len(cases) == 6
    for case in cases:
        for name, of in domain.scalable.items():
            factor = case.weights.factors[name]
            assert np.log2(factor) == round(np.log2(factor)), "a power of two changes no digit"
            assert 0.7 < factor * of / case.weights.size < 1.5
    assert {case.weights.size for case in cases if case.in_half} == {1e-4}


class Windowed:
    """As much of a module as is asked: one part with a configuration."""

    def __init__(self, window):
        self.config = types.SimpleNamespace(sliding_window=window, max_window_layers=28)

    def modules(self):
        yield self


def notes_of(model, module, **examples):
    inputs = match_inputs(model, list(examples.items()))
    domain = Domain(windows=windows_of(module, model))
    return list(untried(inputs, list(make_cases(inputs, domain=domain)), domain=domain))


def windows_in(notes):
    return [note for note in notes if "window" in note]


def test_one_length_is_beyond_every_window_that_can_be_afforded():
    model = graph(x=["b", "s", 8])
    node = ir.Node("ai.qknorm", "QKNormAttention", [], [ir.AttrInt64("left_window_size", 40)])
    model.graph.append(node)
    assert windows_of(Windowed(50), model) == (41, 50), "a query at p sees p - 40 .. p: 41 tokens"
    cases = cases_of(model, Domain(windows=(41, 50)), x=X)
    assert cases["53 tokens"]["x"].shape == (1, 53, 8)
    assert windows_in(notes_of(model, Windowed(50), x=X)) == []
    assert "4099 tokens" not in cases_of(model, Domain(windows=(4096,)), x=X), "too large to be tried"


def test_a_window_that_no_sequence_fills_is_named():
    model = graph(x=["b", "s", 8])
    (note,) = windows_in(notes_of(model, Windowed(4096), x=X))
    assert "up to 64" in note
    assert "window of 4096:" in note
    assert windows_in(notes_of(graph(x=[2, 4, 8]), Windowed(9), x=X)) == [], "no length can vary: the example is all there is"


def test_what_no_case_can_show_is_said():
    notes = notes_of(graph(x=[2, 4, 8], start=[]), Windowed(None), x=X, start=np.array(5))
    said = " | ".join(notes)
    for kind in ("batch is fixed", "length is fixed", "padding untried", "empty past", "other positions untried", "start"):
        assert kind in said, kind
    assert "norms near their epsilon tried by inputs only" in said
    tokens = notes_of(graph(ids=["b", "s"]), Windowed(None), ids=IDS)
    assert "ids was not seen to pick rows of a table: values outside the example's 5 to 101 untried" in tokens
    assert any("norms near their epsilon untried" in note for note in tokens)
