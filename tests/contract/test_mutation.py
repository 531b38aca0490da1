"""Contract 10: whatever field of the spec an implementation gets wrong, the suite fails.

For every field that the metadata knows (new ones are found by themselves) and every other value of it, the implementation
"as specified, but with that value" is run on contract cases and compared with the reference of the true spec, as contract 1
does: function bodies in onnxruntime, the native kernels behind their C door, and the eager operator. Numbers or shapes must
differ. An error is no kill: a mutant whose inputs fit it must run, and one whose inputs do not must be refused. Two fields
only say where a narrow type rounds and have no meaning in float64; they are killed where they do have one, in the bits of a
narrow type's output.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, get_args

import numpy as np
import pytest
import torch

from qknorm_onnx.graph.canonical.body_signature import body_key
from qknorm_onnx.graph.canonical.qk_norm_node import node_signature
from qknorm_onnx.spec.attributes import AttributeField, attribute_fields, from_attributes, to_attributes
from qknorm_onnx.spec.canonical import canonical
from qknorm_onnx.spec.cpp_header import choices_of
from qknorm_onnx.spec.qk_norm_spec import NormKind, NormSpec, QKNormSpec, RotarySpec, SpecError, normalises
from qknorm_onnx.spec.shape_inference import infer_attention_outputs
from qknorm_onnx.torch_export.operators.torch_op import qk_norm_attention
from tests.contract.case_models import error, feeds_of, model_of, run_ort
from tests.contract.spec_cases import (
    Array,
    Case,
    attention_cases,
    case,
    epsilon_modes,
    norm_cases,
    norm_gains,
    optional,
    rotary_cases,
    tables,
)
from tests.native.installed_library import installed_library
from tests.native.kernel_call import KernelError

FIELDS: Final = attribute_fields(QKNormSpec)
ROUNDING_ONLY: Final = ("norm_weight_order", "softmax_precision")
TOLERANCE: Final = 1e-12  # contract 1's
BATCH: Final = 12  # mutants that share a session


def of_bodies(cases: list[Case]) -> list[Array]:
    """Y of the function bodies, all in one session."""
    model = model_of(cases)
    outputs = run_ort(model, feeds_of(model, cases))
    return [outputs[f"{found.id}/Y"] for found in cases]


def of_kernels(cases: list[Case]) -> list[Array]:
    """Y of the native CPU kernels."""
    library = installed_library()
    return [library.attention(found.spec, found.inputs)["Y"] for found in cases]


def of_eager(cases: list[Case]) -> list[Array]:
    """Y of the PyTorch operator outside a graph, which runs `eager`."""
    tensors = ({name: torch.from_numpy(np.array(value)) for name, value in found.inputs.items()} for found in cases)
    return [qk_norm_attention(found.spec, **inputs).numpy() for found, inputs in zip(cases, tensors, strict=True)]


IMPLEMENTATIONS: Final[dict[str, Callable[[list[Case]], list[Array]]]] = {
    "bodies": of_bodies,
    "kernels": of_kernels,
    "eager": of_eager,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_unmutated_suite_passes(implementation: str):
    """Without a mutation nothing is killed: a check that always fails would kill every mutant, too."""
    assert not any(_kills(IMPLEMENTATIONS[implementation], batch) for batch in _batches([(case, case.spec) for case in suite()]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("field", [field for field in FIELDS if field.onnx_name not in ROUNDING_ONLY], ids=lambda f: f.onnx_name)
def test_every_mutant_of_a_field_is_killed(field: AttributeField, implementation: str):
    run = IMPLEMENTATIONS[implementation]
    groups: dict[str, list[tuple[Case, QKNormSpec]]] = defaultdict(list)
    unfit: dict[str, Case] = {}
    for found in suite():
        for change, value in changes(field, _value(found.spec, field)):
            mutant = _with_value(found.spec, field, value)
            if mutant is None:
                continue
            if not _fits(mutant, found):
                unfit[change] = dataclasses.replace(found, id="unfit", spec=mutant)
            elif canonical(mutant) != canonical(found.spec):  # else the field has no effect beside the others
                groups[change].append((found, mutant))
    survivors = [change for change, mutants in groups.items() if not any(_kills(run, batch) for batch in _batches(mutants))]
    assert not survivors, f"no case tells apart {field.onnx_name} {survivors}"
    assert groups or unfit, (
        f"every change of {field.onnx_name} is refused by the spec itself: give the suite a case that allows one"
    )
    for mutant in unfit.values():
        with pytest.raises((SpecError, KernelError)):
            run([mutant])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_order_of_weight_and_cast_shows_in_the_bits_of_a_half_type(dtype: str):
    """k(x) = x_hat * w, read through an attention with one key: NumPy rounds where the spec says, the node must agree."""
    gains = (optional("q_norm_weight", "(D)", "gain"), optional("k_norm_weight", "(D)", "gain"))
    norm = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
    of = case("order", heads=(1, 1), head_size=64, norm=norm, inputs=gains, sizes={"length": 9}, num_outputs=3)
    expected = {order: _prepared_keys(of, dtype, order) for order in ("before_cast", "after_cast")}
    assert not np.array_equal(*expected.values()), "the numbers must tell both orders apart"
    for order, wanted in expected.items():
        other = "after_cast" if order == "before_cast" else "before_cast"
        keys = _present_key(dataclasses.replace(of, spec=_with(of.spec, "norm", weight_order=order)), dtype)
        right = np.mean(keys != wanted)
        assert right < 0.01, "rounded where the spec says, up to float32's own rounding"
        assert np.mean(keys != expected[other]) > 10 * max(right, 0.01), "and the mutant is seen"


def test_a_softmax_in_float64_shows_in_the_bits_of_float32():
    """float64 asks for more than float32's own arithmetic; float16 and bfloat16 ask for less, which every type gives anyway."""
    of = case("precision", heads=(2, 1), inputs=norm_gains(), sizes={"length": 40}, scale=3.0)
    outputs = {}
    for precision in ("float32", "float64", "float16", "bfloat16"):
        mutant = dataclasses.replace(of, spec=_with(of.spec, "attention", softmax_precision=precision))
        outputs[precision] = run_ort(model_of([mutant], "float32"), feeds_of(model_of([mutant], "float32"), [mutant], "float32"))
    values = {precision: found["precision/Y"] for precision, found in outputs.items()}
    truth = of.expected({name: array.astype(np.float32).astype(np.float64) for name, array in of.inputs.items()})[0]
    assert error(values["float64"], truth) < error(values["float32"], truth), "float64 is the more exact one"
    assert np.array_equal(values["float16"], values["float32"])
    assert np.array_equal(values["bfloat16"], values["float32"])


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.onnx_name)
def test_no_mutant_gets_past_the_codec(field: AttributeField):
    """Attributes, the way back, and the name of the function body tell every mutant apart, whether or not it has an effect."""
    seen = 0
    for found in suite():
        for _, value in changes(field, _value(found.spec, field)):
            mutant = _with_value(found.spec, field, value)
            if mutant is None:
                continue
            seen += 1
            assert to_attributes(mutant) != to_attributes(found.spec)
            assert from_attributes(QKNormSpec, to_attributes(mutant)) == mutant != found.spec
            node = next(iter(model_of([found], attach=False).graph))
            signature = node_signature(node)
            assert body_key(mutant, signature) != body_key(found.spec, signature)
            break
    assert seen, "no case allows another value: the test would test nothing"


