"""Tries every file in every runtime, and writes tools/runtimes/results.json.

    python -m tools.runtimes.measure [--only MODEL]... [--runtimes NAME]...

Environments are made below build/runtimes/ where they are missing.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tools.runtimes.environments import RUNTIMES, Runtime, make
from tools.runtimes.model_files import write_model
from tools.runtimes.table import RESULTS, Cell, stored, with_cells
from tools.runtimes.trial import DTYPES, MODELS, ModelFile, all_files, decoded


def judged(outputs: Sequence[Sequence[Mapping[str, Any]]], cases: Sequence[Mapping[str, Any]]) -> Cell:
    """The verdict on the outputs of every case: the error that comes nearest to its allowance."""
    worst, where = 0.0, ""
    for found, case in zip(outputs, cases, strict=True):
        for given, expected in zip(found, case["outputs"], strict=True):
            exact, own = decoded(expected["exact"]), decoded(given)
            if exact.shape != own.shape:
                return Cell(verdict="wrong", reason=f"an output of shape {list(own.shape)} instead of {list(exact.shape)}")
            size = float(np.abs(exact).max(initial=0)) or 1.0
            error = float(np.abs(own.astype(np.float64) - exact).max(initial=0)) / size
            ratio = error / expected["allowed"]
            if not ratio <= worst:
                worst, where = ratio, f"error {error:.1g}, and {expected['allowed']:.1g} is allowed"
    return Cell(verdict="ok") if worst <= 1 else Cell(verdict="wrong", reason=where)


def _short(error: str, folder: pathlib.Path) -> str:
    """Beginning and end of what a runtime says, without where the files lie and the runtime's own calls."""
    said = error.replace(f"{folder.resolve()}/", "").partition(" Stack backtrace:")[0]
    return said if len(said) <= 600 else f"{said[:300]} ... {said[-300:]}"


def tried(runtime: Runtime, folder: pathlib.Path, files: Sequence[ModelFile]) -> dict[str, Cell]:
    """A cell for each file that is there. A process that ends in the middle of a file says so in its cell."""
    waiting = [file for file in files if (folder / f"{file.path}.onnx").is_file()]
    cells: dict[str, Cell] = {}
    while waiting:
        command, place = runtime.command(folder, [f"{file.path}:{file.cases}" for file in waiting])
        ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=1800, check=False)
        begun = ""
        for line in ended.stdout.splitlines():
            said = json.loads(line) if line.startswith("{") else {}
            begun = said.get("begin", begun)
            if "error" in said:
                cells[said["name"]] = Cell(verdict="refused", reason=_short(said["error"], folder))
            elif "outputs" in said:
                cases = json.loads((folder / f"{said['name'].rpartition('.')[0]}.json").read_text())
                cells[said["name"]] = judged(said["outputs"], cases)
        if not begun:
            raise RuntimeError(f"{runtime.name} does not start: {ended.stderr[-400:]}")
        cells.setdefault(begun, Cell(verdict="refused", reason="the process ends"))
        waiting = [file for file in waiting if file.path not in cells]
    return cells


def main() -> int:
    """Exit code 0; what fails is a cell of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=MODELS, default=None, help="a model; may be repeated")
    parser.add_argument("--runtimes", action="append", default=None, help="a runtime by its name in the table; may be repeated")
    parser.add_argument("--folder", type=pathlib.Path, default=None, help="keep the files here")
    options = parser.parse_args()
    models = options.only or list(MODELS)
    runtimes = [runtime for runtime in RUNTIMES if not options.runtimes or runtime.name in options.runtimes]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = stored()
        for model in models:
            for dtype in DTYPES:
                if not list(folder.glob(f"{ModelFile(model=model, target='primitive', dtype=dtype).cases}.json")):
                    results = {**results, "needs": {**results["needs"], f"{model}, {dtype}": write_model(folder, model, dtype)}}
                    print(f"wrote {model} in {dtype}", flush=True)
        for runtime in runtimes:
            make(runtime)
            results = with_cells(results, runtime, tried(runtime, folder, list(all_files(models))))
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"tried in {runtime.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
