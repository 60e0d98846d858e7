"""Fits a GPU's profile to ranks that were measured alone: the host's time, and gaps between kernels.

    ditile bench --alone --plans "ulysses=4; ring=4; tensor=4; distrifusion=4; pipefusion=4 patches=4; ulysses=8" \
        --model "random-flux blocks=19 heads=24 head_dim=128" --height 1024 --width 1024
    python -m benchmarks.host_fit ditile-bench/alone.jsonl --hardware h200-nvlink --out mine.json

The plans send from none to three messages in each block, and at this size an H200's host is the limit of them. Blocks
have FLUX.1's sizes, a third of them: the host's time for one does not depend on their number.

If its calls are not recorded and its host is the limit, a step of a rank takes

    block_s * (calls of blocks) + call_s * (messages) + micro_s * (calls of the transformer)

The planner counts the first and the last factor, and the lines have the second. If calls are recorded, the GPU is the
limit: the time of a step beyond the work that the planner counts is spread evenly over its kernels (`kernel_gap_s`).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ditile.distributed import files
from ditile.plan.errors import DitileError, ModelError
from ditile.plan.schedule import OpKind
from ditile.planner.ops import CacheSkips, OpPricer
from ditile.planner.profile import Profile
from ditile.planner.question import PlanQuestion, load_machine_profile
from ditile.planner.search import make_pricer
from ditile_lab.bench.cells import BenchCell
from ditile_lab.bench.options import Workload
from ditile_lab.bench.subjects import create_bench_subject
from ditile_lab.rows import MAX_BYTES

HOST_IS_LIMIT = 1.2
"""A host is the limit of a step that takes this many times as long as its kernels; their seconds may be off by less."""
FREE = 1e18
"""Bytes a second of a link that takes no time."""
WRITER = "`ditile bench --alone`"
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Pixels = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """The machine of a line; a CPU has no GPUs."""

    gpus: tuple[str, ...]
    __pydantic_config__ = ConfigDict(extra="ignore")


@dataclass(frozen=True, kw_only=True, slots=True)
class AloneLine:
    """A line of `alone.jsonl`: a rank of a plan, or the plain pipeline, which has no plan.

    Attributes:
        model, plan, rank, steps: the measured rank; `steps` are those of a short and a long call.
        height, width: pixels; None is the model's own size.
        recorded: whether its calls were recorded.
        step_s, device_s: seconds of a step, and the part in which kernels ran, if known.
        messages: in a step.
        machine: of the measurement, if known.
    """

    model: str
    plan: str
    rank: Annotated[int, Field(ge=0)]
    steps: tuple[int, int]
    step_s: Seconds
    height: Pixels | None = None
    width: Pixels | None = None
    recorded: bool = False
    device_s: Seconds | None = None
    messages: Number = 0.0
    machine: MeasuredMachine | None = None
    __pydantic_config__ = ConfigDict(extra="ignore")


class CountedStep(NamedTuple):
    """The work of a rank in a step, according to the planner.

    Attributes:
        device_s: seconds of its kernels' work.
        kernels, blocks, calls: the numbers of kernels, calls of blocks, and calls of the transformer.
    """

    device_s: float
    kernels: float
    blocks: float
    calls: int


def read_alone_lines(path: str | Path) -> list[AloneLine]:
    """Read the lines of a file written by `ditile bench --alone`.

    Raises:
        ModelError: if the file cannot be read, or a line has another form or is of a CPU.
    """
    try:
        texts = files.read_file(path, MAX_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ModelError(f"alone={str(path)!r} cannot be read: {error}") from error
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = TypeAdapter(AloneLine).validate_json(text)
        except ValidationError as invalid:
            row = invalid.errors(include_url=False)[0]
            what = ".".join(map(str, row["loc"])) or "it"
            raise ModelError(f"alone={str(path)!r}: line {number} is none of {WRITER} ({what}: {row['msg']})") from None
        if line.machine is not None and not line.machine.gpus:
            raise ModelError(f"alone={str(path)!r}: line {number} was measured on a CPU, whose host is not apart")
        lines.append(line)
    return lines


def fit_profile(base: Profile, lines: Sequence[AloneLine]) -> Profile:
    """Fit the host and kernel terms of a profile to lines; all other terms are the base's.

    Args:
        base: a profile of the same GPU, for its curves and links.
        lines: of ranks measured on it.

    Raises:
        ModelError: if the base is not a GPU, or no two lines with different numbers of messages are limited by the
            host.
        DitileError: if a line's model or plan is unknown.
    """
    if not base.runs_ahead:
        raise ModelError(f"alone=: the host of a GPU is fitted, and {base.name} is a CPU; give --hardware NAME")
    counted = [(line, count_step(base, line)) for line in select_slowest_ranks(lines)]
    gap_s = fit_kernel_gap(counted)
    if gap_s is None:
        gap_s = base.kernel_gap_s
    limited = []
    for line, step in counted:
        device_s = line.device_s or step.device_s + step.kernels * gap_s
        # The plain pipeline has no hooks of ditile, which are part of a block's seconds.
        if line.plan and not line.recorded and line.step_s > HOST_IS_LIMIT * device_s:
            limited.append((line, step))
    block_s, call_s = _fit_host_terms(limited, base.micro_s)
    link = replace(base.link, call_s=call_s, sum_s=None)
    return replace(base, block_s=block_s, kernel_gap_s=gap_s, link=link)


def select_slowest_ranks(lines: Sequence[AloneLine]) -> list[AloneLine]:
    """Select the slowest rank of each plan, which limits it: blocks of other stages may be smaller.

    A rank that was measured several times has the mean of its steps.
    """
    ranks: dict[AloneLine, list[AloneLine]] = {}
    for line in lines:
        ranks.setdefault(replace(line, step_s=1.0, device_s=None, messages=0.0), []).append(line)
    slowest: dict[AloneLine, AloneLine] = {}
    for rank, measured in ranks.items():
        mean = replace(measured[0], step_s=fmean(line.step_s for line in measured))
        plan = replace(rank, rank=0)
        if plan not in slowest or mean.step_s > slowest[plan].step_s:
            slowest[plan] = mean
    return list(slowest.values())


def _fit_host_terms(limited: Sequence[tuple[AloneLine, CountedStep]], micro_s: float) -> tuple[float, float]:
    """Fit the seconds of a block call and of a message: relative least squares, neither of them below 0."""
    terms = numpy.array([(step.blocks, line.messages) for line, step in limited]).reshape(-1, 2)
    measured = numpy.array([line.step_s for line, _ in limited])
    known = numpy.array([micro_s * step.calls for _, step in limited])
    if numpy.linalg.matrix_rank(terms) < 2:
        raise ModelError(
            "these lines do not tell a block's seconds from a message's: in two of them at least the host must be the "
            "limit, with other numbers of messages; measure --plans 'ulysses=4; distrifusion=4; pipefusion=4 patches=4'"
        )
    # A tenth of a short step is as far off as a tenth of a long one.
    relative = terms / measured[:, None]
    wanted = (measured - known) / measured
    block_s, call_s = (float(term) for term in numpy.linalg.lstsq(relative, wanted, rcond=None)[0])
    if block_s >= 0 and call_s >= 0:
        return block_s, call_s
    # One of the two terms is 0 then, and the other one is the best fit without it.
    only_blocks, only_messages = (float(column @ wanted / (column @ column)) for column in relative.T)
    return (only_blocks, 0.0) if call_s < 0 else (0.0, only_messages)


def fit_kernel_gap(counted: Sequence[tuple[AloneLine, CountedStep]]) -> float | None:
    """Fit the seconds of a GPU for each kernel besides its work.

    Returns None if no steps were recorded; only in those is the GPU the limit.
    """
    recorded = [(line.step_s, step) for line, step in counted if line.recorded]
    if not recorded:
        return None
    kernels = numpy.array([step.kernels / step_s for step_s, step in recorded])
    missing = numpy.array([1 - step.device_s / step_s for step_s, step in recorded])
    return max(0.0, float(kernels @ missing / (kernels @ kernels)))


def count_step(base: Profile, line: AloneLine) -> CountedStep:
    """Count the work of a line's rank in a step after the synchronous ones.

    Raises:
        DitileError: if its model or plan is unknown.
    """
    work = Workload(model=line.model, height=line.height, width=line.width, steps=line.steps[1])
    subject = create_bench_subject(work)
    cell = BenchCell(line.plan, "", line.height, line.width)
    job = subject.make_cost_job(cell)
    if job is None or line.rank >= job.plan.world:
        raise ModelError(f"rank {line.rank} of {line.plan!r} cannot be counted: {line.model} has no such rank")
    job = replace(job, shape=replace(job.shape, element_size=base.element_size))
    arguments = subject.make_planning_arguments(cell)
    stage = job.plan_rank(line.rank).stage
    # In these profiles each block or kernel takes one second, so the seconds of a step are their number.
    link = replace(base.link, latency_s=0.0, bandwidth=FREE, call_s=0.0, sum_s=None)
    bare = replace(base, link=link, devices=job.plan.world, kernel_s=0.0, block_s=0.0, kernel_gap_s=0.0)
    seconds = []
    num_calls = 0
    for profile in (bare, replace(bare, kernel_s=1.0), replace(bare, block_s=1.0)):
        ops = OpPricer(make_pricer(subject.planner_subject, arguments, profile), job, CacheSkips())
        step = job.shape.steps - 1
        step_ops = ops.schedule.iter_step_ops(stage, step, job.count_calls_in_step(step))
        computed = [op for op in step_ops if op.kind is OpKind.COMPUTE]
        seconds.append(sum(ops.get_op_seconds(stage, op, free=True) for op in computed))
        num_calls = len(computed)
    device_s, kernels, blocks = seconds
    return CountedStep(device_s, kernels, blocks, num_calls)


def main() -> None:
    """Writes the fitted profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", help="alone.jsonl of ditile bench --alone")
    parser.add_argument("--hardware", help="whose other figures are kept; this machine's, as calibrated, by default")
    parser.add_argument("--name", help="of the machine; that of the other figures by default")
    parser.add_argument("--out", type=Path, required=True, help="the profile to write")
    arguments = parser.parse_args()
    try:
        base = load_machine_profile(PlanQuestion(hardware=arguments.hardware))
        lines = read_alone_lines(arguments.lines)
        fitted = fit_profile(base, lines)
    except DitileError as error:
        sys.exit(str(error))
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    source = f"{base.source}; host fitted to {len(lines)} lines of ranks measured alone, {today}"
    fitted = replace(fitted, name=arguments.name or base.name, source=source)
    files.write_atomically(arguments.out, fitted.to_json() + "\n")
    print(arguments.out)


if __name__ == "__main__":
    main()
