"""The optimizer of torch.onnx takes constants for 0 and 1 that are not, unless it is told to compare exactly.

Its rules for `x + 0`, `x - 0`, `x * 1` and `x / 1` (onnxscript 0.7.2, rewriter/rules/common/_no_op.py) match constants with the
tolerances of `math.isclose`, 1e-8 absolute and 1e-5 relative: an epsilon of 1e-8 or below in a denominator is dropped, and a
factor of 1.000005. Where the denominator is small, the result is another one (Sana of diffusers adds 1e-15).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def exact_rules(notes: list[str]) -> Iterator[None]:
    """Inside this context the rules of onnxscript's optimizer match the constant that they name and no other.

    A release that keeps its rules otherwise is left as it is, with a note.
    """
    constants = list(_constants())
    if not constants:
        notes.append(
            "this release of onnxscript keeps the rules of its optimizer in an unknown place: "
            "summands of 1e-8 and below may be lost"
        )
    before = [(constant._rel_tol, constant._abs_tol) for constant in constants]
    for constant in constants:
        constant._rel_tol = constant._abs_tol = 0.0
    try:
        yield
    finally:
        for constant, (relative, absolute) in zip(constants, before, strict=True):
            constant._rel_tol, constant._abs_tol = relative, absolute


def _constants() -> Iterator[Any]:
    """Every constant in the patterns of the optimizer's own rules, once."""
    from onnxscript import rewriter

    seen: set[int] = set()
    for rule in getattr(rewriter, "_DEFAULT_REWRITE_RULES", ()):
        for node in getattr(getattr(rule, "_target_pattern", None), "_nodes", ()):
            for value in node.inputs:
                if hasattr(value, "_abs_tol") and hasattr(value, "_rel_tol") and id(value) not in seen:
                    seen.add(id(value))
                    yield value
