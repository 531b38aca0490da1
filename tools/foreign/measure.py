"""Makes every file, fuses it, compares it with itself, and writes tools/foreign/results.json.

    python -m tools.foreign.measure [--tools NAME]... [--models NAME]... [--folder FOLDER]

The tools run in an environment of their own, build/foreign/tools, which is made where it is missing.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime

import qknorm_onnx as qk
from tools.foreign.catalogue import ATTENTIONS, IMPLEMENTATIONS, NONE, TOOLS, Source, Tool, files_of
from tools.foreign.results import RESULTS, Cell, stored, with_cell
from tools.foreign.sources import write_source
from tools.runtimes.environments import ROOT, install

PINS: Final = ROOT / "requirements" / "foreign" / "tools.txt"
ENVIRONMENT: Final = ROOT / "build" / "foreign" / "tools"
APPLY: Final = pathlib.Path(__file__).with_name("apply_tool.py")
# Largest difference over largest value between a fused file and the file that it was made from.
ALLOWED: Final = {"float32": 1e-5, "float16": 4e-3}


def measured(source: Source, tool: Tool, folder: pathlib.Path) -> Cell:
    """What becomes of one file."""
    given = folder / f"{source.name}.onnx"
    if not given.is_file():
        write_source(source, folder)
    original, made = given, folder / f"{source.name}.{tool.key}.onnx"
    if tool is NONE:
        made = given
    elif said := applied(tool, given, original := folder / f"{source.name}.{tool.name}.onnx", source):
        return Cell(attentions=ATTENTIONS[source.model], verdict="not written", reason=said)
    if tool.after_fusion:
        fused = folder / f"{source.name}.fused.onnx"
        qk.fuse(given).save(fused)
        if said := applied(tool, fused, made, source):
            return Cell(attentions=ATTENTIONS[source.model], verdict="not written", reason=said)
    return judged(original, made, folder / f"{source.inputs}.npz", ATTENTIONS[source.model])


def applied(tool: Tool, source: pathlib.Path, result: pathlib.Path, names: Source) -> str:
    """Run the tool, unless its result is there; what it says where it writes nothing."""
    if result.is_file():
        return ""
    inputs = source.with_name(f"{names.inputs}.npz")
    command = [ENVIRONMENT / "bin" / "python", APPLY, tool.name, source, result, inputs]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
    return "" if ended.returncode == 0 and result.is_file() else (ended.stderr.strip().splitlines() or ["no reason"])[-1][:300]


def judged(original: pathlib.Path, made: pathlib.Path, inputs: pathlib.Path, attentions: int) -> Cell:
    """Fuse `made`, and compare the result with what `original` computes."""
    fed = dict(np.load(inputs))
    try:
        program = qk.fuse(made)
        report = program.report
        why = "; ".join(sorted({miss.reason for miss in (*report.declined, *report.refused)}))
        found = {"attentions": attentions, "fused": len(report.fused), "reason": why}
        unproven = sum(fused.note.startswith("unverified") for fused in report.fused)
        listed = sum(map(len, (report.fused, report.declined, report.refused, report.plain)))
    except Exception as error:
        return Cell(attentions=attentions, verdict="error", reason=" ".join(str(error).split())[:300])
    try:
        expected = computed(original.read_bytes(), fed)
    except Exception as error:
        return Cell(**found, verdict="does not load", reason=(why + "; " if why else "") + _first_words(error))
    try:
        given = computed(program.to_proto().SerializeToString(), fed)
    except Exception as error:
        return Cell(**{**found, "reason": _first_words(error)}, verdict="wrong")
    size = float(np.abs(expected.astype(np.float64)).max(initial=0)) or 1.0
    difference = float(np.abs(given.astype(np.float64) - expected).max(initial=0)) / size
    narrow = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in onnx.load(made).graph.initializer)
    right = difference <= ALLOWED["float16" if narrow else "float32"] and not unproven and listed == attentions
    return Cell(**found, verdict="ok" if right else "wrong", difference=difference)


def computed(model: bytes, fed: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The first output, without onnxruntime's optimizer."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    known = {value.name for value in session.get_inputs()}
    result: np.ndarray[Any, Any] = session.run(None, {name: array for name, array in fed.items() if name in known})[0]
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
