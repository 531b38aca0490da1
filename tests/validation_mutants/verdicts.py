"""Each mutant judged: whether it can be seen from outside at all, and which cases of `validate` see it.

"Seen from outside": in float64 an output differs from the honest export's on some input in the domain. The inputs are made by
`probes`, not by the validator. Differences up to 1e-9 of the largest value are float64's own.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

import qknorm_onnx as qk
from qknorm_onnx.runtime.runner import Arithmetic, CannotRunError, Runner, make_runner
from qknorm_onnx.spec.qk_norm_spec import SpecError
from tests.validation_mutants.graph_edits import NotApplicable
from tests.validation_mutants.honest_models import FORMS, Honest, honest
from tests.validation_mutants.mutants import Mutant, mutants
from tests.validation_mutants.probes import Feeds, probes, visible

FLOAT64_NOISE = 1e-9
FLOAT32_NOISE = 1e-5


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`difference`: the largest on any probe, infinite where only one of the two runs; `cases`: those that failed."""

    model: str
    kind: str
    name: str
    difference: float
    cases: tuple[str, ...]

    @property
    def observable(self) -> bool:
        return self.difference > FLOAT64_NOISE

    @property
    def caught(self) -> bool:
        return bool(self.cases)


def edited(source: Honest, mutant: Mutant) -> ir.Model | None:
    """The mutant as a model, or None where the honest model has nothing to change."""
    model = source.model.clone()
    try:
        mutant.edit(model)
    except (NotApplicable, SpecError):
        return None
    return model


MODELS_OF_EACH = 2  # a change of one name is made on so many honest models


def chosen(name: str) -> list[Mutant]:
    """The mutants of an honest model that are judged: of each name, those of the first models that have it, in turn.

    The order of the models begins at another one for each name, so that every model has its share.
    """
    names = list(FORMS)
    found = []
    for mutant in mutants(FORMS[name]):
        start = zlib.crc32(mutant.name.encode()) % len(names)
        order = [*names[start:], *names[:start]]
        having = [other for other in order if any(m.name == mutant.name for m in mutants(FORMS[other]))]
        if name in having[:MODELS_OF_EACH]:
            found.append(mutant)
    return found


def verdicts_of(name: str, wanted: frozenset[str] = frozenset()) -> Iterator[Verdict]:
    """One for each chosen mutant of an honest model, or for those whose names are `wanted`."""
    source = honest(name)
    for mutant in mutants(source.form) if wanted else chosen(name):
        if wanted and mutant.name not in wanted:
            continue
        model = edited(source, mutant)
        if model is None:
            continue
        # Where a mutant goes wrong is known.
        report = qk.validate(model, source.module, kwargs=source.example.kwargs, locate=0)
        cases = tuple(dict.fromkeys(row.case for row in report.failures))
        assert report.passed == (not cases)
        yield Verdict(name, mutant.kind, mutant.name, difference(name, model, narrow=mutant.kind == "type"), cases)


@functools.cache
def _truths(name: str, arithmetic: Arithmetic) -> list[tuple[Feeds, dict[str, np.ndarray]]]:
    runner = make_runner(honest(name).model, arithmetic=arithmetic, threads=1)
    return [(feeds, runner.run(feeds)) for feeds in probes(honest(name).form)]


def difference(name: str, model: ir.Model, *, narrow: bool = False) -> float:
    """The largest difference of an output in float64, over its largest value.

    `narrow`: in the file's own types, for a detour through another type, which float64 has not; what float32 itself rounds is 0.
    """
    arithmetic: Arithmetic = "native" if narrow else "float64"
    try:
        runner = make_runner(model, arithmetic=arithmetic, threads=1)
    except CannotRunError:
        return float("inf")
    found = max(_difference(runner, feeds, truth) for feeds, truth in _truths(name, arithmetic))
    return 0.0 if narrow and found < FLOAT32_NOISE else found


def _difference(runner: Runner, feeds: Feeds, truth: dict[str, np.ndarray]) -> float:
    try:
        found = runner.run(feeds)
    except CannotRunError:
        return float("inf")
    apart = 0.0
    for output, wanted in truth.items():
        if output not in found or found[output].shape != wanted.shape:
            return float("inf")
        a, b = visible(feeds, wanted), visible(feeds, found[output])
        if a.size:
            largest = float(np.abs(a).max()) or 1.0
            apart = max(apart, float(np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf).max()) / largest)
    return apart
