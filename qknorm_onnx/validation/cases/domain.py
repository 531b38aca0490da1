"""What is known of a module and its file beside the example: how far inputs may go, and which sizes matter."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import onnx_ir as ir

from qknorm_onnx.validation.cases.inputs import GraphInput

if TYPE_CHECKING:
    import torch

# sliding_window, attention_window_size, attention_chunk_size; not max_window_layers
_WINDOW: Final = re.compile(r"(window(_size)?|attention_chunk_size)$")
_COMPARISONS: Final = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
    """`rows`: of the table that an input picks rows from, by input name; `written`: inputs that say where to write.

    `windows`: how many tokens a window of the module or the file holds. `parameters`: number of the module's weights.
    `scalable`: names of projections of queries and keys that are in the file as well, with the size that their results have
    on the example (root of the mean square).
    """

    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    written: frozenset[str] = frozenset()
    windows: tuple[int, ...] = ()
    parameters: int = 0
    scalable: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def refined(self, inputs: Sequence[GraphInput]) -> tuple[GraphInput, ...]:
        """The inputs with what the module was seen to do with them: what picks rows of a table is tokens or positions."""
        return tuple(self._refined(graph_input) for graph_input in inputs)

    def _refined(self, graph_input: GraphInput) -> GraphInput:
        picks = graph_input.name in self.rows
        if picks and graph_input.kind in ("positions", "flags") and not graph_input.is_called_position:
            return dataclasses.replace(graph_input, kind="tokens")
        return graph_input


def windows_of(module: torch.nn.Module, model: ir.Model) -> tuple[int, ...]:
    """How many tokens each window holds, ascending: from the module's settings, canonical nodes, contrib operators, and
    constants that the file compares distances with.
    """
    found = {*_windows_of_module(module), *_windows_of_model(model)}
    return tuple(sorted(window for window in found if window > 0))


def _windows_of_module(module: torch.nn.Module) -> Iterator[int]:
    for part in module.modules():
        for holder in (part, getattr(part, "config", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                if _WINDOW.search(name) and isinstance(value, int) and not isinstance(value, bool):
                    yield value


def _windows_of_model(model: ir.Model) -> Iterator[int]:
    for node in model.graph.all_nodes():
        # A query at p sees p - left_window_size .. p: one token more than the attribute says.
        for name, more in (("left_window_size", 1), ("right_window_size", 1), ("local_window_size", 0)):
            attribute = node.attributes.get(name)
            if attribute is not None and attribute.as_int() > 0:
                yield attribute.as_int() + more
        if node.op_type in _COMPARISONS:
            yield from _compared_constants(node)


def _compared_constants(node: ir.Node) -> Iterator[int]:
    for value in node.inputs:
        constant = ir.convenience.get_const_tensor(value) if value is not None else None
        if constant is not None and constant.size == 1:
            number = abs(float(constant.numpy().reshape(())))
            if 2 <= number <= 2**20 and number == int(number):
                yield int(number)
