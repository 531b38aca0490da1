"""The rules of the spec and those of the C++ checks are one.

Shapes (`spec/shape_inference.py`): the same verdict in the same sentence, and the same shapes of the outputs. Each call is
right until one thing is changed: an axis longer, shorter, gone or added, an input left out or given too much, a field.
Attributes (`spec/qk_norm_spec.py`): the same verdict; the one speaks of fields, the other of attributes of a node.
A rule or a sentence that changes on one side only fails here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kernel_call import KernelError, Message, NativeLibrary, Shapes, attribute_struct, pack_attributes, pack_tensors
from random_cases import random_case, random_rotary_case

from qknorm_onnx.spec import signature
from qknorm_onnx.spec.attributes import attribute_fields, from_attributes, to_attributes
from qknorm_onnx.spec.cpp_header import choices_of
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec, SpecError
from qknorm_onnx.spec.shape_inference import check_cache_length, infer_attention_outputs, infer_rotary_outputs

Shape = tuple[int, ...]
OPTIONAL_SHAPES: dict[str, Shape] = {
    tensor.name: (2, 3) for tensor in (*signature.ATTENTION_INPUTS, *signature.ROTARY_INPUTS) if tensor.optional
}
INTEGERS = ("cache_length", "query_offset")


def changes(shapes: dict[str, Shape], optional: list[str]) -> Iterator[dict[str, Shape]]:
    """`shapes` with one input changed."""
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape):
            for other in {dim + 1, dim - 1, 2 * dim, 1, 0} - {dim}:
                if other >= 0:
                    yield shapes | {name: (*shape[:axis], other, *shape[axis + 1 :])}
            yield shapes | {name: shape[:axis] + shape[axis + 1 :]}
        yield shapes | {name: (1, *shape)}
        yield shapes | {name: (*shape, 1)}
        yield {other: value for other, value in shapes.items() if other != name}
    for name in optional:
        if name not in shapes:
            yield shapes | {name: OPTIONAL_SHAPES[name]}


def other_specs(spec: Any) -> Iterator[Any]:
    """`spec` with one field changed, as far as it allows the new value."""
    parts = [name for name in ("norm", "rotary", "attention") if hasattr(spec, name)]
    for part in (*parts, None):
        owner = spec if part is None else getattr(spec, part)
        for name in (
            "groups",
            "embedding_dim",
            "offset",
            "sections",
            "order",
            "num_heads",
            "q_num_heads",
            "kv_num_heads",
            "axis",
        ):
            if not hasattr(owner, name):
                continue
            values = {"order": ("none", "after_norm", "before_norm"), "axis": ("head", "hidden")}.get(
                name, (1, 2, 3, 4, 5, 7, 16)
            )
            for value in values:
                yield from changed_spec(spec, part, owner, {name: value})


def changed_spec(spec: Any, part: str | None, owner: Any, change: dict[str, Any]) -> Iterator[Any]:
    try:
        changed = dataclasses.replace(owner, **change)
        yield changed if part is None else dataclasses.replace(spec, **{part: changed})
    except SpecError:
        return


def arrays(shapes: dict[str, Shape]) -> dict[str, Any]:
    """Zeros: as positions of a cache they fit wherever any fit."""
    return {name: np.zeros(shape, np.int64 if name in INTEGERS else np.float32) for name, shape in shapes.items()}


def written_attention(library: NativeLibrary, spec: QKNormSpec, shapes: dict[str, Shape]) -> dict[str, list[int]]:
    """Shapes of the outputs by the C++ checks. Raises KernelError."""
    tensors, _alive = pack_tensors(signature.ATTENTION_INPUT_NAMES, arrays(shapes))
    message, found = Message(), Shapes()
    attributes = pack_attributes(spec)
    code = library.door.qknorm_cpu_attention_shapes(ctypes.byref(attributes), tensors, ctypes.byref(found), ctypes.byref(message))
    if code:
        raise KernelError(message.text.decode())
    names = ("y", "present_key", "present_value")
    return {output.name: list(getattr(found, name)) for output, name in zip(signature.ATTENTION_OUTPUTS, names, strict=True)}


def written_rotary(library: NativeLibrary, spec: QKNormRotarySpec, shapes: dict[str, Shape]) -> dict[str, list[int]]:
    """The same for QKNormRotary, whose output has the shape of x: the kernel itself is run."""
    given = arrays(shapes)
    tensors, _alive = pack_tensors(signature.ROTARY_INPUT_NAMES, given)
    message, y = Message(), np.zeros(shapes.get("x", ()), np.float32)
    attributes = pack_attributes(spec)
    code = library.door.qknorm_cpu_rotary(
        ctypes.byref(attributes), tensors, ctypes.c_void_p(y.ctypes.data), None, ctypes.byref(message)
    )
    if code:
        raise KernelError(message.text.decode())
    return {"Y": list(y.shape)}


def verdict(infer: Callable[..., dict[str, Any]], *arguments: Any) -> tuple[dict[str, Any] | None, str]:
    try:
        return infer(*arguments), ""
    except (SpecError, KernelError) as error:
        return None, str(error)


def by_shape_inference(spec: QKNormSpec, shapes: dict[str, Shape]) -> dict[str, list[Any]]:
    """What C++ says of lengths of 0: shapes alone leave T open there."""
    out = infer_attention_outputs(spec, shapes)
    if "cache_length" in shapes:
        total = check_cache_length(shapes, [0] * shapes["cache_length"][0])
        for name in ("present_key", "present_value"):
            assert out[name][2] in (None, total)
            out[name][2] = total
    return out


def differences(
    of_spec: Callable[..., dict[str, Any]],
    of_kernel: Callable[..., dict[str, Any]],
    tried: Iterator[tuple[Any, dict[str, Shape]]],
) -> tuple[Counter[str], list[str]]:
    """How many were accepted and refused by both, and what was judged differently."""
    counts, wrong = Counter[str](), []
    for spec, shapes in tried:
        expected = verdict(of_spec, spec, shapes)
        found = verdict(of_kernel, spec, shapes)
        counts["accepted" if expected[0] is not None else "refused"] += 1
        if expected != found:
            wrong.append(f"{spec}\n{shapes}\n  shape_inference.py: {expected}\n  C++:                {found}")
    return counts, wrong


@pytest.mark.parametrize("seed", range(60))
def test_attention(library: NativeLibrary, seed: int) -> None:
    case = random_case(np.random.default_rng(seed), largest=7)
    shapes = {name: value.shape for name, value in case.inputs.items()}
    optional = [tensor.name for tensor in signature.ATTENTION_INPUTS if tensor.optional]

    def by_kernel(spec: QKNormSpec, given: dict[str, Shape]) -> dict[str, list[int]]:
        return written_attention(library, spec, given)

    counts, wrong = differences(by_shape_inference, by_kernel, iter([(case.spec, shapes)]))
    assert counts == {"accepted": 1} and not wrong, wrong
    tried = itertools.chain(
        zip(itertools.repeat(case.spec), changes(shapes, optional)), zip(other_specs(case.spec), itertools.repeat(shapes))
    )
    counts, wrong = differences(by_shape_inference, by_kernel, tried)
    assert not wrong, f"{len(wrong)} of {counts.total()}:\n" + "\n".join(wrong[:5])
    assert counts["refused"] > 20


@pytest.mark.parametrize("seed", range(30))
def test_rotary(library: NativeLibrary, seed: int) -> None:
    case = random_rotary_case(np.random.default_rng(seed), largest=7)
    shapes = {name: value.shape for name, value in case.inputs.items()}
    optional = [tensor.name for tensor in signature.ROTARY_INPUTS if tensor.optional]

    def by_kernel(spec: QKNormRotarySpec, given: dict[str, Shape]) -> dict[str, list[int]]:
        return written_rotary(library, spec, given)

    counts, wrong = differences(infer_rotary_outputs, by_kernel, iter([(case.spec, shapes)]))
    assert counts == {"accepted": 1} and not wrong, wrong
    tried = itertools.chain(
        zip(itertools.repeat(case.spec), changes(shapes, optional)), zip(other_specs(case.spec), itertools.repeat(shapes))
    )
    counts, wrong = differences(infer_rotary_outputs, by_kernel, tried)
    assert not wrong, f"{len(wrong)} of {counts.total()}:\n" + "\n".join(wrong[:5])
    assert counts["refused"] > 5


def test_every_refusal_is_tried() -> None:
    said = set[str]()
    for seed in range(60):
        case = random_case(np.random.default_rng(seed), largest=7)
        shapes = {name: value.shape for name, value in case.inputs.items()}
        optional = [tensor.name for tensor in signature.ATTENTION_INPUTS if tensor.optional]
        said |= {verdict(infer_attention_outputs, case.spec, changed)[1] for changed in changes(shapes, optional)}
        said |= {verdict(infer_attention_outputs, spec, shapes)[1] for spec in other_specs(case.spec)}
    for part in SENTENCES:
        assert any(part in sentence for sentence in said), part


SENTENCES = [
    "is missing",
    "; it needs 3 dimensions",
    "must split into",
    "; its batch size must be the query's",
    "is expected, as in query",
    "; it needs as many positions as key",
    "is given, but there is no norm for it",
    "is expected",
    "norm_groups",
    "is given, but rotary_order is 'none'",
    "the inputs cos and sin are both needed",
    "(S, W), (B, S, W) or (B, H, S, W) is expected",
    "must be broadcastable to",
    "rotated values",
    "their widths must be equal",
    "it shares the tables of the query",
    "must be given together",
    "the buffers that it speaks of",
    "query_offset is for attention without a cache",
    "its heads are empty",
    "exceeds the head size",
    "cannot be split into",
]


VALUES: dict[type, tuple[Any, ...]] = {
    int: (-2, -1, 0, 1, 2, 3, 4, 6, 16),
    bool: (False, True),
    float: (-1.0, 0.0, 1e-6, float("inf")),
}


def alternatives(spec_type: Any) -> list[dict[str, Any]]:
    """Each attribute with each of a few values: those of an enumeration, and one that it does not have."""
    found = []
    for field in attribute_fields(spec_type):
        choices = choices_of(spec_type, field)
        values = (*choices, "unheard_of") if choices else VALUES[field.type]
        found += [{field.onnx_name: value} for value in values]
    return found


def accepted_by_spec(spec_type: Any, values: dict[str, Any]) -> bool:
    try:
        from_attributes(spec_type, values)
    except SpecError:
        return False
    return True


def packed(spec_type: Any, values: dict[str, Any]) -> ctypes.Structure:
    """The struct with these values; one that an enumeration does not have is the number behind the last."""
    struct = attribute_struct(spec_type)()
    for field in attribute_fields(spec_type):
        choices, value = choices_of(spec_type, field), values[field.onnx_name]
        if choices:
            value = choices.index(value) if value in choices else len(choices)
        setattr(struct, field.onnx_name, value)
    return struct


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("operator", ["attention", "rotary"])
def test_attributes(library: NativeLibrary, operator: str, seed: int) -> None:
    """Each attribute, and each pair of attributes, changed in a spec that is right."""
    rng = np.random.default_rng(seed)
    spec = random_case(rng).spec if operator == "attention" else random_rotary_case(rng).spec
    right, spec_type = to_attributes(spec), type(spec)
    check = getattr(library.door, f"qknorm_cpu_check_{operator}_attributes")
    counts = Counter[bool]()
    for one, other in itertools.combinations_with_replacement(alternatives(spec_type), 2):
        values = right | one | other
        expected = accepted_by_spec(spec_type, values)
        message = Message()
        found = check(ctypes.byref(packed(spec_type, values)), ctypes.byref(message)) == 0
        assert found == expected, f"{one | other} in {right}: {message.text.decode() or 'accepted by C++ only'}"
        counts[expected] += 1
    assert min(counts[True], counts[False]) > 100
