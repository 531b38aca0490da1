"""Cases for the contract tests: specs with inputs, explicit ones for every field, every published variant, and random ones.

All inputs are float64 (or bool, int64) and random; tests round them to the type they run in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np

from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    EpsilonMode,
    NormKind,
    NormSpec,
    QKNormSpec,
    RotarySpec,
    SpecError,
    normalises,
)
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.variants import VARIANTS
from qknorm_onnx.spec.variants.variant import OptionalInput, Variant, example_inputs, norm_gains

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention: `inputs` by name, and how many outputs its node has."""

    id: str
    spec: QKNormSpec
    inputs: dict[str, Array]
    num_outputs: int = 1

    def expected(self, inputs: dict[str, Array] | None = None) -> list[Array]:
        """The reference's outputs, for other (rounded) inputs if given."""
        return list(qk_norm_attention(self.spec, self.inputs if inputs is None else inputs).values())[: self.num_outputs]


def case(
    name: str,
    *,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 8,
    norm: NormSpec | None = None,
    rotary: RotarySpec | None = None,
    inputs: tuple[OptionalInput, ...] = (),
    sizes: dict[str, Any] | None = None,
    num_outputs: int = 1,
    **attention: Any,
) -> Case:
    """A case from parts of a spec; `sizes` are arguments of `example_inputs`."""
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=heads[0], kv_num_heads=heads[1], **{"scale": float(head_size) ** -0.5, **attention}),
        norm=norm or NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-5),
        rotary=rotary or RotarySpec(),
    )
    variant = Variant(name=name, spec=spec, head_size=head_size, summary="", source="", inputs=inputs)
    values = example_inputs(variant, dtype=np.float64, **{"length": 5, "seed": len(name), **(sizes or {})})
    return Case(id=name, spec=spec, inputs=values, num_outputs=num_outputs)


def optional(name: str, shape: str, values: Any, center: float = 1.0) -> OptionalInput:
    return OptionalInput(name=name, shape=shape, values=values, center=center)


def tables(shape: str) -> tuple[OptionalInput, ...]:
    return (optional("cos", shape, "cos"), optional("sin", shape, "sin"))


def epsilon_modes(*kinds: NormKind) -> list[EpsilonMode]:
    """The modes that the spec allows for a norm of these kinds."""

    def allows(mode: EpsilonMode) -> bool:
        try:
            return all(NormSpec(q_kind=kind, epsilon_mode=mode) for kind in kinds)
        except SpecError:
            return False

    return [mode for mode in get_args(EpsilonMode) if allows(mode)]


def norm_cases() -> Iterator[Case]:
    for kind in filter(normalises, get_args(NormKind)):
        for mode in epsilon_modes(kind):
            for epsilon in (0.0, 1e-12, 1e-6, 0.5):
                norm = NormSpec(q_kind=kind, k_kind=kind, q_epsilon=epsilon, k_epsilon=epsilon / 2, epsilon_mode=mode)
                yield case(f"norm-{kind}-{mode}-{epsilon}", norm=norm, inputs=norm_gains("D", biased=kind == "layer"))
    for per in ("D", "H, D", "H*D"):
        for axis in ("head", "hidden"):
            norm = NormSpec(q_kind="rms", k_kind="layer", axis=axis, q_epsilon=1e-6, k_epsilon=1e-5)
            yield case(f"norm-weight({per})-{axis}", norm=norm, inputs=norm_gains(per, biased=True))
    for axis in ("head", "hidden"):
        norm = NormSpec(q_kind="l2", k_kind="l2", axis=axis, groups=4, q_epsilon=1e-6, k_epsilon=1e-6, epsilon_mode="clamp")
        yield case(f"norm-groups-{axis}", norm=norm, inputs=norm_gains("H*D"))
    yield case("norm-only-k", norm=NormSpec(k_kind="rms", k_epsilon=1e-6), inputs=(optional("k_norm_weight", "(D)", "gain"),))
    yield case("norm-only-q", norm=NormSpec(q_kind="rms", q_epsilon=1e-6), inputs=(optional("q_norm_bias", "(D)", "bias"),))
    for order in ("before_cast", "after_cast"):
        norm = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, weight_order=order)
        yield case(f"norm-weight-{order}", norm=norm, inputs=norm_gains())
        yield case(f"norm-no-weight-{order}", norm=norm)
    yield case("norm-none", norm=NormSpec())


