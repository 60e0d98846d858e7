"""What the command line prints: tables for people, JSON for programs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditile.distributed import env, files
from ditile.errors import ModelError

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    """Where tables go. Into a pipe they are as wide as a table needs."""
    from rich.console import Console

    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, markup=False, width=160 if piped else None)


def print_table_and_json(table: Any, text: str, json: str | None) -> None:
    """A table for people, and JSON where it is asked for: into a file, or with `-` on the standard output.

    Raises:
        ModelError: if the file cannot be written.
    """
    make_console(stderr=json == "-").print(table)
    if json == "-":
        print(text)
    elif json is not None:
        try:
            files.write_atomically(Path(json), text + "\n")
        except OSError as error:
            raise ModelError(f"json={json!r} cannot be written: {error}") from error


@contextlib.contextmanager
def show_progress_bar(
    title: str, total: int, *, completed: int = 0, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """A progress bar on the standard error; yields a function that advances it by a count."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(title, total=total, completed=completed)
        yield lambda count: progress.advance(task, count)


def is_writing_process() -> bool:
    """Whether this process is the one that writes: torchrun's other ranks may be on machines without the folder."""
    place = env.read_torchrun_place()
    return place is None or place.rank == 0