def suite() -> Iterator[Case]:
    """Contract cases, and some at which an epsilon, an order or a window shows best."""
    gains = norm_gains("H, D")
    rotary = RotarySpec(order="after_norm")
    for kind in filter(normalises, get_args(NormKind)):
        for mode in epsilon_modes(kind):
            norm = NormSpec(q_kind=kind, k_kind=kind, q_epsilon=1e-3, k_epsilon=2e-3, epsilon_mode=mode)
            yield case(f"small-{kind}-{mode}", norm=norm, inputs=gains, sizes={"magnitude": 2e-3})
    for order in ("after_norm", "before_norm"):
        turned = dataclasses.replace(rotary, order=order, embedding_dim=4, offset=2)
        yield case(f"turned-{order}", head_size=12, inputs=(*gains, *tables("(S, R/2)")), rotary=turned, is_causal=True)
    yield case("whole-head", inputs=(*gains, *tables("(B, S, R)")), rotary=rotary, left_window_size=2, right_window_size=1)
    yield case("both-limits", inputs=gains, softcap=1.0, logit_clamp=2.0, scale=2.0, sizes={"length": 7})
    yield case("no-parameters", head_size=12, heads=(4, 2), norm=NormSpec(q_kind="rms", k_kind="rms"), sizes={"length": 6})
    wanted = (
        "norm-l2-clamp-0.5",
        "norm-groups-head",
        "norm-only-k",
        "norm-none",
        "softcap",
        "clamp",
        "negative-scale",
        "heads-(6, 2)",
    )
    sources = (norm_cases, rotary_cases, attention_cases)
    yield from (found for source in sources for found in source() if found.id in wanted or found.id.startswith("window-"))


