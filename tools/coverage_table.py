"""The measured coverage of the model zoo as values, as JSON, and as the tables of docs/coverage.md."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

MEASURED: Final = pathlib.Path(__file__).with_name("coverage.json")

Verdict = Literal["ok", "failed"]
# Column of the table -> what is compared. The first three judge the whole model, the last one each fused node alone.
PARITY: Final = {
    "fp32": "native kernels in float32",
    "fp16": "native kernels in float16",
    "bf16 emulated": "the whole model, bfloat16 values at operator borders",
    "bf16 nodes": "each fused node alone, native kernel in bfloat16",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison: the error nearest to its allowance, both to one digit, and where it failed the reason."""

    verdict: Verdict
    error: str = ""
    allowed: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """One-token decode with a cache: attentions fused with their cache inside, of how many, and the parity in float32."""

    fused: int
    fusable: int
    parity: Cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One entry. `refusal` is why there is no graph; then nothing else was measured. `plain` attention has no QK norm."""

    entry: str
    form: str
    fusable: int
    refusal: str = ""
    notes: tuple[str, ...] = ()
    fused: int = 0
    plain: int = 0
    missed: tuple[str, ...] = ()
    parity: Mapping[str, Cell] = dataclasses.field(default_factory=dict)
    decode: Decode | None = None
    decode_wanted: bool = False


def error_text(error: float) -> str:
    """An error to one digit, which is what two machines agree on."""
    return f"{error:.0e}"


def read_rows(path: pathlib.Path = MEASURED) -> dict[str, Row]:
    """Rows by entry; none where nothing was measured yet."""
    if not path.is_file():
        return {}
    return {item["entry"]: row_from(item) for item in json.loads(path.read_text(encoding="utf-8"))}


def write_rows(rows: Iterable[Row], path: pathlib.Path = MEASURED) -> None:
    """All rows as JSON."""
    text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def row_from(item: Mapping[str, Any]) -> Row:
    """A row from its JSON."""
    decode = item["decode"]
    return Row(
        **{
            **item,
            "notes": tuple(item["notes"]),
            "missed": tuple(item["missed"]),
            "parity": {name: Cell(**cell) for name, cell in item["parity"].items()},
            "decode": decode and Decode(**{**decode, "parity": Cell(**decode["parity"])}),
        }
    )


def cells_of(row: Row) -> dict[str, Cell]:
    """Every comparison of a row by the name of its column."""
    return {**row.parity, **({"decode": row.decode.parity} if row.decode else {})}


def explained(rows: Iterable[Row], sentences: Mapping[tuple[str, str], str]) -> list[Row]:
    """The rows with what is known of their failures; `sentences` by entry and column."""

    def told(row: Row, name: str, cell: Cell) -> Cell:
        sentence = sentences.get((row.entry, name))
        return dataclasses.replace(cell, reason=f"{cell.reason}: {sentence}") if sentence else cell

    found = []
    for row in rows:
        parity = {name: told(row, name, cell) for name, cell in row.parity.items()}
        decode = row.decode and dataclasses.replace(row.decode, parity=told(row, "decode", row.decode.parity))
        found.append(dataclasses.replace(row, parity=parity, decode=decode))
    return found


def entries(rows: Sequence[Row]) -> str:
    """One line per entry."""
    header = ("entry", "norm, over, where, rotary, scale, mask", "export", "fused", *PARITY, "decode with a cache")
    return _table(header, (_entry_cells(row) for row in rows))


def _entry_cells(row: Row) -> list[str]:
    if row.refusal:
        return [f"`{row.entry}`", row.form, "refused", f"0 of {row.fusable}", *["-"] * (len(PARITY) + 1)]
    left = [f"{row.plain} plain"] * bool(row.plain) + [f"{len(row.missed)} declined"] * bool(row.missed)
    return [
        f"`{row.entry}`",
        row.form,
        "mended" if row.notes else "ok",
        ", ".join([f"{row.fused} of {row.fusable}", *left]),
        *(_cell(row.parity.get(name)) for name in PARITY),
        _decode_cell(row),
    ]


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    figures = f"{cell.error} of {cell.allowed}" if cell.error else ""
    return figures if cell.verdict == "ok" else f"**failed** {figures}".rstrip()


def _decode_cell(row: Row) -> str:
    if row.decode is None:
        return "**failed**" if row.decode_wanted else "-"
    return f"{row.decode.fused} of {row.decode.fusable}, {_cell(row.decode.parity)}"


def failures(rows: Sequence[Row]) -> str:
    """Every failed comparison and every refused export, with its reason."""
    found = [(row.entry, "export", row.refusal) for row in rows if row.refusal]
    found += [(row.entry, name, cell.reason) for row in rows for name, cell in cells_of(row).items() if cell.verdict == "failed"]
    return _table(("entry", "what", "reason"), ([f"`{entry}`", what, reason] for entry, what, reason in found))


def missed(rows: Sequence[Row]) -> str:
    """Attention that was declined or refused, with the sentence of the report."""
    return _table(("entry", "reason"), ([f"`{row.entry}`", reason] for row in rows for reason in dict.fromkeys(row.missed)))


def mended(rows: Sequence[Row]) -> str:
    """What `export` did by itself to make a module exportable."""
    by_note: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            by_note.setdefault(note, []).append(f"`{row.entry}`")
    return _table(("what was done", "entries"), ([note, ", ".join(names)] for note, names in by_note.items()))


def totals(rows: Sequence[Row]) -> str:
    """The counts of the table above."""
    exported = [row for row in rows if not row.refusal]
    fused, reachable = sum(row.fused for row in rows), sum(row.fusable for row in exported)
    fusable = sum(row.fusable for row in rows)
    lines = [
        ["entries exported", f"{len(exported)} of {len(rows)}"],
        ["fusable attentions fused, of all entries", _share(fused, fusable)],
        ["fusable attentions fused, of the exported entries", _share(fused, reachable)],
        ["attentions without QK norm, left as they are", str(sum(row.plain for row in rows))],
        ["attentions declined with a reason", str(sum(len(row.missed) for row in rows))],
    ]
    lines += [[f"{name} ({what})", _passed(rows, name)] for name, what in PARITY.items()]
    wanted = [row for row in rows if row.decode_wanted and row.fusable]
    decoding = [row.decode for row in wanted if row.decode is not None]
    cached, good = sum(decode.fused for decode in decoding), sum(decode.parity.verdict == "ok" for decode in decoding)
    lines.append(["attentions fused with a plain cache inside", _share(cached, sum(row.fusable for row in wanted))])
    lines.append(["decode with that cache (native kernels in float32)", f"{good} of {len(wanted)}"])
    return _table(("what", "count"), lines)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f}%)" if whole else "0 of 0"


def _passed(rows: Sequence[Row], name: str) -> str:
    cells = [row.parity[name] for row in rows if name in row.parity]
    return f"{sum(cell.verdict == 'ok' for cell in cells)} of {len(cells)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, *(body or ["| " + " | ".join(["none", *[""] * (len(header) - 1)]) + " |"])])


TABLES: Final[dict[str, Callable[[Sequence[Row]], str]]] = {
    "coverage by entry": entries,
    "what failed": failures,
    "attention that is not fused": missed,
    "mended exports": mended,
    "coverage counted": totals,
}
