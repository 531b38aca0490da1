"""Dynamic shapes: read in all the ways that torch takes them, honoured or refused by name.

torch narrows a dynamic axis without a word where a module branches on its size, fixes it where it meets a constant, and
reads a size of 1 as "broadcast". So sizes of 0 and 1 in the example are enlarged along dynamic axes before the export, and
after it every axis is looked up in the exported program: it must have no size of its own and no bounds but the asked-for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim

from qknorm_onnx.errors import ExportError, first_line
from qknorm_onnx.torch_export.signatures.signature_wrapper import ExampleCall, ExplicitSignature

DynamicShapes = Mapping[str, Any] | Sequence[Any]
_EXPRESSION: Final = re.compile(r"[+\-*/ ]")
_WORD: Final = r"[A-Za-z_]\w*|\d+"
_READABLE: Final = re.compile(rf"(?:[A-Za-z_]\w*)|(?:(?:{_WORD})(?:\s*[+\-*/]\s*(?:{_WORD}))+)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class DynamicAxis:
    """One axis that was asked to be dynamic. `dim` is a name, a `torch.export.Dim` or a `Dim.DYNAMIC` / `Dim.AUTO` hint."""

    tensor: str
    axis: int
    size: int
    dim: Any

    @property
    def name(self) -> str:
        """The name of the dimension; empty for a hint."""
        return self.dim if isinstance(self.dim, str) else str(getattr(self.dim, "__name__", ""))

    @property
    def key(self) -> str:
        """Axes of one key have one size."""
        return self.name or str(self)

    @property
    def is_expression(self) -> bool:
        """Whether the name is made of other names, as `past + sequence`."""
        return bool(_EXPRESSION.search(self.name))

    @property
    def may_be_static(self) -> bool:
        """Whether torch was asked to decide."""
        return getattr(self.dim, "type", None) == getattr(Dim.AUTO, "type", self)

    @property
    def lower_bound(self) -> int:
        """The smallest size that is asked for."""
        bound = getattr(self.dim, "min", None)
        return max(1, bound) if isinstance(bound, int) else 1

    @property
    def for_torch(self) -> Any:
        """As `torch.onnx.export` takes it. It derives expressions by itself."""
        return Dim.DYNAMIC if self.is_expression else self.dim

    def __str__(self) -> str:
        named = f" ({self.name!r})" if self.name else ""
        return f"input {self.tensor} axis {self.axis}{named}"


def dynamic_axes(dynamic_shapes: DynamicShapes | None, call: ExampleCall) -> tuple[DynamicAxis, ...]:
    """The axes that are dynamic. Raises ExportError, naming the input, for anything that does not fit the example."""
    if dynamic_shapes is None:
        return ()
    if isinstance(dynamic_shapes, Mapping):
        shapes = dict(dynamic_shapes)
        # torch's own way for `**kwargs`: one entry under the parameter's name
        if call.var_keyword in shapes and call.var_keyword not in call.structure:
            shapes |= shapes.pop(call.var_keyword) or {}
    else:
        if len(dynamic_shapes) > len(call.structure):
            raise ExportError(
                f"dynamic_shapes has {len(dynamic_shapes)} entries, the module is called with {len(call.structure)}"
            )
        shapes = dict(zip(call.structure, dynamic_shapes, strict=False))
    found: list[DynamicAxis] = []
    for name, shape in shapes.items():
        if name not in call.structure and name not in call.tensors:
            known = ", ".join(dict.fromkeys([*call.structure, *call.tensors]))
            raise ExportError(f"dynamic_shapes names {name!r}, which is no input of the example; inputs are {known}")
        found += _axes(call.structure.get(name, name if name in call.tensors else None), shape, call, name)
    for axis in found:
        if axis.name and not _READABLE.fullmatch(axis.name):
            raise ExportError(f"{axis}: ONNX cannot read this name; use letters, digits and _, or sums such as 'past + new'")
    _check_equal_sizes(found)
    return tuple(found)


def _axes(place: Any, shape: Any, call: ExampleCall, label: str) -> Iterator[DynamicAxis]:
    """The axes of the tensors in `place`, which is a name or nested names, that `shape` of the same nesting marks."""
    if shape is None:
        return
    if isinstance(place, str):
        yield from _tensor_axes(str(place), shape, call)
    elif isinstance(place, Mapping) and isinstance(shape, Mapping):
        for key, inner in shape.items():
            if key not in place:
                raise ExportError(f"dynamic_shapes names {label}.{key}, which is not in the example")
            yield from _axes(place[key], inner, call, f"{label}.{key}")
    elif isinstance(place, list) and isinstance(shape, (list, tuple)):
        if len(place) != len(shape):
            raise ExportError(f"dynamic_shapes has {len(shape)} entries for {label}, the example has {len(place)}")
        for index, (item, inner) in enumerate(zip(place, shape, strict=True)):
            yield from _axes(item, inner, call, f"{label}.{index}")
    else:
        raise ExportError(f"dynamic_shapes of {label} is {shape!r}, which does not fit the example value")


def _tensor_axes(name: str, shape: Any, call: ExampleCall) -> Iterator[DynamicAxis]:
    tensor = call.tensors[name]
    entries = shape.items() if isinstance(shape, Mapping) else enumerate(shape) if isinstance(shape, (list, tuple)) else None
    if entries is None:
        raise ExportError(f"dynamic_shapes of {name} is {shape!r}; give {{axis: name}}")
    for axis, dim in entries:
        if not isinstance(axis, int) or not -tensor.ndim <= axis < tensor.ndim:
            raise ExportError(f"dynamic_shapes of {name} names axis {axis!r}; the example has {tensor.ndim} dimension(s)")
        axis %= tensor.ndim
        size = tensor.shape[axis]
        if isinstance(dim, int) and not isinstance(dim, bool):
            if dim != size:
                raise ExportError(f"dynamic_shapes fixes {name} axis {axis} at {dim}; the example has {size}")
        elif dim is not None and dim is not Dim.STATIC:
            if not (isinstance(dim, str) or dim in (Dim.AUTO, Dim.DYNAMIC) or hasattr(dim, "min")):
                raise ExportError(f"dynamic_shapes of {name} axis {axis} is {dim!r}; give a name, a torch.export.Dim or None")
            yield DynamicAxis(tensor=name, axis=axis, size=size, dim=dim)


def _check_equal_sizes(axes: Sequence[DynamicAxis]) -> None:
    first: dict[str, DynamicAxis] = {}
    for axis in axes:
        other = first.setdefault(axis.key, axis)
        if other.size != axis.size:
            raise ExportError(f"{other} has size {other.size} and {axis} has size {axis.size}: one name means one size")


def enlarge(call: ExampleCall, axes: Sequence[DynamicAxis]) -> tuple[ExampleCall, tuple[DynamicAxis, ...]]:
    """The example with sizes of 2 and more along all dynamic axes, and the axes that were enlarged.

    Axes of one name stay equal; a name that is a sum of names (`past + sequence`) becomes the sum of their sizes.
    """
    small = [axis for axis in axes if axis.size < max(2, axis.lower_bound)]
    if not small:
        return call, ()
    taken = {size for tensor in call.tensors.values() for size in tensor.shape}
    sizes: dict[str, int] = {}
    for axis in small:
        if axis.key not in sizes and not axis.is_expression:
            sizes[axis.key] = next(size for size in range(max(2, axis.lower_bound), 1 << 16) if size not in taken)
            taken.add(sizes[axis.key])
    return resized(call, axes, sizes)


def resized(
    call: ExampleCall, axes: Sequence[DynamicAxis], new_sizes: Mapping[str, int]
) -> tuple[ExampleCall, tuple[DynamicAxis, ...]]:
    """The example with other sizes along the axes of the given keys, and of the expressions over them; which axes changed."""
    sizes = {axis.key: call.tensors[axis.tensor].shape[axis.axis] for axis in axes} | dict(new_sizes)
    changed: list[DynamicAxis] = []
    tensors = dict(call.tensors)
    for axis in axes:
        size = _evaluated(axis.name, sizes) if axis.is_expression else sizes[axis.key]
        if size is not None and size != tensors[axis.tensor].shape[axis.axis]:
            tensors[axis.tensor] = _resized(tensors[axis.tensor], axis.axis, size)
            changed.append(axis)
    return call.with_tensors(tensors), tuple(changed)


def _evaluated(expression: str, sizes: Mapping[str, int]) -> int | None:
    """A sum of names; None where it is anything else."""
    terms = [term.strip() for term in expression.split("+")]
    values = [int(term) if term.isdigit() else sizes.get(term) for term in terms]
    return sum(value for value in values if value is not None) if None not in values else None


def _resized(tensor: Tensor, axis: int, size: int) -> Tensor:
    old = tensor.shape[axis]
    if old == 0:
        shape = [*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]]
        return torch.ones(shape, dtype=tensor.dtype) if tensor.dtype == torch.bool else tensor.new_zeros(shape)
    return tensor.index_select(axis, torch.arange(size, device=tensor.device) % old)


def output_names_of(wrapper: ExplicitSignature, enlarged: Sequence[DynamicAxis]) -> list[str]:
    """Run the example; ExportError if the module cannot, naming the enlarged axes where those may be why."""
    try:
        return wrapper.output_names()
    except ExportError:
        raise
    except Exception as error:
        if not enlarged:
            raise ExportError(f"{type(wrapper.wrapped).__name__} fails on the example inputs: {first_line(error)}") from error
        places = ", ".join(f"{axis} of size {axis.size}" for axis in enlarged)
        raise ExportError(
            f"{places}: torch cannot keep an axis of size 0 or 1 dynamic, and the module fails on a larger example "
            f"({first_line(error)}); give example inputs with sizes of 2 or more along dynamic axes"
        ) from error


def for_torch(axes: Sequence[DynamicAxis], call: ExampleCall) -> dict[str, Any] | None:
    """`dynamic_shapes` of the wrapper, whose forward takes `*tensors`."""
    if not axes:
        return None
    by_tensor: dict[str, dict[int, Any]] = {name: {} for name in call.tensors}
    for axis in axes:
        by_tensor[axis.tensor][axis.axis] = axis.for_torch
    return {"tensors": tuple(by_tensor.values())}
