"""Runs model files in ONNX's ReferenceEvaluator: one JSON line each. Arguments as of onnxruntime_runner."""

from __future__ import annotations

import base64
import json
import pathlib
import sys

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator


def decoded(stored):
    """An array of the cases."""
    return np.frombuffer(base64.b64decode(stored["data"]), stored["dtype"]).reshape(stored["shape"])


def encoded(array):
    """An array as JSON."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def run(folder, _library, name, cases):
    """Outputs of every case."""
    model = onnx.load(folder / f"{name}.onnx")
    evaluator = ReferenceEvaluator(model)
    taken = {value.name for value in model.graph.input}
    return [
        [encoded(np.asarray(y)) for y in evaluator.run(None, {k: decoded(x) for k, x in case["inputs"].items() if k in taken})]
        for case in json.loads((folder / f"{cases}.json").read_text())
    ]


def main():
    """One line for each file: its name, then its outputs or what went wrong."""
    folder, library = pathlib.Path(sys.argv[1]), sys.argv[2]
    for argument in sys.argv[3:]:
        name, _, cases = argument.partition(":")
        print(json.dumps({"begin": name}), flush=True)
        try:
            print(json.dumps({"name": name, "outputs": run(folder, library, name, cases)}), flush=True)
        except Exception as error:
            print(json.dumps({"name": name, "error": " ".join(str(error).split())}), flush=True)


main()
