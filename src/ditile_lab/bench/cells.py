"""A cell: one measured combination of a plan, a cache (or none) and a size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ditile.cache.config_text import NO_CACHE, parse_cache_line
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan

ONE_RANK = ""
"""Stands in place of a plan for the plain pipeline on one rank."""


class BenchCell(NamedTuple):
    """One measured combination.

    Attributes:
        plan: in the form of `str(Plan)`, or `ONE_RANK`.
        cache: a line for `parse_cache_line`; "" is no cache.
        height, width: pixels; None is the model's own size.
    """

    plan: str
    cache: str = ""
    height: int | None = None
    width: int | None = None

    @property
    def plan_object(self) -> Plan:
        """Return the plan."""
        if self.plan == ONE_RANK:
            return Plan()
        return Plan.parse(self.plan)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.plan_object.world

    @property
    def num_images(self) -> int:
        """Return the number of images in a call: one for each replica."""
        return self.plan_object.data

    @property
    def cache_configs(self) -> dict[str, Any]:
        """Return the keyword arguments of `enable_cache`; without a cache, its cache_config is None."""
        return parse_cache_line(self.cache or NO_CACHE)

    @property
    def one_rank_baseline(self) -> BenchCell:
        """Return the cell for comparison: the plain pipeline at the same size."""
        return BenchCell(ONE_RANK, "", self.height, self.width)

    @property
    def display_label(self) -> str:
        """Return plan and cache as text for people."""
        label = self.plan or "one rank"
        if self.cache:
            label += f" | {self.cache}"
        return label


def parse_cells(lines: str) -> list[BenchCell]:
    """Parse the cells of `pipefusion=2 patches=4; ulysses=2 | F=1 W=4 R=0.12`, each once.

    Raises:
        PlanError: if there is no plan, or one cannot be read.
        ModelError: if a cache cannot be read.
    """
    cells = [_parse_cell(line) for line in lines.split(";") if line.strip()]
    if not cells:
        raise PlanError(f"plans={lines!r} names no plan; try 'pipefusion=2 patches=4; ulysses=2'")
    # A plan that is named twice would be measured twice.
    return list(dict.fromkeys(cells))


def _parse_cell(line: str) -> BenchCell:
    plan, bar, cache = line.partition("|")
    cache = " ".join(cache.split())
    if bar and not cache:
        raise ModelError(f"{line.strip()!r} has no cache after its |; write it as F=1 W=4 R=0.12, or leave | out")
    if cache == NO_CACHE:
        cache = ""
    # Both raise here, before anything is measured.
    parse_cache_line(cache or NO_CACHE)
    return BenchCell(str(Plan.parse(plan)), cache)


def group_cells_by_world(cells: Iterable[BenchCell]) -> Mapping[int, list[BenchCell]]:
    """Group cells by the number of ranks that they need, most first."""
    cells_by_world: dict[int, list[BenchCell]] = {}
    for cell in cells:
        cells_by_world.setdefault(cell.num_ranks, []).append(cell)
    # Plans of many ranks are the likeliest to fail, and then they fail at once.
    return dict(sorted(cells_by_world.items(), reverse=True))
