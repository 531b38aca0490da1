"""Makes every file, fuses it, compares it with itself, and writes tools/foreign/results.json.

    python -m tools.foreign.measure [--tools NAME]... [--models NAME]... [--folder FOLDER]

The tools run in an environment of their own, build/foreign/tools, which is made where it is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime

import qknorm_onnx as qk
from tools.foreign.catalogue import IMPLEMENTATIONS, TOOLS, UNCHANGED, Source, Tool, files_of
from tools.foreign.results import RESULTS, Cell, stored, with_cell
from tools.foreign.sources import EXPECTED, write_inputs, write_source
from tools.runtimes.environments import ROOT, install

PINS: Final = ROOT / "requirements" / "foreign" / "tools.txt"
ENVIRONMENT: Final = ROOT / "build" / "foreign" / "tools"
APPLY: Final = pathlib.Path(__file__).with_name("apply_tool.py")
# Largest difference over largest value between a fused file and the file that it was made from, and between it and PyTorch.
Arrays = Sequence[np.ndarray[Any, Any]]
ALLOWED: Final = {"float32": 1e-5, "float16": 1e-2}


def measured(source: Source, tool: Tool, folder: pathlib.Path) -> Cell:
    """What becomes of one file."""
    given = folder / f"{source.name}.onnx"
    if not given.is_file():
        write_source(source, folder)
    cases = write_inputs(source, folder)[: 1 if tool.name.startswith("fixed") else None]
    original, made = given, folder / f"{source.name}.{tool.key}.onnx"
    if tool in UNCHANGED:
        made = given
    elif said := applied(tool, given, original := folder / f"{source.name}.{tool.name}.onnx", cases[0]):
        return Cell(attentions=source.attentions, verdict="not written", reason=said)
    if tool.after_fusion:
        fused = folder / f"{source.name}.fused.onnx"
        qk.fuse(given).save(fused)
        if said := applied(tool, fused, made, cases[0]):
            return Cell(attentions=source.attentions, verdict="not written", reason=said)
    return judged(original, made, cases, source.attentions, quantised=tool.quantises)


def applied(tool: Tool, source: pathlib.Path, result: pathlib.Path, inputs: pathlib.Path) -> str:
    """Run the tool, unless its result is there; what it says where it writes nothing."""
    if result.is_file():
        return ""
    command = [ENVIRONMENT / "bin" / "python", APPLY, tool.name, source, result, inputs]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
    return "" if ended.returncode == 0 and result.is_file() else (ended.stderr.strip().splitlines() or ["no reason"])[-1][:300]


def judged(
    original: pathlib.Path, made: pathlib.Path, cases: Sequence[pathlib.Path], attentions: int, *, quantised: bool
) -> Cell:
    """Fuse `made`, and compare the result with what `original` and PyTorch compute."""
    unusable, expected = "", []
    try:
        expected = [computed(original, dict(np.load(case))) for case in cases]
    except Exception as error:
        unusable = _first_words(error)
    try:
        program = qk.fuse(made)
    except Exception as error:
        reason = _first_words(error).removeprefix(f"{made}: ")
        return Cell(attentions=attentions, verdict="does not run" if unusable else "error", reason=reason)
    report = program.report
    why = "; ".join(sorted({miss.reason for miss in (*report.declined, *report.refused)}))
    found = Cell(attentions=attentions, fused=len(report.fused), reason=why, verdict="wrong")
    if unusable:
        return dataclasses.replace(found, verdict="does not run", reason=why or unusable)
    unproven = sum(fused.note.startswith("unverified") for fused in report.fused)
    listed = sum(map(len, (report.fused, report.declined, report.refused, report.plain)))
    return compared(program, found, expected, made, cases, quantised=quantised, listed=listed == attentions and not unproven)


def compared(
    program: qk.Program,
    found: Cell,
    expected: Sequence[Arrays],
    made: pathlib.Path,
    cases: Sequence[pathlib.Path],
    *,
    quantised: bool,
    listed: bool,
) -> Cell:
    """`found` with how far the fused file is from what it was made from, and from PyTorch."""
    fused = made.with_name(f"{made.stem}.judged.onnx")
    loaded = [dict(np.load(case)) for case in cases]
    try:
        program.save(fused)
        given = [computed(fused, case) for case in loaded]
    except Exception as error:
        return dataclasses.replace(found, reason=_first_words(error))
    own, before = ([[seen(case, each[0])] for case, each in zip(loaded, results, strict=True)] for results in (given, expected))
    exact = [[seen(case, case[EXPECTED])] for case in loaded]
    found = dataclasses.replace(found, difference=largest(given, expected), error=largest(own, exact))
    narrow = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in onnx.load(made).graph.initializer)
    allowed = ALLOWED["float16" if narrow else "float32"]
    # Where a value is rounded to 8 bits, a difference of 1e-7 in front of it may be one of a whole step behind it.
    steps = largest(before, exact) if quantised else 0.0
    near = found.difference <= max(allowed, steps) and (quantised or found.error <= allowed)
    return dataclasses.replace(found, verdict="ok" if near and listed else "wrong")


def seen(case: dict[str, np.ndarray[Any, Any]], output: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The output at positions that are not masked: what stands at the others, which see no key, is nothing to compare."""
    mask = case.get("attention_mask")
    return output[mask.astype(np.bool_)] if mask is not None and mask.shape == output.shape[:2] else output


def largest(given: Sequence[Arrays], exact: Sequence[Arrays]) -> float:
    """The largest difference of all outputs of all cases, each over the largest value of that output."""
    pairs = [pair for own, other in zip(given, exact, strict=True) for pair in zip(own, other, strict=True)]
    return max(apart(own.astype(np.float64), other.astype(np.float64)) for own, other in pairs)


def apart(own: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The largest difference over the largest value; infinite where shapes or places of NaN differ, or nothing is a number."""
    missing = np.isnan(other)
    if own.shape != other.shape or not np.array_equal(np.isnan(own), missing) or missing.all():
        return math.inf
    return float(np.abs(own - other)[~missing].max()) / (float(np.abs(other[~missing]).max()) or 1.0)


def computed(model: pathlib.Path, fed: dict[str, np.ndarray[Any, Any]]) -> Arrays:
    """All outputs, without onnxruntime's optimizer."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    known = {value.name for value in session.get_inputs()}
    # A merged decoder takes the branch with its cache.
    fed = fed | {"use_cache_branch": np.ones(1, np.bool_)}
    result: Arrays = session.run(None, {name: array for name, array in fed.items() if name in known})
    return result


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main() -> int:
    """Exit code 0; what fails is a cell of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", action="append", choices=[tool.key for tool in TOOLS], help="a tool; may be repeated")
    parser.add_argument("--models", action="append", choices=list(IMPLEMENTATIONS), help="a model; may be repeated")
    parser.add_argument("--folder", type=pathlib.Path, help="keep the files here, and use those that are there")
    options = parser.parse_args()
    install(PINS, ENVIRONMENT)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = stored()
        for tool in TOOLS:
            for source in files_of(tool):
                if tool.key in (options.tools or [tool.key]) and source.model in (options.models or [source.model]):
                    cell = measured(source, tool, folder)
                    results = with_cell(results, tool, source, cell)
                    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                    print(tool.key, source.name, cell, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
