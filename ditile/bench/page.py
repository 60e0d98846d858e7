"""docs/benchmarks.md by one command: measures what has no result yet, and puts every table in its place.

    python -m ditile.bench.page                          # hours; what docs/benchmarks has is kept
    python -m ditile.bench.page --only cache-overhead    # some of them; --again takes them anew
    python -m ditile.bench.page --no-measure             # only the tables of the results that there are

A table has its place between `<!-- NAME -->` and `<!-- end of NAME -->`, with the command that measured it above; what
is written around it stays. A place whose result is missing stays as it is.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ditile.bench import cache_overhead, cache_plans, cache_quality, fidelity, tables

DOCS = Path(__file__).parents[2] / "docs"
BENCH = "ditile bench --model random-pixart --output latent --no-figures"
SETTINGS = (
    "F=1 W=4 R=0.12 taylor=1; F=0 W=4 R=1 MC=1 taylor=1 reach=0.5; F=1 W=3 R=1 MC=2 taylor=1; "
    "F=0 W=3 R=1 MC=2 taylor=1 reach=0.5; F=0 W=2 R=1 MC=4 taylor=1 reach=0.5"
)


class Section(NamedTuple):
    """A table of the page.

    Attributes:
        command: what measures it; it writes to what follows `--out`.
        file: its result, below the folder of results.
        table: of what the result holds.
    """

    command: str
    file: str
    table: Callable[[Any], Table]

    def words(self, results: Path) -> list[str]:
        """The command, for this Python."""
        first, *rest = shlex.split(self.command)
        program = [sys.executable, "-m", "ditile"] if first == "ditile" else [sys.executable]
        return [*program, *rest, "--out", str(results / Path(self.file).parts[0])]


SECTIONS: dict[str, Section] = {
    "fidelity": Section(
        "python -m ditile.bench.fidelity --captions 100 --ranks 2,4,8 --warmups 0,1,2,auto", "fidelity.json",
        fidelity.table,
    ),
    "speed": Section(f"{BENCH} --sweep methods", "speed/rows.jsonl", tables.table),
    "links": Section(f"{BENCH} --steps 8 --rounds 2 --sweep links", "links/rows.jsonl", tables.table),
    "cache-pixart": Section(
        f'python -m ditile.bench.cache_quality --model shapes-pixart --captions 100 --settings "{SETTINGS}"',
        "cache-pixart.jsonl", lambda rows: cache_quality.table(cache_quality.means(rows)),
    ),
    "cache-flux": Section(
        f'python -m ditile.bench.cache_quality --model shapes-flux --captions 100 --settings "{SETTINGS}"',
        "cache-flux.jsonl", lambda rows: cache_quality.table(cache_quality.means(rows)),
    ),
    "cache-overhead": Section("python -m ditile.bench.cache_overhead", "cache-overhead.json", cache_overhead.table),
    "cache-plans": Section(
        "python -m ditile.bench.cache_plans --model shapes-pixart --captions 8", "cache-plans.json", cache_plans.table
    ),
}  # fmt: skip


def markdown(table: Table) -> str:
    """A rich table as Markdown: numbers to the right, as it has them."""
    rules = ["--:" if column.justify == "right" else ":--" for column in table.columns]
    rows = zip(*([_cell(cell) for cell in column.cells] for column in table.columns), strict=True)
    lines = [[_cell(column.header) for column in table.columns], rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(path: Path) -> Any:
    """A result: JSON, or lines of it."""
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def filled(page: str, blocks: dict[str, str]) -> str:
    """The page with its places filled.

    Raises:
        ValueError: if it has no place for a block, or several.
    """
    for name, block in blocks.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if page.count(start) != 1 or page.count(end) != 1:
            raise ValueError(f"the page has no place for {name}, or several: {start} .. {end}")
        before, rest = page.split(start)
        page = f"{before}{start}\n{block}\n{end}{rest.split(end)[1]}"
    return page


def block_of(section: Section, results: Path) -> str:
    """The command and its table."""
    return f"\n    {section.command}\n\n{markdown(section.table(read(results / section.file)))}\n"


def measure(names: Sequence[str], results: Path) -> None:
    """Runs what measures them, one after the other.

    Raises:
        SystemExit: if one fails; what others measured is kept.
    """
    results.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(names):
        print(f"[{place + 1}/{len(names)}] {name}: {SECTIONS[name].command}", file=sys.stderr, flush=True)
        if code := subprocess.run(SECTIONS[name].words(results), check=False).returncode:
            raise SystemExit(f"error: {name} ended with exit code {code}; the others are kept in {results}")


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", default=",".join(SECTIONS), help="tables, with , between them")
    parser.add_argument("--again", action="store_true", help="measure what has a result, too")
    parser.add_argument("--no-measure", action="store_true", help="measure nothing")
    parser.add_argument("--page", type=Path, default=DOCS / "benchmarks.md")
    parser.add_argument("--results", type=Path, default=DOCS / "benchmarks")
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no table is called {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if not asked.page.is_file():
        parser.error(f"there is no page {str(asked.page)!r}; give --page FILE")
    if asked.again:
        for name in names:
            path = asked.results / Path(SECTIONS[name].file).parts[0]
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not asked.no_measure:
        measure([name for name in names if not (asked.results / SECTIONS[name].file).exists()], asked.results)
    known = {name: SECTIONS[name] for name in names if (asked.results / SECTIONS[name].file).exists()}
    blocks = {name: block_of(section, asked.results) for name, section in known.items()}
    asked.page.write_text(filled(asked.page.read_text("utf-8"), blocks), "utf-8")
    print(f"{asked.page}: {', '.join(blocks) or 'nothing'}")


if __name__ == "__main__":
    main()
