"""Offline inference as a bar on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from serve_apps.batch.progress import Progress, View


class BatchBar(View):
    """The view on a terminal: rows done, speed and failures."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
        )
        self._task = self._bar.add_task(title, total=None, figures="")

    def __enter__(self) -> View:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            total=progress.rows,
            completed=progress.done.rows,
            figures=progress.figures(),
        )

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False)


def view_for(title: str) -> View:
    """A bar on a terminal, lines elsewhere."""
    return BatchBar(title) if sys.stderr.isatty() else View()
