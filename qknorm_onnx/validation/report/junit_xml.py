"""A validation as JUnit XML, which every CI server shows: one suite for each type, one test for each case and output."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from qknorm_onnx.errors import without_controls
from qknorm_onnx.validation.report.parity_row import ParityRow

if TYPE_CHECKING:
    from qknorm_onnx.validation.report.parity_report import ParityReport


def junit_xml(report: ParityReport) -> str:
    """The report as one document. What failed is a failure, what was not run an error, an overflow of PyTorch's too a pass that
    says so. A type without evidence has a failing test of its own, so that the file is red where the report is.
    """
    root = ET.Element("testsuites", name="qknorm-onnx validate")
    for dtype in report.dtypes:
        rows = report.of(dtype)
        bad = [row for row in rows if row.is_bad]
        suite = ET.SubElement(root, "testsuite", name=without_controls(f"{report.about.model or 'model'} in {dtype}"))
        for row in rows:
            _test(suite, row)
        unproven = not bad and not report.has_evidence(dtype)
        if unproven:
            test = ET.SubElement(suite, "testcase", classname=dtype, name="evidence")
            ET.SubElement(test, "failure", message="nothing that counts was compared")
        failures = sum(row.verdict == "failed" for row in bad) + unproven
        suite.attrib |= {
            "tests": str(len(rows) + unproven),
            "failures": str(failures),
            "errors": str(sum(row.verdict == "not run" for row in bad)),
        }
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _test(suite: ET.Element, row: ParityRow) -> None:
    test = ET.SubElement(suite, "testcase", classname=row.dtype, name=without_controls(f"{row.case}: {row.output}"))
    text = without_controls(row.why)
    if row.is_bad:
        kind = "failure" if row.verdict == "failed" else "error"
        element = ET.SubElement(test, kind, message=text or row.verdict)
        element.text = without_controls(_details(row))
    elif text:
        ET.SubElement(test, "system-out").text = text


def _details(row: ParityRow) -> str:
    figures = "" if math.isnan(row.error) else f"error {row.error:.3g}, allowed {row.budget:.3g}"
    where = row.worst.text if row.worst is not None else ""
    fault = f"cause: {row.fault.text}" if row.fault is not None else ""
    purpose = f"tried for {row.purpose}" if row.purpose else ""
    return "; ".join(part for part in (figures, where, fault, purpose) if part)
