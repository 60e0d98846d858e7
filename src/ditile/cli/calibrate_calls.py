"""Calls of the bundled models that `ditile calibrate` makes: what they cost besides what is on a machine's curves.

One rank makes some of its own, and all ranks share others, in turn with one rank. Each is made again where somebody
else slowed the cores.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditile.distributed import env
from ditile.distributed.mesh import Communicators
from ditile.plan.plan import Plan
from ditile.planner import fit
from ditile.planner.disturbance import DisturbanceGuard
from ditile.planner.profile import Link, Profile
from ditile.planner.search import make_pricer
from ditile.planner.subject import PlanSubject
from ditile.runner.load import find_model_source, load, read_generation_options
from ditile.runner.runner import Runner, parallelize

CALLS = (("shapes-pixart", 128), ("shapes-pixart", 256), ("shapes-flux", 128), ("shapes-flux", 256))
PATCHES, STEPS = (1, 4), 3
ROUNDS, RUNS = 2, 3
"""How often a call is made by one rank, and by all at once."""
STAGED = ("shapes-pixart", 256, 2, 6)
"""Model, size, steps and turns of what goes through stages: all of them compute most of the time."""
SHARED = (("shapes-flux", 128, 3, 4), ("shapes-flux", 192, 3, 4))
"""The same of what ranks share out: few bytes to exchange, and many."""
KERNEL = 1e-6
FREE = 1e9


def count_single_rank_steps() -> int:
    """Steps of the calls that one rank makes."""
    return len(CALLS) * len(PATCHES) * ROUNDS * STEPS


def fit_bundled_calls(profile: Profile, dtype: str, again: DisturbanceGuard) -> Profile:
    """The profile with what calls of the bundled models cost besides what is on its curves.

    They are made in turn, so that a machine that grows slower does so for all of them.
    """
    runners: dict[tuple[str, int], Any] = {}
    for model, patches in itertools.product(dict.fromkeys(model for model, _ in CALLS), PATCHES):
        pipe: Any = load(model, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        runners[model, patches] = parallelize(pipe, Plan(patches=patches))
    every = [(model, size, patches) for model, size in CALLS for patches in PATCHES]
    calls = [
        functools.partial(_time_denoising_loop, runners[of, patches], _make_call_arguments(of, size))
        for of, size, patches in every
    ]
    rounds = [[again.measure_undisturbed(call) for call in calls] for _ in range(ROUNDS)]
    terms = []
    for (model, size, patches), times in zip(every, zip(*rounds, strict=True), strict=True):
        inside = statistics.median(loop.inside for loop in times)
        terms.append(
            (inside, *_separate_kernels(model, _make_call_arguments(model, size), Plan(patches=patches), profile))
        )
    outside = statistics.median(loop.outside / loop.calls for times in rounds for loop in times)
    return dataclasses.replace(fit.fit_kernel_costs(profile, terms), micro_s=outside)


class CalibrationJob(NamedTuple):
    """A call of a bundled model, and the plans of all ranks under which it is made, in so many turns."""

    model: str
    size: int
    steps: int
    turns: int
    plans: tuple[Plan, ...] = ()

    @property
    def call_arguments(self) -> dict[str, Any]:
        """What the pipeline is called with."""
        return _make_call_arguments(self.model, self.size, self.steps)

    def predict_job_latency(self, plan: Plan, profile: Profile) -> float:
        """What is predicted."""
        return _predict_call_latency(self.model, self.call_arguments, plan, profile)


def list_shared_jobs(ranks: int) -> list[CalibrationJob]:
    """Calls that say how fast stages compute which hand over to each other, and what an exchange takes.

    Stages wait for the slower of two at every patch, and messages take caches and time of what computes.
    """
    exchanging = (Plan(ulysses=ranks), Plan(tensor=ranks))
    wanted: list[tuple[CalibrationJob, tuple[Plan, ...]]] = [
        (CalibrationJob(*STAGED), (Plan(pipefusion=ranks, patches=2 * ranks, warmup=0),))
    ]
    wanted += [(CalibrationJob(*shared), exchanging) for shared in SHARED]
    jobs = []
    for job, plans in wanted:
        subject = _load_subject(job.model)
        facts = subject.make_call_shape(job.call_arguments).collect_facts(job.model, len(subject.block_hooks.chain))
        jobs.append(job._replace(plans=tuple(plan for plan in plans if not plan.illegal(facts))))
    return jobs


def time_shared_call(dtype: str, job: CalibrationJob, again: DisturbanceGuard) -> list[float]:
    """How long the denoising loop takes under each plan, as a share of what it takes one rank.

    Made in turn with one rank, which is the first replica of one image: a machine that grows slower does so for all.
    """
    groups, runners = Communicators(), []
    world = dist.get_world_size()
    of_hosts = (dataclasses.replace(plan, data=world // plan.world) for plan in job.plans)  # the first host's draws
    for plan in (Plan(data=world), *of_hosts):
        pipe: Any = load(job.model, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        runners.append(parallelize(pipe, plan, groups=groups))
    shares = list[list[float]]()

    def time_denoising(runner: Runner) -> float:
        generator = torch.Generator().manual_seed(0)
        runner("a red circle", output_type="latent", generator=generator, **job.call_arguments)
        assert runner.report is not None
        return float(runner.report.seconds["denoise"])

    for run in range(1 + job.turns):
        took = []
        for runner in runners:
            took.append(
                again.measure_undisturbed(functools.partial(time_denoising, runner)) if run else time_denoising(runner)
            )
            env.report_progress()
        shares += [[seconds / took[0] for seconds in took[1:]]] if run else []
    return [statistics.median(of_plan) for of_plan in zip(*shares, strict=True)]


def fit_joint_slowdown(job: CalibrationJob, plan: Plan, profile: Profile, took: float) -> Profile:
    """The profile in which all compute so much slower together that a call takes what it took."""
    alone, twice = (
        job.predict_job_latency(plan, dataclasses.replace(profile, together=slower)) for slower in (1.0, 2.0)
    )
    return dataclasses.replace(profile, together=max(1.0, 1 + (took - alone) / (twice - alone)))


def separate_exchanges(job: CalibrationJob, plan: Plan, profile: Profile, took: float) -> fit.SharedCall:
    """What is known of a shared call but for its exchanges, and these."""

    def predict_with_link(link: Link, start: float) -> float:
        link = dataclasses.replace(link, call_s=start, sum_s=start)
        return job.predict_job_latency(plan, dataclasses.replace(profile, link=link))

    known = predict_with_link(dataclasses.replace(profile.link, collective=FREE, reduce=FREE), 0.0)
    sent, begun = (predict_with_link(profile.link, start) for start in (0.0, KERNEL))
    return fit.SharedCall(took, known, sent - known, (begun - sent) / KERNEL)


def measure_joint_slowdown(dtype: str, device: torch.device) -> float:
    """How many times as long a call takes while all ranks make it, on rank 0; where no shared calls say it."""
    model, size = CALLS[1]
    pipe: Any = load(model, dtype=dtype)
    pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    call = _make_call_arguments(model, size)

    def time_pipeline_call() -> float:
        began = time.perf_counter()
        pipe(
            "a red circle", output_type="latent", generator=torch.Generator().manual_seed(0), **call
        ).images.sum().item()
        return time.perf_counter() - began

    time_pipeline_call()
    alone, beside = [], []
    for _ in range(RUNS):
        dist.barrier()
        alone += [time_pipeline_call()] if dist.get_rank() == 0 else []
        dist.barrier()
        beside.append(time_pipeline_call())
        env.report_progress()
    return max(1.0, statistics.median(beside) / statistics.median(alone)) if alone else 1.0


def _make_call_arguments(model: str, size: int, steps: int = STEPS) -> dict[str, Any]:
    return read_generation_options(model) | {"height": size, "width": size, "num_inference_steps": steps}


def _separate_kernels(model: str, call: dict[str, Any], plan: Plan, profile: Profile) -> tuple[float, float]:
    """Seconds of a call's work on the curves, and its kernels: what one second of each more would add."""
    known = _predict_call_latency(model, call, plan, profile)
    more = _predict_call_latency(model, call, plan, dataclasses.replace(profile, kernel_s=KERNEL, runs_ahead=False))
    return known, (more - known) / KERNEL


