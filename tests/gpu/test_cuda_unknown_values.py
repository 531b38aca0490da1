"""The CUDA launcher refuses numbers that are no enumerators, when a session is made and when a call runs."""

from __future__ import annotations

import ctypes

import pytest

from tests.contract.unknown_values import CHOICES, integers_outside, known_case
from tests.gpu.judge import rounded
from tests.native import kernel_call


@pytest.mark.parametrize("attribute", CHOICES)
def test_an_unknown_number_is_refused(driver, attribute):
    driver.runs_kernels = False
    case = known_case()
    inputs = rounded(case.inputs, "float32")
    driver.attention(case.spec, inputs)
    launched = len(driver.launches)
    for value in integers_outside(attribute):
        packed = kernel_call.pack_attributes(case.spec)
        setattr(packed, attribute, value)
        message = kernel_call.Message()
        code = driver.launcher.qknorm_cuda_check_attention(ctypes.byref(packed), ctypes.c_int64(1), ctypes.byref(message))
        assert code and message.text.decode().startswith(f"attribute {attribute} is {value}; it must be one of 0 (")
        tensors, _alive = kernel_call.pack_tensors(kernel_call.signature.ATTENTION_INPUT_NAMES, inputs)
        y = kernel_call.poisoned((2, 3, 32), inputs["query"].dtype)
        with kernel_call.PythonExecutor(1) as executor:
            code = driver.launcher.qknorm_cuda_attention(
                ctypes.byref(packed), tensors, ctypes.c_void_p(y.ctypes.data), None, None, None, executor, ctypes.byref(message)
            )
        assert code and message.text.decode().startswith(f"attribute {attribute} is {value}; it must be one of 0 (")
    assert len(driver.launches) == launched, "nothing was launched"
