"""Shows a plan on a model in a table: the storage and traffic of each rank, and the upper bound of the speed-up."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ditile.plan.cost import PlannedCall, count_traffic_in_step
from ditile.plan.numbers import format_bytes
from ditile.plan.plan import AXES, Plan, compute_coordinates
from ditile.plan.simulate import bound_speedup

EXACT = ("data", "cfg", "ring", "gather", "distrifusion", "ulysses", "tensor")
"""Axes that divide all of the work, in every step."""
COLUMNS = ("rank", "device", "place", "blocks", "tokens", "parameters", "stale keys", "sent a step")
DERIVED_COLUMNS = ("rank", "device", "place", "blocks", "parameters")
"""The columns of a model without a `CallFamily`; the others depend on the call."""


def describe_plan(model: str, job: PlannedCall, devices: Sequence[str], parameters: Sequence[int] | None = None) -> str:
    """Format the table as text, for 80 columns.

    Args:
        model: the name that the table shows.
        job: the call under its plan.
        devices: the device of each rank.
        parameters: how many each rank has; by default they are estimated as if norms and biases were divided too.
    """
    plan = job.plan
    shape = job.shape
    layout = job.image_layout
    table = _make_rank_table()
    for rank, device in enumerate(devices):
        planned = job.plan_rank(rank)
        shard = job.shard_tokens(None)[planned.token_place]
        tokens = f"{shard.image_tokens:,}"
        if shard.text:
            tokens += f" + {len(shard.text):,}"
        if parameters is not None:
            num_parameters = parameters[rank]
        else:
            # A dry run has no model with parameters to count.
            num_in_blocks = sum(job.weights.blocks[block] for block in planned.blocks)
            num_parameters = job.weights.shared + math.ceil(num_in_blocks / planned.divisor)
        # The last step but one is asynchronous if any step is, and unlike the last step it still sends latents.
        sent = count_traffic_in_step(job, rank, max(0, shape.steps - 2))
        traffic = [f"{kind}\n  {format_bytes(size)}" for kind, size in sent.items()]
        table.add_row(
            str(rank),
            device,
            _format_rank_place(plan, rank),
            _format_blocks(planned.blocks),
            tokens,
            _format_parameters(num_parameters),
            format_bytes(planned.count_kept_key_bytes()),
            "\n".join(traffic) or "0 B",
        )
    num_blocks = len(job.weights.blocks)
    total_parameters = _format_parameters(job.weights.shared + sum(job.weights.blocks))
    rows_of_patches = list(map(layout.count_rows, range(layout.num_patches)))
    parts: list[str | Table] = [
        f"{model}: {job.family.name}, {num_blocks} blocks, {total_parameters}",
        f"plan: {plan}",
        f"image: {shape.width} x {shape.height} px, {shape.num_tokens} tokens (at most {shape.text} of text), "
        f"{shape.steps} steps, batch {shape.batch}, {shape.calls} call(s) per step",
        f"patches: {len(rows_of_patches)} of {', '.join(map(str, rows_of_patches))} token rows",
        table,
        f"speed-up over one rank: at most {_format_speed_up_bound(job)}",
    ]
    return _render_as_text(*parts)


def describe_derived_model(
    pipeline: str, model: str, plan: Plan, devices: Sequence[str], parameters: Sequence[int], stages: Sequence[range]
) -> str:
    """Format the table for a model without a `CallFamily`. It has only columns that do not depend on a call.

    Args:
        pipeline, model: the names of the classes of the pipeline and its transformer.
        devices, parameters: for each rank, its device and how many parameters it has.
        stages: the blocks of each stage; empty if the model is not cut.
    """
    table = _make_rank_table(DERIVED_COLUMNS)
    for rank, device in enumerate(devices):
        blocks = "all"
        if plan.pipefusion > 1:
            blocks = _format_blocks(stages[compute_coordinates(plan, rank)["pipefusion"]])
        table.add_row(str(rank), device, _format_rank_place(plan, rank), blocks, _format_parameters(parameters[rank]))
    return _render_as_text(
        f"{pipeline}: {model}",
        f"plan: {plan}",
        table,
        "stale keys and bytes sent depend on the call: runner.reports() has them after it",
    )


def _format_blocks(blocks: range) -> str:
    if not blocks:
        return "all"
    return f"{blocks.start}-{blocks.stop - 1} ({len(blocks)})"


def _format_parameters(number: int) -> str:
    return f"{number / 1e6:,.2f} M"


def _make_rank_table(columns: Sequence[str] = COLUMNS) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in columns:
        table.add_column(title, no_wrap=True)
    return table


def _format_rank_place(plan: Plan, rank: int) -> str:
    """Format the coordinates of a rank on the axes of the plan; "-" if it uses none."""
    coordinates = compute_coordinates(plan, rank)
    lines = []
    for axis in AXES:
        if getattr(plan, axis) > 1:
            name = "stage" if axis == "pipefusion" else axis
            lines.append(f"{name} {coordinates[axis]}")
    return "\n".join(lines) or "-"


def _format_speed_up_bound(job: PlannedCall) -> str:
    """Format the product of all axes' bounds, with its factors. Data parallelism counts, since it makes more images."""
    bounds = compute_axis_bounds(job)
    product = f"{math.prod(bounds.values()):.2f}x"
    # Unequal shares are for devices of unequal speed, and a plan without devices knows nothing of speeds.
    plan = job.plan
    shares = (plan.stage_blocks, plan.stage_weights, plan.token_weights, plan.tensor_weights)
    if any(share is not None for share in shares):
        product += " with equal shares on equal devices"
    if len(bounds) < 2:
        return product
    factors = [f"{name} {bound:.2f}".removesuffix(".00") for name, bound in bounds.items()]
    return f"{product} ({' x '.join(factors)})"


def compute_axis_bounds(job: PlannedCall) -> dict[str, float]:
    """Return the bound of each axis in use. Their product is the bound of the plan."""
    bounds: dict[str, float] = {}
    if job.plan.pipefusion > 1:
        # Step 0 may make more calls than the others.
        bounds["pipefusion"] = bound_speedup(job.step_schedule, job.count_calls_in_step(1))
    for name in EXACT:
        if getattr(job.plan, name) > 1:
            bounds[name] = float(getattr(job.plan, name))
    return bounds


def _render_as_text(*parts: str | Table) -> str:
    # Wide enough for any table; lines of text are not wrapped.
    console = Console(file=io.StringIO(), width=140, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    return captured.get().rstrip()
