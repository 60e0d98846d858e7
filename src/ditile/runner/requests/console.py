"""Prints the output of the command line: tables for people, JSON for programs."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditile.distributed import env, files
from ditile.plan.errors import ModelError, escape_controls

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
LINE_PERIOD = 10.0
"""Seconds between two lines of progress where there is no terminal."""
STATUS_SECONDS = 2.0
"""Seconds after which a line names the work that takes so long."""
LINE_WIDTH = 80
"""Columns of a terminal for which tables are made."""


def make_console(*, stderr: bool = False, piped_width: int = 160) -> Console:
    """Make the console for tables. Into a pipe they are as wide as a table needs, up to `piped_width` columns."""
    from rich.console import Console

    class EscapingConsole(Console):
        """A console that shows control letters of what a user has named, in cells of tables too."""

        def render_str(self, text: str, **settings: Any) -> Text:
            return super().render_str(escape_controls(text), **settings)

    stream = sys.stderr if stderr else sys.stdout
    # A terminal has a width of its own.
    width = None if stream.isatty() else piped_width
    return EscapingConsole(stderr=stderr, highlight=False, markup=False, width=width)


def print_parts(console: Console, parts: Iterable[Table | str]) -> None:
    """Print tables and lines. Tables are as wide as the terminal at most, and lines are never cut."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def print_tables_and_json(parts: Iterable[Table | str], text: str, json: str | None) -> None:
    """Print tables and lines for people, and JSON on request, into a file or with `-` to the standard output.

    Raises:
        ModelError: if the file cannot be written.
    """
    print_parts(make_console(stderr=json == "-"), parts)
    if json == "-":
        print(text)
    elif json is not None:
        try:
            files.write_atomically(Path(json), text + "\n")
        except OSError as error:
            raise ModelError(f"json={json!r} cannot be written: {error}") from error


def make_numbered_tables(labels: Sequence[str], columns: Mapping[str, Sequence[str]]) -> list[Table | str]:
    """Make tables for 80 columns with a row of numbers for each label, and then the labels, which can be copied.

    Args:
        labels: for each row one line or several, such as a plan.
        columns: title -> a text for each row; a table that would be too wide is continued by another.
    """
    from rich.table import Table

    column_groups: list[list[str]] = []
    used = LINE_WIDTH  # so that the first title begins a table
    for title, texts in columns.items():
        width = 3 + max(map(len, [title, *texts]))
        if used + width > LINE_WIDTH:
            column_groups.append([])
            used = 4 + len(str(len(labels)))
        column_groups[-1].append(title)
        used += width
    parts: list[Table | str] = []
    for titles in column_groups:
        table = Table("")
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for number in range(len(labels)):
            table.add_row(str(number + 1), *(columns[title][number] for title in titles))
        parts.append(table)
    for number, label in enumerate(labels, 1):
        first_line, *other_lines = label.splitlines()
        parts += [f"{number:>2}  {first_line}", *(f"    {line}" for line in other_lines)]
    return parts


@contextlib.contextmanager
def show_progress_bar(
    title: str, total: int, *, completed: int = 0, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show progress on the standard error: a bar on a terminal, otherwise a line now and then.

    Yields a function that advances it by a count.
    """
    if not shown:
        yield lambda count: None
    elif not sys.stderr.isatty():
        with _print_progress_lines(title, total, completed) as advance:
            yield advance
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(title, total=total, completed=completed)
            yield functools.partial(progress.advance, task)


@contextlib.contextmanager
def _print_progress_lines(title: str, total: int, completed: int) -> Iterator[Callable[[int], None]]:
    """Print a line every `LINE_PERIOD` seconds, also while nothing advances. Work that takes less prints none."""
    done = completed
    began = time.monotonic()
    ended = threading.Event()

    def advance(count: int) -> None:
        nonlocal done
        done += count

    def print_lines() -> None:
        while not ended.wait(LINE_PERIOD):
            seconds = time.monotonic() - began
            line = f"{title}: {done} of {total} after {seconds:.0f} s"
            if done > completed:
                line += f", about {seconds * (total - done) / (done - completed):.0f} s left"
            print(line, file=sys.stderr, flush=True)

    printer = threading.Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        yield advance
    finally:
        ended.set()
        printer.join()


class Status:
    """A line on the standard error of one process about its work, unless that is over within `STATUS_SECONDS`.

    So a run of a small model, and a refusal, print nothing else.

    Attributes:
        is_shown: whether the line was printed.
    """

    def __init__(self, text: str) -> None:
        self.is_shown = False
        self._text = text
        self._timer = threading.Timer(STATUS_SECONDS, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Status:
        if is_writing_process():
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Print nothing from now on."""
        self._timer.cancel()

    def _show(self) -> None:
        self.is_shown = True
        print(self._text, file=sys.stderr, flush=True)


def is_writing_process() -> bool:
    """Return whether this process writes the output. torchrun's other ranks may be on machines without the folder."""
    place = env.read_torchrun_place()
    return place is None or place.rank == 0
