"""From a PyTorch module to a program with one node for each QK-Norm attention: all of `qk.export` but its check."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir
import torch
from torch import nn

from qknorm_onnx.errors import ExportError, first_line
from qknorm_onnx.graph.fusion_report import FusionReport
from qknorm_onnx.graph.onnxruntime_release import release_named
from qknorm_onnx.graph.spec_comparison import compare_specs
from qknorm_onnx.lowering.registry import TARGETS
from qknorm_onnx.pipeline import Program, fuse
from qknorm_onnx.spec.signature import DTYPES
from qknorm_onnx.spec.targets import DEFAULT_TARGET, require_provider, target_named
from qknorm_onnx.torch_export.huggingface.cached_decoder import CachedDecoder
from qknorm_onnx.torch_export.module.module_names import forget_wrapper, name_expressions, name_outputs
from qknorm_onnx.torch_export.module.weight_check import check_weights
from qknorm_onnx.torch_export.operators.translation import translation_table
from qknorm_onnx.torch_export.patches.exact_rules import exact_rules
from qknorm_onnx.torch_export.patches.module_patches import mended
from qknorm_onnx.torch_export.signatures.dynamic_shape_check import check_honoured, refused_by_torch
from qknorm_onnx.torch_export.signatures.dynamic_shapes import DynamicShapes, dynamic_axes, enlarge, for_torch, output_names_of
from qknorm_onnx.torch_export.signatures.signature_wrapper import ExplicitSignature, example_call
from qknorm_onnx.torch_export.spec_from_module import read_module

DEFAULT_OPSET: Final = 20
OLDEST_OPSET: Final = 18
ATTENTION_OPSET: Final = 23


def export(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: DynamicShapes | None = None,
    target: str = DEFAULT_TARGET,
    provider: str = "cpu",
    opset: int | None = None,
    verify: bool = True,
    require_fusion: bool = False,
    for_onnxruntime: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Program:
    """`qk.export` without its last step: the arguments and errors are those of `checked_export.export`, which runs the result."""
    target = target_named(target)
    require_provider(provider)
    if progress is not None:
        progress("export")
    chosen = opset if opset is not None else _opset_for(target, for_onnxruntime)
    model, notes = export_graph(module, args, kwargs, dynamic_shapes=dynamic_shapes, opset=chosen)
    program = fuse(
        model,
        target=target,
        provider=provider,
        verify=verify,
        require_fusion=require_fusion,
        for_onnxruntime=for_onnxruntime,
        # Kernels on CUDA make no room: a decoder meant for them keeps a past that grows by its size.
        caches_in_place=isinstance(module, CachedDecoder) and target == DEFAULT_TARGET and provider == "cpu",
        progress=progress,
    )
    notes = (*notes, *program.report.notes, *_other_meanings(module, program.report))
    return dataclasses.replace(program, report=dataclasses.replace(program.report, notes=notes))


def _other_meanings(module: nn.Module, report: FusionReport) -> tuple[str, ...]:
    """Where the graph's attentions mean something else than the readers say of the module's, for people."""
    read = read_module(module)
    parameter = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    name = "float32" if parameter is None else str(parameter.dtype).removeprefix("torch.")
    dtype = next((dtype for dtype in DTYPES if dtype == name), DTYPES[0])
    return (*read.failures, *compare_specs(read.specs, report, dtype=dtype).notes)


def export_graph(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: DynamicShapes | None = None,
    opset: int = DEFAULT_OPSET,
) -> tuple[ir.Model, tuple[str, ...]]:
    """The module's graph before any fusion, and notes of what was mended on the way. As `export` otherwise."""
    _require_exporter(opset)
    if not isinstance(module, nn.Module):
        raise ExportError(f"a {type(module).__name__} is given; give a torch.nn.Module")
    check_weights(module)
    call = example_call(module, (args,) if isinstance(args, torch.Tensor) else args, kwargs)
    axes = dynamic_axes(dynamic_shapes, call)
    call, enlarged = enlarge(call, axes)
    keep_cache = isinstance(module, CachedDecoder) or bool((kwargs or {}).get("use_cache"))
    with mended(module, keep_cache=keep_cache) as notes:
        wrapper = ExplicitSignature(module, call)
        output_names = output_names_of(wrapper, enlarged)
        if not output_names:
            raise ExportError(f"{type(module).__name__} returns no tensor")
        try:
            with exact_rules(notes):
                program = _torch_onnx_export(wrapper, for_torch(axes, call), output_names, opset)
        except Exception as error:
            refusal = refused_by_torch(error, axes, call)
            raise ExportError(refusal or f"torch cannot export {type(module).__name__}: {_innermost(error)}") from error
        check_honoured(axes, program.exported_program, wrapper)
    if wrapper.arithmetic.used:
        notes.append("complex numbers were written as pairs of real ones (ONNX has no complex type)")
    written = program.model.opset_imports.get("")
    if written != opset:
        raise ExportError(f"torch.onnx wrote opset {written} instead of {opset}; use opset {DEFAULT_OPSET}")
    forget_wrapper(program.model)
    name_expressions(program.model, axes)
    name_outputs(program.model, output_names)
    return program.model, tuple(notes)


