"""Identities go, names of outputs stay."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.passes.remove_identities import RemoveIdentitiesPass

GRAPHS = {
    "between nodes": ("y", "t = Abs(x)\n u = Identity(t)\n v = Identity(u)\n y = Neg(v)", ["Abs", "Neg"]),
    "before an output": ("y", "t = Abs(x)\n y = Identity(t)", ["Abs"]),
    "read elsewhere too": ("y, z", "t = Abs(x)\n y = Identity(t)\n z = Neg(t)", ["Abs", "Neg"]),
    "two outputs of one value": ("y, z", "y = Abs(x)\n z = Identity(y)", ["Abs", "Identity"]),
    "two outputs of an inner value": ("y, z", "t = Abs(x)\n y = Identity(t)\n z = Identity(t)", ["Abs", "Identity"]),
    "an output that is the input": ("y", "y = Identity(x)", ["Identity"]),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_outputs_keep_their_names_and_values(case):
    outputs, body, kinds = GRAPHS[case]
    typed = ", ".join(f"float[N] {name}" for name in outputs.split(", "))
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g (float[N] x) => ({typed}) {{\n {body}\n}}')
    model = ir.from_proto(proto)
    RemoveIdentitiesPass()(model)
    assert [node.op_type for node in model.graph] == kinds
    assert [value.name for value in model.graph.outputs] == outputs.split(", ")
    assert not RemoveIdentitiesPass()(model).modified
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    import numpy as np
    from onnx.reference import ReferenceEvaluator

    x = np.array([-1.5, 2.0], dtype=np.float32)
    for a, b in zip(ReferenceEvaluator(proto).run(None, {"x": x}), ReferenceEvaluator(after).run(None, {"x": x}), strict=True):
        assert np.array_equal(a, b)
