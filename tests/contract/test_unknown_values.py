"""Contract 13: a value that a consumer does not know is refused by it: a type checker, the compiler, or the consumer says so.

First with the spec's own check in place, as for a value that got into a spec or a file by a wrong way; then without it, as
for a value that somebody added to the spec's types and to nothing else. There the `match` of each consumer refuses.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from qknorm_onnx import custom_ops
from qknorm_onnx.graph.canonical.qk_norm_node import read_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.graph.recognise.attention import group_query as group_query_reader
from qknorm_onnx.graph.recognise.chains import preparation as chain_preparation
from qknorm_onnx.graph.recognise.norms import groups as group_reader
from qknorm_onnx.graph.recognise.norms import norm as norm_reader
from qknorm_onnx.lowering.registry import TARGETS, lower
from qknorm_onnx.spec import cpp_header, qk_norm_spec, signature
from qknorm_onnx.spec.attributes import from_attributes, to_attributes
from qknorm_onnx.spec.canonical import canonical
from qknorm_onnx.spec.cuda_support import cuda_refusal
from qknorm_onnx.spec.one_line import one_line
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec, SpecError
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.shape_inference import infer_attention_outputs
from qknorm_onnx.torch_export.operators import eager
from qknorm_onnx.torch_export.operators.torch_op import qk_norm_attention as torch_operator
from tests.architecture.installed_layout import SETTINGS, package_folders
from tests.contract.case_models import model_of
from tests.contract.spec_cases import Case
from tests.contract.unknown_values import (
    CHOICES,
    UNKNOWN,
    integers_outside,
    known_case,
    odd_case,
    types_with_one_value_more,
)
from tests.graph.attention_text import HEADS, KV_HEADS, RMS, Spelling, attention_model, fused
from tests.graph.test_group_query_attention import attention as group_query_model
from tests.native import kernel_call
from tests.native.installed_library import installed_library

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFUSALS = (SpecError, AssertionError)  # `assert_never` raises the second


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value, dtype=np.float64)) for name, value in case.inputs.items()}


def body_of(case: Case) -> None:
    """The function body of a node that reads as the case's spec."""
    model = model_of([dataclasses.replace(case, spec=known_case().spec)], attach=False)
    replace_reader(case, "qknorm_onnx.graph.passes.attach_bodies", lambda: AttachBodiesPass()(model))


def lowered_to(target: str) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        model = model_of([dataclasses.replace(case, spec=known_case().spec)], "float32", opset=23)
        replace_reader(case, "qknorm_onnx.lowering.registry", lambda: lower(model, target=target, provider="cpu"))

    return run


