"""Runs model files in OpenVINO on the CPU: one JSON line each. Arguments as of onnxruntime_runner."""

from __future__ import annotations

import base64
import json
import pathlib
import sys

import numpy as np
import openvino


def decoded(stored):
    """An array of the cases."""
    return np.frombuffer(base64.b64decode(stored["data"]), stored["dtype"]).reshape(stored["shape"])


def encoded(array):
    """An array as JSON."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def run(folder, _library, name, cases):
    """Outputs of every case, computed in the types of the file."""
    core = openvino.Core()
    model = core.read_model(folder / f"{name}.onnx")
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(model, "CPU", hints)
    taken = {port.any_name for port in compiled.inputs}
    results = []
    for case in json.loads((folder / f"{cases}.json").read_text()):
        request = compiled.create_infer_request()
        request.infer({key: decoded(x) for key, x in case["inputs"].items() if key in taken})
        results.append([encoded(np.array(request.get_tensor(port).data)) for port in compiled.outputs])
    return results


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
