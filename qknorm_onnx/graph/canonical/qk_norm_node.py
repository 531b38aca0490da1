"""Build and read the canonical nodes of `ai.qknorm`. Nothing else touches their attributes or counts their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, TypeVar

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_signature import IR_DTYPES, BodySignature, signature_of
from qknorm_onnx.spec.attributes import Spec, SpecT, from_attributes, to_attributes
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec, SpecError
from qknorm_onnx.spec.shape_inference import (
    Dim,
    check_attention_inputs,
    check_rotary_inputs,
    infer_attention_outputs,
    infer_rotary_outputs,
)
from qknorm_onnx.spec.signature import (
    ATTENTION_INPUTS,
    ATTENTION_OP,
    ATTENTION_OUTPUTS,
    DOMAIN,
    ROTARY_INPUTS,
    ROTARY_OP,
    TensorSignature,
    operator_of,
)

_FLOATS: Final = frozenset(IR_DTYPES.values())
# Ranks that the operators fix, for values of which a graph does not say the shape.
_FIXED_RANKS: Final = {
    "query": 3, "key": 3, "value": 3, "x": 3, "past_key": 4, "past_value": 4,
    "cache_length": 1, "query_offset": 1, "head_sink": 1,
}  # fmt: skip
_NEEDS_RANK: Final = frozenset({"cos", "sin"})
_BROADCAST_INPUTS: Final = frozenset({"q_scale", "scale", "attention_bias"})  # of any rank up to four
_RANK_OF_UNKNOWN: Final = 2  # that a table, gain or bias may have


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """The inputs of a `QKNormAttention`, as in `signature.ATTENTION_INPUTS`; None is absent."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    q_norm_weight: ir.Value | None = None
    k_norm_weight: ir.Value | None = None
    q_norm_bias: ir.Value | None = None
    k_norm_bias: ir.Value | None = None
    q_scale: ir.Value | None = None
    cos: ir.Value | None = None
    sin: ir.Value | None = None
    attention_bias: ir.Value | None = None
    head_sink: ir.Value | None = None
    past_key: ir.Value | None = None
    past_value: ir.Value | None = None
    cache_length: ir.Value | None = None
    query_offset: ir.Value | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryInputs:
    """The inputs of a `QKNormRotary`, as in `signature.ROTARY_INPUTS`; None is absent."""

    x: ir.Value
    weight: ir.Value | None = None
    bias: ir.Value | None = None
    scale: ir.Value | None = None
    cos: ir.Value | None = None
    sin: ir.Value | None = None


NodeInputs = AttentionInputs | RotaryInputs
InputsT = TypeVar("InputsT", AttentionInputs, RotaryInputs)


def make_attention_node(spec: QKNormSpec, inputs: AttentionInputs, *, name: str, num_outputs: int = 1) -> ir.Node:
    """A `QKNormAttention` node called `name` with outputs Y, present_key, present_value (the first `num_outputs` of them).

    The outputs have the queries' type, shapes as far as they are known, and names derived from `name`. `AttachBodiesPass`
    puts its function body into the model, and numbers the node's operator where a model needs several.

    Raises:
        SpecError: a type or shape contradicts the spec or is not known where it must be; the message names the input.
    """
    if not 1 <= num_outputs <= len(ATTENTION_OUTPUTS):
        raise SpecError(f"num_outputs is {num_outputs}; a {ATTENTION_OP} has 1 to {len(ATTENTION_OUTPUTS)} outputs")
    shapes = _checked_shapes(ATTENTION_INPUTS, inputs)
    inferred = list(infer_attention_outputs(spec, shapes).items())[:num_outputs]
    return _make_node(ATTENTION_OP, spec, inputs, inferred, name=name, dtype=inputs.query.dtype)


def make_rotary_node(spec: QKNormRotarySpec, inputs: RotaryInputs, *, name: str) -> ir.Node:
    """A `QKNormRotary` node called `name` with its one output Y. Raises SpecError as `make_attention_node`."""
    shapes = _checked_shapes(ROTARY_INPUTS, inputs)
    return _make_node(ROTARY_OP, spec, inputs, list(infer_rotary_outputs(spec, shapes).items()), name=name, dtype=inputs.x.dtype)