def replace_reader(case: Case, module: str, run: Callable[[], object]) -> None:
    """Runs with the reader of nodes in `module` that answers with the case's spec."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.read_attention_node", lambda node: (case.spec, read_attention_node(node)[1]))
        run()


def refusal_of(run: Callable[[], object]) -> str:
    """What the refusal says; "" where nothing is refused."""
    try:
        run()
    except REFUSALS as refusal:
        return str(refusal)
    return ""


def triton_flags(case: Case) -> None:
    arguments = pytest.importorskip("qknorm_onnx.torch_export.operators.triton_arguments")
    tensors = tensors_of(case)
    of_query = {"x": tensors["query"], "weight": tensors["q_norm_weight"], "cos": tensors["cos"]}
    side = arguments.side_of(case.spec.query_preparation, of_query, None)
    of_key = {"x": tensors["key"], "weight": tensors["k_norm_weight"], "cos": tensors["cos"]}
    assert side and arguments.side_of(case.spec.key_preparation, of_key, None)
    assert cuda_refusal(case.spec, dtype="float32") is None


# Where each consumer has a meaning for the field, whatever the spec's own check says; the others do not compute it.
EVERY = frozenset(CHOICES)
EXACT = EVERY - {"norm_weight_order", "softmax_precision"}  # the reference rounds nowhere
OF_CUDA = frozenset({"q_norm", "k_norm", "rotary_order", "softmax_precision"})
CONSUMERS: dict[str, tuple[Callable[[Case], object], frozenset[str]]] = {
    "reference": (lambda case: qk_norm_attention(case.spec, case.inputs), EXACT),
    "shape inference": (
        lambda case: infer_attention_outputs(case.spec, {name: value.shape for name, value in case.inputs.items()}),
        EXACT,
    ),
    "canonical": (lambda case: canonical(case.spec, dtype="float16"), EXACT - {"norm_axis"}),
    "one line": (lambda case: one_line(case.spec), EXACT),
    "cuda refusal": (
        lambda case: cuda_refusal(case.spec, dtype="float32"),
        EXACT - {"norm_axis", "epsilon_mode"} | {"softmax_precision"},
    ),
    "triton arguments": (triton_flags, EVERY),
    "eager": (lambda case: eager.attention(case.spec, tensors_of(case)), EVERY),
    "torch operator": (lambda case: torch_operator(case.spec, **tensors_of(case)), EVERY),
    "body": (body_of, EVERY),
    # A target that keeps the node leaves it to the kernel to refuse it.
    **{name: (lowered_to(name), EVERY if target.emit is not None else frozenset()) for name, target in TARGETS.items()},
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_known_case_is_served(consumer: str) -> None:
    CONSUMERS[consumer][0](known_case())


@pytest.mark.parametrize("attribute", CHOICES)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_an_unknown_value_is_refused_in_one_line(consumer: str, attribute: str) -> None:
    with pytest.raises(SpecError, match=f"is '{UNKNOWN}'; it must be one of '") as caught:
        CONSUMERS[consumer][0](odd_case(attribute))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("consumer", "attribute"), [(name, field) for name, found in CONSUMERS.items() for field in sorted(found[1])]
)
def test_a_value_that_only_the_types_know_is_refused(consumer: str, attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_norm_spec, "_require_choice", lambda *arguments: None)
    answer = refusal_of(lambda: CONSUMERS[consumer][0](odd_case(attribute)))
    assert UNKNOWN in answer, f"{consumer} takes an unknown {attribute} for a known one: end its `match` with `assert_never`"


@pytest.mark.parametrize("attribute", CHOICES)
def test_a_file_is_refused(attribute: str) -> None:
    node = model_of([known_case()], attach=False).graph.node(0)
    node.attributes[attribute] = ir.AttrString(attribute, UNKNOWN)
    with pytest.raises(SpecError, match=f"is '{UNKNOWN}'; it must be one of '"):
        read_attention_node(node)
    with pytest.raises(SpecError, match=f"is '{UNKNOWN}'; it must be one of '"):
        from_attributes(QKNormSpec, to_attributes(known_case().spec) | {attribute: UNKNOWN})


MADE_WITH = {"kind": "NormKind", "axis": "NormAxis", "mode": "EpsilonMode"}
LAYER = "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, {w})\n"
GROUPS = """
  {n}_groups = Reshape({x}, {n}_rows)
  {n}_normed = InstanceNormalization<epsilon=0.001>({n}_groups, {n}_ones, {n}_zeros)
  {n}_shape = Shape({x})
  {y} = Reshape({n}_normed, {n}_shape)
