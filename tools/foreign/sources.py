"""Writes the files of torch.onnx's older exporter, and inputs of other sizes than they were exported with."""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import torch

from tests.foreign.decoder_files import decoder, file_of, inputs, merged
from tools.foreign.catalogue import Source

SIZES = ((3, 17), (1, 7))  # batch and length that files are compared at
PADDED = 4  # positions of the first row that are masked, from its beginning
CACHED_SIZES = ((3, 5, 1, 2), (2, 9, 4, 3))  # batch, past, new positions, and masked ones of the last row
EXPECTED = "expected by PyTorch"


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
    """Write the file of `source` into `folder`."""
    path = folder / f"{source.name}.onnx"
    if source.exporter in ("with past", "merged"):
        onnx.save(_decoder(source), path)
        return
    module, example, axes = _entry(source)
    whole = contextlib.nullcontext() if source.exporter == "as written" else _counted_from_the_front()
    with whole, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            InOrder(module, tuple(example)), tuple(example.values()), str(path), dynamo=False,
            opset_version=source.opset, input_names=list(example), output_names=["y"], dynamic_axes=axes,
        )  # fmt: skip


def write_inputs(source: Source, folder: pathlib.Path) -> list[pathlib.Path]:
    """Inputs of other sizes than the file was exported with, each with what PyTorch makes of them as `EXPECTED`."""
    paths = [folder / f"{source.inputs}.{number}.npz" for number in range(len(SIZES))]
    if all(path.is_file() for path in paths):
        return paths
    if source.exporter in ("with past", "merged"):
        module, cases = decoder(source.attention), [inputs(*case[:3], padded=case[3]) for case in CACHED_SIZES]
    else:
        plain, example, axes = _entry(source)
        module = InOrder(plain, tuple(example))
        cases = [{name: _resized(value, axes.get(name, {}), size) for name, value in example.items()} for size in SIZES]
    for path, case in zip(paths, cases, strict=True):
        with torch.no_grad():
            found = module(*case.values())
        expected = (found if isinstance(found, torch.Tensor) else found[0]).numpy()
        np.savez(path, **{name: value.numpy() for name, value in case.items()}, **{EXPECTED: expected})
    return paths


def _entry(source: Source) -> tuple[Any, dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    """The module, what it is exported with, and its dynamic axes."""
    from tests.zoo import ZOO

    module, example, axes, _ = ZOO[source.model](source.attention)
    example, axes = dict(example), {name: dict(named) for name, named in axes.items()}
    if "input_ids" in example and "attention_mask" not in example:
        example["attention_mask"] = torch.ones_like(example["input_ids"])
        axes["attention_mask"] = dict(axes["input_ids"])
    return module, example, axes


def _decoder(source: Source) -> onnx.ModelProto:
    """A decoder with its cache, or that and the one without a past."""
    module = decoder(source.attention)
    with_past = file_of(module, inputs(2, 4, 3), source.opset)
    if source.exporter == "with past":
        return with_past
    first = {name: tensor for name, tensor in inputs(2, 0, 5).items() if not name.startswith("past")}
    return merged(file_of(module, first, source.opset), with_past)


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


def _resized(value: torch.Tensor, axes: Mapping[int, str], size: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    batch, length = size
    sizes = [{"batch": batch}.get(axes[axis], length) if axis in axes else own for axis, own in enumerate(value.shape)]
    if value.is_floating_point():
        return torch.randn(sizes, generator=generator)
    if bool((value == 1).all()):  # a mask
        mask = torch.ones(sizes, dtype=torch.int64)
        mask[0, :PADDED] = 0
        return mask
    return torch.randint(5, 100, sizes, generator=generator)
