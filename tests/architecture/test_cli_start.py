"""The command line starts fast: nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "onnxruntime", "transformers", "onnx", "onnx_ir", "onnxscript")
LIMIT_IN_SECONDS = 0.5
ARGUMENTS = [["--help"], ["inspect", "--help"], ["fuse", "--help"]]


def cpu_seconds_of_children() -> float:
    """Processor time: the wall clock would also measure the other tests on the same cores."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_help_is_fast(arguments: list[str]) -> None:
    code = f"import sys; sys.argv = ['qknorm-onnx', *{arguments!r}]\nfrom qknorm_onnx.cli.main import main\nmain()"
    durations = []
    for _ in range(3):
        before = cpu_seconds_of_children()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        durations.append(cpu_seconds_of_children() - before)
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout
    assert min(durations) < LIMIT_IN_SECONDS


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['qknorm-onnx', '--help']\n"
        "from qknorm_onnx.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip().splitlines()[-1] == "[]"
