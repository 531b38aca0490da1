"""The wheel holds the three folders under one import name, the CUDA kernel pack where there is one, and nothing else."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tomllib
import zipfile

import pytest

from qknorm_onnx.custom_ops import LIBRARY_NAME
from qknorm_onnx.custom_ops.compile_kernels import LARGEST_PACK

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACK = "qknorm_onnx/custom_ops/cuda_kernels/"

# In a process of its own: this one must not import Triton, which the GPU tests set up for themselves.
WRITE_PACK = "import pathlib, sys; from tests.gpu.fake_pack import write_fake_pack; "
WRITE_PACK += "write_fake_pack(pathlib.Path(sys.argv[1]), capabilities=(80,))"


def run_python(code: str, *arguments: str, folder: pathlib.Path = ROOT) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def build_wheel(tmp_path_factory):
    """Builds a wheel with a kernel pack; the two of this file share their native objects."""
    folder = tmp_path_factory.mktemp("wheel")

    def build(pack: pathlib.Path) -> pathlib.Path:
        out = folder / pack.name
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out)]
        settings = {"build-dir": folder / "build", "cmake.define.QKNORM_KERNEL_PACK": pack}  # not the editable install's folder
        command += [f"--config-settings={name}={value}" for name, value in settings.items()]
        done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stderr
        (built,) = out.glob("*.whl")
        return built

    return build


@pytest.fixture(scope="module")
def wheel(build_wheel, tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("packs") / "no_such_pack")


@pytest.fixture(scope="module")
def small_pack(tmp_path_factory):
    """A pack whose image files hold names instead of code, and a file that is none of it."""
    folder = tmp_path_factory.mktemp("small_pack")
    run_python(WRITE_PACK, str(folder))
    (folder / "build.log").write_text("not for users")
    return folder


@pytest.fixture(scope="module")
def stand_in_library(tmp_path_factory):
    """A library in the place of the CUDA driver."""
    code = "import pathlib, sys; from tests.gpu.stand_in_driver import build_stand_in; "
    code += "print(build_stand_in(pathlib.Path(sys.argv[1])))"
    return run_python(code, str(tmp_path_factory.mktemp("stand_in"))).strip()


def names_in(wheel: pathlib.Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_contents(wheel):
    names = names_in(wheel)
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"qknorm_onnx"}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for installed, folder in settings["tool"]["scikit-build"]["wheel"]["packages"].items():
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder)
            if "tests" not in relative.parts:
                assert f"{installed}/{relative.as_posix()}" in names
    assert "qknorm_onnx/py.typed" in names
    (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()
    assert f"qknorm_onnx/custom_ops/{LIBRARY_NAME}" in names
    assert not [name for name in names if "/tests/" in name or name.endswith((".pyc", ".o", ".a"))]
    assert not [name for name in names if name.startswith(PACK)]


def test_the_kernel_pack_is_data_of_the_package(build_wheel, wheel, small_pack):
    with_pack = build_wheel(small_pack)
    added = names_in(with_pack) - names_in(wheel)
    assert {name for name in added if not name.endswith("/")} == {
        PACK + path.name for path in small_pack.iterdir() if path.name != "build.log"
    }
    assert len(added) > 100
    archive = zipfile.ZipFile(with_pack)
    assert archive.read(f"{PACK}manifest.json") == (small_pack / "manifest.json").read_bytes()
    assert with_pack.stat().st_size - wheel.stat().st_size < LARGEST_PACK


INSTALLED = """
import ctypes, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
import qknorm_onnx.spec.variants as variants, qknorm_onnx.torch_export
from qknorm_onnx import custom_ops
from qknorm_onnx.runtime.environment import examine
assert variants.__file__.startswith(sys.argv[1]) and len(variants.VARIANTS) > 20
assert str(custom_ops.library_path()).startswith(sys.argv[1])
ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)  # in the place of the driver
message = ctypes.create_string_buffer(512)
code = ctypes.CDLL(str(custom_ops.library_path())).qknorm_cuda_check(message)
print(code == 0, message.value.decode(), sep="|")
print(*next((finding.state, finding.detail) for finding in examine() if finding.name == "CUDA kernels"), sep="|")
"""


def test_the_installed_package_finds_its_pack(build_wheel, small_pack, stand_in_library, tmp_path):
    """The C++ launcher and the doctor, without an environment variable."""
    zipfile.ZipFile(build_wheel(small_pack)).extractall(tmp_path)
    launcher, doctor = run_python(INSTALLED, str(tmp_path), stand_in_library, folder=tmp_path).splitlines()
    assert launcher == "True|"
    assert doctor.startswith(f"ok|{tmp_path}/{PACK[:-1]}")


def test_without_a_pack_the_installed_package_says_so(wheel, stand_in_library, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    launcher, doctor = run_python(INSTALLED, str(tmp_path), stand_in_library, folder=tmp_path).splitlines()
    assert launcher.startswith(f"False|the CUDA kernel pack lacks {tmp_path}/{PACK}manifest.json; make one with")
    assert doctor == f"missing|there is no CUDA kernel pack in {tmp_path}/{PACK[:-1]}"
