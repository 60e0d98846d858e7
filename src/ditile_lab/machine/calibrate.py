"""`ditile calibrate`: measures this machine, first on one rank and then on all, and writes its profile.

Under torchrun it uses the ranks that torchrun started. If they are on several hosts, the first rank of each host also
helps to measure the link between the hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditile.distributed import cpus, env, files
from ditile.distributed.backend import pick_device
from ditile.distributed.launch import launch
from ditile.distributed.mesh import Communicators
from ditile.distributed.torchrun import join_torchrun, list_ranks_by_host
from ditile.distributed.transport import gather_json
from ditile.plan.errors import PlanError
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.planner.profile import Link, Profile, RankDevice
from ditile.planner.search import make_pricer
from ditile.planner.subject import PlanSubject
from ditile.runner.load import load
from ditile.runner.model_files import defaults, find_model_source
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.runner import Runner, parallelize
from ditile_lab.machine import timings as curves
from ditile_lab.machine.options import CalibrateOptions
from ditile_lab.machine.timings import Bench
from ditile_lab.sessions import read_cpu_name

NO_LINK = Link(latency_s=0.0, bandwidth=1e12)

CALLS = (("shapes-pixart", 128), ("shapes-pixart", 256), ("shapes-flux", 128), ("shapes-flux", 256))
"""The model and the image size of each call to which the profile is fitted."""
PATCHES = (1, 4)
STEPS = 3
ROUNDS = 2
KERNEL = 1e-6
"""Seconds added to the cost of a kernel, to see how the predicted latency grows with it."""


def calibrate_machine(options: CalibrateOptions) -> Path | None:
    """Measure this machine and write the profile.

    Returns:
        The path of the profile; None on ranks of torchrun that did not write it.

    Raises:
        PlanError: if torchrun started a number of ranks other than `options.ranks`, or not the same number on each
            host.
    """
    place = env.read_torchrun_place()
    profile: Profile | None
    if place is not None and place.world > 1:
        profile = _calibrate_torchrun_group(options)
    else:
        profile = _calibrate_this_machine(options)
    if profile is None:
        return None
    path = Path(options.out) if options.out is not None else env.find_profile_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, profile.to_json() + "\n")
    return path


def _calibrate_this_machine(options: CalibrateOptions) -> Profile:
    """Measure the profile with ranks that this process starts."""
    ranks = options.ranks or torch.cuda.device_count()
    if not ranks:
        # Start as many ranks as there are cores for.
        num_cores = os.cpu_count() or 1
        ranks = max(1, num_cores // options.threads)
    profile = _launch_single_rank(options, ranks)
    if ranks == 1:
        return profile
    links = _launch(measure_links, ranks, options)
    return dataclasses.replace(profile, **links)


def _launch(measure: Callable[[str], Any], ranks: int, options: CalibrateOptions) -> Any:
    """Run `measure` on new ranks; return the result of the first rank."""
    return launch(measure, ranks, (_choose_dtype(options),), threads=options.threads)[0]


def _calibrate_torchrun_group(options: CalibrateOptions) -> Profile | None:
    """Measure the profile with torchrun's ranks; return None on every rank except the first."""
    join_torchrun()
    hosts = list_ranks_by_host()
    counts = [len(ranks) for ranks in hosts]
    num_ranks = counts[0]
    if set(counts) != {num_ranks}:
        raise PlanError(f"the hosts have {', '.join(map(str, counts))} ranks; start as many on each")
    if options.ranks not in (None, num_ranks):
        raise PlanError(f"ranks={options.ranks}, and torchrun started {num_ranks} on each host; leave it out")
    profile = None
    if dist.get_rank() == 0:
        profile = _launch_single_rank(options, num_ranks)
    # The other ranks wait here, so that the first rank measures an idle machine.
    dist.barrier()
    if not torch.cuda.device_count():
        torch.set_num_threads(options.threads)
    links: dict[str, Any] = measure_links(_choose_dtype(options), hosts)
    return None if profile is None else dataclasses.replace(profile, **links)


def _launch_single_rank(options: CalibrateOptions, ranks: int) -> Profile:
    """Measure the profile with a single rank in its own process; the machine has `ranks` ranks."""
    alone: Profile = _launch(measure_single_rank, 1, options)
    return dataclasses.replace(alone, devices=ranks, name=options.name or alone.name)


