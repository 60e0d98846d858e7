"""The figure of README's first screen: speed-ups of two processes, read from the tables of docs/benchmarks.md.

python -m benchmarks.overview docs/images/overview.png
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.palette import choose_plan_colour

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


class Bar(NamedTuple):
    """A bar of a panel: the plan (and the cache) as the table names it, and what the figure calls it."""

    plan: str
    label: str

    @property
    def colour(self) -> str:
        """That of the method."""
        return choose_plan_colour(self.plan.partition("|")[0])

    @property
    def hatch(self) -> str | None:
        """Whether it has a cache."""
        return "///" if "|" in self.plan else None


class Panel(NamedTuple):
    """A panel: its title, the table that it is read from, the link (none where the table has none), and its bars."""

    title: str
    table: str
    link: str | None
    bars: tuple[Bar, ...]


METHODS = (
    Bar("pipefusion=2 patches=4", "PipeFusion *"),
    Bar("distrifusion=2", "DistriFusion *"),
    Bar("ring=2", "ring"),
    Bar("ulysses=2", "Ulysses"),
    Bar("tensor=2", "tensor parallel"),
)
CACHE = "F=1 W=4 R=0.2 MC=4 taylor=1"
PANELS = (
    Panel(
        "One machine\nPixArt of 16 blocks, 512 px, 20 steps",
        "speed",
        None,
        (Bar("cfg=2", "CFG parallel"), *METHODS),
    ),
    Panel("Two hosts, 100 Mbit/s between them\nFLUX of 16 blocks, 512 px, 8 steps", "links-flux", "100mbit", METHODS),
    Panel(
        "With a cache (DBCache, TaylorSeer)\nshapes-flux, 256 px, 20 steps",
        "cache",
        None,
        (
            Bar(f"pipefusion=1 | {CACHE}", "cache, one process *"),
            Bar("pipefusion=2 patches=4", "PipeFusion *"),
            Bar(f"pipefusion=2 patches=4 | {CACHE}", "PipeFusion, cache *"),
            Bar("ulysses=2", "Ulysses"),
            Bar(f"ulysses=2 | {CACHE}", "Ulysses, cache *"),
        ),
    ),
)


def main() -> None:
    """Draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    draw_overview(PAGE.read_text("utf-8"), parser.parse_args().out)


def draw_overview(page: str, out: Path) -> None:
    """Draws the panels side by side; `page` is the text of docs/benchmarks.md."""
    figure, columns = plt.subplots(1, len(PANELS), figsize=(12.4, 3.1))
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for axes, panel in zip(columns, PANELS, strict=True):
        speedups = read_speedups(page, panel.table, panel.link)
        values = [speedups[bar.plan] for bar in panel.bars]
        for row, (bar, value) in enumerate(zip(panel.bars, values, strict=True)):
            axes.barh(row, value, height=0.66, color=bar.colour, hatch=bar.hatch, ec="w")
        for row, value in enumerate(values):
            axes.text(value + 0.05, row, f"{value:.2f}x", va="center", fontsize=9, bbox=paper)
        axes.axvline(1, color="#555555", lw=1, ls="--")
        axes.set_yticks(range(len(values)), [bar.label for bar in panel.bars], fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 3.5)
        axes.set_title(panel.title, fontsize=9.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.supxlabel(
        "speed-up over one process, two processes unless a bar says one, on two CPU cores",
        fontsize=9,
    )
    handles = [
        plt.Rectangle((0, 0), 1, 1, fc="#555555", ec="w"),
        plt.Rectangle((0, 0), 1, 1, fc="#555555", ec="w", hatch="///"),
        plt.Line2D([], [], color="#555555", lw=1, ls="--"),
        plt.Line2D([], [], color="#555555", marker="$*$", ls="none"),
    ]
    names = [
        "a plan, in the colour of its method",
        "with a cache",
        "one process",
        "close to its picture (the others are equal to it)",
    ]
    figure.legend(handles, names, loc="upper center", ncols=4, frameon=False, fontsize=9, bbox_to_anchor=(0.5, 1.08))
    figure.tight_layout()
    figure.savefig(out, dpi=110, bbox_inches="tight")
    plt.close(figure)


def read_speedups(page: str, table: str, link: str | None = None) -> dict[str, float]:
    """Plan -> median speed-up, from the marked table of that name, in the rows of that link."""
    rows = list(_iterate_rows(page, table))
    return {
        row["plan"].replace(r"\|", "|"): float(row["speed-up"].partition("x")[0])
        for row in rows
        if row["speed-up"] and row.get("link") == link
    }


def _iterate_rows(page: str, table: str) -> Iterator[dict[str, str]]:
    """The rows of a marked table, by the names of its columns."""
    text = page.partition(f"<!-- {table} -->")[2].partition(f"<!-- end of {table} -->")[0]
    # A cell may have a bar of its own, which is written \|.
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in line] for line in lines]
    yield from (dict(zip(header, cells, strict=True)) for cells in body)


if __name__ == "__main__":
    main()
