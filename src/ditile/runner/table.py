"""The table of a plan on a model: what each rank holds, keeps and sends, and how fast it can get at best."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ditile.plan.cost import Job, key_bytes, sent_in_step
from ditile.plan.plan import AXES, Plan, coordinates
from ditile.plan.stages import held
from ditile.plan.units import amount

EXACT = ("data", "cfg", "ring", "distrifusion", "ulysses", "tensor")
"""Axes that divide all of the work, in every step."""


def describe(model: str, job: Job, devices: Sequence[str], parameters: Sequence[int] | None = None) -> str:
    """The table as text.

    Args:
        model: what to call it.
        job: the call under its plan.
        devices: of each rank.
        parameters: that each rank holds; by default what the plan will leave it, norms and biases not counted apart.
    """
    plan, shape, weights = job.plan, job.shape, job.weights
    rows = [job.layout.rows(patch) for patch in range(job.layout.patches)]
    table = Table("rank", "device", "place", "blocks", "tokens", "parameters", "keys and values", "sent per step")
    for rank, device in enumerate(devices):
        held = expected_parameters(job, rank) if parameters is None else parameters[rank]
        cells = (
            place(plan, rank), blocks(job, rank), tokens(job, rank), f"{held / 1e6:,.2f} M",
            amount(key_bytes(job, rank)), traffic(sent_in_step(job, rank, max(0, shape.steps - 2))),
        )  # fmt: skip
        table.add_row(str(rank), device, *cells)
    return _text(
        f"{model}: {job.spec.name}, {len(weights.blocks)} blocks, "
        f"{weights.of(range(len(weights.blocks))) / 1e6:,.2f} M",
        f"plan: {plan}",
        f"image: {shape.width} x {shape.height} px, {shape.tokens} tokens ({shape.text} of text), {shape.steps} steps, "
        f"batch {shape.batch}, {shape.calls} call(s) per step",
        f"patches: {len(rows)} of {', '.join(map(str, rows))} token rows",
        table,
        f"speed-up over one rank: at most {speed_up(job)}",
        *filter(None, [plan.advice(job.schedule.bound(job.calls(1)))]),
    )


def describe_whole(pipeline: str, model: str, plan: Plan, devices: Sequence[str], parameters: Sequence[int]) -> str:
    """The same for a model without a `ModelSpec`: every rank has the whole of its weights."""
    table = Table("rank", "device", "place", "parameters")
    for rank, device in enumerate(devices):
        table.add_row(str(rank), device, place(plan, rank), f"{parameters[rank] / 1e6:,.2f} M")
    return _text(f"{pipeline}: {model}, which has no ModelSpec", f"plan: {plan}", table)


def place(plan: Plan, rank: int) -> str:
    """The coordinates of a rank on the axes that are used; with one rank there are none."""
    at = coordinates(plan, rank)
    names = {"pipefusion": "stage"}
    used = [name for name in AXES if getattr(plan, name) > 1]
    return "\n".join(f"{names.get(name, name)} {at[name]}" for name in used) or "-"


def blocks(job: Job, rank: int) -> str:
    """The blocks of a rank: first, last and how many."""
    owned = job.stages[job.place(rank).stage]
    return f"{owned.start}-{owned.stop - 1} ({len(owned)})"


def tokens(job: Job, rank: int) -> str:
    """The image and text tokens that a rank computes in a step."""
    part = job.split.parts(job.layout, None)[job.place(rank).rank]
    return f"{part.image_tokens:,}" + (f" + {len(part.text):,}" if part.text else "")


def expected_parameters(job: Job, rank: int) -> int:
    """The parameters of a rank's stage, those of its blocks over the tensor degree."""
    here = held(job.stages, job.place(rank).stage, job.plan.crew)
    owned = sum(job.weights.blocks[block] for block in here)
    return job.weights.shared + -(-owned // job.plan.tensor)


def traffic(sizes: Mapping[str, int]) -> str:
    """Bytes by kind."""
    return "\n".join(f"{kind} {amount(size)}" for kind, size in sizes.items()) or "0 B"


def speed_up(job: Job) -> str:
    """The bound: that of the stages, times the degrees that divide every step; replicas make more images at a time."""
    parts = bounds(job)
    named = " x ".join(f"{name} {bound:.2f}".removesuffix(".00") for name, bound in parts.items())
    return f"{math.prod(parts.values()):.2f}x" + (f" ({named})" if len(parts) > 1 else "")


def bounds(job: Job) -> dict[str, float]:
    """The bound on each axis that is used; their product is that of the plan."""
    parts = {"pipefusion": job.schedule.bound(job.calls(1))} if job.plan.pipefusion > 1 else {}
    return parts | {name: float(getattr(job.plan, name)) for name in EXACT if getattr(job.plan, name) > 1}


def _text(*parts: str | Table) -> str:
    console = Console(file=io.StringIO(), width=140, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    return captured.get().rstrip()
