"""What recognisers were asked and how far they came, as debug records of one logger per room (`logger_of`).

Recognisers say nothing themselves: a list of readers is asked through `first_answer`, which, while somebody listens, watches
the functions that a reader calls and notes the innermost one that gave up, with the node that it had in hand.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, Literal, TypeVar

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Located, Unreadable

ROOMS: Final = "qknorm_onnx.graph.recognise"
Asked = TypeVar("Asked", ir.Node, Located)
Answer = TypeVar("Answer")
Outcome = Literal["read", "declined", "no"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """One reader's answer about one node: `asked` is the node, `stopped` where the reader gave up and what it found there."""

    room: str
    reader: str
    asked: str
    outcome: Outcome
    stopped: str = ""

    def __str__(self) -> str:
        return f"{self.asked}: {self.reader}: {self.outcome}" + (f", {self.stopped}" if self.stopped else "")


def logger_of(room: str) -> logging.Logger:
    """The logger of a room of `graph/recognise/`."""
    return logging.getLogger(f"{ROOMS}.{room}")


def first_answer(readers: Sequence[Callable[[Asked], Answer]], asked: Asked, room: str, *, begins: bool = False) -> Answer | None:
    """The first answer of `readers` that is not None; each is recorded while the logger of `room` is at level DEBUG.

    With `begins`, a record in front of them says that a new node is asked about.
    """
    logger = logger_of(room)
    listening = logger.isEnabledFor(logging.DEBUG)
    if begins and listening:
        logger.debug("%s: is it an attention?", described(asked), extra={"begins": True})
    for reader in readers:
        if not listening:
            answer = reader(asked)
        else:
            answer, stopped = _watched(reader, asked)
            reading = Reading(
                room=room,
                reader=_name(reader),
                asked=described(asked),
                outcome=_outcome(answer),
                stopped=answer.reason if isinstance(answer, Unreadable) else stopped if answer is None else "",
            )
            logger.debug("%s", reading, extra={"reading": reading})
        if answer is not None:
            return answer
    return None


def gave_up(reader: Callable[..., object], asked: Located | ir.Node | ir.Value, why: str, room: str) -> None:
    """Record that `reader` found a form that it cannot read, for the reason `why`."""
    record(reader, asked, "no", room, why=why)


def record(
    reader: Callable[..., object], asked: Located | ir.Node | ir.Value | None, outcome: Outcome, room: str, *, why: str = ""
) -> None:
    """Record what `reader` said of `asked`, where it is not one of a list."""
    logger = logger_of(room)
    if logger.isEnabledFor(logging.DEBUG):
        reading = Reading(room=room, reader=_name(reader), asked=described(asked), outcome=outcome, stopped=why)
        logger.debug("%s", reading, extra={"reading": reading})


def described(item: Located | ir.Node | ir.Value | None) -> str:
    """A node by its operator, name and the shape of its output; an input of the graph by its name."""
    value = item.value if isinstance(item, Located) else item if isinstance(item, ir.Value) else None
    node = value.producer() if value is not None else item if isinstance(item, ir.Node) else None
    if node is None:
        return f"'{value.name}'" if value is not None else "nothing"
    shape = node.outputs[0].shape
    return f"{node.op_type} '{node.name or node.outputs[0].name}' {shape if shape is not None else 'of unknown shape'}"


def _outcome(answer: object) -> Outcome:
    if answer is None:
        return "no"
    return "declined" if isinstance(answer, Unreadable) else "read"


def _name(reader: Callable[..., object]) -> str:
    return str((reader.func if isinstance(reader, functools.partial) else reader).__name__)


def _watched(reader: Callable[[Asked], Answer], asked: Asked) -> tuple[Answer, str]:
    """The answer of `reader`, and for None where it gave up."""
    watch = _Watch()
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        answer = reader(asked)
    finally:
        sys.setprofile(before)
    return answer, watch.stopped(asked.value.producer() if isinstance(asked, Located) else asked)


class _Watch:
    """A profile function that keeps the innermost recogniser that returned None, and the node that it looked at."""

    def __init__(self) -> None:
        self._depth = 0
        self._found: tuple[int, str, ir.Node | None] = (0, "", None)

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        if event == "call":
            self._depth += 1
        elif event == "return":
            module = str(frame.f_globals.get("__name__", ""))
            if result is None and module.startswith(ROOMS) and self._depth >= self._found[0]:
                self._found = (self._depth, f"{module.rpartition('.')[2]}.{frame.f_code.co_qualname}", _node_of(frame))
            self._depth -= 1

    def stopped(self, asked: ir.Node | None) -> str:
        """Where, and at which node; nothing where the reader never looked further than the node that it was asked about."""
        depth, where, node = self._found
        if depth < 2 or node is None or node is asked:
            return ""
        return f"in {where} at {described(node)}"


def _node_of(frame: FrameType) -> ir.Node | None:
    """The node that a function looks at, by the names that recognisers give it."""
    for name in ("node", "value", "located", "source"):
        item = frame.f_locals.get(name)
        item = item.value if isinstance(item, Located) else item
        item = item.producer() if isinstance(item, ir.Value) else item
        if isinstance(item, ir.Node):
            return item
    return None
