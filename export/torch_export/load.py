"""SOURCE of `qknorm-onnx export`: a Hugging Face model folder, or `package.module:factory`."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from qknorm_onnx.errors import ExportError, first_line
from qknorm_onnx.serving.decoder_ports import LogitsKept
from qknorm_onnx.torch_export.huggingface.cached_decoder import CachedDecoder, cached_example
from qknorm_onnx.torch_export.huggingface.model_folder import load_model_folder
from qknorm_onnx.torch_export.signatures.dynamic_shapes import DynamicShapes

EXAMPLE_BATCH = 2
EXAMPLE_LENGTH = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedSource:
    """A module and one call of it: what `export` takes."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dynamic_shapes: DynamicShapes | None = None
    notes: tuple[str, ...] = ()


def load_source(
    source: str, *, with_past: bool = False, dtype: torch.dtype | None = None, logits: LogitsKept = "all"
) -> LoadedSource:
    """The module of `source` with example inputs.

    Args:
        source: a folder with config.json and safetensors (example: `input_ids` (2, 12), batch and sequence dynamic), or
            `package.module:factory`, a callable that returns `(module, args, kwargs, dynamic_shapes)`, the last ones optional,
            or a module with an attribute `example_inputs` and, if need be, `dynamic_shapes`.
        with_past: a causal language model with its key / value cache as inputs and outputs.
        dtype: type of the weights; None leaves them as they are.
        logits: with a cache: of "all" new tokens, or of the "last" one of each row only.

    Raises:
        ExportError: nothing of the kind is there, or it cannot be loaded; the message says why.
    """
    path = Path(source)
    if path.is_dir():
        return _from_folder(path, with_past=with_past, dtype=dtype, logits=logits)
    name, separator, attribute = source.partition(":")
    if not separator or not attribute or path.exists() or not all(part.isidentifier() for part in name.split(".")):
        raise ExportError(f"{source!r} is neither a folder with a Hugging Face model nor package.module:factory")
    if with_past:
        raise ExportError(
            "a cache is made for Hugging Face folders only; let the factory return a module that takes its own cache"
        )
    loaded = _from_factory(name, attribute)
    return loaded if dtype is None else _converted(loaded, dtype)


def _converted(loaded: LoadedSource, dtype: torch.dtype) -> LoadedSource:
    """Weights and floating-point example inputs in `dtype`."""

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(convert, (loaded.args, dict(loaded.kwargs)))
    return dataclasses.replace(loaded, module=loaded.module.to(dtype), args=args, kwargs=kwargs)


def _from_folder(folder: Path, *, with_past: bool, dtype: torch.dtype | None, logits: LogitsKept) -> LoadedSource:
    if logits != "all" and not with_past:
        raise ExportError("logits of the last token are for models with a cache: without one each token's are needed again")
    model, notes = load_model_folder(folder, dtype=dtype)
    if with_past:
        if not hasattr(model, "lm_head"):
            raise ExportError(f"{folder}: a cache needs a causal language model; this is a {type(model).__name__}")
        inputs, axes = cached_example(model)
        return LoadedSource(module=CachedDecoder(model, logits=logits).eval(), kwargs=inputs, dynamic_shapes=axes, notes=notes)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ExportError(
            f"{folder}: {type(model).__name__} takes {model.main_input_name}, of a shape that its folder does not say; "
            "write a factory, package.module:factory, that returns the model and example inputs"
        )
    input_ids = torch.arange(EXAMPLE_BATCH * EXAMPLE_LENGTH).reshape(EXAMPLE_BATCH, EXAMPLE_LENGTH)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    return LoadedSource(
        module=model,
        kwargs={"input_ids": input_ids % vocabulary},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}},
        notes=notes,
    )


def _from_factory(name: str, attribute: str) -> LoadedSource:
    module = _import(name)
    factory = module
    for part in attribute.split("."):
        factory = getattr(factory, part, None)
        if factory is None:
            raise ExportError(f"module {name} has no {attribute!r}")
    if not callable(factory):
        raise ExportError(f"{name}:{attribute} is a {type(factory).__name__}; it must be a function that returns the module")
    try:
        made = factory if isinstance(factory, nn.Module) else factory()
    except Exception as error:
        raise ExportError(f"{name}:{attribute}() fails: {first_line(error)}") from error
    return _as_source(made, f"{name}:{attribute}")


def _import(name: str) -> Any:
    """Modules of the current folder are found too, as with `python -m`."""
    added = "" not in sys.path and str(Path.cwd()) not in sys.path
    if added:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ExportError(f"module {name} cannot be imported: {first_line(error)}") from error
    finally:
        if added:
            sys.path.remove(str(Path.cwd()))


def _as_source(made: Any, label: str) -> LoadedSource:
    if isinstance(made, nn.Module):
        example = getattr(made, "example_inputs", None)
        if callable(example):
            example = example()
        if example is None:
            raise ExportError(
                f"{label} gives a module without example inputs: return (module, args) or set module.example_inputs"
            )
        args, kwargs = ((), example) if isinstance(example, Mapping) else (_as_args(example), {})
        return LoadedSource(module=made, args=args, kwargs=kwargs, dynamic_shapes=getattr(made, "dynamic_shapes", None))
    if not isinstance(made, (tuple, list)) or not 2 <= len(made) <= 4 or not isinstance(made[0], nn.Module):
        raise ExportError(f"{label} returned a {type(made).__name__}; return (module, args, kwargs, dynamic_shapes)")
    module, args, kwargs, dynamic_shapes = (*made, None, None)[:4]
    if isinstance(args, Mapping):
        kwargs, args = {**args, **(kwargs or {})}, ()
    return LoadedSource(module=module, args=_as_args(args or ()), kwargs=dict(kwargs or {}), dynamic_shapes=dynamic_shapes)


def _as_args(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,)
