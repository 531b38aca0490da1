"""Two roads to the meaning of one attention: read off its module, and recognised in the graph.

Weights are not compared, only what a spec says. What a graph cannot show is no difference: a mask that stays an input may
be the causal one, a rotary in front of a norm may be nodes of its own, and with few fixed positions a window hides nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from qknorm_onnx.graph.fusion_report import FusedAttention, FusionReport
from qknorm_onnx.spec.attributes import AttributeValue, to_attributes
from qknorm_onnx.spec.canonical import canonical
from qknorm_onnx.spec.qk_norm_spec import UNLIMITED_WINDOW, AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec
from qknorm_onnx.spec.signature import Dtype

SHOWN_NAMES: Final = 3
# An exporter may write a scale as the square of its root in the model's own type: two roundings, and as much again.
TOLERANCES: Final[Mapping[Dtype, float]] = MappingProxyType(
    {"float64": 0.0, "float32": 0.0, "float16": 2.0**-9, "bfloat16": 2.0**-6}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecDifference:
    """One attribute of one attention, as the module says it and as the graph does."""

    name: str
    attribute: str
    module: object
    graph: object

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.attribute} is {_shown(self.module)} in the module, {_shown(self.graph)} in the graph"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecComparison:
    """The attentions of a graph beside what was read off the module.

    agreeing: names of those that mean the same by both. uncompared: those that no reader knows, and those whose queries and
    keys are prepared so differently that one spec cannot say it.
    """

    agreeing: tuple[str, ...] = ()
    differences: tuple[SpecDifference, ...] = ()
    uncompared: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each kind of difference, for people."""
        names: dict[str, list[str]] = {}
        for found in self.differences:
            names.setdefault(found.line, []).append(found.name)
        return tuple(f"module and exported graph differ: {line} ({_listed(where)})" for line, where in names.items())


def compare_specs(read: Mapping[str, QKNormSpec | None], report: FusionReport, *, dtype: Dtype = "float32") -> SpecComparison:
    """Compare the attentions of `report` with the specs that were `read` off modules.

    Args:
        read: path of each attention module whose reader is known -> its spec, or None where it has no QK norm.
        report: what the graph's attentions are; their names are paths of the modules that they were traced from.
        dtype: of the model; where narrow types round is compared only where it has an effect.
    """
    agreeing: list[str] = []
    uncompared: list[str] = []
    differences: list[SpecDifference] = []
    for fused in report.fused:
        traced = fused.surroundings.module if fused.surroundings is not None else ""
        path = _owner(traced or fused.name, read)
        whole = _whole(fused)
        if path is None or whole is None:
            uncompared.append(fused.name)
            continue
        spec = read[path]
        found = _normalised(fused.name, False, True) if spec is None else _differences(fused, spec, whole, dtype)
        differences += found
        if not found:
            agreeing.append(fused.name)
    for name in report.plain:
        path = _owner(name, read)
        if path is None:
            uncompared.append(name)
        elif read[path] is None:
            agreeing.append(name)
        else:
            differences += _normalised(name, True, False)
    return SpecComparison(agreeing=tuple(agreeing), differences=tuple(differences), uncompared=tuple(uncompared))


def _owner(name: str, read: Mapping[str, QKNormSpec | None]) -> str | None:
    """The innermost module read that an attention called `name` belongs to; a module called twice has `name.2`, too."""
    found = [path for path in read if path in ("", name) or name.startswith(f"{path}.")]
    return max(found, key=len, default=None)


def _normalised(name: str, module: bool, graph: bool) -> list[SpecDifference]:
    return [SpecDifference(name=name, attribute="norm of queries or keys", module=module, graph=graph)]


def _whole(fused: FusedAttention) -> QKNormSpec | None:
    """The spec with what nodes in front of the attention do; None where a spec cannot say it."""
    if not fused.query_preparation and not fused.key_preparation:
        known = fused.surroundings is not None or fused.spec.has_norm
        return fused.spec if known else None  # by its mark, normalised in front: the mark does not say how
    if len(fused.query_preparation) != 1 or len(fused.key_preparation) != 1:
        return None
    (query,), (key,) = fused.query_preparation, fused.key_preparation
    if _shared(query) != _shared(key):
        return None
    norm = NormSpec(
        q_kind=query.kind,
        k_kind=key.kind,
        axis=query.axis,
        groups=query.groups,
        q_epsilon=query.epsilon,
        k_epsilon=key.epsilon,
        epsilon_mode=query.epsilon_mode,
        weight_order=query.weight_order,
    )
    return QKNormSpec(attention=fused.spec.attention, norm=norm, rotary=query.rotary)


def _shared(spec: QKNormRotarySpec) -> tuple[object, ...]:
    return spec.axis, spec.groups, spec.epsilon_mode, spec.weight_order, spec.rotary


def _differences(fused: FusedAttention, spec: QKNormSpec, whole: QKNormSpec, dtype: Dtype) -> list[SpecDifference]:
    of_module, of_graph = (to_attributes(canonical(_as_seen(one, fused), dtype=dtype)) for one in (spec, whole))
    hidden = {"softmax_precision"}  # how the attention was exported decides it
    if (spec.rotary.order, whole.rotary.order) == ("before_norm", "none"):
        hidden |= {name for name in of_module if name.startswith("rotary_")}  # nodes in front of a norm may turn, too
    if fused.surroundings is None or fused.surroundings.has_mask:  # what the module hides may be hidden by the mask
        hidden |= {name for name in ("is_causal", "left_window_size", "right_window_size") if _is_open(name, of_graph[name])}
    return [
        SpecDifference(name=fused.name, attribute=name, module=value, graph=of_graph[name])
        for name, value in of_module.items()
        if name not in hidden and not _equal(value, of_graph[name], TOLERANCES[dtype])
    ]


def _equal(module: AttributeValue, graph: AttributeValue, tolerance: float) -> bool:
    if isinstance(module, float) and isinstance(graph, float):
        return math.isclose(module, graph, rel_tol=tolerance)
    return module == graph


def _is_open(name: str, value: object) -> bool:
    return value == (0 if name == "is_causal" else UNLIMITED_WINDOW)


def _as_seen(spec: QKNormSpec, fused: FusedAttention) -> QKNormSpec:
    """`spec` without the limits that hide nothing at the graph's fixed sizes."""
    attention, around = spec.attention, fused.surroundings
    if around is None:
        return spec
    left, right, causal = attention.left_window_size, attention.right_window_size, attention.is_causal
    if around.num_keys is not None:
        left, right = (UNLIMITED_WINDOW if size >= around.num_keys - 1 else size for size in (left, right))
    if around.is_decode:
        right, causal = UNLIMITED_WINDOW, False
    seen: AttentionSpec = dataclasses.replace(attention, left_window_size=left, right_window_size=right, is_causal=causal)
    return dataclasses.replace(spec, attention=seen)


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = len(shown) - SHOWN_NAMES
    return ", ".join(shown[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
