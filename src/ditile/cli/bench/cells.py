"""A cell: one thing that is measured. A plan, perhaps a cache with it, a size, and the link between the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ditile.cache.line import NONE, configs_of
from ditile.errors import ModelError, PlanError
from ditile.plan.plan import Plan

ONE_RANK = ""
"""In place of a plan: the plain pipeline on one rank."""


class Cell(NamedTuple):
    """One thing that is measured.

    Attributes:
        plan: as `str(Plan)` writes it, or `ONE_RANK`.
        cache: a line of `steps.line`; "" is none.
        link: the rate between two hosts; "" is this machine.
        height, width: pixels; None is the model's own size.
    """

    plan: str
    cache: str = ""
    link: str = ""
    height: int | None = None
    width: int | None = None

    @property
    def world(self) -> int:
        """Ranks."""
        return self.parsed.world

    @property
    def parsed(self) -> Plan:
        """The plan."""
        return Plan() if self.plan == ONE_RANK else Plan.parse(self.plan)

    @property
    def configs(self) -> dict[str, Any]:
        """The keyword arguments of `enable_cache`; what there is to cache may be None."""
        return configs_of(self.cache or NONE)

    @property
    def pictures(self) -> int:
        """Pictures of a call: one for each replica."""
        return self.parsed.data

    @property
    def one_rank(self) -> Cell:
        """What this is compared with: the plain pipeline at the same size."""
        return Cell(ONE_RANK, "", "", self.height, self.width)

    @property
    def label(self) -> str:
        """Plan and cache, for people."""
        return (self.plan or "one rank") + (f" | {self.cache}" if self.cache else "")


def cells_of(lines: str) -> list[Cell]:
    """The cells of `pipefusion=2 patches=4; ulysses=2 | F=1 W=4 R=0.12`, each once.

    Raises:
        PlanError: if there is none, or a plan will not do.
        ModelError: if a cache will not do.
    """
    found = [_cell(line) for line in lines.split(";") if line.strip()]
    if not found:
        raise PlanError(f"plans={lines!r} names no plan; try 'pipefusion=2 patches=4; ulysses=2'")
    return list(dict.fromkeys(found))


def by_world(cells: Iterable[Cell]) -> Mapping[int, list[Cell]]:
    """Cells by the number of ranks that they need, most first."""
    found: dict[int, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.world, []).append(cell)
    return dict(sorted(found.items(), reverse=True))


def _cell(line: str) -> Cell:
    plan, bar, cache = line.partition("|")
    cache = " ".join(cache.split())
    if bar and not cache:
        raise ModelError(f"{line.strip()!r} has no cache behind its |; write it as F=1 W=4 R=0.12, or leave | out")
    cell = Cell(str(Plan.parse(plan)), "" if cache == NONE else cache)
    _ = cell.configs
    return cell
