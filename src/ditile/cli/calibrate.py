"""`ditile calibrate`: measures this machine, first on one rank and then on all, and writes its profile.

Under torchrun the ranks are those that it started. Where they are on several hosts, the first rank of each also
measures the link between hosts.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditile.distributed import cpus, env, files
from ditile.distributed.backend import pick_device
from ditile.distributed.launch import launch
from ditile.distributed.mesh import Communicators
from ditile.distributed.torchrun import join_torchrun, list_ranks_by_host
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.plan.schedule import Schedule
from ditile.planner import calibrate as curves
from ditile.planner.calibrate import Bench, DisturbanceGuard, SlowdownGauge
from ditile.planner.profile import Link, Profile
from ditile.planner.search import make_pricer
from ditile.planner.subject import PlanSubject
from ditile.runner.load import load
from ditile.runner.model_files import defaults, find_model_source
from ditile.runner.requests.command_options import CalibrateOptions
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.runner import parallelize

ALONE, ON_LINKS = (50, 100), (10, 30)
"""(repetitions of disturbed measurements, tenths of a second to wait for a quiet machine) of one rank, and of links."""
LEARNING = 20
"""Products that are timed first, to find the machine's best."""
NO_LINK = Link(latency_s=0.0, bandwidth=1e12)

CALLS = (("shapes-pixart", 128), ("shapes-pixart", 256), ("shapes-flux", 128), ("shapes-flux", 256))
"""Models and sizes of the calls to which the profile is fitted."""
PATCHES, STEPS, ROUNDS = (1, 4), 3, 2
KERNEL = 1e-6


