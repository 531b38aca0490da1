"""What the lowering and the session do about specs that the CUDA kernels refuse."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys

import onnx
import onnx_ir as ir
import pytest
import torch

from qknorm_onnx import custom_ops
from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node
from qknorm_onnx.lowering.registry import lower
from qknorm_onnx.runtime.environment import examine
from qknorm_onnx.runtime.native_kernels import native_kernels_for
from qknorm_onnx.runtime.placement import expected_placements
from qknorm_onnx.spec import signature
from qknorm_onnx.torch_export.operators import torch_op
from tests.contract.case_models import model_of
from tests.contract.spec_cases import case
from tests.gpu.judge import check_attention, check_rotary, rounded, to_torch


def model_and_outcome(one, dtype="float32", *, target="custom-op"):
    model = model_of([one], dtype)
    (outcome,) = lower(model, target=target, provider="cuda")
    return model, outcome


def kept(model):
    return [node for node in model.graph.all_nodes() if is_attention_node(node)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_served_node_is_kept_for_the_kernel(dtype):
    model, outcome = model_and_outcome(case("served"), dtype)
    assert (outcome.target, outcome.note) == ("custom-op", "")
    assert len(kept(model)) == 1


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (case("wide", softmax_precision="float64"), "softmax_precision 'float64' has none"),
        (case("large", head_size=300), "a head of 300 values has no CUDA kernel: 256 is the largest"),
    ],
    ids=["softmax", "head"],
)
def test_a_refused_node_is_inlined_and_the_reason_said(one, reason):
    model, outcome = model_and_outcome(one)
    assert outcome.target == "primitive"
    assert reason in outcome.note
    assert not kept(model)


def test_without_a_pack_the_library_is_not_registered_for_cuda(monkeypatch, tmp_path):
    model, _ = model_and_outcome(case("served"))
    (tmp_path / custom_ops.LIBRARY_NAME).write_bytes(b"")
    monkeypatch.setattr(custom_ops, "library_path", lambda: tmp_path / custom_ops.LIBRARY_NAME)
    found = native_kernels_for(model, provider="cuda")
    assert found.library is None
    assert "there is no CUDA kernel pack in" in found.reason
    assert "compile_kernels --out" in found.reason
    (tmp_path / "cuda_kernels").mkdir()
    (tmp_path / "cuda_kernels" / "manifest.json").write_text("{}")
    assert native_kernels_for(model, provider="cuda").library == tmp_path / custom_ops.LIBRARY_NAME


def test_the_library_registers_the_cuda_kernels_of_the_signature():
    registered = {(k["op"], k["dtype"]) for k in custom_ops.build_info()["kernels"] if k["provider"] == "cuda"}
    promised = {(op, d) for (op, provider), dtypes in signature.KERNEL_DTYPES.items() if provider == "cuda" for d in dtypes}
    assert registered == promised
    assert len(registered) == 6


SESSION = """
import sys
import onnxruntime
from qknorm_onnx.custom_ops import library_path
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.register_custom_ops_library(str(library_path()))
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print(session.get_providers())
"""


def test_a_cpu_session_needs_no_driver(tmp_path):
    """The library opens libcuda only when a session makes a CUDA kernel."""
    model, _ = model_and_outcome(case("served"))
    path = tmp_path / "model.onnx"
    onnx.save(ir.to_proto(model), path)
    trace = "import ctypes, os\n" + SESSION + "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    done = subprocess.run([sys.executable, "-c", trace, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CPUExecutionProvider" in done.stdout


def test_the_check_of_driver_and_pack_is_one_sentence(driver, tmp_path):
    message = ctypes.create_string_buffer(512)
    assert driver.launcher.qknorm_cuda_check(message) == 0
    driver.use_pack(tmp_path)
    assert driver.launcher.qknorm_cuda_check(message) != 0
    assert message.value.decode().startswith("the CUDA kernel pack lacks")


@pytest.mark.parametrize("softmax_precision", ["float32", "float64"])
def test_what_torch_operators_do_on_cuda(softmax_precision):
    """Called as PyTorch would call it on CUDA tensors: the kernels, or plain torch ops where they refuse."""
    one = case("served", softmax_precision=softmax_precision, sizes={"past_length": 3, "length": 2}, num_outputs=3)
    inputs = rounded(one.inputs, "float32")
    arguments = [to_torch(inputs).get(name) for name in signature.ATTENTION_INPUT_NAMES]
    outputs = torch_op._run_attention_on_cuda(*arguments, spec=torch_op.encode_spec(one.spec))
    check_attention(one.spec, inputs, list(outputs), "float32")
    rotary = one.spec.query_preparation
    x = {"x": inputs["query"], "weight": inputs.get("q_norm_weight")}
    given = {name: value for name, value in x.items() if value is not None}
    values = [to_torch(given).get(name) for name in signature.ROTARY_INPUT_NAMES]
    check_rotary(rotary, given, torch_op._run_rotary_on_cuda(*values, spec=torch_op.encode_spec(rotary)), "float32")


def test_torch_operators_have_a_cuda_kernel():
    for name in torch_op.OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"qknorm::{name}", "CUDA")


def doctors(name):
    return {finding.name: finding for finding in examine()}[name]


def test_the_doctor_says_whether_there_is_a_kernel_pack(monkeypatch, tmp_path, fake_pack):
    monkeypatch.setattr(custom_ops, "library_path", lambda: tmp_path / custom_ops.LIBRARY_NAME)
    assert doctors("CUDA kernels").state == "missing"
    assert "compile_kernels --out" in doctors("CUDA kernels").mend
    pack = shutil.copytree(fake_pack, tmp_path / "cuda_kernels")
    found = doctors("CUDA kernels")
    assert found.state == "ok" and not found.mend
    assert "images for sm_80, sm_90, sm_100, compiled by Triton 3.8.0" in found.detail
    manifest = json.loads((pack / "manifest.json").read_text())
    for change, state, detail in (
        ({"sources": "0" * 64}, "note", "its kernels are not those of this package"),
        ({"format": 99}, "missing", "a kernel pack of format 99; this package reads 1"),
        ({"images": None}, "missing", "manifest.json is damaged"),
    ):
        (pack / "manifest.json").write_text(json.dumps({**manifest, **change}))
        assert doctors("CUDA kernels").state == state
        assert detail in doctors("CUDA kernels").detail
        assert "compile_kernels --out" in doctors("CUDA kernels").mend


def test_the_doctor_says_what_the_driver_has(driver):
    """The stand-in is loaded under the driver's name."""
    found = doctors("CUDA driver")
    assert (found.state, found.detail, found.mend) == ("ok", "for CUDA 12.9; Stand-in (sm_90)", "")
    driver.stand_in.stand_in_set_driver(11080, 1)
    assert doctors("CUDA driver").state == "missing"
    assert "need a driver for CUDA 12.0 or newer" in doctors("CUDA driver").mend
    driver.stand_in.stand_in_set_driver(13000, 0)
    assert (doctors("CUDA driver").state, doctors("CUDA driver").detail) == ("missing", "for CUDA 13.0; no device")
    driver.fail("cuInit", 100)
    assert doctors("CUDA driver").detail == "it does not work: cuInit failed: CUDA_ERROR_100"


