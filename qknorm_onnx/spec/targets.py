"""What attention can become, and whose kernels it is meant for: the names that callers give, in one place.

The command line, `qk.fuse`, `qk.export`, the lowerings and the documents read them here. What a target does is in
`lowering/`, one file each; `lowering/registry.py` holds one entry for each name.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, get_args

from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.signature import Provider

TargetName = Literal["custom-op", "ort", "onnx", "primitive"]
TARGET_NAMES: Final[tuple[TargetName, ...]] = get_args(TargetName)
DEFAULT_TARGET: Final[TargetName] = "custom-op"
OTHER_TARGET_NAMES: Final[MappingProxyType[str, TargetName]] = MappingProxyType({"portable": "primitive"})

# ONNX Runtime's name of each provider.
EXECUTION_PROVIDERS: Final[MappingProxyType[Provider, str]] = MappingProxyType(
    {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
)
PROVIDERS: Final[tuple[Provider, ...]] = get_args(Provider)


class UnknownTargetError(InputError):
    """No such target."""


def target_named(name: str) -> TargetName:
    """The target called `name`; `portable` is another name of `primitive`.

    Raises:
        UnknownTargetError: there is no such target; the message has the choices.
    """
    for known in TARGET_NAMES:
        if OTHER_TARGET_NAMES.get(name, name) == known:
            return known
    raise UnknownTargetError(f"unknown target {name!r}; choose one of {', '.join((*TARGET_NAMES, *OTHER_TARGET_NAMES))}")


def require_provider(name: str) -> None:
    """Raises InputError, with the choices, for a provider that does not exist."""
    if name not in PROVIDERS:
        raise InputError(f"unknown provider {name!r}; choose one of {', '.join(PROVIDERS)}")
