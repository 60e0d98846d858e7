"""Seconds and bytes of cells before they run, of the denoising loop, by the planner (`ditile plan`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ditile.cli.bench.cells import ONE_RANK, Cell
from ditile.cli.bench.options import Comparison
from ditile.cli.bench.runs import Foretold
from ditile.cli.bench.subjects import Subject
from ditile.distributed import env
from ditile.errors import PlanError
from ditile.plan.cost import Job
from ditile.planner import hardware
from ditile.planner.answer import machine
from ditile.planner.caches import expected
from ditile.planner.memory import needed
from ditile.planner.ops import Left
from ditile.planner.profile import Profile
from ditile.planner.question import Ask
from ditile.planner.search import pricer_of

HOST = 1
"""Ranks of a host where a link joins two."""


def profile_of(compared: Comparison) -> Profile | None:
    """The machine that is predicted for; None where none was named, and this one was never calibrated.

    Raises:
        PlanError, ModelError: if it is not known, or a file is no profile.
    """
    if compared.hardware is None and compared.profile is None and not env.profile().exists():
        return None
    return machine(Ask(hardware=compared.hardware, profile=compared.profile))


def predicted(subject: Subject, jobs: Mapping[Cell, Job | None], profile: Profile) -> dict[Cell, Foretold]:
    """What is known of cells before they run. A cache that decides by what it measures cannot be foretold."""
    return {
        cell: _foretold(
            subject, cell, replace(job, shape=replace(job.shape, element_size=profile.element_size)), profile
        )
        for cell, job in jobs.items()
        if job is not None
    }


def _foretold(subject: Subject, cell: Cell, job: Job, profile: Profile) -> Foretold:
    machines, host = (hardware.joined(profile, cell.link), HOST) if cell.link else (profile, None)
    pricer = pricer_of(subject.described, subject.numbers(cell), machines, host)
    left = _left(cell, job)
    seconds = None if left is None else pricer.price(job, left).latency_s
    if cell.cache or cell.plan == ONE_RANK:
        return Foretold(seconds, None)
    ranks = (needed(subject.described, job, profile, rank, pricer.words) for rank in range(job.plan.world))
    return Foretold(seconds, max(rank.denoising for rank in ranks))


def _left(cell: Cell, job: Job) -> Left | None:
    """What a cell's cache leaves out; None if only a run can tell."""
    try:
        return expected(cell.configs["cache_config"], job.shape.steps)
    except PlanError:
        return None