WITHOUT_DRIVER = """
from qknorm_onnx.runtime import cuda_driver, environment
cuda_driver.LIBRARY = "libno_such_driver.so.1"
print({finding.name: finding for finding in environment.examine()}["CUDA driver"])
"""


def test_the_doctor_says_that_there_is_no_driver():
    done = subprocess.run([sys.executable, "-c", WITHOUT_DRIVER], capture_output=True, text=True, check=False)
    assert "state='missing'" in done.stdout, done.stderr
    assert "models run on the CPU" in done.stdout
    assert "install its driver" in done.stdout


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "the native kernel is expected"),
        ({"softmax_precision": "float64"}, "a function body is expected: the CUDA kernels compute the softmax in float32"),
    ],
    ids=["served", "refused"],
)
def test_inspect_says_what_is_expected_on_a_gpu_without_having_one(monkeypatch, tmp_path, capsys, change, expected):
    from qknorm_onnx.cli.main import run

    (tmp_path / "cuda_kernels").mkdir()
    (tmp_path / "cuda_kernels" / "manifest.json").write_text("{}")
    monkeypatch.setattr(custom_ops, "library_path", lambda: tmp_path / custom_ops.LIBRARY_NAME)
    onnx.save(ir.to_proto(model_of([case("one", **change)], "float16")), tmp_path / "model.onnx")
    assert run(["inspect", str(tmp_path / "model.onnx"), "--placement", "--provider", "cuda", "--json"]) == 0
    (placement,) = json.loads(capsys.readouterr().out)["placement"]
    assert placement["runs_in"] == "unknown"
    assert placement["reason"].startswith("no session was made, because there is no CUDAExecutionProvider here; " + expected)
    assert run(["inspect", str(tmp_path / "model.onnx"), "--placement", "--provider", "cuda"]) == 0
    assert "0 of 1 nodes run in the native kernel; where 1 of them run" in " ".join(capsys.readouterr().out.split())


def test_the_exported_model_says_which_kernel_its_pack_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(custom_ops, "library_path", lambda: tmp_path / custom_ops.LIBRARY_NAME)
    (placement,) = expected_placements(model_and_outcome(case("served"), "bfloat16")[0], provider="cuda")
    assert f"a function body is expected: there is no CUDA kernel pack in {tmp_path}/cuda_kernels" in placement.reason
