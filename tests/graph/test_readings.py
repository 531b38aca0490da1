"""How far each recogniser came is told, and asking for it changes nothing."""

from __future__ import annotations

import json
import logging
import sys

import onnx_ir as ir
import pytest

from qknorm_onnx.cli.main import run as run_command
from qknorm_onnx.graph.walk.readings import ROOMS
from qknorm_onnx.inspection import Explanation, explain_model, inspect_model
from tests.graph.form_text import RMS, Form, form_model
from tests.graph.test_missed_forms import HALVES, LISTED, ROTARY, turned_by

EXAMPLE = turned_by(0.5 * HALVES)
ODD_NORM = RMS.replace("Sqrt(", "Exp(")


def explanation_of(form: Form) -> Explanation:
    (found,) = explain_model(form_model(form))[1]
    return found


def text_of(form: Form) -> str:
    """The explanation as the command prints it, without what concerns the keys."""
    found = explanation_of(form)
    lines = [f"  {line}" for line in found.lines]
    keys = next(index for index, line in enumerate(lines) if "'k_p'" in line)
    return "\n".join([str(found.declined), *lines[:keys]])


def test_it_says_at_which_node_a_reader_stopped_and_what_it_found_there():
    lines = explanation_of(EXAMPLE).lines
    assert "Mul 'logits' [batch,4,seq,seq]: read by read_scaled" in lines
    assert "Add 'q_p' [batch,4,seq,16]: not read" in lines
    found = [line for line in lines if "a product with a matrix that mixes values, at MatMul 'q_turned'" in line]
    assert len(found) == 1 and found[0].startswith("  read_rotary: seen from Mul 'q_g'")


def test_it_says_so_of_functions_that_say_nothing_themselves():
    """A norm that divides by exp where a root is expected: the function that gave up is named, with the node in its hands."""
    lines = explanation_of(Form(prepare=ODD_NORM)).lines
    (where,) = [line for line in lines if "row_size" in line and "'q_root'" in line]
    assert where == "  read_quotient: in row_size.read_size at Exp 'q_root' [batch,4,seq,1]"


def test_a_refusal_inside_a_reader_is_its_reason():
    form = Form(prepare=RMS.replace("ReduceMean<keepdims=1>({n}_sq, last)", "ReduceMean<keepdims=1>({n}_sq, batch)"))
    text = "  {n}_batch = Constant<value = int64[1] {{0}}>()\n" + form.prepare.replace(", batch)", ", {n}_batch)")
    found = explanation_of(Form(prepare=text))
    assert any("declined by read_norm" in line for line in found.lines)


@pytest.mark.parametrize("form", [EXAMPLE, Form(), Form(prepare=ODD_NORM), Form(kv_heads=2, repeat=LISTED)])
def test_listening_changes_nothing_and_leaves_nothing_behind(form):
    logger, profile = logging.getLogger(ROOMS), sys.getprofile()
    before = logger.level, list(logger.handlers)
    watched, explanations = explain_model(form_model(form))
    assert watched == inspect_model(form_model(form))
    assert len(explanations) == len(watched.present.declined)
    assert (logger.level, logger.handlers, sys.getprofile()) == (*before, profile)


RELU = "  p = Relu(logits)\n"
MASKED = "  masked = Add(logits, mask)\n  p = Softmax<axis=-1>(masked)\n"
TURNED = Form(kv_heads=4, prepare=ROTARY, inputs=", float[seq,16] cos, float[seq,16] sin")
# A form about which each room says something, and a part of it.
SAID = {
    "attention": (TURNED, "read_softmax: read"),
    "chains": (TURNED, "read_rotated: read"),
    "norms": (TURNED, "read_quotient: read"),
    "rotaries": (EXAMPLE, "mixes values"),
    "masks": (Form(softmax=MASKED, inputs=", float[batch,1,seq,seq] mask"), "'mask': recognise_mask: no, "),
    "unread": (Form(softmax=RELU), "unsoftmaxed_attention: declined, its logits pass Relu in place of a softmax"),
}


def test_all_rooms_are_listed(repo_root):
    folders = (repo_root / "qknorm_onnx" / "graph" / "recognise").iterdir()
    assert set(SAID) == {folder.name for folder in folders if (folder / "__init__.py").exists()}


@pytest.mark.parametrize("room", SAID)
def test_each_room_has_a_logger(room, caplog):
    form, said = SAID[room]
    with caplog.at_level(logging.DEBUG, logger=f"{ROOMS}.{room}"):
        inspect_model(form_model(form))
    assert {record.name for record in caplog.records} == {f"{ROOMS}.{room}"}
    assert any(said in record.message for record in caplog.records), [record.message for record in caplog.records]


def test_what_is_declined_by_no_reader_of_attention_is_explained_too():
    lines = explanation_of(Form(softmax=RELU)).lines
    assert any("declined by unsoftmaxed_attention" in line for line in lines)


def test_the_reason_itself_is_the_last_line():
    found = explanation_of(EXAMPLE)
    assert found.lines[-2:] == ("Add 'q_p' [batch,4,seq,16]: declined by norm_behind", f"  norm_behind: {found.declined.reason}")


def test_the_page_shows_what_is_said(repo_root):
    page = (repo_root / "docs" / "debugging.md").read_text(encoding="utf-8")
    assert f"```\n{text_of(EXAMPLE)}\n```" in page


def test_the_command_prints_it(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    ir.save(form_model(EXAMPLE), path)
    assert run_command(["inspect", str(path), "--explain"]) == 0
    assert "a product with a matrix that mixes values, at MatMul 'q_turned'" in capsys.readouterr().out
    assert run_command(["inspect", str(path), "--explain", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["explanations"]
    assert entry["name"] == "o" and entry["lines"] == list(explanation_of(EXAMPLE).lines)
