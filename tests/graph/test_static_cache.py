"""Caches of fixed size: new keys are written into a buffer behind the earlier ones, and a mask hides what lies behind them."""

from __future__ import annotations

import numpy as np
import pytest

import qknorm_onnx as qk
from tests.graph.attention_text import HALVES, RMS, Spelling, attention_model, fused, run

SAME = "{y} = Identity({x})\n"
CAPACITY = 12

NUMBERS = """
  zero_s = Constant<value = int64 {0}>()
  one_s = Constant<value = int64 {1}>()
  two_s = Constant<value = int64 {2}>()
  axes0 = Constant<value = int64[1] {0}>()
  cap1 = Constant<value = int64[1] {12}>()
  cap_s = Constant<value = int64 {12}>()
  seq_s = Squeeze(seq1, axes0)
  steps = Range(zero_s, seq_s, one_s)
  columns = Range(zero_s, cap_s, one_s)
"""
ONE_LENGTH = NUMBERS + "  places = Add(steps, past_length)\n"
SCATTER_ND = """
  {n}_where = Unsqueeze({n}_places, one1)
  {n}_old = Transpose<perm=[2, 0, 1, 3]>({n}_past)
  {n}_new = Transpose<perm=[2, 0, 1, 3]>({x})
  {n}_written = ScatterND({n}_old, {n}_where, {n}_new)
  {n}_present = Transpose<perm=[1, 2, 0, 3]>({n}_written)
"""
SCATTER_ELEMENTS = """
  {n}_axes = Constant<value = int64[3] {{0, 1, 3}}>()
  {n}_where = Unsqueeze({n}_places, {n}_axes)
  {n}_shape = Shape({x})
  {n}_full = Expand({n}_where, {n}_shape)
  {n}_present = ScatterElements<axis=2>({n}_past, {n}_full, {x})
"""
REPEATED = """
  {n}_u = Unsqueeze({n}_present, two1)
  {n}_dims = Concat<axis=0>(batch1, kv1, group1, cap1, size1)
  {n}_e = Expand({n}_u, {n}_dims)
  {n}_dims4 = Concat<axis=0>(batch1, heads1, cap1, size1)
  {y} = Reshape({n}_e, {n}_dims4)
"""
CAUSAL = """
  rows = Unsqueeze(places, one1)
  hidden = Greater(columns, rows)
  low = Constant<value = float {{-3.0e38}}>()
  masked = Where(hidden, low, logits)
"""
INPUTS = ", float[batch,2,12,8] kr_past, float[batch,2,12,8] vr_past"
OUTPUTS = ", float[batch,2,12,8] kr_present, float[batch,2,12,8] vr_present"


def cached(
    write=SCATTER_ND,
    *,
    constants=ONE_LENGTH,
    mask=CAUSAL,
    inputs=", int64 past_length",
    places="places",
    repeated=None,
    **changes,
):
    """`places`: the positions at which keys are written; `v_places` in the text of `constants` for other ones of values."""
    own = "" if "vr_places" in constants else f"  vr_places = Identity({places})\n"
    constants = f"{constants}  kr_places = Identity({places})\n{own}"
    return attention_model(
        Spelling(
            repeat=write + (repeated or REPEATED),
            constants=constants,
            mask=mask,
            extra_inputs=INPUTS + inputs,
            extra_outputs=OUTPUTS,
            **changes,
        )
    )


def check(source, lengths):
    """Fused and proven; numbers and buffers equal for each (batch, new tokens, inputs that say how many are old)."""
    model, report = fused(source)
    assert not report.declined and not report.refused
    (attention,) = report.fused
    assert attention.note == "" and attention.spec.attention.is_causal
    assert not any(node.op_type in ("Softmax", "MatMul", "ScatterND", "ScatterElements") for node in model.graph)
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert node.inputs[14] is not None and len(node.outputs) == 3
    random = np.random.default_rng(5)
    for batch, length, given in lengths:
        feeds = {name: np.asarray(value, dtype=np.int64) for name, value in given.items()}
        for value in source.graph.inputs:
            if value.name not in feeds:
                shape = [dim if isinstance(dim, int) else {"batch": batch, "seq": length}[dim.value] for dim in value.shape]
                feeds[value.name] = random.standard_normal(shape).astype(np.float32)
        old, new = run(source, feeds), run(model, feeds)
        for before, after in zip(old, new, strict=True):
            np.testing.assert_allclose(after, before, rtol=0, atol=2e-6 * np.abs(before).max())
    return attention.spec


LENGTHS = [(1, 5, {"past_length": 3}), (3, 1, {"past_length": 11}), (3, 12, {"past_length": 0}), (2, 4, {"past_length": 7})]


