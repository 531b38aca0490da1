"""Dynamic shapes are honoured or refused by name, whatever the sizes of the example."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from qknorm_onnx.errors import ExportError
from qknorm_onnx.torch_export.exporter import export_graph


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Mix(nn.Module):
    def forward(self, x, mask=None, **extra):
        y = x * 2 + extra["bias"]
        return y if mask is None else y * mask


class Nested(nn.Module):
    def forward(self, x, caches):
        return x + caches[0]["key"].sum() + caches[1]["key"].mean()


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[1] > 1 else x * 3


class HarmlessBranch(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[1] > 1 else x + x


class CausalIfMany(nn.Module):
    """is_causal from the length of the query: frozen at the exported length, one query would see one key."""

    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(q.shape[2] > 1))


class FixedSize(nn.Module):
    def forward(self, x):
        return x + torch.ones(4, 5)


class Window(nn.Module):
    def forward(self, x):
        return x[:, :8] if x.shape[1] > 8 else x * 2


def shape_of(model, index=0):
    return [getattr(dim, "value", dim) for dim in model.graph.inputs[index].shape]


def refusal(module, *args, **options):
    with pytest.raises(ExportError) as caught:
        export_graph(module.eval(), args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: "rows", 1: "columns"}},
        {"x": ("rows", "columns")},
        ({0: "rows", 1: "columns"},),
        {"x": {0: Dim("rows"), 1: Dim("columns", min=1, max=64)}},
        {"x": {0: "rows", -1: "columns"}},
    ],
)
def test_every_way_to_write_them(shapes):
    model, _ = export_graph(Double(), (torch.randn(4, 5),), dynamic_shapes=shapes)
    assert shape_of(model) == ["rows", "columns"]


def test_hints_without_names():
    model, _ = export_graph(Double(), (torch.randn(4, 5),), dynamic_shapes={"x": {0: Dim.DYNAMIC, 1: Dim.AUTO}})
    assert all(isinstance(dim, str) for dim in shape_of(model))


def test_none_is_static():
    for shapes in (None, {"x": None}, {"x": {0: None, 1: 5}}, {"x": {0: Dim.STATIC}}):
        model, _ = export_graph(Double(), (torch.randn(1, 5),), dynamic_shapes=shapes)
        assert shape_of(model) == [1, 5]


def test_names_of_kwargs(run_model):
    kwargs = {"bias": torch.randn(4, 5), "mask": torch.ones(4, 5)}
    shapes = {name: {0: "rows"} for name in ("x", "bias", "mask")}
    for given in (shapes, {"x": {0: "rows"}, "mask": {0: "rows"}, "extra": {"bias": {0: "rows"}}}):
        model, _ = export_graph(Mix(), (torch.randn(4, 5),), kwargs, dynamic_shapes=given)
        assert {value.name for value in model.graph.inputs} == {"x", "bias", "mask"}
        assert all(value.shape[0].value == "rows" for value in model.graph.inputs)
    inputs = {name: torch.randn(7, 5) for name in ("x", "bias", "mask")}
    assert torch.allclose(run_model(model, inputs)[0], Mix()(**inputs))


def test_nested_inputs_are_named_by_their_place():
    caches = [{"key": torch.randn(2, 3)}, {"key": torch.randn(2, 4)}]
    by_place = {"x": {0: "rows"}, "caches": [{"key": {1: "past"}}, {"key": {0: "b"}}]}
    by_name = {"x": {0: "rows"}, "caches.0.key": {1: "past"}, "caches.1.key": {0: "b"}}
    for shapes in (by_place, by_name):
        model, _ = export_graph(Nested(), (torch.randn(4), caches), dynamic_shapes=shapes)
        assert [value.name for value in model.graph.inputs] == ["x", "caches.0.key", "caches.1.key"]
        assert shape_of(model, 1) == [2, "past"]
        assert shape_of(model, 2) == ["b", 4]


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("columns", [0, 1, 3])
def test_examples_of_size_zero_and_one_stay_dynamic(run_model, rows, columns):
    shapes = {"x": {0: "rows", 1: "columns"}, "mask": {0: "rows", 1: "columns"}, "bias": {1: "columns"}}
    kwargs = {"mask": torch.ones(rows, columns), "bias": torch.randn(1, columns)}
    model, _ = export_graph(Mix(), (torch.randn(rows, columns),), kwargs, dynamic_shapes=shapes)
    assert shape_of(model) == ["rows", "columns"]
    assert [getattr(dim, "value", dim) for dim in model.graph.outputs[0].shape] == ["rows", "columns"]
    for size in ((4, 6), (1, 1), (0, 3), (5, 0)):
        inputs = {"x": torch.randn(size), "mask": torch.randn(size), "bias": torch.randn(1, size[1])}
        assert torch.allclose(run_model(model, inputs)[0], Mix()(**inputs))


def test_a_sum_of_names_follows_its_terms():
    class Cat(nn.Module):
        def forward(self, past, new, mask):
            return torch.cat([past, new], 1) * mask

    shapes = {"past": {1: "past"}, "new": {1: "new"}, "mask": {1: "past + new"}}
    args = (torch.randn(2, 0), torch.randn(2, 1), torch.ones(2, 1))
    model, _ = export_graph(Cat(), args, dynamic_shapes=shapes)
    assert shape_of(model, 2) == [2, "past + new"]


def test_enlarging_that_the_module_does_not_bear_is_refused_by_name():
    message = refusal(FixedRows(), torch.randn(1, 5), dynamic_shapes={"x": {0: "rows"}})
    assert "input x axis 0 ('rows')" in message
    assert "sizes of 2 or more" in message


class FixedRows(nn.Module):
    def forward(self, x):
        return x.reshape(5)


def test_a_branch_on_the_size_is_refused_not_frozen():
    message = refusal(Branching(), torch.randn(4, 5), dynamic_shapes={"x": {0: "rows", 1: "columns"}})
    assert "input x axis 1 ('columns')" in message
    assert "min=2" in message
    export_graph(Branching(), (torch.randn(4, 5),), dynamic_shapes={"x": {1: Dim("columns", min=2)}})


def test_a_branch_whose_ways_agree_is_no_obstacle():
    model, _ = export_graph(HarmlessBranch(), (torch.randn(4, 5),), dynamic_shapes={"x": {0: "rows", 1: "columns"}})
    assert shape_of(model) == ["rows", "columns"]


def test_causality_that_depends_on_the_length_is_refused():
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 8, 8)
    message = refusal(CausalIfMany(), query, key, key, dynamic_shapes={"q": {2: "new"}})
    assert "input q axis 2 ('new')" in message


def test_a_size_in_the_place_of_a_plain_bool_is_explained():
    class SymbolicCausal(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)

    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 8, 8)
    assert "on a dynamic size" in refusal(SymbolicCausal(), query, key, key, dynamic_shapes={"q": {2: "new"}})


def test_a_branch_at_a_larger_size_is_refused():
    message = refusal(Window(), torch.randn(2, 5), dynamic_shapes={"x": {1: "columns"}})
    assert "above size 8" in message
    export_graph(Window(), (torch.randn(2, 5),), dynamic_shapes={"x": {1: Dim("columns", max=8)}})


@pytest.mark.parametrize("dim", ["rows", Dim("rows"), Dim.DYNAMIC])
def test_a_size_that_the_module_fixes_is_refused(dim):
    assert "input x axis 0" in refusal(FixedSize(), torch.randn(4, 5), dynamic_shapes={"x": {0: dim}})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"y": {0: "rows"}}, "names 'y', which is no input of the example; inputs are x"),
        ({"x": {2: "rows"}}, "names axis 2; the example has 2"),
        ({"x": {0: 7}}, "fixes x axis 0 at 7; the example has 4"),
        ({"x": {0: 1.5}}, "x axis 0 is 1.5"),
        ({"x": "rows"}, "dynamic_shapes of x is 'rows'"),
        ({"x": {0: "n", 1: "n"}}, "one name means one size"),
        (({0: "rows"}, None), "has 2 entries, the module is called with 1"),
    ],
)
def test_what_does_not_fit_the_example_is_refused_before_the_export(shapes, message):
    assert message in refusal(Double(), torch.randn(4, 5), dynamic_shapes=shapes)