def changes(field: AttributeField, value: Any) -> Iterator[tuple[str, Any]]:
    """Other values of a field, each with what is changed, from the field's type alone."""
    choices = choices_of(QKNormSpec, field)
    if choices is not None:
        yield from ((f"{value} -> {other}", other) for other in choices if other != value)
    elif field.type is bool:
        yield f"{value} -> {not value}", not value
    elif field.type is float:
        yield from (("off", 0.0), ("times 1.25", 1.25 * value)) if value else (("on", 0.5),)
    else:
        others = {"plus 1": value + 1, "minus 1": value - 1, "doubled": 2 * value, "halved": value // 2, "to 4": 4, "to 2": 2}
        yield from ((name, other) for name, other in others.items() if other != value)


def _fits(mutant: QKNormSpec, of: Case) -> bool:
    """Whether the inputs of the case are inputs of the mutant: where they are not, it must be refused and cannot be run."""
    try:
        infer_attention_outputs(mutant, {name: value.shape for name, value in of.inputs.items()})
    except SpecError:
        return False
    return True


def _kills(run: Callable[[list[Case]], list[Array]], mutants: list[tuple[Case, QKNormSpec]]) -> bool:
    """Whether contract 1 fails on the numbers of one of the mutants. What fits must run: an error is not caught here."""
    cases = [dataclasses.replace(true, id=f"mutant{index}", spec=spec) for index, (true, spec) in enumerate(mutants)]
    found = run(cases)
    return any(not error(y, true.expected()[0]) <= TOLERANCE for y, (true, _) in zip(found, mutants, strict=True))


def _batches(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def _value(spec: QKNormSpec, field: AttributeField) -> Any:
    value: Any = spec
    for name in field.path:
        value = getattr(value, name)
    return value


def _with_value(spec: QKNormSpec, field: AttributeField, value: Any) -> QKNormSpec | None:
    """The mutant, or None where the spec itself refuses it."""
    part, name = field.path
    try:
        return _with(spec, part, **{name: value})
    except SpecError:
        return None


def _with(spec: QKNormSpec, part: str, **fields: Any) -> QKNormSpec:
    return dataclasses.replace(spec, **{part: dataclasses.replace(getattr(spec, part), **fields)})


def _present_key(of: Case, dtype: str) -> np.ndarray[Any, Any]:
    """present_key (B, H, S, D) of the node, as bits of `dtype`."""
    from qknorm_onnx.runtime.runner import make_runner

    model = model_of([of], dtype)
    arithmetic = "bfloat16 emulated" if dtype == "bfloat16" else "native"
    return make_runner(model, arithmetic=arithmetic).run(feeds_of(model, [of], dtype))[f"{of.id}/present_key"].astype(np.float32)


def _prepared_keys(of: Case, dtype: str, order: str) -> np.ndarray[Any, Any]:
    """The keys of one head after their norm, rounded where `order` says."""
    narrow = model_of([of], dtype).graph.inputs[0].dtype.numpy()
    x = of.inputs["key"].astype(narrow).astype(np.float32)
    weight = of.inputs["k_norm_weight"].astype(narrow).astype(np.float32)
    hat = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(1e-6))
    hat = hat.astype(narrow).astype(np.float32) if order == "after_cast" else hat
    return (hat * weight).astype(narrow).astype(np.float32)[:, None]
