"""Damaged weights are found before an export, not after it."""

from __future__ import annotations

import itertools

from torch import nn

from qknorm_onnx.errors import ExportError


def check_weights(module: nn.Module) -> None:
    """Raises ExportError, naming the parameter, for weights that were never loaded or hold NaN."""
    for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
        if value.is_meta:
            raise ExportError(
                f"{name} of shape {tuple(value.shape)} has no values (it is on the meta device): the checkpoint does not "
                "have it, or it was never loaded; load weights that hold it"
            )
        if value.is_floating_point() and bool(value.isnan().any()):
            count = int(value.isnan().sum())
            raise ExportError(
                f"{name} holds {count} NaN of {value.numel()} values: the checkpoint is damaged; load it again from its source"
            )
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if name == "weight" and parameter is None and _expects_weight(part):
                raise ExportError(f"{path}.{name} is missing: {type(part).__name__} was built with a weight; load one")


def _expects_weight(part: nn.Module) -> bool:
    return getattr(part, "elementwise_affine", None) is True
