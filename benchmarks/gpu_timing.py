"""Times on a GPU: CUDA graphs, events, medians; and what the device itself can do."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CACHE_BYTES = 256 * 1024 * 1024  # more than the last cache level of any GPU so far


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median time in seconds; `captured`: of a CUDA graph's replay, else of launches by the CPU."""

    seconds: float
    captured: bool


def timing(call: Callable[[], Any], *, device: str, repeats: int, flush: bool = False) -> Timing:
    """Median time of `call`.

    On a GPU the call is captured in a CUDA graph, so that what it costs the CPU to launch is left out; a call that cannot
    be captured is launched as it is. `flush` overwrites the caches before each repeat.
    """
    call()
    if device == "cpu":
        return Timing(statistics.median(_wall(call) for _ in range(repeats)), False)
    torch.cuda.synchronize()
    replay = _captured(call)
    scratch = torch.empty(CACHE_BYTES if flush else 1, dtype=torch.int8, device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for _ in range(3):
        replay()
    for start, end in pairs:
        if flush:
            scratch.zero_()
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    median = statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e-3
    return Timing(median, replay is not call)


def enqueue_seconds(call: Callable[[], Any], *, device: str, repeats: int) -> float:
    """What one call costs the CPU that launches it, without waiting for the GPU: median of `repeats`."""
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    taken = [_wall(call) for _ in range(repeats)]
    if device == "cuda":
        torch.cuda.synchronize()
    return statistics.median(taken)


def _wall(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def matmul_rate(*, size: int, dtype: torch.dtype, device: str, repeats: int) -> float:
    """FLOP/s of a square matrix product: the most that attention could reach."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / timing(lambda: a @ b, device=device, repeats=repeats).seconds


def copy_bandwidth(*, count: int, device: str, repeats: int) -> float:
    """Bytes/s read and written by a copy of `count` bytes."""
    source = torch.empty(count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2.0 * count / timing(lambda: target.copy_(source), device=device, repeats=repeats).seconds
