"""A validation as one page of HTML that needs nothing else: no script, no network, its charts drawn in place."""

from __future__ import annotations

import importlib.resources
import math
from typing import TYPE_CHECKING, Any

from qknorm_onnx.errors import InputError
from qknorm_onnx.validation.report import charts
from qknorm_onnx.validation.report.failure_groups import failure_groups
from qknorm_onnx.validation.report.parity_row import ParityRow, worst_of_each_case

if TYPE_CHECKING:
    from qknorm_onnx.validation.report.parity_report import ParityReport


def html_page(report: ParityReport) -> str:
    """The page. Raises InputError where jinja2, which PyTorch brings along, is missing."""
    try:
        import jinja2
    except ImportError as error:
        raise InputError("the page of a report needs jinja2; run: pip install jinja2") from error
    source = importlib.resources.files("qknorm_onnx.validation.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(source).render(**_values(report))
    return page


def _values(report: ParityReport) -> dict[str, Any]:
    worst = {(row.dtype, row.case): row for row in worst_of_each_case(report.rows)}
    cases = list(dict.fromkeys(row.case for row in report.rows))
    return {
        "report": report,
        "about": report.about,
        "summaries": [(dtype, report.summary_of(dtype)) for dtype in report.dtypes],
        "matrix": [(case, [_cell(worst.get((dtype, case))) for dtype in report.dtypes]) for case in cases],
        "groups": failure_groups(report.rows),
        "charts": list(_charts(report)),
        "size": {"width": charts.WIDTH, "height": charts.HEIGHT, "left": charts.LEFT, "right": charts.WIDTH - charts.RIGHT},
    }


def _charts(report: ParityReport) -> list[charts.Chart]:
    found = [charts.error_chart(report.of(dtype), dtype) for dtype in report.dtypes]
    found += [charts.depth_chart([item for item in report.ranges if item.dtype == dtype], dtype) for dtype in report.dtypes]
    of_first = [item for item in report.ranges if item.dtype == report.dtypes[0]]
    found += [charts.range_chart(of_first), charts.logit_chart(report.logits)]
    return [chart for chart in found if chart is not None]


def _cell(row: ParityRow | None) -> dict[str, str]:
    """What the matrix shows of one case in one type."""
    if row is None:
        return {"kind": "none", "text": "", "title": "not tried in this type"}
    share = row.error / row.budget if row.budget > 0 and not math.isnan(row.error) else math.nan
    said = {"passed": "passed", "failed": "failed", "not run": "not run", "overflows in PyTorch too": "overflows"}[row.verdict]
    figure = "" if math.isnan(share) else f"{share:.2f}" if share < 100 else f"{share:.0e}"
    return {
        "kind": said.replace(" ", "-"),
        "text": f"{said} {figure}".strip(),
        "title": f"{row.output}: {row.why or row.verdict}",
    }