def inferred_outputs(node: ir.Node) -> list[list[Dim]]:
    """Dimensions of the outputs of a canonical node. Raises SpecError where it contradicts itself or a shape is not known."""
    if is_attention_node(node):
        attention, operands = read_attention_node(node)
        return list(infer_attention_outputs(attention, _checked_shapes(ATTENTION_INPUTS, operands)).values())
    rotary, inputs = read_rotary_node(node)
    return list(infer_rotary_outputs(rotary, _checked_shapes(ROTARY_INPUTS, inputs)).values())


def is_attention_node(node: ir.Node) -> bool:
    """Whether `node` is an `ai.qknorm::QKNormAttention`, under any of its numbered names."""
    return canonical_operator(node) == ATTENTION_OP


def is_rotary_node(node: ir.Node) -> bool:
    """Whether `node` is an `ai.qknorm::QKNormRotary`, under any of its numbered names."""
    return canonical_operator(node) == ROTARY_OP


def canonical_operator(node: ir.Node) -> str | None:
    """`QKNormAttention` or `QKNormRotary` for a canonical node, whichever body it has; None for any other."""
    return operator_of(node.op_type) if node.domain == DOMAIN else None


def is_prepared(value: ir.Value | None) -> bool:
    """Whether a `QKNormRotary` made this, or several of them for streams that were then concatenated."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Concat":
        return any(is_prepared(operand) for operand in node.inputs)
    return node is not None and is_rotary_node(node)


def preparations(value: ir.Value | None) -> tuple[QKNormRotarySpec, ...]:
    """What each `QKNormRotary` does that made this, in the order of the streams."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Concat":
        return tuple(spec for operand in node.inputs for spec in preparations(operand))
    return (read_rotary_node(node)[0],) if node is not None and is_rotary_node(node) else ()


def read_attention_node(node: ir.Node) -> tuple[QKNormSpec, AttentionInputs]:
    """Spec and inputs of a `QKNormAttention`.

    Raises:
        SpecError: the node is another one, an attribute is unknown or out of range, or a required input is absent.
    """
    return _read_node(node, ATTENTION_OP, QKNormSpec, AttentionInputs)


def read_rotary_node(node: ir.Node) -> tuple[QKNormRotarySpec, RotaryInputs]:
    """Spec and inputs of a `QKNormRotary`. Raises SpecError as `read_attention_node`."""
    return _read_node(node, ROTARY_OP, QKNormRotarySpec, RotaryInputs)


def check_known_shapes(node: ir.Node) -> None:
    """Raises SpecError where the attributes, types and known shapes of a canonical node contradict each other.

    What is not known contradicts nothing; `node_signature` asks for more.
    """
    signatures: tuple[TensorSignature, ...]
    spec, inputs = read_attention_node(node) if is_attention_node(node) else read_rotary_node(node)
    signatures = ATTENTION_INPUTS if isinstance(spec, QKNormSpec) else ROTARY_INPUTS
    values = input_values(inputs)
    first = values[signatures[0].name]
    shapes: dict[str, list[Dim]] = {}
    for tensor in signatures:
        value = values[tensor.name]
        if value is None:
            continue
        if first is not None and first.dtype is not None and value.dtype is not None:
            _check_dtype(tensor, value, first.dtype)
        known = [dim if isinstance(dim, int) else dim.value for dim in value.shape] if value.shape is not None else None
        if known is not None or tensor.name not in _BROADCAST_INPUTS:
            shapes[tensor.name] = known if known is not None else [None] * _FIXED_RANKS.get(tensor.name, _RANK_OF_UNKNOWN)
    if isinstance(spec, QKNormSpec):
        check_attention_inputs(spec, shapes)
    else:
        check_rotary_inputs(spec, shapes)


def input_values(inputs: NodeInputs) -> dict[str, ir.Value | None]:
    """The inputs by name, in the operator's order, absent ones as None."""
    return {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}


def node_signature(node: ir.Node) -> BodySignature:
    """What the body of a canonical node is made for.

    Raises:
        SpecError: an input's type or rank is not known, or the node contradicts itself.
    """
    check_known_shapes(node)
    _, inputs = read_attention_node(node) if is_attention_node(node) else read_rotary_node(node)
    _checked_shapes(ATTENTION_INPUTS if is_attention_node(node) else ROTARY_INPUTS, inputs)
    return signature_of(input_values(inputs), num_outputs=len(node.outputs))


