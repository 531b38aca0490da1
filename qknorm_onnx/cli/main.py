"""The command `qknorm-onnx`: its verbs, and how errors reach the user.

Exit codes: 0 good; 1 the check failed (parity, --require-fusion); 2 wrong usage or bad input, told in one line.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

import click

import qknorm_onnx
from qknorm_onnx.errors import QKNormError, printable
from qknorm_onnx.spec.qk_norm_spec import SpecError

VERBS: Final = ("export", "fuse", "inspect", "validate", "generate", "bench", "doctor")


class LazyVerbs(click.Group):
    """A group whose verbs are imported only when they are needed, so that `--help` starts at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of a user's work."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb, from the module `cli/<verb>_command.py`."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"qknorm_onnx.cli.{cmd_name}_command")
        command = module.command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyVerbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qknorm_onnx.__version__, prog_name="qknorm-onnx")
def application() -> None:
    """Export PyTorch models with QK-Norm attention to ONNX, one node per attention, proven equal to PyTorch."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script; always ends in SystemExit with one of the exit codes above."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line `arguments` (None: the process's own) and return its exit code."""
    try:
        result = application.main(args=arguments, prog_name="qknorm-onnx", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "qknorm-onnx"
        return _complain(f"{error.format_message()} See '{where} --help'.", 2)
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except click.Abort:
        return _complain("interrupted", 2)
    except QKNormError as error:
        return _complain(str(error), error.exit_code)
    except SpecError as error:
        return _complain(str(error), 2)
    return result if isinstance(result, int) else 0


def _complain(message: str, code: int) -> int:
    click.echo(f"error: {printable(message)}", err=True)
    return code
