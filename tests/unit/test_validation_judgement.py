"""Verdicts without torch: metrics, budgets, what is not finite, evidence, and the report."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from qknorm_onnx.validation.judgement import Measured, judge, own_errors
from qknorm_onnx.validation.measures.error_budget import OTHER_ORDERS, OwnErrors, budget, floor, unit
from qknorm_onnx.validation.measures.metrics import cosine, relative_error, snr_db, top_one
from qknorm_onnx.validation.report.parity_report import ParityReport
from qknorm_onnx.validation.report.parity_row import ParityRow

ROW = ParityRow(dtype="float16", how="native", case="example", output="y", verdict="not run", required=True)
TRUTH = np.linspace(-2.0, 2.0, 24).reshape(2, 3, 4)


def measured(given, *, truth=TRUTH, in_dtype="like truth", in_float32=None):
    own = truth * (1 + 1e-3) if isinstance(in_dtype, str) else in_dtype
    return Measured(
        truth=truth, in_float32=truth * (1 + 1e-7) if in_float32 is None else in_float32, in_dtype=own, given=np.asarray(given)
    )


def with_values(array, values):
    out = array.copy()
    for place, value in values.items():
        out[place] = value
    return out


def test_relative_error_knows_no_excuse():
    assert relative_error(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == 0.5
    assert relative_error(np.array([0.0]), np.array([0.0])) == 0.0
    assert relative_error(np.array([1e-9]), np.array([0.0])) == math.inf
    for bad in (np.nan, np.inf):
        assert relative_error(np.array([1.0, bad]), np.array([1.0, 4.0])) == math.inf
    assert math.isnan(relative_error(np.zeros((0,)), np.zeros((0,))))


def test_the_other_figures():
    a = np.array([3.0, 4.0])
    assert cosine(a, 2 * a) == pytest.approx(1.0)
    assert cosine(a, np.array([4.0, -3.0])) == pytest.approx(0.0)
    assert snr_db(a * 1.1, a) == pytest.approx(20.0)
    assert snr_db(a, a) == math.inf


def test_near_ties_are_told_from_flips():
    truth = np.array([[[10.0, 9.99, 0.0], [10.0, 5.0, 0.0], [1.0, 2.0, 3.0]]])
    given = truth[..., [1, 0, 2]]
    found = top_one(given, truth, allowed=1e-2)
    assert (found.rows, found.agreeing, found.near_ties, found.flips) == (3, 1, 1, 1)
    assert found.agreement == pytest.approx(1 / 3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_budget_is_twice_torch_plus_four_units(dtype):
    assert floor(dtype) == 4 * {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert budget(dtype, torch_error=0.25, float32_error=0.0).allowed == 0.5 + floor(dtype)
    for missing in (None, math.inf, math.nan):
        found = budget(dtype, torch_error=missing, float32_error=1e-6)
        assert found.allowed == pytest.approx(2e-6 * unit(dtype) / 2.0**-23 + floor(dtype))
        assert "scaled" in found.note


def test_within_and_beyond_the_budget():
    assert judge(ROW, measured(TRUTH * (1 + 5e-3)), is_logits=False).verdict == "passed"
    failed = judge(ROW, measured(TRUTH * (1 + 7e-3)), is_logits=False)
    assert failed.verdict == "failed"
    assert failed.reason == "error 0.007 where 0.0059 is allowed"
    assert failed.torch_error == pytest.approx(1e-3)
    assert failed.snr_db == pytest.approx(20 * math.log10(1 / 7e-3))


def own(in_dtype, in_float32=1e-7):
    return OwnErrors(in_dtype=in_dtype, in_float32=in_float32)


def test_of_several_evaluations_the_largest_finite_error_counts():
    assert own(1e-3).with_others([]) == own(1e-3)
    assert own(1e-3).with_others([own(2e-3, 5e-7), own(5e-4), own(None)]) == own(2e-3, 5e-7)
    assert own(1e-3).with_others([own(math.inf, math.nan), own(math.nan, math.inf)]) == own(1e-3), "not finite is no measure"
    assert own(math.inf).with_others([own(1e-3)]).in_dtype == math.inf, "what PyTorch itself gives is not made finite"
    assert own(None).with_others([own(1e-3, 5e-7)]) == own(None, 5e-7)


def test_a_normal_error_rarely_exceeds_twice_the_largest_of_several():
    """The figures that the documentation gives: 30% beyond one draw, 0.6% beyond the largest of nine."""
    draws = np.abs(np.random.default_rng(0).normal(size=(200_000, 2 + OTHER_ORDERS)))
    assert np.mean(draws[:, 0] > 2 * draws[:, 1]) == pytest.approx(2 / math.pi * math.atan(0.5), abs=0.005)
    assert np.mean(draws[:, 0] > 2 * draws[:, 1:].max(1)) == pytest.approx(0.006, abs=0.001)


def test_an_error_beyond_one_run_of_pytorch_is_judged_by_several():
    """A lucky run of PyTorch: 7e-3 is beyond twice its 1e-3, and within twice what it gets in another order."""
    given = measured(TRUTH * (1 + 7e-3))
    alone = judge(ROW, given, is_logits=False)
    assert alone.exceeds
    by_several = judge(ROW, given, is_logits=False, others=[own(4e-3), own(2e-3)])
    assert by_several.verdict == "passed" and not by_several.exceeds
    assert by_several.torch_error == pytest.approx(1e-3)
    assert by_several.budget == pytest.approx(2 * 4e-3 + floor("float16"))
    assert "PyTorch's own error is up to 0.004 with its sums in other orders" in by_several.note
    stays = judge(ROW, given, is_logits=False, others=[own(1.2e-3)])
    assert stays.verdict == "failed"
    assert stays.why == "error 0.007 where 0.0063 is allowed; PyTorch's own error is up to 0.0012 with its sums in other orders"
    assert not judge(ROW, measured(with_values(TRUTH, {(0, 0, 0): np.nan})), is_logits=False, others=[own(9.0)]).exceeds


def test_the_errors_of_one_evaluation_leave_out_what_has_no_truth():
    undefined = with_values(TRUTH, {(0, 0): np.nan})
    found = own_errors(undefined, with_values(TRUTH, {(0, 0): 9.0}) + 0.02, None)
    assert found.in_dtype is None and found.in_float32 == pytest.approx(0.01)
    whole = np.arange(10)
    assert own_errors(whole, whole, whole + (whole > 7)) == own(0.2, 0.0)


def test_nan_where_torch_is_finite_fails():
    for bad in (np.nan, np.inf, -np.inf):
        row = judge(ROW, measured(with_values(TRUTH, {(0, 0, 0): bad})), is_logits=False)
        assert row.verdict == "failed"
        assert "1 of 24 values are not finite where PyTorch's" in row.reason


def test_nan_where_torch_is_nan_too_is_no_pass_and_no_failure():
    bad = with_values(TRUTH, {(0, 0, 0): np.nan})
    row = judge(ROW, measured(bad, in_dtype=bad), is_logits=False)
    assert row.verdict == "overflows in PyTorch too"
    assert not ParityReport(dtypes=("float16",), rows=(row,)).passed
    elsewhere = with_values(TRUTH, {(1, 0, 0): np.nan})
    assert judge(ROW, measured(elsewhere, in_dtype=bad), is_logits=False).verdict == "failed"
    also_wrong = with_values(TRUTH, {(0, 0, 0): np.nan, (1, 1, 1): 9.0})
    assert judge(ROW, measured(also_wrong, in_dtype=bad), is_logits=False).verdict == "failed"


def test_a_candidate_that_is_finite_where_torch_is_nan_is_judged_by_the_truth():
    """B01: eager fp16 is NaN at a zero row; the fused model gives the right numbers, and the report says who is at fault."""
    bad = with_values(TRUTH, {(0, 0, 0): np.nan})
    right = judge(ROW, measured(TRUTH * (1 + 1e-3), in_dtype=bad), is_logits=False)
    assert right.verdict == "passed"
    assert "PyTorch is not finite in float16" in right.note
    assert judge(ROW, measured(with_values(TRUTH, {(0, 0, 0): 5.0}), in_dtype=bad), is_logits=False).verdict == "failed"


def test_rows_without_a_true_value_say_nothing():
    undefined = with_values(TRUTH, {(0, 0): np.nan})
    zeros = with_values(TRUTH, {(0, 0): 0.0})
    row = judge(ROW, measured(zeros, truth=undefined), is_logits=False)
    assert row.verdict == "passed"
    assert "4 values left out: the truth is not finite there" in row.note


@pytest.mark.parametrize("truth", [np.zeros((2, 0, 4)), np.full((2, 3), np.nan)], ids=["empty", "nan"])
def test_a_comparison_of_nothing_fails(truth):
    row = judge(ROW, measured(truth, truth=truth, in_float32=truth), is_logits=False)
    assert row.verdict == "failed"
    assert "nothing was compared" in row.reason


def test_shapes_must_agree():
    assert judge(ROW, measured(TRUTH[:, :2]), is_logits=False).reason == "shape (2, 2, 4) instead of (2, 3, 4)"


def test_a_missing_torch_error_leaves_the_scaled_budget():
    row = judge(ROW, measured(TRUTH * (1 + 3e-3), in_dtype=None), is_logits=False)
    assert row.verdict == "passed"
    assert row.torch_error is None
    assert "does not run in float16" in row.note


def test_integers_are_compared_exactly():
    truth = np.arange(6).reshape(2, 3)
    same = Measured(truth=truth, in_float32=truth, in_dtype=truth, given=truth)
    assert judge(ROW, same, is_logits=False).verdict == "passed"
    other = dataclasses.replace(same, given=truth + (truth == 4))
    assert judge(ROW, other, is_logits=False).verdict == "failed"
    assert judge(ROW, dataclasses.replace(other, in_dtype=truth + (truth == 5)), is_logits=False).verdict == "passed"
    assert judge(ROW, other, is_logits=False).exceeds
    assert judge(ROW, other, is_logits=False, others=[own(0.1)]).verdict == "passed"
    assert judge(ROW, other, is_logits=False, others=[own(0.05)]).verdict == "failed"


def passed_row(**changes):
    return dataclasses.replace(ROW, verdict="passed", error=1e-3, budget=5e-3, torch_error=1e-3, **changes)


def test_a_report_passes_only_with_evidence():
    assert ParityReport(dtypes=("float16",), rows=(passed_row(),)).passed
    assert not ParityReport(dtypes=("float16",), rows=()).passed
    assert not ParityReport(dtypes=(), rows=(passed_row(),)).passed
    assert not ParityReport(dtypes=("float16", "bfloat16"), rows=(passed_row(),)).passed, "bfloat16 was never run"
    assert not ParityReport(dtypes=("float16",), rows=(passed_row(required=False),)).passed, "the example itself is missing"
    for verdict in ("failed", "not run"):
        bad = dataclasses.replace(ROW, case="longer", verdict=verdict, required=False)
        assert not ParityReport(dtypes=("float16",), rows=(passed_row(), bad)).passed
    overflow = passed_row(case="large values", required=False)
    overflow = dataclasses.replace(overflow, verdict="overflows in PyTorch too")
    assert ParityReport(dtypes=("float16",), rows=(passed_row(), overflow)).passed
    never = dataclasses.replace(overflow, output="other")
    assert not ParityReport(dtypes=("float16",), rows=(passed_row(), never)).passed, "no case of this output passed"


def test_zeros_are_no_evidence():
    zeros = judge(dataclasses.replace(ROW, dtype="float32"), measured(0 * TRUTH, truth=0 * TRUTH), is_logits=True)
    assert zeros.verdict == "passed" and zeros.all_zero
    report = ParityReport(dtypes=("float32",), rows=(zeros,))
    assert not report.passed and "nothing that counts" in report.summary()
    numbers = judge(dataclasses.replace(zeros, case="other", required=False), measured(TRUTH), is_logits=True)
    report = ParityReport(dtypes=("float32",), rows=(zeros, numbers))
    assert report.passed and "top-1 6/6" in report.summary() and "nan" not in report.summary()


def test_a_report_says_it_in_words_json_and_a_table():
    bad = dataclasses.replace(ROW, case="zero rows", verdict="failed", error=math.inf, reason="3 values [x] are not finite")
    rows = (passed_row(how="emulated"), bad)
    report = ParityReport(dtypes=("float16",), rows=rows, notes=("a note",))
    assert report.summary() == "float16: 1 of 2 failed; case zero rows, y: 3 values [x] are not finite"
    good = ParityReport(dtypes=("float16",), rows=rows[:1])
    assert good.summary() == "float16: passed (emulated), error 0.001 of 0.005 allowed (example)"
    data = json.loads(report.to_json())
    assert data["passed"] is False
    assert data["rows"][1]["error"] == "inf"
    assert data["rows"][0]["how"] == "emulated"
    console = Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(report)
    text = console.export_text()
    assert "FAILED" in text
    assert "3 values [x] are not finite" in text
    assert "a note" in text


def test_the_floor_imports_without_torch_and_onnxruntime():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['onnxruntime'] = None\n"
        "import qknorm_onnx.validation.validate, qknorm_onnx.proof\n"
        "from qknorm_onnx.errors import InputError\n"
        "try: qknorm_onnx.validation.validate.validate('x.onnx', object())\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "validating needs torch" in done.stdout
