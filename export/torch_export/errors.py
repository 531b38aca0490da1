"""Why a module cannot be exported."""

from __future__ import annotations

from qknorm_onnx.errors import QKNormError


class ExportError(QKNormError):
    """The module, its weights, the example inputs or the dynamic shapes stand in the way; the message says how to mend it."""


def first_line(error: BaseException, *, limit: int = 300) -> str:
    """What `error` says, on one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:limit]}"
