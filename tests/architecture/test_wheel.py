"""The wheel holds the three folders under one import name, and nothing else."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import zipfile

import pytest
import tomllib

from qknorm_onnx.custom_ops import LIBRARY_NAME

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    build_folder = f"--config-settings=build-dir={folder / 'build'}"  # leaves the editable install's build folder alone
    done = subprocess.run([*command, build_folder, str(ROOT)], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_contents(wheel: pathlib.Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"qknorm_onnx"}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for installed, folder in settings["tool"]["scikit-build"]["wheel"]["packages"].items():
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder)
            if "tests" not in relative.parts:
                assert f"{installed}/{relative.as_posix()}" in names
    assert "qknorm_onnx/py.typed" in names
    assert f"qknorm_onnx/custom_ops/{LIBRARY_NAME}" in names
    assert not [name for name in names if "/tests/" in name or name.endswith((".pyc", ".o", ".a"))]


def test_it_works_outside_the_repository(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import qknorm_onnx.spec.variants as variants, qknorm_onnx.torch_export, qknorm_onnx.custom_ops\n"
        "assert len(variants.VARIANTS) > 20\n"
        f"assert str(qknorm_onnx.custom_ops.library_path()).startswith({str(tmp_path)!r})\n"
        "print(variants.__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
