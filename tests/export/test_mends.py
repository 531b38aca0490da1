"""What is mended for the export lasts as long as the export, is reported, and changes no number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qknorm_onnx.errors import ExportError
from qknorm_onnx.torch_export.exporter import export_graph
from qknorm_onnx.torch_export.patches.complex_numbers import RealArithmetic
from qknorm_onnx.torch_export.patches.complex_pair import ComplexPair
from qknorm_onnx.torch_export.patches.exact_rules import exact_rules
from qknorm_onnx.torch_export.patches.module_patches import mended


class ComplexRotary(nn.Module):
    """Rotary embedding as Meta's code writes it, (B, S, H, D) and positions (B, S)."""

    def forward(self, x, positions):
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
        angles = positions[..., None].float() * frequencies
        rotation = torch.polar(torch.ones_like(angles), angles) * 1.5
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation[:, :, None, :].to(x.device)).flatten(3).type_as(x)


def test_complex_rotary_exports_and_computes_the_same(run_model):
    args = (torch.randn(2, 5, 3, 8), torch.arange(5).expand(2, 5))
    module = ComplexRotary()
    model, notes = export_graph(module, args, dynamic_shapes={"x": {0: "b", 1: "s"}, "positions": {0: "b", 1: "s"}})
    assert any("complex" in note for note in notes)
    inputs = {"x": torch.randn(3, 7, 3, 8), "positions": torch.randint(0, 50, (3, 7))}
    assert torch.allclose(run_model(model, inputs)[0], module(**inputs), atol=1e-5)
    assert module(*args).dtype == torch.float32  # and outside the export nothing has changed


def test_products_of_pairs():
    a, b = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    exact = torch.view_as_complex(a) * torch.view_as_complex(b)
    real, number = torch.randn(4, dtype=torch.float64), torch.view_as_complex(a)
    with RealArithmetic() as arithmetic:
        left, right = torch.view_as_complex(a), torch.view_as_complex(b)
        assert isinstance(left, ComplexPair)
        for product in (left * right, torch.mul(left, right), left * exact.new_tensor(1) * right):
            assert torch.allclose(torch.view_as_real(product), torch.view_as_real(exact))
        assert torch.allclose(torch.view_as_real(real * left), torch.view_as_real(real * torch.complex(a[:, 0], a[:, 1])))
        assert torch.allclose(torch.view_as_real(left.conj() * 2), torch.view_as_real(torch.complex(a[:, 0], a[:, 1]).conj() * 2))
        assert left.shape == (4,)
        assert left[1:].unsqueeze(0).shape == (1, 3)
        assert torch.allclose(torch.sinh(left), torch.sinh(number))  # not ours: on real complex numbers
    assert arithmetic.used


class SmallSummands(nn.Module):
    """Sums, differences, products and quotients with constants that are nearly, and some that are exactly, 0 and 1."""

    def forward(self, x):
        return (
            x / (x + 1e-15),
            (1e-9 + x) * 1e9,
            (x - 1e-8) * 1e9,
            (x * 1.000001 - 1) * 1e6,
            (1 / (x / 0.999999) - 1) * 1e6,
            (x + 0) * 1,
        )


def test_constants_near_zero_and_one_are_kept(run_model):
    model, notes = export_graph(SmallSummands().eval(), (torch.ones(2, 3),))
    assert notes == ()
    for x in (torch.zeros(2, 3), torch.full((2, 3), 1e-9), torch.ones(2, 3)):
        for found, expected in zip(run_model(model, {"x": x}), SmallSummands()(x), strict=True):
            assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert sum(node.op_type == "Mul" for node in model.graph) == 5  # exact zeros and ones still fall away
    assert sum(node.op_type == "Identity" for node in model.graph) <= 1


class Squeezed(nn.Module):
    def forward(self, x):
        return x.squeeze(1), x.squeeze(2), x.squeeze((1, -1)), x.squeeze(0), x[0, 0, 0].squeeze(0) + x.squeeze(-2)


