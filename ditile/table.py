"""The table of a plan on a model: what each rank holds, keeps and sends, and how fast it can get at best."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ditile.blocks.schedule import Schedule
from ditile.mesh import coordinates
from ditile.plan import Plan
from ditile.shape import Shape, Weights
from ditile.spec import ModelSpec


def describe(
    model: str, spec: ModelSpec, plan: Plan, shape: Shape, stages: Sequence[range], weights: Weights,
    devices: Sequence[str],
) -> str:  # fmt: skip
    """The table as text."""
    layout = shape.layout(plan, spec)
    schedule = Schedule.of(plan, shape.steps)
    rows = [layout.rows(patch) for patch in range(layout.patches)]
    table = Table("rank", "device", "stage", "blocks", "parameters", "keys and values", "sent per step")
    for rank, device in enumerate(devices):
        stage = coordinates(plan, rank)["pipefusion"]
        owned = stages[stage]
        cells = (
            f"{owned.start}-{owned.stop - 1} ({len(owned)})", f"{weights.of(owned) / 1e6:,.2f} M",
            amount(shape.key_bytes(plan, len(owned))), amount(shape.step_bytes(plan, stage)),
        )  # fmt: skip
        table.add_row(str(rank), device, str(stage), *cells)
    return _text(
        f"{model}: {spec.name}, {len(weights.blocks)} blocks, {weights.of(range(len(weights.blocks))) / 1e6:,.2f} M",
        f"plan: {plan}",
        f"image: {shape.width} x {shape.height} px, {shape.tokens} tokens ({shape.text} of text), {shape.steps} steps, "
        f"batch {shape.batch}, {shape.calls} call(s) per step",
        f"patches: {layout.patches} of {', '.join(map(str, rows))} token rows",
        table,
        f"speed-up over one rank: at most {schedule.bound():.2f}x",
    )


def describe_whole(pipeline: str, model: str, plan: Plan, weights: Weights, devices: Sequence[str]) -> str:
    """The same for a model without a `ModelSpec`: every rank has the whole of its weights."""
    table = Table("rank", "device", "parameters")
    for rank, device in enumerate(devices):
        table.add_row(str(rank), device, f"{weights.shared / 1e6:,.2f} M")
    return _text(f"{pipeline}: {model}, which has no ModelSpec", f"plan: {plan}", table)


def amount(count: float) -> str:
    """A number of bytes for a person."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _text(*parts: str | Table) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    return captured.get().rstrip()
