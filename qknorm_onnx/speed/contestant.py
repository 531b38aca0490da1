"""What a contestant is: something that computes one problem again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from qknorm_onnx.speed.problem import Problem, Tensor, Tensors


class LeftOutError(Exception):
    """A contestant cannot take part in a case; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """`call` computes the problem once; `output` is Y (B, S, Hq*D) of the last call."""

    call: Callable[[], object]
    output: Callable[[], Tensor]


# Makes a contestant for a problem, its inputs and a number of threads. Raises LeftOutError.
Maker = Callable[[Problem, Tensors, int], Contestant]
