"""The spec of each attention, read off the module: the second road to what `graph` reads off the exported graph.

A reader takes one attention module and says what its attention call computes, or None where q and k are not normalised.
Readers of Hugging Face models are found by the class's name, so that transformers need not be installed; one file of
`huggingface/` for each kind of family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from qknorm_onnx.spec.qk_norm_spec import QKNormSpec
from qknorm_onnx.torch_export.huggingface import chameleon, cohere, gemma3, llama4, olmo2, qwen3
from qknorm_onnx.torch_export.operators.modules import QKNormAttention

Reader = Callable[[Any], QKNormSpec | None]

FAMILIES: Final = (qwen3, gemma3, olmo2, cohere, llama4, chameleon)
HUGGING_FACE_READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {name: family.read for family in FAMILIES for name in family.MODULE_TYPES}
)


class ReaderRegistry:
    """Which reader takes which type of module. A new registry knows our own module and the Hugging Face families."""

    def __init__(self) -> None:
        self._readers: dict[type[nn.Module], Reader] = {QKNormAttention: lambda module: module.spec}

    def register_reader(self, module_type: type[nn.Module], reader: Reader) -> None:
        """From now on `reader` takes modules of `module_type` and its subclasses."""
        self._readers[module_type] = reader

    def reader_of(self, module: nn.Module) -> Reader | None:
        """The reader of the nearest base class of `module` that has one."""
        for ancestor in type(module).__mro__:
            if ancestor in self._readers:
                return self._readers[ancestor]
            if ancestor.__module__.startswith("transformers.models.") and ancestor.__name__ in HUGGING_FACE_READERS:
                return HUGGING_FACE_READERS[ancestor.__name__]
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleSpecs:
    """What the readers say of a module's attentions.

    specs: path of each attention that a reader takes -> its spec, or None where it has no QK norm. failures: of readers that
    could not read a module, one line each: it is built otherwise than the version that the reader was written for.
    """

    specs: Mapping[str, QKNormSpec | None]
    failures: tuple[str, ...] = ()


def read_module(module: nn.Module, *, registry: ReaderRegistry | None = None) -> ModuleSpecs:
    """What the readers say of each attention in `module`, in the order of `named_modules`. Raises nothing."""
    readers = registry or ReaderRegistry()
    specs: dict[str, QKNormSpec | None] = {}
    failures: list[str] = []
    for path, part in module.named_modules():
        reader = readers.reader_of(part)
        if reader is None:
            continue
        try:
            specs[path] = reader(part)
        except (AttributeError, LookupError, TypeError, ValueError, StopIteration) as error:
            failures.append(f"the meaning of {path or 'the module'} could not be read off {type(part).__name__}: {error}")
    return ModuleSpecs(specs=specs, failures=tuple(failures))


def read_specs(module: nn.Module, *, registry: ReaderRegistry | None = None) -> dict[str, QKNormSpec]:
    """Path of each QK-Norm attention in `module` -> its spec, in the order of `named_modules`.

    Attention of a type that no reader knows is not listed, nor is attention without QK norm.
    """
    found = read_module(module, registry=registry).specs
    return {path: spec for path, spec in found.items() if spec is not None}
