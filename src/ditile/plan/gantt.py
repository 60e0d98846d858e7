"""The schedule as a picture of text: one row per stage, one column per micro-step's time, with unit costs."""

from __future__ import annotations

import math

from ditile.plan.schedule import MicroStep, OpKind, Schedule, simulate_schedule

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def render_gantt_chart(schedule: Schedule, steps: int, calls: int = 1) -> str:
    """The first `steps` steps. Each cell is the patch that a stage computes; `=` is a whole synchronous step."""
    num_chunks = len(schedule.split_micro_batches(MicroStep(0, None))) * max(schedule.warmup_group_size, 1)
    cell = 1 / (schedule.stages * math.lcm(schedule.patches, num_chunks) * calls)
    spans = [s for s in simulate_schedule(schedule, calls=calls) if s.op.kind is OpKind.COMPUTE and s.op.step < steps]
    width = max(round(span.end / cell) for span in spans)
    lines = []
    for stage in range(schedule.stages):
        row = ["."] * width
        for span in spans:
            if span.stage == stage:
                patch = span.op.patch
                mark = "=" if patch is None else _LETTERS[patch % len(_LETTERS)]
                row[round(span.start / cell) : round(span.end / cell)] = mark * round((span.end - span.start) / cell)
        lines.append(f"stage {stage:<2} |{''.join(row)}|")
    legend = "= a whole synchronous step, 0-9.. a patch of an asynchronous one, . idle"
    return "\n".join([f"steps 0 to {steps - 1} ({legend}):", *lines])
