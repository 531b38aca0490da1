"""Raising a model's ONNX opset where a target needs a newer one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import onnx_ir as ir

from qknorm_onnx.graph.canonical.scopes import onnx_opset
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
    with _complaints("onnxscript.version_converter") as complaints:
        try:
            version_converter.convert_version(trial, wanted)
        except (RuntimeError, ValueError):  # how the converter refuses functions' attributes and unknown versions
            return None
    # A node that has no counterpart is left as it was and only logged: the model would mean something else.
    return None if complaints or onnx_opset(trial) != wanted else trial


@contextlib.contextmanager
def _complaints(logger_name: str) -> Iterator[list[str]]:
    """What `logger_name` warns of meanwhile, instead of printing it."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger = logging.getLogger(logger_name)
    handler, propagate, level = Keep(logging.WARNING), logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
