"""Reads a JSON file that came with a model: whatever is in it, what is wrong is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qknorm_onnx.errors import InputError, first_line


def read_object(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises InputError: it cannot be read, is no JSON, is nested too deeply, or is no object."""
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is damaged ({first_line(error)}); write it again") from error
    if not isinstance(contents, dict):
        raise InputError(f"{file} is damaged (it holds no object but a {type(contents).__name__}); write it again")
    return contents
