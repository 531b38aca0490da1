"""Train `byte_qwen3`, a Qwen3 language model over bytes that is small enough to keep next to the code.

How to run, from the repository's root, with the extras `torch` and `hf` installed:

    python examples/train_byte_qwen3.py                 # trains, then writes examples/byte_qwen3 and reports on it
    python examples/train_byte_qwen3.py --evaluate      # reports on the model that is there
    python examples/train_byte_qwen3.py --steps 20 --out /tmp/tiny     # a try-out

Training takes about ten minutes of one core's time. The text is the running Python's own documentation (`python_corpus.py`).
The same Python, torch, seed and number of threads give the same weights; with `--checkpoint` an interrupted run goes on
where it stopped and still ends in the same weights.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from byte_text import DOCUMENT_MARK, VOCABULARY_SIZE, decode, encode
from python_corpus import Corpus, read_corpus
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

PROMPTS = ("If the file ", "This function ")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LONG_CONTEXT = 512
SHORT_CONTEXT = 256
TOKENS_PER_STEP = 2048
CHECKPOINT_EVERY = 200


@dataclass(frozen=True)
class Plan:
    """How to train: number of steps, seed, and the peak learning rates of the schedule."""

    steps: int
    seed: int
    matrix_rate: float
    norm_rate: float

    def rate_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a fiftieth of the peak."""
        warm_up = min(100, self.steps // 10)
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))

    def context(self, step: int) -> int:
        """Short windows first because they are cheaper; the last fifth learns the positions of the full context."""
        return SHORT_CONTEXT if step < 0.8 * self.steps else LONG_CONTEXT


def make_config() -> Qwen3Config:
    """Qwen3 with three queries to a key head, and heads whose width is not hidden_size / num_attention_heads."""
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONG_CONTEXT,
        initializer_range=0.06,  # the default 0.02 suits wide models; at width 128 it slows the start
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=DOCUMENT_MARK,
        eos_token_id=DOCUMENT_MARK,
        pad_token_id=None,  # a padding id would keep the document mark's embedding from training
    )


def make_optimizer(model: Qwen3ForCausalLM, plan: Plan) -> torch.optim.AdamW:
    """AdamW; the norm weights get a higher rate and no decay, so that they move far from the ones they start as."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "lr": plan.matrix_rate, "weight_decay": 0.1},
        {"params": norms, "lr": plan.norm_rate, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def draw_batch(text: torch.Tensor, step: int, plan: Plan) -> torch.Tensor:
    """Random windows, `(rows, context)` int64; they depend on seed and step alone, so a resumed run sees the same."""
    context = plan.context(step)
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    starts = torch.randint(0, len(text) - context + 1, (TOKENS_PER_STEP // context, 1), generator=generator)
    return text[starts + torch.arange(context)].long()


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, batch: torch.Tensor, factor: float) -> float:
    """One update; returns the batch's loss in bits per byte."""
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * factor
    optimizer.step()
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak
    optimizer.zero_grad()
    return float(loss.detach()) / math.log(2)


def train(corpus: Corpus, plan: Plan, checkpoint: Path | None) -> Qwen3ForCausalLM:
    """Train from scratch, or from `checkpoint` where that file exists; prints the loss as it goes."""
    torch.manual_seed(plan.seed)
    model = Qwen3ForCausalLM(make_config())
    optimizer = make_optimizer(model, plan)
    first = load_checkpoint(checkpoint, model, optimizer, plan) if checkpoint and checkpoint.exists() else 0
    text = torch.frombuffer(bytearray(corpus.training), dtype=torch.uint8)
    model.train()
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(first, plan.steps):
        losses.append(train_step(model, optimizer, draw_batch(text, step, plan), plan.rate_factor(step)))
        if (step + 1) % 50 == 0 or step + 1 == plan.steps:
            mean = sum(losses) / len(losses)
            print(f"step {step + 1:5d}  {mean:.3f} bits per byte  {time.perf_counter() - start:5.0f} s", flush=True)
            losses.clear()
        if checkpoint and (step + 1) % CHECKPOINT_EVERY == 0:
            save_checkpoint(checkpoint, model, optimizer, plan, step + 1)
    return model.eval()


