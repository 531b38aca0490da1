"""What a reader must know to repeat a validation."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Final

_PACKAGES: Final = ("qknorm-onnx", "torch", "transformers", "onnxruntime", "onnx", "onnx-ir", "numpy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """`attention`: what each attention of the file computes, in words, by its name. `seeds`: how many cases were random beside
    the made ones. `command`: what repeats it; "" where it was a call. `versions`: by package, and of Python.
    """

    model: str = ""
    source: str = ""
    command: str = ""
    seeds: int = 0
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def installed_versions() -> dict[str, str]:
    """The packages that a verdict hangs on, as far as they are installed."""
    found = {"python": f"{platform.python_version()} on {platform.machine()}"}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