def rotary_cases() -> Iterator[Case]:
    gains = norm_gains()
    for order in ("after_norm", "before_norm"):
        for interleaved in (False, True):
            for shape in ("(S, R/2)", "(B, S, R/2)", "(1, S, R/2)", "(B, 1, S, R/2)", "(S, R)", "(B, S, R)", "(1, 1, S, R)"):
                rotary = RotarySpec(order=order, interleaved=interleaved)
                yield case(f"rotary-{order}-{interleaved}-{shape}", rotary=rotary, inputs=(*gains, *tables(shape)))
    for interleaved in (False, True):
        for size, offset, sections in ((4, 0, 1), (2, 0, 1), (4, 4, 1), (4, 2, 1), (8, 0, 2), (8, 0, 4), (4, 3, 2)):
            for width in ("R/2", "R"):
                parts = RotarySpec(
                    order="after_norm", interleaved=interleaved, embedding_dim=size, offset=offset, sections=sections
                )
                name = f"rotary-partial-{size}-{offset}-{sections}-{interleaved}-{width}"
                yield case(name, rotary=parts, inputs=(*gains, *tables(f"(S, {width})")))
    per_head = RotarySpec(order="after_norm")
    yield case("rotary-per-head", heads=(2, 2), rotary=per_head, inputs=tables("(B, Hq, S, R/2)"))
    yield case("rotary-no-norm", rotary=per_head, norm=NormSpec(), inputs=tables("(B, S, R/2)"), is_causal=True)
    k_only = NormSpec(k_kind="rms", k_epsilon=1e-6)
    yield case("rotary-before-k-only", rotary=RotarySpec(order="before_norm"), norm=k_only, inputs=tables("(S, R/2)"))


def attention_cases() -> Iterator[Case]:
    gains = norm_gains()
    for heads in ((1, 1), (5, 1), (6, 2), (7, 7), (48, 2), (40, 8)):
        yield case(f"heads-{heads}", heads=heads, head_size=16, inputs=gains, is_causal=True)
    for head_size in (1, 2, 20, 36, 72, 80, 96, 192):
        yield case(f"head-size-{head_size}", head_size=head_size, inputs=gains)
    yield case("value-size", inputs=gains, sizes={"value_size": 3}, num_outputs=3)
    yield case("cross-attention", inputs=gains, sizes={"key_length": 7})
    yield case("causal-short-keys", inputs=gains, sizes={"key_length": 3}, is_causal=True)
    yield case("causal-long-keys", inputs=gains, sizes={"key_length": 9}, is_causal=True)
    for left, right, causal in ((0, -1, True), (2, -1, True), (2, -1, False), (-1, 1, False), (1, 2, False), (-1, 0, False)):
        name = f"window-{left}-{right}-{causal}"
        window = {"left_window_size": left, "right_window_size": right, "is_causal": causal}
        yield case(name, inputs=gains, **window)
        yield case(f"{name}-past", inputs=gains, sizes={"past_length": 4}, num_outputs=3, **window)
        yield case(f"{name}-short-keys", inputs=gains, sizes={"key_length": 2, "length": 7}, **window)
    yield case("softcap", inputs=gains, softcap=2.0, is_causal=True)
    yield case("softcap-clamp", inputs=gains, softcap=2.0, logit_clamp=1.0)
    yield case("clamp", inputs=gains, logit_clamp=0.25)
    yield case("softmax-float64", inputs=gains, softmax_precision="float64", is_causal=True)
    yield case("negative-scale", inputs=gains, scale=-0.7)
    yield case("zero-scale", inputs=gains, scale=0.0, is_causal=True)
    for shape in ("()", "(1)", "(D)", "(Hq, 1, 1)", "(S, 1)", "(B, Hq, S, D)"):
        yield case(f"q-scale-{shape}", inputs=(*gains, optional("q_scale", shape, "scale")), is_causal=True)
    sink = optional("head_sink", "(Hq)", "logits")
    yield case("sink", inputs=(*gains, sink))
    yield case("sink-causal-window", inputs=(*gains, sink), is_causal=True, left_window_size=1)


