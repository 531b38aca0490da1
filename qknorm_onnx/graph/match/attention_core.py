"""Where queries meet keys, as it stands in the graph: `Core`, with what is added to its logits."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Factor, Fragment, RowLengths
from qknorm_onnx.graph.match.located import Layout, Located, Parameter, Unreadable


@dataclasses.dataclass(frozen=True)
class GroupedAxes:
    """The axes of a tensor that differs between heads which are two axes: letters, "" of size 1, and the sizes of K and G."""

    letters: Layout
    kv_heads: int
    group: int


@dataclasses.dataclass(frozen=True)
class Bias:
    """One thing that is added to the logits, or a boolean that hides keys (`negated`: where it is True).

    `fill` is what hidden logits are replaced by. `axes`: for each axis of the logits' mask the axis of `value` that lies
    there, None where it does not vary (axes of `value` that are not named have size 1); absent where `value` can be broadcast
    as it is. `windows`: `value` is (1, W, 1, S, T), one mask for each of the W windows that the batch consists of
    (B = images * W, windows innermost). `folded`: `value` is (B*H, S, T). `grouped`: `value` has axes for K or G.
    """

    value: ir.Value
    negated: bool = False
    fill: float | None = None
    axes: tuple[int | None, ...] | None = None
    windows: int = 0
    folded: bool = False
    grouped: GroupedAxes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
    """softmax(scale * q.k + bias) v, as it stands in the graph: the operands still with norm, rotary and repeats in front.

    `query_steps` and `key_steps` are what the operator itself does to q and k, nearest to the softmax first. `lengths` says
    where the new keys of each row go in the cache. `refusal` says why this core cannot be rewritten, if it is QK-Norm
    attention at all.
    """

    node: ir.Node
    query: Located
    key: Located
    value: Located
    output: Located
    scale: float
    factors: tuple[Factor, ...] = ()
    softcap: float = 0.0
    logit_clamp: float = 0.0
    is_causal: bool = False
    left_window_size: int = -1
    biases: tuple[Bias, ...] = ()
    sink: Parameter | None = None
    query_steps: tuple[Fragment, ...] = ()
    key_steps: tuple[Fragment, ...] = ()
    past: tuple[ir.Value, ir.Value] | None = None
    presents: tuple[ir.Value, ir.Value] | None = None
    lengths: RowLengths | None = None
    refusal: Unreadable | None = None
