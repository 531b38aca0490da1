"""What `PreparePass` says about itself: modified where anything changed, in bodies and functions too, and only there."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.passes.derive_shapes import DeriveShapesPass
from qknorm_onnx.graph.passes.prepare import PreparePass

HEADER = '<ir_version: 10, opset_import: ["" : 20, "own" : 1]>\nmain_graph (bool c, float[2, N] x) => (float[2, N] y)\n'
BRANCHES = {
    "nothing to do": "  y = Add(x, x)\n",
    "identity in the main graph": "  i = Identity(x)\n  y = Add(i, x)\n",
    "identity in a body": "  y = If (c) <then_branch = g1 () => (float[2, N] a) {\n    i = Identity(x)\n    a = Add(i, x)\n  },"
    " else_branch = g2 () => (float[2, N] b) {\n    b = Mul(x, x)\n  }>\n",
    "duplicates in a body of a body": "  y = If (c) <then_branch = g1 () => (float[2, N] a) {\n    a = If (c) <"
    "then_branch = g3 () => (float[2, N] d) {\n      e = Add(x, x)\n      f = Add(x, x)\n      d = Mul(e, f)\n    },"
    " else_branch = g4 () => (float[2, N] g) {\n      g = Mul(x, x)\n    }>\n  },"
    " else_branch = g2 () => (float[2, N] b) {\n    b = Mul(x, x)\n  }>\n",
    "nothing to do in a body": "  y = If (c) <then_branch = g1 () => (float[2, N] a) {\n    a = Add(x, x)\n  },"
    " else_branch = g2 () => (float[2, N] b) {\n    b = Mul(x, x)\n  }>\n",
}


def model_of(body):
    return ir.from_proto(onnx.parser.parse_model(HEADER + "{\n" + body + "}\n"))


@pytest.mark.parametrize("name", BRANCHES)
def test_a_change_is_said(name):
    model = model_of(BRANCHES[name])
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    said = PreparePass()(model).modified
    assert said == (not name.startswith("nothing"))
    if not said:
        assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    prepared = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not PreparePass()(model).modified
    assert ir.to_proto(model).SerializeToString(deterministic=True) == prepared


SIZES = {
    "elementwise": ("  a = Relu(x)\n  y = Mul(a, a)\n", True),
    "a body": (BRANCHES["identity in a body"], True),
    "a size that folds": (
        (
            "  s = Shape <start: int = 0, end: int = 1> (x)\n  t = Concat <axis = 0> (s, s)\n  u = Expand(c, t)\n"
            "  v = Cast <to = 1> (u)\n  y = MatMul(v, x)\n"
        ),
        False,
    ),
    "a loop": (
        (
            "  n = Constant <value = int64 {3}> ()\n  y = Loop (n, c, x) <body = g1 (int64 i, bool k, p) => (k_out, q) {\n"
            "    k_out = Identity(k)\n    q = Concat <axis = 1> (p, p)\n  }>\n"
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_settled_derivation_finds_no_more(name):
    body, settled = SIZES[name]
    model = model_of(body)
    derive = DeriveShapesPass()
    derive(model)
    assert derive.settled == settled
    if settled:
        assert not DeriveShapesPass()(model).modified


def test_a_type_that_contradicts_its_operator_is_not_settled():
    model = model_of(SIZES["elementwise"][0])
    model.graph.node(0).outputs[0].type = ir.TensorType(ir.DataType.INT64)
    derive = DeriveShapesPass()
    derive(model)
    assert not derive.settled
