"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

existing_model = click.argument("model", type=click.Path(path_type=Path))

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")

require_fusion_option = click.option(
    "--require-fusion", is_flag=True, help="Fail (exit code 1) unless all QK-Norm attention became one node."
)


def target_options(function: Function) -> Function:
    """`--target` and `--provider`; `require_known_target` checks their values."""
    provider = click.option("--provider", default="cpu", show_default=True, help="Whose kernels: cpu or cuda.")
    target = click.option(
        "--target", default="custom-op", show_default=True, help="What attention becomes: custom-op, ort, onnx or primitive."
    )
    return target(provider(function))


def require_known_target(target: str, provider: str) -> None:
    """Raises InputError for an unknown target or provider, before anything slow begins."""
    from qknorm_onnx.pipeline import require_known

    require_known(target=target, provider=provider)
