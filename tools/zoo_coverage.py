"""Measures the coverage of the model zoo: writes tools/coverage.json, and from it the tables of docs/coverage.md.

    python -m tools.zoo_coverage [--only ENTRY ...] [--missing] [--seconds N]

Without options every entry is measured anew, one after the other, about ten seconds each. Each row is written as soon as it is
known: `--missing` goes on where a run was ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import ModuleType

from tests import zoo
from tools.coverage_table import Row, cells_of, read_rows, write_rows
from tools.zoo_entry import empty_row, measure


def in_order(zoo: ModuleType, rows: dict[str, Row]) -> list[Row]:
    """The rows of the zoo's entries in its own order; rows of entries that are gone fall away."""
    return [rows[entry] for entry in zoo.ZOO if entry in rows]


def summary(row: Row) -> str:
    """One line for the terminal."""
    failed = [name for name, cell in cells_of(row).items() if cell.verdict == "failed"]
    state = f"refused: {row.refusal}" if row.refusal else f"{row.fused} of {row.fusable} fused"
    return f"{row.entry}: {state}" + (f", failed: {', '.join(failed)}" if failed else "")


def main() -> int:
    """Exit code: 0 all that was asked for is measured, 1 the time was over before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ENTRY", help="measure these entries, keep the other rows")
    parser.add_argument("--missing", action="store_true", help="measure the entries that have no row yet")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no entry after this time")
    options = parser.parse_args()
    rows, start = read_rows(), time.monotonic()
    unknown = sorted(set(options.only or ()) - set(zoo.ZOO))
    if unknown:
        parser.error(f"the zoo has no {', '.join(unknown)}")
    for entry in options.only or list(zoo.ZOO):
        if options.missing and entry in rows:
            continue
        if time.monotonic() - start > options.seconds:
            return 1
        rows[entry] = empty_row(zoo, entry)
        write_rows(in_order(zoo, rows))
        rows[entry] = measure(zoo, entry)
        write_rows(in_order(zoo, rows))
        sys.stdout.write(f"{summary(rows[entry])}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
