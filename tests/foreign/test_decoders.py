"""Decoders with a cache as optimum writes them, and both of them merged in one file, as transformers.js loads it."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
import torch

import qknorm_onnx as qk
from qknorm_onnx.inspection import inspect_model
from tests.foreign.decoder_files import LAYERS, decoder, file_of, inputs, merged, run_all
from tests.foreign.foreign_models import error

# Batch, past, new positions, and how many of the last row's keys are masked.
SIZES = [(3, 5, 1, 2), (1, 7, 4, 0), (2, 9, 2, 3), (3, 0, 6, 2)]


@functools.cache
def files(attention: str, opset: int) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The decoder without a past and the one with it."""
    module = decoder(attention)
    first = {name: tensor for name, tensor in inputs(2, 0, 5).items() if not name.startswith("past")}
    return file_of(module, first, opset), file_of(module, inputs(2, 4, 3), opset)


def assert_kept(fused: onnx.ModelProto, original: onnx.ModelProto, fed: dict[str, np.ndarray]) -> None:
    """Logits and caches are those of the file that was fused."""
    for given, exact in zip(run_all(fused, fed), run_all(original, fed), strict=True):
        assert given.shape == exact.shape and error(given, exact) <= 2e-6


@pytest.mark.parametrize(("attention", "opset"), [("sdpa", 17), ("eager", 14)])
def test_a_decoder_with_past_fuses(attention: str, opset: int) -> None:
    file = files(attention, opset)[1]
    program = qk.fuse(file)
    assert len(program.report.fused) == LAYERS and not program.report.declined and not program.report.refused
    assert [value.name for value in program.to_proto().graph.output] == [value.name for value in file.graph.output]
    for batch, past, new, padded in SIZES:
        fed = inputs(batch, past, new, padded=padded)
        arrays = {name: tensor.numpy() for name, tensor in fed.items()}
        assert_kept(program.to_proto(), file, arrays)
        with torch.no_grad():
            expected = decoder(attention)(*fed.values())
        for given, exact in zip(run_all(program.to_proto(), arrays), expected, strict=True):
            assert error(given, exact.numpy()) <= 4e-6


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_merged_decoder_fuses_in_both_branches(attention: str) -> None:
    file = merged(*files(attention, 17))
    onnx.checker.check_model(file)
    program = qk.fuse(file)
    assert len(program.report.fused) == 2 * LAYERS and not program.report.declined and not program.report.refused
    assert len({fused.name for fused in program.report.fused}) == 2 * LAYERS
    assert len(inspect_model(file).recognised.fused) == 2 * LAYERS
    for batch, past, new, padded in SIZES:
        fed = {name: tensor.numpy() for name, tensor in inputs(batch, past, new, padded=padded).items()}
        assert_kept(program.to_proto(), file, fed | {"use_cache_branch": np.array([past > 0])})


def test_a_merged_decoder_serves_other_targets() -> None:
    file = merged(*files("sdpa", 17))
    fed = {name: tensor.numpy() for name, tensor in inputs(3, 5, 2, padded=1).items()}
    for target in ("ort", "primitive"):
        assert_kept(qk.fuse(file, target=target).to_proto(), file, fed | {"use_cache_branch": np.array([True])})
