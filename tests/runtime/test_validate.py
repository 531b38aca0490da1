"""`validate` end to end on small modules: truths, faults, types that do not run, and what is not finite."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from qknorm_onnx.errors import InputError
from qknorm_onnx.runtime.half_precision import convert_dtype
from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.torch_side import TorchSide, call_of
from qknorm_onnx.validation.validate import validate
from tests.numerics.rotary_attention import RotaryAttention, example, graph_of

FLOAT = onnx.TensorProto.FLOAT


def graph(nodes, *, initializers=(), inputs=(("x", ["batch", "length", 4]),), outputs=("y",)) -> ir.Model:
    made = oh.make_graph(
        nodes,
        "g",
        [oh.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs],
        [oh.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        list(initializers),
    )
    model = oh.make_model(made, opset_imports=[oh.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x):
        return self.function(self, x)


X = {"x": torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))}
DOUBLE_X = [oh.make_node("Add", ["x", "x"], ["y"])]


def test_the_truth_has_no_float32_in_it():
    """Modules name float32 in norms, tables and softmax; the truth computes those in float64 as well."""

    def function(module, x):
        y = torch.softmax(x.float() * module.weight, -1, dtype=torch.float32)
        z = torch.polar(torch.ones_like(y), y).imag
        table = torch.arange(4, dtype=torch.float32) / 3 + torch.full((4,), 1 / 3, dtype=torch.float32)
        return (y + z + table).type_as(x)

    call = call_of(Function(function), (), X)
    model = graph(DOUBLE_X)
    from qknorm_onnx.validation.cases.inputs import match_inputs

    inputs = match_inputs(model, call.examples())
    x = call.examples()[0][1]
    side = TorchSide(call, inputs, "float16")
    truth = side.truth({"x": x.astype(np.float16).astype(np.float64)})[0]
    assert side.truth_type == "float64"
    z = x.astype(np.float16).astype(np.float64) * [1, 2, 3, 4]
    y = np.exp(z - z.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    expected = y + np.sin(y) + np.arange(4) / 3 + 1 / 3
    assert np.abs(truth - expected).max() < 1e-14


def test_weights_are_rounded_before_anything_is_judged():
    """A float16 candidate cannot be blamed for what rounding the weights alone does."""
    module = Function(lambda module, x: x * module.weight)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1 / 3, 0.1, 2 / 3, 0.7]))
    weight = onnx.numpy_helper.from_array(module.weight.detach().numpy(), "w")
    model = graph([oh.make_node("Mul", ["x", "w"], ["y"])], initializers=[weight])
    report = validate(model, module, kwargs=X, dtypes=("float16",))
    assert report.passed
    assert max(row.error for row in report.rows) < 2.0**-10


def test_a_module_that_keeps_frequencies_in_float32_is_not_rounded_again():
    module = RotaryAttention().half()
    module.register_buffer("inv", torch.tensor([1 / 3, 0.1]))
    call = call_of(module, (), example())
    side = TorchSide(call, (), "float16")
    assert side._in_dtype.inv.dtype == torch.float32
    assert side._in_float64.inv[0] == np.float32(1 / 3)


def test_a_module_that_only_runs_under_autocast_is_measured_so():
    """As rotary code in float32 against half weights: q @ v of two types."""
    linear = torch.nn.Linear(4, 4, bias=False)
    module = Function(lambda module, x: F.linear(x.float() * 1.0, module.weight[None] + torch.eye(4, dtype=x.dtype)))
    del linear
    weight = (module.weight.detach() + torch.eye(4)).numpy().T
    model = graph(
        [oh.make_node("MatMul", ["x", "w"], ["y"])],
        initializers=[onnx.numpy_helper.from_array(np.ascontiguousarray(weight), "w")],
    )
    report = validate(model, module, kwargs=X, dtypes=("float16", "bfloat16"))
    assert any("only under autocast" in note for note in report.notes)
    assert report.passed, report.summary()


class Experts(torch.nn.Module):
    """A model whose experts run in float64 only in one of their forms, as transformers' do."""

    def __init__(self):
        super().__init__()
        self.form = "grouped_mm"

    def get_experts_implementation(self):
        return {"": self.form}

    def set_experts_implementation(self, form):
        self.form = form

    def forward(self, x):
        if self.form == "grouped_mm" and x.dtype == torch.float64:
            raise RuntimeError("no double here")
        return x + x


def test_experts_are_judged_in_float64_by_their_plain_form():
    module = torch.nn.Sequential(Experts())
    report = validate(graph(DOUBLE_X), module, (), {"input": X["x"]})
    assert report.passed and module[0].form == "grouped_mm"


