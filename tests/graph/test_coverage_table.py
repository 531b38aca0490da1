"""docs/coverage.md: a row for every entry, counts that agree with the rows, and rows that a new measurement gives again."""

from __future__ import annotations

import re

import pytest

from tools import coverage_table
from tools.coverage_table import PARITY, Row, cells_of, read_rows
from tools.zoo_entry import measure
from tools.zoo_facts import KNOWN_FAILURES, LOOK_ALIKES, NOT_EXPORTED, facts

QUICK = ["h_rms_perhead_gqa", "h_dynamic_tanh"]
FUSED_BAR = 0.95


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return read_rows()


@pytest.fixture(scope="module")
def document(repo_root) -> str:
    return (repo_root / "docs" / "coverage.md").read_text(encoding="utf-8")


def test_every_entry_has_a_row(zoo, rows, document):
    assert list(rows) == list(zoo.ZOO)
    for entry in zoo.ZOO:
        assert document.count(f"\n| `{entry}` | {rows[entry].form}") == 1


def test_rows_agree_with_what_is_known_of_the_entries(rows):
    for entry, row in rows.items():
        expected = facts(entry)
        assert row.fusable == expected.fusable
        assert bool(row.refusal) == (entry in NOT_EXPORTED), row.refusal
        if not row.refusal:
            declined = expected.look_alikes + expected.unread
            assert (row.fused, row.plain, len(row.missed)) == (expected.fusable - expected.unread, expected.plain, declined)
            assert set(row.parity) == set(PARITY) - (set() if row.fused else {"bf16 nodes"})
            assert (row.decode is not None) == row.decode_wanted


def test_the_bars_hold(rows):
    measured = rows.values()
    assert sum(row.fused for row in measured) >= FUSED_BAR * sum(row.fusable for row in measured)
    decoding = [row for row in measured if row.decode_wanted and row.entry not in LOOK_ALIKES]
    assert decoding and all(row.decode is not None and row.decode.fused == row.decode.fusable for row in decoding)


def test_what_fails_is_known_and_explained(rows):
    failed = {(row.entry, name) for row in rows.values() for name, cell in cells_of(row).items() if cell.verdict == "failed"}
    assert failed == set(KNOWN_FAILURES)
    assert "bf16 nodes" not in {name for _, name in failed}


def test_the_totals_are_those_of_the_table(document):
    lines = [line.split(" | ") for line in document.splitlines() if re.match(r"\| `\w+` \| .* of ", line)]
    table = {line[0]: line for line in lines if len(line) > len(PARITY) + 3}
    fused = [re.match(r"(\d+) of (\d+)", line[3]) for line in table.values()]
    assert all(fused)
    counted = sum(int(match[1]) for match in fused), sum(int(match[2]) for match in fused)
    assert f"| fusable attentions fused, of all entries | {counted[0]} of {counted[1]} (" in document
    assert f"| entries exported | {sum(line[2] != 'refused' for line in table.values())} of {len(table)} |" in document
    for column, (name, what) in enumerate(PARITY.items(), start=4):
        cells = [line[column] for line in table.values() if line[column] != "-"]
        passed = sum("failed" not in cell for cell in cells)
        assert f"| {name} ({what}) | {passed} of {len(cells)} |" in document


def test_each_failure_has_its_sentence(rows, document):
    failed = [(row.entry, name) for row in rows.values() for name, cell in cells_of(row).items() if cell.verdict == "failed"]
    for entry, name in failed:
        assert re.search(rf"^\| `{entry}` \| {name} \| .{{10,}} \|$", document, flags=re.MULTILINE)
    assert document.count("**failed**") == len(failed)


def verdicts(row: Row) -> dict[str, object]:
    """What does not depend on the machine: a known failure lies so near to a decision that it may pass elsewhere."""
    cells = {name: cell.verdict for name, cell in cells_of(row).items() if (row.entry, name) not in KNOWN_FAILURES}
    decode = row.decode and (row.decode.fused, row.decode.fusable)
    known = {"fused": row.fused, "plain": row.plain, "missed": row.missed, "notes": row.notes, "form": row.form}
    return {**known, **cells, "decode counts": decode, "exported": not row.refusal}


@pytest.mark.parametrize("entry", QUICK)
def test_a_new_measurement_gives_the_same_row(zoo, rows, entry):
    assert verdicts(measure(zoo, entry)) == verdicts(rows[entry])


@pytest.mark.slow
def test_new_measurements_give_the_same_rows(zoo, rows, subtests):
    for entry in zoo.ZOO:
        with subtests.test(entry):
            assert verdicts(measure(zoo, entry)) == verdicts(rows[entry])


def test_a_failure_is_shown_and_counted():
    bad = coverage_table.Cell(
        verdict="failed", error="5e-01", allowed="1e-06", reason="example: error 0.5 where 1e-06 is allowed"
    )
    row = Row(entry="model", form="rms", fusable=2, fused=1, missed=("why not",), parity={"fp32": bad}, decode_wanted=True)
    assert "| **failed** 5e-01 of 1e-06 |" in coverage_table.entries([row])
    assert "| `model` | fp32 | example: error 0.5 where 1e-06 is allowed |" in coverage_table.failures([row])
    assert "| `model` | why not |" in coverage_table.missed([row])
    totals = coverage_table.totals([row])
    assert "| fusable attentions fused, of all entries | 1 of 2 (50.0%) |" in totals
    assert "native kernels in float32) | 0 of 1 |" in totals
    assert "| attentions fused with a plain cache inside | 0 of 2 (0.0%) |" in totals
    assert "| decode with that cache (native kernels in float32) | 0 of 1 |" in totals
