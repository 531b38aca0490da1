"""What is measured: sizes of Qwen3-0.6B's and of a vision transformer's attention, contestants, and the bars to reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, assert_never

from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    EpsilonMode,
    NormKind,
    NormSpec,
    QKNormSpec,
    RotaryOrder,
    RotarySpec,
    normalises,
)
from qknorm_onnx.speed.problem import Problem

EPSILON: Final = 1e-6
FASTEST_PEER: Final = "fastest peer"
PREFILL_PEERS: Final = ("torch eager", "torch compile", "ORT primitive ops", "ORT standard ops", "ORT GQA")
DECODE_PEERS: Final = (*PREFILL_PEERS, "ORT GQA, shared cache")
VISION_PEERS: Final = ("torch eager", "torch compile", "ORT primitive ops", "ORT standard ops", "ORT MHA")
NATIVE: Final = "native"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One contestant on one problem. `maker` is a key of `contestants.MAKERS`."""

    name: str
    maker: str
    problem: Problem

    @property
    def is_native(self) -> bool:
        """Whether our kernel runs it; all others are peers."""
        return self.maker == NATIVE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """`entry` is to be at least `at_least` times as fast as `against` (an entry, or `FASTEST_PEER`); `stretch`: better still."""

    entry: str
    against: str
    at_least: float | None = None
    stretch: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Entries that are timed in turns. `read_share_stretch`: the share of the read bandwidth that decoding should use."""

    id: str
    title: str
    entries: tuple[Entry, ...]
    bars: tuple[Bar, ...]
    read_share_stretch: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """The peak of memory over inputs and outputs of one call, in a process of its own."""

    id: str
    title: str
    problem: Problem
    at_most_mb: float | None = None


AnyCase = Case | MemoryCase


def full_cases() -> tuple[AnyCase, ...]:
    """The sizes that the bars are for."""
    prefill = [
        _prefill(128, Bar(entry=NATIVE, against=FASTEST_PEER, at_least=2.5, stretch=3.0)),
        _prefill(512, Bar(entry=NATIVE, against=FASTEST_PEER, at_least=1.8, stretch=2.2)),
        _prefill(2048, Bar(entry=NATIVE, against=FASTEST_PEER, at_least=1.5, stretch=2.0)),
    ]
    decode = [_decode(cached, at_least=bar) for cached, bar in ((2048, 1.4), (8192, 1.8), (32768, 1.8))]
    half = [_decode_half(cached, at_least=3.5, stretch=4.5) for cached in (2048, 8192, 32768)]
    vision = _vision(1024, num_heads=12, at_least=1.5, stretch=2.0)
    memory = MemoryCase(id="memory-8192", title="peak memory, 8192 tokens, one head", problem=_one_head(8192), at_most_mb=64.0)
    return (*prefill, *decode, *half, vision, _norm_kinds(512, at_least=0.97), _norm_cost(2048, at_least=0.99), memory)


def quick_cases() -> tuple[AnyCase, ...]:
    """The same in sizes that take no time: they show that everything runs and is right; there are no bars for them."""
    return (
        _prefill(24, Bar(entry=NATIVE, against=FASTEST_PEER)),
        _decode(40),
        _decode_half(40),
        _vision(24, num_heads=3),
        _norm_kinds(24),
        _norm_cost(24),
        MemoryCase(id="memory-512", title="peak memory, 512 tokens, one head", problem=_one_head(512)),
    )


def chosen_cases(cases: Sequence[AnyCase], names: str) -> tuple[AnyCase, ...]:
    """Those whose id, or the beginning of it before a `-`, is in the comma-separated `names`; all for "".

    Raises:
        InputError: a name fits none.
    """
    if not names:
        return tuple(cases)
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if not any(_fits(case.id, name) for case in cases):
            raise InputError(f"no benchmark case {name!r}; there are {', '.join(case.id for case in cases)}")
    return tuple(case for case in cases if any(_fits(case.id, name) for name in wanted))


def _fits(case_id: str, name: str) -> bool:
    return case_id == name or case_id.startswith(f"{name}-")


def qwen3_spec(
    *,
    kind: NormKind = "rms",
    order: RotaryOrder = "after_norm",
    hidden: bool = False,
    q_num_heads: int = 16,
    kv_num_heads: int = 8,
) -> QKNormSpec:
    """Qwen3-0.6B's attention (16:8 heads of 128), or a relative of it with another norm."""
    epsilon = EPSILON if normalises(kind) else 0.0
    mode, scale = _mode_and_scale(kind)
    norm = NormSpec(
        q_kind=kind,
        k_kind=kind,
        axis="hidden" if hidden else "head",
        q_epsilon=epsilon,
        k_epsilon=epsilon,
        epsilon_mode=mode,
    )
    attention = AttentionSpec(q_num_heads=q_num_heads, kv_num_heads=kv_num_heads, scale=scale, is_causal=True)
    return QKNormSpec(attention=attention, norm=norm, rotary=RotarySpec(order=order))