def mask_cases() -> Iterator[Case]:
    gains = norm_gains()
    for shape in (
        "(1)",
        "(T)",
        "(S, T)",
        "(S, 1)",
        "(B, 1, 1, T)",
        "(B, 1, S, T)",
        "(B, Hq, S, T)",
        "(Hq, 1, T)",
        "(1, Hq, S, 1)",
    ):
        for values in ("logits", "bool mask", "float mask"):
            bias = optional("attention_bias", shape, values)
            yield case(f"bias-{shape}-{values}", inputs=(*gains, bias))
            yield case(f"bias-{shape}-{values}-causal", inputs=(*gains, bias), is_causal=True, softcap=3.0)
    for values in ("logits", "bool mask", "float mask"):
        bias = optional("attention_bias", "(B, 1, S, T)", values)
        sink = optional("head_sink", "(Hq)", "logits")
        yield case(f"bias-past-{values}", inputs=(*gains, bias), sizes={"past_length": 3}, is_causal=True, num_outputs=3)
        yield case(f"bias-sink-{values}", inputs=(*gains, bias, sink), left_window_size=2)
        yield case(f"bias-cache-{values}", inputs=(*gains, bias), sizes={"past_length": 3, "capacity": 11}, num_outputs=3)
        short = optional("attention_bias", "(B, 1, S, K)", values)
        for capacity in (3, 4, 11):
            sizes = {"past_length": 3, "capacity": capacity, "batch": 3, "length": 4}
            name = f"bias-fewer-columns-{values}-{capacity}"
            yield case(name, inputs=(*gains, short), sizes=sizes, is_causal=capacity != 4, num_outputs=3)
        rows = case(f"masked-rows-{values}", inputs=(*gains, bias), heads=(6, 2))
        mask = rows.inputs["attention_bias"]
        mask[0, 0, 0, :] = False if values == "bool mask" else -np.inf
        mask[1, 0, 3, :] = False if values == "bool mask" else -np.inf
        yield rows
    lowest = case("masked-rows-finite", inputs=(*gains, optional("attention_bias", "(B, 1, S, T)", "float mask")))
    lowest.inputs["attention_bias"][0, 0, 1, :] = np.finfo(np.float32).min
    lowest.inputs["attention_bias"][0, 0, 2, :] = [np.finfo(np.float32).min, -np.inf, -np.inf, -np.inf, -np.inf]
    yield lowest


