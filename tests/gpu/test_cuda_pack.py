"""Compilation ahead of time: it works without a GPU, keeps its matrix instructions and is the same every time."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

from qknorm_onnx.custom_ops.compile_kernels import ARCHITECTURES, LARGEST_PACK, TRITON_VERSION, main
from qknorm_onnx.custom_ops.kernels.cuda import arguments, image_set
from qknorm_onnx.custom_ops.kernels.cuda.image_report import EXPECTED_INSTRUCTION, LARGEST_SHARED, WITHOUT_LOOP_SPILLS
from qknorm_onnx.custom_ops.kernels.cuda.image_set import all_images, parameters
from qknorm_onnx.custom_ops.kernels.cuda.kernel_pack import has_ptx
from qknorm_onnx.custom_ops.kernels.cuda.machine_code import Instruction, key_loop, matrix_instructions, parse_instructions

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "cuda_images.md"


def compile_kernels(cache: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The compiler in a process of its own: this one interprets. `cache` is Triton's, so that nothing old is taken."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "qknorm_onnx.custom_ops.compile_kernels", "--jobs", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def contents(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_small_pack(tmp_path):
    """Prefill for the two architectures whose matrix instructions are easily lost."""
    chosen = ("--arch", "sm_90", "sm_100", "--only", "^prefill-bfloat16-d128(-masked)?$")
    done = compile_kernels(tmp_path / "cache", *chosen, "--out", str(tmp_path / "pack"), "--report", str(tmp_path / "report.md"))
    assert done.returncode == 0, done.stderr
    rows = [row.split(" | ") for row in (tmp_path / "report.md").read_text().splitlines()[2:]]
    assert [row[1] for row in rows] == ["90", "90", "100", "100"]
    assert all(re.fullmatch(r"[1-9]\d* HGMMA" if row[1] == "90" else r"[1-9]\d* UTCHMMA", row[7]) for row in rows)
    assert {row[8] for row in rows} == {"0"}
    check_manifest(tmp_path / "pack")
    assert compile_kernels(tmp_path / "other cache", *chosen, "--out", str(tmp_path / "again")).returncode == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "pack")


def test_a_pack_of_an_old_architecture_has_ptx_for_newer_ones(tmp_path):
    assert (
        compile_kernels(
            tmp_path / "cache", "--arch", "sm_80", "--only", "^combine-float16-d128$", "--out", str(tmp_path)
        ).returncode
        == 0
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [(entry["form"], entry["exact"]) for entry in manifest["images"]] == [("cubin", 0), ("ptx", 0)]
    text = (tmp_path / manifest["images"][1]["file"]).read_bytes()
    assert b".target sm_80\n" in text
    assert text.endswith(b"\0")


def check_manifest(folder):
    """The manifest describes the files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["triton"] == TRITON_VERSION
    assert {entry["form"] for entry in manifest["images"]} == {"cubin"}  # PTX of sm_90a would not run on anything else
    for entry in manifest["images"]:
        content = (folder / entry["file"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["bytes"] == len(content)
        assert content.startswith(b"\x7fELF")
        assert entry["exact"] == 1
        assert entry["constants"]["BM"] == entry["rows"] == (64 if entry["masked"] else 128)
        assert entry["shared"] >= 64 * 1024


def test_pytorchs_launcher_compiles_at_run_time():
    """The same kernels specialised by the arguments of a call, as on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(ROOT / "tests" / "gpu" / "jit_compilation.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["prepare (38, 40, 1) - -1", "prefill (3, 32, 1) HGMMA 0", "decode (1, 8, 2) HMMA 0"]
    awkward = [line.split()[0] for line in lines[3:]]
    assert awkward == ["row_statistics", "prepare", "prefill"] * 2 + ["decode", "combine"]


@pytest.mark.slow
def test_the_whole_pack(tmp_path):
    done = compile_kernels(tmp_path / "cache", "--out", str(tmp_path / "pack"), "--report", str(tmp_path / "report.md"))
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "pack.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (tmp_path / "pack").iterdir():
            archive.write(path)
    assert (tmp_path / "pack.zip").stat().st_size < LARGEST_PACK


def test_the_committed_table_is_of_the_whole_pack():
    """The table in the documents, which --report writes: every image of every architecture, none with a complaint."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    columns = (
        "image",
        "sm",
        "tile",
        "warps",
        "registers",
        "stack",
        "shared",
        "matrix instructions",
        "spills in key loop",
        "bytes",
    )
    header = lines.index("| " + " | ".join(columns) + " |")
    rows = [dict(zip(columns, line.strip("| ").split(" | "), strict=True)) for line in lines[header + 2 :]]
    images = {image.name: image for image in all_images()}
    wanted = [(image, capability) for capability in (80, 90, 100, 120) for image in images.values()]
    assert [(row["image"], int(row["sm"])) for row in rows] == [(image.name, capability) for image, capability in wanted]
    for row, (image, capability) in zip(rows, wanted, strict=True):
        tile = image.tile(capability)
        assert row["tile"] == (f"{tile.rows}x{tile.keys}" if tile.keys else str(tile.rows))
        assert int(row["shared"]) <= LARGEST_SHARED[capability]
        if image.hinted and image.kernel in ("prefill", "decode") and image.dtype != "float32":
            instruction = EXPECTED_INSTRUCTION.get((image.kernel, capability), "HMMA")
            assert re.fullmatch(rf"[1-9]\d* {instruction}", row["matrix instructions"]), row
            assert capability not in WITHOUT_LOOP_SPILLS or row["spills in key loop"] == "0", row


def test_names_are_unique_and_every_image_has_a_general_substitute():
    images = all_images()
    assert len({image.name for image in images}) == len(images)
    for image in images:
        if image.kernel == "combine":
            continue
        substitutes = [
            other
            for other in images
            if not other.hinted
            and (other.kernel, other.dtype) == (image.kernel, image.dtype)
            and (other.interleaved, other.statistics) == (image.interleaved, image.statistics)
            and other.padded >= image.padded
            and (other.capped, other.masked) >= (image.capped, image.masked)
        ]
        assert substitutes, image.name
        assert any(has_ptx(other) for other in substitutes), image.name


def test_parameters_follow_the_kernels_signatures():
    from qknorm_onnx.custom_ops.kernels.cuda.compile_image import KERNELS

    for image in all_images():
        arguments_of_kernel = list(dict.fromkeys(p.name.split(".")[0] for p in parameters(image)))
        constants = list(image.constants(90))
        assert KERNELS[image.kernel].arg_names == [*arguments_of_kernel, *constants], image.name


def test_the_launcher_has_the_flags_of_the_kernels():
    """Bits are declared in Python for the kernels and in C++ for the launcher."""
    header = (ROOT / "custom_ops" / "ort" / "cuda_arguments.h").read_text(encoding="utf-8")
    declared = {name.upper(): 1 << int(bit) for name, bit in re.findall(r"^  k(\w+) = 1 << (\d+),", header, flags=re.MULTILINE)}
    names = [name for name in vars(arguments) if name.isupper() and not name.startswith(("MASK", "FROM", "LOG2"))]
    assert {name.replace("_", ""): getattr(arguments, name).value for name in names} == declared


def test_wrong_usage_is_told(capsys):
    assert main(["--only", "no such kernel"]) == 2
    assert "no image has a name like 'no such kernel'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--arch", "sm_70"])
    assert main(["--only", "^combine-float16-d128$"]) == 1  # this process interprets
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    assert ARCHITECTURES == ("sm_80", "sm_90", "sm_100", "sm_120")
    assert image_set.PADDED_HEADS == (64, 128, 256)


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/              @!P0 STL [R1], R2 ;
        /*0030*/               @P1 BRA 0x10 ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0050*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0060*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0070*/              @!UP0 BRA 0x40 ;
        /*0080*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0090*/               @P1 BRA 0x80 ;
        /*00a0*/                   EXIT ;
"""


def test_the_key_loop_is_the_shortest_with_matrix_instructions():
    instructions = parse_instructions(LISTING)
    assert len(instructions) == 11
    assert matrix_instructions(instructions) == ("HMMA", 2)
    loop = key_loop(instructions)
    assert loop[0] == Instruction(address=0x10, name="HMMA.16816.F32.BF16")
    assert [each.name.split(".")[0] for each in loop] == ["HMMA", "STL", "BRA"]
    assert key_loop(instructions[8:]) == ()
