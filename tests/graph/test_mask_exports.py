"""Handwritten masks as torch.onnx writes them: read back, and compared with what runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from qknorm_onnx.graph.recognise.masks.mask import MaskContext

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
from tests.graph.mask_export import INFINITY, check, cores, export, masked, read, summary  # noqa: E402

DYNAMIC = torch.export.Dim.DYNAMIC


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
