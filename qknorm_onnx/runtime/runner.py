"""Runs an ONNX model on named NumPy arrays, in its own types, in float64, or with bfloat16 emulated.

ONNX Runtime's CPU provider does the work where it is installed and has the kernels; ONNX's reference evaluator does the
rest, operator by operator. `Runner.how` says which of them ran, for reports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import ModelSource, copy_model, load_model
from qknorm_onnx.runtime.emulation import emulate_bfloat16
from qknorm_onnx.runtime.float64_twin import raise_to_float64
from qknorm_onnx.runtime.overloads import without_overloads
from qknorm_onnx.runtime.session import HasModel, create_session, import_onnxruntime
from qknorm_onnx.runtime.split import split_at
from qknorm_onnx.runtime.value_types import flattened

Tensor = npt.NDArray[Any]
Arithmetic = Literal["native", "float64", "bfloat16 emulated"]

_QUIET: Final = 4  # log severity "fatal": what fails is reported through exceptions
_MISSING_KERNEL: Final = re.compile(r"Could not find an implementation for (\w+)\(")
_INVALID_TYPE: Final = re.compile(r"of operator \((\w+)\) in node")


class CannotRunError(InputError):
    """Neither runtime can run the model; the message is the reason."""


class Runner(Protocol):
    """A model that is ready to run."""

    @property
    def how(self) -> str:
        """Which runtime computes, and where it is not the model's own arithmetic, in which."""
        ...

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in the model's order."""
        ...

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the model's order."""
        ...

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name. Floats and integers of another width are cast to the one that it takes.

        Raises:
            CannotRunError: an input is missing, or the runtime refuses these inputs.
        """
        ...


def make_runner(
    source: HasModel | ModelSource, *, arithmetic: Arithmetic = "native", prefer_reference: bool = False, threads: int = 0
) -> Runner:
    """A runner of `source`.

    Args:
        source: program, path, `onnx.ModelProto` or `onnx_ir.Model`; it is not changed.
        arithmetic: "native" computes in the model's own types; "float64" raises every float to float64;
            "bfloat16 emulated" stores bfloat16 values at the borders of operators and computes in float32.
        prefer_reference: use ONNX's reference evaluator although onnxruntime is there.
        threads: of one operator; 0 leaves it to onnxruntime.

    Raises:
        InputError: `source` is no ONNX model.
        CannotRunError: neither runtime knows the model's operators and types.
    """
    loaded = loaded_model(source)
    note = "" if arithmetic == "native" else f", {arithmetic}"
    if arithmetic == "float64":
        loaded = raise_to_float64(loaded)
    elif arithmetic == "bfloat16 emulated":
        loaded = emulate_bfloat16(loaded)
    return run_prepared(loaded, note=note, prefer_reference=prefer_reference, threads=threads)


def run_prepared(model: ir.Model, *, note: str = "", prefer_reference: bool = False, threads: int = 0) -> Runner:
    """A runner of a model whose arithmetic is already what it should be; `note` is added to what it says of itself.

    Raises:
        CannotRunError: neither runtime knows the model's operators and types.
    """
    if prefer_reference or not has_onnxruntime():
        return _reference(model, note)
    return _onnxruntime_first(model, note, threads)


def loaded_model(source: HasModel | ModelSource) -> ir.Model:
    """An onnx_ir model of whatever holds one, which can be changed without changing `source`."""
    if isinstance(source, (str, os.PathLike, onnx.ModelProto)):
        return load_model(source)
    return copy_model(source if isinstance(source, ir.Model) else source.model)


def has_onnxruntime() -> bool:
    """Whether onnxruntime can be imported."""
    try:
        import_onnxruntime()
    except InputError:
        return False
    return True


def model_float_type(model: ir.Model) -> ir.DataType:
    """The float type of a model's weights: the one that most of their values have; float32 where there is none."""
    sizes: dict[ir.DataType, int] = {}
    values = [*model.graph.initializers.values(), *model.graph.inputs]
    for value in values:
        if value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            sizes[value.dtype] = sizes.get(value.dtype, 0) + (value.const_value.size if value.const_value is not None else 1)
    return max(sizes, key=lambda dtype: sizes[dtype], default=ir.DataType.FLOAT)


def _onnxruntime_first(model: ir.Model, note: str, threads: int, missing: frozenset[str] = frozenset()) -> Runner:
    """The whole model in onnxruntime; the operators `missing` there in the reference evaluator; at worst all of it there."""
    try:
        if not missing:
            return OnnxRuntimeRunner(model, note=note, threads=threads)
        return _staged(flattened(model), missing, note, threads)
    except Exception as error:
        found = _operator_without_kernel(error)
        if found is None or found in missing:
            return _reference(model, note, cause=error)
        return _onnxruntime_first(model, note, threads, missing | {found})


def _operator_without_kernel(error: Exception) -> str | None:
    match = _MISSING_KERNEL.search(str(error)) or _INVALID_TYPE.search(str(error))
    return match.group(1) if match else None


