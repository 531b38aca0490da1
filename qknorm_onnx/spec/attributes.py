"""Specs as ONNX attributes and back: a bijection that is read off the dataclasses' field metadata.

All attributes are always written, so that a node says what it means without a table of defaults. Python's bool is an
ONNX int of 0 or 1; floats were rounded to float32 when the spec was made, so the way there and back changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast, get_type_hints

from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec, SpecError

AttributeValue = int | float | str
Spec = QKNormSpec | QKNormRotarySpec
SpecT = TypeVar("SpecT", QKNormSpec, QKNormRotarySpec)


@dataclasses.dataclass(frozen=True)
class AttributeField:
    """One leaf of a spec: where it is (`path` of field names), its ONNX name, its Python type, default and meaning."""

    path: tuple[str, ...]
    onnx_name: str
    type: type[int] | type[float] | type[str] | type[bool]
    default: Any
    doc: str

    @property
    def required(self) -> bool:
        """Whether the attribute has no default."""
        return self.default is dataclasses.MISSING


def attribute_fields(spec_type: type[Spec]) -> tuple[AttributeField, ...]:
    """The ONNX attributes of a spec type, in the order of their declaration."""
    return tuple(_walk(spec_type, ()))


def to_attributes(spec: Spec) -> dict[str, AttributeValue]:
    """Every field of `spec` under its ONNX name."""
    out: dict[str, AttributeValue] = {}
    for field in attribute_fields(type(spec)):
        value: Any = spec
        for name in field.path:
            value = getattr(value, name)
        out[field.onnx_name] = int(value) if field.type is bool else value
    return out


def from_attributes(spec_type: type[SpecT], attributes: Mapping[str, AttributeValue | bytes]) -> SpecT:
    """The spec that `attributes` describe; missing ones take their default.

    Raises:
        SpecError: an attribute is unknown, missing without a default, of the wrong kind, or out of range.
    """
    fields = {field.onnx_name: field for field in attribute_fields(spec_type)}
    unknown = sorted(set(attributes) - set(fields))
    if unknown:
        raise SpecError(f"unknown attribute(s) {', '.join(unknown)}; known are {', '.join(fields)}")
    missing = [name for name, field in fields.items() if field.required and name not in attributes]
    if missing:
        raise SpecError(f"attribute(s) {', '.join(missing)} are missing and have no default")
    values = {fields[name].path: _python_value(fields[name], value) for name, value in attributes.items()}
    return cast(SpecT, _build(spec_type, (), values))


def _walk(owner: Any, path: tuple[str, ...]) -> Iterator[AttributeField]:
    for field, kind in _typed_fields(owner):
        here = (*path, field.name)
        if dataclasses.is_dataclass(kind):
            yield from _walk(kind, here)
        else:
            leaf = kind if kind in (int, float, bool) else str
            yield AttributeField(here, field.metadata["onnx_name"], leaf, field.default, field.metadata["doc"])


@functools.cache
def _typed_fields(owner: Any) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = get_type_hints(owner)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(owner))


def _python_value(field: AttributeField, value: AttributeValue | bytes) -> Any:
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise SpecError(f"attribute {field.onnx_name} is {value!r}, which is no text") from error
    wanted = int if field.type is bool else field.type
    if not isinstance(value, wanted) and not (wanted is float and isinstance(value, int)):
        raise SpecError(f"attribute {field.onnx_name} is {value!r}; it must be of type {wanted.__name__}")
    if field.type is bool:
        if value not in (0, 1):
            raise SpecError(f"attribute {field.onnx_name} is {value!r}; it must be 0 or 1")
        return bool(value)
    return value


def _build(owner: Any, path: tuple[str, ...], values: Mapping[tuple[str, ...], Any]) -> Any:
    arguments: dict[str, Any] = {}
    for field, kind in _typed_fields(owner):
        here = (*path, field.name)
        if dataclasses.is_dataclass(kind):
            arguments[field.name] = _build(kind, here, values)
        elif here in values:
            arguments[field.name] = values[here]
    return owner(**arguments)
