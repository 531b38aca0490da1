"""What the public doors do with one file, as one word each."""

from __future__ import annotations

import contextlib
import io
import traceback
from pathlib import Path

DOORS = ("fuse", "inspect", "create_session")


def outcome(door: str, path: Path) -> tuple[str, str]:
    """What `door` does with the file: ("passed", ""), ("refused", message), ("traceback", where), or ("unexpected", message).

    "unexpected" is one line too, of what no check foresaw.
    """
    import qknorm_onnx as qk
    from qknorm_onnx.errors import QKNormError
    from qknorm_onnx.graph.soundness.guard import UNEXPECTED
    from qknorm_onnx.inspection import inspect_model

    call = {"fuse": qk.fuse, "inspect": inspect_model, "create_session": qk.create_session}[door]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            call(path)
    except QKNormError as error:
        message = str(error)
        if "\n" in message or not message.isprintable():
            return "traceback", f"message of several lines or with control characters: {message!r}"
        if UNEXPECTED in message:
            return "unexpected", message
        return "refused", message
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "qknorm_onnx" in frame.filename][-1]
        text = " ".join(str(error).split())[:150]
        where = f"{Path(ours.filename).name}:{ours.lineno} / {Path(last.filename).name}:{last.lineno}"
        return "traceback", f"{type(error).__name__} at {where}: {text}"
    return "passed", ""
