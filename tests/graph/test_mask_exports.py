"""Masks as torch.onnx writes them, handwritten ones and those of transformers: read back, and compared with what runs."""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import unused_removal as remove_unused

from qknorm_onnx.graph.recognise.index_terms import Apply, Dimension, Linear
from qknorm_onnx.graph.recognise.mask import MaskContext, MaskFragment, recognise_mask

torch = pytest.importorskip("torch")
onnxruntime = pytest.importorskip("onnxruntime")
DYNAMIC = torch.export.Dim.DYNAMIC
INFINITY = float("-inf")
MaskedCore: TypeAlias = tuple[ir.Value, bool, float | None, ir.Value | None]


class Scores(torch.nn.Module):
    """Scores of `a` against itself, and against `past` in front, handed to a function that masks them."""

    def __init__(self, masked: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.masked = masked
        self.register_buffer("table", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, a: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        scores = a @ a.transpose(-1, -2)
        both = torch.cat([a @ past.transpose(-1, -2), scores], -1)
        return self.masked(self.table, scores, both)


def positions(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])[None]


def square(scores: torch.Tensor, value: float | bool) -> torch.Tensor:
    return torch.full((scores.shape[-2], scores.shape[-1]), value)


def causal(scores: torch.Tensor) -> torch.Tensor:
    q, k = positions(scores)
    return k <= q


def cached(scores: torch.Tensor) -> torch.Tensor:
    q, k = positions(scores)
    return k <= q + (scores.shape[-1] - scores.shape[-2])


HANDWRITTEN: dict[str, tuple[Callable[..., torch.Tensor], tuple[bool, int, int, str]]] = {
    "lower triangle": (lambda t, s, b: s.masked_fill(~square(s, True).tril(), INFINITY), (True, -1, -1, "both")),
    "upper infinities": (lambda t, s, b: s + square(s, INFINITY).triu(1), (True, -1, -1, "both")),
    "upper ones times": (lambda t, s, b: s + square(s, 1.0).triu(1) * -1e9, (True, -1, -1, "both")),
    "table": (lambda t, s, b: s.masked_fill(t[:, :, : s.shape[-2], : s.shape[-1]] == 0, INFINITY), (True, -1, -1, "both")),
    "table with past": (
        lambda t, s, b: b.masked_fill(t[:, :, b.shape[-1] - b.shape[-2] : b.shape[-1], : b.shape[-1]] == 0, INFINITY),
        (True, -1, -1, "lower_right"),
    ),
    "where": (lambda t, s, b: torch.where(causal(s), s, torch.finfo(s.dtype).min), (True, -1, -1, "both")),
    "one minus": (lambda t, s, b: s + (1.0 - causal(s).to(s.dtype)) * torch.finfo(s.dtype).min, (True, -1, -1, "both")),
    "filled zeros": (
        lambda t, s, b: s + torch.zeros(s.shape[-2], s.shape[-1]).masked_fill(~causal(s), INFINITY),
        (True, -1, -1, "both"),
    ),
    "band": (lambda t, s, b: s.masked_fill(~square(s, True).tril().triu(-3), INFINITY), (True, 3, -1, "both")),
    "float distance": (
        lambda t, s, b: s.masked_fill((positions(s)[0].float() - positions(s)[1].float()).abs() > 4, INFINITY),
        (False, 4, 4, "both"),
    ),
    "past, triangle": (
        lambda t, s, b: b + square(b, INFINITY).triu(b.shape[-1] - b.shape[-2] + 1),
        (True, -1, -1, "lower_right"),
    ),
    "past, compared": (lambda t, s, b: b.masked_fill(~cached(b), INFINITY), (True, -1, -1, "lower_right")),
    "past, last positions": (
        lambda t, s, b: b.masked_fill(
            positions(b)[1] > torch.arange(b.shape[-1])[-b.shape[-2] :, None],
            INFINITY,
        ),
        (True, -1, -1, "lower_right"),
    ),
    "past, window": (
        lambda t, s, b: b.masked_fill(
            ~(cached(b) & (positions(b)[1] > positions(b)[0] + (b.shape[-1] - b.shape[-2]) - 5)),
            INFINITY,
        ),
        (True, 4, -1, "lower_right"),
    ),
    "chunks": (
        lambda t, s, b: s.masked_fill(~((positions(s)[1] // 4 == positions(s)[0] // 4) & causal(s)), INFINITY),
        (True, -1, -1, "both"),
    ),
    "prefix": (lambda t, s, b: s.masked_fill(~(causal(s) | (positions(s)[1] < 3)), INFINITY), (False, -1, -1, "none")),
}


def export(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], axes: tuple[dict[int, object], ...], opset: int
) -> ir.Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), inputs, dynamic_shapes=axes, dynamo=True, verbose=False, opset_version=opset)
    return program.model


def cores(model: ir.Model) -> Iterator[MaskedCore]:
    """Mask, whether it hides, fill, and the scores (or None), of every masked softmax, Attention op or result."""
    for node in model.graph:
        if node.op_type == "Attention" and len(node.inputs) > 3 and node.inputs[3] is not None:
            yield node.inputs[3], False, None, None
        if node.op_type == "Softmax":
            assert node.inputs[0] is not None
            found = masked(node.inputs[0].producer())
            if found is not None:
                yield found


def masked(node: ir.Node | None) -> MaskedCore | None:
    if node is not None and node.op_type == "Concat":  # attention sinks
        assert node.inputs[0] is not None
        node = node.inputs[0].producer()
    if node is None or node.op_type not in ("Where", "Add"):
        return None
    if node.op_type == "Add":
        return node.inputs[1], False, None, node.inputs[0]  # type: ignore[return-value]
    hidden_first = node.inputs[1] is not None and node.inputs[1].shape is not None and node.inputs[1].shape.rank() == 0
    return node.inputs[0], hidden_first, INFINITY, node.inputs[2 if hidden_first else 1]  # type: ignore[return-value]


def read(model: ir.Model, core: MaskedCore, context: MaskContext) -> MaskFragment:
    mask, negated, fill, scores = core
    lengths = [context.extent(scores, axis) if scores is not None else None for axis in (-2, -1)]
    lengths = [None if length is not None and unnamed(length) else length for length in lengths]
    return recognise_mask(mask, context=context, negated=negated, fill_value=fill, query_length=lengths[0], key_length=lengths[1])


def unnamed(length: Linear) -> bool:
    return any(isinstance(atom, Dimension) and atom.owner is not None for atom, _ in length.terms)


def size(form: Linear, sizes: dict[str, int]) -> int:
    total = form.constant
    for atom, factor in form.terms:
        if isinstance(atom, Dimension):
            total += factor * sizes[atom.name]
        else:
            assert isinstance(atom, Apply)
            assert atom.function == "quotient"
            total += factor * (size(atom.arguments[0], sizes) // size(atom.arguments[1], sizes))
    return total


def check(model: ir.Model, core: MaskedCore, fragment: MaskFragment, feeds: dict[str, np.ndarray]) -> None:
    """Run the graph's own mask and residual terms and compare them with the description."""
    wanted = list(dict.fromkeys([str(core[0].name), *(str(term.value.name) for term in fragment.residual)]))
    part = ir.from_proto(ir.to_proto(model))
    values = {output.name: output for node in part.graph for output in node.outputs}
    part.graph.outputs[:] = [values[name] for name in wanted]
    remove_unused.RemoveUnusedNodesPass()(part)
    session = onnxruntime.InferenceSession(ir.to_proto(part).SerializeToString(), providers=["CPUExecutionProvider"])
    needed = {entry.name for entry in session.get_inputs()}
    arrays = dict(zip(wanted, session.run(wanted, {k: v for k, v in feeds.items() if k in needed}), strict=True))
    sizes = {
        str(dim.value): feeds[str(entry.name)].shape[axis]
        for entry in model.graph.inputs
        for axis, dim in enumerate(entry.shape or [])
        if not isinstance(dim, int)
    }
    compare(fragment, arrays, str(core[0].name), core[1], sizes)


def compare(fragment: MaskFragment, arrays: dict[str, np.ndarray], name: str, negated: bool, sizes: dict[str, int]) -> None:
    p = np.arange(size(fragment.query_length, sizes))[:, None] + size(fragment.query_offset, sizes)
    j = np.arange(size(fragment.key_length, sizes))[None]
    visible = np.ones((p.size, j.size), bool)
    if fragment.is_causal:
        visible &= j <= p
    if fragment.left_window_size >= 0:
        visible &= p - fragment.left_window_size <= j
    if fragment.right_window_size >= 0:
        visible &= j <= p + fragment.right_window_size
    rest = np.zeros(())
    for term in fragment.residual:
        array = arrays[str(term.value.name)]
        array = array.transpose([axis for axis in term.axes if axis is not None])
        array = array.reshape([1 if axis is None else array.shape[axis] for axis in term.axes])
        if term.kind == "keep":
            visible = visible & (array != term.negated)
        else:
            rest = rest + array
    mask = arrays[name]
    if mask.dtype == bool:
        assert (np.broadcast_to(visible, mask.shape) == (mask != negated)).all()
    else:
        described = np.where(visible, 0.0, -math.inf) + rest
        np.testing.assert_array_equal(np.broadcast_to(described, mask.shape) <= -1e9, mask <= -1e9)


def summary(fragment: MaskFragment) -> tuple[bool, int, int, str]:
    return fragment.is_causal, fragment.left_window_size, fragment.right_window_size, fragment.alignment


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_handwritten(name: str) -> None:
    function, expected = HANDWRITTEN[name]
    model = export(
        Scores(function),
        (torch.randn(2, 2, 7, 8), torch.randn(2, 2, 3, 8)),
        ({0: DYNAMIC, 2: DYNAMIC}, {0: DYNAMIC, 2: DYNAMIC}),
        20,
    )
    core = masked(model.graph.outputs[0].producer())
    assert core is not None
    fragment = read(model, core, MaskContext())
    assert summary(fragment) == expected, fragment.reasons
    for batch, length, past in [(1, 5, 4), (3, 1, 9), (2, 13, 0)]:
        rng = np.random.default_rng(length)
        feeds = {
            "a": rng.normal(size=(batch, 2, length, 8)).astype(np.float32),
            "past": rng.normal(size=(batch, 2, past, 8)).astype(np.float32),
        }
        check(model, core, fragment, feeds)


def test_chunks_stay_beside_causality_and_say_so() -> None:
    model = export(
        Scores(HANDWRITTEN["chunks"][0]), (torch.randn(2, 2, 7, 8), torch.randn(2, 2, 3, 8)), ({2: DYNAMIC}, {2: DYNAMIC}), 18
    )
    core = masked(model.graph.outputs[0].producer())
    assert core is not None
    fragment = read(model, core, MaskContext())
    assert len(fragment.residual) == 1
    assert "chunk" in fragment.reasons[0]
    assert not fragment.rows_never_empty


def test_sdpa_is_causal_at_an_opset_without_attention() -> None:
    class Attention(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(a, a, a, is_causal=True)

    model = export(Attention(), (torch.randn(2, 2, 7, 8),), ({0: DYNAMIC, 2: DYNAMIC},), 20)
    (core,) = cores(model)
    fragment = read(model, core, MaskContext())
    assert summary(fragment) == (True, -1, -1, "both")
    check(model, core, fragment, {"a": np.zeros((3, 2, 5, 8), np.float32)})


# --------------------------------------------------------------------------------------------- transformers and the zoo


def with_signature(module: torch.nn.Module, names: list[str]) -> torch.nn.Module:
    """The module behind a forward with named arguments, which torch.onnx needs for dynamic shapes."""
    source = f"def forward(self, {', '.join(names)}):\n    return self.inner({', '.join(f'{name}={name}' for name in names)})\n"
    space: dict[str, object] = {}
    exec(source, space)
    kind = type("Named", (torch.nn.Module,), {"forward": space["forward"]})
    named = kind()
    named.inner = module
    return named


@pytest.fixture(scope="module")
def zoo_with(zoo: ModuleType) -> Callable[[str], ModuleType]:
    """The zoo built with one attention implementation."""
    pytest.importorskip("transformers")
    loaded: dict[str, ModuleType] = {}

    def load(attention: str) -> ModuleType:
        if attention not in loaded:
            spec = importlib.util.spec_from_file_location(f"zoo_{attention}", str(zoo.__file__))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ZOO_ATTN", attention)
                spec.loader.exec_module(module)
            loaded[attention] = module
        return loaded[attention]

    return load


def export_entry(
    zoo: ModuleType, name: str, opset: int, extra: dict[str, torch.Tensor]
) -> tuple[ir.Model, dict[str, torch.Tensor]]:
    module, arguments, axes, _ = zoo.ZOO[name]()
    arguments = arguments | extra
    dynamic = tuple(dict.fromkeys(axes.get(key, {0: 0, 1: 0}), DYNAMIC) for key in arguments)
    return export(with_signature(module, list(arguments)), tuple(arguments.values()), dynamic, opset), arguments


FULL, WINDOW = (True, -1, -1, "both"), (True, 3, -1, "both")
# entry, attention, opset -> one summary a layer
ENTRIES = [
    ("qwen3", "sdpa", 20, [FULL, FULL]),
    ("qwen3_sliding", "eager", 23, [FULL, WINDOW]),
    ("h_rms_sliding", "eager", 18, [WINDOW, WINDOW]),
]
MORE_ENTRIES = [
    ("gemma3_text", "sdpa", 23, [WINDOW, FULL]),
    ("neomme", "sdpa", 20, [(False, 4, 4, "both"), (False, -1, -1, "none")]),
    ("qwen3", "eager", 18, [FULL, FULL]),
    ("qwen3", "sdpa", 23, [FULL, FULL]),
    ("qwen3_sliding", "sdpa", 20, [FULL, WINDOW]),
    ("gemma3_text", "sdpa", 20, [WINDOW, FULL]),
    ("cohere_qk", "sdpa", 20, [FULL, FULL]),
    ("flint", "eager", 20, [WINDOW, FULL]),
    ("h_cosine_tau_causal", "eager", 23, [FULL, FULL]),
]


@pytest.mark.parametrize(
    ("name", "attention", "opset", "expected"),
    [pytest.param(*entry, id="-".join(map(str, entry[:3]))) for entry in ENTRIES]
    + [pytest.param(*entry, id="-".join(map(str, entry[:3])), marks=pytest.mark.slow) for entry in MORE_ENTRIES],
)
def test_zoo(zoo_with: Callable[[str], ModuleType], name: str, attention: str, opset: int, expected: list[object]) -> None:
    model, arguments = export_entry(zoo_with(attention), name, opset, {})
    context = MaskContext()
    found = list(cores(model))
    start = time.perf_counter()
    fragments = [read(model, core, context) for core in found]
    assert time.perf_counter() - start < 0.2
    assert [summary(fragment) for fragment in fragments] == expected
    assert all(fragment.rows_never_empty and not fragment.residual for fragment in fragments)
    for batch, length in [(1, 1), (3, 9)]:
        key, value = next(iter(arguments.items()))
        shape = (batch, length, *value.shape[2:])
        array = np.ones(shape, np.int64) if value.dtype == torch.long else np.zeros(shape, np.float32)
        for core, fragment in zip(found, fragments, strict=True):
            check(model, core, fragment, {key: array})


@pytest.mark.parametrize(
    ("name", "opset", "expected"),
    [pytest.param("qwen3", 20, FULL, marks=pytest.mark.slow), ("qwen3_sliding", 23, WINDOW)],
)
def test_padding_stays_beside_causality(
    zoo_with: Callable[[str], ModuleType], name: str, opset: int, expected: tuple[bool, int, int, str]
) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    model, _ = export_entry(zoo_with("sdpa"), name, opset, {"attention_mask": mask})
    core = list(cores(model))[-1]
    fragment = read(model, core, MaskContext())
    assert summary(fragment) == expected
    (term,) = fragment.residual
    assert term.broadcasts
    assert "'attention_mask' (a graph input)" in term.reason
    assert not fragment.rows_never_empty
    left = np.ones((3, 7), np.int64)
    left[0, :4] = left[1, 5:] = 0
    check(model, core, fragment, {"input_ids": np.ones((3, 7), np.int64), "attention_mask": left})


@pytest.mark.slow
def test_positions_of_the_caller_prove_nothing(zoo_with: Callable[[str], ModuleType]) -> None:
    ids = torch.arange(12)[None].repeat(2, 1)
    model, _ = export_entry(zoo_with("sdpa"), "qwen3", 20, {"position_ids": ids})
    core = next(cores(model))
    fragment = read(model, core, MaskContext())
    assert not fragment.recognised
    assert [term.value for term in fragment.residual] == [core[0]]
    assert "'position_ids' (a graph input)" in fragment.reasons[0]
    packed = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    check(model, core, fragment, {"input_ids": np.ones((2, 7), np.int64), "position_ids": packed})


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_sliding"])
def test_cached_decode(zoo_with: Callable[[str], ModuleType], name: str) -> None:
    module, inputs, _ = zoo_with("sdpa").build_with_cache(name)
    batch, past = inputs[3].shape[0], inputs[3].shape[2]
    new = 3
    inputs = (
        torch.randint(5, 100, (batch, new)),
        torch.arange(past, past + new)[None].repeat(batch, 1),
        torch.ones(batch, past + new, dtype=torch.long),
        *inputs[3:],
    )
    names = ["input_ids", "position_ids", "attention_mask", *(f"past_{n}" for n in range(len(inputs) - 3))]
    source = f"def forward(self, {', '.join(names)}):\n    return self.inner({', '.join(names)})\n"
    space: dict[str, object] = {}
    exec(source, space)
    named = type("Named", (torch.nn.Module,), {"forward": space["forward"]})()
    named.inner = module
    axes = tuple({0: DYNAMIC, 1: DYNAMIC} if n < 3 else {0: DYNAMIC, 2: DYNAMIC} for n in range(len(inputs)))
    model = export(named, inputs, axes, 20)
    found = list(cores(model))
    context = MaskContext()
    fragments = [read(model, core, context) for core in found]
    window = 3 if name == "qwen3_sliding" else -1
    assert [summary(fragment) for fragment in fragments] == [(True, -1, -1, "lower_right"), (True, window, -1, "lower_right")]
    for length, before in [(1, 9), (4, 2), (5, 0)]:
        feeds = {
            "input_ids": np.ones((2, length), np.int64),
            "position_ids": np.arange(before, before + length)[None].repeat(2, 0),
            "attention_mask": np.random.default_rng(0).integers(0, 2, (2, before + length)),
        } | {f"past_{n}": np.zeros((2, 2, before, 32), np.float32) for n in range(len(inputs) - 3)}
        for core, fragment in zip(found, fragments, strict=True):
            check(model, core, fragment, feeds)
