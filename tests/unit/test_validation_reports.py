"""What people read of a validation: 80 columns, a reason once, pages without a network, JUnit as red as the report."""

from __future__ import annotations

import html
import html.parser
import io
import math
import shutil
import subprocess
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

from qknorm_onnx.validation.inside.module_results import ModuleResult, first_difference
from qknorm_onnx.validation.measures.fingerprint import fingerprint
from qknorm_onnx.validation.report.about import About
from qknorm_onnx.validation.report.failure_groups import failure_groups
from qknorm_onnx.validation.report.fault import Fault
from qknorm_onnx.validation.report.parity_report import ParityReport
from qknorm_onnx.validation.report.parity_row import ParityRow, WorstValue
from qknorm_onnx.validation.report.ranges import LogitRange, ValueRange, first_beyond, range_table

RANDOM = np.random.default_rng(0)


def row(case: str, error: float, *, output: str = "logits", dtype: str = "float32", **more: object) -> ParityRow:
    bad = error > 1e-6
    values = {
        "verdict": "failed" if bad else "passed",
        "reason": f"error {error:.2g} where 1e-06 is allowed" if bad else "",
        "torch_error": 3e-7,
        "budget": 1e-6,
        "required": case == "example",
        **more,
    }
    return ParityRow(dtype=dtype, how="native", case=case, output=output, error=error, **values)


def value_range(node: str, op_type: str, **figures: float) -> ValueRange:
    is_attention = op_type == "QKNormAttention"
    return ValueRange(dtype="float32", node=node, op_type=op_type, is_attention=is_attention, lost=0, **figures)


def failing(count: int = 30) -> ParityReport:
    fault = Fault(kind="meaning", text="right up to the result of layers.3.v_proj, off by 0.05 from that of layers.3.o_proj on")
    rows = [row("example", 0.05, fault=fault, purpose="what the module was called with")]
    rows += [row(f"case {number}", 0.01 * number, purpose="values built in") for number in range(2, count)]
    rows += [row("worst <of> all", 0.9, worst=WorstValue(index=(0, 3), given=1.25, exact=1.5)), row("fine", 2e-7)]
    ranges = (
        value_range("a", "Add", largest=7e4, smallest=1e-3, error=1e-7),
        value_range("b", "QKNormAttention", largest=2.0, smallest=1e-5, error=2e-7),
        value_range("z", "Sub", largest=0.0, smallest=math.inf, error=math.nan),
    )
    about = About(model="a<b>.onnx", source="hf", command="qknorm-onnx validate", seeds=1, attention={"b": "rms"})
    logits = (LogitRange(name="b", lowest=-3.0, highest=4.0),)
    return ParityReport(dtypes=("float32",), rows=tuple(rows), notes=("note & more",), about=about, ranges=ranges, logits=logits)


