"""The errors that a user can mend. Each message is one line: what was wrong, where, what to do."""

from __future__ import annotations

# A name in a file may be a megabyte long: of a word and of a message, so many characters are shown.
LONGEST_WORD = 512
LONGEST_MESSAGE = 4096


def printable(text: str) -> str:
    """`text` in one line without control characters; longer words and texts lose their middle."""
    words = (_shortened(word, LONGEST_WORD) for word in text.split())
    return without_controls(_shortened(" ".join(words), LONGEST_MESSAGE))


def _shortened(text: str, limit: int) -> str:
    """The first three quarters of `limit` characters and the last quarter, where `text` is longer."""
    if len(text) <= limit:
        return text
    head = limit * 3 // 4
    return f"{text[:head]}...{text[head - limit :]}"


def without_controls(text: str) -> str:
    """`text` with its control characters escaped: a name in a file must not reach the terminal as a command."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape", "replace").decode("ascii") for mark in text)


class QKNormError(Exception):
    """Base of the errors below; the command line prints its message and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class InputError(QKNormError):
    """The input cannot be used: not an ONNX file, an unknown target or name, a missing extra, damaged weights."""


class FusionRequiredError(QKNormError):
    """`require_fusion` was asked for, and not every QK-Norm attention became one node."""

    exit_code = 1


class ExportError(QKNormError):
    """The module, its weights, the example inputs or the dynamic shapes stand in the way; the message says how to mend it."""


def first_line(error: BaseException, *, limit: int = 300) -> str:
    """What `error` says, on one line of at most `limit` characters, behind the name of its type."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:limit]}"