@pytest.mark.parametrize("write", [SCATTER_ND, SCATTER_ELEMENTS])
@pytest.mark.parametrize("rotary", [HALVES, SAME])
def test_one_length_for_all_rows(write, rotary):
    spec = check(cached(write, rotary=rotary), LENGTHS)
    assert (spec.attention.q_num_heads, spec.attention.kv_num_heads) == (6, 2)


def test_a_length_for_each_row():
    constants = NUMBERS + "  past_column = Unsqueeze(past_length, one1)\n  places = Add(past_column, steps)\n"
    write = SCATTER_ELEMENTS.replace("[3] {{0, 1, 3}}", "[2] {{1, 3}}")
    mask = CAUSAL.replace(
        "rows = Unsqueeze(places, one1)", "inner = Constant<value = int64[2] {{1, 3}}>()\n  rows = Unsqueeze(places, inner)"
    )
    source = cached(write, constants=constants, mask=mask, inputs=", int64[batch] past_length")
    check(source, [(3, 2, {"past_length": [0, 10, 4]}), (1, 7, {"past_length": [5]}), (2, 1, {"past_length": [11, 0]})])


def test_length_read_from_positions_of_the_new_tokens():
    constants = NUMBERS + "  first = Gather(cache_position, zero_s)\n  places = Add(steps, first)\n"
    source = cached(constants=constants, inputs=", int64[seq] cache_position")
    check(source, [(2, 3, {"cache_position": [4, 5, 6]}), (1, 1, {"cache_position": [9]})])


def test_first_prompt_into_an_empty_buffer():
    check(cached(constants=NUMBERS + "  places = Identity(steps)\n", inputs=""), [(1, 5, {}), (3, 12, {})])


def test_length_that_counts_the_new_tokens_less_a_number():
    constants = NUMBERS + "  before = Sub(length_after, two_s)\n  places = Add(steps, before)\n"
    source = cached(constants=constants, inputs=", int64 length_after")
    model, report = fused(source, prove=False)
    assert len(report.fused) == 1
    feeds = {"length_after": np.asarray(9)}
    random = np.random.default_rng(2)
    for value in source.graph.inputs:
        if value.name not in feeds:
            shape = [dim if isinstance(dim, int) else 2 for dim in value.shape]
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
    for before, after in zip(run(source, feeds), run(model, feeds), strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-6 * np.abs(before).max())


PADDED = CAUSAL.replace("hidden = Greater(columns, rows)", "later = Greater(columns, rows)\n  hidden = Or(later, padding)")


def test_padding_beside_causality_stays_a_mask():
    minus_infinity = PADDED.replace("low = Constant<value = float {{-3.0e38}}>()", "low = Log(zero_f)")
    constants = ONE_LENGTH + "  zero_f = Constant<value = float {0.0}>()\n"
    source = cached(mask=minus_infinity, constants=constants, inputs=", int64 past_length, bool[batch,1,1,12] padding")
    model, report = fused(source)
    assert len(report.fused) == 1 and report.fused[0].note == ""
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert node.inputs[10] is not None


def test_padding_with_a_finite_number_declines():
    """A row whose keys are all padding is the mean of all values, of unwritten ones too: no node means that."""
    declines(cached(mask=PADDED, inputs=", int64 past_length, bool[batch,1,1,12] padding"), "buffer")


def test_window():
    mask = CAUSAL.replace(
        "hidden = Greater(columns, rows)",
        "oldest = Sub(rows, two_s)\n  early = Less(columns, oldest)\n"
        "  later = Greater(columns, rows)\n  hidden = Or(early, later)",
    )
    spec = check(cached(mask=mask), LENGTHS)
    assert spec.attention.left_window_size == 2


# Look-alikes


def declines(source, *words):
    model, report = fused(source)
    assert not report.fused and not report.refused and not report.plain
    (miss,) = report.declined
    assert miss.hint and miss.node and all(word in miss.reason for word in words), miss
    assert any(node.op_type == "Softmax" for node in model.graph)


def test_positions_that_the_caller_gives_one_by_one_decline():
    source = cached(constants=NUMBERS + "  places = Identity(cache_position)\n", inputs=", int64[seq] cache_position")
    declines(source, "cache_position", "follow one another")


@pytest.mark.parametrize(
    "places",
    ["  twice = Mul(steps, two_s)\n  places = Add(twice, past_length)\n", "  places = Sub(past_length, steps)\n"],
)
def test_positions_with_gaps_or_backwards_decline(places):
    declines(cached(constants=NUMBERS + places), "follow one another")


@pytest.mark.parametrize(
    "hidden",
    [
        "more = Add(rows, one_s)\n  hidden = Greater(columns, more)",  # sees one entry that is not written yet
        "hidden = GreaterOrEqual(columns, rows)",  # does not see itself
        "hidden = Greater(columns, cap_s)",  # sees all of the buffer
        "other = Unsqueeze(steps, one1)\n  hidden = Greater(columns, other)",  # counted from the front
    ],
)
def test_other_masks_decline(hidden):
    declines(cached(mask=CAUSAL.replace("hidden = Greater(columns, rows)", hidden)), "buffer")


