"""The PyTorch module as the measure: its exact value in float64, and its own error in the type under test."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.cases.inputs import GraphInput
from qknorm_onnx.validation.measures.error_budget import OTHER_ORDERS

if TYPE_CHECKING:
    import torch

    from qknorm_onnx.validation.inside.module_results import ModuleResult
    from qknorm_onnx.validation.modes.observation import Observation

Tensor = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """A module and how it is called: the flattened example arguments, in which tensors are replaced by those of a case."""

    module: torch.nn.Module
    leaves: tuple[Any, ...]
    structure: Any
    tensor_places: tuple[int, ...]
    names: tuple[str, ...]

    def examples(self) -> list[tuple[str, Tensor]]:
        """The tensors among the arguments, with the name of the parameter where it is one tensor."""
        return [(name, to_numpy(self.leaves[place])) for name, place in zip(self.names, self.tensor_places, strict=True)]

    def arguments(self, tensors: Mapping[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the tensors at the places of `tensors` replaced."""
        from torch.utils import _pytree as pytree

        leaves = [tensors.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


def call_of(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> ModuleCall:
    """The call `module(*args, **kwargs)`; names come from `forward`'s parameters. Raises InputError where it takes no tensor."""
    import inspect

    import torch
    from torch.utils import _pytree as pytree

    if not isinstance(module, torch.nn.Module):
        raise InputError(f"module is a {type(module).__name__}; give the torch.nn.Module that was exported")
    parameters = list(inspect.signature(module.forward).parameters)
    names: list[str] = []
    for position, value in enumerate(args):
        names += _leaf_names(parameters[position] if position < len(parameters) else f"input {position}", value)
    for key, value in (kwargs or {}).items():
        names += _leaf_names(key, value)
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    if not places:
        raise InputError("args and kwargs hold no tensor: give the example inputs that the module was exported with")
    return ModuleCall(
        module=module,
        leaves=tuple(leaves),
        structure=structure,
        tensor_places=places,
        names=tuple(names[place] for place in places),
    )


def _leaf_names(name: str, value: Any) -> list[str]:
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(value)
    return [name] if len(leaves) == 1 and leaves[0] is value else [f"{name}[{index}]" for index in range(len(leaves))]


class TorchSide:
    """A module whose weights were rounded to one type, run exactly and in that type."""

    def __init__(self, call: ModuleCall, inputs: Sequence[GraphInput], dtype: Dtype) -> None:
        import torch

        self._call = call
        self._places = {i.name: call.tensor_places[i.leaf] for i in inputs}
        self._dtype = getattr(torch, dtype)
        self._in_dtype = _rounded_copy(call.module, self._dtype)
        self._in_float64 = copy.deepcopy(self._in_dtype).to(torch.float64)
        _use_experts_of_any_type(self._in_float64)
        self._in_float32 = self._in_dtype if dtype == "float32" else copy.deepcopy(self._in_dtype).to(torch.float32)
        self.output_names: tuple[str, ...] = ()
        self.truth_type: Dtype = "float64"
        self.note = ""
        self.autocast_note = ""
        self.order_note = ""

    def truth(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs in float64, every float32 island of the module raised as well.

        A module that cannot run so is run in float32; `truth_type` and `note` say so. Raises what the module raises.
        """
        import torch

        if self.truth_type == "float64":
            from qknorm_onnx.validation.modes.float64_mode import InFloat64

            try:
                with InFloat64():  # type: ignore[no-untyped-call]
                    return self._run(self._in_float64, inputs, torch.float64)
            except Exception as error:
                result = self._run(self._in_float32, inputs, torch.float32)  # raises where the module refuses the inputs
                self.truth_type, self.note = "float32", f"the module does not run in float64 ({one_line(error)})"
                return result
        return self._run(self._in_float32, inputs, torch.float32)

    def results_of_parts(self, inputs: Mapping[str, Tensor]) -> list[ModuleResult]:
        """What every part of the module returns in float64, in the order in which they end; raises what the module raises."""
        from qknorm_onnx.validation.inside.module_results import recorded

        with recorded(self._in_float64) as results:
            self.truth(inputs)
        return results

    def parameters(self) -> dict[str, Tensor]:
        """The module's parameters by name, rounded to the type."""
        return {name: to_numpy(parameter) for name, parameter in self._in_dtype.named_parameters()}

    def observed(self) -> Observation:
        """What the module does with the example's inputs and with its parameters; nothing where it cannot be watched."""
        import torch

        from qknorm_onnx.validation.modes.observation import Observation, Observer

        leaves = self._call.leaves
        tensors = {place: self._leaf(leaf, self._dtype).clone() for place, leaf in enumerate(leaves) if torch.is_tensor(leaf)}
        args, kwargs = self._call.arguments(tensors)
        observer = Observer(self._in_dtype, tensors)
        try:
            with torch.no_grad(), _without_compiling(), observer:
                self._in_dtype(*args, **kwargs)
        except Exception:
            return Observation()  # the cases that need it are not made, and the report says so
        return observer.observation()

    @contextlib.contextmanager
    def scaled(self, factors: Mapping[str, float]) -> Iterator[None]:
        """While it lasts, parameters are multiplied by their factors, rounded to the type as those of the file are."""
        import torch

        wider = [module for module in (self._in_float32, self._in_float64) if module is not self._in_dtype]
        kept = {name: self._in_dtype.get_parameter(name).detach().clone() for name in factors}
        with torch.no_grad():
            try:
                for name, factor in factors.items():
                    self._set(name, kept[name] * factor, wider)
                yield
            finally:
                for name, value in kept.items():
                    self._set(name, value, wider)

    def _set(self, name: str, value: torch.Tensor, wider: Sequence[torch.nn.Module]) -> None:
        for module in (self._in_dtype, *wider):
            module.get_parameter(name).copy_(value)

    def in_float32(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs of eager PyTorch in float32, on the weights that were rounded to the type."""
        import torch

        return self._run(self._in_float32, inputs, torch.float32)

    def in_dtype(self, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
        """Outputs of eager PyTorch in the type itself, under autocast where only that runs; None where neither does."""
        import torch

        try:
            return self._run(self._in_dtype, inputs, self._dtype)
        except Exception as error:
            if self._dtype == torch.float32:
                raise
            first = one_line(error)
        try:
            with torch.autocast("cpu", dtype=self._dtype):
                result = self._run(self._in_dtype, inputs, self._dtype)
        except Exception:
            self.autocast_note = f"module.to({self._dtype}) does not run, not under autocast either ({first})"
            return None
        self.autocast_note = f"module.to({self._dtype}) runs only under autocast ({first})"
        return result

    def in_other_orders(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor] | None]]:
        """`in_float32` and `in_dtype` again, `OTHER_ORDERS` times, the terms of sums added in another order each time.

        Attention is computed step by step, so that its sums are among them. A module that does not run so gives nothing, and
        `order_note` says why.
        """
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from qknorm_onnx.validation.modes.reordered_sums import ReorderedSums

        for seed in range(OTHER_ORDERS):
            try:
                with sdpa_kernel(SDPBackend.MATH), ReorderedSums(seed):
                    in_float32 = self.in_float32(inputs)
                    in_dtype = in_float32 if self._dtype == torch.float32 else self.in_dtype(inputs)
            except Exception as error:
                self.order_note = f"the module does not run with its sums in another order ({one_line(error)})"
                return
            yield in_float32, in_dtype

    def _run(self, module: torch.nn.Module, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
        import torch
        from torch.utils import _pytree as pytree

        tensors = {place: self._leaf(leaf, dtype) for place, leaf in enumerate(self._call.leaves) if torch.is_tensor(leaf)}
        for name, array in inputs.items():
            tensor = torch.from_numpy(np.array(array))
            place = self._places[name]
            tensors[place] = tensor.to(dtype if tensor.is_floating_point() else self._call.leaves[place].dtype)
        args, kwargs = self._call.arguments(tensors)
        with torch.no_grad(), _without_compiling():
            out = module(*args, **kwargs)
        outputs = [(_path(path), leaf) for path, leaf in pytree.tree_leaves_with_path(out) if torch.is_tensor(leaf)]
        self.output_names = tuple(name for name, _ in outputs)
        return [to_numpy(leaf) for _, leaf in outputs]

    @staticmethod
    def _leaf(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf


def one_run(call: ModuleCall, arrays: Mapping[int, Tensor]) -> tuple[tuple[str, ...], list[Tensor]]:
    """The module itself, as it is, on its example with the tensors at the places of `arrays` replaced: names and outputs."""
    import torch
    from torch.utils import _pytree as pytree

    tensors = {place: leaf.clone() for place, leaf in enumerate(call.leaves) if torch.is_tensor(leaf)}
    for place, array in arrays.items():
        tensors[place] = torch.from_numpy(np.array(array)).to(dtype=tensors[place].dtype, device=tensors[place].device)
    args, kwargs = call.arguments(tensors)
    with torch.no_grad(), _without_compiling():
        out = call.module(*args, **kwargs)
    found = [(_path(path), leaf) for path, leaf in pytree.tree_leaves_with_path(out) if torch.is_tensor(leaf)]
    return tuple(name for name, _ in found), [to_numpy(leaf) for _, leaf in found]


def _without_compiling() -> contextlib.AbstractContextManager[object]:
    """Whatever the module compiles, `torch.cond` included, runs as it is written: compiled code passes the modes by."""
    import torch

    return torch.compiler.set_stance("force_eager")


def _path(path: Sequence[Any]) -> str:
    """`logits`, `present.0.key`, as an export names its outputs; `output_1` in a plain tuple."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    if path and hasattr(path[0], "idx"):
        parts[0] = f"output_{parts[0]}"
    return ".".join(parts) or "output"


def to_numpy(tensor: torch.Tensor) -> Tensor:
    """A tensor as NumPy; every float becomes float64, which holds all narrower ones exactly."""
    import torch

    tensor = tensor.detach().cpu()
    return np.asarray((tensor.to(torch.float64) if tensor.is_floating_point() else tensor).numpy())


def one_line(error: BaseException) -> str:
    """The message of an error, on one line and not too long."""
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__


def _rounded_copy(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy in `dtype`. A module that is in it already keeps what it holds in another type (buffers of frequencies)."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    rounded = copy.deepcopy(module).eval()
    _fix_default_epsilon(rounded)
    return rounded if max(sizes, key=lambda kind: sizes[kind], default=None) == dtype else rounded.to(dtype)


def _fix_default_epsilon(module: torch.nn.Module) -> None:
    """`RMSNorm(eps=None)` takes the epsilon of the type it computes in: float32's, for half types as well (torch 2.13).

    Run in float64 it would take another one, and so be another function.
    """
    import torch

    for part in module.modules():
        if isinstance(part, torch.nn.RMSNorm) and part.eps is None:
            part.eps = torch.finfo(torch.float32).eps


def _use_experts_of_any_type(module: torch.nn.Module) -> None:
    """The grouped matrix product of transformers' mixtures of experts has no float64; its "eager" form is the same function."""
    for part in module.modules():
        model: Any = part
        if hasattr(model, "set_experts_implementation") and any(model.get_experts_implementation().values()):
            model.set_experts_implementation("eager")
