"""What was found of the files in other runtimes, as values, as JSON, and as the tables of docs/runtimes.md."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from qknorm_onnx.spec.targets import TARGET_NAMES
from tools.runtimes.environments import RUNTIMES, Runtime
from tools.runtimes.trial import DTYPES, MODELS, ModelFile

SIZES_IN_CUMSUM: Final = "TDim is not a number"  # as tract says it
RESULTS: Final = pathlib.Path(__file__).with_name("results.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One file in one runtime; `reason` where it is not ok."""

    verdict: Literal["ok", "wrong", "refused"]
    reason: str = ""


def stored() -> dict[str, Any]:
    """What was measured before."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"cells": {}, "needs": {}}


def with_cells(results: Mapping[str, Any], runtime: Runtime, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """The results with these cells of one runtime."""
    of_runtime = {**results["cells"].get(runtime.name, {}), **{name: dataclasses.asdict(cell) for name, cell in cells.items()}}
    return {**results, "cells": {**results["cells"], runtime.name: of_runtime}}


def rows(target: str) -> Iterator[tuple[ModelFile, dict[str, Cell]]]:
    """The files of a target that were tried in every runtime, and what each made of them."""
    found = stored()["cells"]
    for model in MODELS:
        for dtype in DTYPES:
            file = ModelFile(model=model, target=target, dtype=dtype)
            cells = {runtime.name: found.get(runtime.name, {}).get(file.path) for runtime in RUNTIMES}
            if None not in cells.values():
                yield file, {name: Cell(**cell) for name, cell in cells.items() if cell is not None}


def instead(file: ModelFile, runtime: str, cell: Cell) -> str:
    """What to use where a file does not load."""
    if file.target == "ort" and runtime.startswith("onnxruntime"):
        return "`--for-onnxruntime` with this version"
    if file.target == "primitive":
        return "an export of fixed sizes, without `dynamic_shapes`" if SIZES_IN_CUMSUM in cell.reason else "another runtime"
    portable = dataclasses.replace(file, target="primitive")
    found = Cell(**stored()["cells"][runtime][portable.path])
    return "`--target portable`" + ("" if found.verdict == "ok" else f" and {instead(portable, runtime, found)}")


def markdown(target: str) -> str:
    """One table for a target, and below it a line for each kind of failure; one sentence where nothing was measured."""
    header = ["model", "type", *(runtime.name for runtime in RUNTIMES)]
    lines = [header, ["---"] * len(header)]
    numbers: dict[str, int] = {}
    for file, cells in rows(target):
        line = [file.model, file.dtype]
        for runtime, cell in cells.items():
            note = f"{why(file, runtime, cell)}: use {instead(file, runtime, cell)}"
            line.append("ok" if cell.verdict == "ok" else f"{cell.verdict} ({numbers.setdefault(note, len(numbers) + 1)})")
        lines.append(line)
    if len(lines) == 2:
        return "Not measured yet: `python -m tools.runtimes.measure`."
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*text, *(f"\n({number}) {note}" for note, number in numbers.items())])


def why(file: ModelFile, runtime: str, cell: Cell) -> str:
    """The reason of a failure, without what differs between files."""
    known = {
        "Opset 23 is under development": "ONNX opset 23 is there from onnxruntime 1.23 on",
        "input size 17": "GroupQueryAttention has `query_seqlens`, its 17th input, from onnxruntime 1.32 on",
        "input size 11": "GroupQueryAttention has `attention_bias` from onnxruntime 1.22 on",
        "IR version: 11": "its IR version keeps it from 1.20, which misreads a bias of MultiHeadAttention that heads share",
        "IR version: 12": "its IR version keeps it from releases before 1.24, which compute a window one key wider",
        SIZES_IN_CUMSUM: "tract's CumSum takes no sizes, and the model computes the mask of its chunks with one",
        "Mask must be floating point": "tract takes no bool mask in torch's attention of the layers without a norm",
    }
    for part, text in known.items():
        if part in cell.reason:
            return text
    if file.target == "custom-op" and runtime.startswith(("OpenVINO", "tract")):
        return "there are no model-local functions"
    if file.target == "ort" and runtime.startswith(("OpenVINO", "tract", "ReferenceEvaluator")):
        return "onnxruntime's own operators are not known, or not in this form"
    return cell.reason[:140].replace("|", "/")


def needs() -> str:
    """What each file needs, as its report says it."""
    lines = [["model", "target", "needs"], ["---"] * 3]
    for model, by_target in stored()["needs"].items():
        lines += [[model, f"`{target}`", text.removeprefix("needs ")] for target, text in by_target.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def unlike() -> list[str]:
    """Every cell with other numbers: there must be none."""
    return [
        f"{file.path} in {runtime}: {cell.reason}"
        for target in TARGET_NAMES
        for file, cells in rows(target)
        for runtime, cell in cells.items()
        if cell.verdict == "wrong"
    ]
