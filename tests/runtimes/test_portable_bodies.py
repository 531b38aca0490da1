"""Target `primitive` in runtimes without functions: every stage of a body, not only what the models of docs/runtimes.md have."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx.lowering.primitive_onnx import forget_named_sizes
from qknorm_onnx.lowering.registry import lower
from qknorm_onnx.spec.qk_norm_spec import RotarySpec
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import model_of, rounded
from tests.contract.spec_cases import case, optional, tables
from tools.runtimes.environments import RUNTIMES, make
from tools.runtimes.measure import tried
from tools.runtimes.trial import encoded

GAINS, TABLES, ROTARY = norm_gains(), tables("(B, S, R/2)"), RotarySpec(order="after_norm")
SINK = optional("head_sink", "(Hq)", "logits")
CASES = [
    case("causal", inputs=(*GAINS, *TABLES), rotary=ROTARY, is_causal=True),
    case("window", inputs=(*GAINS, *TABLES), rotary=ROTARY, is_causal=True, left_window_size=2),
    case("both_sides", inputs=GAINS, left_window_size=2, right_window_size=1),
    case("left", inputs=GAINS, left_window_size=2),
    case("right", inputs=GAINS, right_window_size=1),
    case("grow", inputs=(*GAINS, *TABLES), rotary=ROTARY, is_causal=True, left_window_size=2, sizes={"past_length": 3}),
    case("step", inputs=(*GAINS, *TABLES), rotary=ROTARY, is_causal=True, sizes={"past_length": 6, "length": 1}),
    case("fixed", inputs=GAINS, is_causal=True, left_window_size=2, sizes={"past_length": 3, "capacity": 11, "batch": 3}),
    case("sink", inputs=(*GAINS, SINK), is_causal=True, softcap=1.5, left_window_size=1),
    case("bool_mask", inputs=(*GAINS, optional("attention_bias", "(B, 1, S, T)", "bool mask")), is_causal=True),
    case("float_mask", inputs=(*GAINS, optional("attention_bias", "(B, 1, S, T)", "float mask")), is_causal=True),
    case("bias", inputs=(*GAINS, optional("attention_bias", "(B, 1, S, T)", "logits")), left_window_size=2),
    case("cross", inputs=GAINS, sizes={"key_length": 7}),
    case("l2", heads=(3, 3)),
]
for masked, hidden in (("bool_mask", False), ("float_mask", -np.inf)):
    next(found for found in CASES if found.id == masked).inputs["attention_bias"][0, 0, 1, :] = hidden  # a row that sees nothing
ALLOWED = {"float32": 2e-5, "float16": 2e-2}  # float16 is computed with sums in any order
NAMED = {
    "query": "BS",
    "key": "BN",
    "value": "BN",
    "past_key": "B-P",
    "past_value": "B-P",
    "cache_length": "B",
    "cos": "BS",
    "sin": "BS",
}


class CaseFile:
    """A case as a file, in the words of `tried`."""

    def __init__(self, found, dtype):
        self.found, self.dtype = found, dtype
        self.cases = f"{found.id}.{dtype}"
        self.path = f"{self.cases}.primitive"

    def write(self, folder):
        model = model_of([self.found], self.dtype, attach=False)
        given = rounded(self.found, self.dtype)
        for value in model.graph.inputs:
            value.name = value.name.rpartition("/")[2]
            names = "B1ST" if value.name == "attention_bias" else NAMED.get(value.name, "")
            value.shape = ir.Shape(self.dims(names, given[value.name].shape))
        lower(model, target="primitive", provider="cpu")
        forget_named_sizes(model)
        ir.save(model, folder / f"{self.path}.onnx")
        wide = {name: x if x.dtype in (np.bool_, np.int64) else x.astype(np.float64) for name, x in given.items()}
        outputs = [{"exact": encoded(exact), "allowed": ALLOWED[self.dtype]} for exact in self.found.expected(wide)]
        cases = [{"inputs": {name: encoded(x) for name, x in given.items()}, "outputs": outputs}]
        (folder / f"{self.cases}.json").write_text(json.dumps(cases))

    def dims(self, names, sizes):
        """Named sizes, but for heads and channels; new keys are as many as queries but in cross attention."""
        names = names if self.found.id == "cross" else names.replace("N", "S")
        return [names[axis] if names[axis : axis + 1].isalpha() else size for axis, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bodies")
    files = [CaseFile(found, dtype) for found in CASES for dtype in ALLOWED]
    for file in files:
        file.write(folder)
    return folder, files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OpenVINO 2026.4", "tract 0.23", "onnxruntime-web 1.30", "onnxruntime 1.24"])
def test_every_stage_runs_in(written, name):
    folder, files = written
    runtime = next(runtime for runtime in RUNTIMES if runtime.name == name)
    make(runtime)
    cells = tried(runtime, folder, files)
    assert {path: cell for path, cell in cells.items() if cell.verdict != "ok"} == {}
    assert len(cells) == len(files) == 2 * len(CASES)


def test_no_maximum_of_infinities():
    """OpenVINO and tract have the lowest finite number for it: a row that sees nothing would not be told."""
    counted = set()
    for found in CASES:
        for node in lowered(found).graph:
            if node.op_type == "ReduceMax":
                of = node.inputs[0].producer()
                finite = of.op_type == "Abs" or node.inputs[0].dtype == ir.DataType.INT64
                assert finite or (of.op_type, of.inputs[0].dtype) == ("Cast", ir.DataType.BOOL), (found.id, of.name)
                counted |= {found.id} if of.op_type == "Cast" else set()
    assert {"bool_mask", "float_mask", "bias", "left"} <= counted


def lowered(found):
    model = model_of([found], "float32", attach=False)
    lower(model, target="primitive", provider="cpu")
    return model


def test_inner_values_have_no_named_sizes():
    from tests.contract.named_sizes import named_model

    model = ir.to_proto(named_model(CASES[:1], attach=False))
    for target, expected in (("primitive", False), ("onnx", True)):
        proto = ir.to_proto(qk.fuse(model, target=target, verify=False).model)
        named = [value for value in proto.graph.value_info if any(dim.dim_param for dim in value.type.tensor_type.shape.dim)]
        assert bool(named) == expected, target
        assert any(dim.dim_param for dim in proto.graph.input[0].type.tensor_type.shape.dim)
