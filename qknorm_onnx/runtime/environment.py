"""What this machine has for exporting, running and validating, and what to install for the rest."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from typing import Final, Literal

from qknorm_onnx.graph.onnxruntime_release import LIBRARY_SINCE
from qknorm_onnx.runtime.cuda_driver import LIBRARY, OLDEST_VERSION, CudaDriverError, find_cuda_driver
from qknorm_onnx.runtime.overloads import release_of
from qknorm_onnx.spec.targets import EXECUTION_PROVIDERS

MAKE_PACK: Final = "to make it anew: python -m qknorm_onnx.custom_ops.compile_kernels --out <the folder>"

State = Literal["ok", "missing", "note"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. `mend` says what to run where something is missing; `required`: nothing works without."""

    name: str
    state: State
    detail: str
    mend: str = ""
    required: bool = False


def examine() -> tuple[Finding, ...]:
    """All findings, in the order of a user's work: the package, the exporter, the runtimes, the native library."""
    return tuple(_findings())


def _findings() -> Iterator[Finding]:
    yield Finding(name="python", state="ok", detail=f"{platform.python_version()} on {platform.machine()}", required=True)
    for package in ("numpy", "onnx", "onnx-ir", "onnxscript", "ml_dtypes"):
        yield _package(package, "pip install --force-reinstall qknorm-onnx", required=True)
    yield _package("torch", "to export modules: pip install 'qknorm-onnx[torch]'")
    yield _package("transformers", "to export Hugging Face folders: pip install 'qknorm-onnx[hf]'")
    yield from _onnxruntime()
    yield _native_library()
    yield _cuda_driver()
    yield _cuda_kernels()


def _package(name: str, mend: str, *, required: bool = False) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, state="missing", detail="not installed", mend=mend, required=required)
    return Finding(name=name, state="ok", detail=version, required=required)


def _onnxruntime() -> Iterator[Finding]:
    if importlib.util.find_spec("onnxruntime") is None:
        yield Finding(
            name="onnxruntime",
            state="missing",
            detail="not installed; rewrites are proven with ONNX's slower reference evaluator",
            mend="to run models: pip install 'qknorm-onnx[cpu]' (or [gpu])",
        )
        return
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    yield Finding(name="onnxruntime", state="ok", detail=f"{onnxruntime.__version__} with {', '.join(providers)}")
    if EXECUTION_PROVIDERS["cuda"] not in providers:
        yield Finding(
            name="CUDA provider",
            state="missing",
            detail=f"this onnxruntime has no {EXECUTION_PROVIDERS['cuda']}",
            mend="to run on an NVIDIA GPU: pip uninstall onnxruntime && pip install 'qknorm-onnx[gpu]'",
        )


def _native_library() -> Finding:
    import qknorm_onnx.custom_ops as custom_ops

    try:
        path = custom_ops.library_path()
    except FileNotFoundError as error:
        return Finding(
            name="native kernels",
            state="note",
            detail=f"{error}; fused models run through their function bodies",
            mend="to build them: pip install . with a C++ compiler",
        )
    info = custom_ops.build_info()
    detail = f"{path}: version {info['version']}, for onnxruntime {info['minimum_onnxruntime']} and newer"
    if importlib.util.find_spec("onnxruntime") is None:
        return Finding(name="native kernels", state="ok", detail=detail)
    import onnxruntime

    if release_of(onnxruntime) >= LIBRARY_SINCE:
        return Finding(name="native kernels", state="ok", detail=detail)
    return Finding(
        name="native kernels",
        state="note",
        detail=f"{detail}; this one is {onnxruntime.__version__}, so fused models run through their function bodies",
        mend="to run the kernels: pip install -U onnxruntime",
    )


def _cuda_driver() -> Finding:
    mend = "to run on an NVIDIA GPU: install its driver"
    try:
        driver = find_cuda_driver()
    except CudaDriverError as error:
        return Finding(name="CUDA driver", state="missing", detail=f"it does not work: {error}", mend=mend)
    if driver is None:
        detail = f"{LIBRARY} cannot be opened; models run on the CPU"
        return Finding(name="CUDA driver", state="missing", detail=detail, mend=mend)
    devices = ", ".join(f"{device.name} (sm_{device.capability})" for device in driver.devices)
    detail = f"for CUDA {driver.version[0]}.{driver.version[1]}; {devices or 'no device'}"
    state: State = "ok" if driver.devices and driver.version >= OLDEST_VERSION else "missing"
    if driver.version < OLDEST_VERSION:
        mend = f"the kernels need a driver for CUDA {OLDEST_VERSION[0]}.{OLDEST_VERSION[1]} or newer"
    return Finding(name="CUDA driver", state=state, detail=detail, mend="" if state == "ok" else mend)


def _cuda_kernels() -> Finding:
    import qknorm_onnx.custom_ops as custom_ops

    try:
        pack = custom_ops.kernel_pack()
    except FileNotFoundError as error:
        detail, _, mend = str(error).partition("; make one with ")
        mend = f"to run them on an NVIDIA GPU: {mend}" if mend else ""
        return Finding(name="CUDA kernels", state="missing", detail=detail, mend=mend)
    except ValueError as error:
        return Finding(name="CUDA kernels", state="missing", detail=str(error), mend=MAKE_PACK)
    detail = f"{pack.path}: {pack.images} images for {', '.join(pack.architectures)}, compiled by Triton {pack.triton}"
    if not pack.is_current:
        detail += "; its kernels are not those of this package"
        return Finding(name="CUDA kernels", state="note", detail=detail, mend=MAKE_PACK)
    return Finding(name="CUDA kernels", state="ok", detail=detail)
