"""Every tensor of the example call becomes a named graph input; outputs are flat and named."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from qknorm_onnx.errors import ExportError
from qknorm_onnx.torch_export.exporter import export_graph
from qknorm_onnx.torch_export.signatures.signature_wrapper import ExplicitSignature, example_call, named_outputs


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Flexible(nn.Module):
    def forward(self, x, *rest, flag=False, **named):
        return {"sum": x + sum(rest), "nothing": None, "pair": (named["scale"] * x, [x - 1]), "flag": x if flag else -x}


def test_names_and_constants():
    x, other = torch.randn(2), torch.randn(2)
    call = example_call(Flexible(), (x, other, other), {"flag": True, "scale": x, "mode": "fast"})
    assert list(call.tensors) == ["x", "rest_0", "rest_1", "scale"]
    args, kwargs = call.arguments([x + 1, x + 2, x + 3, x + 4])
    assert torch.equal(args[2], x + 3)
    assert kwargs["flag"] is True
    assert kwargs["mode"] == "fast"
    assert torch.equal(kwargs["scale"], x + 4)


def test_outputs_are_flat_and_named():
    module = Flexible()
    wrapper = ExplicitSignature(
        module, example_call(module, (torch.ones(2), torch.ones(2)), {"scale": torch.ones(2), "flag": True})
    )
    assert wrapper.output_names() == ["sum", "pair.0", "pair.1.0", "flag_output" if "flag" in wrapper.call.tensors else "flag"]


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (torch.ones(1), ["output"]),
        ((torch.ones(1), None, torch.ones(1)), ["output_0", "output_2"]),
        ({"logits": torch.ones(1), "loss": None, "steps": 3}, ["logits"]),
        (Pair(torch.ones(1), torch.ones(1)), ["output_0", "output_1"]),
    ],
)
def test_names_of_outputs(output, names):
    assert [name for name, _ in named_outputs(output)] == names


def test_an_output_that_is_no_tensor_is_refused():
    with pytest.raises(ExportError, match="output_1 is a object"):
        list(named_outputs((torch.ones(1), object())))


def test_an_output_with_the_name_of_an_input_gets_another():
    class Same(nn.Module):
        def forward(self, x):
            return {"x": x * 2}

    model, _ = export_graph(Same(), (torch.randn(2),))
    assert [value.name for value in model.graph.outputs] == ["x_output"]


def test_model_output_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutputWithPast(logits=torch.ones(1), hidden_states=(torch.ones(1), torch.ones(1)))
    assert [name for name, _ in named_outputs(output)] == ["logits", "hidden_states.0", "hidden_states.1"]


def test_the_same_tensor_twice_is_two_inputs(run_model):
    class Difference(nn.Module):
        def forward(self, a, b):
            return a - b

    x = torch.randn(3)
    model, _ = export_graph(Difference(), (x, x))
    (found,) = run_model(model, {"a": torch.ones(3), "b": torch.zeros(3)})
    assert torch.equal(found, torch.ones(3))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((torch.ones(1),), {"x": torch.ones(1)}, "multiple values"),
        ((3,), {}, "hold no tensor"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(args, kwargs, message):
    with pytest.raises(ExportError, match=message):
        export_graph(Flexible(), args, kwargs)


def test_a_module_that_fails_says_so():
    with pytest.raises(ExportError, match=r"Linear fails on the example inputs: RuntimeError: .*shapes"):
        export_graph(nn.Linear(3, 4), (torch.randn(2, 5),))
