"""The table of registers, shared memory and matrix instructions of compiled images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

from qknorm_onnx.custom_ops.kernels.cuda.compile_image import CompiledImage
from qknorm_onnx.custom_ops.kernels.cuda.machine_code import MachineCode, read_machine_code

# The matrix instruction that the attention kernels must use; decode's 16 rows are below what HGMMA and UTCHMMA take.
EXPECTED_INSTRUCTION: Final = {
    ("prefill", 80): "HMMA",
    ("prefill", 90): "HGMMA",
    ("prefill", 100): "UTCHMMA",
    ("prefill", 120): "HMMA",
}
WITHOUT_LOOP_SPILLS: Final = (90, 100)
# Bytes of shared memory of one program: of sm_86, 89 and 120 for the images of sm_80 and 120, which must run there.
LARGEST_SHARED: Final = {80: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageReport:
    """An image and what the assembler made of it."""

    compiled: CompiledImage
    code: MachineCode

    @property
    def complaints(self) -> tuple[str, ...]:
        """What would make the kernel slow, or not run on some processors, without anybody noticing."""
        image, capability = self.compiled.image, self.compiled.capability
        if self.compiled.shared > LARGEST_SHARED[capability]:
            return (f"{image.name} for sm_{capability} needs {self.compiled.shared} bytes of shared memory",)
        if image.kernel not in ("prefill", "decode") or image.dtype == "float32" or not image.hinted:
            return ()
        found = []
        wanted = EXPECTED_INSTRUCTION.get((image.kernel, capability), "HMMA")
        if self.code.matrix_name != wanted:
            found.append(
                f"{image.name} for sm_{capability} uses {self.code.matrix_name or 'no matrix instruction'}, not {wanted}"
            )
        if capability in WITHOUT_LOOP_SPILLS and self.code.loop_spills != 0:
            found.append(f"{image.name} for sm_{capability} has {self.code.loop_spills} spills in its key loop")
        return tuple(found)


def report(compiled: Iterable[CompiledImage]) -> Iterator[ImageReport]:
    """Disassembles the images one after the other."""
    for each in compiled:
        yield ImageReport(compiled=each, code=read_machine_code(each.cubin))


def markdown_table(reports: Iterable[ImageReport]) -> str:
    """One row for each image."""
    lines = [
        "| image | sm | tile | warps | registers | stack | shared | matrix instructions | spills in key loop | bytes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in reports:
        compiled, code = each.compiled, each.code
        tile = compiled.image.tile(compiled.capability)
        shape = f"{tile.rows}x{tile.keys}" if tile.keys else str(tile.rows)
        matrix = f"{code.matrix_instructions} {code.matrix_name}" if code.matrix_name else "-"
        spills = str(code.loop_spills) if code.loop_spills >= 0 else "-"
        cells = (
            compiled.image.name, compiled.capability, shape, compiled.warps, code.registers, code.stack,
            compiled.shared, matrix, spills, len(compiled.cubin),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"
