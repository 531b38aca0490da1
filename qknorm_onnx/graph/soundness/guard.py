"""The guard at every door: what a file can cause is one line, and what is returned or written is sound."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import google.protobuf.message
import onnx
import onnx_ir as ir

from qknorm_onnx.errors import InputError, QKNormError
from qknorm_onnx.graph.soundness.canonical_nodes import check_canonical_nodes
from qknorm_onnx.graph.soundness.fields import check_fields
from qknorm_onnx.graph.soundness.functions import check_bodies, check_functions
from qknorm_onnx.graph.soundness.mixed_norms import mend_mixed_norms
from qknorm_onnx.graph.soundness.onnx_check import check_with_onnx, skeleton
from qknorm_onnx.graph.soundness.operator_sets import check_operator_sets
from qknorm_onnx.graph.soundness.scopes import check_function, check_graph
from qknorm_onnx.graph.soundness.sparse import has_sparse, make_dense
from qknorm_onnx.graph.soundness.tensors import check_tensor, location_of
from qknorm_onnx.spec.qk_norm_spec import SpecError

ORT_FORMAT: Final = b"ORTM"  # onnxruntime's mark, behind the first four bytes
UNEXPECTED: Final = "could not be worked with"


@contextlib.contextmanager
def one_line(label: str) -> Iterator[None]:
    """Whatever goes wrong inside is an InputError of one line. What no check foresaw is named as such, with its place."""
    try:
        yield
    except QKNormError:
        raise
    except SpecError as error:
        raise InputError(f"{label}: {error}") from error
    except RecursionError as error:
        raise InputError(f"{label} {UNEXPECTED}: it is nested too deeply ({_place(error)})") from error
    except Exception as error:
        reason = str(error).strip().splitlines()[:1]
        raise InputError(
            f"{label} {UNEXPECTED}: {type(error).__name__} {' '.join(reason)[:200]} ({_place(error)}); "
            "if other tools read the model, please report it"
        ) from error


def parse(content: bytes, label: str) -> onnx.ModelProto:
    """The model message of a file's `content`. Raises InputError where it is none."""
    if content[4:8] == ORT_FORMAT:
        raise InputError(
            f"{label} is in onnxruntime's own format (.ort), which only onnxruntime reads: give the ONNX file that it was made "
            "of, or load it with onnxruntime.InferenceSession, with qknorm_onnx.custom_ops.library_path() in "
            "register_custom_ops_library if it was saved with the library"
        )
    try:
        model = onnx.ModelProto.FromString(content)
    except google.protobuf.message.DecodeError as error:
        deep = "MaxDepth" in str(error)
        reason = "graphs are nested more than 30 deep" if deep else "it is damaged, cut, or another kind of file"
        raise InputError(f"{label} is not a readable ONNX model: {reason}") from error
    if not model.HasField("graph"):
        raise InputError(f"{label} is not an ONNX model: it has no graph")
    return model


def read_proto(proto: onnx.ModelProto, label: str, roots: tuple[Path, ...], *, left_out: str = "") -> ir.Model:
    """The model of a message, which is not changed; weights outside are left there, named from the first of `roots`.

    `make_sound` is to follow, once small weights are read. Tensors at the place `left_out` were looked at by who left them out.

    Raises:
        InputError: the message is damaged, or its names, functions or tensors make no model; the line says what and where.
    """
    with one_line(label):
        for owner, tensor in check_fields(proto, label):
            if not left_out or location_of(tensor) != left_out:
                check_tensor(tensor, owner, label, roots)
        if has_sparse(proto):
            copy = onnx.ModelProto()
            copy.CopyFrom(proto)
            make_dense(copy, label)
            proto = copy
        in_order = _check_structure(proto, label)
        model = ir.from_proto(proto)
        if not in_order:
            _sort(model)
    return model


def make_sound(model: ir.Model, label: str, *, structure: bool = True) -> None:
    """Check that `model` is what ONNX says a model is, and mend what exporters get wrong and runtimes do not forgive.

    Norms of mixed types are put between casts, shapes of inner values that are stated wrongly are forgotten.

    Weights are not looked at. `structure`: check names, order and functions too; a model that was just read had it done on
    its message.

    Raises:
        InputError: it would not load; the line says what and where.
    """
    with one_line(label):
        mend_mixed_norms(model)
        check_canonical_nodes(model, label)
        proto = skeleton(model, label)
        if structure:
            _check_structure(proto, label)
        content = proto.SerializeToString()
        del proto  # large; see check_with_onnx
        if not check_with_onnx(content, label):
            _forget_shapes(model)


def _forget_shapes(model: ir.Model) -> None:
    for graph in model.graphs():
        outputs = set(graph.outputs)
        for node in graph:
            for value in node.outputs:
                if value not in outputs:
                    value.shape = None


def _check_structure(proto: onnx.ModelProto, label: str) -> bool:
    """Whether all nodes are in order."""
    check_operator_sets(proto, label)
    in_order = check_graph(proto.graph, label)
    for function in proto.functions:
        in_order = check_function(function, label) and in_order
    check_functions(proto, label)
    check_bodies(proto, label)
    return in_order


def _sort(model: ir.Model) -> None:
    for graph in model.graphs():
        graph.sort()
    for function in model.functions.values():
        function.sort()


def _place(error: BaseException) -> str:
    """Where in our own code an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "qknorm_onnx" in frame.filename and frame.name != "one_line"]
    return f"{Path(ours[-1].filename).name}, line {ours[-1].lineno}" if ours else "in another library"
