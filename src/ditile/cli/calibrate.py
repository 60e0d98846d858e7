"""`ditile calibrate`: what `calibrate` measures, on one rank and then on all, as the profile of this machine.

Under torchrun the ranks are those that it started, and where they are on several hosts the link between these is
measured too: by the first rank of each.

Calls of the bundled models that `ditile calibrate` makes: what they cost besides what is on a machine's curves.

One rank makes some of its own, and all ranks share others, in turn with one rank. Each is made again where somebody
else slowed the cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditile.cli import files
from ditile.cli.generate import silence_libraries
from ditile.cli.options import CalibrateOptions
from ditile.distributed import env
from ditile.distributed.launch import launch
from ditile.distributed.mesh import Communicators, join_torchrun, pick_device
from ditile.distributed.rank0 import list_ranks_by_host
from ditile.errors import PlanError
from ditile.plan.plan import Plan
from ditile.planner import calibrate as curves
from ditile.planner import calibrate as fit
from ditile.planner.calibrate import Bench
from ditile.planner.disturbance import DisturbanceGuard, SlowdownGauge, compute_disturbed_share
from ditile.planner.profile import Link, Profile
from ditile.planner.search import make_pricer
from ditile.planner.subject import PlanSubject
from ditile.runner.load import find_model_source, load, read_generation_options
from ditile.runner.runner import Runner, parallelize

ON_CURVES, ON_LINKS, IN_CALLS = (40, 50), (10, 30), (12, 50)
"""How often what others disturbed is measured again, and the tenths of a second that these are waited for, in all."""
LEARNING = 20
"""Products that say what the machine's best is."""
NO_LINK = Link(latency_s=0.0, bandwidth=1e12)


def calibrate_machine(wanted: CalibrateOptions) -> Path | None:
    """Measures this machine and keeps the profile.

    Returns:
        Where it is; None on the ranks of torchrun that did not write it.

    Raises:
        PlanError: if torchrun started other ranks than are asked for, or not as many on each host.
    """
    place = env.read_torchrun_place()
    profile = (_calibrate_torchrun_group if place is not None and place.world > 1 else _calibrate_this_machine)(wanted)
    if profile is None:
        return None
    path = Path(wanted.out) if wanted.out is not None else env.find_profile_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, profile.to_json() + "\n")
    return path