@functools.cache
def _load_subject(model: str) -> PlanSubject:
    return PlanSubject.from_configs(model, find_model_source(model))


def _predict_call_latency(model: str, call: dict[str, Any], plan: Plan, profile: Profile) -> float:
    subject = _load_subject(model)
    return make_pricer(subject, call, profile).predict_latency(
        subject.make_plan_job(plan, subject.make_call_shape(call, profile.element_size))
    )


class _LoopSeconds(NamedTuple):
    """Seconds of a denoising loop in its transformer and outside of it, and the calls of the transformer."""

    inside: float
    outside: float
    calls: int


def _time_denoising_loop(runner: Any, call: dict[str, Any]) -> _LoopSeconds:
    times: list[float] = []

    def record_time(*_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    transformer = runner.pipe.transformer
    hooks = transformer.register_forward_pre_hook(record_time), transformer.register_forward_hook(record_time)
    runner("a red circle", output_type="latent", generator=torch.Generator().manual_seed(0), **call)
    for hook in hooks:
        hook.remove()
    inside = sum(end - begin for begin, end in zip(times[::2], times[1::2], strict=True))
    between = sum(begin - end for end, begin in zip(times[1:-1:2], times[2::2], strict=True))
    return _LoopSeconds(inside, between, len(times) // 2 - 1)
