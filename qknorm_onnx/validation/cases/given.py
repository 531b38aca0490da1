"""Cases that a user brings along: inputs by the names of the graph's inputs, from a file or as arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qknorm_onnx.errors import InputError
from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.inputs import GraphInput

Tensor = npt.NDArray[Any]


def case_of_file(path: Path) -> Case:
    """The arrays of a NumPy `.npz` file as the one case; its names are those of the graph's inputs.

    Raises:
        InputError: the file is missing, is no `.npz`, or holds objects.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return given_case(path.name, {name: arrays[name] for name in arrays.files})
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: no .npz file of plain arrays ({error}); write one with numpy.savez") from error


def given_case(name: str, arrays: Mapping[str, Tensor]) -> Case:
    """`arrays` by graph input name as a case that counts as the example does. Raises InputError for a type that no graph has."""
    return Case(
        name=name,
        inputs={key: _widened(key, array) for key, array in arrays.items()},
        purpose="inputs that were given",
        required=True,
    )


def _widened(name: str, array: Tensor) -> Tensor:
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    raise InputError(f"input {name} has type {array.dtype}; give numbers or bools")


def require_inputs(case: Case, inputs: Sequence[GraphInput]) -> None:
    """Raises InputError unless `case` gives every input of the graph, in its rank and kind, and its fixed sizes."""
    wanted = {item.name: item for item in inputs}
    missing, unknown = sorted(wanted.keys() - case.inputs.keys()), sorted(case.inputs.keys() - wanted.keys())
    if missing or unknown:
        said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"gives {', '.join(unknown)}, which it does not take"] * bool(
            unknown
        )
        raise InputError(f"case {case.name}: {' and '.join(said)}; the model's inputs are {', '.join(wanted)}")
    for name, item in wanted.items():
        array = np.asarray(case.inputs[name])
        fits = array.ndim == len(item.dims) and all(
            not isinstance(dim, int) or dim == size for dim, size in zip(item.dims, array.shape, strict=True)
        )
        if not fits:
            declared = ", ".join(map(str, item.dims))
            raise InputError(f"case {case.name}: input {name} has shape {array.shape}, the model takes ({declared})")
        if np.issubdtype(array.dtype, np.floating) != np.issubdtype(item.example.dtype, np.floating):
            raise InputError(f"case {case.name}: input {name} is {array.dtype}, the module's example is {item.example.dtype}")
