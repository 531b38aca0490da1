"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from qknorm_onnx.spec.targets import DEFAULT_TARGET, PROVIDERS, TARGET_NAMES, require_provider, target_named

Function = TypeVar("Function", bound=Callable[..., Any])

existing_model = click.argument("model", type=click.Path(path_type=Path))

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")

require_fusion_option = click.option(
    "--require-fusion", is_flag=True, help="Fail (exit code 1) unless all QK-Norm attention became one node."
)


def target_options(function: Function) -> Function:
    """`--target`, `--provider` and `--for-onnxruntime`, refused where they do not exist before anything slow begins."""
    what = f"What attention becomes: {listed(TARGET_NAMES)} (also called portable)."
    release = click.option(
        "--for-onnxruntime",
        default=None,
        metavar="X.Y",
        callback=_known(_require_release),
        help="Write nothing that this onnxruntime lacks, for example 1.24.",
    )
    target = click.option("--target", default=DEFAULT_TARGET, show_default=True, callback=_known(target_named), help=what)
    return target(provider_option(f"Whose kernels: {listed(PROVIDERS)}.")(release(function)))


def _require_release(name: str | None) -> None:
    if name is not None:
        from qknorm_onnx.graph.onnxruntime_release import release_named

        release_named(name)


def provider_option(what: str) -> Callable[[Function], Function]:
    """`--provider`; `what` is its line of help."""
    return click.option("--provider", default=PROVIDERS[0], show_default=True, callback=_known(require_provider), help=what)


def listed(names: Sequence[str]) -> str:
    """For example `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _known(require: Callable[[str], object]) -> Callable[[click.Context, click.Parameter, str], str]:
    def checked(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
        require(value)
        return value

    return checked
