"""Modules that PyTorch has changed from outside: compiled, with weights that are computed, with adapters merged into them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

import qknorm_onnx as qk
from tests.foreign.foreign_models import AXES, Foreign, assert_right, qwen3


def exported(source: Foreign, module: torch.nn.Module) -> qk.Program:
    return qk.export(module, kwargs=source.example, dynamic_shapes=AXES, require_fusion=True)


def test_a_second_compiled_module_of_a_process_is_exported_too() -> None:
    first, second = qwen3("sdpa", layers=1), qwen3("sdpa", layers=1)
    compiled = torch.compile(first.module, backend="eager")
    program = exported(first, compiled)
    assert qk.validate(program, compiled, kwargs=first.example).passed
    second.module.compile(backend="eager")
    assert_right(exported(second, second.module).to_proto(), qwen3("sdpa", layers=1))


class LowRank(torch.nn.Module):
    """What an adapter adds to a weight."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.down, self.up = torch.nn.Parameter(torch.randn(2, columns)), torch.nn.Parameter(torch.randn(rows, 2) / 8)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


OLDER = {"older weight_norm": torch.nn.utils.weight_norm, "older spectral_norm": torch.nn.utils.spectral_norm}


@pytest.mark.parametrize(
    "change",
    [
        "weight_norm",
        "adapter",
        "merged adapter",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("spectral_norm", *OLDER)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_computed_weights(change: str) -> None:
    source = qwen3("sdpa", layers=1)
    for linear in (part for part in source.module.modules() if isinstance(part, torch.nn.Linear)):
        if change == "weight_norm":
            parametrizations.weight_norm(linear)
        elif change == "spectral_norm":
            parametrizations.spectral_norm(linear)
        elif change in OLDER:
            OLDER[change](linear)
        else:
            parametrize.register_parametrization(linear, "weight", LowRank(*linear.weight.shape))
        if change == "merged adapter":
            parametrize.remove_parametrizations(linear, "weight")
    source.module.eval()  # in training, each call of spectral_norm changes its weights
    assert_right(exported(source, source.module).to_proto(), source)
