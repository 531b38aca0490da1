"""`qk.generate`: transformers' own tokens from both runtimes, and how a text ends, is streamed, drawn and refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys

import pytest
import torch
import transformers

import qknorm_onnx as qk
from qknorm_onnx.cli.main import run
from qknorm_onnx.errors import InputError
from qknorm_onnx.serving.tokens import load_tokenizer
from tests.serving.reference import cut, reference
from tests.serving.tiny_models import DOCUMENT, SECOND_END

PROMPTS = ("Hello", "The quick brown fox", "a", "Grüße aus Köln, ", "x = {1: 2}\n")
RUNTIMES = ("genai", "onnxruntime")
NEW = 40


@pytest.fixture
def made(exported):
    return exported("qwen3")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_greedy_is_transformers_greedy(made, runtime):
    expected = reference(made.model, PROMPTS, NEW)
    result = qk.generate(made.folder, PROMPTS, max_new_tokens=NEW, runtime=runtime)
    assert list(result.tokens) == expected
    assert result.runtime == runtime and result.prompt_lengths == tuple(len(prompt.encode()) for prompt in PROMPTS)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert qk.generate(made.folder, prompt, max_new_tokens=NEW, runtime=runtime).tokens == (tokens,)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_row_ends_at_its_own_end_token(made, runtime, tmp_path):
    ends = (255, reference(made.model, PROMPTS, NEW)[0][5])
    folder = shutil.copytree(made.folder, tmp_path / "other ends")
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = list(ends)
    (folder / "genai_config.json").write_text(json.dumps(config))
    result = qk.generate(folder, PROMPTS, max_new_tokens=NEW, runtime=runtime)
    assert list(result.tokens) == reference(made.model, PROMPTS, NEW, ends=ends)
    assert result.finished == tuple("end" if tokens[-1] in ends else "length" for tokens in result.tokens)
    assert result.finished[0] == "end" and len(set(map(len, result.tokens))) > 1


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_stop_string_ends_a_row_and_is_no_part_of_it(made, runtime):
    text = qk.generate(made.folder, PROMPTS[1], max_new_tokens=NEW).texts[0]
    stop = text[6:9]
    pieces = []
    result = qk.generate(
        made.folder, PROMPTS[1], max_new_tokens=NEW, stop=stop, runtime=runtime, on_text=lambda _row, piece: pieces.append(piece)
    )
    assert result.texts == (text[: text.index(stop)],) and result.finished == ("stop",)
    assert "".join(pieces) == result.texts[0]
    assert len(result.tokens[0]) < NEW


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_streams_what_it_returns(made, runtime):
    pieces = {row: [] for row in range(len(PROMPTS))}
    result = qk.generate(
        made.folder, PROMPTS, max_new_tokens=NEW, runtime=runtime, on_text=lambda row, piece: pieces[row].append(piece)
    )
    assert tuple("".join(pieces[row]) for row in pieces) == result.texts
    assert any(len(row) > 3 for row in pieces.values()), "pieces come one by one"
    for text, tokens in zip(result.texts, result.tokens, strict=True):
        assert text == bytes(token for token in tokens if token not in (DOCUMENT, SECOND_END)).decode(errors="replace")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_seed_gives_the_same_text_again(made, runtime):
    def draw(seed, **options):
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
        return qk.generate(made.folder, PROMPTS, max_new_tokens=12, seed=seed, runtime=runtime, **settings).tokens

    assert draw(1) == draw(1) != draw(2)
    assert list(draw(3, top_k=1)) == reference(made.model, PROMPTS, 12), "the likeliest token alone is greedy"
    assert draw(4, temperature=0.0) == draw(5, temperature=0.0)


def test_a_repetition_penalty_of_the_folder_is_transformers(made, tmp_path):
    folder = shutil.copytree(made.folder, tmp_path / "penalty")
    config = json.loads((folder / "genai_config.json").read_text())
    config["search"]["repetition_penalty"] = 1.3
    (folder / "genai_config.json").write_text(json.dumps(config))
    expected = reference(made.model, PROMPTS[:1], NEW, repetition_penalty=1.3)
    assert expected != reference(made.model, PROMPTS[:1], NEW)
    for runtime in RUNTIMES:
        assert list(qk.generate(folder, PROMPTS[0], max_new_tokens=NEW, runtime=runtime).tokens) == expected


def test_prompts_may_be_token_ids_and_need_no_tokenizer(made, tmp_path):
    folder = shutil.copytree(made.folder, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    rows = [list(prompt.encode()) for prompt in PROMPTS]
    expected = qk.generate(made.folder, PROMPTS, max_new_tokens=8)
    result = qk.generate(folder, rows, max_new_tokens=8, runtime="onnxruntime")
    assert result.tokens == expected.tokens and set(result.texts) == {""}
    assert qk.generate(folder, rows, max_new_tokens=8).tokens == expected.tokens
    for wanted in ({"prompts": PROMPTS}, {"prompts": rows, "stop": "x"}):
        with pytest.raises(InputError, match=r"has no tokenizer\.json"):
            qk.generate(folder, **wanted)


def test_prompts_may_hold_the_padding_token(made):
    rows = [[DOCUMENT, 72, DOCUMENT, 105], [72, 105, 33, DOCUMENT, 34, 90]]
    for given in (rows, [[*rows[0], DOCUMENT], rows[1]], rows[:1]):
        result = qk.generate(made.folder, given, max_new_tokens=6)
        at_the_end = any(row[-1] == DOCUMENT for row in given)
        assert result.runtime == ("onnxruntime" if at_the_end else "genai")
        assert ("token 0 at the end of a prompt" in result.reason) == at_the_end
        assert qk.generate(made.folder, given, max_new_tokens=6, runtime="onnxruntime").tokens == result.tokens
        for row, tokens in zip(given, result.tokens, strict=True):
            ids = torch.tensor([row])
            expected = made.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=[DOCUMENT, SECOND_END]
            )
            assert tokens == cut(expected[0, len(row) :].tolist())


def test_without_genai_onnxruntime_serves(made, monkeypatch):
    expected = qk.generate(made.folder, PROMPTS, max_new_tokens=8)
    assert expected.runtime == "genai" and not expected.reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = qk.generate(made.folder, PROMPTS, max_new_tokens=8)
    assert (result.runtime, result.reason) == ("onnxruntime", "onnxruntime-genai is not installed")
    assert result.tokens == expected.tokens
    with pytest.raises(InputError, match=r"not installed.*use runtime='onnxruntime'"):
        qk.generate(made.folder, PROMPTS, runtime="genai")


def test_without_the_package_tokenizers_only_token_ids(made, monkeypatch):
    rows = [list(prompt.encode()) for prompt in PROMPTS]
    expected = qk.generate(made.folder, PROMPTS, max_new_tokens=8)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tokenizers" else find_spec(name))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert qk.generate(made.folder, rows, max_new_tokens=8).tokens == expected.tokens
    with pytest.raises(InputError, match="pip install tokenizers"):
        qk.generate(made.folder, PROMPTS, max_new_tokens=8)


def test_the_example_reads_bytes_after_the_document_mark(request):
    folder = request.config.rootpath / "examples" / "byte_qwen3"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("Grüße") == [0, *"Grüße".encode()] and tokenizer.decode([0, *"Grüße".encode()]) == "Grüße"
    assert tokenizer.encode("a", special=False) == [97]
    assert transformers.AutoTokenizer.from_pretrained(folder)("Grüße").input_ids == [0, *"Grüße".encode()]


def test_a_chat_is_written_by_the_folders_template(made):
    written = "<user>Who?<assistant>"
    assert (
        qk.generate(made.folder, "Who?", chat=True, max_new_tokens=6).tokens
        == qk.generate(made.folder, written, max_new_tokens=6).tokens
    )


def test_a_template_cannot_reach_out(made, tmp_path):
    folder = shutil.copytree(made.folder, tmp_path / "hostile")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="cannot be rendered"):
        qk.generate(folder, "Who?", chat=True)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only the assistant speaks') }}")
    with pytest.raises(InputError, match="only the assistant speaks"):
        qk.generate(folder, "Who?", chat=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "beam search is not supported"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1"),
        ({"max_new_tokens": 10_000}, "context of 512 has 507 left"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"prompts": "x" * 512}, "has 512 tokens, and the model reads 512"),
        ({"prompts": ["a", ""]}, "prompt 1 has no tokens"),
        ({"prompts": []}, "no prompt is given"),
        ({"prompts": ["a", [1]]}, "texts or token ids, not both"),
        ({"prompts": [[1]], "chat": True}, "a chat template takes texts"),
        ({"runtime": "vllm"}, "unknown runtime 'vllm'; choose from auto"),
    ],
)
def test_refusals(made, options, message):
    with pytest.raises(InputError, match=message):
        qk.generate(made.folder, **{"prompts": "Hello", **options})


def test_no_new_tokens_are_no_error(made):
    result = qk.generate(made.folder, PROMPTS, max_new_tokens=0)
    assert result.tokens == ((),) * len(PROMPTS) and result.tokens_per_second == 0.0


def test_a_hugging_face_folder_is_named(made):
    with pytest.raises(InputError, match="looks like a Hugging Face folder: qknorm-onnx export"):
        qk.generate(made.source, "Hello")


def test_the_command(made, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the library is found from anywhere
    moved = shutil.copytree(made.folder, tmp_path / "moved away")
    text = qk.generate(made.folder, "Hello", max_new_tokens=20).texts[0]
    assert run(["generate", "moved away", "Hello", "--max-new-tokens", "20"]) == 0
    captured = capsys.readouterr()
    letters = [letter for letter in text if letter.isprintable()]
    assert [letter for letter in captured.out if letter in letters][: len(letters)] and "tokens/s" in captured.err
    assert run(["generate", str(moved), "Hello", "Hi", "--max-new-tokens", "20", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["texts"][0] == text and len(said["tokens"]) == 2 and said["runtime"] == "genai"
    assert run(["generate", str(moved), "Hello", "--num-beams", "2"]) == 2
    assert "beam search" in capsys.readouterr().err
