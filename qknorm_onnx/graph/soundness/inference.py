"""ONNX's strict inference of types and shapes, of large graphs piece by piece: as a whole it takes bodies times nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx
from onnx import checker, shape_inference

from qknorm_onnx.graph.soundness.functions import all_nodes
from qknorm_onnx.graph.soundness.scopes import bodies, read_from_around

# Up to this many nodes, those of bodies included, a graph is inferred as a whole.
_LARGEST_WHOLE: Final = 10_000
_PIECE: Final = 4_000


def inference_fault(proto: onnx.ModelProto) -> str | None:
    """What ONNX's strict inference says of the model, in its own words; None where it finds nothing."""
    try:
        sizes = [sum(1 for _ in _nodes_in(node)) for node in proto.graph.node]
        if sum(sizes) <= _LARGEST_WHOLE:
            _infer(proto)
        else:
            _Pieces(proto, sizes).infer()
    except (shape_inference.InferenceError, checker.ValidationError, RuntimeError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


def _infer(proto: onnx.ModelProto) -> onnx.ModelProto:
    return shape_inference.infer_shapes(proto.SerializeToString(), check_type=True, strict_mode=True, data_prop=False)


class _Pieces:
    """A graph as pieces of neighbouring nodes. Each is inferred with what those before it found for the values that it reads.

    It has with it all else that inference looks at: the numbers of constants, stated shapes, functions, and whether an
    operator that ONNX does not know stands before, behind which it forgives what does not fit.
    """

    def __init__(self, proto: onnx.ModelProto, sizes: list[int]) -> None:
        self._proto = proto
        self._sizes = sizes
        graph = proto.graph
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._types = {value.name: value.type for value in graph.input}
        self._outputs = {value.name: value for value in graph.output}
        self._stated = {value.name: value for value in graph.value_info}
        self._constants: dict[str, onnx.NodeProto] = {}
        self._foreign: onnx.NodeProto | None = None
        self._versions = {entry.domain: entry.version for entry in proto.opset_import}
        self._functions = {(function.domain, function.name, function.overload) for function in proto.functions}

    def infer(self) -> None:
        """Raises what ONNX raises of the first piece in which it finds a fault."""
        last = {name: place for place, node in enumerate(self._proto.graph.node) for name in _reads(node)}
        for first, end in self._bounds():
            nodes = self._proto.graph.node[first:end]
            found = _infer(self._piece(nodes)).graph
            for value in (*found.value_info, *found.output):
                if last.get(value.name, -1) >= end:
                    self._types[value.name] = onnx.TypeProto.FromString(value.type.SerializeToString())
            self._remember(nodes)

    def _bounds(self) -> Iterator[tuple[int, int]]:
        first = count = 0
        for place, size in enumerate(self._sizes):
            if count and count + size > _PIECE:
                yield first, place
                first, count = place, 0
            count += size
        yield first, len(self._sizes)

    def _piece(self, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
        read = dict.fromkeys(name for node in nodes for name in sorted(_reads(node)))
        piece = onnx.ModelProto(ir_version=self._proto.ir_version, opset_import=self._proto.opset_import)
        piece.functions.extend(self._proto.functions)
        graph = piece.graph
        graph.name = self._proto.graph.name
        if self._foreign is not None:
            graph.node.add(op_type=self._foreign.op_type, domain=self._foreign.domain)
        graph.node.extend(self._constants[name] for name in read if name in self._constants)
        graph.node.extend(nodes)
        made = dict.fromkeys(name for node in nodes for name in node.output if name)
        for name in read:
            if name in self._weights:
                graph.initializer.append(self._weights[name])
            if name in self._types and name not in made and self._types[name].WhichOneof("value"):
                graph.input.add(name=name).type.CopyFrom(self._types[name])
        for name in made | read:
            if name in self._outputs:
                graph.output.append(self._outputs[name])
            if name in self._stated:
                graph.value_info.append(self._stated[name])
        return piece

    def _remember(self, nodes: list[onnx.NodeProto]) -> None:
        for node in nodes:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                self._constants.update((name, node) for name in node.output)
            if self._foreign is None and not self._is_known(node):
                self._foreign = node

    def _is_known(self, node: onnx.NodeProto) -> bool:
        if (node.domain, node.op_type, node.overload) in self._functions:
            return True
        return onnx.defs.has(node.op_type, self._versions.get(node.domain, 1), node.domain)


def _nodes_in(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The node, and those of the bodies in it."""
    yield node
    for _, body in bodies(node):
        yield from all_nodes(body)


def _reads(node: onnx.NodeProto) -> set[str]:
    names = {name for name in node.input if name}
    for _, body in bodies(node):
        names |= read_from_around(body)
    return names
