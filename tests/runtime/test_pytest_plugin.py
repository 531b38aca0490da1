"""The fixture `assert_parity`: passes, fails in few lines, keeps reports where it is asked to. In use: `tests/examples`."""

from __future__ import annotations

import json

import onnx
import onnx.helper as oh
import pytest
import torch

from qknorm_onnx.validation import pytest_plugin

pytest_plugins = ["qknorm_onnx.validation.pytest_plugin"]
X = {"x": torch.randn(2, 3, generator=torch.Generator().manual_seed(0))}
STEM = "tests-runtime-test_pytest_plugin"


class Double(torch.nn.Module):
    def forward(self, x):
        return x + x


def computes(operator):
    ends = [[oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 3])] for name in ("x", "y")]
    opset = oh.make_opsetid("", 20)
    graph = oh.make_graph([oh.make_node(operator, ["x", "x"], ["y"])], "g", *ends)
    return oh.make_model(graph, ir_version=10, opset_imports=[opset])


def test_the_fixture_passes_and_fails(assert_parity):
    assert assert_parity(computes("Add"), Double(), kwargs=X).passed
    with pytest.raises(pytest.fail.Exception, match="error 1 where") as failure:
        assert_parity(computes("Sub"), Double(), kwargs=X, dtypes=("float32", "float16"), seeds=5)
    lines = str(failure.value).splitlines()
    assert len(lines) == 2 + 5 + 2  # a summary for each type, five failures, how many more there are, and where
    assert lines[-2].endswith("more failures")


def test_reports_of_one_test_are_numbered(request, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "reports"
    monkeypatch.setattr(request.config.option, "qknorm_report", folder, raising=False)
    check = pytest_plugin.assert_parity.__wrapped__(request)
    check(computes("Add"), Double(), kwargs=X)
    with pytest.raises(pytest.fail.Exception, match=r"everything is in .*-2\.json"):
        check(computes("Sub"), Double(), kwargs=X)
    stem = f"{STEM}-test_reports_of_one_test_are_numbered"
    reports = [folder / f"{stem}.json", folder / f"{stem}-2.json"]
    assert sorted(folder.glob("*.json")) == sorted(reports)
    assert [json.loads(path.read_text())["passed"] for path in reports] == [True, False]
    assert "FAILED" in reports[1].with_suffix(".txt").read_text()
