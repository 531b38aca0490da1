"""What the GPU check found: tables, bars and notes, for people as Markdown and for programs as JSON."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

Row = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows of text."""

    title: str
    columns: Row
    rows: tuple[Row, ...]

    def markdown(self) -> str:
        """As a section."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure and what it should be: at most or at least `wanted`."""

    name: str
    value: float
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is on the right side; NaN is not."""
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted


@dataclasses.dataclass(kw_only=True)
class Report:
    """Filled step by step; `failures` are wrong results, `notes` what was not done."""

    facts: dict[str, str]
    tables: list[Table] = dataclasses.field(default_factory=list)
    bars: list[Bar] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    matmul: float = 0.0
    copy: float = 0.0

    def table(self, title: str, columns: Row, rows: list[Row]) -> None:
        """One more table."""
        self.tables.append(Table(title=title, columns=columns, rows=tuple(rows)))

    def bar(self, name: str, value: float, wanted: float, *, at_most: bool = False) -> None:
        """One more figure that has to be reached."""
        self.bars.append(Bar(name=name, value=value, wanted=wanted, at_most=at_most))

    def markdown(self) -> str:
        """All of it."""
        parts = ["# GPU check", "\n".join(f"- {name}: {value}" for name, value in self.facts.items())]
        parts += [table.markdown() for table in self.tables]
        if self.bars:
            rows = [
                (bar.name, f"{bar.value:.3f}", f"{'<=' if bar.at_most else '>='} {bar.wanted}", "yes" if bar.met else "NO")
                for bar in self.bars
            ]
            parts.append(Table(title="Bars", columns=("what", "measured", "wanted", "met"), rows=tuple(rows)).markdown())
        for title, lines in (("Notes", self.notes), ("Failures", self.failures)):
            parts += ["\n".join([f"## {title}", "", *(f"- {line}" for line in lines)])] if lines else []
        return "\n\n".join(parts) + "\n"

    def json(self) -> str:
        """The same as one object; figures of tables are texts, as in Markdown."""
        content: dict[str, Any] = {
            "facts": self.facts,
            "tables": [dataclasses.asdict(table) for table in self.tables],
            "bars": [{**dataclasses.asdict(bar), "met": bar.met} for bar in self.bars],
            "matmul_flops_per_second": self.matmul,
            "copy_bytes_per_second": self.copy,
            "notes": self.notes,
            "failures": self.failures,
        }
        return json.dumps(content, indent=1) + "\n"

    def write(self, path: pathlib.Path) -> None:
        """Markdown at `path`, JSON beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.markdown(), encoding="utf-8")
        path.with_suffix(".json").write_text(self.json(), encoding="utf-8")
