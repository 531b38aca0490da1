"""`validate` passes honest models and fails every wrong one that can be told from outside, mostly in more than one case."""

from __future__ import annotations

import pytest

import qknorm_onnx as qk
from tests.validation_mutants.honest_models import FORMS, honest, with_other_weights
from tests.validation_mutants.measure import DTYPES, SEEDS
from tests.validation_mutants.mutants import mutants
from tests.validation_mutants.verdicts import chosen, verdicts_of
from tools.validation_table import can_be_seen, read_counts

# What passed before there were cases for it, by model, each with a case that must see it.
ONCE_SURVIVED = {
    "embedder": {
        "mask ignored": "left padding",
        "mask read at its last key only": "left padding",
        "mask taken for a length": "left padding",
        "mask ignored for a batch of 1": "left padding, batch 1",
        "row 0 is zero": "first and last token",
        "last token read as the one before": "first and last token",
        "wrong result of a batch above 4": "batch 5, length 33",
        "window of 17 added": "batch 5, length 33",
        "epsilon 0": "q and k near 1e-04",
        "weights in float16": "example",
    },
    "rms-cache": {
        "wrong result of an empty past": "empty past",
        "epsilon 0": "q and k near 1e-04",
        "epsilon clamp": "q and k near 1e-04",
        "epsilon of q times 2": "q and k near 1e-04",
        "row 1 is row 2": "tables",
        "row 211 is 1 % off": "tables",
        "last row is the first": "first and last token",
        "window of 17 added": "batch 5, length 33",
        "window of 100 added": "103 tokens",
        "positions built in": "positions shifted",
        "positions counted from the first": "positions restarted",
        "positions in int8": "positions far",
        "mask of the first row for all": "left padding",
        "wrong result at lengths that are a multiple of 16": "length 16",
    },
    "cosine": {
        "epsilon 0": "q and k near 1e-13",
        "epsilon 1e-3": "q and k near 1e-04",
        "epsilon outside_sqrt": "q and k near 1e-13",
        "window of 33 added": "length 64",
        "wrong result of rows from the fourth on": "batch 5, length 33",
        "x clamped to 10": "large values",
    },
}


@pytest.mark.parametrize("name", ONCE_SURVIVED)
def test_what_once_survived_fails_in_the_case_made_for_it(name: str) -> None:
    wanted = ONCE_SURVIVED[name]
    seen = {verdict.name: verdict.cases for verdict in verdicts_of(name, frozenset(wanted))}
    assert {mutant: case for mutant, case in wanted.items() if case not in seen[mutant]} == {}
    source = with_other_weights(honest(name), seed=1)
    report = qk.validate(source.model, source.module, kwargs=source.example.kwargs, dtypes=DTYPES)
    assert report.passed, report.summary()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_every_mutant_that_can_be_seen_is_seen(name: str) -> None:
    verdicts = [verdict for verdict in verdicts_of(name) if verdict.observable]
    assert len(verdicts) > 10
    assert [f"{verdict.kind}: {verdict.name} ({verdict.difference:.1e})" for verdict in verdicts if not verdict.caught] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_an_honest_model_passes_with_any_weights(name: str, seed: int) -> None:
    source = with_other_weights(honest(name), seed)
    report = qk.validate(source.model, source.module, kwargs=source.example.kwargs, dtypes=DTYPES)
    assert report.passed, report.summary()


def test_the_counts_in_the_docs_are_those_of_the_mutants_that_there_are() -> None:
    counts = read_counts()
    assert list(counts) == list(FORMS)
    for name, model in counts.items():
        measured = {entry["name"] for entry in model["mutants"]}
        assert measured <= {mutant.name for mutant in chosen(name)}, "measure again: python -m tests.validation_mutants.measure"
        assert len(measured) == len(model["mutants"]) > 10
        assert (model["honest"]["passed"], model["honest"]["failures"]) == (model["honest"]["judged"], [])
        assert model["honest"]["judged"] == SEEDS * len(DTYPES)
    seen = [entry for model in counts.values() for entry in model["mutants"] if can_be_seen(entry)]
    assert len(seen) >= 200
    assert [entry for entry in seen if not entry["cases"]] == []
    assert sum(entry["cases"] > 1 for entry in seen) >= 0.95 * len(seen)


def test_every_kind_of_mutant_is_counted() -> None:
    counted = {entry["kind"] for model in read_counts().values() for entry in model["mutants"]}
    assert counted == {mutant.kind for form in FORMS.values() for mutant in mutants(form)}


def test_names_of_mutants_are_their_own() -> None:
    for form in FORMS.values():
        names = [mutant.name for mutant in mutants(form)]
        assert len(set(names)) == len(names)
