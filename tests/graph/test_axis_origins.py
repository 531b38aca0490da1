"""Where the axes of a tensor come from, also in files whose operators and shapes contradict each other."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from qknorm_onnx.graph.walk.axis_origins import axes_before


def transpose(perm: list[int] | None, rank: int) -> ir.Node:
    x = ir.Value(name="x", shape=ir.Shape([2, 3, 5, 7][:rank]), type=ir.TensorType(ir.DataType.FLOAT))
    return ir.node("Transpose", [x], attributes={} if perm is None else {"perm": perm})


@pytest.mark.parametrize(
    ("perm", "before"),
    [([0, 2, 1], ("B", "S", "H")), ([1, 2, 0], ("S", "B", "H")), (None, ("S", "H", "B"))],
)
def test_a_transpose_moves_axes_back(perm, before):
    assert axes_before(transpose(perm, 3), 0, ("B", "H", "S")) == before


@pytest.mark.parametrize(("perm", "rank"), [([1, 0], 3), ([0, 0, 1], 3), ([0, 1, 3], 3), (None, 2), ([0, 2, 1], 4)])
def test_a_transpose_of_another_rank_says_nothing(perm, rank):
    assert axes_before(transpose(perm, rank), 0, ("B", "H", "S")) is None
