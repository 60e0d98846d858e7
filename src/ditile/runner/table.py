"""The table of a plan on a model: what each rank holds, keeps and sends, and how fast it can get at best."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ditile.plan.cost import PlannedCall, count_key_store_bytes, count_traffic_in_step
from ditile.plan.plan import AXES, Plan, compute_coordinates
from ditile.plan.stages import select_local_blocks
from ditile.plan.units import format_bytes

EXACT = ("data", "cfg", "ring", "distrifusion", "ulysses", "tensor")
"""Axes that divide all of the work, in every step."""


def describe_plan(model: str, job: PlannedCall, devices: Sequence[str], parameters: Sequence[int] | None = None) -> str:
    """The table as text.

    Args:
        model: what to call it.
        job: the call under its plan.
        devices: of each rank.
        parameters: that each rank holds; by default what the plan will leave it, norms and biases not counted apart.
    """
    plan, shape, weights = job.plan, job.shape, job.weights
    rows = [job.image_layout.count_rows(patch) for patch in range(job.image_layout.num_patches)]
    table = Table("rank", "device", "place", "blocks", "tokens", "parameters", "keys and values", "sent per step")
    for rank, device in enumerate(devices):
        num_parameters = count_expected_parameters(job, rank) if parameters is None else parameters[rank]
        cells = (
            format_rank_place(plan, rank),
            format_rank_blocks(job, rank),
            format_rank_tokens(job, rank),
            f"{num_parameters / 1e6:,.2f} M",
            format_bytes(count_key_store_bytes(job, rank)),
            format_traffic(count_traffic_in_step(job, rank, max(0, shape.steps - 2))),
        )
        table.add_row(str(rank), device, *cells)
    return _render_as_text(
        f"{model}: {job.spec.name}, {len(weights.blocks)} blocks, "
        f"{weights.count_stage_parameters(range(len(weights.blocks))) / 1e6:,.2f} M",
        f"plan: {plan}",
        f"image: {shape.width} x {shape.height} px, {shape.num_tokens} tokens ({shape.text} of text), {shape.steps} steps, "
        f"batch {shape.batch}, {shape.calls} call(s) per step",
        f"patches: {len(rows)} of {', '.join(map(str, rows))} token rows",
        table,
        f"speed-up over one rank: at most {format_speed_up_bound(job)}",
        *filter(None, [plan.advice(job.step_schedule.bound_speedup(job.count_calls_in_step(1)))]),
    )


def describe_whole_model(
    pipeline: str, model: str, plan: Plan, devices: Sequence[str], parameters: Sequence[int]
) -> str:
    """The same for a model without a `ModelSpec`: every rank has the whole of its weights."""
    table = Table("rank", "device", "place", "parameters")
    for rank, device in enumerate(devices):
        table.add_row(str(rank), device, format_rank_place(plan, rank), f"{parameters[rank] / 1e6:,.2f} M")
    return _render_as_text(f"{pipeline}: {model}, which has no ModelSpec", f"plan: {plan}", table)


def format_rank_place(plan: Plan, rank: int) -> str:
    """The coordinates of a rank on the axes that are used; with one rank there are none."""
    at = compute_coordinates(plan, rank)
    names = {"pipefusion": "stage"}
    used = [name for name in AXES if getattr(plan, name) > 1]
    return "\n".join(f"{names.get(name, name)} {at[name]}" for name in used) or "-"


def format_rank_blocks(job: PlannedCall, rank: int) -> str:
    """The blocks of a rank: first, last and how many."""
    owned = job.stages[job.locate_rank(rank).stage]
    return f"{owned.start}-{owned.stop - 1} ({len(owned)})"


def format_rank_tokens(job: PlannedCall, rank: int) -> str:
    """The image and text tokens that a rank computes in a step."""
    part = job.token_split.shard_tokens(job.image_layout, None)[job.locate_rank(rank).rank]
    return f"{part.image_tokens:,}" + (f" + {len(part.text):,}" if part.text else "")


def count_expected_parameters(job: PlannedCall, rank: int) -> int:
    """The parameters of a rank's stage, those of its blocks over the tensor degree."""
    here = select_local_blocks(job.stages, job.locate_rank(rank).stage, job.plan.num_whole_stages)
    owned = sum(job.weights.blocks[block] for block in here)
    return job.weights.shared + -(-owned // job.plan.tensor)


def format_traffic(sizes: Mapping[str, int]) -> str:
    """Bytes by kind."""
    return "\n".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items()) or "0 B"


def format_speed_up_bound(job: PlannedCall) -> str:
    """The bound: that of the stages, times the degrees that divide every step; replicas make more images at a time."""
    parts = compute_axis_bounds(job)
    named = " x ".join(f"{name} {bound:.2f}".removesuffix(".00") for name, bound in parts.items())
    return f"{math.prod(parts.values()):.2f}x" + (f" ({named})" if len(parts) > 1 else "")


def compute_axis_bounds(job: PlannedCall) -> dict[str, float]:
    """The bound on each axis that is used; their product is that of the plan."""
    parts = (
        {"pipefusion": job.step_schedule.bound_speedup(job.count_calls_in_step(1))} if job.plan.pipefusion > 1 else {}
    )
    return parts | {name: float(getattr(job.plan, name)) for name in EXACT if getattr(job.plan, name) > 1}


def _render_as_text(*parts: str | Table) -> str:
    console = Console(file=io.StringIO(), width=140, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    return captured.get().rstrip()
