"""Sweeps: the plans that are measured side by side, for a number of ranks. Plans that do not fit are left out.

methods      every parallel method of the PipeFusion paper (arXiv 2405.14430, figures 5 to 7), on all ranks
scaling      four of them on 2, 4, 8, .. ranks (figure 8)
patches      PipeFusion without warmup over M (figure 12)
warmup       PipeFusion over W and the ways of warming up (table 2)
resolution   the methods over sizes (figures 5 to 7, across)
cache        one rank and two methods, with some caches
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ditile.plan.errors import DitileError
from ditile.plan.plan import Plan
from ditile_lab.bench.cells import BenchCell

Fits = Callable[[Plan], bool]
"""Tells whether a plan fits the model and its size."""

PATCHES = (1, 2, 4, 8, 16, 32)
WARMUPS = (0, 1, 2, 4)
WARMUP_MODES = ("serial", "pipelined", "sequence")
CACHES = ("F=1 W=4 R=0.12", "F=1 W=4 R=0.2 MC=4 taylor=1", "F=1 mask=fast policy=static taylor=1")


def list_sweep_plans(sweep: str, ranks: int, fits: Fits) -> list[Plan]:
    """List the plans of a sweep.

    Args:
        sweep: one of `options.SWEEPS`.
        ranks: ranks of each plan; for `scaling`, the largest number.
        fits: whether a plan fits; it chooses the number of patches.
    """
    if sweep == "methods":
        return list_method_plans(ranks, fits)
    if sweep == "scaling":
        plans = []
        count = 2
        while count <= ranks:
            plans += list_representative_plans(count, fits)
            count *= 2
        return plans
    if sweep == "patches":
        return [Plan(pipefusion=ranks, patches=patches, warmup=0) for patches in PATCHES]
    if sweep == "warmup":
        return list_warmup_plans(ranks, fits)
    if sweep == "cache":
        return [Plan(), choose_pipefusion_plan(ranks, fits), Plan(ulysses=ranks)]
    return list_representative_plans(ranks, fits)


def list_sweep_cells(
    sweep: str, ranks: int, sizes: Sequence[tuple[int | None, int | None]], fits: Fits
) -> list[BenchCell]:
    """List the cells of a sweep: plans that fit at each (height, width), with each cache if caches are compared."""
    caches = [""]
    if sweep == "cache":
        caches += CACHES
    plans = [plan for plan in list_sweep_plans(sweep, ranks, fits) if fits(plan)]
    cells = []
    for height, width in sizes:
        for plan in plans:
            for cache in caches:
                # One rank without a cache is the plain pipeline, which every sweep measures.
                if cache or plan != Plan():
                    cells.append(BenchCell(str(plan), cache, height, width))
    return list(dict.fromkeys(cells))


def list_method_plans(ranks: int, fits: Fits) -> list[Plan]:
    """List every method by itself, and the hybrids that need four ranks or more."""
    patches = choose_pipefusion_plan(ranks, fits).patches
    plans = [
        Plan(pipefusion=ranks, patches=patches),
        Plan(pipefusion=ranks, patches=patches, warmup_mode="pipelined"),
        Plan(distrifusion=ranks),
        Plan(ulysses=ranks),
        # It hides a part of the exchange, so it counts as a method of its own.
        Plan(ulysses=ranks, async_ulysses=True),
        Plan(ring=ranks),
        Plan(tensor=ranks),
        Plan(tensor=ranks, split_scheme="sequence"),
        Plan(data=ranks),
    ]
    if ranks % 2 == 0:
        half = ranks // 2
        # Guidance has two branches, so a plan with only cfg has two ranks.
        plans.append(Plan(cfg=2, ulysses=half))
        if ranks >= 4:
            patches = choose_pipefusion_plan(half, fits).patches
            plans += [
                Plan(ring=half, ulysses=2),
                Plan(ring=2, ulysses=half),
                Plan(pipefusion=half, patches=patches, ulysses=2),
                Plan(cfg=2, pipefusion=half, patches=patches),
            ]
    return list(dict.fromkeys(plans))


def list_representative_plans(ranks: int, fits: Fits) -> list[Plan]:
    """List one plan for each kind of method."""
    plans = [choose_pipefusion_plan(ranks, fits), Plan(distrifusion=ranks)]
    # Ulysses needs as many heads as ranks; ring has no such limit.
    if fits(Plan(ulysses=ranks)):
        plans.append(Plan(ulysses=ranks))
    return [*plans, Plan(ring=ranks), Plan(tensor=ranks)]


def list_warmup_plans(ranks: int, fits: Fits) -> list[Plan]:
    """List PipeFusion with each W and warmup mode; without warmup the modes are the same."""
    patches = choose_pipefusion_plan(ranks, fits).patches
    plans = []
    for mode in WARMUP_MODES:
        for warmup in WARMUPS:
            if warmup or mode == "serial":
                plans.append(Plan(pipefusion=ranks, patches=patches, warmup=warmup, warmup_mode=mode))  # type: ignore[arg-type]
    if ranks % 2 == 0 and ranks >= 4:
        plans += [Plan(cfg=2, pipefusion=ranks // 2, patches=patches, warmup=warmup) for warmup in WARMUPS]
    return plans


def choose_pipefusion_plan(ranks: int, fits: Fits) -> Plan:
    """Choose PipeFusion with twice as many patches as stages, or the most that fit."""
    for patches in range(2 * ranks, 0, -1):
        plan = Plan(pipefusion=ranks, patches=patches)
        if fits(plan):
            return plan
    # No plan fits, and the refusal of this one explains why.
    return Plan(pipefusion=ranks, patches=ranks)


def make_fit_check(check: Callable[[Plan], object]) -> Fits:
    """Make a `Fits` from a check that raises `DitileError` for an unfit plan."""
    known = {}

    def check_fits(plan: Plan) -> bool:
        if plan not in known:
            try:
                check(plan)
                known[plan] = True
            except DitileError:
                known[plan] = False
        return known[plan]

    return check_fits
