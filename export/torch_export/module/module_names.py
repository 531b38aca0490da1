"""The exported graph speaks of the user's module, not of the wrapper that it was exported through."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final

import onnx_ir as ir

from qknorm_onnx.torch_export.signatures.dynamic_shapes import DynamicAxis

WRAPPED: Final = "wrapped"
_PREFIX: Final = "pkg.torch.onnx."
# Where the code lay on the exporting machine, and torch's own names: no use to whoever reads the file.
_PRIVATE: Final = (f"{_PREFIX}stack_trace", f"{_PREFIX}fx_node")


def forget_wrapper(model: ir.Model) -> None:
    """Initializers and module scopes get the names that they have in the user's module; stack traces are dropped."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in ir.traversal.RecursiveGraphIterator(graph):
            _clean_node(node)
    for name in list(model.graph.initializers):
        if name.startswith(f"{WRAPPED}.") and _without(name) not in model.graph.initializers:
            model.graph.initializers[name].name = _without(name)
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        for key in [key for key in value.metadata_props if key.startswith(_PREFIX)]:
            del value.metadata_props[key]


def name_expressions(model: ir.Model, axes: Sequence[DynamicAxis]) -> None:
    """A dimension that the user named `past + sequence` is called that, where torch made up a symbol for it."""
    inputs = {value.name: value for value in model.graph.inputs}
    names: dict[str, str] = {}
    for axis in axes:
        shape = inputs[axis.tensor].shape if axis.is_expression else None
        symbol = None if shape is None else shape[axis.axis]
        if isinstance(symbol, ir.SymbolicDim) and symbol.value and symbol.value.isidentifier():
            names[symbol.value] = axis.name
    if not names:
        return
    symbols = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    for value in _values(model.graph):
        for index, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and dim.value and value.shape is not None:
                whole = names.get(dim.value)
                value.shape[index] = whole or symbols.sub(lambda match: f"({names[match.group()]})", dim.value)


def name_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Each output has its own name, also where the module returns one tensor in several places."""
    graph = model.graph
    seen: dict[ir.Value, str] = {}
    for index, (value, name) in enumerate(zip(list(graph.outputs), names, strict=True)):
        if value not in seen:
            seen[value] = value.name = name
            continue
        copy = ir.Value(name=name, type=value.type, shape=value.shape)
        graph.append(ir.Node("", "Identity", [value], outputs=[copy], name=f"{name}_again"))
        graph.outputs[index] = copy


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def _clean_node(node: ir.Node) -> None:
    for key in _PRIVATE:
        node.metadata_props.pop(key, None)
    for key, strip in (("name_scopes", _strip_scopes), ("class_hierarchy", _strip_classes)):
        text = node.metadata_props.get(_PREFIX + key)
        if text is not None:
            node.metadata_props[_PREFIX + key] = strip(text)
    namespace = node.metadata_props.get("namespace")
    if namespace is not None:
        parts = namespace.split("/")[1:]
        node.metadata_props["namespace"] = "/".join(_without(part) for part in parts)


def _without(name: str) -> str:
    if name == WRAPPED or name.startswith(f"{WRAPPED}:"):
        return name[len(WRAPPED) :]
    return name.removeprefix(f"{WRAPPED}.")


def _strip_scopes(text: str) -> str:
    """`['', 'wrapped', 'wrapped.layer', 'mul']` -> `['', 'layer', 'mul']`."""
    return str([_without(scope) for scope in ast.literal_eval(text)[1:]])


def _strip_classes(text: str) -> str:
    return str(ast.literal_eval(text)[1:])