def calibrate_machine(wanted: CalibrateOptions) -> Path | None:
    """Measures this machine and writes the profile.

    Returns:
        Its path; None on the ranks of torchrun that did not write it.

    Raises:
        PlanError: if torchrun started another number of ranks than `wanted` says, or different numbers on the hosts.
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
    """The profile, measured by ranks that are started here."""
    ranks = wanted.ranks or torch.cuda.device_count() or max(1, (os.cpu_count() or 1) // wanted.threads)
    profile = _launch_single_rank(wanted, ranks)
    if ranks == 1:
        return profile
    links: MeasuredLinks = _launch_with_progress(measure_links, ranks, wanted, curves.LINK_PARTS)
    return links.add_to_profile(profile)


def _launch_with_progress(measure: Callable[[str], Any], ranks: int, wanted: CalibrateOptions, parts: int) -> Any:
    """The result of the first of some ranks, with the progress of its parts."""
    with show_progress_bar(f"measuring {ranks} rank(s)", parts) as advance:

        def advance_on_first_rank(rank: int, reports: int) -> None:
            if rank == 0:
                advance(reports)

        dtype = _choose_dtype(wanted)
        return launch(measure, ranks, (dtype,), threads=wanted.threads, progress=advance_on_first_rank)[0]


def _calibrate_torchrun_group(wanted: CalibrateOptions) -> Profile | None:
    """The profile, measured by the ranks that torchrun started; None on all but the first rank."""
    join_torchrun()
    hosts = list_ranks_by_host()
    ranks = len(hosts[0])
    if any(len(of_host) != ranks for of_host in hosts):
        each = ", ".join(str(len(of_host)) for of_host in hosts)
        raise PlanError(f"the hosts have {each} ranks; start as many on each")
    if wanted.ranks not in (None, ranks):
        raise PlanError(f"ranks={wanted.ranks}, and torchrun started {ranks} on each host; leave it out")
    profile = _launch_single_rank(wanted, ranks) if dist.get_rank() == 0 else None
    # The other ranks wait here, so that the first rank measures an idle machine.
    dist.barrier()
    if not torch.cuda.device_count():
        torch.set_num_threads(wanted.threads)
    with show_progress_bar("measuring links", curves.LINK_PARTS, shown=profile is not None):
        links = measure_links(_choose_dtype(wanted), hosts)
    return None if profile is None else links.add_to_profile(profile)


def _launch_single_rank(wanted: CalibrateOptions, ranks: int) -> Profile:
    """The profile that one rank measures in a process of its own; `ranks` is how many the machine has."""
    schedules = [Schedule.from_plan(Plan(patches=patches), STEPS) for patches in PATCHES]
    micro_steps = sum(len(schedule.list_micro_steps(step)) for schedule in schedules for step in range(STEPS))
    parts = curves.PARTS + len(CALLS) * ROUNDS * micro_steps
    alone = _launch_with_progress(measure_single_rank, 1, wanted, parts)
    profile: Profile = dataclasses.replace(alone, devices=ranks, name=wanted.name or alone.name)
    return profile


def _choose_dtype(wanted: CalibrateOptions) -> str:
    return wanted.dtype or ("bfloat16" if torch.cuda.device_count() else "float32")


def measure_single_rank(dtype: str) -> Profile:
    """The profile of one rank by itself: the curves, and the costs of real calls that they do not show."""
    silence_libraries()
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = pick_device(None, 0)
    slower = _make_warm_gauge(None, device)
    again = DisturbanceGuard(slower, *ALONE)
    bench = Bench(device, getattr(torch, dtype), env.report_progress, again=again)
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if is_gpu else f"{cpus.read_cpu_name()}, {cpus.count_usable_cores()} cores"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    host_memory = cpus.count_memory_bytes()
    profile = Profile(
        name=name,
        source=f"measured by ditile calibrate on {name}, torch {torch.__version__}, {today}",
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if is_gpu else host_memory,
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
        host_memory_bytes=host_memory,
    )
    profile = fit_bundled_calls(profile, dtype, again)
    product_s = slower.best_s if slower.watches else 0.0
    return dataclasses.replace(profile, product_s=product_s, disturbed=again.disturbed_share)


def _make_warm_gauge(group: dist.ProcessGroup | None, device: torch.device) -> SlowdownGauge:
    """A gauge that has measured the ranks at their best. All ranks of the group must call this."""
    slower = SlowdownGauge(group, device)
    for _ in range(LEARNING):
        slower()
    return slower


class MeasuredLinks(NamedTuple):
    """The links between ranks.

    Attributes:
        link, interlink: between ranks of a host, and between hosts. The interlink is None if there is one host; both
            are the same if each host has one rank.
        disturbed: the share of the measured seconds that other processes slowed, the larger one of both links.
    """

    link: Link
    interlink: Link | None
    disturbed: float

    def add_to_profile(self, profile: Profile) -> Profile:
        """The profile of one rank with these links."""
        disturbed = max(profile.disturbed, self.disturbed)
        return dataclasses.replace(profile, link=self.link, interlink=self.interlink, disturbed=disturbed)


def measure_links(dtype: str, hosts: Sequence[Sequence[int]] | None = None) -> MeasuredLinks:
    """The links between all ranks, each of which must call this.

    Args:
        dtype: of the messages.
        hosts: the ranks of each host; by default all ranks are on one host.
    """
    silence_libraries()
    hosts = hosts or [range(dist.get_world_size())]
    place = env.read_torchrun_place()
    device = pick_device(None, dist.get_rank() if place is None else place.local_rank)
    interlink, others = None, 0.0
    if len(hosts) > 1:
        interlink, others = measure_link_of_ranks(dtype, device, [of_host[0] for of_host in hosts])
    if len(hosts[0]) == 1:
        return MeasuredLinks(interlink or NO_LINK, interlink, others)
    link, disturbed = measure_link_of_ranks(dtype, device, hosts[0])
    return MeasuredLinks(link, interlink, max(disturbed, others))


def measure_link_of_ranks(dtype: str, device: torch.device, ranks: Sequence[int]) -> tuple[Link, float]:
    """The link between some ranks, and its disturbed share. All ranks must call this; those not in `ranks` wait."""
    group = Communicators().get_or_make_group("calibrate", ranks, None) if len(ranks) < dist.get_world_size() else None
    on = device if "nccl" in dist.get_backend() else torch.device("cpu")
    link, disturbed = NO_LINK, 0.0
    if dist.get_rank() in ranks:
        again = DisturbanceGuard(_make_warm_gauge(group or dist.group.WORLD, device), *ON_LINKS)
        link = curves.measure_link(Bench(on, getattr(torch, dtype), env.report_progress, group, again))
        disturbed = again.disturbed_share
    dist.barrier()
    return link, disturbed


def fit_bundled_calls(profile: Profile, dtype: str, again: DisturbanceGuard) -> Profile:
    """The profile with the costs of the bundled models' calls that its curves do not show.

    The calls take turns, so that a machine that becomes slower slows all of them.
    """
    calls = []
    for model, patches in itertools.product(dict.fromkeys(model for model, _ in CALLS), PATCHES):
        pipe: Any = load(model, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        runner = parallelize(pipe, Plan(patches=patches))
        calls += [(runner, model, size, patches) for of, size in CALLS if of == model]
    rounds = [
        [
            again.measure_undisturbed(
                functools.partial(_time_denoising_loop, runner, _make_call_arguments(model, size))
            )
            for runner, model, size, _ in calls
        ]
        for _ in range(ROUNDS)
    ]
    measured = []
    for (_, model, size, patches), times in zip(calls, zip(*rounds, strict=True), strict=True):
        known, kernels = _separate_kernels(model, _make_call_arguments(model, size), Plan(patches=patches), profile)
        measured.append((statistics.median(loop.inside for loop in times), known, kernels))
    outside = statistics.median(loop.outside / loop.calls for times in rounds for loop in times)
    return dataclasses.replace(curves.fit_kernel_costs(profile, measured), micro_s=outside)


def _make_call_arguments(model: str, size: int) -> dict[str, Any]:
    return defaults(model) | {"height": size, "width": size, "num_inference_steps": STEPS}


def _separate_kernels(model: str, call: dict[str, Any], plan: Plan, profile: Profile) -> tuple[float, float]:
    """Seconds of a call by the curves alone, and its number of kernels: how its latency grows with `kernel_s`."""
    subject = PlanSubject.from_configs(model, find_model_source(model))
    job = subject.make_plan_job(plan, subject.make_call_shape(call, profile.element_size))
    costly = dataclasses.replace(profile, kernel_s=KERNEL, runs_ahead=False)
    known, more = (make_pricer(subject, call, each).predict_latency(job) for each in (profile, costly))
    return known, (more - known) / KERNEL


class _LoopSeconds(NamedTuple):
    """Seconds of a denoising loop inside its transformer and outside of it, and calls of the transformer less one."""

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
