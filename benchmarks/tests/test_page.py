"""The page of benchmarks is put together from results. A failure means that a table of docs/benchmarks.md is lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from benchmarks import page
from training.caption_scores import VERDICT_ITEMS

ROW = {"engine": "ditile", "state": "off", "total_us": {"1": 2.0}, "added_us": {"1": 1.25}, "per_block_us": 0.5}


def test_every_table_has_its_place_in_the_page() -> None:
    for file in {section.page for section in page.SECTIONS.values()}:
        text, names = (page.DOCS / file).read_text("utf-8"), [n for n, s in page.SECTIONS.items() if s.page == file]
        assert page.fill_page_blocks(text, dict.fromkeys(names, "x")).count("\nx\n") == len(names)


@pytest.mark.parametrize("name", page.SECTIONS)
def test_the_page_says_what_was_measured(name: str) -> None:
    """Every table is that of the results in benchmarks/data, as the command writes it."""
    section = page.SECTIONS[name]
    text = (page.DOCS / section.page).read_text("utf-8")
    assert section.is_there(Path(page.RESULTS))
    assert page.fill_page_blocks(text, {name: section.render_block(Path(page.RESULTS))}) == text


def test_a_result_is_put_in_its_place_and_nothing_else_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.md"
    out.write_text("before\n<!-- cache-overhead -->\nold\n<!-- end of cache-overhead -->\nafter\n")
    asked: list[list[str]] = []

    def measured(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        Path(words[-1]).write_text(json.dumps([ROW]))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(page.subprocess, "run", measured)
    words = ["page", "--only", "cache-overhead", "--page", str(out), "--results", str(tmp_path / "results")]
    for _ in range(2):
        monkeypatch.setattr(page.sys, "argv", words)
        page.main()
        text = out.read_text()
        assert text.startswith(
            "before\n<!-- cache-overhead -->\n\n    python -m benchmarks.cache_overhead\n\n| cache |"
        )
        assert (
            text.endswith("|\n\n<!-- end of cache-overhead -->\nafter\n")
            and "| ditile | off | 2.0 | 1.2 | 0.50 |" in text
        )
    assert len(asked) == 1, "a result that is there is not measured again"
    assert asked[0][1:] == ["-m", "benchmarks.cache_overhead", "--out", str(tmp_path / "results/cache-overhead.json")]
    monkeypatch.setattr(page.sys, "argv", [*words, "--again"])
    page.main()
    assert len(asked) == 2


def test_what_cannot_be_measured_keeps_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.md"
    out.write_text("old")
    failed = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(page.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(page.sys, "argv", ["page", "--page", str(out), "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="fidelity ended with exit code 3"):
        page.main()
    monkeypatch.setattr(page.sys, "argv", ["page", "--only", "speed,sped"])
    with pytest.raises(SystemExit):
        page.main()
    assert out.read_text() == "old"


def test_tables_of_every_kind() -> None:
    """Each section's table takes the rows that its command writes; numbers stay right, bars do not end a cell."""
    quality = {
        "model": "m",
        "plan": "pipefusion=2",
        "synchronous": 1.0,
        "psnr": 30.0,
        "psnr_min": 20.0,
        "ssim": 0.5,
        **dict.fromkeys(VERDICT_ITEMS, 99.0),
    }
    assert "| m | pipefusion=2 | 1.0 | 30.0 | 20.0 | 0.5000 | 99 |" in page.markdown(
        page.SECTIONS["fidelity"].table([quality])
    )
    way = {
        "way": "one rank",
        "seconds": 1.0,
        "speedup": 1.0,
        "lowest": 1.0,
        "highest": 1.0,
        "psnr": 1.0,
        "all_right": 9.0,
    }
    assert "| one rank | 1.00 | 1.00x |" in page.markdown(page.SECTIONS["cache-plans-flux"].table([way]))
    table = Table("a")
    table.add_column("b", justify="right")
    table.add_row("x | y", "1")
    assert page.markdown(table) == "| a | b |\n| :-- | --: |\n| x \\| y | 1 |"
