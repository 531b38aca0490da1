"""One file, written weight by weight: the same message as protobuf's own, and no second copy of the weights in memory."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.model_file import save_model
from qknorm_onnx.graph.streamed_file import write_streamed

TYPES = ["float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "uint8", "bool", "int4", "string"]


def tensor_of(dtype, shape):
    random = np.random.default_rng(3)
    if dtype == "string":
        return ir.StringTensor(np.asarray([b"a", b"\xff", b""], dtype=object), shape=ir.Shape([3]), name="w")
    numbers = random.integers(-7, 7, shape)
    return ir.tensor(numbers.astype(np.dtype(getattr(ml_dtypes, dtype, dtype))), name="w")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1, 129, 1)])
def test_the_message_is_the_same(tmp_path, dtype, shape):
    tensor = tensor_of(dtype, shape)
    tensor.doc_string = "what it is"
    weight = ir.Value(name="w", const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
    shared = ir.Value(
        name="v", const_value=tensor_of("float32", (2, 2)), shape=ir.Shape([2, 2]), type=ir.TensorType(ir.DataType.FLOAT)
    )
    output = ir.node("Identity", [weight], name="n").outputs[0]
    output.name = "y"
    graph = ir.Graph([], [output], nodes=[output.producer()], initializers=[weight, shared], opset_imports={"": 20}, name="g")
    model = ir.Model(graph, ir_version=10, producer_name="p", metadata_props={"a": "b"})
    write_streamed(model, tmp_path / "m.onnx")
    read, wanted = onnx.load(tmp_path / "m.onnx"), ir.to_proto(model)
    assert {item.name for item in read.graph.initializer} == {"w", "v"}
    for proto in (read, wanted):
        del proto.graph.initializer[:]
        del proto.graph.value_info[:]
    assert read == wanted
    again = ir.load(tmp_path / "m.onnx").graph.initializers["w"].const_value
    assert again.dtype == tensor.dtype and again.shape == tensor.shape and again.doc_string == tensor.doc_string
    if dtype == "string":
        assert again.string_data() == tensor.string_data()
    else:
        np.testing.assert_array_equal(again.numpy(), tensor.numpy())
    assert list(graph.initializers) == ["w", "v"] and weight.const_value is tensor and weight.is_initializer()


def test_a_view_is_written_in_its_own_order(tmp_path):
    stored = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    weight = ir.Value(
        name="w", const_value=ir.Tensor(stored.T, name="w"), shape=ir.Shape([5, 7]), type=ir.TensorType(ir.DataType.FLOAT)
    )
    output = ir.node("Identity", [weight]).outputs[0]
    model = ir.Model(
        ir.Graph([], [output], nodes=[output.producer()], initializers=[weight], opset_imports={"": 20}), ir_version=10
    )
    output.name = "y"
    save_model(model, tmp_path / "m.onnx")
    np.testing.assert_array_equal(ir.load(tmp_path / "m.onnx").graph.initializers["w"].const_value.numpy(), stored.T)


PEAK = """
import resource, sys
import numpy as np, onnx_ir as ir
from qknorm_onnx.graph.model_file import save_model

weights = []
for n in range(20):
    tensor = ir.Tensor(np.full((1 << 22,), n, np.float32), name=f"w{n}")
    weights.append(ir.Value(name=f"w{n}", const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype)))
nodes = [ir.node("Identity", [w]) for w in weights]
for n, node in enumerate(nodes):
    node.outputs[0].name = f"y{n}"
outputs = [node.outputs[0] for node in nodes]
model = ir.Model(ir.Graph([], outputs, nodes=nodes, initializers=weights, opset_imports={"": 20}), ir_version=10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save_model(model, sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_while_writing(tmp_path):
    """320 MiB of weights; a message of protobuf's would take as much again, and its bytes once more."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path / "m.onnx")], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * 1024
    assert (tmp_path / "m.onnx").stat().st_size > 320 << 20
