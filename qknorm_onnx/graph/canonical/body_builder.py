"""A list of ONNX nodes under construction: the stages of a function body append to it and pass values on.

Only operators that mean the same from opset 18 on are used. Values know their type (not their shape), so that a cast to
the type that a value has already costs no node. No Reshape uses -1 on a tensor that may be empty: ONNX Runtime refuses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qknorm_onnx.spec.qk_norm_spec import SpecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeSize:
    """A size that is computed at run time: `vector` (an int64 tensor of one element) times `factor`."""

    vector: ir.Value
    factor: int = 1


Dim = int | RuntimeSize

KEEP: Final = 0  # in the target shape of a Reshape: the input's own dimension, empty ones included


NamedSizes = Mapping[str, tuple[ir.Value, int]]  # name of a dimension -> a value that has it, and the axis


class BodyBuilder:
    """Collects nodes. Every name starts with `prefix` and is none of `taken`, to which it is added: the names of a graph.

    Sizes with a name are read from `named_sizes`, so that what is computed of them is the same for all nodes of a graph.
    """

    def __init__(
        self, prefix: str = "", *, taken: set[str] | None = None, named_sizes: NamedSizes = MappingProxyType({})
    ) -> None:
        self.nodes: list[ir.Node] = []
        self._named_sizes = named_sizes
        self._prefix = prefix
        self._taken = set() if taken is None else taken
        self._constants: dict[tuple[Any, ...], ir.Value] = {}

    def nodes_for(self, outputs: Sequence[ir.Value]) -> list[ir.Node]:
        """The nodes that `outputs` depend on, in order."""
        wanted = set(outputs)
        kept = []
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.outputs):
                kept.append(node)
                wanted.update(value for value in node.inputs if value is not None)
        # The others are detached, so that they do not count as users of the values that stay.
        for node in set(self.nodes) - set(kept):
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
        return kept[::-1]

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        name: str = "",
        dtype: ir.DataType | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """The one output of a new node. Its type is `dtype`, or that of the first input."""
        return self.ops(op_type, *inputs, names=[name or op_type.lower()], dtype=dtype, domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        names: Sequence[str],
        dtype: ir.DataType | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """The outputs of a new node, called `names`; an empty name is an output that is left out."""
        kind = dtype or (inputs[0].dtype if inputs and inputs[0] is not None else None)
        value_type = ir.TensorType(kind) if kind else None
        outputs = [ir.Value(name=self._unique(name) if name else "", type=value_type) for name in names]
        attrs = ir.convenience.convert_attributes({key: value for key, value in attributes.items() if value is not None})
        node = ir.Node(domain, op_type, list(inputs), attrs, outputs=outputs, name=outputs[0].name)
        self.nodes.append(node)
        return node.outputs

    def add(self, node: ir.Node, *, name: str) -> Sequence[ir.Value]:
        """The outputs of a node that was made elsewhere; it and its outputs are called after `name`."""
        node.name = self._unique(name)
        for output in node.outputs:
            output.name = self._unique((output.name or "").rsplit("/", 1)[-1])
        self.nodes.append(node)
        return node.outputs

    def cast(self, value: ir.Value, dtype: ir.DataType, *, name: str = "") -> ir.Value:
        """`value` in `dtype`."""
        if value.dtype == dtype:
            return value
        return self.op("Cast", value, name=name or f"{_stem(value)}_{dtype.name.lower()}", dtype=dtype, to=int(dtype))

    def ints(self, *values: int) -> ir.Value:
        """A constant int64 vector. Raises SpecError where a number is none."""
        if any(not -(1 << 63) <= value < 1 << 63 for value in values):
            raise SpecError(f"a size of {max(values, key=abs)} is larger than a tensor can be")
        return self.constant(np.array(values, dtype=np.int64), name="ints")

    def scalar(self, value: float, dtype: ir.DataType) -> ir.Value:
        """A constant of rank 0 in `dtype`."""
        return self.constant(np.array(value, dtype=dtype.numpy()), name="scalar")

    def constant(self, array: np.ndarray[Any, Any], *, name: str) -> ir.Value:
        """A constant tensor; equal ones are made once."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(array)
            self._constants[key] = self.op("Constant", name=name, dtype=tensor.dtype, value=tensor)
        return self._constants[key]

    def size(self, value: ir.Value, axis: int, *, name: str) -> RuntimeSize:
        """The run-time size of one axis."""
        dim = value.shape[axis] if value.shape is not None else None
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            value, axis = self._named_sizes.get(dim.value, (value, axis))
        return RuntimeSize(vector=self.op("Shape", value, name=name, dtype=ir.DataType.INT64, start=axis, end=axis + 1))

    def as_vector(self, size: Dim, *, name: str = "size") -> ir.Value:
        """A size as an int64 vector of one element."""
        if isinstance(size, int):
            return self.ints(size)
        return size.vector if size.factor == 1 else self.op("Mul", size.vector, self.ints(size.factor), name=name)

    def times(self, size: Dim, factor: int) -> Dim:
        """`size` * `factor`."""
        return size * factor if isinstance(size, int) else RuntimeSize(vector=size.vector, factor=size.factor * factor)

    def divide(self, size: Dim, divisor: int, *, name: str) -> Dim:
        """`size` / `divisor`, which leaves no rest."""
        if isinstance(size, int):
            return size // divisor
        if size.factor % divisor == 0:
            return RuntimeSize(vector=size.vector, factor=size.factor // divisor)
        return RuntimeSize(vector=self.op("Div", self.as_vector(size), self.ints(divisor), name=name))

    def reshape(self, value: ir.Value, *shape: Dim, name: str) -> ir.Value:
        """`value` in `shape`, where KEEP stands for the input's dimension at that place.

        The run-time sizes are added into a constant shape rather than concatenated: ONNX Runtime's optimiser turns a
        concatenated shape into one with -1.
        """
        target = self.ints(*(size if isinstance(size, int) else 0 for size in shape))
        for axis, size in enumerate(shape):
            if isinstance(size, int):
                continue
            place = self.ints(*(size.factor if index == axis else 0 for index in range(len(shape))))
            term = self.op("Mul", size.vector, place, name=f"{name}_size")
            target = self.op("Add", target, term, name=f"{name}_shape")
        return self.op("Reshape", value, target, name=name)

    def _unique(self, name: str) -> str:
        candidate = f"{self._prefix}{name}"
        count = 0
        while candidate in self._taken:
            count += 1
            candidate = f"{self._prefix}{name}_{count}"
        self._taken.add(candidate)
        return candidate


def _stem(value: ir.Value) -> str:
    return (value.name or "value").rsplit("/", 1)[-1]