def test_a_module_without_float64_gives_no_verdict_in_float32():
    def function(module, x):
        if x.dtype == torch.float64:
            raise TypeError("no double here")
        return x + x

    report = validate(graph(DOUBLE_X), Function(function), kwargs=X, dtypes=("float32", "float16"))
    assert [row.verdict for row in report.of("float32")] == ["not run"] * len(report.of("float32"))
    assert "does not run in float64 (no double here)" in report.of("float32")[0].reason
    assert {row.verdict for row in report.of("float16")} == {"passed"}, "float32 is truth enough for float16"
    assert any("does not run in float64" in note for note in report.notes)
    assert not report.passed


def test_an_overflow_outside_attention_is_named_and_attention_is_not_blamed():
    """B11: the residual stream is near 65504, an Add goes over; eager float16 does so, too."""
    module = RotaryAttention()
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj, module.v_proj):
            projection.weight[:, 0] = 0  # attention does not read the large value
    model = graph_of(module)
    ten_thousand = ir.Value(
        name="ten_thousand",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape([1]),
        const_value=ir.tensor(np.array([10000.0], dtype=np.float32), name="ten_thousand"),
    )
    model.graph.register_initializer(ten_thousand)
    y = model.graph.outputs[0]
    y.name = "stream"
    out = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT), shape=y.shape)
    model.graph.append(ir.Node("", "Add", [y, ten_thousand], outputs=[out], name="residual_add"))
    model.graph.outputs[0] = out

    class Overflowing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x, cos, sin):
            return self.inner(x, cos, sin) + 10000.0

    inputs = example()
    inputs["x"][0, 0, 0] = 60000.0
    arrays = {name: tensor.double().numpy() for name, tensor in inputs.items()}
    case = Case(name="near the limit", inputs=arrays, required=True)
    report = validate(model, Overflowing(), kwargs=inputs, dtypes=("float16",), cases=[case])
    (row,) = report.rows
    assert row.verdict == "overflows in PyTorch too"
    assert not report.passed
    assert row.fault is not None
    assert row.fault.kind == "not finite"
    assert row.fault.node == "residual_add"
    assert "eager PyTorch is not finite in this type either" in row.fault.text
    assert row.fault.good_attention == ("attention",)


