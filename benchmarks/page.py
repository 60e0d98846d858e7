"""Makes docs/benchmarks.md, and a table of docs/pipefusion.md, by one command.

It measures what has no result yet, and puts every table in its place.

    python -m benchmarks.page                          # hours; what benchmarks/data has is kept
    python -m benchmarks.page --only cache-overhead    # some of them; --again takes them anew
    python -m benchmarks.page --no-measure             # only the tables of the results that there are

A table has its place between `<!-- NAME -->` and `<!-- end of NAME -->`, with the command that measured it above; what
is written around it stays. A place whose result is missing stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks import (
    cache_overhead,
    cache_plans,
    cache_quality,
    few_steps,
    fidelity,
    overhead,
    predictions,
    sweep_figures,
    video_patches,
)
from ditile.distributed import files
from ditile_lab.bench import tables

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = "benchmarks/data/"
BIG = "ditile bench --model random-pixart --output latent"
SMALL = "ditile bench --model shapes-flux --height 256 --width 256 --output latent"
FIDELITY = "python -m benchmarks.fidelity --captions 100 --ranks 2,4,8 --warmups"
SETTINGS = (
    "F=1 W=4 R=0.12 taylor=1; F=0 W=4 R=1 MC=1 taylor=1 reach=0.5; F=1 W=3 R=1 MC=2 taylor=1; "
    "F=0 W=3 R=1 MC=2 taylor=1 reach=0.5; F=0 W=2 R=1 MC=4 taylor=1 reach=0.5; F=1 W=2 R=1 MC=6 taylor=1; "
    "F=0 W=2 R=1 MC=6 taylor=1 reach=0.5"
)


class Section(NamedTuple):
    """A table of the page, and its figures.

    Attributes:
        commands: the commands that measure it; `--out` is added to the first unless it names its files itself.
        files: the results that the table shows, below the folder of results.
        table: makes the table of their rows, those of one file after those of the other.
        figures: file of a figure that the commands draw -> what it shows.
        page: where it has its place.
    """

    commands: tuple[str, ...]
    files: tuple[str, ...]
    table: Callable[[Any], Table]
    figures: Mapping[str, str] = MappingProxyType({})
    page: str = "benchmarks.md"

    @property
    def names_its_files(self) -> bool:
        """Whether the first command says where it writes."""
        return RESULTS in self.commands[0]

    def list_command_words(self, results: Path) -> list[list[str]]:
        """The commands, for this Python."""
        commands = []
        for command in self.commands:
            first, *rest = shlex.split(command.replace(RESULTS, f"{results}/"))
            program = [sys.executable]
            if first == "ditile":
                program += ["-m", "ditile"]
            commands.append([*program, *rest])
        if not self.names_its_files:
            commands[0] += ["--out", str(results / Path(self.files[0]).parts[0])]
        return commands

    def is_there(self, results: Path) -> bool:
        """Whether it was measured."""
        return all((results / name).exists() for name in (*self.files, *self.figures))

    def remove_results(self, results: Path) -> None:
        """Removes what its commands write."""
        names = [Path(self.files[0]).parts[0]]
        if self.names_its_files:
            names = list(self.figures)
        for name in names:
            path = results / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def render_block(self, results: Path) -> str:
        """The commands, the table, and the figures."""
        rows = read_result_file(results / self.files[0])
        for name in self.files[1:]:
            rows = [*rows, *read_result_file(results / name)]
        commands = "\n".join(f"    {command}" for command in self.commands)
        parts = [commands, markdown(self.table(rows))]
        for name, description in self.figures.items():
            parts.append(f"![{description}]({os.path.relpath(results / name, DOCS)})")
        return "\n" + "\n\n".join(parts) + "\n"


def make_bench_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of `ditile bench` in one table, in their order."""
    columns = tables.list_bench_columns(rows)
    table = Table()
    for name in columns:
        justify: Any = "left" if name in ("link", "plan") else "right"
        table.add_column(name, justify=justify)
    for texts in zip(*columns.values(), strict=True):
        table.add_row(*texts)
    return table