def _calibrate_this_machine(wanted: CalibrateOptions) -> Profile:
    """By ranks that are started here."""
    ranks = wanted.ranks or torch.cuda.device_count() or max(1, (os.cpu_count() or 1) // wanted.threads)
    profile = _launch_single_rank(wanted, ranks)
    if ranks == 1:
        return profile
    jobs = _list_host_jobs(ranks, runs_ahead=profile.runs_ahead)
    runs = sum((1 + len(job.plans)) * (1 + job.turns) for job in jobs) or RUNS
    with show_progress(f"{ranks} ranks", curves.LINK_PARTS + runs) as on_progress:
        together = launch(
            measure_all_ranks, ranks, (_choose_dtype(wanted), jobs), threads=wanted.threads, progress=on_progress
        )[0]
    return _add_joint_measurement(profile, jobs, together)


def _calibrate_torchrun_group(wanted: CalibrateOptions) -> Profile | None:
    """By the ranks of the group that torchrun's variables describe; None on all but the first."""
    join_torchrun()
    hosts = list_ranks_by_host()
    ranks, gpus = len(hosts[0]), torch.cuda.device_count()
    if any(len(of_host) != ranks for of_host in hosts):
        each = ", ".join(str(len(of_host)) for of_host in hosts)
        raise PlanError(f"the hosts have {each} ranks; start as many on each")
    if wanted.ranks not in (None, ranks):
        raise PlanError(f"ranks={wanted.ranks}, and torchrun started {ranks} on each host; leave it out")
    profile = _launch_single_rank(wanted, ranks) if dist.get_rank() == 0 else None
    dist.barrier()
    if not gpus:
        torch.set_num_threads(wanted.threads)
    jobs = _list_host_jobs(ranks, runs_ahead=gpus > 0) if ranks > 1 else []
    together = measure_all_ranks(_choose_dtype(wanted), jobs, hosts)
    if profile is None:
        return None
    return dataclasses.replace(_add_joint_measurement(profile, jobs, together), interlink=together.interlink)


def _launch_single_rank(wanted: CalibrateOptions, ranks: int) -> Profile:
    """What one rank measures in a process of its own, of a machine that has so many."""
    with show_progress("one rank", curves.PARTS + count_single_rank_steps()) as on_progress:
        [alone] = launch(measure_single_rank, 1, (_choose_dtype(wanted),), threads=wanted.threads, progress=on_progress)
    profile: Profile = dataclasses.replace(alone, devices=ranks, name=wanted.name or alone.name)
    return profile


def _choose_dtype(wanted: CalibrateOptions) -> str:
    return wanted.dtype or ("bfloat16" if torch.cuda.device_count() else "float32")


def _list_host_jobs(ranks: int, *, runs_ahead: bool) -> list[CalibrationJob]:
    """Calls that ranks of a host share; on GPUs these do not show how long hosts take to start."""
    return [] if runs_ahead else list_shared_jobs(ranks)


def _add_joint_measurement(alone: Profile, jobs: Sequence[CalibrationJob], measured: JointMeasurement) -> Profile:
    """The profile with what all ranks measured together."""
    profile = dataclasses.replace(
        alone, link=measured.link, together=measured.together, disturbed=max(alone.disturbed, measured.disturbed)
    )
    sums, exchanges = list[fit.SharedCall](), list[fit.SharedCall]()
    for job, of_job in zip(jobs, measured.times, strict=True):
        for plan, share in zip(job.plans, of_job, strict=True):
            took = share * job.predict_job_latency(Plan(), profile)
            if plan.pipefusion > 1:  # the first of all: the others build on it
                profile = fit_joint_slowdown(job, plan, profile, took)
            else:
                (sums if plan.tensor > 1 else exchanges).append(separate_exchanges(job, plan, profile, took))
    return fit.fit_collectives(profile, exchanges, sums)


@contextlib.contextmanager
def show_progress(title: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar of what the first rank has got done, for people who look."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(f"measuring {title}", total=total)
        yield lambda rank, reports: bar.advance(task, reports) if rank == 0 else None


def measure_single_rank(dtype: str) -> Profile:
    """On a rank by itself: the curves, and what they leave of real calls."""
    silence_libraries()
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = pick_device(None, 0)
    slower = _make_warm_gauge(None, device)
    on_curves, in_calls = DisturbanceGuard(slower, *ON_CURVES), DisturbanceGuard(slower, *IN_CALLS)
    bench = Bench(device, getattr(torch, dtype), env.report_progress, again=on_curves)
    is_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else _get_host_memory()
    profile = Profile(
        name=curves.get_device_name(),
        source=curves.describe_provenance(),
        memory_bytes=memory,
        element_size=getattr(torch, dtype).itemsize,
        matmul=curves.measure_matmul(bench),
        attention=curves.measure_attention(bench),
        head=curves.measure_head_sizes(bench),
        pointwise=curves.measure_pointwise(bench),
        kernel_s=0.0,
        runs_ahead=is_gpu,
        micro_s=0.0,
        link=NO_LINK,
        idle_bytes=0 if is_gpu else idle,
    )
    fitted_profile = fit_bundled_calls(profile, dtype, in_calls)
    if slower.watches:
        fitted_profile = dataclasses.replace(
            fitted_profile, product_s=slower.best_s, disturbed=compute_disturbed_share(on_curves, in_calls)
        )
    return fitted_profile


def _make_warm_gauge(group: dist.ProcessGroup | None, device: torch.device) -> SlowdownGauge:
    """One that knows the best of ranks which all ask."""
    slower = SlowdownGauge(group, device)
    for _ in range(LEARNING):
        slower()
    return slower


class JointMeasurement(NamedTuple):
    """What ranks measured together.

    Attributes:
        link, interlink: what joins those of a host, and the first ones of several; the same if each has one.
        together: how much slower they compute together, if shared calls do not say it.
        times: of each shared call under each plan.
        disturbed: the share of these that others slowed.
    """

    link: Link
    interlink: Link | None
    together: float
    times: list[list[float]]
    disturbed: float


def measure_all_ranks(
    dtype: str, jobs: Sequence[CalibrationJob], hosts: Sequence[Sequence[int]] | None = None
) -> JointMeasurement:
    """On all ranks: what joins them, and what they take for shared calls.

    Args:
        jobs: the calls, under plans of the ranks of a host.
        hosts: the ranks of each; by default all are on one.
    """
    silence_libraries()
    hosts = hosts or [range(dist.get_world_size())]
    place = env.read_torchrun_place()
    device = pick_device(None, dist.get_rank() if place is None else place.local_rank)
    interlink = measure_link_of_ranks(dtype, device, [of_host[0] for of_host in hosts]) if len(hosts) > 1 else None
    link = measure_link_of_ranks(dtype, device, hosts[0]) if len(hosts[0]) > 1 else interlink or NO_LINK
    staged = len(hosts[0]) == 1 or any(plan.pipefusion > 1 for job in jobs for plan in job.plans)
    together = 1.0 if staged else measure_joint_slowdown(dtype, device)
    again = DisturbanceGuard(_make_warm_gauge(dist.group.WORLD, device), *IN_CALLS)
    times = [time_shared_call(dtype, job, again) for job in jobs]
    return JointMeasurement(link, interlink, together, times, compute_disturbed_share(again))


def measure_link_of_ranks(dtype: str, device: torch.device, ranks: Sequence[int]) -> Link:
    """What joins some ranks, on these; the others wait. All must ask."""
    group = Communicators().get_or_make_group("calibrate", ranks, None) if len(ranks) < dist.get_world_size() else None
    on = device if "nccl" in dist.get_backend() else torch.device("cpu")
    link = NO_LINK
    if dist.get_rank() in ranks:
        again = DisturbanceGuard(_make_warm_gauge(group or dist.group.WORLD, device), *ON_LINKS)
        link = curves.measure_link(Bench(on, getattr(torch, dtype), env.report_progress, group, again))
    dist.barrier()
    return link


def _get_host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