def test_mask_of_the_caller_declines():
    mask = CAUSAL.replace("hidden = Greater(columns, rows)", "hidden = Identity(hidden_in)")
    declines(cached(mask=mask, inputs=", int64 past_length, bool[batch,1,seq,12] hidden_in"), "buffer")


def test_values_written_elsewhere_decline():
    constants = ONE_LENGTH + "  vr_places = Add(places, one_s)\n"
    declines(cached(constants=constants), "same places")


def test_keys_added_to_the_buffer_decline():
    declines(cached(SCATTER_ELEMENTS.replace("axis=2", 'axis=2, reduction="add"')))


def test_keys_cached_in_front_of_their_norm_are_attended_without_a_cache_inside():
    """All of the buffer is normalised in each call: the node gets it as its keys, and the mask as a bias."""
    late = RMS.replace("{x}", "{n}_present").replace("{y}", "{n}_normed").replace("{w}", "k_weight")
    repeated = REPEATED.replace("Unsqueeze({n}_present", "Unsqueeze({n}_normed")
    source = cached(SCATTER_ND + late, repeated=repeated, k_norm=SAME, rotary=SAME)
    model, report = fused(source)
    assert [item.note for item in report.fused] == [""] and not report.fused[0].spec.attention.is_causal
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert len(node.outputs) == 1 and node.inputs[10] is not None
    assert sum(node.op_type == "ScatterND" for node in model.graph) == 2


def test_without_norms_it_is_plain():
    for source in (
        cached(q_norm=SAME, k_norm=SAME),
        cached(constants=NUMBERS + "  places = Mul(steps, past_length)\n", q_norm=SAME, k_norm=SAME),
    ):
        _, report = fused(source)
        assert not report.fused and not report.declined and len(report.plain) == 1


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


class OnBuffers(torch.nn.Module):
    """A model of Hugging Face on buffers that its caller keeps, by transformers' own StaticCache."""

    def __init__(self, model, capacity):
        super().__init__()
        self.model, self.capacity = model, capacity

    def forward(self, input_ids, past_length, key_0, value_0, key_1, value_1):
        cache = transformers.StaticCache(config=self.model.config, max_cache_len=self.capacity)
        for layer, keys, values in zip(cache.layers, (key_0, key_1), (value_0, value_1), strict=True):
            layer.keys, layer.values, layer.cumulative_length = keys.clone(), values.clone(), past_length.clone()
            layer.device, layer.dtype, layer.is_initialized = keys.device, keys.dtype, True
        positions = (past_length + torch.arange(input_ids.shape[1]))[None]
        out = self.model(input_ids, past_key_values=cache, position_ids=positions, use_cache=True)
        return out.logits, *[tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def tiny_qwen3(implementation):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
        max_position_embeddings=128,
        attn_implementation=implementation,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_static_cache_of_transformers(implementation):
    """Prompts and tokens of two batches, against the model with the cache that grows; buffers are full of junk at first."""
    model, capacity = tiny_qwen3(implementation), 80
    past = [torch.zeros(2, 2, capacity, 8) for _ in range(4)]
    sizes = {"input_ids": {0: "batch", 1: "seq"}, "past_length": {}}
    sizes |= {name: {0: "batch"} for name in ("key_0", "value_0", "key_1", "value_1")}
    program = qk.export(OnBuffers(model, capacity), (torch.ones(2, 3, dtype=int), torch.tensor(4), *past), dynamic_shapes=sizes)
    assert [item.note for item in program.report.fused] == ["", ""] and program.report.complete
    assert all(item.spec.attention.is_causal for item in program.report.fused)
    session = qk.create_session(program)
    for batch in (1, 3):
        buffers = [100 * torch.randn(batch, 2, capacity, 8).numpy() for _ in range(4)]
        grown, length = transformers.DynamicCache(config=model.config), 0
        for new in (5, 1, 70, 1, 1):
            ids = torch.randint(0, 96, (batch, new))
            feeds = dict(zip(["key_0", "value_0", "key_1", "value_1"], buffers, strict=True))
            feeds |= {"input_ids": ids.numpy(), "past_length": np.asarray(length)}
            logits, *buffers = session.run(None, feeds)
            with torch.no_grad():
                expected = model(ids, past_key_values=grown, use_cache=True).logits
            length += new
            torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=5e-6 * float(expected.abs().max()))
            torch.testing.assert_close(torch.from_numpy(buffers[0][:, :, :length]), grown.layers[0].keys, rtol=0, atol=2e-5)
