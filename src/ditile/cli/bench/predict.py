"""Seconds and bytes of cells before they run, of the denoising loop, by the planner (`ditile plan`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ditile.cli.bench.cells import ONE_RANK, BenchCell
from ditile.cli.bench.options import Comparison
from ditile.cli.bench.runs import Prediction
from ditile.cli.bench.subjects import BenchSubject
from ditile.distributed import env
from ditile.errors import PlanError
from ditile.plan.cost import PlannedCall
from ditile.planner import hardware
from ditile.planner.answer import load_machine_profile
from ditile.planner.memory import count_rank_memory
from ditile.planner.ops import CacheSkips
from ditile.planner.profile import Profile
from ditile.planner.question import PlanQuestion
from ditile.planner.search import make_pricer, predict_skipped_steps

HOST = 1
"""Ranks of a host where a link joins two."""


def load_prediction_profile(compared: Comparison) -> Profile | None:
    """The machine that is predicted for; None where none was named, and this one was never calibrated.

    Raises:
        PlanError, ModelError: if it is not known, or a file is no profile.
    """
    if compared.hardware is None and compared.profile is None and not env.find_profile_path().exists():
        return None
    return load_machine_profile(PlanQuestion(hardware=compared.hardware, profile=compared.profile))


def predict_cells(
    subject: BenchSubject, jobs: Mapping[BenchCell, PlannedCall | None], profile: Profile
) -> dict[BenchCell, Prediction]:
    """What is known of cells before they run. A cache that decides by what it measures cannot be foretold."""
    return {
        cell: _predict_cell(
            subject, cell, replace(job, shape=replace(job.shape, element_size=profile.element_size)), profile
        )
        for cell, job in jobs.items()
        if job is not None
    }


def _predict_cell(subject: BenchSubject, cell: BenchCell, job: PlannedCall, profile: Profile) -> Prediction:
    machines, host = (hardware.add_interlink(profile, cell.link), HOST) if cell.link else (profile, None)
    pricer = make_pricer(subject.planner_subject, subject.make_planning_arguments(cell), machines, host)
    left = _predict_cache_skips(cell, job)
    seconds = None if left is None else pricer.price_call(job, left).latency_s
    if cell.cache or cell.plan == ONE_RANK:
        return Prediction(seconds, None)
    ranks = (
        count_rank_memory(subject.planner_subject, job, profile, rank, pricer.text_tokens)
        for rank in range(job.plan.world)
    )
    return Prediction(seconds, max(rank.denoising_peak for rank in ranks))


def _predict_cache_skips(cell: BenchCell, job: PlannedCall) -> CacheSkips | None:
    """What a cell's cache leaves out; None if only a run can tell."""
    try:
        return predict_skipped_steps(cell.cache_configs["cache_config"], job.shape.steps)
    except PlanError:
        return None
