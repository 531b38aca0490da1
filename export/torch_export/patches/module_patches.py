"""What stops the export of modules that run, and how it is mended while the export lasts. The module is put back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from qknorm_onnx.torch_export.patches.expert_loops import dense_experts

# The experts implementations of transformers that torch.onnx can translate.
EXPORTABLE_EXPERTS: Final = ("eager", "batched_mm")


@contextlib.contextmanager
def mended(module: nn.Module, *, keep_cache: bool) -> Iterator[list[str]]:
    """`module` in a form that exports, inside the context; gives the notes of what was changed.

    Args:
        module: any module; Hugging Face models are found inside it.
        keep_cache: whether the caller asked for the key / value cache as outputs.
    """
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(uncompiled(module))
        stack.enter_context(_evaluation_mode(module, notes))
        if not keep_cache:
            stack.enter_context(_without_cache(module, notes))
        stack.enter_context(dense_experts(module, notes))
        for model in _models_with_experts(module):
            stack.enter_context(_batched_experts(model, notes))
        yield notes


def uncompiled(module: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Modules under torch.compile run as they are written, inside the context: it is those that are exported and judged.

    The second compiled module of a process may also fail under the exporter's wrapper, where it runs by itself (torch 2.13).
    """
    compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())
    # The stance also stops torch.cond from being exported, so that it is taken only where something is compiled.
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


@contextlib.contextmanager
def _evaluation_mode(module: nn.Module, notes: list[str]) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    if training:
        notes.append("the module was in training mode; it was exported as after .eval(), without dropout")
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextlib.contextmanager
def _without_cache(module: nn.Module, notes: list[str]) -> Iterator[None]:
    found: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", None) is True}
    if configs:
        notes.append("config.use_cache is on; the graph has no cache outputs (pass use_cache=True to keep them)")
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _models_with_experts(module: nn.Module) -> Iterator[Any]:
    """The outermost Hugging Face models: each sets the implementation of the models inside it."""
    if hasattr(module, "get_experts_implementation") and hasattr(module, "set_experts_implementation"):
        yield module
        return
    for child in module.children():
        yield from _models_with_experts(child)


@contextlib.contextmanager
def _batched_experts(model: Any, notes: list[str]) -> Iterator[None]:
    """torch.onnx has no function for grouped matrix products; batched ones compute the same."""
    before = model.get_experts_implementation()
    foreign = sorted({str(value) for value in before.values() if value not in (None, *EXPORTABLE_EXPERTS)})
    if not foreign:
        yield
        return
    model.set_experts_implementation("batched_mm")
    notes.append(f"mixture of experts: exported with experts implementation 'batched_mm' instead of {', '.join(foreign)}")
    try:
        yield
    finally:
        model.set_experts_implementation(before)
