"""Sweeps: the plans that are measured side by side, for a number of ranks. Plans that do not fit are left out.

methods      every parallel method of the paper (figures 5 to 7), on all ranks
scaling      four of them on 2, 4, 8, .. ranks (figure 8)
patches      PipeFusion without warmup over M (figure 12)
warmup       PipeFusion over W and the ways of warming up (table 2)
resolution   the methods over sizes (figures 5 to 7, across)
links        the methods over the bandwidth between two hosts
cache        one rank and two methods, with some caches

few-steps, which compares pictures, is in `few_steps.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ditile.measure.bench.cells import BenchCell
from ditile.plan.errors import DitileError
from ditile.plan.plan import Plan

Fits = Callable[[Plan], bool]
"""Whether a plan fits the model and its size."""

PATCHES = (1, 2, 4, 8, 16, 32)
WARMUPS = (0, 1, 2, 4)
CACHES = ("F=1 W=4 R=0.12", "F=1 W=4 R=0.2 MC=4 taylor=1", "F=1 mask=fast policy=static taylor=1")


def list_sweep_plans(sweep: str, ranks: int, fits: Fits) -> list[Plan]:
    """The plans of a sweep.

    Args:
        sweep: one of `options.SWEEPS`.
        ranks: ranks of each plan; for `scaling`, the largest number.
        fits: whether a plan fits; it chooses the number of patches.
    """
    if sweep == "methods":
        return list_method_plans(ranks, fits)
    if sweep == "scaling":
        return [
            plan
            for n in (2**k for k in range(1, ranks.bit_length()))
            if n <= ranks
            for plan in list_representative_plans(n, fits)
        ]
    if sweep == "patches":
        return [Plan(pipefusion=ranks, patches=m, warmup=0) for m in PATCHES]
    if sweep == "warmup":
        return list_warmup_plans(ranks, fits)
    if sweep == "cache":
        return [Plan(), choose_pipefusion_plan(ranks, fits), Plan(ulysses=ranks)]
    return list_link_plans(ranks, fits) if sweep == "links" else list_representative_plans(ranks, fits)


def list_sweep_cells(
    sweep: str, ranks: int, sizes: Sequence[tuple[int | None, int | None]], fits: Fits
) -> list[BenchCell]:
    """The cells of a sweep, without links: plans at each size, with each cache if caches are compared."""
    caches = ("", *CACHES) if sweep == "cache" else ("",)
    sweep_cells = [
        BenchCell(str(plan), cache, "", height, width)
        for height, width in sizes
        for plan in list_sweep_plans(sweep, ranks, fits)
        for cache in caches
        if fits(plan) and (cache or plan != Plan())
    ]
    return list(dict.fromkeys(sweep_cells))


def list_method_plans(n: int, fits: Fits) -> list[Plan]:
    """Every method by itself, and the hybrids that need four ranks or more."""
    patches = choose_pipefusion_plan(n, fits).patches
    method_plans = [
        Plan(pipefusion=n, patches=patches),
        Plan(pipefusion=n, patches=patches, warmup_mode="pipelined"),
        Plan(distrifusion=n),
        Plan(ulysses=n),
        Plan(ulysses=n, async_ulysses=True),
        Plan(ring=n),
        Plan(tensor=n),
        Plan(tensor=n, split_scheme="sequence"),
        Plan(data=n),
    ]
    if n % 2 == 0:
        half = n // 2
        method_plans.append(Plan(cfg=2) if half == 1 else Plan(cfg=2, ulysses=half))
    if n % 2 == 0 and n >= 4:
        cut = choose_pipefusion_plan(half, fits).patches
        method_plans += [
            Plan(ring=half, ulysses=2),
            Plan(ring=2, ulysses=half),
            Plan(pipefusion=half, patches=cut, ulysses=2),
            Plan(cfg=2, pipefusion=half, patches=cut),
        ]
    return list(dict.fromkeys(method_plans))


def list_representative_plans(n: int, fits: Fits) -> list[Plan]:
    """One plan for each kind of method."""
    sequence = Plan(ulysses=n) if fits(Plan(ulysses=n)) else Plan(ring=n)
    return list(
        dict.fromkeys([choose_pipefusion_plan(n, fits), Plan(distrifusion=n), sequence, Plan(ring=n), Plan(tensor=n)])
    )


def list_link_plans(n: int, fits: Fits) -> list[Plan]:
    """The plans of `list_representative_plans`, PipeFusion with a pipelined warmup, and for two ranks cfg."""
    first, *others = list_representative_plans(n, fits)
    return [first, dataclasses.replace(first, warmup_mode="pipelined"), *others, *[Plan(cfg=2)] * (n == 2)]


def list_warmup_plans(n: int, fits: Fits) -> list[Plan]:
    """PipeFusion with each W and warmup mode; without warmup the modes are the same."""
    patches = choose_pipefusion_plan(n, fits).patches
    warmup_plans = [Plan(pipefusion=n, patches=patches, warmup=w) for w in WARMUPS]
    for mode in ("pipelined", "sequence", "separate"):
        warmup_plans += [Plan(pipefusion=n, patches=patches, warmup=w, warmup_mode=mode) for w in WARMUPS if w]
    if n % 2 == 0 and n >= 4:
        warmup_plans += [Plan(cfg=2, pipefusion=n // 2, patches=patches, warmup=w) for w in WARMUPS]
    return warmup_plans


def choose_pipefusion_plan(n: int, fits: Fits) -> Plan:
    """PipeFusion with twice as many patches as stages, or as many as there can be."""
    tried = [Plan(pipefusion=n, patches=m) for m in range(2 * n, 0, -1)]
    return next((plan for plan in tried if fits(plan)), tried[n])


def make_fit_check(check: Callable[[Plan], object]) -> Fits:
    """Makes a `Fits` of a function that raises a `DitileError` for a plan that does not fit."""
    known: dict[Plan, bool] = {}

    def check_fits(plan: Plan) -> bool:
        if plan not in known:
            try:
                check(plan)
                known[plan] = True
            except DitileError:
                known[plan] = False
        return known[plan]

    return check_fits
