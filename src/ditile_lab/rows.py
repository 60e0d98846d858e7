"""Files of rows, from which measurements resume: a line of JSON for each measured thing, written at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ditile.distributed import files
from ditile.plan.errors import LoadError, ModelError

MAX_BYTES = 2**30
Row = dict[str, Any]


def list_values(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """Return a field of each row that has it."""
    return [row[name] for row in rows if row.get(name) is not None]


def format_columns(formats: Mapping[str, Callable[[Row], str]], rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return title -> a text for each row, without empty columns."""
    columns = {title: [format_row(row) for row in rows] for title, format_row in formats.items()}
    return {title: texts for title, texts in columns.items() if any(texts)}


def list_folder_outputs(out: str, names: Sequence[str]) -> list[tuple[str, Path]]:
    """List (option, path) of what a command writes into its folder, for `check_output_files`.

    Raises:
        ModelError: if it is a file.
    """
    # The functions of os.path return False for a name that is too long, but methods of Path raise.
    if os.path.isdir(out):
        return [("out", Path(out, name)) for name in names]
    if os.path.exists(out):
        raise ModelError(f"out={out!r} is a file; give a folder")
    return [("out", Path(out))]


def write_json_file(path: Path, value: Any) -> None:
    """Write an indented file of JSON. Raises `OSError` if it cannot be written."""
    files.write_atomically(path, json.dumps(value, indent=1) + "\n")


class RowFile:
    """A file of rows, in which a killed process may have left one row unfinished.

    Args:
        path: the file; it need not exist.
        first_field: the first field of every row, by which an unfinished one is recognized.
    """

    def __init__(self, path: Path, first_field: str) -> None:
        self.path = path
        self._first_field = first_field
        self._beginning = f'{{"{first_field}": '

    def read(self) -> list[Row]:
        """Read all rows, without those that were cut off.

        Raises:
            LoadError: if the file cannot be read, or has a line that is not a row.
        """
        if not self.path.exists():
            return []
        try:
            lines = files.read_file(self.path, MAX_BYTES).decode().splitlines()
        except (OSError, ValueError) as error:
            raise LoadError(f"{self.path} cannot be read: {error}") from error
        rows = []
        for line in lines:
            # An append after a cut-off line begins with an end of line.
            if not line.strip():
                continue
            try:
                row = files.parse_json(line)
            except ValueError as error:
                # A line that was cut off is ignored, so its row is measured again.
                if line.startswith(self._beginning) or self._beginning.startswith(line):
                    continue
                raise LoadError(
                    f"{self.path} has a line that is not JSON ({error}); correct it, or give another --out"
                ) from error
            if not isinstance(row, dict) or self._first_field not in row:
                raise LoadError(f"{self.path} has a line without {self._first_field!r}; give another --out")
            rows.append(row)
        return rows

    def append(self, rows: Iterable[Row]) -> None:
        """Append rows at the end; the folder must exist."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with self.path.open("a+b") as file:
            # A line that was cut off must not become the beginning of a new one.
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = "\n" + text
            file.write(text.encode())

    def replace(self, rows: Iterable[Row]) -> None:
        """Replace the file's rows by these, all at once."""
        files.write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in rows))
