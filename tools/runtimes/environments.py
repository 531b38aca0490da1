"""An environment of its own for each runtime, below build/runtimes/, made of the pins in requirements/runtimes/."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from typing import Final

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
PINS: Final = ROOT / "requirements" / "runtimes"
FOLDER: Final = ROOT / "build" / "runtimes"
RUNNERS: Final = pathlib.Path(__file__).parent / "runners"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """A column of the table: the file of its pins, who runs files in it, and whether with the kernel library."""

    name: str
    pins: str
    runner: str
    with_library: bool = False

    @property
    def folder(self) -> pathlib.Path:
        """Its environment."""
        return FOLDER / pathlib.Path(self.pins).stem

    def command(self, folder: pathlib.Path, arguments: list[str]) -> tuple[list[str], pathlib.Path]:
        """What runs files of `folder`, and where."""
        from qknorm_onnx import custom_ops

        library = str(custom_ops.library_path()) if self.with_library else "-"
        runner = RUNNERS / self.runner
        if runner.suffix == ".mjs":
            return ["node", str(runner), str(folder.resolve()), library, *arguments], self.folder
        return [str(self.folder / "bin" / "python"), str(runner), str(folder.resolve()), library, *arguments], ROOT


RUNTIMES: Final = (
    *(
        Runtime(name=f"onnxruntime {version}", pins=f"onnxruntime-{version}.txt", runner="onnxruntime_runner.py")
        for version in ("1.20", "1.24", "1.27", "1.30", "1.32")
    ),
    *(
        Runtime(
            name=f"onnxruntime {version} with the library",
            pins=f"onnxruntime-{version}.txt",
            runner="onnxruntime_runner.py",
            with_library=True,
        )
        for version in ("1.24", "1.32")
    ),
    Runtime(name="onnxruntime-web 1.30", pins="onnxruntime-web.json", runner="web_runner.mjs"),
    Runtime(name="OpenVINO 2026.4", pins="openvino.txt", runner="openvino_runner.py"),
    Runtime(name="tract 0.23", pins="tract.txt", runner="tract_runner.py"),
    Runtime(name="ReferenceEvaluator 1.23", pins="onnx.txt", runner="reference_runner.py"),
)


def make(runtime: Runtime) -> None:
    """Install the environment of `runtime`, unless it is there."""
    install(PINS / runtime.pins, runtime.folder)


def install(pins: pathlib.Path, folder: pathlib.Path) -> None:
    """Make an environment of `pins` in `folder`, unless it is there."""
    done = folder / ".installed"
    if done.is_file() and done.read_text() == pins.read_text():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if pins.suffix == ".json":
        (folder / "package.json").write_text(pins.read_text())
        # Without scripts: those of packages like this one download binaries that WebAssembly does not need.
        subprocess.run(["npm", "install", "--ignore-scripts", "--no-fund", "--no-audit"], cwd=folder, check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", "-r", str(pins)], check=True)
    done.write_text(pins.read_text())


def main() -> int:
    """python -m tools.runtimes.environments NAME...: make these environments, by the names of their pins."""
    for name in sys.argv[1:]:
        make(next(runtime for runtime in RUNTIMES if pathlib.Path(runtime.pins).stem == name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