def cache_cases() -> Iterator[Case]:
    gains = norm_gains()
    rotary = RotarySpec(order="after_norm")
    with_tables = (*gains, *tables("(B, S, R/2)"))
    for past, length in ((0, 4), (0, 1), (3, 1), (5, 3)):
        for causal in (False, True):
            sizes = {"past_length": past, "length": length}
            name = f"cache-{past}-{length}-{causal}"
            yield case(name, inputs=with_tables, rotary=rotary, sizes=sizes, is_causal=causal, num_outputs=3)
            yield case(f"{name}-no-present", inputs=with_tables, rotary=rotary, sizes=sizes, is_causal=causal)
            fixed = {**sizes, "capacity": past + length + 3, "batch": 3}
            yield case(f"{name}-fixed", inputs=with_tables, rotary=rotary, sizes=fixed, is_causal=causal, num_outputs=3)
            for room in (0, 1):
                grown = {**sizes, "capacity": past + room, "batch": 3}
                grown_name = f"{name}-grown-{room}"
                yield case(grown_name, inputs=with_tables, rotary=rotary, sizes=grown, is_causal=causal, num_outputs=3)
    for heads in ((4, 2), (6, 2), (3, 1)):
        sizes = {"past_length": 5, "capacity": 5, "batch": 3, "length": 2, "seed": 3}
        yield case(f"cache-grown-{heads}", heads=heads, inputs=gains, sizes=sizes, is_causal=True, num_outputs=3)
    yield case("cache-key-only-output", inputs=gains, sizes={"past_length": 2}, num_outputs=2)
    full = {"past_length": 4, "capacity": 9, "length": 2}
    yield case("cache-fixed-window", inputs=gains, sizes=full, is_causal=True, left_window_size=2, num_outputs=3)
    for causal in (True, False):
        offset = case(f"query-offset-{causal}", inputs=gains, sizes={"key_length": 9}, is_causal=causal, left_window_size=3)
        offset.inputs["query_offset"] = np.array([4, 0], dtype=np.int64)
        yield offset
    beyond = case("query-offset-sees-nothing", inputs=gains, sizes={"key_length": 4}, left_window_size=1)
    beyond.inputs["query_offset"] = np.array([30, -9], dtype=np.int64)
    yield beyond


def empty_cases() -> Iterator[Case]:
    gains = norm_gains("H*D", biased=True)
    layer = NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-6, k_epsilon=1e-6)
    rotary = RotarySpec(order="after_norm", interleaved=True)
    tabled = (*gains, *tables("(B, S, R/2)"))
    mask = optional("attention_bias", "(B, 1, S, T)", "bool mask")
    for sizes in ({"batch": 0}, {"length": 0}, {"batch": 0, "length": 0}):
        yield case(f"empty-{sizes}", norm=layer, rotary=rotary, inputs=tabled, sizes=sizes, is_causal=True, num_outputs=3)
        yield case(f"empty-past-{sizes}", inputs=(*gains, mask), sizes={**sizes, "past_length": 3}, num_outputs=3)
        fixed = {**sizes, "past_length": 3, "capacity": 9}
        yield case(f"empty-fixed-{sizes}", inputs=gains, sizes=fixed, num_outputs=3, is_causal=True)
        grown = {**sizes, "past_length": 3, "capacity": 3}
        yield case(f"empty-grown-{sizes}", inputs=gains, sizes=grown, num_outputs=3, is_causal=True)
        groups = NormSpec(q_kind="rms", k_kind="rms", axis="hidden", groups=2)
        yield case(f"empty-groups-{sizes}", norm=groups, inputs=gains, sizes=sizes, softcap=5.0)
    yield case("empty-keys", inputs=(*gains, mask), sizes={"key_length": 0})
    yield case("empty-keys-causal", inputs=gains, sizes={"key_length": 0}, is_causal=True)
    yield case("empty-new-keys", inputs=gains, sizes={"key_length": 0, "past_length": 4}, num_outputs=3)


def variant_cases() -> Iterator[Case]:
    for name, variant in VARIANTS.items():
        for sizes in ({"batch": 1, "length": 6}, {"batch": 3, "length": 5}):
            values = example_inputs(variant, dtype=np.float64, seed=len(name), **sizes)
            yield Case(id=f"variant-{name}-{sizes['batch']}", spec=variant.spec, inputs=values)


def random_cases(count: int = 80) -> Iterator[Case]:
    seed = 0
    while count:
        seed += 1
        try:
            yield _random_case(seed)
        except SpecError:  # a combination that the spec refuses
            continue
        count -= 1


