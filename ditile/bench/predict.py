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
from ditile.options import Ask
from ditile.planner import hardware
from ditile.planner.profile import Profile
from ditile.planner.search import pricer_of

HOSTS = 2
"""What a link joins."""


def profile_of(compared: Comparison) -> Profile | None:
    """The machine that is predicted for; None where none was named, and this one was never calibrated.

    Raises:
        PlanError, ModelError: if it is not known, or a file is no profile.
    """
    if compared.hardware is None and compared.profile is None and not env.profile().exists():
        return None
    return machine(Ask(hardware=compared.hardware, profile=compared.profile))


def predicted(subject: Subject, jobs: Mapping[Cell, Job | None], profile: Profile) -> dict[Cell, float]:
    """Seconds of each cell's loop. What a cache leaves out nobody knows before, so those of caches are left out."""
    return {
        cell: _seconds(subject, cell, job, profile) for cell, job in jobs.items() if job is not None and not cell.cache
    }


def _seconds(subject: Subject, cell: Cell, job: Job, profile: Profile) -> float:
    hosts = HOSTS if cell.link else 1
    machines = hardware.joined(profile, cell.link) if cell.link else profile
    pricer = pricer_of(subject.described, subject.numbers(cell), machines, hosts)
    return pricer.price(replace(job, shape=replace(job.shape, element_size=profile.element_size))).latency_s
