"""Predicted scaling on large clusters: 8 to 512 devices, two jobs, two kinds of cluster.

    python -m benchmarks.scale docs/images/scale.png          # the tables as Markdown, the figure as a file

For each group of methods and number of devices, plans are simulated in the order of the seconds for which their busiest
stage is occupied, also with other ways to run their synchronous steps.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from ditile.model.known import CONFIGS
from ditile.plan.numbers import format_number
from ditile.plan.plan import Plan
from ditile.planner.hardware import load_profile
from ditile.planner.search import SIMULATED, PlanSearch, SearchRequest
from ditile.planner.subject import PlanSubject

DEVICES = (8, 16, 32, 64, 128, 256, 512)
IN_A_HOST = 8
GROUPS: dict[str, Callable[[Plan], bool]] = {
    "tensor": lambda plan: plan.tensor * plan.cfg == plan.world,
    "sequence": lambda plan: plan.ulysses * plan.ring * plan.cfg == plan.world,
    "DistriFusion": lambda plan: plan.distrifusion * plan.cfg == plan.world,
    "PipeFusion": lambda plan: plan.pipefusion * plan.cfg == plan.world,
    "all together": lambda plan: True,
}
"""Methods by themselves, each with cfg where there is guidance, and any product of all."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts of eight devices."""

    name: str
    hardware: str
    interlink: str


CLUSTERS = (
    Cluster("L40 on PCIe, 100 Gbit Ethernet a host", "l40-pcie", "100Gbit"),
    Cluster("H100 on NVLink, 8 x 400 Gbit InfiniBand a host", "h100-nvlink", "3200Gbit"),
)


@dataclass(frozen=True, slots=True)
class ScalingTask:
    """A model and a call."""

    name: str
    subject: PlanSubject
    call: Mapping[str, Any]


def make_flux_task() -> ScalingTask:
    """FLUX.1-dev at 4096 x 4096, 28 steps."""
    subject = PlanSubject.from_configs("flux.1-dev", CONFIGS / "flux.1-dev")
    call = {"prompt": "a prompt", "height": 4096, "width": 4096, "num_inference_steps": 28}
    return ScalingTask("FLUX.1-dev, 4096 px, 28 steps", subject, call)


def make_wan_task() -> ScalingTask:
    """Wan2.1-14B, 81 frames of 720p, 50 steps of two calls; its decode is left out."""
    known = PlanSubject.from_configs("wan2.1-t2v-14b", CONFIGS / "wan2.1-t2v-14b")
    call = {"height": 720, "width": 1280, "num_frames": 81, "num_inference_steps": 50, "guidance_scale": 5.0}
    subject = replace(known, decoder=None)
    return ScalingTask("Wan2.1-14B, 720p, 81 frames, 50 steps", subject, call)


@dataclass(frozen=True, slots=True)
class Best:
    """The best plan of a group."""

    plan: Plan
    seconds: float
    memory_bytes: int


def find_best_plans(task: ScalingTask, cluster: Cluster, devices: int) -> dict[str, Best]:
    """Of every group that has a plan which uses all devices and fits their memory."""
    machine = load_profile(cluster.hardware, cluster.interlink)
    request = SearchRequest(devices=devices, hosts=max(1, devices // IN_A_HOST), warmup=1, all_devices=True)
    search = PlanSearch(task.subject, task.call, machine, request)
    best_plans: dict[str, Best] = {}
    num_simulated = Counter[str]()
    for bound, job in search.sort_jobs_by_bound():
        for name, belongs in GROUPS.items():
            is_hopeless = num_simulated[name] >= SIMULATED and bound > best_plans[name].seconds
            if not belongs(job.plan) or is_hopeless:
                continue
            for plan in (job.plan, *search.iterate_other_warmups(job)):
                placed = search.fit_plan_to_memory(plan)
                if placed.memory > machine.memory_bytes:
                    continue
                num_simulated[name] += 1
                seconds = search.pricer.predict_latency(placed.job)
                if name not in best_plans or seconds < best_plans[name].seconds:
                    best_plans[name] = Best(placed.job.plan, seconds, placed.memory)
    return {name: best_plans[name] for name in GROUPS if name in best_plans}


def as_markdown(task: ScalingTask, cluster: Cluster, best_plans: Mapping[int, Mapping[str, Best]]) -> Iterator[str]:
    """A table: seconds of each group over devices, and the plan of the best."""
    yield f"### {task.name}: {cluster.name}\n"
    yield f"| devices | {' | '.join(GROUPS)} | memory | plan |"
    yield f"|--:|{'--:|' * (len(GROUPS) + 1)}:--|"
    for devices, groups in best_plans.items():
        cells = [f"{format_number(groups[name].seconds)} s" if name in groups else "" for name in GROUPS]
        whole = groups["all together"]
        yield f"| {devices} | {' | '.join(cells)} | {whole.memory_bytes / 1e9:.0f} GB | `{whole.plan}` |"
    yield ""


def main() -> None:
    """Prints the tables and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path, help="the picture to write")
    figure = parser.parse_args().figure
    cells = [(task, cluster) for task in (make_flux_task(), make_wan_task()) for cluster in CLUSTERS]
    best_plans = {
        (task.name, cluster.name): {
            devices: find_best_plans(task, cluster, devices)
            for devices in track(DEVICES, cluster.name, console=Console(stderr=True))
        }
        for task, cluster in cells
    }
    for task, cluster in cells:
        print("\n".join(as_markdown(task, cluster, best_plans[task.name, cluster.name])))
    from benchmarks.plots import scaling

    scaling(
        {
            f"{task}\n{cluster}": {
                name: {d: groups[name].seconds for d, groups in by_devices.items() if name in groups} for name in GROUPS
            }
            for (task, cluster), by_devices in best_plans.items()
        },
        figure,
    )


if __name__ == "__main__":
    main()
