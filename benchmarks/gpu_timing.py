"""Times on a GPU: CUDA graphs, events, medians; and what the device itself can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CACHE_BYTES = 256 * 1024 * 1024  # more than the last cache level of any GPU so far


def seconds(call: Callable[[], Any], *, device: str, repeats: int, flush: bool = False) -> float:
    """Median time of `call`.

    On a GPU the call is captured in a CUDA graph, so that what it costs the CPU to launch is left out; a call that cannot
    be captured is launched as it is. `flush` overwrites the caches before each repeat.
    """
    call()
    if device == "cpu":
        return statistics.median(_wall(call) for _ in range(repeats))
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
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e-3


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
    return 2.0 * size**3 / seconds(lambda: a @ b, device=device, repeats=repeats)


def copy_bandwidth(*, count: int, device: str, repeats: int) -> float:
    """Bytes/s read and written by a copy of `count` bytes."""
    source = torch.empty(count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2.0 * count / seconds(lambda: target.copy_(source), device=device, repeats=repeats)
