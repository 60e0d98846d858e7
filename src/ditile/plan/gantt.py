"""The schedule as a picture of text: one row per stage, one column per micro-step's time, with unit costs."""

from __future__ import annotations

import math

from ditile.plan.schedule import Kind, Micro, Schedule, simulate

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def as_text(schedule: Schedule, steps: int, calls: int = 1) -> str:
    """The first `steps` steps. Each cell is the patch that a stage computes; `=` is a whole synchronous step."""
    pieces = len(schedule.pieces(Micro(0, None))) * max(schedule.crew, 1)
    cell = 1 / (schedule.stages * math.lcm(schedule.patches, pieces) * calls)
    spans = [s for s in simulate(schedule, calls=calls) if s.op.kind is Kind.COMPUTE and s.op.step < steps]
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
