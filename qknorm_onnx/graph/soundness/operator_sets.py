"""The operator sets that a model and its functions import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx

from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.signature import DOMAIN, VERSION

_ONNX_DOMAINS: Final = ("", "ai.onnx")


# onnxruntime imports every registered custom domain in this version into the models that it saves, used or not.
WRITTEN_BY_ONNXRUNTIME: Final = 1000


def check_operator_sets(model: onnx.ModelProto, label: str) -> None:
    """Raises InputError where an import is of a version that does not exist, or a model without imports has nodes."""
    if model.ir_version > onnx.IR_VERSION:
        raise InputError(
            f"{label} has IR version {model.ir_version}; the installed onnx {onnx.__version__} knows up to "
            f"{onnx.IR_VERSION}: install a newer onnx"
        )
    if not model.opset_import and (model.graph.node or model.functions):
        raise InputError(f"{label} imports no operator set; add one of ONNX opset 18 or newer")
    _check(model.opset_import, label)
    for function in model.functions:
        _check(function.opset_import, f"{label}: function {function.domain}::{function.name}")


def _check(imports: Sequence[onnx.OperatorSetIdProto], label: str) -> None:
    versions: dict[str, int] = {}
    for entry in imports:
        domain = "" if entry.domain in _ONNX_DOMAINS else entry.domain
        if versions.setdefault(domain, entry.version) != entry.version:
            raise InputError(f"{label} imports the domain {domain!r} in two versions, {versions[domain]} and {entry.version}")
        if not domain and not 1 <= entry.version <= onnx.defs.onnx_opset_version():
            raise InputError(
                f"{label} is of ONNX opset {entry.version}; the installed onnx {onnx.__version__} knows 1 to "
                f"{onnx.defs.onnx_opset_version()}"
            )
        if domain == DOMAIN and entry.version not in (VERSION, WRITTEN_BY_ONNXRUNTIME):
            raise InputError(
                f"{label} imports {DOMAIN} in version {entry.version}; this qknorm-onnx knows version {VERSION} only: "
                "install the one that wrote the file"
            )