def _choose_dtype(options: CalibrateOptions) -> str:
    if options.dtype is not None:
        return options.dtype
    return "bfloat16" if torch.cuda.device_count() else "float32"


@contextlib.contextmanager
def _show_parts(title: str, total: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show the progress of a measurement on its own rank; yield a function to call after each part."""
    # The parent sees every report of a rank, and a call sends more of them than it has parts.
    with show_progress_bar(title, total, shown=shown) as advance:

        def end_part() -> None:
            env.report_progress()
            advance(1)

        yield end_part


def measure_single_rank(dtype: str) -> Profile:
    """Measure the profile of a single rank: the curves, and the costs of real calls that the curves do not show."""
    silence_libraries()
    with _show_parts("measuring one rank", curves.PARTS + len(CALLS) * len(PATCHES) * ROUNDS) as end_part:
        return fit_bundled_calls(_measure_curves(dtype, end_part), dtype, end_part)


def _measure_curves(dtype: str, end_part: Callable[[], None]) -> Profile:
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = pick_device(None, 0)
    bench = Bench(device, getattr(torch, dtype), end_part)
    is_gpu = device.type == "cuda"
    if is_gpu:
        # The memory of the process itself is not on the device.
        idle = 0
    name, device_memory = _describe_device(device)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Profile(
        name=name,
        source=f"measured by ditile calibrate on {name}, torch {torch.__version__}, {today}",
        memory_bytes=device_memory,
        element_size=getattr(torch, dtype).itemsize,
        matmul=curves.measure_matmul(bench),
        attention=curves.measure_attention(bench),
        head=curves.measure_head_sizes(bench),
        pointwise=curves.measure_pointwise(bench),
        kernel_s=0.0,
        runs_ahead=is_gpu,
        micro_s=0.0,
        link=NO_LINK,
        idle_bytes=idle,
        host_memory_bytes=cpus.count_memory_bytes(),
    )


def _describe_device(device: torch.device) -> tuple[str, int]:
    """Return the name of a rank's hardware, and the bytes of its memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    return f"{read_cpu_name()}, {cpus.count_usable_cores()} cores", cpus.count_memory_bytes()


def measure_links(dtype: str, hosts: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
    """Measure the links within a host and between hosts, and the device of each rank; every rank must call this.

    If each host has one rank, both links are the link between hosts.

    Args:
        dtype: the dtype of the messages.
        hosts: the ranks of each host; by default all ranks are on one host.
    """
    silence_libraries()
    hosts = hosts or [range(dist.get_world_size())]
    place = env.read_torchrun_place()
    local_rank = dist.get_rank() if place is None else place.local_rank
    device = pick_device(None, local_rank)
    interlink = None
    num_links = (len(hosts) > 1) + (len(hosts[0]) > 1)
    total = num_links * curves.LINK_PARTS + 1
    with _show_parts(f"measuring {dist.get_world_size()} ranks", total, shown=dist.get_rank() == 0) as end_part:
        if len(hosts) > 1:
            interlink = measure_link_of_ranks(dtype, device, [ranks[0] for ranks in hosts], end_part)
        link = interlink or NO_LINK
        if len(hosts[0]) > 1:
            link = measure_link_of_ranks(dtype, device, hosts[0], end_part)
        devices = measure_rank_devices(dtype, device, end_part)
    return {"link": link, "interlink": interlink, "ranks": devices}


def measure_rank_devices(dtype: str, device: torch.device, end_part: Callable[[], None]) -> tuple[RankDevice, ...]:
    """Compare the devices of all ranks while they compute at once; every rank must call this."""
    rate = curves.measure_rank_rate(Bench(device, getattr(torch, dtype), end_part))
    measured = gather_json([*_describe_device(device), rate], dist.group.WORLD)
    _, _, first_rate = measured[0]
    return tuple(RankDevice(name=name, memory_bytes=size, speed=each / first_rate) for name, size, each in measured)


def measure_link_of_ranks(dtype: str, device: torch.device, ranks: Sequence[int], end_part: Callable[[], None]) -> Link:
    """Measure the link between some ranks. All ranks must call this; ranks that are not in `ranks` wait."""
    group = None
    if len(ranks) < dist.get_world_size():
        group = Communicators().get_or_make_group("calibrate", ranks, None)
    link = NO_LINK
    if dist.get_rank() in ranks:
        # gloo can send only tensors in the host's memory.
        sends_from = device if "nccl" in dist.get_backend() else torch.device("cpu")
        link = curves.measure_link(Bench(sends_from, getattr(torch, dtype), end_part, group))
    dist.barrier()
    return link


def fit_bundled_calls(profile: Profile, dtype: str, end_part: Callable[[], None]) -> Profile:
    """Add costs that the curves do not show to a profile, from calls of the bundled models."""
    calls = []
    for model in dict.fromkeys(model for model, _ in CALLS):
        for patches in PATCHES:
            pipe: Any = load(model, dtype=dtype)
            pipe.set_progress_bar_config(disable=True)
            # One of the costs is the host's time for a kernel, which recorded steps do not have.
            # `trust_code` allows the hooks that take the times, because they change nothing.
            runner = parallelize(pipe, Plan(patches=patches), cuda_graphs=False, trust_code=True)
            calls += [_FittedCall(runner, model, size, patches) for name, size in CALLS if name == model]
    # The calls take turns, so that a machine that slows down over time slows all of them alike.
    for _ in range(ROUNDS):
        for call in calls:
            call.times.append(call.time_denoising_loop())
            end_part()
    measured = []
    outside: list[float] = []
    for call in calls:
        known, kernels = _separate_kernels(call, profile)
        measured.append((statistics.median(loop.inside for loop in call.times), known, kernels))
        outside += [loop.outside / loop.gaps for loop in call.times]
    return dataclasses.replace(curves.fit_kernel_costs(profile, measured), micro_s=statistics.median(outside))


@dataclasses.dataclass(slots=True)
class _FittedCall:
    """A call of a bundled model to which the profile is fitted, and the measured times of its denoising loop."""

    runner: Runner
    model: str
    size: int
    patches: int
    times: list[_LoopSeconds] = dataclasses.field(default_factory=list)

    @property
    def arguments(self) -> CallArguments:
        """Return the arguments of the call, except prompt and generator."""
        sizes = {"height": self.size, "width": self.size, "num_inference_steps": STEPS}
        return defaults(self.model) | sizes

    def time_denoising_loop(self) -> _LoopSeconds:
        """Run the call once and measure its denoising loop."""
        times = []

        def record_time(*_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())

        transformer = self.runner.pipe.transformer
        hooks = [transformer.register_forward_pre_hook(record_time), transformer.register_forward_hook(record_time)]
        generator = torch.Generator().manual_seed(0)
        self.runner("a red circle", output_type="latent", generator=generator, **self.arguments)
        for hook in hooks:
            hook.remove()
        # The times alternate between the beginning and the end of a call of the transformer.
        begins = times[::2]
        ends = times[1::2]
        inside = sum(end - begin for begin, end in zip(begins, ends, strict=True))
        gaps = zip(ends[:-1], begins[1:], strict=True)
        outside = sum(begin - end for end, begin in gaps)
        return _LoopSeconds(inside, outside, len(begins) - 1)


def _separate_kernels(call: _FittedCall, profile: Profile) -> tuple[float, float]:
    """Return a call's seconds by only the curves, and its number of kernels, from the effect of `kernel_s` on
    latency."""
    subject = PlanSubject.from_configs(call.model, find_model_source(call.model))
    shape = subject.make_call_shape(call.arguments, profile.element_size)
    job = subject.make_plan_job(Plan(patches=call.patches), shape)
    known = make_pricer(subject, call.arguments, profile).predict_latency(job)
    costly = dataclasses.replace(profile, kernel_s=KERNEL, runs_ahead=False)
    more = make_pricer(subject, call.arguments, costly).predict_latency(job)
    return known, (more - known) / KERNEL


class _LoopSeconds(NamedTuple):
    """Seconds of a denoising loop inside and outside its transformer, and the number of gaps between its calls."""

    inside: float
    outside: float
    gaps: int
