"""Seconds of cells before they run, by the planner (`ditile plan`): of the denoising loop, which is what it prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ditile import env
from ditile.answer import machine
from ditile.bench.cells import Cell
from ditile.bench.options import Comparison
from ditile.bench.subjects import Subject
from ditile.cost import Job
from ditile.errors import PlanError
from ditile.options import Ask
from ditile.planner import hardware
from ditile.planner.caches import expected
from ditile.planner.price import Left
from ditile.planner.profile import Profile
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


def predicted(subject: Subject, jobs: Mapping[Cell, Job | None], profile: Profile) -> dict[Cell, float]:
    """Seconds of each cell's loop. A cache that decides by what it measures cannot be foretold, and has none."""
    return {
        cell: _seconds(subject, cell, job, left, profile)
        for cell, job in jobs.items()
        if job is not None and (left := _left(cell, job)) is not None
    }


def _left(cell: Cell, job: Job) -> Left | None:
    """What a cell's cache leaves out; None if only a run can tell."""
    try:
        return expected(cell.configs["cache_config"], job.shape.steps)
    except PlanError:
        return None


def _seconds(subject: Subject, cell: Cell, job: Job, left: Left, profile: Profile) -> float:
    machines, host = (hardware.joined(profile, cell.link), HOST) if cell.link else (profile, None)
    pricer = pricer_of(subject.described, subject.numbers(cell), machines, host)
    return pricer.price(replace(job, shape=replace(job.shape, element_size=profile.element_size)), left).latency_s
