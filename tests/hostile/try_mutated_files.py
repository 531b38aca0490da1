"""Try mutated model files at every door, in processes with limits: `python -m tests.hostile.try_mutated_files COUNT [FIRST]`.

Prints what became of them as one JSON object, and each file that ended otherwise than in a pass or in one line.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

from tests.hostile.mutation import write_mutated
from tests.hostile.probe import DOORS, outcome

MEMORY = 4 << 30  # bytes of address space of a process
SECONDS = 20.0  # for one file at one door
CHUNK = 200  # files of one process


def try_files(count: int, first: int) -> collections.Counter[str]:
    """Verdicts of `count` files from number `first` on, over all doors; a file that ends its process is "died"."""
    counts: collections.Counter[str] = collections.Counter()
    number = first
    while number < first + count:
        size = min(CHUNK, first + count - number)
        lines = _in_a_process(number, size)
        for line in lines:
            counts[line["verdict"]] += 1
            if line["verdict"] not in ("passed", "refused"):
                print(json.dumps(line), file=sys.stderr, flush=True)
        done = sum(line["door"] == DOORS[-1] for line in lines)
        if done < size:
            counts["died"] += 1
            print(json.dumps({"file": number + done, "verdict": "died", "after": lines[-1:]}), file=sys.stderr, flush=True)
            done += 1
        number += done
    return counts


def _in_a_process(first: int, count: int) -> list[dict[str, str]]:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _work(first, count, write_end)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        lines = [json.loads(line) for line in pipe]
    os.waitpid(child, 0)
    return lines


def _work(first: int, count: int, write_end: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # onnxruntime's own log
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            path = write_mutated(number, Path(folder))
            for door in DOORS:
                signal.setitimer(signal.ITIMER_REAL, SECONDS)
                verdict, detail = outcome(door, path)
                signal.setitimer(signal.ITIMER_REAL, 0)
                line = {"file": number, "door": door, "verdict": verdict, "detail": detail.replace(folder, "")}
                os.write(write_end, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    print(json.dumps(try_files(wanted, int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
