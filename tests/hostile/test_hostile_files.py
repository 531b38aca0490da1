"""Hostile files end in one line at every door, quickly; odd files that are right pass and keep what they compute."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.soundness.guard import UNEXPECTED
from qknorm_onnx.inspection import inspect_model
from qknorm_onnx.runtime.placement import node_placements
from tests.hostile.hostile_files import FOREIGN, HOSTILE, ODD

SECONDS_TO_REFUSE = 10.0

DOORS = {"fuse": qk.fuse, "inspect": inspect_model, "create_session": qk.create_session, "placement": node_placements}


def test_there_are_enough_of_them():
    assert len(HOSTILE) >= 150


@pytest.mark.parametrize("name", HOSTILE)
def test_is_refused_in_one_line_by_every_door(tmp_path, name):
    path = HOSTILE[name](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for door, call in DOORS.items():
        began = time.perf_counter()
        with pytest.raises(InputError) as refused:
            call(path)
        assert time.perf_counter() - began < SECONDS_TO_REFUSE, door
        message = str(refused.value)
        assert message.isprintable(), (door, message)
        assert UNEXPECTED not in message, (door, message)
        assert "model.onnx" in message, (door, message)
        assert len(message) < 900, (door, message)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ODD)
def test_odd_files_pass_and_compute_the_same(tmp_path, name):
    path = ODD[name](tmp_path)
    program = qk.fuse(path)
    inspect_model(path)
    program.save(tmp_path / "out.onnx")
    source, result = (qk.create_session(file) for file in (path, tmp_path / "out.onnx"))
    feeds = {value.name: random_feed(value) for value in source.get_inputs()}
    names = [value.name for value in source.get_outputs()]
    assert [value.name for value in result.get_outputs()] == names
    for name_, old, new in zip(names, source.run(names, feeds), result.run(names, feeds), strict=True):
        assert old.size
        if old.dtype == object:
            assert list(old) == list(new)
        else:
            np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5, err_msg=name_)


def random_feed(value: ort.NodeArg) -> np.ndarray:
    shape = [dim if isinstance(dim, int) else {"batch": 2, "seq": 5}.get(dim, 3) for dim in value.shape]
    if value.type == "tensor(bool)":
        return np.ones(shape, bool)
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", FOREIGN)
def test_operators_of_others_are_kept(tmp_path, name):
    path = FOREIGN[name](tmp_path)
    inspect_model(path)
    qk.fuse(path).save(tmp_path / "out.onnx")
    foreign = {node.op_type for node in onnx.load(path).graph.node} - {"MatMul", "Relu", "Add", "Twice"}
    assert foreign <= {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}
    with contextlib.suppress(InputError):  # a session needs the runtime that knows them, and says so in one line
        qk.create_session(path)


@pytest.mark.parametrize("name", ["our nodes: our domain in version 99", "structure: a cycle", "external data: negative length"])
@pytest.mark.parametrize("verb", ["fuse", "inspect", "validate"])
def test_the_command_line_ends_with_two(tmp_path, capsys, name, verb):
    from qknorm_onnx.cli.main import run

    path = HOSTILE[name](tmp_path)
    out = tmp_path / "out.onnx"
    more = {"fuse": [str(out)], "inspect": ["--placement"], "validate": ["tests.hostile.seeds:linear_module"]}[verb]
    assert run([verb, str(path), *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert not out.exists()


def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    """C25."""
    from qknorm_onnx.cli.main import run

    path = ODD["control characters in the name of our node"](tmp_path)
    assert run(["inspect", str(path), "--placement"]) == 0
    assert run(["fuse", str(path), str(tmp_path / "out.onnx")]) == 0
    printed = capsys.readouterr()
    for text in (printed.out, printed.err, *map(str, qk.fuse(path).report.fused)):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "\\x1b[31m" in printed.out


def test_names_of_a_megabyte_are_shortened(tmp_path):
    path, name = tmp_path / "long.onnx", "n" * 1_000_000
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    node = onnx.helper.make_node("Relu", [name], ["y"], name=name)
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], [result])), path)
    for door, call in DOORS.items():
        with pytest.raises(InputError) as refused:
            call(path)
        assert 20 < len(str(refused.value)) < 5_000, door
        assert "nnn...nnn" in str(refused.value), door
