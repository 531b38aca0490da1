"""From a PyTorch module, or a Hugging Face folder, to a model that was run beside it: `qk.export`, `qk.export_folder`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qknorm_onnx.pipeline import Program
from qknorm_onnx.serving.decoder_ports import LogitsKept
from qknorm_onnx.spec.targets import DEFAULT_TARGET
from qknorm_onnx.torch_export import decoder_folder, exporter
from qknorm_onnx.torch_export.signatures.dynamic_shapes import DynamicShapes
from qknorm_onnx.validation.self_check import check_export


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
    check: bool | None = None,
    require_fusion: bool = False,
    for_onnxruntime: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Program:
    """Export `module`, called as `module(*args, **kwargs)`, with one node for each QK-Norm attention.

    Args:
        module: any module that torch.onnx can export; it is exported in evaluation mode and left as it was.
        args: example inputs.
        kwargs: example inputs by name; graph inputs keep the names of the module's parameters.
        dynamic_shapes: as `torch.onnx.export` takes them, by input name, names as strings allowed; None is static.
        target: what attention becomes: "custom-op", "ort", "onnx" or "primitive" (also called "portable").
        provider: "cpu" or "cuda": whose kernels the target is chosen for.
        opset: of the ONNX file, 18 or newer; None is 20, 23 for the target "onnx" and 18 for "primitive".
        for_onnxruntime: as `qk.fuse` takes it.
        verify: prove each rewrite by running old and new on random inputs.
        check: run the finished model once beside the module, on a small case of another batch than the example's: what is off
            by more than rounding is an error, whoever caused it. None does so up to 2 GiB of weights, and notes where it did not.
        require_fusion: raise unless there is QK-Norm attention and all of it is fused.
        progress: called with the name of each stage as it begins.

    Raises:
        InputError: `target` or `provider` is unknown.
        ExportError: damaged weights, example inputs that do not fit, a dynamic axis that cannot be honoured, a module that
            torch.onnx cannot export, or a model that does not compute what the module computes.
        FusionRequiredError: `require_fusion`, and not all QK-Norm attention became one node.
    """
    options: dict[str, Any] = {"target": target, "provider": provider, "verify": verify, "require_fusion": require_fusion}
    program = exporter.export(
        module,
        args,
        kwargs,
        dynamic_shapes=dynamic_shapes,
        opset=opset,
        for_onnxruntime=for_onnxruntime,
        progress=progress,
        **options,
    )
    if check is False:
        return program
    if progress is not None:
        progress("check")
    written = program.model.opset_imports.get("", exporter.DEFAULT_OPSET)
    notes = check_export(
        program,
        module,
        (args,) if isinstance(args, torch.Tensor) else args,
        kwargs,
        always=check is True,
        translate=lambda: exporter.export_graph(module, args, kwargs, dynamic_shapes=dynamic_shapes, opset=written)[0],
    )
    return dataclasses.replace(program, report=program.report.with_notes(notes))


def export_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    logits: LogitsKept = "last",
    dtype: torch.dtype | None = None,
    provider: str = "cpu",
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Program:
    """Export the language model of a Hugging Face folder into the folder `out`, which onnxruntime-genai and `qk.generate` serve.

    It holds `model.onnx` with its cache as inputs and outputs, its weights, `genai_config.json`, the kernel library where it
    serves the model, and the tokenizer and configuration files of `source`. It can be moved as a whole.

    Args:
        source: a folder with config.json and safetensors.
        out: a folder that is not there yet, or empty; nothing is left there where the export fails.
        logits: "last" gives the logits of each row's last token that its mask lets through, (B, 1, vocabulary), all that a
            generator reads; "all" those of every new token.
        dtype: type of the weights; None is that of the checkpoint.
        provider: "cpu" or "cuda": whose kernels are meant.
        progress: called with the name of each stage as it begins.
        options: of `qk.export`: `target`, `opset`, `verify`, `check`, `require_fusion`, `for_onnxruntime`.

    Raises:
        InputError: `out` holds something, or cannot be written.
        ExportError: `source` is no folder with a causal language model, or cannot be exported; the message says why.
        FusionRequiredError: `require_fusion`, and not all QK-Norm attention became one node.
    """
    return decoder_folder.export_folder(
        source, out, logits=logits, dtype=dtype, provider=provider, progress=progress, export_module=export, **options
    )
