"""Next tokens, step by step: from onnxruntime-genai, or from a plain session of onnxruntime whose caches stay in place."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qknorm_onnx.errors import InputError, first_line
from qknorm_onnx.runtime.generation import NUMPY_TYPES
from qknorm_onnx.serving.decoder_folder import DecoderFolder
from qknorm_onnx.serving.decoder_ports import KEY, LOGITS, PRESENT_KEY, PRESENT_VALUE, VALUE, DecoderPorts
from qknorm_onnx.serving.sampling import Chooser, Sampling

if TYPE_CHECKING:
    import onnxruntime

Tokens = npt.NDArray[np.int64]
Rows = Sequence[Sequence[int]]


def why_not_genai(folder: DecoderFolder, ports: DecoderPorts, rows: Rows) -> str:
    """Why onnxruntime-genai cannot serve these prompts, in one sentence; empty where it can."""
    if importlib.util.find_spec("onnxruntime_genai") is None:
        return "onnxruntime-genai is not installed"
    if not ports.is_uniform:
        return "onnxruntime-genai allocates caches of one size, and the layers of this model have several"
    if len({len(row) for row in rows}) == 1:
        return ""
    if folder.has_windows:
        return "onnxruntime-genai pads prompts of unequal lengths behind them, and this model's windows would count the padding"
    if any(row[-1] == folder.pad_token_id for row in rows):
        return f"onnxruntime-genai takes the token {folder.pad_token_id} at the end of a prompt for padding"
    return ""


def genai_tokens(folder: DecoderFolder, rows: Rows, sampling: Sampling, *, max_new_tokens: int) -> Iterator[Tokens]:
    """Tokens (B,) of each step by onnxruntime-genai. Raises InputError where it does not load or run the model."""
    import onnxruntime_genai

    tokens = _padded_behind(rows, folder.pad_token_id)
    options: dict[str, Any] = {
        "batch_size": len(rows),
        "max_length": tokens.shape[1] + max_new_tokens,
        "do_sample": not sampling.is_greedy,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if not sampling.is_greedy:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        options |= {} if sampling.seed is None else {"random_seed": sampling.seed}
    with _one_line(folder):
        model = onnxruntime_genai.Model(str(folder.path))
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(**options)
        generator = onnxruntime_genai.Generator(model, params)
    return _genai_steps(folder, generator, tokens)


def _genai_steps(folder: DecoderFolder, generator: Any, tokens: npt.NDArray[np.int32]) -> Iterator[Tokens]:
    with _one_line(folder):
        generator.append_tokens(tokens)
        while not generator.is_done():
            generator.generate_next_token()
            yield np.asarray(generator.get_next_tokens(), dtype=np.int64)


@contextlib.contextmanager
def _one_line(folder: DecoderFolder) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise InputError(f"onnxruntime-genai does not run {folder.path}: {first_line(error)}") from error


def session_tokens(
    session: onnxruntime.InferenceSession,
    ports: DecoderPorts,
    rows: Rows,
    sampling: Sampling,
    *,
    pad_token_id: int,
    max_new_tokens: int,
    shared_cache: bool,
) -> Iterator[Tokens]:
    """Tokens (B,) of each step by a session whose caches never leave the runtime.

    Rows are padded on the left; `attention_mask` hides the padding, and `position_ids` count from the first token of each row.
    """
    new, mask = _padded_in_front(rows, pad_token_id)
    seen = [list(row) for row in rows]
    chooser = Chooser(sampling, len(rows))
    caches = _Caches(session, ports, len(rows), new.shape[1] + max_new_tokens if shared_cache else 0)
    wanted = {value.name for value in session.get_inputs()}
    while True:
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -new.shape[1] :]
        fed = {"input_ids": new, "attention_mask": mask, "position_ids": np.ascontiguousarray(positions)}
        logits = caches.run({name: value for name, value in fed.items() if name in wanted})
        following = chooser.choose(logits[:, -1], seen)
        yield following
        for row, token in zip(seen, following, strict=True):
            row.append(int(token))
        new = following[:, None]
        mask = np.concatenate([mask, np.ones_like(new)], axis=1)


class _Caches:
    """The caches of all layers, as values of the runtime that are inputs and outputs of each step.

    With `capacity` entries in one buffer a layer, which is both; with 0 each step makes larger ones.
    """

    def __init__(self, session: onnxruntime.InferenceSession, ports: DecoderPorts, batch: int, capacity: int) -> None:
        import onnxruntime

        self._session = session
        self._in_place = capacity > 0
        self._present: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        types = {value.name: NUMPY_TYPES[value.type] for value in session.get_inputs() if value.type in NUMPY_TYPES}
        for layer, size in enumerate(ports.caches):
            for past, present in ((KEY, PRESENT_KEY), (VALUE, PRESENT_VALUE)):
                name = past.format(layer)
                shape = (batch, size.num_heads, capacity, size.head_size)
                self._present[name] = present.format(layer)
                self._values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, types[name]))

    def run(self, fed: dict[str, Tokens]) -> npt.NDArray[Any]:
        """One step; returns its logits."""
        binding = self._session.io_binding()
        for name, tokens in fed.items():
            binding.bind_cpu_input(name, tokens)
        binding.bind_output(LOGITS, "cpu")
        for past, present in self._present.items():
            binding.bind_ortvalue_input(past, self._values[past])
            if self._in_place:
                binding.bind_ortvalue_output(present, self._values[past])
            else:
                binding.bind_output(present, "cpu")
        self._session.run_with_iobinding(binding)
        logits, *presents = binding.get_outputs()
        if not self._in_place:
            self._values = dict(zip(self._present, presents, strict=True))
        return logits.numpy()


def _padded_in_front(rows: Rows, pad_token_id: int) -> tuple[Tokens, Tokens]:
    """Prompts as (B, S), and their mask, 1 where there is a token."""
    length = max(map(len, rows))
    tokens = np.full((len(rows), length), pad_token_id, dtype=np.int64)
    mask = np.zeros_like(tokens)
    for place, row in enumerate(rows):
        tokens[place, length - len(row) :] = row
        mask[place, length - len(row) :] = 1
    return tokens, mask


def _padded_behind(rows: Rows, pad_token_id: int) -> npt.NDArray[np.int32]:
    """Prompts as (B, S) as onnxruntime-genai 0.18 wants them: it hides padding tokens at the end of a row, and no others."""
    tokens = np.full((len(rows), max(map(len, rows))), pad_token_id, dtype=np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return tokens