def printed(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def test_a_failing_table_at_80_columns_says_each_reason_once():
    text = printed(failing())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 31 + 40, "one line for each case, and one paragraph"
    assert text.count("is allowed") == 1
    assert "failed on 30 cases, logits" in text
    assert "worst at [0, 3]: 1.25 instead of 1.5" in " ".join(text.split())
    assert "and 18 more" in " ".join(text.split())
    assert "note & more" in text


def test_reasons_that_differ_in_numbers_are_one_group_and_others_are_not():
    rows = [row("a", 0.1), row("b", 0.2), row("c", 1.0, reason="shape (1, 2) instead of (2, 2)", verdict="failed")]
    rows += [row("d", math.nan, verdict="not run", reason="no kernel"), row("e", 0.3, dtype="float16"), row("f", 1e-8)]
    groups = failure_groups(rows)
    assert [group.cases for group in groups] == [("b", "a"), ("c",), ("d",), ("e",)]


def test_a_note_of_a_row_that_passed_is_printed_once():
    noted = [row(f"case {number}", 1e-7, note="PyTorch is not finite in float16") for number in range(5)]
    text = printed(ParityReport(dtypes=("float32",), rows=(row("example", 1e-7), *noted)))
    assert text.count("PyTorch is not finite") == 1
    assert "case 0; case 1; case 2 and 2 more" in text


def test_markup_and_control_characters_of_a_name_are_text():
    report = ParityReport(dtypes=("float32",), rows=(row("[red]x[/red]", 0.5, output="[bold]\x1b[31m"),))
    assert "[red]x[/red]" in printed(report)
    assert ET.fromstring(report.to_junit_xml()) is not None
    assert "\x1b" not in report.to_junit_xml()


def test_junit_is_red_where_the_report_is():
    root = ET.fromstring(failing().to_junit_xml())
    (suite,) = root
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("31", "30", "0")
    assert suite.find("testcase/failure") is not None
    assert "cause: right up to" in (suite.find("testcase/failure").text or "")
    unproven = ParityReport(dtypes=("float32", "float16"), rows=(row("example", 1e-7),))
    assert not unproven.passed
    (_, empty) = ET.fromstring(unproven.to_junit_xml())
    assert (empty.get("tests"), empty.get("failures")) == ("1", "1")
    not_run = ParityReport(dtypes=("float32",), rows=(row("example", math.nan, verdict="not run", reason="why"),))
    (suite,) = ET.fromstring(not_run.to_junit_xml())
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
    assert suite.find("testcase/error").get("message") == "why"


class Page(html.parser.HTMLParser):
    """Counts what a page holds, and what it would fetch; every element must be closed."""

    VOID = ("meta", "line", "circle", "link", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID or (tag in ("line", "circle") and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing():
    text = failing().to_html()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert "script" not in page.counts
    assert page.counts["svg"] == 4, "errors, errors over depth, values, logits"
    assert "a&lt;b&gt;.onnx" in text and "worst &lt;of&gt; all" in text
    assert "note &amp; more" in text
    for part in ("failed on 30 cases", "right up to the result", "1 further case", "qknorm-onnx validate"):
        assert part in text


def test_a_page_of_a_report_with_nothing_but_a_row():
    page = Page()
    bare = ParityRow(dtype="float32", how="", case="all", output="all", verdict="not run", reason="no runtime")
    page.feed(ParityReport(dtypes=("float32",), rows=(bare,)).to_html())
    assert page.open == []
    assert "svg" not in page.counts


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_the_page(tmp_path, width):
    """Needs `chromium` (in Debian's package of that name)."""
    browser = shutil.which("chromium")
    assert browser, "install chromium to open the page"
    (tmp_path / "report.html").write_text(failing().to_html(), encoding="utf-8")
    # A frame may be narrower than the narrowest window.
    script = "document.title = frames[0].document.documentElement.scrollWidth"
    frame = f'<iframe width="{width}" style="border: 0" onload="{script}" srcdoc="{html.escape(failing().to_html())}"></iframe>'
    (tmp_path / "measured.html").write_text(f"<title></title>{frame}", encoding="utf-8")
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},2000",
        f"--user-data-dir={tmp_path}/profile",
    ]
    run = subprocess.run(
        [browser, *flags, "--dump-dom", (tmp_path / "measured.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = run.stdout.partition("<title>")[2].partition("</title>")[0]
    assert int(title) <= width, "the page does not scroll sideways"
    picture = tmp_path / "report.png"
    subprocess.run([browser, *flags, f"--screenshot={picture}", (tmp_path / "report.html").as_uri()], timeout=120, check=True)
    assert picture.stat().st_size > 20_000


def test_the_first_value_beyond_a_type_is_named():
    report = failing()
    assert first_beyond(report.ranges, "float16").node == "a"
    assert first_beyond(report.ranges, "bfloat16") is None
    text = " ".join(printed(range_table(report.ranges, report.logits)).split())
    assert "float16 overflows first in Add a: 7e+04" in text
    assert "-3 to 4" in text
    assert "float16 holds every value" in " ".join(printed(range_table(report.ranges[1:], ())).split())
    assert "no float value inside" in printed(range_table((), ()))


def test_fingerprints_see_values_and_not_their_order():
    x = RANDOM.standard_normal((3, 5, 7))
    assert fingerprint(x).equals(fingerprint(x.transpose(2, 0, 1)))
    assert fingerprint(x).equals(fingerprint(x * (1 + 1e-12)))
    changed = x.copy()
    changed[0, 0, 0] += 1e-3
    for other in (changed, -x, x[:2], x * 1.0001):
        assert not fingerprint(x).equals(fingerprint(other))
    huge = x * 1e200
    assert all(map(math.isfinite, fingerprint(huge).moments)) and fingerprint(huge).equals(fingerprint(huge.T))
    assert not fingerprint(np.zeros(4)).tells and not fingerprint(np.full((2, 2), np.nan)).tells
    assert not fingerprint(np.zeros((0, 3))).tells


def results(*names: str) -> tuple[list[ModuleResult], dict[str, object]]:
    found = [ModuleResult(name=name, value=fingerprint(RANDOM.standard_normal(40))) for name in names]
    return found, {result.name: result.value for result in found}


def test_the_first_part_that_should_be_there_and_is_not():
    """The norms inside a fused attention are in no layer: their absence says nothing, that of the projection behind does."""
    parts = ("q", "q_norm", "k", "k_norm", "v", "o", "")
    names = [f"layers.{layer}.{part}".rstrip(".") for layer in range(3) for part in parts]
    found, by_name = results(*names, "head", "")
    fused = {name: value for name, value in by_name.items() if "norm" not in name}
    assert first_difference(found, list(fused.values())) is None
    wrong_from = names.index("layers.1.o")
    right = [value for name, value in fused.items() if name in names[:wrong_from]]
    difference = first_difference(found, right)
    assert (difference.last_right, difference.first_wrong) == ("layers.1.v", "layers.1.o")
    assert difference.suspects == ("layers.1.q_norm", "layers.1.k_norm", "layers.1.o")
    beside = [*right, fused["head"]]
    assert first_difference(found, beside).first_wrong == "layers.1.o", "what does not hang on it is right all the same"
    assert first_difference(found, [value for name, value in fused.items() if name]).first_wrong == "the module itself"
    without_a_block = [value for name, value in fused.items() if name != "layers.1"]
    assert first_difference(found, without_a_block) is None, "what is around it is right"
    assert first_difference(found, []) is None, "nothing is known of a graph that has no part's result"
    assert first_difference([], right) is None
    in_first = first_difference(found, [fused["layers.0.q"]])
    assert (in_first.last_right, in_first.first_wrong) == ("layers.0.q", "layers.0"), "no layer says whether its k is to be there"
