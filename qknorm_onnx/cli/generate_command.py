"""`qknorm-onnx generate FOLDER PROMPT...`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qknorm_onnx.errors import without_controls

if TYPE_CHECKING:
    from qknorm_onnx.serving.generate import Generation


@click.command("generate")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option("--max-new-tokens", type=int, default=None, help="At most as many.  [default: 256, or what the context has left]")
@click.option(
    "--temperature", type=float, default=None, help="0 takes the likeliest token.  [default: what the folder says, or 0]"
)
@click.option("--top-k", type=int, default=None, help="Draw among so many of the likeliest tokens; 0 is all.")
@click.option("--top-p", type=float, default=None, help="Draw among the fewest tokens that make up this probability; 1 is all.")
@click.option("--seed", type=int, default=None, help="The same text again, from the same runtime.")
@click.option("--stop", multiple=True, help="A text that ends the continuation; may be given several times.")
@click.option("--chat", is_flag=True, help="Take the prompt as a user's message in the folder's chat template.")
@click.option("--runtime", type=click.Choice(["auto", "genai", "onnxruntime"]), default="auto", show_default=True)
@click.option("--num-beams", type=int, default=1, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
def command(folder: Path, prompts: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Continue each PROMPT with the language model of FOLDER, which `qknorm-onnx export` wrote; `-` reads standard input.

    One prompt is answered as its tokens come, several as one batch. Tokens per second are said at the end, on standard error.
    """
    from qknorm_onnx.serving.generate import generate

    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    streams = len(texts) == 1 and not as_json
    generation = generate(folder, texts, on_text=_print_piece if streams else None, **options)
    if as_json:
        said = {**dataclasses.asdict(generation), "tokens_per_second": generation.tokens_per_second}
        click.echo(json.dumps(said))
        return
    if streams:
        click.echo()
    else:
        _print_all(texts, generation)
    click.echo(generation.summary(), err=True)


def _print_piece(_row: int, piece: str) -> None:
    click.echo(_shown(piece), nl=False)


def _print_all(prompts: list[str], generation: Generation) -> None:
    for prompt, text in zip(prompts, generation.texts, strict=True):
        click.echo(f"{_shown(prompt)} -> {_shown(text)}")


def _shown(text: str) -> str:
    """What a model writes must not reach the terminal as a command; lines and tabs are text."""
    return "".join(mark if mark in "\n\t" else without_controls(mark) for mark in text)