def test_an_axis_of_another_size_is_not_squeezed(run_model):
    x = torch.randn(3, 1, 4)
    model, _ = export_graph(Squeezed().eval(), (torch.randn(2, 1, 4),), dynamic_shapes={"x": {0: "batch"}})
    for found, expected in zip(run_model(model, {"x": x}), Squeezed()(x), strict=True):
        assert torch.equal(found, expected)


class Sorted(nn.Module):
    def forward(self, x):
        ascending, descending = (torch.sort(x, dim=1, stable=True, descending=order) for order in (False, True))
        return *ascending, *descending


def test_stable_sorts_keep_the_order_of_equal_values(run_model):
    x = torch.randint(0, 3, (2, 9, 4)).float()
    model, _ = export_graph(Sorted().eval(), (x,), dynamic_shapes={"x": {1: "length"}})
    x = torch.randint(0, 3, (2, 40, 4)).float()
    for found, expected in zip(run_model(model, {"x": x}), Sorted()(x), strict=True):
        assert torch.equal(found, expected)


class NearZero(nn.Module):
    """What is left of expm1 and log1p near 0 decides (xIELU)."""

    def forward(self, x):
        return torch.expm1(x), torch.log1p(x), torch.expm1(x.half()).float(), torch.log1p(x.half()).float()


def test_exponentials_and_logarithms_keep_their_digits_near_zero(run_model):
    sizes = torch.cat([10.0 ** torch.arange(-30, 2), torch.tensor([0.0, 0.2, 0.25, 0.3, 88.0, 1e30, torch.inf])])
    x = torch.cat([sizes, -sizes, torch.tensor([torch.nan])])
    model, _ = export_graph(NearZero().eval(), (torch.randn(5),), dynamic_shapes={"x": {0: "batch"}})
    single, half = slice(0, 2), slice(2, 4)
    given, wanted = run_model(model, {"x": x}), NearZero()(x)
    for found, expected in zip(given[single], wanted[single], strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-37, equal_nan=True), (found, expected)
    for found, expected in zip(given[half], wanted[half], strict=True):
        held = expected.isfinite() & (x.abs() > 1e-4) & (x.abs() < 6e4)  # beyond that onnxruntime may keep more than half has
        assert torch.allclose(found[held], expected[held], rtol=4e-3), (found, expected)


