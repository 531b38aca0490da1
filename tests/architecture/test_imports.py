"""What may be missing: the package imports without torch, onnxruntime and transformers, and says so where it needs them."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONAL = ("torch", "onnxruntime", "transformers", "safetensors", "triton")

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)

sys.meta_path.insert(0, Blocked())
"""


def package_modules() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    modules = []
    for installed, folder in settings["tool"]["scikit-build"]["wheel"]["packages"].items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = pathlib.PurePosixPath(installed, path.relative_to(ROOT / folder).as_posix()).with_suffix("").parts
            modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(module for module in modules if not module.startswith("qknorm_onnx.custom_ops.kernels"))


def run_without(blocked: tuple[str, ...], code: str) -> str:
    script = BLOCK.format(blocked=set(blocked)) + code
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_that_sees_no_pytorch_model_imports_without_the_extras() -> None:
    above = ("qknorm_onnx.torch_export", "qknorm_onnx.validation", "qknorm_onnx.checked_export")
    modules = [module for module in package_modules() if not module.startswith(above)]
    assert len(modules) > 20
    code = f"""
import importlib
failed = []
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{{name}}: {{type(error).__name__}}: {{error}}")
print("\\n".join(failed))
"""
    assert run_without(OPTIONAL, code).strip() == ""


def test_every_module_imports_with_them() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    # Named after what they need: torch_op imports them where a tensor is on a GPU.
    modules = [module for module in package_modules() if not module.startswith("qknorm_onnx.torch_export.operators.triton_")]
    code = f"import importlib\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
    run_without(("triton",), code)


@pytest.mark.parametrize("blocked", OPTIONAL[:3])
def test_one_missing_extra_does_not_stop_the_others(blocked: str) -> None:
    run_without((blocked,), "import qknorm_onnx as qk\nqk.fuse, qk.create_session, qk.library_path, qk.QKNormSpec\n")


def test_importing_the_package_is_light() -> None:
    heavy = (*OPTIONAL, "onnx", "onnx_ir", "onnxscript", "numpy", "rich")
    code = f"import qknorm_onnx\nimport sys\nprint(sorted(set({heavy!r}) & set(sys.modules)))\n"
    assert run_without((), code).strip() == "[]"


def test_the_door_leads_everywhere_it_says() -> None:
    pytest.importorskip("torch")
    code = "import qknorm_onnx as qk\nfor name in qk.__all__:\n    assert getattr(qk, name) is not None, name\n"
    run_without((), code + "assert sorted(qk.__all__) == list(qk.__all__)\nassert set(qk.__all__) <= set(dir(qk))\n")


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = "import qknorm_onnx as qk\ntry:\n    qk.nothing\nexcept AttributeError as error:\n    print(error)\n"
    assert "nothing" in run_without((), code)


@pytest.mark.parametrize("wrong", ["torch_export", "custom_ops"])
def test_folders_are_importable_by_their_right_name_only(wrong: str) -> None:
    right = f"qknorm_onnx.{wrong}"
    folder = ROOT / ("export" if wrong == "torch_export" else "")
    code = f"""
import sys
sys.path.insert(0, {str(folder)!r})
try:
    import {wrong}
except ImportError as error:
    assert {right!r} in str(error), error
else:
    raise SystemExit("imported under a wrong name")
"""
    run_without((), code)


def imports_of_the_root(text: str) -> list[str]:
    """What a module takes from `qknorm_onnx` itself, whose names lead to every floor."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.level, node.module) == (0, "qknorm_onnx"):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            found += ["the package" for alias in node.names if alias.name == "qknorm_onnx"]
    return found


def test_nothing_below_reaches_through_the_root() -> None:
    """The contracts on floors see from where to where an import goes; through the root it goes everywhere."""
    assert imports_of_the_root("from qknorm_onnx import custom_ops\nimport qknorm_onnx as qk") == ["custom_ops", "the package"]
    assert imports_of_the_root("import qknorm_onnx.custom_ops as custom_ops\nfrom qknorm_onnx.spec import signature") == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {ROOT / folder for folder in settings["tool"]["scikit-build"]["wheel"]["packages"].values()}
    files = {path for folder in folders for path in folder.rglob("*.py")}
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): imports_of_the_root(path.read_text(encoding="utf-8")) for path in sorted(files)}
    # The command line says the version.
    assert {name: taken for name, taken in found.items() if taken} == {"qknorm_onnx/cli/main.py": ["the package"]}
