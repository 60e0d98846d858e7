"""`ditile calibrate`: what `calibrate` measures, on one rank and then on all, as the profile of this machine.

Under torchrun the ranks are those that it started, and where they are on several hosts the link between these is
measured too: by the first rank of each.
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

from ditile import env, files
from ditile.errors import PlanError
from ditile.generate import quiet
from ditile.launch import launch
from ditile.load import defaults, find, load
from ditile.mesh import Communicators, join_torchrun, pick_device
from ditile.options import Calibrate
from ditile.plan import Plan
from ditile.planner import calibrate as curves
from ditile.planner.calibrate import Bench
from ditile.planner.profile import Link, Profile
from ditile.planner.search import pricer_of
from ditile.planner.subject import Subject
from ditile.runner import parallelize
from ditile.transport import gather_json

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
NO_LINK = Link(latency_s=0.0, bandwidth=1e12)


def calibrate(wanted: Calibrate) -> Path | None:
    """Measures this machine and keeps the profile.

    Returns:
        Where it is; None on the ranks of torchrun that did not write it.

    Raises:
        PlanError: if torchrun started other ranks than are asked for, or not as many on each host.
    """
    place = env.torchrun()
    found = (_of_torchrun if place is not None and place.world > 1 else _of_this_machine)(wanted)
    if found is None:
        return None
    path = Path(wanted.out) if wanted.out is not None else env.profile()
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, found.to_json() + "\n")
    return path


def _of_this_machine(wanted: Calibrate) -> Profile:
    """By ranks that are started here."""
    ranks = wanted.ranks or torch.cuda.device_count() or max(1, (os.cpu_count() or 1) // wanted.threads)
    found = _alone(wanted, ranks)
    if ranks == 1:
        return found
    jobs = _jobs(ranks, runs_ahead=found.runs_ahead)
    runs = sum((1 + len(job.plans)) * (1 + job.turns) for job in jobs) or RUNS
    with progress(f"{ranks} ranks", curves.LINK_PARTS + runs) as heard:
        together = launch(joined, ranks, (_dtype(wanted), jobs), threads=wanted.threads, progress=heard)[0]
    return _together_with(found, jobs, together)


def _of_torchrun(wanted: Calibrate) -> Profile | None:
    """By the ranks of the group that torchrun's variables describe; None on all but the first."""
    join_torchrun()
    hosts = by_host()
    ranks, gpus = len(hosts[0]), torch.cuda.device_count()
    if any(len(of_host) != ranks for of_host in hosts):
        each = ", ".join(str(len(of_host)) for of_host in hosts)
        raise PlanError(f"the hosts have {each} ranks; start as many on each")
    if wanted.ranks not in (None, ranks):
        raise PlanError(f"ranks={wanted.ranks}, and torchrun started {ranks} on each host; leave it out")
    found = _alone(wanted, ranks) if dist.get_rank() == 0 else None
    dist.barrier()
    if not gpus:
        torch.set_num_threads(wanted.threads)
    jobs = _jobs(ranks, runs_ahead=gpus > 0) if ranks > 1 else []
    together = joined(_dtype(wanted), jobs, hosts)
    if found is None:
        return None
    return dataclasses.replace(_together_with(found, jobs, together), interlink=together.interlink)


def _alone(wanted: Calibrate, ranks: int) -> Profile:
    """What one rank measures in a process of its own, of a machine that has so many."""
    with progress("one rank", curves.PARTS + len(CALLS) * len(PATCHES) * ROUNDS * STEPS) as heard:
        [alone] = launch(one, 1, (_dtype(wanted),), threads=wanted.threads, progress=heard)
    found: Profile = dataclasses.replace(alone, devices=ranks, name=wanted.name or alone.name)
    return found


def _dtype(wanted: Calibrate) -> str:
    return wanted.dtype or ("bfloat16" if torch.cuda.device_count() else "float32")


