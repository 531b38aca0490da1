"""Times of several contestants on one machine, taken in turns, so that a change of its speed meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

Clock = Callable[[], float]

# Threads of the one before may still spin, waiting for work: OpenMP's for some milliseconds, ONNX Runtime's for 40 on a
# Zen 4. Two threads of the next one would share the cores with them.
QUIET_WINDOW_SECONDS: Final = 0.01
QUIET_SHARE: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 0.5
TURN_SECONDS: Final = 0.02


def clock_for(threads: int) -> tuple[str, Clock]:
    """Name and function of the clock. One thread is timed by its own processor time, which other programs do not disturb."""
    return ("processor time", time.thread_time) if threads == 1 else ("wall clock", time.perf_counter)


def wait_until_quiet() -> None:
    """Wait until no thread of this process is running: those of the contestant before have gone to sleep."""
    deadline = time.perf_counter() + LONGEST_PAUSE_SECONDS
    while time.perf_counter() < deadline:
        begun, used = time.perf_counter(), time.process_time()
        time.sleep(QUIET_WINDOW_SECONDS)
        if time.process_time() - used < QUIET_SHARE * (time.perf_counter() - begun):
            return


def no_pause() -> None:
    """For runs whose times do not matter."""


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, clock: Clock, pause: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of each call by name, one value for each round.

    In each round everyone has a turn, beginning with another one each time. A turn is a `pause`, a call that is not timed
    (it wakes the threads), and then as many calls as fit into a fiftieth of a second, at least one; its value is their
    median.
    """
    names = list(calls)
    first = {name: seconds_of(calls[name], clock) for name in names}
    first = {name: min(first[name], seconds_of(calls[name], clock)) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            pause()
            calls[name]()
            repeats = max(1, int(TURN_SECONDS / max(first[name], 1e-6)))
            times[name].append(statistics.median(seconds_of(calls[name], clock) for _ in range(min(repeats, 50))))
    return times


def ratio_of_pairs(of: list[float], against: list[float]) -> float:
    """How many times as fast `of` is: the median over the rounds of against / of."""
    return statistics.median(other / own for own, other in zip(of, against, strict=True))


def seconds_of(call: Callable[[], object], clock: Clock) -> float:
    """How long one call takes."""
    begun = clock()
    call()
    return clock() - begun