def save_checkpoint(path: Path, model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, plan: Plan, step: int) -> None:
    """Write the state after `step` steps; the old file stays until the new one is complete."""
    state = {"step": step, "plan": vars(plan), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, plan: Plan) -> int:
    """Read the state and return the number of steps done; raises SystemExit if it belongs to another plan."""
    state = torch.load(path, weights_only=True)
    if state["plan"] != vars(plan):
        raise SystemExit(f"{path} was written with {state['plan']}; give the same options or remove the file")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    # Padding is named here, not in the config: generate() wants to know it, and nothing is trained by it.
    model.generation_config = GenerationConfig(bos_token_id=DOCUMENT_MARK, eos_token_id=DOCUMENT_MARK, pad_token_id=DOCUMENT_MARK)
    model.save_pretrained(folder)


def windows(text: bytes) -> Iterator[torch.Tensor]:
    """Consecutive windows of the full context, `(1, <= 512)` int64; one of a single token predicts nothing."""
    ids = torch.tensor(list(text))
    for window in ids.split(LONG_CONTEXT):
        if len(window) > 1:
            yield window[None]


@torch.no_grad()
def bits_per_byte(model: Qwen3ForCausalLM, text: bytes) -> float:
    """Mean loss over `text`, in windows that each start without context (which costs a little)."""
    total, count = 0.0, 0
    for batch in windows(text):
        predicted = batch.shape[1] - 1
        total += float(model(input_ids=batch, labels=batch, use_cache=False).loss) * predicted
        count += predicted
    return total / count / math.log(2)


@torch.no_grad()
def generate(model: Qwen3ForCausalLM, prompt: str, new_bytes: int, temperature: float = 0.0) -> str:
    """Prompt and continuation: greedy, or sampled from a fixed seed where a temperature is given."""
    ids = torch.tensor([[DOCUMENT_MARK, *encode(prompt)]])
    torch.manual_seed(0)
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_bytes, **choice)
    return decode(out[0].tolist())


def print_norm_weights(model: Qwen3ForCausalLM) -> None:
    """Range of each q_norm and k_norm weight; all start as ones."""
    for name, weight in model.state_dict().items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            low, high, mean = float(weight.min()), float(weight.max()), float(weight.mean())
            print(f"{name:40s} {low:6.3f} .. {high:.3f}  mean {mean:.3f}")


def report(folder: Path, corpus: Corpus) -> None:
    """Load the saved model in each dtype; print held-out loss, greedy text, one sample and the norm weights."""
    print(f"model.safetensors: {(folder / 'model.safetensors').stat().st_size / 1e6:.2f} MB")
    for dtype in DTYPES:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        loss = bits_per_byte(model, corpus.held_out)
        print(f"\n{str(dtype).removeprefix('torch.')}: {loss:.3f} bits per byte on held-out text")
        for prompt in PROMPTS:
            print(f"  greedy: {generate(model, prompt, 120)!r}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(f"\nsampled at temperature 0.7:\n{generate(model, PROMPTS[0], 400, temperature=0.7)}\n")
    print_norm_weights(model)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small Qwen3 byte model on Python's own documentation.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "byte_qwen3", help="folder of the model")
    parser.add_argument("--steps", type=int, default=2200, help=f"updates of {TOKENS_PER_STEP} bytes each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix-rate", type=float, default=3e-3, help="peak learning rate of the matrices")
    parser.add_argument("--norm-rate", type=float, default=2e-2, help="peak learning rate of the norm weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="file to keep the training state in, and to go on from")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, report on the model in --out")
    options = parser.parse_args()
    if options.steps < 1 or options.threads < 1:
        parser.error("--steps and --threads must be 1 or more")
    if options.evaluate and not (options.out / "config.json").is_file():
        parser.error(f"--out {options.out} holds no model (no config.json); train one first, without --evaluate")
    return options


def main() -> None:
    """Train unless told not to, then report."""
    disable_progress_bar()
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    corpus = read_corpus()
    print(f"text: {len(corpus.training)} bytes to train on, {len(corpus.held_out)} held out, sha256 {corpus.sha256}")
    if not options.evaluate:
        plan = Plan(options.steps, options.seed, options.matrix_rate, options.norm_rate)
        save(train(corpus, plan, options.checkpoint), options.out)
    report(options.out, corpus)


if __name__ == "__main__":
    main()
