"""ONNX Runtime as a contestant: our native kernel, and the same node lowered to other operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.lowering.registry import lower
from qknorm_onnx.runtime.native_kernels import native_kernels_for
from qknorm_onnx.runtime.session import create_session, import_onnxruntime
from qknorm_onnx.spec.signature import DOMAIN, VERSION
from qknorm_onnx.speed.contestant import Contestant, LeftOutError
from qknorm_onnx.speed.problem import PARAMETERS, Problem, Tensor, Tensors, with_room

OPSET: Final = 20
PRESENT_OF: Final = {"past_key": "present_key", "past_value": "present_value"}
_QUIET: Final = 3
_SYMBOLS: Final[Mapping[str, list[str | None]]] = {
    "query": ["batch", "new", None], "key": ["batch", "new", None], "value": ["batch", "new", None],
    "cos": ["new", None], "sin": ["new", None], "past_key": ["batch", None, "past", None],
    "past_value": ["batch", None, "past", None], "cache_length": ["batch"],
}  # fmt: skip


def native(problem: Problem, inputs: Tensors, threads: int) -> Contestant:
    """The canonical node in the native library; a cache is of fixed size, and its buffers are input and output at once.

    Raises:
        InputError: the native library is missing.
    """
    given = with_room(inputs, problem.cached, problem.new) if problem.cached else inputs
    model = canonical_model(problem, given)
    kernels = native_kernels_for(model, provider="cpu")
    if kernels.library is None:
        raise InputError(f"the benchmark measures the native kernels: {kernels.reason}; build them with: pip install .")
    return BoundSession(model, given, threads=threads, in_place=PRESENT_OF if problem.cached else {}).contestant


def primitive(problem: Problem, inputs: Tensors, threads: int) -> Contestant:
    """Plain operators of opset 20, the form that torch.onnx exports; the cache grows by Concat."""
    return _lowered(problem, inputs, threads, "primitive")


def standard(problem: Problem, inputs: Tensors, threads: int) -> Contestant:
    """RMSNormalization, RotaryEmbedding and Attention of opset 23 and newer; the cache grows inside Attention."""
    return _lowered(problem, inputs, threads, "onnx")


def _lowered(problem: Problem, inputs: Tensors, threads: int, target: str) -> Contestant:
    model = canonical_model(problem, inputs)
    (outcome,) = lower(model, target=target, provider="cpu")
    if outcome.target != target:
        raise LeftOutError(f"cannot be expressed: {outcome.note}")
    return BoundSession(model, inputs, threads=threads).contestant


def canonical_model(problem: Problem, inputs: Tensors) -> ir.Model:
    """A model of one canonical node: parameters are constants, everything else is an input with symbolic sizes."""
    values: dict[str, ir.Value] = {}
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, DOMAIN: VERSION}, name="benchmark")
    for name, array in inputs.items():
        symbols = _SYMBOLS.get(name, [None] * array.ndim)
        shape = [size if symbol is None else symbol for size, symbol in zip(array.shape, symbols, strict=True)]
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        value = values[name] = ir.Value(name=name, type=kind, shape=ir.Shape(shape))
        if name in PARAMETERS:
            value.const_value = ir.tensor(array, name=name)
            graph.register_initializer(value)
        else:
            graph.inputs.append(value)
    node = make_attention_node(problem.spec, AttentionInputs(**values), name="attention", num_outputs=3 if problem.cached else 1)
    for output, name in zip(node.outputs, ("Y", "present_key", "present_value"), strict=False):
        output.name = name
    graph.append(node)
    graph.outputs.extend(node.outputs)
    model = ir.Model(graph, ir_version=10)
    AttachBodiesPass()(model)
    return model


class BoundSession:
    """A session whose inputs and outputs are bound once: a call copies nothing to or from Python.

    `in_place`: graph input -> graph output that share one buffer, a copy of that input.
    """

    def __init__(
        self, model: ir.Model, inputs: Mapping[str, Tensor], *, threads: int, in_place: Mapping[str, str] | None = None
    ) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _QUIET
        self._session = create_session(model, session_options=options)
        self._binding = self._session.io_binding()
        self._buffers: list[Any] = []  # the binding does not own the memory
        self._outputs: list[str] = []
        shared = in_place or {}
        for value in self._session.get_inputs():
            self._bind_input(ort, value.name, inputs[value.name], shared.get(value.name))
        for value in self._session.get_outputs():
            if value.name not in shared.values():
                self._binding.bind_output(value.name, "cpu")
                self._outputs.append(value.name)

    def _bind_input(self, ort: Any, name: str, array: Tensor, shared: str | None) -> None:
        buffer = ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C"))
        self._buffers.append(buffer)
        self._binding.bind_ortvalue_input(name, buffer)
        if shared:
            self._binding.bind_ortvalue_output(shared, buffer)
            self._outputs.append(shared)

    def call(self) -> None:
        """Run once."""
        self._session.run_with_iobinding(self._binding)

    def output(self) -> Tensor:
        """Y of the last call."""
        result: Tensor = self._binding.get_outputs()[self._outputs.index("Y")].numpy()
        return result

    @property
    def contestant(self) -> Contestant:
        """The session as a contestant."""
        return Contestant(self.call, self.output)
