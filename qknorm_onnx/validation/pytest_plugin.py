"""A pytest fixture for exported models: `def test_export(assert_parity): assert_parity("model.onnx", module, args)`.

`pytest --qknorm-report FOLDER` keeps what every call found there, passed or not: `NAME.json`, `NAME.html` and
`NAME.txt`, named by the test.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from qknorm_onnx.validation.report.parity_report import ParityReport

_SHOWN_FAILURES = 5
_OPTION = "--qknorm-report"
_PAGE_WIDTH = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that keeps reports."""
    text = "folder for what assert_parity finds, as JSON, as a page and as a table; made where it is missing"
    parser.getgroup("qknorm-onnx").addoption(_OPTION, metavar="FOLDER", type=Path, default=None, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Raises UsageError, before any test runs, where the option names something that is no folder."""
    folder = _folder_of(config)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise pytest.UsageError(f"{_OPTION} {folder}: this is a file; give a folder")


@pytest.fixture(scope="session")
def assert_parity(request: pytest.FixtureRequest) -> Callable[..., ParityReport]:
    """A function with the arguments of `qknorm_onnx.validate` that fails the test unless the report passed, and returns it."""
    folder = _folder_of(request.config)
    written: collections.Counter[str] = collections.Counter()

    def check(*args: Any, **kwargs: Any) -> ParityReport:
        from qknorm_onnx.validation.validate import validate

        report = validate(*args, **kwargs)
        kept = None if folder is None else _keep(report, folder, written)
        if not report.passed:
            pytest.fail(_text(report, kept), pytrace=False)
        return report

    return check


def _folder_of(config: pytest.Config) -> Path | None:
    """None also where the plugin was loaded too late for an option, by `pytest_plugins` of a test."""
    folder = config.getoption(_OPTION, default=None)
    return folder if isinstance(folder, Path) else None


def _keep(report: ParityReport, folder: Path, written: collections.Counter[str]) -> Path:
    """Write the report under the name of the running test, and return the path of its JSON; further calls of it are numbered."""
    from rich.console import Console

    test = os.environ.get("PYTEST_CURRENT_TEST", "outside a test").rpartition(" (")[0]
    name = re.sub(r"[^\w.-]+", "-", test.replace(".py::", "-")).strip("-") or "outside-a-test"
    written[name] += 1
    if written[name] > 1:
        name = f"{name}-{written[name]}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(report.to_json() + "\n", encoding="utf-8")
    (folder / f"{name}.html").write_text(report.to_html(), encoding="utf-8")
    with (folder / f"{name}.txt").open("w", encoding="utf-8") as text:
        console = Console(file=text, width=_PAGE_WIDTH, color_system=None)
        console.print(report)
        console.print(report.summary(), highlight=False, markup=False)
    return path


def _text(report: ParityReport, kept: Path | None) -> str:
    """The first failures in one line each, and where all of them are."""
    lines = [report.summary()]
    for row in report.failures[:_SHOWN_FAILURES]:
        fault = f"; {row.fault.text}" if row.fault is not None else ""
        lines.append(f"{row.dtype} ({row.how}), case {row.case}, output {row.output}: {row.why}{fault}")
    more = len(report.failures) - _SHOWN_FAILURES
    if more > 0:
        lines.append(f"and {more} more failures")
    lines.append(f"everything is in {kept}" if kept is not None else f"pytest {_OPTION} FOLDER keeps every case")
    return "\n".join(lines)
