"""The tables of docs/validation.md, from tools/validation_counts.json (`python -m tests.validation_mutants.measure`)."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

COUNTS: Final = pathlib.Path(__file__).with_name("validation_counts.json")
SEEN: Final = 1e-9  # a smaller difference is float64's own

Entry = Mapping[str, Any]

# Why the changes that no output shows are none.
SAME_FUNCTION: Final = {
    "tokens through int32": "no token is as large as 2^31",
    "result through float64": "the wider type holds every value",
    "mask through uint8": "a mask is 0 or 1",
    "positions in int8": "the table of positions ends at 96",
}


def read_counts() -> dict[str, Any]:
    """What was measured, by the honest model that the others were made from."""
    counts: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return counts


def can_be_seen(entry: Entry) -> bool:
    """Whether an output of the wrong model differs from the honest one's on some input."""
    return float(entry["difference"]) > SEEN


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
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
        [*rows, total],
    )


def _counted(kind: str, entries: list[Entry]) -> tuple[object, ...]:
    seen = [entry for entry in entries if can_be_seen(entry)]
    failed = [entry for entry in seen if entry["cases"]]
    unseen = sum(1 for entry in entries if entry not in seen and entry["cases"])
    by_several = sum(entry["cases"] > 1 for entry in failed)
    return kind, len(entries), len(seen), len(failed), by_several, unseen


def not_seen(counts: Mapping[str, Any]) -> str:
    """The changes that no output shows and that pass, with the reason; KeyError where nobody has given one."""
    names: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for model, found in counts.items():
        for entry in found["mutants"]:
            if not can_be_seen(entry) and not entry["cases"]:
                names[entry["kind"], entry["name"]].append(f"`{model}`")
    rows = ((f"{kind}: {name}", ", ".join(models), SAME_FUNCTION[name]) for (kind, name), models in sorted(names.items()))
    return _table(("change", "of", "why it is none"), rows)


def honest_models(counts: Mapping[str, Any]) -> str:
    """One row for each honest model, and one for all."""
    found = {f"`{name}`": entry["honest"] for name, entry in counts.items()}
    rows = [(name, honest["judged"], honest["passed"], honest["worst"]) for name, honest in found.items()]
    total = ("**all**", *(sum(honest[key] for honest in found.values()) for key in ("judged", "passed")))
    return _table(
        ("honest model", "judged", "passed", "worst error, of its budget"),
        [*rows, (*total, max(honest["worst"] for honest in found.values()))],
    )


def _measured(make: Callable[[Mapping[str, Any]], str]) -> str:
    return make(read_counts())


TABLES: Final[dict[str, Callable[[], str]]] = {
    name: functools.partial(_measured, make)
    for name, make in {
        "wrong models": wrong_models,
        "changes that cannot be seen": not_seen,
        "honest models": honest_models,
    }.items()
}
