"""Text from a decoder's folder: `qk.generate`."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, assert_never

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import load_model
from qknorm_onnx.runtime.session import create_session
from qknorm_onnx.serving.decoder_folder import DecoderFolder, open_decoder_folder
from qknorm_onnx.serving.decoder_ports import read_ports
from qknorm_onnx.serving.sampling import Sampling, sampling_of
from qknorm_onnx.serving.text_stream import TextStream
from qknorm_onnx.serving.token_sources import Rows, Tokens, genai_tokens, session_tokens, why_not_genai
from qknorm_onnx.serving.tokens import TOKENIZER_NAME, Tokenizer, as_chat, load_tokenizer

Runtime = Literal["auto", "genai", "onnxruntime"]
Finish = Literal["end", "stop", "length"]
RUNTIMES: Final[tuple[Runtime, ...]] = ("auto", "genai", "onnxruntime")
NEW_TOKENS_BY_DEFAULT: Final = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What was generated, row by row as the prompts were given.

    `texts`: the continuations without the prompts, special tokens and stop strings; empty where the folder has no tokenizer.
    `tokens`: their ids, the one that ended a row included. `finished`: "end" by an end token, "stop" by a stop string, "length"
    by the number of tokens. `runtime`: who ran, "genai" or "onnxruntime", and `reason`: why not genai where it could not be.
    `seconds` is all steps, the first of which reads the prompts, `first_seconds` up to the first token; loading is in neither.
    """

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]
    finished: tuple[Finish, ...]
    runtime: str
    reason: str
    seconds: float
    first_seconds: float

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows behind their first ones, in the time that these took; 0 where there are none."""
        later, seconds = self.num_tokens - len(self.tokens), self.seconds - self.first_seconds
        return later / seconds if later > 0 and seconds > 0 else 0.0

    def summary(self) -> str:
        """For example `80 tokens, the first after 0.02 s, then 410 tokens/s (onnxruntime-genai)`."""
        runner = "onnxruntime-genai" if self.runtime == "genai" else "onnxruntime"
        because = f": {self.reason}" if self.reason else ""
        return (
            f"{self.num_tokens} tokens, the first after {self.first_seconds:.2f} s, then {self.tokens_per_second:.1f} tokens/s "
            f"({runner}{because})"
        )


def generate(
    folder: str | os.PathLike[str],
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    chat: bool = False,
    runtime: Runtime = "auto",
    num_beams: int = 1,
    on_text: Callable[[int, str], None] | None = None,
) -> Generation:
    """Continue `prompts` with the language model of a folder that `qk.export_folder` wrote.

    Args:
        folder: the folder.
        prompts: a text, several, or token ids of each; they may be of unequal lengths.
        max_new_tokens: at most as many; None is 256, or what the model's context has left.
        temperature: 0 takes the likeliest token; None is what the folder says, and that is 0 unless its generation_config.json
            samples.
        top_k: draw among so many of the likeliest; 0 is all.
        top_p: draw among the fewest whose probabilities make up this much; 1 is all.
        seed: the same text again, from the same runtime; None is another one each time.
        stop: texts that end a row; they are no part of what is returned.
        chat: take each prompt as a user's message in the folder's chat template.
        runtime: "genai" is onnxruntime-genai, "onnxruntime" a plain session; "auto" takes genai where it is installed and serves
            these prompts. Both give the same tokens at temperature 0; their random numbers differ.
        num_beams: 1. Beam search is not supported.
        on_text: called with the number of a row and a piece of its text, as soon as that is certain.

    Raises:
        InputError: no such folder, no tokenizer in it, a prompt without tokens or too long, values out of their range, beam
            search, or a runtime that does not run the model; the message says what to do.
    """
    if num_beams != 1:
        raise InputError(
            "beam search is not supported (num_beams is 1); sample with temperature, top_k and top_p, or use transformers"
        )
    if runtime not in RUNTIMES:
        raise InputError(f"unknown runtime {runtime!r}; choose from {', '.join(RUNTIMES)}")
    opened = open_decoder_folder(folder)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    tokenizer, rows = _rows(opened, prompts, chat=chat, needs_text=bool(stops) or on_text is not None)
    room = _room(opened, rows, max_new_tokens)
    sampling = sampling_of(opened.search, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    chosen, reason, steps = _steps(opened, rows, sampling, runtime=runtime, max_new_tokens=room)
    batch = _Batch(opened, tokenizer, len(rows), stops, on_text)
    first, seconds = _follow(steps, batch, room)
    return Generation(
        texts=tuple(batch.texts()),
        tokens=tuple(map(tuple, batch.tokens)),
        prompt_lengths=tuple(map(len, rows)),
        finished=tuple(end or "length" for end in batch.ends),
        runtime=chosen,
        reason=reason,
        seconds=seconds,
        first_seconds=first,
    )


def _follow(steps: Iterator[Tokens], batch: _Batch, room: int) -> tuple[float, float]:
    """Feeds the rows until all have ended; seconds to the first token and of all."""
    begun = time.perf_counter()
    first = 0.0
    for step in range(room):
        tokens = next(steps, None)
        if tokens is None:
            break
        first = first if step else time.perf_counter() - begun
        batch.take(tokens)
        if all(batch.ends):
            break
    batch.finish()
    return first, time.perf_counter() - begun


class _Batch:
    """The rows of one call as they grow: what ends each, and its text where there is a tokenizer."""

    def __init__(
        self,
        folder: DecoderFolder,
        tokenizer: Tokenizer | None,
        num_rows: int,
        stops: Sequence[str],
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self._end_tokens = frozenset(folder.eos_token_ids)
        self._on_text = on_text
        self._streams = [None if tokenizer is None else TextStream(tokenizer, stops) for _ in range(num_rows)]
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.ends: list[Finish | None] = [None] * num_rows

    def take(self, tokens: Tokens) -> None:
        """The next token of each row; what comes behind a row's end is nothing."""
        for row, token in enumerate(tokens.tolist()):
            if self.ends[row] is not None:
                continue
            self.tokens[row].append(token)
            stream = self._streams[row]
            if token in self._end_tokens:
                self.ends[row] = "end"
            elif stream is not None:
                self._say(row, stream.take(token))
                self.ends[row] = "stop" if stream.stopped else None

    def finish(self) -> None:
        """No more tokens come."""
        for row, stream in enumerate(self._streams):
            if stream is not None:
                self._say(row, stream.finish())

    def texts(self) -> Iterator[str]:
        """The text of each row."""
        yield from ("" if stream is None else stream.text for stream in self._streams)

    def _say(self, row: int, piece: str) -> None:
        if piece and self._on_text is not None:
            self._on_text(row, piece)


