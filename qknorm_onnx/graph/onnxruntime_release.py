"""What each release of onnxruntime can load, and the oldest one that a model needs.

Every number was found by loading models in that release (1.20.1 to 1.32.0, CPU) and from the schemas that it registers.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Final

import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.qk_norm_spec import UNLIMITED_WINDOW
from qknorm_onnx.spec.signature import DOMAIN, operator_of

CONTRIB_DOMAIN: Final = "com.microsoft"
LIBRARY_SINCE: Final = (1, 24)
OVERLOADS_SINCE: Final = (1, 27)

# Inputs of GroupQueryAttention by place, and attributes: since when there is one.
GROUPED_INPUTS: Final = {
    9: ("position_ids", (1, 22)), 10: ("attention_bias", (1, 22)), 11: ("head_sink", (1, 23)), 12: ("k_scale", (1, 25)),
    13: ("v_scale", (1, 25)), 14: ("q_norm_weight", (1, 28)), 15: ("k_norm_weight", (1, 28)), 16: ("query_seqlens", (1, 32)),
}  # fmt: skip
_WINDOW: Final = "local_window_size"
GROUPED_ATTRIBUTES: Final = {
    _WINDOW: (1, 24),  # before, it is there, and means a window of one key more
    "qk_output": (1, 23), "k_quant_type": (1, 25), "v_quant_type": (1, 25), "kv_cache_bit_width": (1, 25),
    "qk_norm_epsilon": (1, 28), "sliding_window_cache": (1, 29), "causal": (1, 30), "q_norm_epsilon": (1, 32),
    "k_norm_epsilon": (1, 32),
}  # fmt: skip

# MultiHeadAttention's attention_bias: 1.20 reads one that the heads share from the wrong places.
MULTI_BIAS: Final = 5
MULTI_BIAS_SINCE: Final = (1, 21)

# What older releases load as well, and misread.
_OF_MULTI_BIAS: Final = "MultiHeadAttention with attention_bias"
_MISREAD: Final = frozenset({f"GroupQueryAttention with the attribute {_WINDOW}", _OF_MULTI_BIAS})


@dataclasses.dataclass(frozen=True, order=True)
class Release:
    """One release, 1.x: the newest ONNX opset and IR version that it loads."""

    version: tuple[int, int]
    opset: int
    ir_version: int

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


RELEASES: Final = tuple(
    Release((1, minor), opset, ir_version)
    for minor, opset, ir_version in (
        (20, 21, 10), (21, 22, 10), (22, 22, 10), (23, 23, 11), (24, 25, 13), (25, 26, 13), (26, 26, 13), (27, 26, 13),
        (28, 26, 13), (29, 26, 13), (30, 26, 13), (31, 26, 13), (32, 28, 14),
    )
)  # fmt: skip


def release_named(text: str) -> Release:
    """The release of a version as people write it: 1.24, 1.24.4. One that is newer than all known counts as the newest.

    Raises:
        InputError: it is no version, or one that was never tried.
    """
    found = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", text)
    if found is None:
        raise InputError(f"{text!r} is no version of onnxruntime; write it as 1.24")
    version = (int(found[1]), int(found[2]))
    if version < RELEASES[0].version:
        raise InputError(f"onnxruntime {text} is older than {RELEASES[0]}, the oldest that files were tried in")
    return max(release for release in RELEASES if release.version <= version)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model needs of a runtime.

    oldest: the oldest onnxruntime that loads it; None where no known one does. `because`: what older ones lack.
    contrib: onnxruntime's own operators in it; functions: the model-local functions that it calls; bodiless: canonical
        nodes without a body, which only the kernel library can run.
    """

    opset: int
    ir_version: int
    oldest: Release | None
    because: str = ""
    contrib: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    bodiless: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """One sentence for people, without a full stop."""
        first = f"onnxruntime {self.oldest} or newer" if self.oldest else f"an onnxruntime newer than {RELEASES[-1]}"
        because = f" ({self.because})" if self.because else ""
        parts = [f"ONNX opset {self.opset}, IR version {self.ir_version}"]
        parts += [f"onnxruntime's operators {', '.join(self.contrib)}"] if self.contrib else []
        parts += [f"model-local functions {', '.join(self.functions)}"] if self.functions else []
        parts += [f"the qknorm-onnx kernel library for {', '.join(self.bodiless)}, without bodies"] if self.bodiless else []
        return f"needs {first}{because}: {'; '.join(parts)}"


