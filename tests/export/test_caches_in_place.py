"""Exported decoders whose caches stay in place or grow, by one file: both against transformers, and beside each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import qknorm_onnx as qk
from qknorm_onnx.torch_export.huggingface.cached_decoder import CachedDecoder, cached_example
from tests.serving.tiny_models import WINDOW, random_decoder

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 16
FAMILIES = ("qwen3", "gemma3", "llama4")  # no window, windows, layers without rotary


@dataclasses.dataclass(frozen=True)
class Decoder:
    family: str
    model: Any
    program: qk.Program


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    model = random_decoder(request.param)
    inputs, axes = cached_example(model)
    program = qk.export(CachedDecoder(model), kwargs=inputs, dynamic_shapes=axes, require_fusion=True)
    return Decoder(request.param, model, program)


class Steps:
    """A session fed chunk by chunk, in buffers of `capacity` entries that past and present share, or with a growing cache."""

    def __init__(self, program: qk.Program, *, batch: int, capacity: int | None = None, native: bool = True) -> None:
        self.session = qk.create_session(program, native_kernels=native)
        entries = capacity or 0
        fill = np.nan if capacity else 0.0  # what was never written is not read
        self.in_place = capacity is not None
        self.caches = {
            f"{layer}.{side}": onnxruntime.OrtValue.ortvalue_from_numpy(
                np.full((batch, KV_HEADS, entries, HEAD_SIZE), fill, dtype=np.float32)
            )
            for layer in range(LAYERS)
            for side in ("key", "value")
        }

    def step(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The logits of the tokens `ids` (B, S) behind those that the mask (B, all tokens) has columns for."""
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        binding = self.session.io_binding()
        for name, value in (("input_ids", ids), ("attention_mask", mask), ("position_ids", positions)):
            binding.bind_cpu_input(name, np.ascontiguousarray(value, dtype=np.int64))
        binding.bind_output("logits")
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", cache)
            if self.in_place:
                binding.bind_ortvalue_output(f"present.{name}", cache)
            else:
                binding.bind_output(f"present.{name}")
        self.session.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        if not self.in_place:
            self.caches = dict(zip(self.caches, outputs[1:], strict=True))
        return outputs[0].numpy()


def in_chunks(steps: Steps, ids: np.ndarray, mask: np.ndarray, chunks: list[int]) -> np.ndarray:
    logits, done = [], 0
    for length in chunks:
        logits.append(steps.step(ids[:, done : done + length], mask[:, : done + length]))
        done += length
    return np.concatenate(logits, axis=1)


def text(batch: int, length: int, *, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask; row b is padded on the left by `padding` * b."""
    ids = np.random.default_rng(7).integers(1, 256, (batch, length))
    mask = np.ones_like(ids)
    for row in range(batch):
        mask[row, : padding * row] = 0
    return ids, mask


def of_transformers(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        return model(**{name: torch.tensor(value) for name, value in given.items()}).logits.numpy()


def error(found: np.ndarray, expected: np.ndarray, mask: np.ndarray) -> float:
    real = mask.astype(bool)
    return float(np.abs(found[real] - expected[real]).max() / np.abs(expected[real]).max())


@pytest.mark.parametrize(("native", "capacity"), [(True, None), (True, 29), (True, 64), (False, None)])
@pytest.mark.parametrize(("batch", "padding"), [(1, 0), (3, 4)])
def test_chunks_and_tokens_are_those_of_transformers(
    decoder: Decoder, native: bool, capacity: int | None, batch: int, padding: int
) -> None:
    """A prompt longer than the window, a chunk, single tokens; left padding; a buffer that is just filled and one with room."""
    ids, mask = text(batch, 29, padding=padding)
    steps = Steps(decoder.program, batch=batch, capacity=capacity, native=native)
    found = in_chunks(steps, ids, mask, [WINDOW + 3, 7, 1, 1, 1, 5, 1, 1, 1])
    assert error(found, of_transformers(decoder.model, ids, mask), mask) < 2e-5


def test_forty_steps_in_place_are_those_of_a_growing_cache(decoder: Decoder) -> None:
    ids, mask = text(3, 45, padding=2)
    chunks = [5] + [1] * 40
    growing, fixed = Steps(decoder.program, batch=3), Steps(decoder.program, batch=3, capacity=61)
    places = {name: cache.data_ptr() for name, cache in fixed.caches.items()}
    expected, found = (in_chunks(steps, ids, mask, chunks) for steps in (growing, fixed))
    np.testing.assert_array_equal(found, expected)
    for name, cache in fixed.caches.items():
        assert cache.data_ptr() == places[name]
        np.testing.assert_array_equal(cache.numpy()[:, :, :45], growing.caches[name].numpy())
        assert np.isnan(cache.numpy()[:, :, 45:]).all()


def test_function_bodies_take_buffers_with_room(decoder: Decoder) -> None:
    """Without the library the present is a buffer of its own, as large as the past."""
    ids, mask = text(2, 14, padding=3)
    steps = Steps(decoder.program, batch=2, capacity=20, native=False)
    steps.in_place = False
    found = in_chunks(steps, ids, mask, [WINDOW + 1, 1, 4])
    assert {tuple(cache.shape()) for cache in steps.caches.values()} == {(2, KV_HEADS, 20, HEAD_SIZE)}
    assert error(found, of_transformers(decoder.model, ids, mask), mask) < 2e-5


def test_rewinding_and_keeping_a_prefix(decoder: Decoder) -> None:
    """A mask of fewer columns goes back: what was behind is overwritten."""
    ids, mask = text(1, 20)
    steps = Steps(decoder.program, batch=1, capacity=32)
    in_chunks(steps, ids, mask, [12, 8])
    other = ids.copy()
    other[:, 9:] = np.random.default_rng(8).integers(1, 256, (1, 11))
    found = np.concatenate([steps.step(other[:, 9:15], mask[:, :15]), steps.step(other[:, 15:], mask)], axis=1)
    assert error(found, of_transformers(decoder.model, other, mask)[:, 9:], mask[:, 9:]) < 2e-5


def test_a_buffer_without_room_is_not_written_over(decoder: Decoder) -> None:
    """onnxruntime refuses the present that would be larger than what is bound."""
    ids, mask = text(1, 9)
    steps = Steps(decoder.program, batch=1, capacity=8)
    with pytest.raises(Exception, match=r"present|shape"):
        in_chunks(steps, ids, mask, [6, 3])


def test_lengths_of_caches_have_names(decoder: Decoder) -> None:
    shapes = {
        value.name: list(value.shape) for value in (*decoder.program.model.graph.inputs, *decoder.program.model.graph.outputs)
    }
    assert not [note for note in decoder.program.report.notes if "caches" in note]
    assert [str(dim) for dim in shapes["past_key_values.1.value"]] == ["batch", "2", "past_sequence", "16"]
    assert [str(dim) for dim in shapes["present.1.value"]] == ["batch", "2", "present_sequence", "16"]
