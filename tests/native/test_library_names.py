"""One library, many names: every numbered operator runs, registering twice is harmless, and nothing of C++ is exported."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import numpy as np
import onnxruntime
import pytest
from random_cases import random_case, random_rotary_case

from qknorm_onnx import custom_ops
from qknorm_onnx.spec import signature
from qknorm_onnx.spec.attributes import to_attributes
from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary
from tests.native.test_onnxruntime_binding import ATTENTION_OUTPUTS, attention_node, make_model, relative_error, run

EXPORTED = re.compile(r"RegisterCustomOps|qknorm_\w+")


def session_of(model, *libraries):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for library in libraries:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def renamed(node, number):
    node.op_type = signature.numbered_name(node.op_type, number)
    return node


def one_attention(seed=0, number=1):
    found = random_case(np.random.default_rng(seed))
    inputs = {
        name: value if value.dtype in (np.bool_, np.int64) else value.astype(np.float32) for name, value in found.inputs.items()
    }
    node = renamed(attention_node(found.spec, list(inputs)), number)
    return found, inputs, make_model([node], inputs, dict.fromkeys(ATTENTION_OUTPUTS, 1))


@pytest.mark.parametrize("number", [1, 2, 9, signature.NAMES_PER_OPERATOR])
def test_every_name_has_the_kernel(library_file, number):
    found, inputs, model = one_attention(number, number)
    assert relative_error(run(session_of(model, library_file), inputs)["Y"], qk_norm_attention(found.spec, inputs)["Y"]) <= 2e-5


@pytest.mark.parametrize("number", [2, signature.NAMES_PER_OPERATOR])
def test_every_name_of_the_rotary_operator_has_the_kernel(library_file, number):
    from onnx import helper

    found = random_rotary_case(np.random.default_rng(number))
    inputs = {name: value.astype(np.float32) for name, value in found.inputs.items()}
    names = [name if name in inputs else "" for name in signature.ROTARY_INPUT_NAMES]
    node = renamed(
        helper.make_node(signature.ROTARY_OP, names, ["Y"], domain=signature.DOMAIN, **to_attributes(found.spec)), number
    )
    actual = run(session_of(make_model([node], inputs, {"Y": 1}), library_file), inputs)
    assert relative_error(actual["Y"], qk_norm_rotary(found.spec, inputs)["Y"]) <= 2e-5


def test_there_is_no_kernel_beyond_the_last_name(library_file):
    _, _, model = one_attention(number=signature.NAMES_PER_OPERATOR + 1)
    with pytest.raises(Exception, match=f"QKNormAttention_{signature.NAMES_PER_OPERATOR + 1}"):
        session_of(model, library_file)


def options_with_names(text):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("qknorm.names_per_operator", text)
    return options


@pytest.mark.parametrize("names", [1, 3, signature.NAMES_PER_OPERATOR])
def test_options_can_ask_for_fewer_names(library_file, names):
    for number in {1, names, names + 1}:
        found, inputs, model = one_attention(number, number)
        options = options_with_names(str(names))
        options.register_custom_ops_library(str(library_file))
        if number > names:
            with pytest.raises(Exception, match=f"QKNormAttention_{number}"):
                onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            continue
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        assert relative_error(run(session, inputs)["Y"], qk_norm_attention(found.spec, inputs)["Y"]) <= 2e-5


@pytest.mark.parametrize("text", ["0", "-1", "33", "some", "1 "])
def test_a_number_of_names_that_is_none_is_refused(library_file, text):
    with pytest.raises(Exception, match=rf"names_per_operator of the session options is '{text}'; it is a number from 1 to 32"):
        options_with_names(text).register_custom_ops_library(str(library_file))


def test_the_library_says_how_many_names_it_has():
    info = custom_ops.build_info()
    assert (info["names_per_operator"], info["operator_version"]) == (signature.NAMES_PER_OPERATOR, signature.VERSION)


@pytest.mark.parametrize("seed", range(3))
def test_registering_twice_and_through_a_copy_is_registering_once(library_file, tmp_path, seed):
    copy = tmp_path / f"copy-{library_file.name}"
    shutil.copy(library_file, copy)
    found, inputs, model = one_attention(seed)
    expected = qk_norm_attention(found.spec, inputs)["Y"]
    for libraries in ([library_file, library_file], [library_file, copy], [copy, library_file], [copy]):
        assert relative_error(run(session_of(model, *libraries), inputs)["Y"], expected) <= 2e-5


def test_another_version_on_the_same_options_is_refused_by_name(library_file):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("qknorm.registered_library", "9.9.9")
    with pytest.raises(Exception, match=r"version '9\.9\.9' already, and this library is of version '.+': register one"):
        options.register_custom_ops_library(str(library_file))


def test_only_c_functions_are_exported(library_file: pathlib.Path):
    tool = shutil.which("nm")
    if tool is None:
        pytest.fail("nm is not there: install binutils, which the C++ compiler needs as well")
    listed = subprocess.run([tool, "-D", "--defined-only", str(library_file)], capture_output=True, text=True, check=True)
    names = [line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()]
    assert {"RegisterCustomOps", "qknorm_build_info", "qknorm_cpu_attention"} <= set(names)
    assert [name for name in names if not EXPORTED.fullmatch(name)] == []