def _make_node(
    op_type: str,
    spec: Spec,
    inputs: NodeInputs,
    outputs: list[tuple[str, list[Dim]]],
    *,
    name: str,
    dtype: ir.DataType | None,
) -> ir.Node:
    assert dtype is not None, "_checked_shapes refuses unknown types"
    values = [ir.Value(name=f"{name}/{output}", shape=ir.Shape(shape), type=ir.TensorType(dtype)) for output, shape in outputs]
    given = input_values(inputs)
    signature = signature_of(given, num_outputs=len(values))
    return ir.Node(
        DOMAIN,
        op_type,
        [given[input_name] for input_name in signature.names],
        [_attribute(key, value) for key, value in to_attributes(spec).items()],
        outputs=values,
        name=name,
    )


def _attribute(name: str, value: float | str) -> ir.Attr:
    if isinstance(value, str):
        return ir.AttrString(name, value)
    return ir.AttrInt64(name, value) if isinstance(value, int) else ir.AttrFloat32(name, value)


def _read_node(node: ir.Node, op_type: str, spec_type: type[SpecT], inputs_type: type[InputsT]) -> tuple[SpecT, InputsT]:
    if canonical_operator(node) != op_type:
        raise SpecError(f"node {node.name!r} is a {node.domain}::{node.op_type}, not a {DOMAIN}::{op_type}")
    for attr in node.attributes.values():
        if attr.is_ref():
            raise SpecError(f"attribute {attr.name} of node {node.name!r} refers to a function's attribute; inline that function")
    spec = from_attributes(spec_type, {key: attr.value for key, attr in node.attributes.items()})
    names = [field.name for field in dataclasses.fields(inputs_type)]
    if len(node.inputs) > len(names):
        raise SpecError(f"node {node.name!r} has {len(node.inputs)} inputs; a {op_type} has at most {len(names)}")
    given = dict(zip(names, node.inputs, strict=False))
    absent = [name for name in _required(inputs_type) if given.get(name) is None]
    if absent:
        raise SpecError(f"node {node.name!r} lacks the required input(s) {', '.join(absent)}")
    return spec, inputs_type(**given)  # type: ignore[arg-type]  # the required ones are not None


def _required(inputs_type: type[NodeInputs]) -> list[str]:
    return [field.name for field in dataclasses.fields(inputs_type) if field.default is dataclasses.MISSING]


def _checked_shapes(signatures: tuple[TensorSignature, ...], inputs: NodeInputs) -> dict[str, list[Dim]]:
    """Shapes of the inputs that are present and whose rank is known. Raises SpecError on types that do not fit."""
    values = input_values(inputs)
    first = values[signatures[0].name]
    assert first is not None, "the first input is required"
    dtype = _known_dtype(signatures[0].name, first)
    shapes: dict[str, list[Dim]] = {}
    for tensor in signatures:
        value = values[tensor.name]
        if value is None:
            continue
        _check_dtype(tensor, value, dtype)
        shape = _shape(tensor.name, value)
        if shape is not None:
            shapes[tensor.name] = shape
    return shapes


def _known_dtype(name: str, value: ir.Value) -> ir.DataType:
    if value.dtype is None:
        raise SpecError(f"the type of input {name} (value {value.name!r}) is not known: run shape inference on the model first")
    return value.dtype


def _check_dtype(tensor: TensorSignature, value: ir.Value, dtype: ir.DataType) -> None:
    allowed: Mapping[str, frozenset[ir.DataType]] = {
        "T": frozenset({dtype}) & _FLOATS,
        "T or float": frozenset({dtype, ir.DataType.FLOAT}),
        "bool, T or float": frozenset({dtype, ir.DataType.FLOAT, ir.DataType.BOOL}),
        "int64": frozenset({ir.DataType.INT64}),
    }
    given = _known_dtype(tensor.name, value)
    if given not in allowed[tensor.constraint]:
        names = " or ".join(sorted(kind.name for kind in allowed[tensor.constraint] or _FLOATS))
        raise SpecError(f"input {tensor.name} is of type {given.name}; {names} is expected")


def _shape(name: str, value: ir.Value) -> list[Dim] | None:
    if value.shape is not None:
        return [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    if name in _NEEDS_RANK:
        raise SpecError(f"the rank of input {name} (value {value.name!r}) is not known: run shape inference on the model first")
    return [None] * _FIXED_RANKS[name] if name in _FIXED_RANKS else None