def _make_sweep_section(name: str, command: str, sweep: str, **figures: str) -> dict[str, Section]:
    """A section of `ditile bench --sweep`, with its figures by name; curves are drawn by a command of their own."""
    commands = [f"{command} --sweep {sweep}"]
    if sweep in sweep_figures.FIGURES:
        commands.append(f"python -m benchmarks.sweep_figures {RESULTS}{name} --sweep {sweep}")
    shown = {f"{name}/{figure.replace('_', '-')}.png": alt for figure, alt in figures.items()}
    return {name: Section(tuple(commands), (f"{name}/rows.jsonl",), make_bench_table, shown)}


def _make_links_section(name: str, model: str, description: str) -> dict[str, Section]:
    command = f"python -m benchmarks.links --model {model} --steps 8 --rounds 2"
    return {name: Section((command,), (f"{name}/rows.jsonl",), make_bench_table, {f"{name}/links.png": description})}


def _make_quality_section(model: str) -> Section:
    command = f'python -m benchmarks.cache_quality --model {model} --captions 100 --settings "{SETTINGS}"'
    file = f"cache-{model.removeprefix('shapes-')}.jsonl"
    return Section((command,), (file,), make_quality_table)


def make_quality_table(rows: Any) -> Table:
    """The table of `benchmarks.cache_quality`, of means over captions."""
    return cache_quality.make_cache_quality_table(cache_quality.average_image_rows(rows))


def make_speeds_table(rows: Any) -> Table:
    """The quality of the same settings at given speeds."""
    return cache_quality.at_speeds(cache_quality.average_image_rows(rows))


def _make_plans_section(model: str) -> Section:
    command = f"python -m benchmarks.cache_plans --model {model} --captions 8"
    file = f"cache-plans-{model.removeprefix('shapes-')}.json"
    return Section((command,), (file,), cache_plans.make_cache_plans_table)


SECTIONS: dict[str, Section] = {
    "fidelity": Section((f"{FIDELITY} 1",), ("fidelity.json",), fidelity.make_fidelity_table),
    "fidelity-warmups": Section((f"{FIDELITY} 0,2,3",), ("fidelity-warmups.json", "fidelity.json"), fidelity.by_warmup),
    "fidelity-video": Section(
        ("python -m benchmarks.fidelity --models shapes-wan --captions 20 --ranks 2,4 --warmups 1",),
        ("fidelity-video.json",),
        fidelity.make_fidelity_table,
    ),
    "video-patches": Section(
        ("python -m benchmarks.video_patches --captions 20 --patches 2,4",),
        ("video-patches.json",),
        video_patches.make_cuts_table,
    ),
    **_make_sweep_section(
        "speed",
        BIG,
        "methods",
        methods_latency="seconds of each method",
        methods_memory="peak memory of each method",
        methods_exposed="time that each method waits for messages",
    ),
    **_make_links_section("links", "random-pixart", "speed-up over the bandwidth of a link"),
    **_make_links_section("links-flux", "random-flux", "speed-up over the bandwidth of a link, without guidance"),
    **_make_sweep_section("warmup", SMALL, "warmup"),
    **_make_sweep_section("patches", SMALL, "patches", patches="seconds over the number of patches"),
    **_make_sweep_section("resolution", f"{SMALL} --sizes 128,192,256", "resolution", resolution="seconds over pixels"),
    **_make_sweep_section("scaling", SMALL, "scaling", scalability="speed-up over ranks"),
    **_make_sweep_section("cache", SMALL, "cache", cache_latency="seconds with and without caches"),
    "predictions": Section(
        ("python -m benchmarks.predictions",), ("predictions.json",), predictions.make_predictions_table
    ),
    "overhead": Section(("python -m benchmarks.overhead",), ("overhead.json",), overhead.make_outside_blocks_table),
    "cache-pixart": _make_quality_section("shapes-pixart"),
    "cache-flux": _make_quality_section("shapes-flux"),
    "cache-speeds": Section(
        (
            f"python -m benchmarks.plots pareto {RESULTS}cache-pixart.jsonl {RESULTS}cache-flux.jsonl "
            f"{RESULTS}cache-quality.png",
        ),
        ("cache-pixart.jsonl", "cache-flux.jsonl"),
        make_speeds_table,
        {"cache-quality.png": "PSNR over speed-up"},
    ),
    "cache-overhead": Section(
        ("python -m benchmarks.cache_overhead",), ("cache-overhead.json",), cache_overhead.make_cache_overhead_table
    ),
    "cache-plans-pixart": _make_plans_section("shapes-pixart"),
    "cache-plans-flux": _make_plans_section("shapes-flux"),
    "few-steps": Section(
        ("python -m benchmarks.few_steps",),
        ("few-steps/rows.jsonl",),
        few_steps.make_few_steps_table,
        page="pipefusion.md",
    ),
}