class Normalised(torch.nn.Module):
    """Cosine attention as everybody writes it, without a bias: a zero token has a zero query and key (B01)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * 3.0, -1)
        return (weights @ v).transpose(1, 2).flatten(2)


def normalised_graph(module: Normalised) -> ir.Model:
    from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
    from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
    from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec

    names = [oh.make_node("MatMul", ["x", f"{name}.weight"], [name]) for name in "qkv"]
    weights = [
        onnx.numpy_helper.from_array(np.ascontiguousarray(getattr(module, name).weight.detach().numpy().T), f"{name}.weight")
        for name in "qkv"
    ]
    model = graph(names, initializers=weights, inputs=(("x", ["batch", "length", 8]),), outputs=("q", "k", "v"))
    q, k, v = model.graph.outputs
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=2, kv_num_heads=2, scale=3.0),
        norm=NormSpec(q_kind="l2", k_kind="l2", q_epsilon=1e-12, k_epsilon=1e-12, epsilon_mode="clamp"),
    )
    node = make_attention_node(spec, AttentionInputs(query=q, key=k, value=v), name="attention")
    model.graph.append(node)
    model.graph.outputs[:] = node.outputs
    AttachBodiesPass()(model)
    return model


def test_zero_rows_are_finite_and_eager_pytorch_is_said_to_be_nan():
    """B01: the node is right where eager float16 is NaN, and is judged by the truth."""
    module = Normalised()
    x = {"x": torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))}
    x["x"][0, 3] = 0
    assert module.half()(x["x"].half()).isnan().any()
    report = validate(normalised_graph(module.float()), module.float(), kwargs=x, dtypes=("float16", "bfloat16", "float32"))
    assert report.passed, report.summary()
    zero = next(row for row in report.of("float16") if row.case == "example")
    assert zero.verdict == "passed"
    assert "PyTorch is not finite in float16" in zero.note


def test_a_file_in_another_type_is_not_run():
    module = RotaryAttention()
    half = convert_dtype(graph_of(module), "float16")
    report = validate(half, module, kwargs=example(), dtypes=("float16", "float32", "bfloat16"))
    assert {row.how for row in report.of("float16")} == {"native"}
    assert {row.verdict for row in report.of("float16")} == {"passed"}
    for dtype in ("float32", "bfloat16"):
        (row,) = report.of(dtype)
        assert row.verdict == "not run"
        assert f"the file computes in float16; export the module in {dtype}" in row.reason
    assert not report.passed


def test_a_bfloat16_file_is_emulated_and_says_so():
    module = RotaryAttention()
    report = validate(convert_dtype(graph_of(module), "bfloat16"), module, kwargs=example(), dtypes=("bfloat16",))
    assert report.passed
    assert {row.how for row in report.rows} == {"emulated"}
    assert any("bfloat16 is emulated" in note for note in report.notes)


def test_what_a_graph_refuses_and_the_module_does_not_is_a_failure():
    """Frozen batch: the file claims any batch and takes only 2."""
    shape = onnx.numpy_helper.from_array(np.array([2, -1, 4]), "shape")
    model = graph([oh.make_node("Reshape", ["x", "shape"], ["a"]), oh.make_node("Add", ["x", "a"], ["y"])], initializers=[shape])
    report = validate(model, Function(lambda module, x: x + x), kwargs=X)
    failed = {row.case for row in report.failures}
    assert "batch 3" in failed
    assert "example" not in failed
    assert "the model does not" in report.failures[0].reason


def test_sizes_that_the_module_refuses_are_left_out_and_said():
    def function(module, x):
        assert x.shape[1] <= 5
        return x + x

    report = validate(graph(DOUBLE_X), Function(function), kwargs=X)
    assert report.passed
    assert any("'longer' left out" in note for note in report.notes)
    assert any("'batch 8, length 36' left out" in note for note in report.notes)


def test_outputs_must_be_as_many():
    report = validate(graph(DOUBLE_X), Function(lambda module, x: (x + x, x)), kwargs=X)
    assert "the model has 1 outputs, the module returns 2 tensors" in report.failures[0].reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtypes": ("float8",)}, "unknown type 'float8'"),
        ({"dtypes": "float32"}, "give a tuple"),
        ({"dtypes": ()}, "give a tuple"),
        ({"kwargs": {}}, "hold no tensor"),
        ({"kwargs": {"x": torch.zeros(2, 4)}}, "rank 3"),
        ({"cases": []}, "cases is empty"),
        ({"module": object()}, "give the torch.nn.Module"),
        ({"kwargs": {"x": torch.zeros(2, 5, 7)}}, "does not run on the example"),
    ],
    ids=["type", "string", "no types", "no inputs", "rank", "no cases", "no module", "shape"],
)
def test_wrong_use_ends_in_one_line(change, message):
    arguments = {"module": Function(lambda module, x: x * module.weight), "kwargs": X, **change}
    with pytest.raises(InputError, match=message) as caught:
        validate(graph(DOUBLE_X), **arguments)
    assert "\n" not in str(caught.value)


def test_logits_get_top_one():
    class Language(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = torch.nn.Embedding(11, 6)

        def forward(self, ids):
            return self.table(ids) @ self.table.weight.T

    module = Language()
    table = module.table.weight.detach().numpy()
    nodes = [oh.make_node("Gather", ["table", "ids"], ["e"]), oh.make_node("MatMul", ["e", "back"], ["logits"])]
    weights = [onnx.numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in (("table", table), ("back", table.T))]
    made = oh.make_graph(
        nodes,
        "g",
        [oh.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["b", "s"])],
        [oh.make_tensor_value_info("logits", FLOAT, None)],
        weights,
    )
    model = oh.make_model(made, opset_imports=[oh.make_opsetid("", 20)], ir_version=10)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    report = validate(model, module, (torch.tensor([[1, 2, 10], [0, 3, 4]]),), dtypes=("float32", "float16"))
    assert report.passed
    for row in (row for row in report.rows if row.case != "tables"):
        assert row.top_one is not None
        assert row.top_one.flips == 0
        assert row.cosine > 0.999
        assert row.snr_db > 40


def test_progress_is_told_of_every_case():
    said: list[str] = []
    report = validate(graph(DOUBLE_X), Function(lambda module, x: x + x), kwargs=X, progress=said.append)
    assert said[0] == "float32: example"
    assert len(said) == len(report.rows)


def test_the_module_is_left_as_it_was():
    module = RotaryAttention().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    validate(graph_of(module), module, kwargs=example(), dtypes=("float16",))
    assert module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.get_default_dtype() == torch.float32


def test_rows_are_values():
    report = validate(graph(DOUBLE_X), Function(lambda module, x: x + x), kwargs=X)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.rows[0].verdict = "failed"