def _rows(
    folder: DecoderFolder, prompts: str | Sequence[str] | Sequence[Sequence[int]], *, chat: bool, needs_text: bool
) -> tuple[Tokenizer | None, Rows]:
    given: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
    if not given:
        raise InputError("no prompt is given")
    is_text = [isinstance(prompt, str) for prompt in given]
    if any(is_text) and not all(is_text):
        raise InputError("prompts are texts or token ids, not both in one call")
    is_readable = (folder.path / TOKENIZER_NAME).is_file() and importlib.util.find_spec("tokenizers") is not None
    tokenizer = load_tokenizer(folder.path) if all(is_text) or needs_text or is_readable else None
    if chat and not all(is_text):
        raise InputError("a chat template takes texts, and token ids are given")
    rows: list[list[int]] = []
    for number, prompt in enumerate(given):
        if isinstance(prompt, str):
            assert tokenizer is not None
            row = tokenizer.encode(as_chat(folder.path, prompt), special=False) if chat else tokenizer.encode(prompt)
        else:
            row = [int(token) for token in prompt]
        if not row:
            raise InputError(f"prompt {number} has no tokens: there is nothing to continue")
        rows.append(row)
    return tokenizer, rows


def _room(folder: DecoderFolder, rows: Rows, max_new_tokens: int | None) -> int:
    """How many tokens are generated at most."""
    longest = max(map(len, rows))
    left = folder.context_length - longest
    if left < 1:
        raise InputError(
            f"a prompt has {longest} tokens, and the model reads {folder.context_length} with what it adds: shorten it"
        )
    if max_new_tokens is None:
        return min(left, NEW_TOKENS_BY_DEFAULT)
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens}; it is 0 or greater")
    if max_new_tokens > left:
        raise InputError(
            f"max_new_tokens is {max_new_tokens}, and behind a prompt of {longest} tokens the model's context of "
            f"{folder.context_length} has {left} left"
        )
    return max_new_tokens


def _steps(
    folder: DecoderFolder, rows: Rows, sampling: Sampling, *, runtime: Runtime, max_new_tokens: int
) -> tuple[str, str, Iterator[Tokens]]:
    """Who runs, why not genai, and the steps."""
    model = load_model(folder.model_path)
    ports = read_ports(model)
    reason = why_not_genai(folder, ports, rows)
    match runtime:
        case "genai" if reason:
            raise InputError(f"{reason}; use runtime='onnxruntime', or 'auto'")
        case "auto" | "genai" if not reason:
            return "genai", "", genai_tokens(folder, rows, sampling, max_new_tokens=max_new_tokens)
        case "auto" | "genai" | "onnxruntime":
            session = create_session(folder.model_path)
            steps = session_tokens(
                session,
                ports,
                rows,
                sampling,
                pad_token_id=folder.pad_token_id,
                max_new_tokens=max_new_tokens,
                shared_cache=folder.shared_cache,
            )
            return "onnxruntime", reason if runtime == "auto" else "", steps
        case _:
            assert_never(runtime)
