"""The tables of docs/validation.md, from tools/validation_counts.json."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

COUNTS: Final = pathlib.Path(__file__).with_name("validation_counts.json")
SEEN: Final = 1e-9  # a smaller difference is float64's own

Entry = Mapping[str, Any]


def _read() -> dict[str, Any]:
    return json.loads(COUNTS.read_text(encoding="utf-8"))


def _table(header: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def _entries(counts: Mapping[str, Any]) -> Iterator[Entry]:
    for model in counts.values():
        yield from model["mutants"]


def wrong_models(counts: Mapping[str, Any]) -> str:
    """One row for each kind of fault, and one for all."""
    by_kind: dict[str, list[Entry]] = collections.defaultdict(list)
    for entry in _entries(counts):
        by_kind[entry["kind"]].append(entry)
    rows = [_counted(kind, entries) for kind, entries in by_kind.items()]
    total = _counted("**all**", list(_entries(counts)))
    return _table(
        ("fault", "wrong models", "can be seen", "failed", "by more than one case", "failed though they cannot be seen"),
        iter([*rows, total]),
    )


def _counted(kind: str, entries: list[Entry]) -> tuple[object, ...]:
    seen = [entry for entry in entries if float(entry["difference"]) > SEEN]
    failed = [entry for entry in seen if entry["cases"]]
    unseen = sum(1 for entry in entries if entry not in seen and entry["cases"])
    return kind, len(entries), len(seen), len(failed), sum(entry["cases"] > 1 for entry in failed), unseen


def not_seen(counts: Mapping[str, Any]) -> str:
    """The changes that no output shows, and that pass."""
    names: dict[str, list[str]] = collections.defaultdict(list)
    for model, found in counts.items():
        for entry in found["mutants"]:
            if float(entry["difference"]) <= SEEN and not entry["cases"]:
                names[f"{entry['kind']}: {entry['name']}"].append(f"`{model}`")
    return _table(("change", "in"), ((name, ", ".join(models)) for name, models in sorted(names.items())))


def honest_models(counts: Mapping[str, Any]) -> str:
    """One row for each honest model."""
    rows = (
        (f"`{name}`", found["honest"]["judged"], found["honest"]["passed"], found["honest"]["worst"])
        for name, found in counts.items()
    )
    return _table(("honest model", "judged", "passed", "worst error, of its budget"), rows)


def _measured(make: Callable[[Mapping[str, Any]], str]) -> str:
    return make(_read())


TABLES: Final[dict[str, Callable[[], str]]] = {
    name: functools.partial(_measured, make)
    for name, make in {
        "wrong models": wrong_models,
        "changes that cannot be seen": not_seen,
        "honest models": honest_models,
    }.items()
}