class Draw:
    """Random choices of one case."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([20, seed])

    def one(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]


def _random_case(seed: int) -> Case:
    draw = Draw(seed)
    heads, size = draw.one((4, 2), (3, 1), (2, 2), (6, 3)), draw.one(4, 8, 12)
    norm, rotary = _random_norm(draw), _random_rotary(draw, size)
    sizes: dict[str, Any] = {"batch": draw.one(1, 2, 3), "length": draw.one(1, 3, 6), "value_size": draw.one(size, 5)}
    sizes |= draw.one({}, {"past_length": 3}, {"past_length": 0}, {"past_length": 4, "capacity": 12})
    return case(
        f"random-{seed}",
        heads=heads,
        head_size=size,
        norm=norm,
        rotary=rotary,
        inputs=_random_inputs(draw, norm, rotary),
        sizes=sizes,
        num_outputs=draw.one(1, 3),
        is_causal=draw.one(True, False),
        left_window_size=draw.one(-1, -1, 0, 2),
        right_window_size=draw.one(-1, -1, 0, 2),
        softcap=draw.one(0.0, 0.0, 2.0),
        logit_clamp=draw.one(0.0, 0.0, 1.5),
        scale=draw.one(0.3, 1.0, 2.5),
    )


def _random_norm(draw: Draw) -> NormSpec:
    return NormSpec(
        q_kind=draw.one(*get_args(NormKind)),
        k_kind=draw.one(*get_args(NormKind)),
        axis=draw.one("head", "head", "hidden"),
        groups=draw.one(1, 1, 2),
        q_epsilon=draw.one(0.0, 1e-6, 0.1),
        k_epsilon=draw.one(0.0, 1e-6, 0.1),
        epsilon_mode=draw.one("inside_sqrt", "clamp", "outside_sqrt"),
        weight_order=draw.one("before_cast", "after_cast"),
    )


def _random_rotary(draw: Draw, size: int) -> RotarySpec:
    rotated = draw.one(0, 4)
    return RotarySpec(
        order=draw.one("none", "after_norm", "before_norm"),
        interleaved=draw.one(False, True),
        embedding_dim=rotated,
        offset=draw.one(0, size - 4) if rotated else 0,
        sections=draw.one(1, 2),
    )


def _random_inputs(draw: Draw, norm: NormSpec, rotary: RotarySpec) -> tuple[OptionalInput, ...]:
    gained = draw.one("D", "H, D", "H*D")
    inputs: list[OptionalInput] = []
    for side, count in (("q", "Hq"), ("k", "Hkv")):
        if getattr(norm, f"{side}_kind") != "none":
            shape = f"({gained})".replace("H", count)
            inputs += [optional(f"{side}_norm_weight", shape, "gain")] if draw.one(True, True, False) else []
            inputs += [optional(f"{side}_norm_bias", shape, "bias")] if draw.one(True, False) else []
    if draw.one(True, False):
        inputs.append(optional("q_scale", draw.one("()", "(Hq, 1, 1)", "(D)", "(S, 1)"), "scale"))
    if rotary.order != "none":
        inputs += tables(draw.one("(S, R/2)", "(B, S, R/2)", "(1, 1, S, R)", "(B, S, R)"))
    if draw.one(True, False):
        shape = draw.one("(S, T)", "(B, 1, 1, T)", "(B, Hq, S, T)", "(Hq, 1, 1)")
        inputs.append(optional("attention_bias", shape, draw.one("logits", "bool mask", "float mask")))
    if draw.one(True, False, False):
        inputs.append(optional("head_sink", "(Hq)", "logits"))
    return tuple(inputs)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "norm": norm_cases,
    "rotary": rotary_cases,
    "attention": attention_cases,
    "mask": mask_cases,
    "cache": cache_cases,
    "empty": empty_cases,
    "variant": variant_cases,
    "random": random_cases,
}


def group(name: str, every: int = 1) -> list[Case]:
    """The cases of one group, or each `every`-th of them; their names differ."""
    cases = list(GROUPS[name]())
    assert len({found.id for found in cases}) == len(cases), "names of cases must differ"
    return cases[::every]
