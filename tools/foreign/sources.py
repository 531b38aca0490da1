"""Writes the files of torch.onnx's older exporter, each with inputs of another size than it was exported with."""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tools.foreign.catalogue import Source

BATCH, LENGTH, PADDED = 3, 17, 4  # what files are compared at; the first row has its first positions masked


class InOrder(torch.nn.Module):
    """A module that takes its inputs in order, as the older exporter gives them."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        """The result of the module."""
        result: torch.Tensor = self.module(**dict(zip(self.names, values, strict=True)))
        return result


def write_source(source: Source, folder: pathlib.Path) -> None:
    """Write the file of `source` into `folder`, and its inputs."""
    from tests.zoo import ZOO

    module, example, axes, _ = ZOO[source.model](source.attention)
    example, axes = dict(example), {name: dict(named) for name, named in axes.items()}
    if "input_ids" in example and "attention_mask" not in example:
        example["attention_mask"] = torch.ones_like(example["input_ids"])
        axes["attention_mask"] = dict(axes["input_ids"])
    with _counted_from_the_front(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            InOrder(module, tuple(example)), tuple(example.values()), str(folder / f"{source.name}.onnx"), dynamo=False,
            opset_version=source.opset, input_names=list(example), output_names=["y"], dynamic_axes=axes,
        )  # fmt: skip
    inputs = {name: _resized(value, axes.get(name, {})) for name, value in example.items()}
    np.savez(folder / f"{source.inputs}.npz", **inputs)


@contextlib.contextmanager
def _counted_from_the_front() -> Iterator[None]:
    """While it lasts, repeat_interleave is given axes that are not negative.

    The exporter writes the axis in place of every -1 of the file otherwise, and the file runs at no size.
    """
    original = torch.repeat_interleave

    def repeat(value: Any, repeats: Any, dim: int | None = None, **options: Any) -> torch.Tensor:
        return original(value, repeats, dim=None if dim is None else dim % value.ndim, **options)

    torch.repeat_interleave = repeat  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.repeat_interleave = original


def _resized(value: torch.Tensor, axes: Mapping[int, str]) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(3)
    sizes = [{"batch": BATCH}.get(axes[axis], LENGTH) if axis in axes else size for axis, size in enumerate(value.shape)]
    if value.is_floating_point():
        return generator.standard_normal(sizes).astype(np.float32)
    if bool((value == 1).all()):  # a mask
        mask = np.ones(sizes, np.int64)
        mask[0, :PADDED] = 0
        return mask
    return generator.integers(5, 100, sizes)
