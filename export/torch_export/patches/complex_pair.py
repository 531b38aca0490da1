"""A complex tensor as its real and imaginary part: what torch's functions do to it, in real numbers.

`FUNCTIONS` names by torch's names what has a real form. Most functions only move values about, or are sums of them, and
are done to both parts alike; the others are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Function = Callable[..., Any]

REAL_OF: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
COMPLEX_OF: Final = {real: number for number, real in REAL_OF.items()}


class ComplexPair:
    """A complex tensor as its real and imaginary part, both real tensors of one shape."""

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        self.real = real
        self.imag = imag

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What a torch function does where one argument is a pair."""
        del types
        return applied(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name)
        if name in ("T", "H", "mT", "mH"):
            turned = self._both(lambda part: getattr(part, name))
            return turned.conj() if name in ("H", "mH") else turned
        if not callable(method) or name in _SHAPE_METHODS:
            return getattr(self.real, name)  # shape, device, ndim, size() ...
        return lambda *args, **kwargs: applied(method, (self, *args), kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """The complex type."""
        return COMPLEX_OF.get(self.real.dtype, torch.complex64)

    def __len__(self) -> int:
        return len(self.real)

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def _both(self, change: Callable[[Tensor], Any]) -> Any:
        return paired(change(self.real), change(self.imag))


def _operator(name: str) -> Function:
    def call(self: ComplexPair, *args: Any) -> Any:
        return applied(getattr(Tensor, name), (self, *args), {})

    return call


_SHAPE_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "get_device"})
# Python looks these up in the class, not with __getattr__.
for _name in (
    *("__getitem__", "__setitem__", "__neg__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__rtruediv__", "__matmul__", "__pow__", "__eq__", "__ne__", "__abs__"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
):
    setattr(ComplexPair, _name, _operator(_name))


def paired(real: Any, imag: Any) -> Any:
    """Pairs in the place of the tensors of two results of one structure."""
    reals, tree = pytree.tree_flatten(real)
    imags = pytree.tree_leaves(imag)
    return pytree.tree_unflatten([ComplexPair(*both) for both in zip(reals, imags, strict=True)], tree)


def pair_of(value: Any) -> Any:
    """A complex tensor or number as a pair, anything else as it is."""
    if isinstance(value, Tensor) and value.is_complex():
        parts = torch.view_as_real(value.resolve_conj())
        return ComplexPair(parts[..., 0], parts[..., 1])
    if isinstance(value, complex):
        return ComplexPair(torch.tensor(value.real), torch.tensor(value.imag))
    return value


def applied(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`func` of pairs, complex tensors and others. A function without a real form is done to complex tensors."""
    name = getattr(func, "__name__", "")
    rule = FUNCTIONS.get(name)
    in_place = _in_place(name)
    if rule is not None:
        return rule(func, *pytree.tree_map(pair_of, tuple(args)), **pytree.tree_map(pair_of, dict(kwargs)))
    if in_place is not None and in_place in FUNCTIONS and isinstance(args[0], ComplexPair):
        result = FUNCTIONS[in_place](getattr(Tensor, in_place), *pytree.tree_map(pair_of, tuple(args)), **kwargs)
        args[0].real.copy_(result.real)
        args[0].imag.copy_(result.imag)
        return args[0]
    # On real complex tensors: what cannot be exported then is the exporter's to say.
    plain = pytree.tree_map(_tensor_of, (tuple(args), dict(kwargs)))
    return func(*plain[0], **plain[1])


def _tensor_of(value: Any) -> Any:
    return torch.complex(value.real, value.imag) if isinstance(value, ComplexPair) else value


def _in_place(name: str) -> str | None:
    """The function of which `name` is the form that overwrites its first argument."""
    if name.startswith("__i") and name.endswith("__"):
        return "__" + name[3:]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else None


def _real(value: Any) -> Any:
    return value.real if isinstance(value, ComplexPair) else value


def _imag(value: Any) -> Any:
    """The imaginary part; that of a real tensor or number is 0."""
    if isinstance(value, ComplexPair):
        return value.imag
    return torch.zeros_like(value) if isinstance(value, Tensor) else 0


def _real_type(kwargs: dict[str, Any]) -> dict[str, Any]:
    dtype = kwargs.get("dtype")
    return kwargs | {"dtype": REAL_OF[dtype]} if dtype in REAL_OF else kwargs


def _alike(func: Function, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Done to both parts; the other arguments are shapes, axes and indices."""
    kwargs = _real_type(kwargs)
    return paired(func(data.real, *args, **kwargs), func(data.imag, *args, **kwargs))


def _joined(func: Function, tensors: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    tensors = list(tensors)
    return paired(
        func([_real(item) for item in tensors], *args, **kwargs), func([_imag(item) for item in tensors], *args, **kwargs)
    )


def _padded_sequences(
    func: Function, sequences: Sequence[Any], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    real, imag = ([part(item) for item in sequences] for part in (_real, _imag))
    return paired(func(real, batch_first, padding_value, padding_side), func(imag, batch_first, 0.0, padding_side))


def _where(_: Function, condition: Any, first: Any, second: Any) -> Any:
    if not isinstance(condition, Tensor):
        condition, first = first, condition  # Tensor.where(self, condition, other)
    return paired(torch.where(condition, _real(first), _real(second)), torch.where(condition, _imag(first), _imag(second)))


def _masked_fill(_: Function, data: Any, mask: Tensor, value: Any) -> Any:
    data = data if isinstance(data, ComplexPair) else ComplexPair(data, torch.zeros_like(data))
    return paired(data.real.masked_fill(mask, _real(value)), data.imag.masked_fill(mask, _imag(value)))


def _set_item(_: Function, data: Any, index: Any, value: Any) -> None:
    data.real[index] = _real(value)
    data.imag[index] = _imag(value)


def _sum(func: Function, left: Any, right: Any, *, alpha: Any = 1) -> Any:
    """Sums and differences, either operand real or a number."""
    if func in (torch.rsub, Tensor.__rsub__):
        left, right = right, left
    sign = -1 if getattr(func, "__name__", "").strip("_") in _DIFFERENCES else 1
    real, imag = (torch.add(_tensor(part(left)), part(right), alpha=sign * alpha) for part in (_real, _imag))
    return ComplexPair(*torch.broadcast_tensors(real, imag))  # type: ignore[no-untyped-call]


_DIFFERENCES = ("sub", "rsub", "subtract")


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _product(func: Function, left: Any, right: Any) -> Any:
    """(a + bi)(c + di) = (ac - bd) + (ad + bc)i, for products of values, and for matrix products."""
    bilinear = torch.mul if func in _PRODUCTS else func
    if not isinstance(left, ComplexPair):
        return paired(bilinear(left, right.real), bilinear(left, right.imag))
    if not isinstance(right, ComplexPair):
        return left if _is_one(right) else paired(bilinear(left.real, right), bilinear(left.imag, right))
    real = bilinear(left.real, right.real) - bilinear(left.imag, right.imag)
    return ComplexPair(real, bilinear(left.real, right.imag) + bilinear(left.imag, right.real))


_PRODUCTS = (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)


def _is_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 1


def _einsum(_: Function, equation: str, *operands: Any) -> Any:
    first, *others = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if len(others) == 0:
        return _alike(lambda part: torch.einsum(equation, part), first)
    if len(others) > 1:
        raise NotImplementedError("torch.einsum of three and more operands has no form for complex numbers here")
    return _product(lambda left, right: torch.einsum(equation, left, right), first, others[0])


def _quotient(func: Function, left: Any, right: Any) -> Any:
    if func is Tensor.__rtruediv__:
        left, right = right, left
    if not isinstance(right, ComplexPair):
        return paired(left.real / right, left.imag / right)
    square = right.real * right.real + right.imag * right.imag
    return _product(torch.mul, left, ComplexPair(right.real / square, -right.imag / square))


def _reciprocal(_: Function, data: Any) -> Any:
    return _quotient(torch.div, 1, data)


def _power(_: Function, data: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int) or not 1 <= exponent <= 8:
        raise NotImplementedError(f"a complex number to the power of {exponent} has no real form here: use products")
    result = data
    for _factor in range(exponent - 1):
        result = _product(torch.mul, result, data)
    return result


def polar(magnitude: Tensor, angle: Tensor) -> ComplexPair:
    """magnitude * (cos(angle) + i sin(angle)), as torch.polar."""
    return ComplexPair(magnitude * torch.cos(angle), magnitude * torch.sin(angle))


def _magnitude(_: Function, data: Any) -> Tensor:
    return torch.sqrt(data.real * data.real + data.imag * data.imag)


def _equal(_: Function, left: Any, right: Any) -> Tensor:
    return (_tensor(_real(left)) == _real(right)) & (_tensor(_imag(left)) == _imag(right))


def _to(_: Function, data: Any, *args: Any, **kwargs: Any) -> Any:
    """To another type or device; to a real type without the imaginary part, as torch does it."""
    named = [kwargs.pop(name) for name in ("dtype", "other") if name in kwargs]
    wanted = [getattr(item, "dtype", item) for item in (*args, *named)]
    dtype = next((item for item in wanted if isinstance(item, torch.dtype)), None)
    rest = [item for item in args if not isinstance(item, (torch.dtype, Tensor, ComplexPair))]
    if not isinstance(data, ComplexPair):
        data = ComplexPair(data, torch.zeros_like(data))
    if dtype is not None and dtype not in REAL_OF:
        return data.real.to(*rest, dtype=dtype, **kwargs)
    target = data.real.dtype if dtype is None else REAL_OF[dtype]
    return paired(*(part.to(*rest, dtype=target, **kwargs) for part in (data.real, data.imag)))


def _ones_like(_: Function, data: Any, **kwargs: Any) -> Any:
    kwargs = _real_type(kwargs)
    return ComplexPair(torch.ones_like(data.real, **kwargs), torch.zeros_like(data.imag, **kwargs))


_ALIKE: Final = (
    *("__getitem__", "__neg__", "as_strided", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "chunk", "clone"),
    *("contiguous", "cpu", "cumsum", "detach", "diagonal", "empty_like", "expand", "expand_as", "flatten", "flip", "gather"),
    *("index_select", "mean", "movedim", "moveaxis", "narrow", "neg", "negative", "new_empty", "new_zeros", "pad", "permute"),
    *("positive", "ravel", "repeat", "repeat_interleave", "reshape", "reshape_as", "resolve_neg", "roll", "rot90", "select"),
    *("split", "split_with_sizes", "squeeze", "sum", "swapaxes", "swapdims", "t", "take_along_dim", "tensor_split", "tile"),
    *("transpose", "tril", "triu", "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split", "unsqueeze", "view"),
    *("view_as", "zeros_like", "adjoint"),
)
FUNCTIONS: Final[Mapping[str, Function]] = {
    **dict.fromkeys(_ALIKE, _alike),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"), _joined),
    **dict.fromkeys(("add", "sub", "subtract", "rsub", "__add__", "__radd__", "__sub__", "__rsub__"), _sum),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "matmul", "mm", "bmm", "__matmul__", "outer"), _product),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__rtruediv__"), _quotient),
    **dict.fromkeys(("pow", "__pow__"), _power),
    **dict.fromkeys(("abs", "absolute", "__abs__"), _magnitude),
    **dict.fromkeys(("conj", "conj_physical"), lambda _, data: ComplexPair(data.real, -data.imag)),
    **dict.fromkeys(("resolve_conj", "to_dense"), lambda _, data: data),
    **dict.fromkeys(("eq", "__eq__"), _equal),
    **dict.fromkeys(("ne", "__ne__"), lambda _, left, right: ~_equal(_, left, right)),
    **dict.fromkeys(("to", "type_as"), _to),
    "__setitem__": _set_item,
    "angle": lambda _, data: torch.atan2(data.imag, data.real),
    "copy": lambda _, data, source: ComplexPair(*(torch.zeros_like(data.real) + part(source) for part in (_real, _imag))),
    "einsum": _einsum,
    "exp": lambda _, data: polar(torch.exp(data.real), data.imag),
    "imag": lambda _, data: data.imag,
    "is_complex": lambda _func, _data: True,
    "is_floating_point": lambda _func, _data: False,
    "masked_fill": _masked_fill,
    "ones_like": _ones_like,
    "pad_sequence": _padded_sequences,
    "real": lambda _, data: data.real,
    "reciprocal": _reciprocal,
    "square": lambda _, data: _product(torch.mul, data, data),
    "view_as_real": lambda _, data: torch.stack([data.real, data.imag], dim=-1),
    "where": _where,
}
