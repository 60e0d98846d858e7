"""The session of `ditile bench --alone`, in its own process: the plain pipeline, then ranks of each plan."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ditile.distributed import env
from ditile.distributed.backend import pick_device
from ditile.model.support import find_loop_model
from ditile.plan.cost import PlannedCall
from ditile.plan.option_classes import CallArguments, drop_missing
from ditile.plan.plan import Plan
from ditile.planner import hardware
from ditile.planner.price import Pricer
from ditile.planner.profile import Profile
from ditile.planner.search import make_pricer
from ditile.planner.seconds import DeviceLoad
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.prepare import silence_advice, silence_libraries
from ditile_lab.bench.cells import ONE_RANK, BenchCell
from ditile_lab.bench.options import Workload
from ditile_lab.bench.subjects import BenchSubject, create_bench_subject
from ditile_lab.machine.rank_steps import MeasuredCalls, RankStep, measure_plain, measure_rank
from ditile_lab.machine.step_parts import StepParts, compute_step_parts, find_busiest_stage
from ditile_lab.rows import Row, RowFile

ROWS = "alone.jsonl"
ANY_HARDWARE = "h200-nvlink"
"""Hardware whose prices find the stage with most computation if no machine is named; its links do not count then."""


@dataclass(frozen=True, kw_only=True)
class AloneTask:
    """The task of the session.

    Attributes:
        steps: the numbers of steps in a short and in a long call.
        rounds: the number of timings of each call.
        all_ranks: whether all ranks of a plan are measured.
        recorded: whether each rank is also measured with recorded steps, if its plan allows it.
        profile: the machine whose links are priced; None for no links.
        facts: the common fields of all rows.
        out: the folder of the rows.
    """

    work: Workload
    cells: Sequence[BenchCell]
    steps: tuple[int, int]
    rounds: int
    all_ranks: bool
    recorded: bool
    profile: Profile | None
    facts: Row
    out: str


def measure_alone(task: AloneTask) -> list[Row]:
    """Measure all plans, and return a row for the plain pipeline and for each measured rank."""
    silence_libraries()
    with silence_advice():
        return _measure_plans(task)


def _measure_plans(task: AloneTask) -> list[Row]:
    # `launch` has made a group of this one process; the ranks of the plans take its place.
    if dist.is_initialized():
        dist.destroy_process_group()
    device = pick_device(task.work.device, 0)
    subject = create_bench_subject(task.work)
    pipe = subject.create_whole_pipeline(device)
    file = RowFile(Path(task.out, ROWS), "model")
    file.path.parent.mkdir(exist_ok=True)
    # A runner reports its steps by itself; without this hook a plain pipeline would look like a rank that hangs.
    hook = find_loop_model(pipe).register_forward_pre_hook(lambda *_: env.report_progress())
    plain_cell = task.cells[0].one_rank_baseline
    calls = _plan_calls(task, subject, plain_cell, device)
    plain = measure_plain(pipe, calls)
    hook.remove()
    plain_steps = [plain]
    if task.recorded:
        plain_steps.append(measure_rank(pipe, Plan(), 0, calls, recorded=True))
    rows = []
    for step in plain_steps:
        times = plain.step_s / step.step_s
        rows.append(_make_row(task, plain_cell, step) | {"plan_step_s": step.step_s, "times_plain": times})
    file.append(rows)
    with show_progress_bar("plans", len(task.cells)) as advance:
        for cell in task.cells:
            cell_rows = _measure_cell(task, subject, cell, pipe, device)
            for row in cell_rows:
                # A plan with replicas makes an image on each of them.
                row["times_plain"] = cell.num_images * plain.step_s / row["plan_step_s"]
            file.append(cell_rows)
            rows += cell_rows
            advance(1)
    return rows


def _plan_calls(task: AloneTask, subject: BenchSubject, cell: BenchCell, device: torch.device) -> MeasuredCalls:
    def make_arguments(pipe: Any, steps: int) -> CallArguments:
        arguments = subject.make_call_arguments(pipe, cell, device)
        return arguments | {"num_inference_steps": steps, "output_type": "latent"}

    return MeasuredCalls(device=device, steps=task.steps, rounds=task.rounds, make_arguments=make_arguments)


def _measure_cell(
    task: AloneTask, subject: BenchSubject, cell: BenchCell, pipe: Any, device: torch.device
) -> list[Row]:
    """Measure a plan's ranks; each row also has the parts of the plan's step."""
    plan = cell.plan_object
    job = subject.make_cost_job(cell)
    pricer = None
    if job is not None:
        job = _size_job(job, task, next(find_loop_model(pipe).parameters()).element_size())
        # The links are those of the named machine; each rank has its own device, like the one that measures.
        profile = task.profile or hardware.load_profile(ANY_HARDWARE)
        profile = replace(
            profile, devices=max(profile.devices, cell.num_ranks), together=1.0, runs_ahead=device.type == "cuda"
        )
        pricer = make_pricer(subject.planner_subject, subject.make_planning_arguments(cell), profile)
    calls = _plan_calls(task, subject, cell, device)
    ranks = choose_measured_ranks(job, pricer, plan.world, all_ranks=task.all_ranks)
    rows = []
    ways = [False]
    if task.recorded and plan.can_be_recorded:
        ways.append(True)
    for recorded in ways:
        steps = [measure_rank(pipe, plan, rank, calls, recorded=recorded) for rank in ranks]
        parts = compute_plan_step(steps, job, pricer, has_links=task.profile is not None)
        for step in steps:
            row = _make_row(task, cell, step)
            row |= {"plan_step_s": parts.step_s, "waiting_s": parts.waiting_s}
            if task.profile is not None and job is not None:
                row |= {"link_s": parts.link_s, "links_of": task.profile.name}
            rows.append(row)
    return rows


def _size_job(job: PlannedCall, task: AloneTask, element_size: int) -> PlannedCall:
    """Set the steps and the type of numbers of the measurement in a job."""
    return replace(job, shape=replace(job.shape, steps=task.steps[1], element_size=element_size))


def choose_measured_ranks(job: PlannedCall | None, pricer: Pricer | None, world: int, *, all_ranks: bool) -> list[int]:
    """Choose all ranks, or the first one, the last one and the first of the stage with most computation."""
    if all_ranks:
        return list(range(world))
    ranks = {0, world - 1}
    if job is not None and pricer is not None and job.plan.pipefusion > 1:
        busiest = find_busiest_stage(pricer, job)
        stages = [job.plan_rank(rank).stage for rank in range(world)]
        ranks.add(stages.index(busiest))
    return sorted(ranks)


def compute_plan_step(
    steps: Sequence[RankStep], job: PlannedCall | None, pricer: Pricer | None, *, has_links: bool
) -> StepParts:
    """Compute the step of a plan from the steps that its ranks took alone.

    A stage takes as long as its slowest measured rank; a stage without a measured rank takes as long as the slowest of
    all.
    """
    slowest = max(steps, key=lambda step: step.step_s)
    if job is None or pricer is None:
        return StepParts(slowest.step_s, 0.0, 0.0)
    loads = []
    for stage in range(job.plan.pipefusion):
        of_stage = [step for step in steps if job.plan_rank(step.rank).stage == stage]
        step = max(of_stage, key=lambda step: step.step_s, default=slowest)
        if step.device_s is None:
            loads.append(DeviceLoad(device=step.step_s, host=0.0))
        else:
            # Time that neither the kernels nor the host account for is a wait of one for the other.
            loads.append(DeviceLoad(device=step.device_s, host=step.step_s))
    parts = compute_step_parts(pricer, job, loads)
    if has_links:
        return parts
    return StepParts(parts.step_s - parts.link_s, 0.0, parts.waiting_s)


def _make_row(task: AloneTask, cell: BenchCell, step: RankStep) -> Row:
    world = 1 if cell.plan == ONE_RANK else cell.num_ranks
    row = dict(task.facts) | {
        "plan": cell.plan,
        "height": cell.height,
        "width": cell.width,
        "steps": list(task.steps),
        "world": world,
        "rank": step.rank,
        "recorded": step.recorded,
        "as_code": step.as_code or None,
        "problem": step.problem or None,
        "step_s": step.step_s,
        "host_s": step.host_s,
        "device_s": step.device_s,
        "messages": step.messages,
        "sent_bytes": step.sent_bytes,
        "call_s": list(step.call_s),
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return drop_missing(row)
