"""A pytest fixture for exported models: `def test_export(assert_parity): assert_parity("model.onnx", module, args)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from qknorm_onnx.validation.parity_report import ParityReport


@pytest.fixture(scope="session")
def assert_parity() -> Callable[..., ParityReport]:
    """A function with the arguments of `qknorm_onnx.validate` that fails the test unless the report passed, and returns it."""

    def check(*args: Any, **kwargs: Any) -> ParityReport:
        from qknorm_onnx.validation.validate import validate

        report = validate(*args, **kwargs)
        if not report.passed:
            pytest.fail(_text(report), pytrace=False)
        return report

    return check


def _text(report: ParityReport) -> str:
    lines = [report.summary()]
    for row in report.failures:
        fault = f"; {row.fault.text}" if row.fault is not None else ""
        lines.append(f"{row.dtype} ({row.how}), case {row.case}, output {row.output}: {row.reason}{fault}")
    return "\n".join(lines)
