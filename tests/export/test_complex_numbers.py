"""Complex numbers in real ones: each function against PyTorch's own complex tensors, eagerly and exported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qknorm_onnx.torch_export.exporter import export_graph
from qknorm_onnx.torch_export.patches.complex_numbers import RealArithmetic

# name -> what is done to x (3, 4, 6) and y (4, 6), complex, and w (4, 6), real
OPERATIONS = {
    "view": lambda x, y, w: x.view(3, 2, 12),
    "reshape": lambda x, y, w: x.reshape(-1, 6),
    "flatten": lambda x, y, w: x.flatten(1),
    "unflatten": lambda x, y, w: x.unflatten(-1, (2, 3)),
    "split": lambda x, y, w: x.split([1, 2, 3], dim=-1)[1],
    "split in equal parts": lambda x, y, w: torch.split(x, 2, dim=1)[1],
    "chunk": lambda x, y, w: x.chunk(2, dim=-1)[1],
    "unbind": lambda x, y, w: x.unbind(1)[2],
    "slice": lambda x, y, w: x[:, 1:3, ::2],
    "index by numbers": lambda x, y, w: x[1, None, ..., -1],
    "index by tensor": lambda x, y, w: x[:, torch.tensor([3, 0])],
    "index_select": lambda x, y, w: torch.index_select(x, 2, torch.tensor([5, 1, 1])),
    "gather": lambda x, y, w: torch.gather(y, 0, torch.tensor([[3, 0, 1, 2, 0, 3]])),
    "select": lambda x, y, w: x.select(1, 3),
    "narrow": lambda x, y, w: x.narrow(2, 1, 4),
    "unsqueeze": lambda x, y, w: x.unsqueeze(1),
    "squeeze": lambda x, y, w: x[:1].squeeze(0),
    "cat": lambda x, y, w: torch.cat([x, y[None]], dim=0),
    "cat with a real one": lambda x, y, w: torch.cat([y, w], dim=-1),
    "stack": lambda x, y, w: torch.stack([y, x[1]], dim=-1),
    "expand": lambda x, y, w: y.unsqueeze(0).expand(5, -1, -1),
    "repeat": lambda x, y, w: y.repeat(2, 1),
    "repeat_interleave": lambda x, y, w: y.repeat_interleave(2, dim=0),
    "transpose": lambda x, y, w: x.transpose(1, 2),
    "permute": lambda x, y, w: x.permute(2, 0, 1),
    "T": lambda x, y, w: y.T,
    "mH": lambda x, y, w: x.mH,
    "flip": lambda x, y, w: x.flip(1),
    "roll": lambda x, y, w: x.roll(1, dims=2),
    "pad": lambda x, y, w: nn.functional.pad(x, (1, 2)),
    "pad_sequence": lambda x, y, w: nn.utils.rnn.pad_sequence([y, x[0, :2]], batch_first=True, padding_value=1.5),
    "conj": lambda x, y, w: x.conj(),
    "neg": lambda x, y, w: -x,
    "add": lambda x, y, w: x + y,
    "add a real one": lambda x, y, w: w + x,
    "add a number": lambda x, y, w: 2 + x,
    "sub": lambda x, y, w: x - y,
    "subtract from a number": lambda x, y, w: 1 - x,
    "sub of a real one": lambda x, y, w: w - x,
    "mul": lambda x, y, w: x * y,
    "mul by a real one": lambda x, y, w: w * x,
    "mul by a number": lambda x, y, w: 0.5 * x,
    "mul by i": lambda x, y, w: x * 1j,
    "a real one times i": lambda x, y, w: w * (2 + 1j),
    "div": lambda x, y, w: x / (y + 3),
    "div by a real one": lambda x, y, w: x / (w * w + 1),
    "a number by it": lambda x, y, w: 2 / (y + 3),
    "reciprocal": lambda x, y, w: torch.reciprocal(y + 3),
    "pow": lambda x, y, w: x**3,
    "square": lambda x, y, w: torch.square(x),
    "matmul": lambda x, y, w: x @ y.T,
    "matmul with a real one": lambda x, y, w: w.to(x.dtype) @ x.transpose(1, 2),
    "einsum": lambda x, y, w: torch.einsum("abc,bc->ac", x, y),
    "sum": lambda x, y, w: x.sum(-1),
    "mean": lambda x, y, w: x.mean(dim=(0, 2)),
    "cumsum": lambda x, y, w: x.cumsum(1),
    "exp": lambda x, y, w: torch.exp(x),
    "exp of an angle": lambda x, y, w: torch.exp(1j * w),
    "abs": lambda x, y, w: x.abs(),
    "angle": lambda x, y, w: torch.angle(x),
    "real": lambda x, y, w: x.real,
    "imag": lambda x, y, w: torch.imag(x),
    "polar": lambda x, y, w: torch.polar(w.abs(), w) * x,
    "complex": lambda x, y, w: torch.complex(w, -w) * x,
    "where": lambda x, y, w: torch.where(w > 0, x, y),
    "masked_fill": lambda x, y, w: x.masked_fill(w > 0, 1.5),
    "equal": lambda x, y, w: x == torch.where(w > 0, x, y),
    "zeros_like": lambda x, y, w: torch.zeros_like(x) + x,
    "ones_like": lambda x, y, w: torch.ones_like(x) * x,
    "written in place": lambda x, y, w: x.clone().mul_(y),
    "written at an index": lambda x, y, w: written(x, y),
    "to another type": lambda x, y, w: (x.to(torch.complex128) * y).to(torch.complex64),
    "to a real type": lambda x, y, w: x.real.to(torch.complex64) + x,
    "iterated": lambda x, y, w: sum(row * (index + 1) for index, row in enumerate(x)),
}


def written(x, y):
    result = x.clone()
    result[1] = y
    result[..., 0] = 2.0
    return result


class Operation(nn.Module):
    """One function of complex tensors, of which `table` is one that the module holds; its result as real numbers."""

    def __init__(self, name: str, table: torch.Tensor) -> None:
        super().__init__()
        self.operation = OPERATIONS[name]
        self.table = table

    def forward(self, x, w):
        result = self.operation(torch.view_as_complex(x), self.table, w)
        return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result


@pytest.fixture
def tensors():
    torch.manual_seed(3)
    return torch.randn(3, 4, 6, 2), torch.randn(4, 6), torch.randn(4, 6, dtype=torch.complex64)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_function_is_that_of_complex_tensors(name, tensors):
    x, w, table = tensors
    module = Operation(name, table)
    expected = module(x, w)
    with RealArithmetic() as arithmetic:
        result = module(x, w)
    assert arithmetic.used
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert not expected.is_floating_point() or expected.abs().max() > 0
    torch.testing.assert_close(result, expected, rtol=2e-6, atol=2e-6)


class Everything(nn.Module):
    """Many functions in one module, since an export takes a second."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Operation(name, table) for name in OPERATIONS if name != "iterated")

    def forward(self, x, w):
        return tuple(part(x, w) for part in self.parts)


def test_all_of_them_are_exported(tensors, run_model):
    x, w, table = tensors
    module = Everything(table)
    model, notes = export_graph(module, (x, w))
    assert any("complex" in note for note in notes)
    for result, expected in zip(run_model(model, {"x": x, "w": w}), module(x, w), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
