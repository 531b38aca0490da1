"""Functions that differ in nothing but their `overload`, as files of version 0.1.0 have them.

ONNX has overloads since IR version 10. onnxruntime before 1.27 and ONNX's reference evaluator read such a file without a
word and take the last function of a name for all of them: other numbers, or a load error that says nothing of it.
"""

from __future__ import annotations

import collections
from typing import Any

import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.onnxruntime_release import OVERLOADS_SINCE
from qknorm_onnx.graph.passes.inline_functions import inline_functions


def ignores_overloads(onnxruntime: Any) -> bool:
    """Whether this onnxruntime takes functions of one name for the same."""
    return release_of(onnxruntime) < OVERLOADS_SINCE


def release_of(onnxruntime: Any) -> tuple[int, int]:
    """Major and minor version of an onnxruntime module."""
    major, minor = str(onnxruntime.__version__).split(".")[:2]
    return int(major), int(minor)


def needs_overloads(model: ir.Model) -> bool:
    """Whether functions of `model` differ in nothing but their overload."""
    return bool(_ambiguous(model))


def without_overloads(model: ir.Model) -> ir.Model:
    """A copy in which functions that only their overload tells apart stand in the places of their calls; weights are shared.

    A model that has none is returned itself. Raises InputError where one cannot be written out.
    """
    ambiguous = _ambiguous(model)
    if not ambiguous:
        return model
    copy = model.clone()
    kept = inline_functions(copy, lambda function: function.identifier()[:2] in ambiguous).kept
    if kept:
        raise InputError(f"this onnxruntime cannot tell functions apart by their overload, and {kept[0]}")
    return copy


def _ambiguous(model: ir.Model) -> set[tuple[str, str]]:
    counts = collections.Counter((domain, name) for domain, name, _ in model.functions)
    return {key for key, count in counts.items() if count > 1}