def _opset_for(target: str, for_onnxruntime: str | None) -> int:
    """The oldest opset in which the target can say what it should, as far as the release knows it."""
    wanted = OLDEST_OPSET if target == "primitive" else max(DEFAULT_OPSET, TARGETS[target].minimum_opset)
    known = wanted if for_onnxruntime is None else release_named(for_onnxruntime).opset
    return wanted if wanted <= known else DEFAULT_OPSET


def _require_exporter(opset: int) -> None:
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise ExportError(f"torch.onnx needs {package}: pip install {package}")
    from onnx.defs import onnx_opset_version

    if not OLDEST_OPSET <= opset <= onnx_opset_version():
        raise ExportError(
            f"there is no export to opset {opset}: torch.onnx writes {OLDEST_OPSET} and newer, the installed onnx knows opsets "
            f"up to {onnx_opset_version()}; use opset {DEFAULT_OPSET}"
        )


def _torch_onnx_export(
    wrapper: ExplicitSignature, dynamic_shapes: dict[str, Any] | None, output_names: list[str], opset: int
) -> Any:
    tensors = tuple(wrapper.call.tensors.values())
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            wrapper,
            tensors,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=dynamic_shapes,
            input_names=list(wrapper.call.tensors),
            output_names=output_names,
            custom_translation_table=_translations(opset),
            verbose=False,
        )
    assert program is not None
    return program


def _translations(opset: int) -> dict[Any, Any]:
    """Our own operators, what torch.onnx writes wrong, and below opset 23, which has an operator for it, PyTorch's attention."""
    from qknorm_onnx.torch_export.patches.translations import expm1, log1p, squeeze_dim, squeeze_dims, stable_sort

    table: dict[Any, Any] = dict(translation_table())
    table |= {torch.ops.aten.squeeze.dim: squeeze_dim, torch.ops.aten.squeeze.dims: squeeze_dims}
    table[torch.ops.aten.sort.stable] = stable_sort
    table |= {torch.ops.aten.expm1.default: expm1, torch.ops.aten.log1p.default: log1p}
    if opset < ATTENTION_OPSET:
        from qknorm_onnx.torch_export.patches.masked_attention import scaled_dot_product_attention

        table[torch.ops.aten.scaled_dot_product_attention.default] = scaled_dot_product_attention
    return table


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch.onnx tells its own developers: packages that it does not need here, deprecations inside torch."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _innermost(error: BaseException) -> str:
    """The first line of the error that torch's own errors wrap, and the line of the module's code that it comes from."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = first_line(error)
    place = _place(error)
    if "SymBool" in text or "SymInt" in text or "data-dependent" in text:
        text += (
            " (a number that depends on a tensor's values or on a dynamic size: make it a constant, or leave that axis static)"
        )
    return f"{text}, at {place}" if place else text


def _place(error: BaseException) -> str:
    """The last line of code on the way to `error` that is neither PyTorch's nor ours."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((*own, "<"))]
    modules = [frame for frame in frames if "onnxscript" not in frame.filename]
    return f"{Path(modules[-1].filename).name}:{modules[-1].lineno} `{modules[-1].line}`" if modules else ""
