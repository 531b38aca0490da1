"""The C++ launcher over the stand-in driver: what it launches, with which bytes, and that the result is the reference's."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from qknorm_onnx.spec.cuda_support import cuda_refusal
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec
from tests.contract import spec_cases
from tests.gpu.judge import check_attention, check_rotary, has_room, rounded
from tests.native.kernel_call import KernelError

GROUPS = ("norm_cases", "rotary_cases", "attention_cases", "mask_cases", "cache_cases", "empty_cases", "random_cases")
CASES = {case.id: case for group in GROUPS for case in getattr(spec_cases, group)()}
SERVED = [
    case
    for case in CASES.values()
    if cuda_refusal(case.spec, dtype="float32") is None
    and has_room(case)
    and "head-size" not in case.id
    and case.id != "heads-(40, 8)"
]

PLAIN = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.125, is_causal=True),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
)


def plain_inputs(*, batch=1, length=3, size=128, dtype="bfloat16", past=None, capacity=None):
    rng = np.random.default_rng(7)
    shapes = {"query": (batch, length, 4 * size), "key": (batch, length, 2 * size), "value": (batch, length, 2 * size)}
    shapes |= {"q_norm_weight": (size,), "k_norm_weight": (size,)}
    if past is not None:
        rows = past if capacity is None else capacity
        shapes |= dict.fromkeys(("past_key", "past_value"), (batch, 2, rows, size))
    inputs = rounded({name: rng.normal(size=shape) for name, shape in shapes.items()}, dtype)
    return inputs if capacity is None else {**inputs, "cache_length": np.full(batch, past, dtype=np.int64)}


@pytest.mark.parametrize("case", SERVED[::9], ids=lambda case: case.id)
def test_the_plan_computes_the_reference(driver, case):
    inputs = rounded(case.inputs, "float32")
    outputs = driver.attention(case.spec, inputs, num_outputs=case.num_outputs)
    check_attention(case.spec, inputs, outputs, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.id)
def test_every_plan_computes_the_reference(driver, case):
    test_the_plan_computes_the_reference(driver, case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_of_float32_beside_half_precision(driver, dtype):
    case = CASES["bias-past-logits"]
    wide = ("q_norm_weight", "attention_bias")
    inputs = rounded(case.inputs, dtype, wide=wide)
    outputs = driver.attention(case.spec, inputs, num_outputs=3)
    check_attention(case.spec, inputs, outputs, dtype)


@pytest.mark.parametrize(("axis", "order"), [("head", "before_norm"), ("hidden", "after_norm")])
def test_rotary_operator(driver, axis, order):
    spec = QKNormRotarySpec(num_heads=3, kind="layer", epsilon=1e-6, axis=axis, rotary=RotarySpec(order=order, embedding_dim=4))
    rng = np.random.default_rng(3)
    shapes = {"x": (2, 5, 24), "weight": (24,), "bias": (3, 8), "scale": (3, 1, 1), "cos": (2, 5, 2), "sin": (2, 5, 2)}
    inputs = rounded({name: rng.normal(size=shape) for name, shape in shapes.items()}, "float32")
    check_rotary(spec, inputs, driver.rotary(spec, inputs), "float32")


def test_a_cache_in_place_is_appended_to_and_not_copied(driver):
    inputs = plain_inputs(past=5, capacity=9, dtype="float32", size=16)
    kept = {name: value.copy() for name, value in inputs.items()}
    driver.fail("cuMemcpy2DAsync", 999)
    outputs = driver.attention(PLAIN, inputs, num_outputs=3, in_place=True)
    check_attention(PLAIN, kept, outputs, "float32")


def test_a_full_cache_makes_its_row_nan_and_is_not_written_over(driver):
    inputs = plain_inputs(batch=2, past=4, capacity=8, dtype="float32", size=16)
    inputs["cache_length"][:] = (4, 6)
    before = inputs["past_key"][1].copy()
    y, key, _ = driver.attention(PLAIN, inputs, num_outputs=3)
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(key[1], before)


@pytest.mark.parametrize(("length", "dtype"), [(1, np.float32), (3, np.bool_)])
def test_nothing_is_read_behind_the_last_column_of_a_bias(driver, length, dtype):
    """Rows with as many columns as keys are right; one with more keys is NaN, as where the buffer has no room."""
    inputs = plain_inputs(batch=2, length=length, past=4, capacity=9, dtype="float32", size=16)
    inputs["cache_length"][:] = (4, 2)
    rng = np.random.default_rng(4)
    bias = rng.normal(size=(2, 1, length, 4 + length)) if dtype == np.float32 else rng.random((2, 1, length, 4 + length)) < 0.8
    inputs["attention_bias"] = bias.astype(dtype)
    outputs = driver.attention(PLAIN, inputs, num_outputs=3)
    check_attention(PLAIN, inputs, outputs, "float32")
    y = driver.attention(PLAIN, inputs | {"attention_bias": inputs["attention_bias"][..., :-1].copy()}, num_outputs=3)[0]
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_decode_is_one_launch_and_a_reduction_over_splits(driver):
    driver.runs_kernels = False
    driver.attention(PLAIN, plain_inputs(length=1, past=4000, capacity=4096), num_outputs=3, in_place=True)
    decode, combine = driver.launches
    assert decode.entry["kernel"] == "decode" and decode.entry["hinted"]
    assert decode.grid == (16, 2, 1)
    assert (decode.block, decode.shared) == (128, decode.entry["shared"])
    assert combine.entry["kernel"] == "combine" and combine.grid == (4, 1, 1)
    assert combine.arguments["splits"] == 16
    assert combine.arguments["partial"] == decode.arguments["partial"]


def test_decode_over_splits_computes_the_reference(driver):
    driver.reset(multiprocessors=2)
    inputs = plain_inputs(length=1, past=600, capacity=640, dtype="float32", size=16)
    outputs = driver.attention(PLAIN, inputs, num_outputs=3)
    check_attention(PLAIN, inputs, outputs, "float32")
    assert driver.launches[0].grid == (2, 2, 1)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 16), ("bfloat16", 128)])
def test_masked_decode_over_splits_computes_the_reference(driver, dtype, size):
    """Rows whose logits are all the lowest number, all masked in one split, and random ones."""
    driver.reset(multiprocessors=4)
    inputs = plain_inputs(batch=3, length=1, past=600, capacity=640, dtype=dtype, size=size)
    bias = np.random.default_rng(5).normal(size=(3, 1, 1, 640))
    bias[0] = np.finfo(np.float32).min
    bias[1, ..., :400] = -np.inf
    inputs["attention_bias"] = bias.astype(np.float32)
    outputs = driver.attention(PLAIN, inputs, num_outputs=3)
    check_attention(PLAIN, inputs, outputs, dtype)
    decode, combine = driver.launches
    assert decode.grid[0] == combine.arguments["splits"] == 2
    general = "-d256-capped-masked-general" if dtype == "float32" else "-d128-masked"
    assert decode.image == f"decode-{dtype}{general} sm_90"


def test_grid_block_shared_memory_stream_and_scratch(driver):
    driver.runs_kernels = False
    stream = driver.make_stream(driver.context)
    inputs = plain_inputs(batch=2, length=300)
    driver.attention(PLAIN, inputs, stream=stream)
    prepare, prefill = driver.launches
    assert (prepare.image, prefill.image) == ("prepare-bfloat16-d128 sm_90", "prefill-bfloat16-d128 sm_90")
    assert prepare.grid == (38, 6, 2)  # 8 rows a tile; heads of q and of k
    assert prefill.grid == (3, 4, 2)
    assert (prefill.block, prefill.shared) == (256, 131072)
    assert {launch.stream for launch in driver.launches} == {stream}
    assert {launch.scratch for launch in driver.launches} == {(0, 0)}
    assert prepare.arguments["query.x"] == inputs["query"].ctypes.data
    assert prepare.arguments["query.inverse_count"] == pytest.approx(1 / 128)
    assert prefill.arguments["logits.scale"] == 0.125
    assert (prefill.arguments["logits.keys_before"], prefill.arguments["logits.keys_after"]) == (1 << 30, 0)


@pytest.mark.parametrize(
    ("capability", "shared_limit", "image"),
    [
        (80, 166912, "prefill-bfloat16-d128 sm_80"),
        (86, 166912, "prefill-bfloat16-d128 sm_80"),  # same major version, newer
        (90, 232448, "prefill-bfloat16-d128 sm_90"),
        (100, 232448, "prefill-bfloat16-d128 sm_100"),
        (103, 232448, "prefill-bfloat16-d128 sm_80 ptx"),  # sm_100a code runs on 10.0 only
        (120, 232448, "prefill-bfloat16-d128 sm_80 ptx"),
    ],
)
def test_the_image_fits_the_device(driver, capability, shared_limit, image):
    driver.reset(capability=capability, shared_limit=shared_limit)
    driver.runs_kernels = False
    driver.attention(PLAIN, plain_inputs())
    assert driver.launches[-1].image == image


def test_a_size_that_breaks_a_hint_takes_the_general_image(driver):
    driver.runs_kernels = False
    driver.attention(PLAIN, plain_inputs(size=100))
    assert [launch.image for launch in driver.launches] == [
        "prepare-bfloat16-d256-general sm_90",
        "prefill-bfloat16-d256-capped-masked-general sm_90",
    ]


def test_too_little_shared_memory_and_an_old_device_are_told(driver):
    driver.reset(shared_limit=49152)
    with pytest.raises(KernelError, match=r"no kernel for prefill in bfloat16, heads of 128 on compute capability 9\.0"):
        driver.attention(PLAIN, plain_inputs())
    driver.reset(capability=75)
    with pytest.raises(KernelError, match=r"on compute capability 7\.5"):
        driver.attention(PLAIN, plain_inputs())


def test_the_streams_context_is_pushed_and_popped(driver):
    other = driver.stand_in.stand_in_make_context()
    driver.attention(PLAIN, plain_inputs(size=16), stream=driver.make_stream(other))
    assert driver.stand_in.stand_in_context_depth() == 1


def test_without_context_and_stream_there_is_a_sentence(driver):
    driver.stand_in.stand_in_set_current(None)
    with pytest.raises(KernelError, match="no CUDA context is current on this thread"):
        driver.attention(PLAIN, plain_inputs())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cuCtxGetCurrent", "cuCtxGetCurrent failed"),
        ("cuStreamGetCtx", "cuStreamGetCtx failed"),
        ("cuCtxGetDevice", "cuCtxGetDevice failed"),
        ("cuDeviceGetAttribute", "cuDeviceGetAttribute 75 failed"),
        ("cuModuleLoadData", r"cuModuleLoadData of prepare \(cubin .*\) failed"),
        ("cuModuleGetFunction", "cuModuleGetFunction of prepare"),
        ("cuFuncSetAttribute", "cuFuncSetAttribute of prefill .* for 131072 bytes of shared memory failed"),
        ("cuLaunchKernel", "cuLaunchKernel of prepare"),
        ("cuMemcpy2DAsync", "cuMemcpy2DAsync of the cache failed"),
    ],
)
def test_every_failing_call_is_named(driver, call, message):
    driver.runs_kernels = False
    stream = driver.make_stream(driver.context)
    driver.fail(call, 719)
    with pytest.raises(KernelError, match=message + ".*CUDA_ERROR_719, as the test asked for"):
        driver.attention(PLAIN, plain_inputs(past=4), num_outputs=3, stream=stream)


def test_a_missing_a_damaged_and_a_foreign_pack_are_told(driver, fake_pack, tmp_path):
    driver.use_pack(tmp_path / "nowhere")
    with pytest.raises(KernelError, match=r"kernel pack lacks .*nowhere/manifest\.json; make one with"):
        driver.attention(PLAIN, plain_inputs())
    damaged = shutil.copytree(fake_pack, tmp_path / "damaged")
    for file in damaged.glob("*.cubin"):
        file.write_bytes(file.read_bytes()[:-3])
    driver.use_pack(damaged)
    with pytest.raises(KernelError, match="the pack is damaged"):
        driver.attention(PLAIN, plain_inputs())
    for name, change, message in (
        ("format", lambda m: m.update(format=99), "format 99 is unknown"),
        ("parameters", lambda m: m["parameter_lists"][0].reverse(), "of different versions"),
        ("member", lambda m: m.pop("images"), "member 'images' is missing"),
    ):
        manifest = json.loads((fake_pack / "manifest.json").read_text())
        change(manifest)
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
        driver.use_pack(tmp_path / name)
        with pytest.raises(KernelError, match=message):
            driver.attention(PLAIN, plain_inputs())


REFUSED = [case for case in CASES.values() if cuda_refusal(case.spec, dtype="float32")]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_the_launcher_refuses_what_the_lowering_was_told(driver, case):
    with pytest.raises(KernelError) as error:
        driver.attention(case.spec, rounded(case.inputs, "float32"), num_outputs=case.num_outputs)
    assert str(error.value) == cuda_refusal(case.spec, dtype="float32")


def test_heads_too_large_are_refused(driver):
    with pytest.raises(KernelError, match="a head of 300 values has no CUDA kernel"):
        driver.attention(PLAIN, plain_inputs(size=300))


def test_wrong_shapes_are_refused_as_on_the_cpu(driver):
    inputs = plain_inputs()
    inputs["q_norm_weight"] = inputs["q_norm_weight"][:7]
    with pytest.raises(KernelError, match="q_norm_weight has shape"):
        driver.attention(dataclasses.replace(PLAIN), inputs)


NO_DRIVER = """
import ctypes, sys
from qknorm_onnx.custom_ops import library_path
message = ctypes.create_string_buffer(512)
assert ctypes.CDLL(str(library_path())).qknorm_cuda_check(message) != 0
print(message.value.decode())
"""


def test_without_a_driver_the_library_loads_and_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", NO_DRIVER], capture_output=True, text=True, check=False)
    if done.returncode and "AssertionError" in done.stderr:
        pytest.skip("this machine has a CUDA driver")
    assert "there is no CUDA driver: libcuda.so.1 cannot be opened" in done.stdout, done.stderr