def _mode_and_scale(kind: NormKind) -> tuple[EpsilonMode, float]:
    """What models with such a norm have: rows of length 1 need no 1 / sqrt(D)."""
    match kind:
        case "none" | "rms" | "layer":
            return "inside_sqrt", 128**-0.5
        case "l2":
            return "clamp", 1.0
        case _:
            assert_never(kind)


def _entries(problem: Problem, names: Sequence[str]) -> tuple[Entry, ...]:
    return tuple(Entry(name=name, maker=name, problem=problem) for name in (NATIVE, *names))


def _prefill(length: int, bar: Bar) -> Case:
    problem = Problem(spec=qwen3_spec(), head_size=128, new=length)
    title = f"prefill, {length} tokens, causal"
    return Case(id=f"prefill-{length}", title=title, entries=_entries(problem, PREFILL_PEERS), bars=(bar,))


def _decode(cached: int, *, at_least: float | None = None) -> Case:
    problem = Problem(spec=qwen3_spec(), head_size=128, new=1, cached=cached)
    bars = (Bar(entry=NATIVE, against="ORT GQA, shared cache", at_least=at_least), Bar(entry=NATIVE, against=FASTEST_PEER))
    return Case(
        id=f"decode-{cached}",
        title=f"one token, {cached} cached, cache in place",
        entries=_entries(problem, DECODE_PEERS),
        bars=bars,
        read_share_stretch=None if at_least is None else 0.85,
    )


def _decode_half(cached: int, *, at_least: float | None = None, stretch: float | None = None) -> Case:
    problem = Problem(spec=qwen3_spec(), head_size=128, new=1, cached=cached, dtype="float16")
    peers = ("torch eager", "torch compile", "ORT GQA, shared cache")
    return Case(
        id=f"fp16-decode-{cached}",
        title=f"one token, {cached} cached in float16; ORT GQA in float32",
        entries=_entries(problem, peers),
        bars=(Bar(entry=NATIVE, against="ORT GQA, shared cache", at_least=at_least, stretch=stretch),),
    )


def _vision(length: int, *, num_heads: int, at_least: float | None = None, stretch: float | None = None) -> Case:
    attention = AttentionSpec(q_num_heads=num_heads, kv_num_heads=num_heads, scale=64**-0.5)
    norm = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=EPSILON, k_epsilon=EPSILON)
    problem = Problem(spec=QKNormSpec(attention=attention, norm=norm), head_size=64, new=length)
    bar = Bar(entry=NATIVE, against=FASTEST_PEER, at_least=at_least, stretch=stretch)
    title = f"vision transformer, {length} patches, {num_heads} heads of 64, no mask"
    return Case(id=f"vit-{length}", title=title, entries=_entries(problem, VISION_PEERS), bars=(bar,))


def _norm_kinds(length: int, *, at_least: float | None = None) -> Case:
    problems = {
        "rms": Problem(spec=qwen3_spec(), head_size=128, new=length),
        "l2 + tau": Problem(spec=qwen3_spec(kind="l2"), head_size=128, new=length, temperature=True),
        "layer": Problem(spec=qwen3_spec(kind="layer"), head_size=128, new=length),
        "rms, full width": Problem(spec=qwen3_spec(hidden=True), head_size=128, new=length),
        "rms after rotary": Problem(spec=qwen3_spec(order="before_norm"), head_size=128, new=length),
    }
    entries = tuple(Entry(name=name, maker=NATIVE, problem=problem) for name, problem in problems.items())
    bars = tuple(Bar(entry=name, against="rms", at_least=at_least) for name in problems if name != "rms")
    return Case(id=f"norm-kinds-{length}", title=f"kinds of norm, native, {length} tokens", entries=entries, bars=bars)


def _norm_cost(length: int, *, at_least: float | None = None) -> Case:
    problems = {
        "norm and rotary on": Problem(spec=qwen3_spec(), head_size=128, new=length),
        "both off": Problem(spec=qwen3_spec(kind="none", order="none"), head_size=128, new=length),
    }
    entries = tuple(Entry(name=name, maker=NATIVE, problem=problem) for name, problem in problems.items())
    bar = Bar(entry="norm and rotary on", against="both off", at_least=at_least, stretch=None if at_least is None else 0.995)
    return Case(id=f"norm-cost-{length}", title=f"cost of norm and rotary, {length} tokens", entries=entries, bars=(bar,))


def _one_head(length: int) -> Problem:
    return Problem(spec=qwen3_spec(q_num_heads=1, kv_num_heads=1), head_size=128, new=length)
