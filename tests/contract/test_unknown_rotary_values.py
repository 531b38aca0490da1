"""Contract 13 for `QKNormRotary`: a value that a consumer does not know is refused by it; see `test_unknown_values.py`."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qknorm_onnx.graph.canonical.qk_norm_node import RotaryInputs, make_rotary_node, read_rotary_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.lowering.registry import TARGETS, lower
from qknorm_onnx.spec import qk_norm_spec
from qknorm_onnx.spec.attributes import attribute_fields
from qknorm_onnx.spec.cpp_header import choices_of
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, RotarySpec, SpecError
from qknorm_onnx.spec.reference import qk_norm_rotary
from qknorm_onnx.torch_export.operators import eager
from qknorm_onnx.torch_export.operators.torch_op import qk_norm_rotary as torch_operator
from tests.contract.unknown_values import UNKNOWN, injected
from tests.native import kernel_call
from tests.native.installed_library import installed_library

CHOICES = {f.onnx_name: choices_of(QKNormRotarySpec, f) for f in attribute_fields(QKNormRotarySpec)}
CHOICES = {name: choices for name, choices in CHOICES.items() if choices}
KNOWN = QKNormRotarySpec(num_heads=4, kind="rms", epsilon=1e-6, rotary=RotarySpec(order="after_norm"))
Inputs = dict[str, np.ndarray[Any, Any]]


def inputs_of() -> Inputs:
    rng = np.random.default_rng(5)
    tables = {name: rng.normal(size=(1, 3, 4)) for name in ("cos", "sin")}
    return {"x": rng.normal(size=(2, 3, 32)), "weight": rng.normal(size=8), **tables}


def tensors_of() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in inputs_of().items()}


def model_of() -> ir.Model:
    values = {
        name: ir.Value(
            name=name, shape=ir.Shape([*[None] * (array.ndim - 1), array.shape[-1]]), type=ir.TensorType(ir.DataType.FLOAT)
        )
        for name, array in inputs_of().items()
    }
    node = make_rotary_node(KNOWN, RotaryInputs(**values), name="prepare")
    graph = ir.Graph(list(values.values()), node.outputs, nodes=[node], opset_imports={"": 23, "ai.qknorm": 1})
    return ir.Model(graph, ir_version=10)


def read_as(spec: QKNormRotarySpec, module: str, run: Callable[[], object]) -> None:
    """Runs with the reader of nodes in `module` that answers with `spec`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.read_rotary_node", lambda node: (spec, read_rotary_node(node)[1]))
        run()


def body_of(spec: QKNormRotarySpec) -> None:
    model = model_of()
    read_as(spec, "qknorm_onnx.graph.passes.attach_bodies", lambda: AttachBodiesPass()(model))


def lowered_to(target: str) -> Callable[[QKNormRotarySpec], None]:
    def run(spec: QKNormRotarySpec) -> None:
        model = model_of()
        read_as(spec, "qknorm_onnx.lowering.registry", lambda: lower(model, target=target, provider="cpu"))

    return run


# The reference rounds nowhere, and has no meaning for the order of weight and cast.
CONSUMERS: dict[str, tuple[Callable[[QKNormRotarySpec], object], frozenset[str]]] = {
    "reference": (lambda spec: qk_norm_rotary(spec, inputs_of()), frozenset(CHOICES) - {"norm_weight_order"}),
    "eager": (lambda spec: eager.rotary(spec, tensors_of()), frozenset(CHOICES)),
    "torch operator": (lambda spec: torch_operator(spec, **tensors_of()), frozenset(CHOICES)),
    "body": (body_of, frozenset(CHOICES)),
    **{name: (lowered_to(name), frozenset(CHOICES)) for name, target in TARGETS.items() if target.emit is not None},
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_known_node_is_served(consumer: str) -> None:
    CONSUMERS[consumer][0](KNOWN)


@pytest.mark.parametrize("attribute", CHOICES)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_an_unknown_value_is_refused_in_one_line(consumer: str, attribute: str) -> None:
    with pytest.raises(SpecError, match=f"is '{UNKNOWN}'; it must be one of '") as caught:
        CONSUMERS[consumer][0](injected(KNOWN, attribute))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("consumer", "attribute"), [(name, field) for name, found in CONSUMERS.items() for field in sorted(found[1])]
)
def test_a_value_that_only_the_types_know_is_refused(consumer: str, attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_norm_spec, "_require_choice", lambda *arguments: None)
    with pytest.raises((SpecError, AssertionError), match=UNKNOWN):
        CONSUMERS[consumer][0](injected(KNOWN, attribute))


@pytest.mark.parametrize("attribute", CHOICES)
def test_a_file_is_refused(attribute: str) -> None:
    node = model_of().graph.node(0)
    node.attributes[attribute] = ir.AttrString(attribute, UNKNOWN)
    with pytest.raises(SpecError, match=f"is '{UNKNOWN}'; it must be one of '"):
        read_rotary_node(node)


@pytest.mark.parametrize("attribute", CHOICES)
def test_the_c_door_refuses_what_is_no_enumerator(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = installed_library()
    for value in (len(CHOICES[attribute]), -1, 1 << 33, -(1 << 63)):
        packed = kernel_call.pack_attributes(KNOWN)
        setattr(packed, attribute, value)
        message = kernel_call.Message()
        assert library.door.qknorm_cpu_check_rotary_attributes(ctypes.byref(packed), ctypes.byref(message))
        assert re.match(f"attribute {attribute} is {value}; it must be one of 0 ", message.text.decode())
        monkeypatch.setattr(kernel_call, "pack_attributes", lambda spec, packed=packed: packed)
        with pytest.raises(kernel_call.KernelError, match=f"attribute {attribute} is {value}; it must be one of 0"):
            library.rotary(KNOWN, inputs_of())
        monkeypatch.undo()
