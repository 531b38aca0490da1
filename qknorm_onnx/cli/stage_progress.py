"""A progress bar over named stages, shown only where the work takes more than two seconds."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

SHOW_AFTER_SECONDS: Final = 2.0


class StageProgress:
    """Context manager; call it with the name of each stage as it begins. Writes to stderr, and only to a terminal."""

    def __init__(self, num_stages: int | None, *, enabled: bool = True) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal))
        self._task: TaskID = self._progress.add_task("", total=num_stages)
        self._timer = threading.Timer(SHOW_AFTER_SECONDS, self._progress.start)
        self._timer.daemon = True
        self._begun = 0

    def __call__(self, stage: str) -> None:
        """A stage begins; those before it are done."""
        self._progress.update(self._task, description=stage, completed=self._begun)
        self._begun += 1

    def __enter__(self) -> StageProgress:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        self._progress.stop()
