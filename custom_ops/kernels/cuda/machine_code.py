"""What the assembler made of an image: registers, stack, matrix instructions, and spills inside the key loop.

Read with the `cuobjdump` that Triton brings along.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Final

import triton

MATRIX_INSTRUCTIONS: Final = ("UTCHMMA", "UTCQMMA", "HGMMA", "HMMA", "QGMMA", "DMMA")
SPILL_INSTRUCTIONS: Final = ("LDL", "STL")

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: its address, its name with modifiers, and where it branches to (-1: it does not)."""

    address: int
    name: str
    target: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineCode:
    """Figures of one cubin.

    `matrix_instructions` counts the name that occurs most among MATRIX_INSTRUCTIONS; `loop_spills` are the spill
    instructions of the key loop: the shortest loop that holds matrix instructions. -1 where there is no such loop.
    """

    registers: int
    stack: int
    matrix_name: str
    matrix_instructions: int
    loop_spills: int


def read_machine_code(cubin: bytes) -> MachineCode:
    """Disassembles an image. Raises RuntimeError where the disassembler fails or its output is not understood."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "image.cubin"
        path.write_bytes(cubin)
        usage = _run("-res-usage", path)
        instructions = parse_instructions(_run("-sass", path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None or not instructions:
        raise RuntimeError("cuobjdump printed neither registers nor instructions")
    name, count = matrix_instructions(instructions)
    loop = key_loop(instructions)
    spills = sum(instruction.name.split(".")[0] in SPILL_INSTRUCTIONS for instruction in loop) if loop else -1
    return MachineCode(
        registers=int(found[1]), stack=int(found[2]), matrix_name=name, matrix_instructions=count, loop_spills=spills
    )


def _run(option: str, path: pathlib.Path) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {option} failed: {done.stderr.strip()}")
    return done.stdout


def parse_instructions(listing: str) -> tuple[Instruction, ...]:
    """The instructions of a `cuobjdump -sass` listing, in order of their addresses."""
    found = []
    for line in listing.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        target = _TARGET.search(match[3]) if match[2].split(".")[0] == "BRA" else None
        found.append(Instruction(address=int(match[1], 16), name=match[2], target=int(target[1], 16) if target else -1))
    return tuple(found)


def matrix_instructions(instructions: Sequence[Instruction]) -> tuple[str, int]:
    """The matrix instruction that occurs most, and how often."""
    names = [instruction.name.split(".")[0] for instruction in instructions]
    counts = {name: names.count(name) for name in MATRIX_INSTRUCTIONS}
    name = max(counts, key=lambda each: counts[each])
    return (name, counts[name]) if counts[name] else ("", 0)


def key_loop(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The shortest loop (a branch backwards and all up to its target) with matrix instructions inside."""
    loops = []
    for branch in instructions:
        if 0 <= branch.target <= branch.address:
            body = tuple(each for each in instructions if branch.target <= each.address <= branch.address)
            if matrix_instructions(body)[1]:
                loops.append(body)
    return min(loops, key=len, default=())
