"""ONNX Runtime sessions for fused models."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import onnx
import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import ModelSource, is_small, load_model, model_as_proto, save_model
from qknorm_onnx.graph.onnxruntime_release import needs_of
from qknorm_onnx.runtime.native_kernels import NativeKernels, canonical_nodes, native_kernels_for
from qknorm_onnx.runtime.overloads import ignores_overloads, needs_overloads, release_of, without_overloads
from qknorm_onnx.spec.signature import DOMAIN, VERSION, Provider, number_of
from qknorm_onnx.spec.targets import EXECUTION_PROVIDERS

if TYPE_CHECKING:
    import onnxruntime

# The library registers this many names of each operator, or all: 4 ms or 22 for a small session (onnxruntime 1.32).
_NAMES: Final = "qknorm.names_per_operator"
# A graph holds itself in circles, which only the collector gives back: for so many nodes it is worth its run, before
# onnxruntime builds its own graph beside this one.
_MANY_NODES: Final = 5000
_NOT_WANTED: Final = NativeKernels(None, "native_kernels is False")


class HasModel(Protocol):
    """Anything that holds an onnx_ir model, as `qk.Program` does."""

    @property
    def model(self) -> ir.Model:
        """The model."""
        ...


def create_session(
    program_or_path: HasModel | ModelSource,
    providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
    session_options: onnxruntime.SessionOptions | None = None,
    *,
    native_kernels: bool = True,
) -> onnxruntime.InferenceSession:
    """An `onnxruntime.InferenceSession` of a program, a model or a file.

    Args:
        program_or_path: `qk.Program`, path, `onnx.ModelProto` or `onnx_ir.Model`.
        providers: as onnxruntime takes them; None is the CPU.
        session_options: the caller's own options; the native library is registered with them.
        native_kernels: run canonical nodes in the native library where it serves all of them; False, or where it does not:
            through their function bodies.

    Raises:
        InputError: onnxruntime is missing or too old for the model, the file is no ONNX model, a node can only run in the
            library and the library is not used, the options know another version of the library, or a provider that was
            asked for is not there (onnxruntime alone would silently fall back to the CPU).
    """
    ort = import_onnxruntime()
    if isinstance(providers, str):
        raise InputError(f"providers is the text {providers!r}; give a list of names")
    wanted = list(providers) if providers is not None else [EXECUTION_PROVIDERS["cpu"]]
    _require_available(ort, wanted)
    model = model_of(program_or_path)
    options = session_options if session_options is not None else _options_for(ort, model)
    provider: Provider = "cuda" if _provider_name(wanted[0]).startswith("CUDA") else "cpu"
    kernels = native_kernels_for(model, provider=provider) if native_kernels else _NOT_WANTED
    if kernels.library is None and needs_overloads(model) and ignores_overloads(ort):
        program_or_path = model = without_overloads(model)
    _require_loadable(ort, model, kernels)
    if kernels.library is not None:
        _register(options, str(kernels.library))
    if isinstance(program_or_path, (str, os.PathLike)):
        has_many_nodes = len(model.graph) > _MANY_NODES
        del model
        if has_many_nodes:
            gc.collect()
        return _explained(ort, os.fspath(program_or_path), options, wanted)
    if is_small(model):
        return _explained(ort, model_as_proto(model).SerializeToString(), options, wanted)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save_model(model, path)
        return _explained(ort, str(path), options, wanted)


def _options_for(ort: Any, model: ir.Model) -> onnxruntime.SessionOptions:
    """Options with which the library registers as many names of its operators as `model` has, not all of them.

    Those of a caller are left alone: they may serve other models after this one.
    """
    options = ort.SessionOptions()
    numbers = [number_of(node.op_type) for node in canonical_nodes(model)]
    options.add_session_config_entry(_NAMES, str(max(filter(None, numbers), default=1)))
    return options


def _require_loadable(ort: Any, model: ir.Model, kernels: NativeKernels) -> None:
    """Raises InputError where this onnxruntime cannot load the model, in words that onnxruntime does not have."""
    version = model.graph.opset_imports.get(DOMAIN, VERSION)
    if version > VERSION:
        raise InputError(
            f"the model uses version {version} of the operators of {DOMAIN}, and this qknorm-onnx knows {VERSION}: "
            "upgrade it (pip install -U qknorm-onnx)"
        )
    needs = needs_of(model)
    if needs.bodiless and kernels.library is None:
        raise InputError(
            f"{', '.join(needs.bodiless)} of this model have no function bodies (a session with the kernel library saved it "
            f"optimised), so only the library can run them, and it is not used: {kernels.reason}. Use it, or fuse the original "
            "again"
        )
    if needs.oldest is not None and release_of(ort) < needs.oldest.version and not _is_only_of_overloads(ort, model):
        raise InputError(
            f"onnxruntime {ort.__version__} is too old for this model, which {needs.line}. Upgrade it (pip install -U "
            f"onnxruntime), or write the model with for_onnxruntime='{release_of(ort)[0]}.{release_of(ort)[1]}'"
        )


def _is_only_of_overloads(ort: Any, model: ir.Model) -> bool:
    """Whether kernels of the library stand in for the bodies that this onnxruntime would mix up."""
    oldest = needs_of(without_overloads(model)).oldest
    return needs_overloads(model) and oldest is not None and oldest.version <= release_of(ort)


def _register(options: onnxruntime.SessionOptions, library: str) -> None:
    """Options that know the library already, from the caller or an earlier session, stay as they are."""
    try:
        options.register_custom_ops_library(library)
    except Exception as error:
        raise InputError(f"the kernel library {library} cannot be registered: {' '.join(str(error).split())}") from error


def _session(ort: Any, model: str | bytes, options: onnxruntime.SessionOptions, providers: list[Any]) -> Any:
    try:
        return ort.InferenceSession(model, sess_options=options, providers=providers)
    except Exception as error:
        if "Domain already set in registry" not in str(error):
            raise
        raise InputError(
            "the session options know two libraries with operators of ai.qknorm, the second of an older version: give "
            "options of their own to each (create_session registers the library itself)"
        ) from error


def _explained(ort: Any, model: str | bytes, options: onnxruntime.SessionOptions, providers: list[Any]) -> Any:
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as MissingKernel

    try:
        return _session(ort, model, options, providers)
    except MissingKernel as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"onnxruntime has no kernel for a node of this model: {reason}. Its CPU provider computes hardly anything in "
            "bfloat16: export in float32 or float16 for it, or use a GPU"
        ) from error
    except Exception as error:  # onnxruntime's own types have no common base
        raise InputError(f"onnxruntime does not load the model: {' '.join(str(error).split())}") from error


def model_of(program_or_path: HasModel | ModelSource) -> ir.Model:
    """The model, which is read and not changed; of a file that says in one line what is wrong with it."""
    if isinstance(program_or_path, ir.Model):
        return program_or_path
    if isinstance(program_or_path, (str, os.PathLike, onnx.ModelProto)):
        return load_model(program_or_path)
    return program_or_path.model


def import_onnxruntime() -> Any:
    """The onnxruntime module; InputError says how to install it where it is missing."""
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError("onnxruntime is not installed; run: pip install 'qknorm-onnx[cpu]' (or [gpu])") from error
    return onnxruntime


def _require_available(ort: Any, wanted: Sequence[Any]) -> None:
    available = ort.get_available_providers()
    for provider in wanted:
        name = _provider_name(provider)
        if name not in available:
            raise InputError(f"this onnxruntime has no {name}; it has {', '.join(available)}")


def _provider_name(provider: str | tuple[str, dict[str, Any]]) -> str:
    return provider if isinstance(provider, str) else provider[0]