def needs_of(model: ir.Model) -> Needs:
    """What `model` needs, whoever wrote it."""
    imports = [model.graph.opset_imports, *(function.opset_imports for function in model.functions.values())]
    opset = max(versions.get("", 1) for versions in imports)
    reasons = dict(_reasons(model, opset))
    oldest, because = RELEASES[0], ""
    for reason, since in reasons.items():
        release = next((release for release in RELEASES if since is not None and release.version >= since), None)
        if release is None:
            return _needs(model, opset, None, reason)
        if release > oldest:
            oldest, because = release, reason
    return _needs(model, opset, oldest, because)


def _needs(model: ir.Model, opset: int, oldest: Release | None, because: str) -> Needs:
    nodes = list(_nodes(model))
    called = {node.op_identifier() for node in nodes}
    bodies = {function.name for function in model.functions.values() if function.domain == DOMAIN}
    canonical = {node.op_type for node in nodes if node.domain == DOMAIN and operator_of(node.op_type)}
    return Needs(
        opset=opset,
        ir_version=model.ir_version,
        oldest=oldest,
        because=because,
        contrib=tuple(sorted({node.op_type for node in nodes if node.domain == CONTRIB_DOMAIN})),
        functions=tuple(sorted({key[1] for key in model.functions if key in called})),
        bodiless=tuple(sorted(canonical - bodies)),
    )


def _reasons(model: ir.Model, opset: int) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """What the model needs, and since when there is it."""
    names = collections.Counter(key[:2] for key in model.functions)
    if any(count > 1 for count in names.values()):
        yield "functions that only their overload tells apart", OVERLOADS_SINCE
    for node in _nodes(model):
        if (node.domain, node.op_type) == (CONTRIB_DOMAIN, "GroupQueryAttention"):
            yield from grouped_reasons(node)
        if (node.domain, node.op_type) == (CONTRIB_DOMAIN, "MultiHeadAttention") and any(
            node.inputs[MULTI_BIAS : MULTI_BIAS + 1]
        ):
            yield _OF_MULTI_BIAS, MULTI_BIAS_SINCE
        if node.domain == DOMAIN and operator_of(node.op_type) and node.op_identifier() not in model.functions:
            yield "the qknorm-onnx kernel library", LIBRARY_SINCE
    yield f"ONNX opset {opset}", _since(lambda release: release.opset >= opset)
    yield f"IR version {model.ir_version}", _since(lambda release: release.ir_version >= model.ir_version)


def grouped_reasons(node: ir.Node) -> Iterator[tuple[str, tuple[int, int]]]:
    """What a GroupQueryAttention has that not every release knows."""
    for place, value in enumerate(node.inputs):
        if place in GROUPED_INPUTS and (value is not None or place == len(node.inputs) - 1):
            name, since = GROUPED_INPUTS[place]
            yield f"GroupQueryAttention with {name}", since
    for name, attribute in node.attributes.items():
        if name in GROUPED_ATTRIBUTES and (name != _WINDOW or attribute.as_int() != UNLIMITED_WINDOW):
            yield f"GroupQueryAttention with the attribute {name}", GROUPED_ATTRIBUTES[name]


def keep_from_misreading(model: ir.Model, *, release: Release | None) -> None:
    """Raise the IR version so that releases which would load `model` and compute something else refuse it.

    Before 1.24 GroupQueryAttention's window is one key wider, and 1.20 reads a bias of MultiHeadAttention wrongly; neither
    says a word. A file that was asked for `release` stays one that it loads.
    """
    for reason, since in dict(_reasons(model, 1)).items():
        if reason in _MISREAD and since is not None:
            known = max(older.ir_version for older in RELEASES if older.version < since)
            if release is None or release.ir_version > known:
                model.ir_version = max(model.ir_version, known + 1)


def _since(loads: Callable[[Release], bool]) -> tuple[int, int] | None:
    return next((release.version for release in RELEASES if loads(release)), None)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()
