"""The honest models: twelve forms of attention, exported once, and the same export with other weights."""

from __future__ import annotations

import dataclasses
import functools
from types import MappingProxyType
from typing import Final

import numpy as np
import onnx_ir as ir

import qknorm_onnx as qk
from tests.validation_mutants.text_model import Example, TextForm, TextModel, example_of

FORMS: Final = MappingProxyType(
    {
        "rms": TextForm(),
        "rms-cache": TextForm(mask=True, positions=True, past=True),
        "embedder": TextForm(mask=True, pooled=True, bias=True),
        "cosine": TextForm(
            tokens=False, norm="l2", epsilon=1e-12, epsilon_mode="clamp", rotary="none", causal=False, scale=5.0
        ),
        "layer-sink-cap": TextForm(
            norm="layer", epsilon=1e-5, softcap=4.0, sink=True, window=5, rotary="neighbours", mask=True
        ),
        "hidden": TextForm(norm_axis="hidden", kv_heads=4, epsilon=1e-5),
        "rotary-first": TextForm(rotary_first=True, kv_heads=1),
        "learned-positions": TextForm(
            norm="layer", rotary="none", learned_positions=True, positions=True, causal=False, mask=True, bias=True
        ),
        "l2-window-cache": TextForm(norm="l2", epsilon=1e-6, epsilon_mode="outside_sqrt", scale=6.0, window=40, past=True),
        "no-gains": TextForm(gains=False, kv_heads=4, window=5, mask=True, past=True, positions=True),
        "cap": TextForm(tokens=False, softcap=6.0, scale=0.7, head_size=12),
        "two-layers": TextForm(layers=2, window=17, mask=True, kv_heads=2),
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Honest:
    """A module, its export with one node per attention, and how it is called."""

    form: TextForm
    module: TextModel
    model: ir.Model
    example: Example


@functools.cache
def honest(name: str) -> Honest:
    form = FORMS[name]
    module, example = TextModel(form).eval(), example_of(form)
    program = qk.export(module, kwargs=example.kwargs, dynamic_shapes=example.dynamic_shapes, require_fusion=True)
    return Honest(form, module, program.model, example)


def with_other_weights(source: Honest, seed: int) -> Honest:
    """The same form with weights of another seed: in the graph, each initializer that holds a parameter takes the new one."""
    module = TextModel(source.form, seed=seed).eval()
    model = source.model.clone()
    old, new = dict(source.module.named_parameters()), dict(module.named_parameters())
    taken: set[str] = set()
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        array = value.const_value.numpy()
        for parameter, tensor in old.items():
            before, after = tensor.detach().numpy(), new[parameter].detach().numpy()
            if array.size == before.size and array.dtype == before.dtype:
                for turn in (lambda a: a, lambda a: a.T):
                    if np.array_equal(turn(before).ravel(), array.ravel()):
                        value.const_value = ir.tensor(np.ascontiguousarray(turn(after)).reshape(array.shape), name=name)
                        taken.add(parameter)
                        break
    missing = set(old) - taken
    assert not missing, f"{missing} are not in the graph by value: the export folded them"
    return Honest(source.form, module, model, example_of(source.form, seed=seed + 1))