def markdown(table: Table) -> str:
    """A rich table as Markdown: numbers to the right, as it has them."""
    rules = ["--:" if column.justify == "right" else ":--" for column in table.columns]
    rows = zip(*([_format_markdown_cell(cell) for cell in column.cells] for column in table.columns), strict=True)
    lines = [[_format_markdown_cell(column.header) for column in table.columns], rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_result_file(path: Path) -> Any:
    """A result: JSON, or lines of it."""
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def fill_page_blocks(page: str, blocks: dict[str, str]) -> str:
    """The page with its places filled.

    Raises:
        ValueError: if it has no place for a block, or several.
    """
    for name, block in blocks.items():
        start = f"<!-- {name} -->"
        end = f"<!-- end of {name} -->"
        if page.count(start) != 1 or page.count(end) != 1:
            raise ValueError(f"the page has no place for {name}, or several: {start} .. {end}")
        before, rest = page.split(start)
        page = f"{before}{start}\n{block}\n{end}{rest.split(end)[1]}"
    return page


def measure(names: Sequence[str], results: Path) -> None:
    """Runs the commands of sections, one after the other.

    Raises:
        SystemExit: if one fails; what others measured is kept.
    """
    results.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(names):
        for words, command in zip(SECTIONS[name].list_command_words(results), SECTIONS[name].commands, strict=True):
            print(f"[{place + 1}/{len(names)}] {name}: {command}", file=sys.stderr, flush=True)
            code = subprocess.run(words, check=False).returncode
            if code:
                raise SystemExit(f"error: {name} ended with exit code {code}; the others are kept in {results}")


def _format_markdown_cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", default=",".join(SECTIONS), help="tables, with , between them")
    parser.add_argument("--again", action="store_true", help="measure what has a result, too")
    parser.add_argument("--no-measure", action="store_true", help="measure nothing")
    parser.add_argument("--page", type=Path, help="instead of the pages in docs that have the places")
    parser.add_argument("--results", type=Path, default=Path(RESULTS))
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no table is called {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if asked.page is not None and not asked.page.is_file():
        parser.error(f"there is no page {str(asked.page)!r}; give --page FILE")
    for name in names if asked.again else ():
        SECTIONS[name].remove_results(asked.results)
    if not asked.no_measure:
        measure([name for name in names if not SECTIONS[name].is_there(asked.results)], asked.results)
    known = {name: SECTIONS[name] for name in names if SECTIONS[name].is_there(asked.results)}
    for path in dict.fromkeys(asked.page or DOCS / SECTIONS[name].page for name in names):
        blocks = {
            name: section.render_block(asked.results)
            for name, section in known.items()
            if path in (asked.page, DOCS / section.page)
        }
        files.write_atomically(path, fill_page_blocks(path.read_text("utf-8"), blocks))
        print(f"{path}: {', '.join(blocks) or 'nothing'}")


if __name__ == "__main__":
    main()
