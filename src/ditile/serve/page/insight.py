"""What ditile did for a picture, as HTML and SVG: the plan, seconds, ranks, the schedule, the freshness of keys."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep, Schedule
from ditile.serve.jobs import Drawn, Job

TRACE = "trace.json"
"""Output file of a traced job."""
_MOST_BARS = 4000
_ROW = 22
_GAP = 4
_LEFT = 64
_WIDTH = 1000
"""Of a chart, in pixels; a narrower page scrolls it."""
FRESH, STALE = "#2a9d8f", "#e9c46a"
WHOLE, WAIT, OTHER = "#6c8ebf", "#b0b0b066", "#c77dba"


def render_insight(job: Job, plan: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    """All of it.

    Args:
        job: that is done.
        plan: what the service says of it.
        trace: of the job, as Chrome reads it; empty if there is none.
    """
    drawn = job.drawn
    assert drawn is not None
    parts = Plan.parse(str(plan.get("plan") or ""))
    sections = [
        ("The plan", _render_table(_list_plan_rows(parts, drawn))),
        ("Predicted and measured", _render_table(_list_predictions(plan, drawn))),
        ("Micro-steps by rank", render_gantt(trace)),
        ("Freshness of keys by patch and step", render_freshness(build_schedule(parts, drawn))),
        ("Steps that the cache left out", _render_left_out(drawn)),
    ]
    return "".join(f"<section><h3>{title}</h3>{content}</section>" for title, content in sections)


def build_schedule(plan: Plan, drawn: Drawn) -> Schedule:
    """The schedule by which a picture was drawn: of an adaptive plan, with the steps that it chose."""
    schedule = Schedule.from_plan(plan, drawn.num_steps)
    if not schedule.adaptive:
        return schedule
    chosen = frozenset(drawn.facts["reports"][0]["synchronous"])
    return dataclasses.replace(schedule, warmup=0, again=chosen)


def list_key_ages(schedule: Schedule) -> list[tuple[int, list[int]]]:
    """(step, age in steps of each patch's keys) while each micro-step attends; with DistriFusion, each rank."""
    columns = []
    for step in range(schedule.steps):
        if schedule.distrifusion > 1:
            stale = schedule.reads_stale_keys(step)
            for rank in range(schedule.distrifusion):
                columns.append((step, [int(stale and patch != rank) for patch in range(schedule.distrifusion)]))
            continue
        whole = schedule.is_synchronous(step)
        for patch in range(schedule.patches):
            micro = MicroStep(step, None if whole else patch)
            columns.append((step, list(schedule.compute_key_ages(micro))))
    return columns


def render_freshness(schedule: Schedule) -> str:
    """A map of the ages of keys: a row for each patch, a column for each micro-step."""
    columns = list_key_ages(schedule)
    patches = len(columns[0][1]) if columns else 0
    if patches < 2 or not any(any(ages) for _, ages in columns):
        return "<p>Every key is fresh in every step: nothing is computed from the step before.</p>"
    cell = (_WIDTH - _LEFT) / len(columns)
    marks = [_label_row(f"patch {patch}", patch) for patch in range(patches)]
    per_step = len(columns) // schedule.steps
    for index, (step, ages) in enumerate(columns):
        x = _LEFT + index * cell
        for patch, age in enumerate(ages):
            note = f"step {step + 1}: keys of patch {patch} are {f'of step {step}' if age else 'fresh'}"
            marks.append(
                _draw_bar(x, patch, cell - (1 if (index + 1) % per_step == 0 else 0), STALE if age else FRESH, note)
            )
    marks += _label_steps([(_LEFT + k * per_step * cell, k + 1) for k in range(schedule.steps)], patches)
    stale = sum(sum(ages) for _, ages in columns) / (patches * len(columns))
    legend = _render_legend([(FRESH, "fresh"), (STALE, "of the step before")])
    return f"<p>{100 * stale:.0f} % of the keys that are read are of the step before. {legend}</p>" + _render_svg(
        marks, patches, "Freshness of keys by patch and step"
    )


def render_gantt(trace: Mapping[str, Any]) -> str:
    """When each rank did what, from a Chrome trace."""
    events = [event for event in trace.get("traceEvents", []) if event.get("ph") == "X" and event["dur"] > 0]
    if not events:
        return "<p>There is no trace of this picture: only what this page draws is traced.</p>"
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    num_ranks = 1 + max(event["tid"] for event in events)
    # The longest of a trace with more than a browser likes to draw.
    shown = sorted(sorted(events, key=lambda event: -event["dur"])[:_MOST_BARS], key=lambda event: event["ts"])
    scale = (_WIDTH - _LEFT) / max(end - begin, 1e-9)
    patches = 1 + max((event["args"]["patch"] or 0 for event in events), default=0)
    marks = [_label_row(f"rank {rank}", rank) for rank in range(num_ranks)]
    first_of_step: dict[int, float] = {}
    for event in shown:
        x = _LEFT + (event["ts"] - begin) * scale
        step = event["args"]["step"]
        note = f"rank {event['tid']}, step {step + 1}: {event['name']}, {event['dur'] / 1000:.1f} ms"
        color = _choose_color(event["cat"], event["args"]["patch"], patches)
        marks.append(_draw_bar(x, event["tid"], max(event["dur"] * scale, 0.4), color, note))
        if event["cat"] == "compute":
            first_of_step[step] = min(x, first_of_step.get(step, x))
    marks += _label_steps([(x, step + 1) for step, x in sorted(first_of_step.items())], num_ranks)
    colors = [(WHOLE, "a whole step")]
    if patches > 1:
        colors += [(_choose_color("compute", patch, patches), f"patch {patch}") for patch in range(min(patches, 8))]
    legend = _render_legend([*colors, (OTHER, "messages and the scheduler"), (WAIT, "waits")])
    text = f"<p>{(end - begin) / 1e6:.2f} s from left to right. {legend}</p>"
    return text + _render_svg(marks, num_ranks, "Micro-steps of each rank over time")


def _choose_color(kind: str, patch: int | None, patches: int) -> str:
    if kind.startswith("wait"):
        return WAIT
    if kind != "compute":
        return OTHER
    return WHOLE if patch is None else f"hsl({round(360 * patch / max(patches, 1)) + 20} 65% 55%)"


def _list_plan_rows(plan: Plan, drawn: Drawn) -> list[tuple[str, str]]:
    reports = drawn.facts.get("reports", [])
    rows = [
        ("plan", html.escape(str(plan)) or "one rank, which computes whole steps"),
        ("ranks", str(plan.world)),
        ("steps", str(drawn.num_steps)),
        ("drawn together", str(drawn.facts.get("batch", 1))),
    ]
    if reports:
        synchronous = reports[0].get("synchronous", [])
        rows.append(("whole steps", ", ".join(str(step + 1) for step in synchronous) or "none"))
    for rank, report in enumerate(reports):
        waited = sum(sum(seconds) for seconds in report.get("waited", {}).values())
        spent = sum(report.get("step_seconds", []))
        idle = f", waited {100 * waited / spent:.0f} % of its steps" if spent else ""
        sent = report["bytes_sent"] / 2**20
        peak = report["peak_memory_bytes"] / 2**20
        rows.append((f"rank {rank}", f"sent {sent:.1f} MiB, peak of {peak:.0f} MiB{idle}"))
    return rows


def _list_predictions(plan: Mapping[str, Any], drawn: Drawn) -> list[tuple[str, str]]:
    names = {"text": "text", "denoise": "steps", "decode": "decode", "total": "all"}
    rows = [
        (f"measured, {text}", f"{drawn.seconds[name]:.3f} s") for name, text in names.items() if name in drawn.seconds
    ]
    predicted = plan.get("predicted") or {}
    if not predicted.get("plans"):
        return [*rows, ("predicted", "nothing: run <code>ditile calibrate</code> on this machine once")]
    price = predicted["plans"][0]
    call = predicted["call"]
    scope = f"{call['width']}x{call['height']}, {call['steps']} steps"
    rows.append(("predicted, steps", f"{price['latency_s']:.3f} s ({html.escape(scope)})"))
    parts = {"compute": "compute_s", "idle": "bubble_s", "messages": "exposed_comm_s"}
    rows.append(("of which", ", ".join(f"{text} {price[name]:.3f} s" for text, name in parts.items())))
    same = (call["width"], call["height"], call["steps"]) == (*drawn.size, drawn.num_steps)
    if same and price["latency_s"] and "denoise" in drawn.seconds:
        rows.append(("measured / predicted", f"{drawn.seconds['denoise'] / price['latency_s']:.2f}"))
    return rows


def _render_left_out(drawn: Drawn) -> str:
    """A line for each context of the cache, a cell for each step."""
    contexts = drawn.facts.get("left_out") or []
    if not contexts:
        return "<p>This server has no cache; <code>ditile serve --cache</code> has one.</p>"
    marks = []
    notes = []
    cell = (_WIDTH - _LEFT) / max(drawn.num_steps, 1)
    for row, context in enumerate(contexts):
        cached = {step for steps in context["cached_steps"] for step in steps}
        name = f"{context['context']} of stage {context['stage']}"
        marks.append(_label_row(f"stage {context['stage']}", row))
        for step in range(drawn.num_steps):
            text = f"step {step + 1}, {name}: {'left out' if step in cached else 'computed'}"
            marks.append(_draw_bar(_LEFT + step * cell, row, cell - 1, STALE if step in cached else FRESH, text))
        total = max(context["steps"] * context["blocks"], 1)
        share = 100 * context["blocks_saved"] / total
        notes.append(
            f"{name}: {len(cached)} of {drawn.num_steps} steps, {share:.0f} % of the blocks. {context['settings']}"
        )
    marks += _label_steps([(_LEFT + step * cell, step + 1) for step in range(drawn.num_steps)], len(contexts))
    legend = _render_legend([(FRESH, "computed"), (STALE, "left out")])
    lines = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<p>{legend}</p>{_render_svg(marks, len(contexts), 'Steps that the cache left out')}{lines}"


def _render_table(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and HTML."""
    cells = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in rows)
    return f"<table><tbody>{cells}</tbody></table>"


def _render_legend(colors: Iterable[tuple[str, str]]) -> str:
    return " ".join(
        f'<span style="display:inline-block;width:.8em;height:.8em;background:{color}"></span> {text}&ensp;'
        for color, text in colors
    )


def _draw_bar(x: float, row: int, width: float, color: str, note: str) -> str:
    y = row * (_ROW + _GAP)
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{_ROW}" fill="{color}">'
        f"<title>{html.escape(note)}</title></rect>"
    )


def _label_row(text: str, row: int) -> str:
    return f'<text x="0" y="{row * (_ROW + _GAP) + 15}">{html.escape(text)}</text>'


def _label_steps(places: Sequence[tuple[float, int]], num_rows: int) -> list[str]:
    """Numbers of steps below a chart, as many as there is place for."""
    y = num_rows * (_ROW + _GAP) + 11
    marks = []
    last = -1e9
    for x, step in places:
        if x - last >= 24:
            marks.append(f'<text x="{x:.1f}" y="{y}">{step}</text>')
            last = x
    return marks


def _render_svg(marks: Iterable[str], num_rows: int, title: str) -> str:
    height = num_rows * (_ROW + _GAP) + 16
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{title}"><svg role="img" aria-label="{title}" '
        f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">{"".join(marks)}</svg></div>'
    )