def _reference(model: ir.Model, note: str, cause: Exception | None = None) -> Runner:
    try:
        return ReferenceRunner(model, note=note)
    except Exception as error:
        reasons = "; ".join(_one_line(reason) for reason in (cause, error) if reason is not None)
        raise CannotRunError(f"no runtime can run this model: {reasons}") from error


def _staged(flat: ir.Model, operators: frozenset[str], note: str, threads: int) -> Runner:
    stages: list[Runner] = []
    for part, separated in split_at(flat, operators):
        stages.append(ReferenceRunner(part) if separated else OnnxRuntimeRunner(part, threads=threads))
    names = ", ".join(sorted(operators))
    return StagedRunner(flat, stages, how=f"onnxruntime{note} ({names} by onnx.reference)")


class OnnxRuntimeRunner:
    """A session of onnxruntime's CPU provider, with bfloat16 arrays in and out."""

    def __init__(self, model: ir.Model, *, note: str = "", threads: int = 0) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = _QUIET
        options.intra_op_num_threads = threads
        self._ort = ort
        self._session = create_session(model, session_options=options)
        self._types = {value.name: value.type for value in self._session.get_inputs()}
        self.how = f"onnxruntime{note}"
        self.input_names = tuple(self._types)
        self.output_names = tuple(value.name for value in self._session.get_outputs())

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name; see `Runner.run`."""
        feeds = {name: self._ort_value(name, array) for name, array in fitted(inputs, self._dtypes()).items()}
        try:
            values = self._session.run_with_ort_values(self.output_names, feeds)
        except Exception as error:
            raise CannotRunError(f"onnxruntime: {_one_line(error)}") from error
        return {name: _numpy_of(value) for name, value in zip(self.output_names, values, strict=True)}

    def _dtypes(self) -> dict[str, np.dtype[Any] | None]:
        return {name: _NUMPY_TYPES.get(kind) for name, kind in self._types.items()}

    def _ort_value(self, name: str, array: Tensor) -> Any:
        if self._types[name] == "tensor(bfloat16)":
            bits = np.ascontiguousarray(array).view(np.uint16)
            return self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
        return self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


class ReferenceRunner:
    """ONNX's reference evaluator: slow, but it knows every standard operator in most types."""

    def __init__(self, model: ir.Model, *, note: str = "") -> None:
        from onnx.reference import ReferenceEvaluator

        self._evaluator = ReferenceEvaluator(ir.to_proto(without_overloads(model)))
        self._dtypes = {str(value.name): value.dtype.numpy() if value.dtype is not None else None for value in model.graph.inputs}
        self.how = f"onnx.reference{note}"
        self.input_names = tuple(self._dtypes)
        self.output_names = tuple(str(value.name) for value in model.graph.outputs)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name; see `Runner.run`."""
        feeds = fitted(inputs, self._dtypes)
        try:
            with np.errstate(all="ignore"):  # what is not finite is judged by the caller
                values = self._evaluator.run(list(self.output_names), feeds)
        except Exception as error:
            raise CannotRunError(f"onnx.reference: {_one_line(error)}") from error
        return {name: np.asarray(value) for name, value in zip(self.output_names, values, strict=True)}


class StagedRunner:
    """Parts of one model, run one after the other."""

    def __init__(self, model: ir.Model, stages: Sequence[Runner], *, how: str) -> None:
        self._stages = tuple(stages)
        self.how = how
        self.input_names = tuple(str(value.name) for value in model.graph.inputs)
        self.output_names = tuple(str(value.name) for value in model.graph.outputs)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name; see `Runner.run`."""
        values = dict(inputs)
        for stage in self._stages:
            values.update(stage.run({name: values[name] for name in stage.input_names}))
        return {name: values[name] for name in self.output_names}


def fitted(inputs: Mapping[str, Tensor], dtypes: Mapping[str, np.dtype[Any] | None]) -> dict[str, Tensor]:
    """The inputs that a model takes, floats and integers cast to its width. Raises CannotRunError naming one that is missing."""
    feeds: dict[str, Tensor] = {}
    for name, dtype in dtypes.items():
        if name not in inputs:
            raise CannotRunError(f"input {name} is missing; given are {', '.join(inputs) or 'none'}")
        array = np.asarray(inputs[name])
        same_kind = dtype is not None and _kind(array.dtype) == _kind(dtype)
        with np.errstate(over="ignore"):
            feeds[name] = array.astype(dtype) if same_kind and array.dtype != dtype else array
    return feeds


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a NumPy type is a float, bfloat16 included."""
    return bool(np.issubdtype(dtype, np.floating)) or dtype == np.dtype(ml_dtypes.bfloat16)


def _kind(dtype: np.dtype[Any]) -> str:
    return "f" if is_float(dtype) else dtype.kind


_NUMPY_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bfloat16)": np.dtype(ml_dtypes.bfloat16),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
}


def _numpy_of(value: Any) -> Tensor:
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    import ctypes

    # onnxruntime hands out no NumPy view of bfloat16.
    size = value.tensor_size_in_bytes()
    content = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(content, dtype=ml_dtypes.bfloat16).reshape(value.shape()).copy()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__
