"""Progress over named stages on stderr: a bar in a terminal, shown where the work takes long; lines now and then in a log."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

SHOW_AFTER_SECONDS: Final = 2.0
# A server ends a job that says nothing, and a reader wants to know what it is at; a line for every stage would be too many.
SECONDS_BETWEEN_LINES: Final = 10.0


class StageProgress:
    """Context manager; call it with the name of each stage as it begins."""

    def __init__(self, num_stages: int | None, *, enabled: bool = True) -> None:
        self._console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        in_terminal = self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not (enabled and in_terminal))
        self._task: TaskID = self._progress.add_task("", total=num_stages)
        self._timer = threading.Timer(SHOW_AFTER_SECONDS, self._progress.start)
        self._timer.daemon = True
        self._in_log = enabled and not in_terminal
        self._since = self._last_line = time.monotonic()
        self._begun = 0

    def __call__(self, stage: str) -> None:
        """A stage begins; those before it are done."""
        self._progress.update(self._task, description=stage, completed=self._begun)
        self._begun += 1
        now = time.monotonic()
        if self._in_log and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._console.print(f"{now - self._since:.0f} s: {stage}", highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> StageProgress:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        self._progress.stop()