def by_host() -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, as torchrun counts them: one host after the other."""
    place = env.torchrun()
    assert place is not None
    found = gather_json(place.rank - place.local_rank, dist.group.WORLD)
    return tuple(tuple(rank for rank, first in enumerate(found) if first == host) for host in dict.fromkeys(found))


def _jobs(ranks: int, *, runs_ahead: bool) -> list[_Job]:
    """Calls that ranks of a host share; on GPUs these do not show how long hosts take to start."""
    return [] if runs_ahead else _shared_jobs(ranks)


def _together_with(alone: Profile, jobs: Sequence[_Job], measured: Joined) -> Profile:
    """The profile with what all ranks measured together."""
    found = dataclasses.replace(alone, link=measured.link, together=measured.together)
    sums, exchanges = list[curves.Shared](), list[curves.Shared]()
    for job, of_job in zip(jobs, measured.times, strict=True):
        for plan, share in zip(job.plans, of_job, strict=True):
            took = share * job.latency(Plan(), found)
            if plan.pipefusion > 1:  # the first of all: the others build on it
                found = _crowded(job, plan, found, took)
            else:
                (sums if plan.tensor > 1 else exchanges).append(_terms_of_link(job, plan, found, took))
    return curves.started(found, exchanges, sums)


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar of what the first rank has got done, for people who look."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(f"measuring {title}", total=total)
        yield lambda rank, reports: bar.advance(task, reports) if rank == 0 else None


def one(dtype: str) -> Profile:
    """On a rank by itself: the curves, and what they leave of real calls."""
    quiet()
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = pick_device(None, 0)
    bench = Bench(device, getattr(torch, dtype), env.advance)
    is_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else _host_memory()
    profile = Profile(
        name=curves.machine(), source=curves.provenance(), memory_bytes=memory,
        element_size=getattr(torch, dtype).itemsize, matmul=curves.matmul(bench), attention=curves.attention(bench),
        head=curves.heads(bench), pointwise=curves.pointwise(bench), kernel_s=0.0, runs_ahead=is_gpu, micro_s=0.0,
        link=NO_LINK, idle_bytes=0 if is_gpu else idle,
    )  # fmt: skip
    return _called(profile, dtype)


class Joined(NamedTuple):
    """What ranks measured together.

    Attributes:
        link, interlink: what joins those of a host, and the first ones of several; the same if each has one.
        together: how much slower they compute together, if shared calls do not say it.
        times: of each shared call under each plan.
    """

    link: Link
    interlink: Link | None
    together: float
    times: list[list[float]]


def joined(dtype: str, jobs: Sequence[_Job], hosts: Sequence[Sequence[int]] | None = None) -> Joined:
    """On all ranks: what joins them, and what they take for shared calls.

    Args:
        jobs: the calls, under plans of the ranks of a host.
        hosts: the ranks of each; by default all are on one.
    """
    quiet()
    hosts = hosts or [range(dist.get_world_size())]
    place = env.torchrun()
    device = pick_device(None, dist.get_rank() if place is None else place.local_rank)
    interlink = link_of(dtype, device, [of_host[0] for of_host in hosts]) if len(hosts) > 1 else None
    link = link_of(dtype, device, hosts[0]) if len(hosts[0]) > 1 else interlink or NO_LINK
    staged = len(hosts[0]) == 1 or any(plan.pipefusion > 1 for job in jobs for plan in job.plans)
    together = 1.0 if staged else _together(dtype, device)
    return Joined(link, interlink, together, [_shared(dtype, job) for job in jobs])


def link_of(dtype: str, device: torch.device, ranks: Sequence[int]) -> Link:
    """What joins some ranks, on these; the others wait. All must ask."""
    group = Communicators().of("calibrate", ranks, None) if len(ranks) < dist.get_world_size() else None
    on = device if "nccl" in dist.get_backend() else torch.device("cpu")
    found = NO_LINK
    if dist.get_rank() in ranks:
        found = curves.link(Bench(on, getattr(torch, dtype), env.advance, group))
    dist.barrier()
    return found


class _Job(NamedTuple):
    """A call of a bundled model, and the plans of all ranks under which it is made, in so many turns."""

    model: str
    size: int
    steps: int
    turns: int
    plans: tuple[Plan, ...] = ()

    @property
    def call(self) -> dict[str, Any]:
        """What the pipeline is called with."""
        return _call(self.model, self.size, self.steps)

    def latency(self, plan: Plan, profile: Profile) -> float:
        """What is predicted."""
        return _latency(self.model, self.call, plan, profile)


def _shared_jobs(ranks: int) -> list[_Job]:
    """Calls that say how fast stages compute which hand over to each other, and what an exchange takes.

    Stages wait for the slower of two at every patch, and messages take caches and time of what computes.
    """
    exchanging = (Plan(ulysses=ranks), Plan(tensor=ranks))
    wanted: list[tuple[_Job, tuple[Plan, ...]]] = [
        (_Job(*STAGED), (Plan(pipefusion=ranks, patches=2 * ranks, warmup=0),))
    ]
    wanted += [(_Job(*shared), exchanging) for shared in SHARED]
    found = []
    for job, plans in wanted:
        subject = _subject(job.model)
        facts = subject.shape(job.call).facts(job.model, len(subject.seats.chain))
        found.append(job._replace(plans=tuple(plan for plan in plans if not plan.illegal(facts))))
    return found


def _shared(dtype: str, job: _Job) -> list[float]:
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
    for run in range(1 + job.turns):
        took = []
        for runner in runners:
            generator = torch.Generator().manual_seed(0)
            runner("a red circle", output_type="latent", generator=generator, **job.call)
            assert runner.report is not None
            took.append(runner.report.seconds["denoise"])
            env.advance()
        shares += [[seconds / took[0] for seconds in took[1:]]] if run else []
    return [statistics.median(of_plan) for of_plan in zip(*shares, strict=True)]


def _crowded(job: _Job, plan: Plan, profile: Profile, took: float) -> Profile:
    """The profile in which all compute so much slower together that a call takes what it took."""
    alone, twice = (job.latency(plan, dataclasses.replace(profile, together=slower)) for slower in (1.0, 2.0))
    return dataclasses.replace(profile, together=max(1.0, 1 + (took - alone) / (twice - alone)))


def _terms_of_link(job: _Job, plan: Plan, profile: Profile, took: float) -> curves.Shared:
    """What is known of a shared call but for its exchanges, and these."""

    def predicted(link: Link, start: float) -> float:
        link = dataclasses.replace(link, call_s=start, sum_s=start)
        return job.latency(plan, dataclasses.replace(profile, link=link))

    known = predicted(dataclasses.replace(profile.link, collective=FREE, reduce=FREE), 0.0)
    sent, begun = (predicted(profile.link, start) for start in (0.0, KERNEL))
    return curves.Shared(took, known, sent - known, (begun - sent) / KERNEL)


def _together(dtype: str, device: torch.device) -> float:
    model, size = CALLS[1]
    pipe: Any = load(model, dtype=dtype)
    pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    call = _call(model, size)

    def seconds() -> float:
        began = time.perf_counter()
        pipe(
            "a red circle", output_type="latent", generator=torch.Generator().manual_seed(0), **call
        ).images.sum().item()
        return time.perf_counter() - began

    seconds()
    alone, crowded = [], []
    for _ in range(RUNS):
        dist.barrier()
        alone += [seconds()] if dist.get_rank() == 0 else []
        dist.barrier()
        crowded.append(seconds())
        env.advance()
    return max(1.0, statistics.median(crowded) / statistics.median(alone)) if alone else 1.0


def _called(profile: Profile, dtype: str) -> Profile:
    """The profile with what calls of the bundled models cost besides what is on its curves.

    They are made in turn, so that a machine that grows slower does so for all of them.
    """
    runners: dict[tuple[str, int], Any] = {}
    for model, patches in itertools.product(dict.fromkeys(model for model, _ in CALLS), PATCHES):
        pipe: Any = load(model, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        runners[model, patches] = parallelize(pipe, Plan(patches=patches))
    every = [(model, size, patches) for model, size in CALLS for patches in PATCHES]
    rounds = [[_denoised(runners[model, patches], _call(model, size)) for model, size, patches in every]
              for _ in range(ROUNDS)]  # fmt: skip
    terms = []
    for (model, size, patches), times in zip(every, zip(*rounds, strict=True), strict=True):
        inside = statistics.median(found.inside for found in times)
        terms.append((inside, *_terms(model, _call(model, size), Plan(patches=patches), profile)))
    outside = statistics.median(found.outside / found.calls for times in rounds for found in times)
    return dataclasses.replace(curves.fitted(profile, terms), micro_s=outside)


def _call(model: str, size: int, steps: int = STEPS) -> dict[str, Any]:
    return defaults(model) | {"height": size, "width": size, "num_inference_steps": steps}


def _terms(model: str, call: dict[str, Any], plan: Plan, profile: Profile) -> tuple[float, float]:
    """Seconds of a call's work on the curves, and its kernels: what one second of each more would add."""
    known = _latency(model, call, plan, profile)
    more = _latency(model, call, plan, dataclasses.replace(profile, kernel_s=KERNEL, runs_ahead=False))
    return known, (more - known) / KERNEL


@functools.cache
def _subject(model: str) -> Subject:
    return Subject.of(model, find(model))


def _latency(model: str, call: dict[str, Any], plan: Plan, profile: Profile) -> float:
    subject = _subject(model)
    return pricer_of(subject, call, profile).latency(subject.job(plan, subject.shape(call, profile.element_size)))


class _Loop(NamedTuple):
    """Seconds of a denoising loop in its transformer and outside of it, and the calls of the transformer."""

    inside: float
    outside: float
    calls: int


def _denoised(runner: Any, call: dict[str, Any]) -> _Loop:
    times: list[float] = []

    def note(*_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    transformer = runner.pipe.transformer
    hooks = transformer.register_forward_pre_hook(note), transformer.register_forward_hook(note)
    runner("a red circle", output_type="latent", generator=torch.Generator().manual_seed(0), **call)
    for hook in hooks:
        hook.remove()
    inside = sum(end - begin for begin, end in zip(times[::2], times[1::2], strict=True))
    between = sum(begin - end for end, begin in zip(times[1:-1:2], times[2::2], strict=True))
    return _Loop(inside, between, len(times) // 2 - 1)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
