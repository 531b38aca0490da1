"""The benchmark: it times nothing that is wrong, says what it measured, and judges by its own bars. Speed is not asserted."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from qknorm_onnx import custom_ops
from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.speed import run as engine
from qknorm_onnx.speed.benchmark_report import Figure
from qknorm_onnx.speed.cases import Bar, Case, Entry, MemoryCase, chosen_cases, full_cases, quick_cases, qwen3_spec
from qknorm_onnx.speed.contestant import Contestant, LeftOutError
from qknorm_onnx.speed.peak_memory import peak_memory_mb
from qknorm_onnx.speed.problem import Problem, true_output, with_room
from qknorm_onnx.speed.timing import LONGEST_PAUSE_SECONDS, clock_for, interleaved, no_pause, ratio_of_pairs, wait_until_quiet

QUICK = ("bench", "--quick", "--threads", "1", "--rounds", "2")
SETTINGS = engine.Settings(rounds=2, threads=1, quick=True)
SMALL = Problem(spec=qwen3_spec(q_num_heads=4, kv_num_heads=2), head_size=16, new=5)
SMALL_DECODE = dataclasses.replace(SMALL, new=1, cached=7)


def small_case(*makers: str, problem: Problem = SMALL, bars: tuple[Bar, ...] = ()) -> Case:
    entries = tuple(Entry(name=maker, maker=maker, problem=problem) for maker in makers)
    return Case(id="small", title="small", entries=entries, bars=bars)


def spoiled(maker, change):
    """A contestant whose result is changed before anybody sees it."""

    def make(problem, inputs, threads):
        honest = maker(problem, inputs, threads)
        return Contestant(honest.call, lambda: change(honest.output()))

    return make


def one_nan(y):
    y = y.copy()
    y.flat[3] = np.nan
    return y


WRONG = {
    "a hundredth of a percent": lambda y: y * np.float32(1 + 1e-4),
    "one value": lambda y: y + np.eye(1, y.size, 7, dtype=y.dtype).reshape(y.shape) * np.float32(1e-3),
    "NaN": one_nan,
    "zeros": np.zeros_like,
    "another shape": lambda y: y[:, :-1],
}


def test_quick_run_as_json(command):
    outcome = command(*QUICK, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["format_version"] == 1
    assert found["quick"] is True
    assert found["rounds"] == 2
    assert found["machine"]["threads"] == 1
    assert found["machine"]["clock"] == "processor time"
    assert found["machine"]["instruction_set"] == custom_ops.build_info()["instruction_set"]
    assert found["limits"]["matmul_gflops"] > 0
    assert found["limits"]["read_gb_per_s"] > 0
    assert [case["id"] for case in found["cases"]] == [case.id for case in quick_cases()]
    for case, planned in zip(found["cases"], quick_cases(), strict=True):
        assert case["left_out"] == {}
        names = [entry["name"] for entry in case["entries"]]
        expected = [] if isinstance(planned, MemoryCase) else [entry.name for entry in planned.entries]
        assert names == [name for name in expected if name != "torch compile"]
        for entry in case["entries"]:
            assert 0 < entry["error"] <= entry["allowed"]
            assert 0 < entry["best_ms"] <= entry["median_ms"]
            assert entry["gflops"] > 0
        assert case["figures"]
        for figure in case["figures"]:
            assert math.isfinite(figure["value"])
            assert figure["verdict"] == ""  # there are no bars for small sizes
    assert any("times mean nothing" in note for note in found["notes"])


def test_tables_and_a_file(command, tmp_path):
    path = tmp_path / "found.json"
    outcome = command(*QUICK, "--cases", "decode,memory", "--json", path)
    assert outcome.code == 0, outcome.err
    for part in ("decode-40", "ORT GQA, shared cache", "GB/s", "Bars", "MB", "reading memory"):
        assert part in outcome.out
    assert [case["id"] for case in json.loads(path.read_text())["cases"]] == ["decode-40", "memory-512"]


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("maker", ["native", "ORT standard ops", "torch eager"])
def test_a_wrong_result_is_an_error_and_is_not_timed(command, monkeypatch, maker, change):
    broken = {**engine.MAKERS, maker: spoiled(engine.MAKERS[maker], change)}
    monkeypatch.setattr(engine, "MAKERS", broken)
    outcome = command(*QUICK, "--cases", "prefill", "--json")
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert f"{maker} computes prefill-24 wrongly" in outcome.err


def test_another_norm_is_a_wrong_result():
    """The native kernel of a model that rotates first, in place of one that normalises first."""

    def rotates_first(problem, inputs, threads):
        other = dataclasses.replace(problem, spec=qwen3_spec(order="before_norm", q_num_heads=4, kv_num_heads=2))
        return engine.MAKERS["native"](other, inputs, threads)

    with pytest.raises(engine.WrongResultError, match="native computes small wrongly"):
        engine.run_case(small_case("native"), SETTINGS, {**engine.MAKERS, "native": rotates_first})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("problem", [SMALL, SMALL_DECODE, dataclasses.replace(SMALL_DECODE, batch=3)])
def test_every_contestant_that_takes_part_is_right(problem, dtype):
    problem = dataclasses.replace(problem, dtype=dtype)
    names = [name for name in engine.MAKERS if name not in ("torch compile", "ORT MHA")]
    if not problem.cached:
        names.remove("ORT GQA, shared cache")
    if dtype == "float16":
        names = ["native", "torch eager", "ORT primitive ops"]
    result = engine.run_case(small_case(*names, problem=problem), SETTINGS, engine.MAKERS)
    assert [entry.name for entry in result.entries] == names
    assert result.left_out == {}


@pytest.mark.slow
@pytest.mark.parametrize("problem", [SMALL, SMALL_DECODE])
def test_torch_compile_compiles_it_as_one_graph(problem):
    settings = dataclasses.replace(SETTINGS, with_compile=True)
    result = engine.run_case(small_case("native", "torch compile", problem=problem), settings, engine.MAKERS)
    assert result.left_out == {}
    assert [entry.name for entry in result.entries] == ["native", "torch compile"]


def test_who_cannot_take_part_is_listed_with_the_reason():
    case = small_case("native", "ORT MHA", bars=(Bar(entry="native", against="ORT MHA", at_least=1.0),))
    result = engine.run_case(case, SETTINGS, engine.MAKERS)
    assert list(result.left_out) == ["ORT MHA"]
    assert "without rotary" in result.left_out["ORT MHA"]
    assert result.figures == ()
    assert "ORT MHA" not in [entry.name for entry in result.entries]


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        dataclasses.replace(SMALL_DECODE, batch=2),
        dataclasses.replace(SMALL, spec=qwen3_spec(kind="l2", q_num_heads=4, kv_num_heads=2), temperature=True),
        dataclasses.replace(SMALL, spec=qwen3_spec(kind="layer", q_num_heads=4, kv_num_heads=2)),
        dataclasses.replace(SMALL, spec=qwen3_spec(hidden=True, q_num_heads=4, kv_num_heads=2)),
    ],
    ids=["rms", "cached", "l2", "layer", "hidden"],
)
def test_the_truth_head_by_head_is_the_whole_truth(problem):
    inputs = problem.inputs()
    assert np.abs(true_output(problem, inputs) - qk_norm_attention(problem.spec, inputs)["Y"]).max() < 1e-14
    assert all(np.array_equal(value, problem.inputs()[name]) for name, value in inputs.items())
    if problem.cached:
        roomy = with_room(inputs, problem.cached, problem.new)
        assert np.abs(qk_norm_attention(problem.spec, roomy)["Y"] - true_output(problem, inputs)).max() < 1e-14


def test_turns_are_interleaved_and_ratios_are_of_pairs():
    now, order = [0.0], []

    def taking(name, seconds):
        def call():
            order.append(name)
            # The machine becomes ten times slower half-way: pairs see it on both sides.
            now[0] += seconds * (10 if len(order) > 84 else 1)

        return call

    calls = {"a": taking("a", 1.0), "b": taking("b", 3.0)}
    times = interleaved(calls, rounds=40, clock=lambda: now[0], pause=no_pause)
    assert len(times["a"]) == len(times["b"]) == 40
    assert order[4:12] == ["a", "a", "b", "b", "b", "b", "a", "a"]  # each call is made once before it counts
    assert ratio_of_pairs(times["a"], times["b"]) == pytest.approx(3.0)
    assert max(times["a"]) == pytest.approx(10 * min(times["a"]))
    assert clock_for(1)[0] == "processor time"
    assert clock_for(2)[0] == "wall clock"


def test_a_turn_begins_when_the_threads_of_the_one_before_sleep():
    end = threading.Event()
    stop_at = time.perf_counter() + 0.15

    def spin():
        while time.perf_counter() < stop_at and not end.is_set():
            math.sqrt(2.0)

    spinning = threading.Thread(target=spin)
    spinning.start()
    wait_until_quiet()
    was_running = spinning.is_alive()
    end.set()
    spinning.join()
    assert not was_running


def test_a_pause_ends_though_something_keeps_running():
    end = threading.Event()
    spinning = threading.Thread(target=lambda: [math.sqrt(2.0) for _ in iter(end.is_set, True)])
    spinning.start()
    begun = time.perf_counter()
    wait_until_quiet()
    waited = time.perf_counter() - begun
    end.set()
    spinning.join()
    assert LONGEST_PAUSE_SECONDS <= waited < LONGEST_PAUSE_SECONDS + 1


def test_contestants_are_made_anew_in_other_memory():
    made = []

    def maker(problem, inputs, threads):
        honest = engine.MAKERS["native"](problem, inputs, threads)
        buffer = np.zeros(1 << 16)
        made.append(buffer.ctypes.data)
        return Contestant(lambda: (honest.call(), buffer), honest.output)

    settings = dataclasses.replace(SETTINGS, rounds=7, placements=3)
    found = engine.run_case(small_case("native"), settings, {**engine.MAKERS, "native": maker})
    assert len(set(made)) >= 2, "each new one is made before the one before is gone"
    assert len(made) == 3
    assert [entry.name for entry in found.entries] == ["native"]


def test_every_round_counts_in_every_placement(monkeypatch):
    rounds = []
    monkeypatch.setattr(engine, "interleaved", lambda calls, **given: rounds.append(given["rounds"]) or {"native": [1.0]})
    for settings in (
        dataclasses.replace(SETTINGS, rounds=7, placements=3),
        dataclasses.replace(SETTINGS, rounds=2, placements=3),
    ):
        rounds.clear()
        engine.run_case(small_case("native"), settings, engine.MAKERS)
        assert sum(rounds) == settings.rounds
        assert 0 not in rounds


def test_the_fastest_peer_is_the_one_that_counts(monkeypatch):
    seconds = {"native": 1.0, "ORT standard ops": 3.0, "torch eager": 2.0}
    monkeypatch.setattr(engine, "interleaved", lambda calls, **_: {name: [seconds[name]] * 2 for name in calls})
    bars = (
        Bar(entry="native", against="fastest peer", at_least=1.8, stretch=2.2),
        Bar(entry="native", against="ORT standard ops", at_least=3.5),
    )
    result = engine.run_case(small_case(*seconds, bars=bars), SETTINGS, engine.MAKERS)
    first, second = result.figures
    assert (first.what, first.value, first.verdict) == ("native against torch eager (fastest peer)", 2.0, "reached")
    assert (second.value, second.verdict) == (3.0, "missed")
    alone = engine.run_case(small_case("native", "torch eager", bars=(bars[0], bars[0])), SETTINGS, engine.MAKERS)
    assert len(alone.figures) == 1  # the fastest peer may be named by two bars


def test_the_share_of_the_read_bandwidth(monkeypatch):
    monkeypatch.setattr(engine, "interleaved", lambda calls, **_: {name: [1e-6, 1e-6] for name in calls})
    read_sizes = []
    monkeypatch.setattr(engine, "read_gb_per_s", lambda num_bytes, **_: read_sizes.append(num_bytes) or 10.0)
    case = dataclasses.replace(small_case("native", problem=SMALL_DECODE), read_share_stretch=0.85)
    (figure,) = engine.run_case(case, SETTINGS, engine.MAKERS).figures
    read = 2 * 2 * (7 + 1) * 16 * 4  # k and v, heads, cached and new, head size, bytes
    assert read_sizes == [read]  # a loop over as much memory as the cache has, not over a large array
    assert figure.value == pytest.approx(read / 1e-6 / 10e9)
    assert figure.verdict == ""  # a stretch that is not reached is no miss


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [(1.9, False, "stretch"), (1.5, False, "reached"), (1.4, False, "missed"), (1.4, True, "reached")],
)
def test_verdicts(value, at_most, verdict):
    stretch = None if at_most else 1.8
    assert Figure(what="", value=value, unit="x", bar=1.5, stretch=stretch, at_most=at_most).verdict == verdict


def test_the_full_cases_have_bars_for_what_they_name():
    cases = full_cases()
    assert len({case.id for case in cases}) == len(cases) == 13
    for case in cases:
        if isinstance(case, MemoryCase):
            assert case.at_most_mb == 64
            continue
        names = {entry.name for entry in case.entries}
        assert len(names) == len(case.entries)
        assert {entry.maker for entry in case.entries} <= engine.MAKERS.keys()
        assert any(bar.at_least for bar in case.bars)
        assert all(bar.entry in names and bar.against in names | {"fastest peer"} for bar in case.bars)


def test_choosing_cases():
    cases = full_cases()
    assert [case.id for case in chosen_cases(cases, "prefill-512, vit")] == ["prefill-512", "vit-1024"]
    assert [case.id for case in chosen_cases(cases, "decode")] == ["decode-2048", "decode-8192", "decode-32768"]
    assert chosen_cases(cases, "") == cases
    with pytest.raises(InputError, match="no benchmark case 'prefil'; there are prefill-128"):
        chosen_cases(cases, "prefil")


def test_listing_and_wrong_usage(command, tmp_path):
    listed = command("bench", "--list")
    assert listed.code == 0
    assert len(listed.out.splitlines()) == len(full_cases())
    for arguments in (("--cases", "nothing"), ("--rounds", "0"), ("--threads", "0"), ("--json", tmp_path / "no" / "x.json")):
        outcome = command("bench", "--quick", *arguments)
        assert outcome.code == 2
        assert outcome.err.count("\n") == 1


def test_without_torch(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = command(*QUICK)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert "torch" in outcome.err
    assert "pip install" in outcome.err


def test_without_the_native_library(command, monkeypatch):
    def missing():
        raise FileNotFoundError("the native library libx.so is not in somewhere")

    monkeypatch.setattr(custom_ops, "library_path", missing)
    outcome = command(*QUICK)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert "libx.so" in outcome.err
    assert "pip install" in outcome.err


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is measured on Linux")
def test_the_peak_of_memory_is_no_matrix_of_logits():
    """The logits of 8192 tokens would be 268 MB."""
    (case,) = chosen_cases(full_cases(), "memory")
    assert isinstance(case, MemoryCase)
    assert 0 < peak_memory_mb(case, threads=1) < case.at_most_mb


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is measured on Linux")
def test_a_measuring_process_that_fails_is_told():
    with pytest.raises(LeftOutError, match="no-such-case"):
        peak_memory_mb(MemoryCase(id="no-such-case", title="", problem=SMALL), threads=1)
