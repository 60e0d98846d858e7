"""What shares of unlike size bring two ranks of which one is held to half a core by a quota.

    python -m benchmarks.unlike_ranks                # six minutes on two idle cores, as root

The fast rank alone, and both with equal shares and with shares of two to one, take turns; each time is the best of
`--rounds`. Two to one could be 1.5 times as fast as the fast rank alone, where cores that are busy at once do not slow
each other: what that costs here is the fast rank's time while the slow one makes an image of its own. A quota of
Linux's control groups lets the slow rank compute for half of each `PERIOD`; the planner's prediction for such a pair is
beside the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ditile.distributed.launch import launch
from ditile.plan.plan import Plan
from ditile.planner.hardware import join_devices, load_profile
from ditile.planner.profile import RankDevice
from ditile.planner.search import make_pricer
from ditile.runner.runner import parallelize
from ditile_lab.bench.cells import ONE_RANK, BenchCell
from ditile_lab.bench.options import Workload
from ditile_lab.bench.subjects import RandomSubject

MODEL = "random-pixart blocks=12 heads=8 head_dim=32"
SIDE = 512
STEPS = 10
WEIGHTS = {
    "pipefusion=2 patches=2": "stage_weights=2,1",
    "ring=2": "token_weights=2,1",
    "ulysses=2": "token_weights=2,1",
    "distrifusion=2": "token_weights=2,1",
    "tensor=2": "tensor_weights=2,1",
}
"""Plan -> the shares of a rank and of one of half its speed."""
PERIOD = 10_000
"""Microseconds of which the slow rank has half."""
ALONE = "the fast rank alone"
BESIDE = "the same beside a busy core"
GROUPS = Path("/sys/fs/cgroup")
NAME = "ditile-unlike-ranks"


@contextlib.contextmanager
def make_half_core() -> Iterator[Path]:
    """A control group that has half of a core; yields the file that processes are written to."""
    is_first_version = (GROUPS / "cpu").exists()
    group = GROUPS / "cpu" / NAME if is_first_version else GROUPS / NAME
    group.mkdir(exist_ok=True)
    try:
        if is_first_version:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD // 2))
        else:
            (group / "cpu.max").write_text(f"{PERIOD // 2} {PERIOD}")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def time_plans(processes: str, rounds: int) -> dict[str, float]:
    """On a rank: seconds of each plan, and of the fast rank without a plan."""
    rank = dist.get_rank()
    if rank == 1:
        Path(processes).write_text(str(os.getpid()))
    subject = RandomSubject(Workload(model=MODEL, steps=STEPS, output="latent"), MODEL)
    cell = BenchCell(ONE_RANK, "", SIDE, SIDE)
    pipe = subject.create_pipeline(None)
    pipe.set_progress_bar_config(disable=True)

    def generate_alone() -> None:
        if rank == 0:
            generate_beside()

    def generate_beside() -> None:
        pipe(**subject.make_call_arguments(pipe, cell, torch.device("cpu")))

    def generate_with_plan(text: str) -> Callable[[], None]:
        return lambda: _generate(runner_of(text), subject, cell)

    def runner_of(text: str) -> Any:
        return parallelize(pipe, Plan.parse(text), keep_weights=True)

    calls: dict[str, Callable[[], None]] = {ALONE: generate_alone, BESIDE: generate_beside}
    for plan, weights in WEIGHTS.items():
        calls |= {plan: generate_with_plan(plan), f"{plan} {weights}": generate_with_plan(f"{plan} {weights}")}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    # The slow rank leaves the group, which can only be removed without processes.
    if rank == 1:
        Path(processes).parent.parent.joinpath("cgroup.procs").write_text(str(os.getpid()))
    return {name: min(times) for name, times in seconds.items()}


def _generate(runner: Any, subject: RandomSubject, cell: BenchCell) -> None:
    runner(**subject.make_call_arguments(runner.pipe, cell, torch.device("cpu")))
    runner.restore()


def predict_plans() -> dict[str, float]:
    """The planner's seconds of the same calls, on two ranks of the bundled CPU of which one has half the speed."""
    subject = RandomSubject(Workload(model=MODEL, steps=STEPS, output="latent"), MODEL)
    arguments = subject.make_planning_arguments(BenchCell(ONE_RANK, "", SIDE, SIDE))
    profile = load_profile("epyc-2-cores")
    ranks = [RankDevice(name="", memory_bytes=profile.memory_bytes, speed=speed) for speed in (1.0, 0.5)]
    joined = join_devices(dataclasses.replace(profile, ranks=tuple(ranks)).list_measured_ranks())
    planned = subject.planner_subject
    pricer = make_pricer(planned, arguments, joined)
    shape = planned.make_call_shape(arguments)
    plans = {ALONE: "", **{plan: plan for plan in WEIGHTS}}
    for plan, weights in WEIGHTS.items():
        plans[f"{plan} {weights}"] = f"{plan} {weights}"
    return {
        name: pricer.predict_latency(planned.make_plan_job(Plan.parse(plan), shape)) for name, plan in plans.items()
    }


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    predicted = predict_plans()
    with make_half_core() as processes:
        measured = launch(time_plans, 2, (str(processes), asked.rounds), threads=1)[0]
    table = Table("plan", "shares", "seconds", "of the fast rank alone", "of equal shares", "predicted", "of equal")
    table.add_row(ALONE, "", f"{measured[ALONE]:.2f}")
    table.add_row(BESIDE, "", f"{measured[BESIDE]:.2f}", f"{measured[ALONE] / measured[BESIDE]:.2f}x")
    for plan, weights in WEIGHTS.items():
        for text, shares in ((plan, "equal"), (f"{plan} {weights}", weights)):
            cells = [plan, shares, f"{measured[text]:.2f}"]
            for seconds in (measured, predicted):
                cells += [f"{seconds[ALONE] / seconds[text]:.2f}x", f"{seconds[plan] / seconds[text]:.2f}x"]
            table.add_row(*cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