class CountedExperts(nn.Module):
    """As in DeepSeek's code: tokens sorted by expert, and cut at counts."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gate = nn.Linear(6, 3)

    def forward(self, x):
        weights, indices = self.gate(x).softmax(-1).topk(2)
        return self.moe_infer(x, indices.view(-1), weights.view(-1, 1))

    def moe_infer(self, x, flat_expert_indices, flat_expert_weights):
        total = torch.zeros_like(x)
        order = flat_expert_indices.argsort()
        ends = flat_expert_indices.bincount(minlength=3).cpu().numpy().cumsum(0)
        for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            tokens = order[start:end] // 2
            total.index_add_(0, tokens, self.experts[index](x[tokens]) * flat_expert_weights[order[start:end]])
        return total


def test_experts_that_count_in_numpy_export(run_model, assert_as_torch):
    torch.manual_seed(3)
    module = CountedExperts().eval()
    model, notes = export_graph(module, (torch.randn(4, 6),), dynamic_shapes={"x": {0: "tokens"}})
    assert any("every expert computed for every token" in note for note in notes)
    assert "moe_infer" not in vars(module)
    for tokens in (1, 9):
        x = torch.randn(tokens, 6)
        assert_as_torch(run_model(model, {"x": x})[0], module(x))


class Counts(nn.Module):
    def forward(self, x, mask):
        lengths = mask.sum(1).tolist()
        return x * len(set(lengths))


def test_a_refused_export_names_the_line_of_the_module():
    with pytest.raises(ExportError, match=r"at test_mends.py:\d+ `return x \* len\(set\(lengths\)\)`"):
        export_graph(Counts().eval(), (torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool)))


def test_the_optimizer_is_put_back_after_an_export():
    from onnxscript import optimizer

    with exact_rules([]):
        pass
    program = torch.onnx.export(SmallSummands(), (torch.ones(2, 3),), dynamo=True, optimize=False, verbose=False)
    before = sum(node.op_type == "Add" for node in program.model.graph)
    optimizer.optimize_ir(program.model)
    assert sum(node.op_type == "Add" for node in program.model.graph) < before - 1  # as onnxscript has it, wrong


def test_an_unknown_release_of_the_optimizer_is_noted(monkeypatch):
    monkeypatch.setattr("onnxscript.rewriter._DEFAULT_REWRITE_RULES", ())
    notes = []
    with exact_rules(notes):
        pass
    assert "summands of 1e-8 and below" in notes[0]


@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_experts_are_batched_during_the_export_only(zoo, name):
    module, *_ = zoo.ZOO[name]()
    before = module.model.get_experts_implementation()
    with mended(module, keep_cache=False) as notes:
        assert set(module.model.get_experts_implementation().values()) == {"batched_mm"}
    assert module.model.get_experts_implementation() == before != {"": "batched_mm"}
    assert any("experts" in note for note in notes)


@pytest.mark.slow
def test_mixture_of_experts_exports(plain_export, run_model, assert_as_torch):
    export = plain_export("qwen3_moe")
    input_ids = torch.randint(5, 100, (3, 7))
    (found,) = run_model(export.model, {"input_ids": input_ids})
    assert_as_torch(found, export.module(input_ids=input_ids))


class Configured(nn.Module):
    class Config:
        use_cache = True

    def __init__(self):
        super().__init__()
        self.config = self.Config()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, use_cache=None):
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return {"y": self.dropout(x), "cache": x * 2 if use_cache else None}


def test_no_cache_outputs_unless_asked_for():
    module = Configured().eval()
    model, notes = export_graph(module, (torch.randn(3),))
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert any("use_cache" in note for note in notes)
    assert module.config.use_cache is True
    model, notes = export_graph(module, (torch.randn(3),), {"use_cache": True})
    assert [value.name for value in model.graph.outputs] == ["y", "cache"]
    assert notes == ()


def test_training_mode_is_left_and_restored(run_model):
    module = Configured().train()
    module.dropout.eval()
    model, notes = export_graph(module, (torch.ones(64),))
    assert any("training mode" in note for note in notes)
    assert torch.equal(run_model(model, {"x": torch.ones(64)})[0], torch.ones(64))
    assert module.training
    assert not module.dropout.training


def test_a_failed_export_restores_the_module():
    class Fails(Configured):
        def forward(self, x):
            raise ValueError("no")

    module = Fails().train()
    with pytest.raises(ExportError, match="ValueError: no"):
        export_graph(module, (torch.randn(3),))
    assert module.training
    assert module.config.use_cache is True


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm = nn.RMSNorm(8)

    def forward(self, x):
        return self.q_norm(x)


def test_nan_weights_are_refused_by_name():
    module = Normed()
    module.q_norm.weight.data[3] = torch.nan
    with pytest.raises(ExportError, match=r"q_norm.weight holds 1 NaN of 8 values"):
        export_graph(module, (torch.randn(2, 8),))


def test_weights_that_were_never_loaded_are_refused_by_name():
    module = Normed()
    module.q_norm.to("meta")
    with pytest.raises(ExportError, match=r"q_norm.weight of shape \(8,\) has no values"):
        export_graph(module, (torch.randn(2, 8),))


def test_a_norm_whose_weight_was_lost_is_refused_by_name():
    module = Normed()
    module.q_norm.weight = None
    with pytest.raises(ExportError, match=r"q_norm.weight is missing"):
        export_graph(module, (torch.randn(2, 8),))


def test_old_opsets_and_missing_packages_are_refused(monkeypatch):
    with pytest.raises(ExportError, match="no export to opset 17"):
        export_graph(Normed(), (torch.randn(2, 8),), opset=17)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ExportError, match="pip install onnxscript"):
        export_graph(Normed(), (torch.randn(2, 8),))
