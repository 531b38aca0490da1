"""How large a term is. Written out, sizes of sizes may double with every node: beyond a bound nobody follows."""

from __future__ import annotations

from typing import Final

from qknorm_onnx.graph.symbolic.terms import (
    Apply,
    AtLeastZero,
    Both,
    Either,
    Element,
    Flag,
    IsZero,
    Linear,
    Not,
    Read,
    Select,
)

MOST_PARTS: Final = 4096  # of an element: masks of published models have some 500
MOST_PARTS_OF_A_SIZE: Final = 128  # theirs have 16
_LARGEST_NUMBER: Final = 1 << 64  # no tensor has a size or an index beyond


def is_too_large(*terms: Element, most: int = MOST_PARTS) -> bool:
    """Whether the terms have more than `most` parts together, or numbers that no tensor can hold."""
    waiting: list[object] = list(terms)
    parts = 0
    while waiting:
        term = waiting.pop()
        parts += 1
        if parts > most:
            return True
        match term:
            case Linear():
                if abs(term.constant) > _LARGEST_NUMBER or any(abs(factor) > _LARGEST_NUMBER for _, factor in term.terms):
                    return True
                waiting.extend(atom for atom, _ in term.terms)
            case Read():
                waiting.extend(term.indices)
            case Apply():
                waiting.extend(term.arguments)
            case Select():
                waiting.extend((term.condition, term.when_true, term.when_false))
            case AtLeastZero() | IsZero():
                waiting.append(term.form)
            case Flag():
                waiting.append(term.read)
            case Not():
                waiting.append(term.operand)
            case Both() | Either():
                waiting.extend(term.operands)
            case _:
                pass
    return False
