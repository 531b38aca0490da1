"""Raising a model's ONNX opset where a target needs a newer one."""

from __future__ import annotations

import logging

import onnx_ir as ir

from qknorm_onnx.graph.passes.attach_bodies import onnx_opset, scopes
from qknorm_onnx.spec.signature import DOMAIN


def raise_opset(model: ir.Model, wanted: int) -> bool:
    """Convert `model` in place to ONNX opset `wanted`; an equal or newer one stays. Returns whether the model has it now.

    Either every node is converted or nothing is changed. Conversion inlines the model's functions; the bodies of
    canonical nodes are left out, they are made anew for the new opset.
    """
    if onnx_opset(model) >= wanted:
        return True
    converted = _converted(model, wanted)
    if converted is None:
        return False
    model.graph = converted.graph
    model.functions.clear()
    model.functions.update(converted.functions)
    return True


def _converted(model: ir.Model, wanted: int) -> ir.Model | None:
    from onnxscript import version_converter  # slow to import, and needed by few models

    trial = model.clone()
    for key in [key for key, function in trial.functions.items() if function.domain == DOMAIN]:
        del trial.functions[key]
    chatter = logging.getLogger("onnxscript.version_converter")
    level = chatter.level
    chatter.setLevel(logging.ERROR)  # what could not be converted is reported as a refusal
    try:
        version_converter.convert_version(trial, wanted)
    except (version_converter._version_converter.VersionConverterError, ValueError):
        return None
    finally:
        chatter.setLevel(level)
    left = [node for scope in scopes(trial) for node in scope.all_nodes() if node.domain == "" and node.version != wanted]
    return None if left or onnx_opset(trial) != wanted else trial
