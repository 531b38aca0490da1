"""Judges every mutant and every honest model, and keeps the counts that docs/validation.md shows.

    python -m tests.validation_mutants.measure [MODEL ...] [honest] [mutants]    # all: half an hour on one core
    python -m tests.validation_mutants.measure --missing                         # what is not in the file yet

Writes each entry of tools/validation_counts.json as it comes; `python -m tools.generate_docs` makes the tables.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import qknorm_onnx as qk
from tests.validation_mutants.honest_models import FORMS, honest, with_other_weights
from tests.validation_mutants.verdicts import verdicts_of

COUNTS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "validation_counts.json"
SEEDS = 20
DTYPES = ("float32", "float16", "bfloat16")


def honest_counts(name: str, seeds: int = SEEDS) -> dict[str, Any]:
    """How many of `seeds` sets of weights passed in how many types, and how near to its budget the worst output came."""
    passed, worst, failures = 0, 0.0, []
    for seed in range(seeds):
        source = with_other_weights(honest(name), seed)
        report = qk.validate(source.model, source.module, kwargs=source.example.kwargs, dtypes=DTYPES)
        for dtype in DTYPES:
            bad = [row for row in report.of(dtype) if row in report.failures]
            passed += not bad and bool(report.of(dtype))
            failures += [f"seed {seed}, {dtype}, {row.case}, {row.output}: {row.reason}" for row in bad]
        worst = max(worst, *(row.error / row.budget for row in report.rows if row.budget > 0 and row.error == row.error))
    return {"judged": seeds * len(DTYPES), "passed": passed, "worst": round(worst, 2), "failures": failures}


def mutant_counts(name: str) -> list[dict[str, Any]]:
    """One entry for each mutant, without the names of all cases."""
    entries = []
    for verdict in verdicts_of(name):
        entry = dataclasses.asdict(verdict) | {"difference": float(f"{verdict.difference:.1e}"), "cases": len(verdict.cases)}
        entries.append({key: entry[key] for key in ("kind", "name", "difference", "cases")})
    return entries


def main(arguments: list[str]) -> None:
    parts = {"honest": honest_counts, "mutants": mutant_counts}
    names = [argument for argument in arguments if argument in FORMS] or list(FORMS)
    wanted = [argument for argument in arguments if argument in parts] or list(parts)
    for name, part in ((name, part) for name in names for part in wanted):
        if "--missing" not in arguments or part not in _counts().get(name, {}):
            write(name, part, parts[part](name))


def _counts() -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    return counts


def write(name: str, part: str, found: Any) -> None:
    """Put what was found of a model into the file."""
    counts = _counts()
    counts[name] = {**counts.get(name, {}), part: found}
    ordered = {known: counts[known] for known in FORMS if known in counts}
    COUNTS.write_text(json.dumps(ordered, indent=1).replace("Infinity", '"inf"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
