"""The table of a plan on a model: what each rank stores and sends, and the upper bound of the speed-up."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ditile.plan.cost import PlannedCall, count_key_store_bytes, count_traffic_in_step
from ditile.plan.plan import AXES, Plan, compute_coordinates
from ditile.plan.stages import select_local_blocks
from ditile.plan.units import format_bytes

EXACT = ("data", "cfg", "ring", "distrifusion", "ulysses", "tensor")
"""Axes that divide all of the work, in every step."""


COLUMNS = ("rank", "device", "place", "blocks", "tokens", "parameters", "stale keys", "sent a step")
DERIVED_COLUMNS = ("rank", "device", "place", "blocks", "parameters")
"""Those that a model without a `ModelSpec` decides; the others depend on the call."""


def describe_plan(model: str, job: PlannedCall, devices: Sequence[str], parameters: Sequence[int] | None = None) -> str:
    """The table as text, for 80 columns.

    Args:
        model: the name that the table shows.
        job: the call under its plan.
        devices: the device of each rank.
        parameters: the number that each rank has; by default an estimate, which divides norms and biases too.
    """
    plan, shape, weights = job.plan, job.shape, job.weights
    rows = [job.image_layout.count_rows(patch) for patch in range(job.image_layout.num_patches)]
    table = _make_rank_table()
    for rank, device in enumerate(devices):
        place = job.locate_rank(rank)
        owned, part = job.stages[place.stage], job.token_split.shard_tokens(job.image_layout, None)[place.rank]
        num_parameters = _count_expected_parameters(job, place.stage) if parameters is None else parameters[rank]
        sent = count_traffic_in_step(job, rank, max(0, shape.steps - 2))
        cells = (
            _format_rank_place(plan, rank),
            f"{owned.start}-{owned.stop - 1} ({len(owned)})",
            f"{part.image_tokens:,}" + (f" + {len(part.text):,}" if part.text else ""),
            f"{num_parameters / 1e6:,.2f} M",
            format_bytes(count_key_store_bytes(job, rank)),
            "\n".join(f"{kind}\n  {format_bytes(size)}" for kind, size in sent.items()) or "0 B",
        )
        table.add_row(str(rank), device, *cells)
    return _render_as_text(
        f"{model}: {job.spec.name}, {len(weights.blocks)} blocks, "
        f"{weights.count_stage_parameters(range(len(weights.blocks))) / 1e6:,.2f} M",
        f"plan: {plan}",
        f"image: {shape.width} x {shape.height} px, {shape.num_tokens} tokens ({shape.text} of text), "
        f"{shape.steps} steps, batch {shape.batch}, {shape.calls} call(s) per step",
        f"patches: {len(rows)} of {', '.join(map(str, rows))} token rows",
        table,
        f"speed-up over one rank: at most {_format_speed_up_bound(job)}",
        *filter(None, [plan.advice(job.step_schedule.bound_speedup(job.count_calls_in_step(1)))]),
    )


def describe_derived_model(
    pipeline: str, model: str, plan: Plan, devices: Sequence[str], parameters: Sequence[int], stages: Sequence[range]
) -> str:
    """The table for a model without a `ModelSpec`: the columns that do not depend on a call.

    Args:
        pipeline, model: the names of their classes.
        plan: of the ranks.
        devices, parameters: of each rank.
        stages: the blocks of each stage; empty where a model is not cut.
    """
    table = _make_rank_table(DERIVED_COLUMNS)
    for rank, device in enumerate(devices):
        weights, place = f"{parameters[rank] / 1e6:,.2f} M", compute_coordinates(plan, rank)["pipefusion"]
        owned = stages[place] if plan.pipefusion > 1 else range(0)
        blocks = f"{owned.start}-{owned.stop - 1} ({len(owned)})" if owned else "all"
        table.add_row(str(rank), device, _format_rank_place(plan, rank), blocks, weights)
    return _render_as_text(
        f"{pipeline}: {model}, which has no ModelSpec",
        f"plan: {plan}",
        table,
        "stale keys and bytes sent depend on the call: runner.reports() has them after it",
    )


def _make_rank_table(columns: Sequence[str] = COLUMNS) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in columns:
        table.add_column(title, no_wrap=True)
    return table


def _format_rank_place(plan: Plan, rank: int) -> str:
    """The coordinates of a rank on the axes that are used; "-" if none is."""
    at = compute_coordinates(plan, rank)
    names = {"pipefusion": "stage"}
    used = [name for name in AXES if getattr(plan, name) > 1]
    return "\n".join(f"{names.get(name, name)} {at[name]}" for name in used) or "-"


def _count_expected_parameters(job: PlannedCall, stage: int) -> int:
    """The parameters of a rank of a stage: those of its blocks over the tensor degree."""
    owned = sum(
        job.weights.blocks[block] for block in select_local_blocks(job.stages, stage, job.plan.num_whole_stages)
    )
    return job.weights.shared + -(-owned // job.plan.tensor)


def _format_speed_up_bound(job: PlannedCall) -> str:
    """The bound of the stages, times the degrees that divide every step; data parallelism makes more images."""
    parts = compute_axis_bounds(job)
    named = " x ".join(f"{name} {bound:.2f}".removesuffix(".00") for name, bound in parts.items())
    return f"{math.prod(parts.values()):.2f}x" + (f" ({named})" if len(parts) > 1 else "")


def compute_axis_bounds(job: PlannedCall) -> dict[str, float]:
    """The bound on each axis that is used; their product is that of the plan."""
    exact = {name: float(getattr(job.plan, name)) for name in EXACT if getattr(job.plan, name) > 1}
    if job.plan.pipefusion == 1:
        return exact
    return {"pipefusion": job.step_schedule.bound_speedup(job.count_calls_in_step(1))} | exact


def _render_as_text(*parts: str | Table) -> str:
    console = Console(file=io.StringIO(), width=140, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    return captured.get().rstrip()
