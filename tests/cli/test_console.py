"""What the command line prints where there is no terminal, and in a narrow one."""

from __future__ import annotations

import time

import pytest
from rich.table import Table

from ditile.runner.requests import console


def test_long_work_says_what_is_done_and_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure means a log of an hour without a line. Short work says nothing."""
    monkeypatch.setattr(console, "LINE_PERIOD", 0.02)
    with console.show_progress_bar("prompts", 5, completed=1) as advance:
        time.sleep(0.1)
        advance(2)
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "prompts: 1 of 5 after 0 s"
    assert lines[-1].startswith("prompts: 3 of 5 after 0 s, about ") and lines[-1].endswith(" s left")
    with console.show_progress_bar("prompts", 5, shown=False) as advance:
        advance(1)
        time.sleep(0.05)
    monkeypatch.setattr(console, "LINE_PERIOD", 10.0)
    with console.show_progress_bar("prompts", 5) as advance:
        advance(5)
    assert capsys.readouterr().err == ""


def test_a_wide_table_is_continued_below(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure means cells that are cut, or a plan that a line break parts."""
    plan = "pipefusion=8 patches=32 warmup_mode=sequence ulysses=2 cfg=2 vae=rows text=split split_scheme=sequence"
    columns = {f"column {k}": ["1.00", "12345.67 GB"] for k in range(9)}
    parts = console.make_numbered_tables(["pipefusion=2", f"{plan}\nwhy"], columns)
    assert sum(isinstance(part, Table) for part in parts) == 2
    console.print_parts(console.make_console(), parts)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [" 1  pipefusion=2", f" 2  {plan}", "    why"]
    assert max(map(len, lines[:-3])) <= console.LINE_WIDTH and "12345.67 GB" in lines[4]
