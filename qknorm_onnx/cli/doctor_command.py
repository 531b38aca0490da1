"""`qknorm-onnx doctor`."""

from __future__ import annotations

import dataclasses
import json
from typing import Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qknorm_onnx.cli.options import json_option

MARKS: Final = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "note": "note"}


@click.command("doctor")
@json_option
def command(as_json: bool) -> int:
    """Say what this machine has for exporting, running and validating, and what to install for the rest."""
    from qknorm_onnx.runtime.environment import examine

    findings = examine()
    healthy = all(finding.state == "ok" for finding in findings if finding.required)
    if as_json:
        click.echo(json.dumps({"healthy": healthy, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        table = Table("what", "state", "detail")
        for finding in findings:
            detail = f"{finding.detail}\n{finding.mend}" if finding.mend else finding.detail
            table.add_row(finding.name, MARKS[finding.state], escape(detail))
        Console().print(table)
    return 0 if healthy else 1
