"""Each hint of the package is tried: what it names is done to a form, and the outcome changes. Those that are not are listed."""

from __future__ import annotations

import ast
import importlib
import pathlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from qknorm_onnx.graph.recognise.attention import group_query, multi_head
from qknorm_onnx.graph.recognise.unread import lookalikes
from tests.graph.attention_text import fused
from tests.graph.form_text import form_model
from tests.graph.hint_cases import HINT_CASES
from tests.graph.test_reasons import CASES

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Hints that stand in tables of (reason, hint).
TABLES = (group_query._UNREAD_INPUTS, multi_head.UNREAD_INPUTS, lookalikes.REASONS)
PAIRS = (lookalikes.STATIC_CACHE, lookalikes.WRITTEN)
# They name no change to the form, or one that the message in front of them names.
NO_CHANGE = ("this is not QK-Norm attention: ", "change what the message names")
# What another test makes of a form that has the hint: the same form, changed as it says.
ELSEWHERE = {
    "quantise the weights of": "graph/test_named_attention.py::test_what_the_hint_says_of_quantised_products_helps",
    "its products are quantised": "foreign/test_tools.py::test_products_of_the_attention_in_eight_bits_are_declined",
    "this file runs at no size": "foreign/test_torchscript.py::test_a_file_that_runs_at_no_size_is_declined_for_that",
}
# No test makes this change: shapes that a text of ONNX cannot leave open, and caches, streams and axes of whole models.
NOT_TRIED = (
    "append keys to the cache after",
    "cache both, or none",
    "cache keys before their heads",
    "compute the positions as the number",
    "export with a cache that grows (transformers",
    "export with a fixed size of the heads",
    "export with fixed heads",
    "give it an empty past",
    "give logits and masks the axes",
    "hide key j from the new token",
    "if these are heads, export with a fixed number",
    "join the parts with torch.cat",
    "join the streams first",
    "make it one step",
    "make them initializers",
    "normalise and scale while the heads are one axis",
    "project to (batch, positions, heads * values)",
    "reshape the output to (batch",
    "return present keys and values too",
    "run shape inference",
    "split packed projections along",
    "split packed queries and keys before",
    "split the packed tensor in front",
    "transpose its input to (batch",
    "use one kind of norm, one epsilon",
    "use one table for all",
    "write new keys and new values at the same",
)


def hints() -> set[str]:
    """All hints that the source has, by their text."""
    found = {hint for table in TABLES for _, hint in table.values()} | {hint for _, hint in PAIRS}
    for path in sorted((ROOT / "qknorm_onnx" / "graph").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Unreadable":
                given = [*call.args[2:3], *(word.value for word in call.keywords if word.arg == "hint")]
                found |= set(texts_of(given[0], module, tree))
    return found


def texts_of(expression: ast.expr, module: ModuleType, tree: ast.Module) -> Iterator[str]:
    """The texts that a hint may be: one itself, a name of the module, or what a local name is given."""
    if isinstance(expression, ast.Constant):
        yield str(expression.value)
    elif isinstance(expression, ast.IfExp):
        yield from texts_of(expression.body, module, tree)
        yield from texts_of(expression.orelse, module, tree)
    elif isinstance(expression, ast.Name) and hasattr(module, expression.id):
        yield str(getattr(module, expression.id))
    elif isinstance(expression, ast.Subscript) and hasattr(module, ast.unparse(expression.value)):
        yield str(getattr(module, ast.unparse(expression.value))[ast.literal_eval(expression.slice)])
    elif isinstance(expression, ast.Name):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [expression.id]:
                yield from texts_of(node.value, module, tree)
    else:
        raise AssertionError(f"a hint that is not seen through: {ast.unparse(expression)}")


@pytest.mark.parametrize("name", HINT_CASES)
def test_what_the_hint_names_changes_the_outcome(name):
    case = HINT_CASES[name]
    _, report = fused(form_model(case.declined), prove=False)
    (miss,) = report.declined
    assert case.hint in miss.hint, miss
    assert miss.node and not report.fused and not report.plain
    _, mended = fused(form_model(case.mended), prove=False)
    assert len(mended.fused) == 1 and not mended.declined


def test_every_hint_is_tried_or_listed():
    tried = [case.hint for case in (*CASES.values(), *HINT_CASES.values())]
    listed = (*NO_CHANGE, *ELSEWHERE, *NOT_TRIED)
    missing = sorted(text for text in hints() if not any(part in text for part in (*tried, *listed)))
    assert not missing, "\n".join(missing)
    stale = [part for part in listed if not any(part in text for text in hints())]
    assert not stale, "no hint says this any more"
    assert not [part for part in NOT_TRIED if any(part in text for text in hints() if any(item in text for item in tried))]


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_are_named_exist(place):
    path, _, name = place.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8")
