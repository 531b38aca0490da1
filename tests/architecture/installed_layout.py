"""Runs mypy or import-linter over the package as it is installed, not as it lies in the repository.

The import package `qknorm_onnx` is put together from three top-level folders (pyproject.toml, section
`tool.scikit-build.wheel.packages`). Run from the repository root, mypy sees only one of them and says nothing, and
import-linter is misled by the editable install. Both are therefore run in `build/layout`, a tree of symbolic links with
the installed shape, and the number of modules that they saw is compared with the number of files there.

    python tests/architecture/installed_layout.py types | floors
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any, Final

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
LAYOUT: Final = ROOT / "build" / "layout"
SETTINGS: Final = ROOT / "pyproject.toml"


def package_folders() -> dict[str, str]:
    """Installed path -> folder in the repository, outer packages first."""
    settings: dict[str, Any] = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
    folders: dict[str, str] = settings["tool"]["scikit-build"]["wheel"]["packages"]
    return dict(sorted(folders.items()))


def make_layout() -> int:
    """Makes the tree anew; returns the number of Python files in it."""
    shutil.rmtree(LAYOUT, ignore_errors=True)
    for installed, folder in package_folders().items():
        _link_files(ROOT / folder, LAYOUT / installed)
    return sum(1 for _ in LAYOUT.rglob("*.py"))


def _link_files(source: pathlib.Path, destination: pathlib.Path) -> None:
    for path in source.rglob("*"):
        if path.suffix in (".py", ".typed") and "__pycache__" not in path.parts:
            link = destination / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def check_types(num_files: int) -> int:
    """mypy --strict on every file; an error too if it saw another number of files."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(SETTINGS), "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run([*command, "-p", "qknorm_onnx"], cwd=LAYOUT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="", end="")
    seen = re.search(r"(?:in|checked) (\d+) source files?", done.stdout)
    if seen is None or int(seen.group(1)) != num_files:
        print(f"mypy saw {seen.group(1) if seen else 'no'} files, the package has {num_files}")
        return 1
    return done.returncode


def check_floors(num_files: int) -> int:
    """The contracts of `[tool.importlinter]`; an error too if the import graph has another number of modules."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, str(LAYOUT))
    os.chdir(LAYOUT)
    import grimp
    from importlinter.cli import lint_imports

    modules = [name for name in grimp.build_graph("qknorm_onnx", cache_dir=None).modules if name.startswith("qknorm_onnx")]
    if len(modules) != num_files:
        print(f"import-linter saw {len(modules)} modules, the package has {num_files} files")
        return 1
    return lint_imports(config_filename=str(SETTINGS), no_cache=True)


def main() -> int:
    """Exit code of the check that the command line names."""
    checks = {"types": check_types, "floors": check_floors}
    if len(sys.argv) != 2 or sys.argv[1] not in checks:
        print(f"usage: {pathlib.Path(sys.argv[0]).name} {' | '.join(checks)}", file=sys.stderr)
        return 2
    return checks[sys.argv[1]](make_layout())


if __name__ == "__main__":
    sys.exit(main())
