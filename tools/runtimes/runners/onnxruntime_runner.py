"""Runs model files in the onnxruntime of this interpreter: one JSON line each. Needs onnxruntime and numpy only.

python onnxruntime_runner.py FOLDER LIBRARY NAME:CASES ...   (LIBRARY is - for none)
"""

from __future__ import annotations

import base64
import json
import pathlib
import sys

import numpy as np
import onnxruntime


def decoded(stored):
    """An array of the cases."""
    return np.frombuffer(base64.b64decode(stored["data"]), stored["dtype"]).reshape(stored["shape"])


def encoded(array):
    """An array as JSON."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def run(folder, library, name, cases):
    """Outputs of every case."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if library != "-":
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
    taken = {value.name for value in session.get_inputs()}
    return [
        [encoded(y) for y in session.run(None, {key: decoded(x) for key, x in case["inputs"].items() if key in taken})]
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
