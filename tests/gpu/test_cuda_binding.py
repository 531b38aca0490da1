"""The CUDA operators inside ONNX Runtime, as far as that goes without a GPU.

They are built once more for the CPU provider, whose memory the stand-in driver takes for the device's. Reading of
attributes and inputs, outputs, workspace and messages are then those of a CUDA session; streams and placement are not.
"""

from __future__ import annotations

import pathlib
import subprocess

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from qknorm_onnx.spec.qk_norm_spec import RotarySpec
from tests.contract.case_models import feeds_of, model_of
from tests.contract.spec_cases import case, norm_gains, optional, tables
from tests.gpu.judge import check_attention, rounded
from tests.gpu.stand_in_driver import StandInDriver

ROOT = pathlib.Path(__file__).resolve().parents[2] / "custom_ops"


@pytest.fixture(scope="module")
def binding(tmp_path_factory):
    """The library of the CUDA operators for the CPU provider."""
    library = tmp_path_factory.mktemp("binding") / "libcuda_binding.so"
    sources = [path for path in (ROOT / "ort").glob("*.cc") if path.name not in ("register.cc", "abi_check.cc")]
    sources += [*(ROOT / "kernels" / "cpu").glob("*.cc"), ROOT / "kernels" / "cpu" / "isa" / "kernel_table.cc"]
    flags = ["-std=c++17", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", f"-I{ROOT}", f"-I{ROOT / 'include'}"]
    defines = ['-DQKNORM_CUDA_PROVIDER="CPUExecutionProvider"', "-DQKNORM_ISA=portable"]
    files = [str(path) for path in (*sources, ROOT / "tests" / "cuda_binding.cc")]
    subprocess.run(["c++", *flags, *defines, *files, "-o", str(library)], check=True)
    return library


@pytest.fixture
def bound(binding, fake_pack, stand_in_library):
    """The stand-in driver below that library."""
    stand_in = StandInDriver(stand_in_library, pack=fake_pack, launcher=binding)
    yield stand_in
    stand_in.close()


def feeds(one):
    return feeds_of(model_of([one], "float32"), [one], "float32")


def session_of(one, library, dtype="float32"):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    model = ir.to_proto(model_of([one], dtype)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


CASES = [
    case("plain", inputs=norm_gains(), is_causal=True),
    case("hidden", inputs=norm_gains("H*D", biased=True), sizes={"length": 3}),
    case("past", inputs=(*norm_gains(), *tables("(B, S, R/2)")), rotary=RotarySpec(order="after_norm"),
         sizes={"past_length": 3, "length": 2}, num_outputs=3),
    case("token", inputs=(*norm_gains(), optional("attention_bias", "(B, 1, S, T)", "bool mask")),
         sizes={"past_length": 3, "capacity": 9, "length": 1}, num_outputs=3),
]  # fmt: skip


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.id)
def test_a_session_computes_the_reference(bound, binding, one):
    session = session_of(one, binding)
    outputs = session.run(None, feeds(one))
    assert bound.launches
    assert not bound.errors, bound.errors
    check_attention(one.spec, rounded(one.inputs, "float32"), outputs, "float32")


def test_what_is_missing_is_said_when_the_session_is_made(bound, binding, tmp_path):
    bound.use_pack(tmp_path)
    with pytest.raises(Exception, match="QKNormAttention on CUDAExecutionProvider: the CUDA kernel pack lacks"):
        session_of(CASES[0], binding)


def test_a_refused_spec_is_said_when_the_session_is_made(bound, binding):
    with pytest.raises(Exception, match=r"on CUDAExecutionProvider: .*softmax_precision 'float64' has none"):
        session_of(case("wide", softmax_precision="float64"), binding)


def test_a_driver_error_is_the_runs_message(bound, binding):
    session = session_of(CASES[0], binding)
    bound.fail("cuLaunchKernel", 700)
    with pytest.raises(Exception, match=r"cuLaunchKernel of prepare .* failed: CUDA_ERROR_700"):
        session.run(None, feeds(CASES[0]))


def test_wrong_shapes_are_refused_by_name(bound, binding):
    session = session_of(CASES[0], binding)
    given = feeds(CASES[0])
    name = next(name for name in given if name.endswith("value"))
    given[name] = np.ascontiguousarray(given[name][:, :3])
    with pytest.raises(Exception, match="value has shape"):
        session.run(None, given)
