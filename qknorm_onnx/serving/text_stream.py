"""One row's tokens as text, piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qknorm_onnx.serving.tokens import Tokenizer

INCOMPLETE: Final = "�"  # what a decoder writes for a letter whose bytes are not all there


class TextStream:
    """Takes tokens, gives text that will not change any more.

    A letter is held back until all of its bytes are there, and what may be the beginning of a stop string until it is none. Stop
    strings are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        self._first = 0  # the tokens from here on are decoded: what stands before may change how they are written
        self._read = 0  # the tokens up to here are in the text
        self._text = ""
        self._given = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text up to now."""
        return self._text

    def take(self, token: int) -> str:
        """The text that is certain with `token`."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._first : self._read])
        now = self._tokenizer.decode(self._tokens[self._first :])
        if not now.endswith(INCOMPLETE) and len(now) > len(before):
            self._text += now[len(before) :]
            self._first, self._read = self._read, len(self._tokens)
        return self._give(self._certain())

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        if self.stopped:
            return ""
        before = self._tokenizer.decode(self._tokens[self._first : self._read])
        self._text += self._tokenizer.decode(self._tokens[self._first :])[len(before) :]
        self._certain()
        return self._give(len(self._text))

    def _certain(self) -> int:
        """How many letters of the text are certain; cuts the text where a stop string begins."""
        found = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
            return len(self._text)
        held = max((_begun(self._text, stop) for stop in self._stops), default=0)
        return len(self._text) - held

    def _give(self, up_to: int) -> str:
        piece = self._text[self._given : max(up_to, self._given)]
        self._given += len(piece)
        return piece


def _begun(text: str, stop: str) -> int:
    """How many letters of the beginning of `stop` end `text`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
