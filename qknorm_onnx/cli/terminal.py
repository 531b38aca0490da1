"""The console that the verbs print to: names from a file reach the terminal as text, never as commands to it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from qknorm_onnx.errors import without_controls


class Terminal(Console):
    """A console that escapes control characters of what it is given; those of its own styles are made afterwards."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of `renderable`, their texts escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_escaped(segment.text), segment.style)


def _escaped(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(without_controls, text.split("\n")))
