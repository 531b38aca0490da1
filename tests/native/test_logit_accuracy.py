"""How exactly the kernels add up logits of large heads: the error must not grow as it does in one chain of additions."""

from __future__ import annotations

import numpy as np
import pytest

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, QKNormSpec
from qknorm_onnx.spec.reference import qk_norm_attention

QUERIES, KEYS, SEEDS = 16, 24, 64


def example(head_size: int, seed: int):
    """Queries and keys that need no preparation, so that nothing but logits and softmax is rounded; logits of some tens."""
    random = np.random.default_rng(seed)
    spec = QKNormSpec(attention=AttentionSpec(q_num_heads=1, kv_num_heads=1, scale=1.0))
    size = 4 * head_size**-0.25
    rows = {"query": QUERIES, "key": KEYS, "value": KEYS}
    inputs = {name: random.normal(0, size, (1, count, head_size)).astype(np.float32) for name, count in rows.items()}
    return spec, inputs


def in_one_chain(inputs):
    """Y with each logit added up in float32 one product after the other, and everything else in float64."""
    query, key, value = (inputs[name][0] for name in ("query", "key", "value"))
    products = (query[:, None] * key[None]).astype(np.float32)
    logits = np.add.accumulate(products, axis=-1, dtype=np.float32)[..., -1].astype(np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ value.astype(np.float64)


def mean_error(results):
    """Geometric mean of max|y - truth| / max|truth|."""
    return np.exp(np.mean([np.log(np.abs(y - truth).max() / np.abs(truth).max()) for y, truth in results]))


def test_logits_of_large_heads_are_not_one_chain(kernels):
    """A chain of n terms errs as n, k chains of n / k terms as n / sqrt(k): half as much with the four of 512."""
    by_kernel, by_chain = [], []
    for seed in range(SEEDS):
        spec, inputs = example(512, seed)
        truth = qk_norm_attention(spec, {name: array.astype(np.float64) for name, array in inputs.items()})["Y"][0]
        by_kernel.append((kernels.attention(spec, inputs, with_present=False)["Y"][0].astype(np.float64), truth))
        by_chain.append((in_one_chain(inputs), truth))
    assert mean_error(by_kernel) < 0.65 * mean_error(by_chain)


@pytest.mark.parametrize("head_size", [127, 128, 129, 256, 257])
def test_no_term_is_lost_where_chains_meet(kernels, head_size):
    """Small integers add up exactly, in whatever parts: the kernel's softmax of them is that of the truth to float32's own."""
    random = np.random.default_rng(head_size)
    spec = QKNormSpec(attention=AttentionSpec(q_num_heads=2, kv_num_heads=1, scale=2.0**-4))
    shapes = {"query": (1, 37, 2 * head_size), "key": (1, 29, head_size), "value": (1, 29, 5)}
    inputs = {name: random.integers(-2, 3, shape).astype(np.float32) for name, shape in shapes.items()}
    truth = qk_norm_attention(spec, {name: array.astype(np.float64) for name, array in inputs.items()})["Y"]
    y = kernels.attention(spec, inputs, with_present=False)["Y"]
    assert np.abs(y - truth).max() <= 16 * 2.0**-23 * np.abs(truth).max()
