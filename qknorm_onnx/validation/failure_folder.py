"""A failure on disk: the model as it was judged, its inputs, what it gave and what is right, and a script that repeats it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import save_model
from qknorm_onnx.validation.candidate import Candidate
from qknorm_onnx.validation.report.parity_row import ParityRow

Tensor = npt.NDArray[Any]

_SCRIPT: Final = '''"""Repeats a comparison that failed; exit code 1 while it still does. Needs qknorm-onnx."""

import json
import pathlib
import sys

import numpy as np

from qknorm_onnx.runtime.runner import make_runner

here = pathlib.Path(__file__).resolve().parent
about = json.loads((here / "about.json").read_text(encoding="utf-8"))
inputs = dict(np.load(here / "inputs.npz"))
exact = np.load(here / "exact.npz")
outputs = make_runner(here / "model.onnx", arithmetic=about["arithmetic"]).run(inputs)
tiny = np.finfo(np.float64).tiny

failed = False
for name, allowed in about["allowed"].items():
    right, given = exact[name].astype(np.float64), outputs[name].astype(np.float64)
    if given.shape != right.shape:
        failed = True
        print(f"{name}: shape {given.shape} instead of {right.shape}")
        continue
    judged = np.isfinite(right)  # the rest has no agreed meaning
    off = np.where(judged, np.abs(given - right), 0.0)
    error = off.max() / max(np.abs(right[judged]).max(), tiny) if judged.any() else 0.0
    bad = not error <= allowed
    failed |= bad
    worst = tuple(int(place) for place in np.unravel_index(np.nan_to_num(off, nan=np.inf).argmax(), off.shape))
    print(f"{name}: error {error:.3g}, allowed {allowed:.3g}")
    print(f"  worst at {list(worst)}: {given[worst]:.6g} instead of {right[worst]:.6g}")
print("it fails" if failed else "it passes now")
sys.exit(failed)
'''


def require_room(folder: Path) -> None:
    """Raises InputError unless `folder` is missing or an empty folder: nothing that is there is written over."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder}: is there already and not an empty folder; name one that a failure may be written to")


def save_failure(
    folder: Path,
    candidate: Candidate,
    *,
    inputs: Mapping[str, Tensor],
    exact: Sequence[Tensor],
    given: Sequence[Tensor],
    rows: Sequence[ParityRow],
) -> None:
    """Write one case: `exact` and `given` in the order of the model's outputs, `rows` their verdicts, of which one is bad."""
    folder.mkdir(parents=True, exist_ok=True)
    names = candidate.runner.output_names
    save_model(candidate.model, folder / "model.onnx")
    _write_arrays(folder / "inputs.npz", inputs)
    _write_arrays(folder / "exact.npz", dict(zip(names, exact, strict=True)))
    _write_arrays(folder / "given.npz", {name: _storable(value) for name, value in zip(names, given, strict=True)})
    about = {
        "dtype": candidate.dtype,
        "how": candidate.how,
        "arithmetic": candidate.arithmetic,
        "case": rows[0].case,
        "allowed": {row.output: row.budget if row.budget > 0 else 0.0 for row in rows},
        "why": [f"{row.output}: {row.why}" for row in rows if row.is_bad],
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (folder / "repeat.py").write_text(_SCRIPT, encoding="utf-8")


def _write_arrays(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """As `numpy.savez`, whatever the names are: that takes no array named `file`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stored:
                np.lib.format.write_array(stored, np.asanyarray(array), allow_pickle=False)


def _storable(value: Tensor) -> Tensor:
    """bfloat16, which `.npz` does not keep, as float32, which holds it exactly."""
    return value if value.dtype.isbuiltin else value.astype(np.float32)
