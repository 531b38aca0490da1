"""What `PreparePass` says about itself: modified where anything changed, in bodies and functions too, and only there."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

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
