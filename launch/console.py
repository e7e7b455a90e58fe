"""What a person sees of a run, on rank 0: progress, streamed text, the table at the end.

On a terminal progress is a bar (rich; NO_COLOR is honoured); elsewhere it is a plain line now and then. Progress goes
to stderr, results to stdout, so that `> file` keeps the results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

LINE_EVERY_S = 5.0
"""Plain progress lines are this far apart, so that a log of a long run stays short."""


class Progress:
    """One quantity that grows to a known total. Use it as a context manager.

    Example:
        >>> with Progress("prefill", 4096, "tokens") as progress:
        ...     progress.to(1024)
    """

    def __init__(self, name: str, total: int, unit: str, stream: Any = None) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.stream = stream or sys.stderr
        self.value = 0
        self._bar: Any = None
        self._task: Any = None
        self._last_line = 0.0

    def __enter__(self) -> Progress:
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(self.unit))
            self._bar = Bar(*columns, TimeElapsedColumn(), console=Console(file=self.stream), transient=False)
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=self.total)
        return self

    def to(self, value: int) -> None:
        """Show that `value` of the total is done."""
        if value == self.value:
            return
        self.value = value
        if self._bar is not None:
            self._bar.update(self._task, completed=value)
        elif value >= self.total or time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            print(f"{self.name} {value}/{self.total} {self.unit}", file=self.stream, flush=True)

    def close(self) -> None:
        """Take the bar off the terminal's live area. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], stream: Any = None) -> None:
    """Print a table: drawn on a terminal, aligned plain text elsewhere. Numbers stand right."""
    stream = stream or sys.stdout
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        Console(file=stream).print(table)
        return
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(title, file=stream)
    for row in (header, *rows):
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip(), file=stream)
    stream.flush()


def bytes_text(count: int) -> str:
    """Return a number of bytes for people. Example: 94371840 -> "90.0 MiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def say(text: str, end: str = "\n") -> None:
    """Print a result."""
    print(text, end=end, flush=True)


def note(text: str) -> None:
    """Print what is not a result: a warning, where something lies."""
    print(text, file=sys.stderr, flush=True)