"""
GROUP_SIZES = "".join(
    f"  {side}_pre_rows = Constant<value = int64[3] {{-1, {heads}, 8}}>()\n"
    f"  {side}_pre_ones = Constant<value = float[{heads}] {{{', '.join(['1.0'] * heads)}}}>()\n"
    f"  {side}_pre_zeros = Constant<value = float[{heads}] {{{', '.join(['0.0'] * heads)}}}>()\n"
    for side, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
)
NO_NORM = "{y} = Identity({x})\n"
INSIDE = {"operands": "q, k, v, pk, pv, last, total, cos, sin, , , , , , w, w", "attributes": "qk_norm_epsilon=0.001"}
# Each module of `graph/recognise` that makes a norm, and models that it reads.
NORM_READERS: dict[str, tuple[Any, Callable[[], ir.Model]]] = {
    "computed": (norm_reader, lambda: attention_model(Spelling(q_norm=RMS, k_norm=RMS))),
    "operator": (norm_reader, lambda: attention_model(Spelling(q_norm=LAYER, k_norm=LAYER))),
    "groups": (
        group_reader,
        lambda: attention_model(Spelling(before_split=GROUPS, constants=GROUP_SIZES, q_norm=NO_NORM, k_norm=NO_NORM)),
    ),
    "inside the operator": (group_query_reader, lambda: group_query_model(**INSIDE)),
}


@pytest.mark.parametrize("name", NORM_READERS)
def test_the_readers_read_their_norms(name: str) -> None:
    assert fused(NORM_READERS[name][1](), prove=False)[1].fused


def test_every_module_that_makes_a_norm_is_tried() -> None:
    folder = ROOT / "qknorm_onnx/graph/recognise"
    makers = {path for path in folder.rglob("*.py") if re.search(r"\bNorm\(", path.read_text(encoding="utf-8"))}
    assert makers == {pathlib.Path(reader.__file__) for reader, _ in NORM_READERS.values()}, "add a model to NORM_READERS"


@pytest.mark.parametrize("field", MADE_WITH)
@pytest.mark.parametrize("name", NORM_READERS)
def test_a_recogniser_that_reads_an_unknown_norm_is_refused(name: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, model = NORM_READERS[name]
    made = reader.Norm
    monkeypatch.setattr(reader, "Norm", lambda **fields: made(**{**fields, field: UNKNOWN}))
    with pytest.raises(REFUSALS, match=UNKNOWN):
        fused(model(), prove=False)


@pytest.mark.parametrize("function", ["rotary_order", "_weight_order"])
def test_a_recogniser_that_reads_an_unknown_order_is_refused(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_preparation, function, lambda *arguments: UNKNOWN)
    with pytest.raises(REFUSALS, match=UNKNOWN):
        fused(attention_model(Spelling(q_norm=RMS, k_norm=RMS)), prove=False)


class TestNativeLibrary:
    """The kernels behind their C door, and in a session."""

    @pytest.fixture
    def library(self) -> kernel_call.NativeLibrary:
        return installed_library()

    @pytest.mark.parametrize("attribute", CHOICES)
    def test_the_c_door_refuses_what_is_no_enumerator(self, library: kernel_call.NativeLibrary, attribute: str) -> None:
        case = known_case()
        for value in integers_outside(attribute):
            packed = kernel_call.pack_attributes(case.spec)
            setattr(packed, attribute, value)
            message = kernel_call.Message()
            code = library.door.qknorm_cpu_check_attention_attributes(ctypes.byref(packed), ctypes.byref(message))
            known = qk_norm_spec.__dict__[CHOICES[attribute]].__args__
            listed = ", ".join(f"{index} ({name})" for index, name in enumerate(known))
            assert code and message.text.decode() == f"attribute {attribute} is {value}; it must be one of {listed}"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernel_call, "pack_attributes", lambda spec, packed=packed: packed)
                with pytest.raises(kernel_call.KernelError, match=f"attribute {attribute} is {value}; it must be one of 0"):
                    library.attention(case.spec, case.inputs)
                tensors, _alive = kernel_call.pack_tensors(signature.ATTENTION_INPUT_NAMES, case.inputs)
                y = kernel_call.poisoned((2, 3, 32), np.dtype(np.float64))
                pointer = ctypes.c_void_p(y.ctypes.data)
                arguments = (ctypes.byref(packed), tensors, pointer, None, None, None, ctypes.byref(message))
                assert library.door.qknorm_cpu_attention(*arguments), "refused where it would run, too"
                assert np.isnan(y).all(), "nothing was written"

    @pytest.mark.parametrize("attribute", CHOICES)
    def test_a_session_refuses_the_node(self, library: kernel_call.NativeLibrary, attribute: str) -> None:
        model = model_of([known_case()], "float32", attach=False)
        model.graph.node(0).attributes[attribute] = ir.AttrString(attribute, UNKNOWN)
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(custom_ops.library_path()))
        with pytest.raises(Exception, match=f"attribute {attribute} is '{UNKNOWN}'; it must be one of '"):
            ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


# The modules that compute something else for each value of a type: mypy must name all of them when one is added.
NAMED_BY_MYPY = {
    "NormKind": {
        "spec/qk_norm_spec.py",
        "spec/cuda_support.py",
        "spec/reference.py",
        "graph/canonical/body_norm.py",
        "graph/recognise/norms/norm.py",
        "lowering/standard/preparation.py",
        "lowering/contrib/on_cuda.py",
        "torch_export/operators/eager.py",
        "torch_export/operators/triton_arguments.py",
        "torch_export/operators/modules.py",
        "speed/cases.py",
        "speed/problem.py",
        "speed/torch_contestants.py",
    },
    "EpsilonMode": {
        "spec/qk_norm_spec.py",
        "spec/reference.py",
        "spec/one_line.py",
        "graph/canonical/body_norm.py",
        "lowering/standard/preparation.py",
        "lowering/contrib/on_cuda.py",
        "torch_export/operators/eager.py",
        "torch_export/operators/triton_arguments.py",
    },
    "NormAxis": {"spec/qk_norm_spec.py"},  # one question each, asked there for everybody
    "NormWeightOrder": {"spec/qk_norm_spec.py"},
    "RotaryOrder": {"spec/qk_norm_spec.py"},
    "SoftmaxPrecision": {"spec/qk_norm_spec.py"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED_BY_MYPY)
def test_mypy_names_every_consumer_of_a_new_value(name: str, tmp_path: pathlib.Path) -> None:
    for installed, folder in package_folders().items():
        shutil.copytree(ROOT / folder, tmp_path / installed, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    spec = tmp_path / "qknorm_onnx/spec/qk_norm_spec.py"
    spec.write_text(types_with_one_value_more(spec.read_text(encoding="utf-8"), name), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(SETTINGS), "--cache-dir", str(ROOT / "build/mypy_scratch")]
    done = subprocess.run([*command, "-p", "qknorm_onnx"], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(rf'^qknorm_onnx/(\S+?):\d+: error: Argument 1 to "assert_never" .*"{UNKNOWN}"', done.stdout, re.MULTILINE)
    found = found or re.findall(r"^qknorm_onnx/(\S+?):\d+: error:", done.stdout, re.MULTILINE)
    hint = f"bring NAMED_BY_MYPY of {pathlib.Path(__file__).name} and the table of CONTRIBUTING.md in line"
    assert set(found) == NAMED_BY_MYPY[name], f"{hint}: {set(found) ^ NAMED_BY_MYPY[name]}\n{done.stdout}"


# File -> enumerations whose every switch the compiler must name there.
NAMED_BY_COMPILER = {
    "kernels/cpu/meaning.h": {"NormKind", "NormAxis", "NormWeightOrder", "RotaryOrder", "SoftmaxPrecision"},
    "kernels/cpu/isa/norm_stage.h": {"NormKind", "EpsilonMode"},
    "kernels/cpu/check.cc": {"NormKind", "EpsilonMode"},
    "ort/cuda_arguments.cc": {"NormKind", "EpsilonMode", "RotaryOrder"},
    "ort/cuda_attention.cc": {"NormKind"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CHOICES.values())))
def test_the_compiler_names_every_switch_that_lacks_a_new_value(name: str, tmp_path: pathlib.Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    known = (ROOT / cpp_header.HEADER_PATH).read_text(encoding="utf-8")
    header = tmp_path / cpp_header.HEADER_PATH.relative_to("custom_ops/include")
    header.parent.mkdir(parents=True)
    header.write_text(re.sub(rf"(enum class {name} : std::int64_t {{\n)", r"\1  kUnheardOf = 99,\n", known), encoding="utf-8")
    options = ["-std=c++17", "-fsyntax-only", "-Werror=switch", "-Werror=switch-enum", "-Wno-psabi", "-DQKNORM_ISA=portable"]
    folders = [f"-I{tmp_path}", f"-I{ROOT / 'custom_ops/include'}", f"-I{ROOT / 'custom_ops'}"]
    output = ""
    for source in ("kernels/cpu/isa/kernel_table.cc", "kernels/cpu/check.cc", "ort/cuda_arguments.cc", "ort/cuda_attention.cc"):
        command = [compiler, *options, *folders, str(ROOT / "custom_ops" / source)]
        output += subprocess.run(command, capture_output=True, text=True, check=False).stderr
    places = set(re.findall(r"custom_ops/(\S+?):\d+:\d+: error: enumeration value .kUnheardOf. not handled", output))
    expected = {place for place, names in NAMED_BY_COMPILER.items() if name in names}
    hint = f"bring NAMED_BY_COMPILER of {pathlib.Path(__file__).name} and the table of CONTRIBUTING.md in line"
    assert places == expected, f"{hint}: {places ^ expected}\n{output}"
