"""Options of `qknorm-onnx validate`: files that it writes, inputs that it reads, lists, and what it refuses at once."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from qknorm_onnx.cli.stage_progress import StageProgress

SOURCE = "tests.cli.article_source:article"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exported once: an article's model, and how SOURCE is spelled."""
    from qknorm_onnx.cli.main import run

    out = tmp_path_factory.mktemp("exported") / "article.onnx"
    assert run(["export", SOURCE, str(out)]) == 0
    return out


def example_of(path) -> dict[str, np.ndarray]:
    import onnx

    from tests.cli.article_source import article

    names = [value.name for value in onnx.load(path).graph.input]
    _, args = article()[:2]
    return dict(zip(names, (tensor.numpy() for tensor in args), strict=True))


def test_pages_and_junit_are_written(command, exported, tmp_path):
    page, junit = tmp_path / "report.html", tmp_path / "report.xml"
    outcome = command("validate", exported, SOURCE, "--html", page, "--junit-xml", junit, "--seeds", 0)
    assert outcome.code == 0, outcome.err
    assert "Values inside" in page.read_text(encoding="utf-8")
    assert ET.parse(junit).getroot()[0].get("failures") == "0"
    for option in ("--html", "--junit-xml"):
        refused = command("validate", exported, SOURCE, option, tmp_path / "none" / "x")
        assert refused.code == 2 and "in a folder that exists" in refused.err


def test_ranges_are_printed(command, exported):
    outcome = command("validate", exported, SOURCE, "--range-report", "--seeds", 0)
    assert outcome.code == 0
    assert "float16 holds every value" in " ".join(outcome.out.split())


def test_inputs_from_a_file(command, exported, tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, **example_of(exported))
    outcome = command("validate", exported, SOURCE, "--inputs", path, "--json")
    assert outcome.code == 0, outcome.err
    assert {row["case"] for row in json.loads(outcome.out)["rows"]} - {"tables", "specs"} == {"mine.npz"}
    np.savez(path, other=np.zeros(3))
    refused = command("validate", exported, SOURCE, "--inputs", path)
    assert refused.code == 2 and "gives other, which it does not take" in refused.err
    path.write_bytes(b"no archive")
    refused = command("validate", exported, SOURCE, "--inputs", path)
    assert refused.code == 2 and "no .npz file" in refused.err
    refused = command("validate", exported, SOURCE, "--inputs", tmp_path / "none.npz")
    assert refused.code == 2 and "no such file" in refused.err


def test_a_broken_model_is_refused_before_the_module_is_loaded(command, tmp_path, monkeypatch):
    from qknorm_onnx.cli import validate_command

    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x08\x07garbage")
    monkeypatch.setattr(validate_command, "load", lambda *_args, **_options: pytest.fail("the module was loaded"))
    outcome = command("validate", broken, SOURCE)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1


def test_a_forgotten_with_past_is_named(command, tmp_path):
    import onnx

    folder = tmp_path / "hf"
    folder.mkdir()
    values = [
        onnx.helper.make_tensor_value_info(name, 1, [2]) for name in ("x", "past_key_values.0.key", "past_key_values.0.value")
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "g", values, [onnx.helper.make_tensor_value_info("y", 1, [2])]
    )
    path = tmp_path / "with_past.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)
    outcome = command("validate", path, folder)
    assert outcome.code == 2
    assert "past_key_values.0.key and 1 more" in outcome.err and "--with-past" in outcome.err


def test_a_list_is_judged_side_by_side(command, exported, tmp_path):
    (tmp_path / "models.yaml").write_text(
        f'- {{model: "{exported}", source: "{SOURCE}", seeds: 0}}\n- {{model: none.onnx, source: "{SOURCE}", fail-fast: true}}\n',
        encoding="utf-8",
    )
    outcome = command("validate", tmp_path / "models.yaml", "--jobs", 2, "--junit-xml", tmp_path / "xml", "--json")
    assert outcome.code == 2, outcome.err
    found = json.loads(outcome.out)
    assert not found["passed"]
    by_code = {item["exit_code"]: item["summary"] for item in found["models"]}
    assert by_code[0].startswith("float32: passed")
    assert "no such file" in by_code[2]
    assert [path.name for path in (tmp_path / "xml").iterdir()] == ["article.xml"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no list of models"),
        ("model: m.onnx", "holds no list of models"),
        ("- m.onnx", "entry 1: is 'm.onnx'"),
        ("- {model: m.onnx}", "entry 1: has no source"),
        ("- {source: s}", "entry 1: has no model"),
        ("- {model: m.onnx, source: s, dtype: float32}", "entry 1: unknown dtype"),
        ("- {model: m.onnx, source: s, seeds: many}", "seeds is 'many'"),
        ("- {model: m.onnx, source: s, seeds: true}", "seeds is True"),
        ("- {model: [1], source: s}", "entry 1: has no model"),
        ("- {model: 'm.onnx", "cannot be read as YAML"),
        ("- !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    ],
)
def test_a_bad_list_is_refused_in_one_line(command, tmp_path, text, said):
    path = tmp_path / "models.yml"
    path.write_text(text, encoding="utf-8")
    outcome = command("validate", path)
    assert outcome.code == 2
    assert said in outcome.err and outcome.err.count("\n") == 1


def test_a_list_takes_no_source_and_a_model_needs_one(command, tmp_path, fused_file):
    (tmp_path / "models.yaml").write_text("- {model: m, source: s}", encoding="utf-8")
    assert "leave here out" in command("validate", tmp_path / "models.yaml", "here").err
    assert "Missing argument 'SOURCE'" in command("validate", fused_file).err
    assert "no such file" in command("validate", tmp_path / "none.yaml").err


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with StageProgress(None) as progress:
        for stage, seconds in (("first", 1), ("second", 11), ("third", 1), ("fourth", 30)):
            now[0] += seconds
            progress(stage)
    assert capsys.readouterr().err.splitlines() == ["12 s: second", "43 s: fourth"]
    with StageProgress(None, enabled=False) as progress:
        now[0] += 100
        progress("silent")
    assert capsys.readouterr().err == ""
