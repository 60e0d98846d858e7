"""`ditile calibrate`: what `calibrate` measures, on one rank and then on all, as the profile of this machine.

Under torchrun the ranks are those that it started, and where they are on several hosts the link between these is
measured too: by the first rank of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ditile.cli import calibrate_calls as calls
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
from ditile.planner import fit
from ditile.planner.calibrate import Bench
from ditile.planner.disturbance import DisturbanceGuard, SlowdownGauge, compute_disturbed_share
from ditile.planner.profile import Link, Profile

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
    runs = sum((1 + len(job.plans)) * (1 + job.turns) for job in jobs) or calls.RUNS
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
    with show_progress("one rank", curves.PARTS + calls.count_single_rank_steps()) as on_progress:
        [alone] = launch(measure_single_rank, 1, (_choose_dtype(wanted),), threads=wanted.threads, progress=on_progress)
    profile: Profile = dataclasses.replace(alone, devices=ranks, name=wanted.name or alone.name)
    return profile


def _choose_dtype(wanted: CalibrateOptions) -> str:
    return wanted.dtype or ("bfloat16" if torch.cuda.device_count() else "float32")


def _list_host_jobs(ranks: int, *, runs_ahead: bool) -> list[calls.CalibrationJob]:
    """Calls that ranks of a host share; on GPUs these do not show how long hosts take to start."""
    return [] if runs_ahead else calls.list_shared_jobs(ranks)


def _add_joint_measurement(alone: Profile, jobs: Sequence[calls.CalibrationJob], measured: JointMeasurement) -> Profile:
    """The profile with what all ranks measured together."""
    profile = dataclasses.replace(
        alone, link=measured.link, together=measured.together, disturbed=max(alone.disturbed, measured.disturbed)
    )
    sums, exchanges = list[fit.SharedCall](), list[fit.SharedCall]()
    for job, of_job in zip(jobs, measured.times, strict=True):
        for plan, share in zip(job.plans, of_job, strict=True):
            took = share * job.predict_job_latency(Plan(), profile)
            if plan.pipefusion > 1:  # the first of all: the others build on it
                profile = calls.fit_joint_slowdown(job, plan, profile, took)
            else:
                (sums if plan.tensor > 1 else exchanges).append(calls.separate_exchanges(job, plan, profile, took))
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
        name=curves.get_device_name(), source=curves.describe_provenance(), memory_bytes=memory,
        element_size=getattr(torch, dtype).itemsize, matmul=curves.measure_matmul(bench), attention=curves.measure_attention(bench),
        head=curves.measure_head_sizes(bench), pointwise=curves.measure_pointwise(bench), kernel_s=0.0, runs_ahead=is_gpu, micro_s=0.0,
        link=NO_LINK, idle_bytes=0 if is_gpu else idle,
    )  # fmt: skip
    fitted_profile = calls.fit_bundled_calls(profile, dtype, in_calls)
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
    dtype: str, jobs: Sequence[calls.CalibrationJob], hosts: Sequence[Sequence[int]] | None = None
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
    together = 1.0 if staged else calls.measure_joint_slowdown(dtype, device)
    again = DisturbanceGuard(_make_warm_gauge(dist.group.WORLD, device), *IN_CALLS)
    times = [calls.time_shared_call(dtype, job, again) for job in jobs]
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
