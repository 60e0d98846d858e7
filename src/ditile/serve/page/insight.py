"""Shows how an image was made, as HTML and SVG: its plan, times, ranks, schedule, and the freshness of its keys."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from ditile.model.recording.recorded_calls import format_recorded_calls
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import Plan
from ditile.plan.schedule import PatchSchedule
from ditile.serve.jobs import Job, JobResult

# With more bars a browser becomes slow.
_MAX_BARS = 4000
# The size of a chart in pixels; on a narrower page it scrolls. The left part has the labels of the rows.
_WIDTH = 1000
_LEFT = 64
_ROW = 26
_BAR_HEIGHT = 22
# The least distance between the numbers of two steps.
_TICK = 24
FRESH = "#2a9d8f"
STALE = "#e9c46a"
WHOLE = "#6c8ebf"
WAIT = "#b0b0b066"
OTHER = "#c77dba"


_CHART = """<div class="scroll" tabindex="0" role="group" aria-label="{title}">
<svg role="img" aria-label="{title}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">{marks}</svg>
</div>"""
_TEXT = '<text x="{:.1f}" y="{}">{}</text>'
_BAR = '<rect x="{:.2f}" y="{}" width="{:.2f}" height="{}" fill="{}"><title>{}</title></rect>'
_LEGEND = '<span style="display:inline-block;width:.8em;height:.8em;background:{}"></span> {}&ensp;'
_TABLE_ROW = '<tr><th scope="row">{}</th><td>{}</td></tr>'


class Chart:
    """An SVG with rows of bars over steps.

    Args:
        title: the title for screen readers.
        length: the length of the horizontal axis, in any unit.
    """

    def __init__(self, title: str, labels: Sequence[str], length: float) -> None:
        self._title = title
        self._scale = (_WIDTH - _LEFT) / length
        self._bottom = len(labels) * _ROW
        self._last_tick = 0.0
        self._marks = []
        for row, label in enumerate(labels):
            self._marks.append(_TEXT.format(0, row * _ROW + 15, html.escape(label)))

    def add_bar(self, row: int, begin: float, length: float, color: str, note: str) -> None:
        """Adds a bar with a note that is shown under the pointer; very short bars are widened to stay visible."""
        x = _LEFT + begin * self._scale
        width = max(length * self._scale, 0.4)
        self._marks.append(_BAR.format(x, row * _ROW, width, _BAR_HEIGHT, color, html.escape(note)))

    def add_step(self, begin: float, step: int) -> None:
        """Adds the number of a step below the chart, if there is room; steps come in order."""
        x = _LEFT + begin * self._scale
        if x - self._last_tick >= _TICK:
            self._marks.append(_TEXT.format(x, self._bottom + 11, step + 1))
            self._last_tick = x

    def render(self) -> str:
        """The chart as HTML."""
        return _CHART.format(title=self._title, width=_WIDTH, height=self._bottom + 16, marks="".join(self._marks))


def render_insight(job: Job, plan_facts: JsonObject, trace: JsonObject) -> str:
    """All sections for one job.

    Args:
        job: the job, which must be done.
        plan_facts: what the service reports about its plan.
        trace: the Chrome trace of the job; empty if there is none.
    """
    result = job.result
    assert result is not None, "the job is done"
    plan = Plan.parse(str(plan_facts.get("plan") or ""))
    plan_rows = _list_plan_rows(plan, result)
    predictions = _list_predictions(plan_facts, result)
    sections = {
        "The plan": _render_table(plan_rows),
        "Predicted and measured": _render_table(predictions),
        "Micro-steps by rank": render_gantt(trace),
        "Freshness of keys by patch and step": render_freshness(PatchSchedule.from_plan(plan, result.num_steps)),
        "Steps that the cache skipped": _render_skipped(result),
    }
    return "".join(f"<section><h3>{title}</h3>{content}</section>" for title, content in sections.items())


def list_key_ages(schedule: PatchSchedule) -> list[tuple[int, list[int]]]:
    """(step, age in steps of each patch's keys) for each micro-step; with DistriFusion for each rank and step."""
    columns = []
    for step in range(schedule.steps):
        if schedule.distrifusion > 1:
            stale = schedule.reads_stale_keys(step)
            for rank in range(schedule.distrifusion):
                ages = [int(stale and patch != rank) for patch in range(schedule.distrifusion)]
                columns.append((step, ages))
            continue
        for patch in range(schedule.patches):
            micro_step = schedule.find_micro_step(step, patch)
            columns.append((step, list(schedule.compute_key_ages(micro_step))))
    return columns


def render_freshness(schedule: PatchSchedule) -> str:
    """A chart of the ages of keys: a row for each patch, a column for each micro-step."""
    columns = list_key_ages(schedule)
    num_stale = sum(sum(ages) for _, ages in columns)
    if not num_stale:
        return "<p>Every key is fresh in every step: nothing is computed from the step before.</p>"
    num_patches = len(columns[0][1])
    rows = {}
    for patch in range(num_patches):
        rows[f"patch {patch}"] = [ages[patch] > 0 for _, ages in columns]
    share = 100 * num_stale / (num_patches * len(columns))
    chart = _render_grid("Freshness of keys", rows, schedule.steps, "fresh keys", "keys of the step before")
    return f"<p>{share:.0f} % of the keys that are read are of the step before.</p>{chart}"


def render_gantt(trace: JsonObject) -> str:
    """A chart of what each rank did at which time, from a Chrome trace."""
    events = []
    num_ranks = 0
    num_patches = 1
    for event in trace.get("traceEvents", []):
        # In Chrome's format "X" marks events with a duration, which is in microseconds.
        if event.get("ph") == "X" and event["dur"] > 0:
            events.append(event)
            num_ranks = max(num_ranks, event["tid"] + 1)
            num_patches = max(num_patches, 1 + (event["args"]["patch"] or 0))
    if not events:
        return "<p>There is no trace of this image: only what this page generates is traced.</p>"
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    length = end - begin
    chart = Chart("Micro-steps of each rank over time", [f"rank {rank}" for rank in range(num_ranks)], length)
    longest = sorted(events, key=lambda event: -event["dur"])[:_MAX_BARS]
    last_step = -1
    for event in sorted(longest, key=lambda event: event["ts"]):
        rank = event["tid"]
        step = event["args"]["step"]
        since = event["ts"] - begin
        color = _choose_color(event["cat"], event["args"]["patch"], num_patches)
        milliseconds = event["dur"] / 1e3
        note = f"rank {rank}, step {step + 1}: {event['name']}, {milliseconds:.1f} ms"
        chart.add_bar(rank, since, event["dur"], color, note)
        if event["cat"] == "compute" and step > last_step:
            chart.add_step(since, step)
            last_step = step
    colors = {"a whole step": WHOLE}
    # Eight patches are enough to show the order of the colours.
    if num_patches > 1:
        for patch in range(min(num_patches, 8)):
            colors[f"patch {patch}"] = _choose_color("compute", patch, num_patches)
    colors["messages and the scheduler"] = OTHER
    colors["waits"] = WAIT
    seconds = length / 1e6
    legend = _render_legend(colors)
    return f"<p>{seconds:.2f} s from left to right. {legend}</p>{chart.render()}"


def _choose_color(category: str, patch: int | None, num_patches: int) -> str:
    if category.startswith("wait"):
        return WAIT
    if category != "compute":
        return OTHER
    if patch is None:
        return WHOLE
    hue = 20 + round(360 * patch / num_patches)
    return f"hsl({hue} 65% 55%)"


def _list_plan_rows(plan: Plan, result: JobResult) -> dict[str, str]:
    reports = result.facts.get("reports", [])
    rows = {
        "plan": html.escape(str(plan)) or "one rank, which computes whole steps",
        "ranks": str(plan.world),
        "steps": str(result.num_steps),
        "jobs in the batch": str(result.facts.get("batch", 1)),
    }
    if reports:
        synchronous = [str(step + 1) for step in reports[0].get("synchronous", [])]
        rows["whole steps"] = ", ".join(synchronous) or "none"
    recorded = [report["recorded"] for report in reports if report.get("recorded")]
    if recorded:
        rows["recorded steps"] = html.escape(format_recorded_calls(recorded))
    for rank, report in enumerate(reports):
        sent = report["bytes_sent"] / 2**20
        peak = report["peak_memory_bytes"] / 2**20
        text = f"sent {sent:.1f} MiB, peak of {peak:.0f} MiB"
        seconds = sum(report.get("step_seconds", []))
        if seconds:
            waited = sum(sum(waits) for waits in report.get("waited", {}).values())
            text += f", waited {100 * waited / seconds:.0f} % of its steps"
        rows[f"rank {rank}"] = text
    return rows


def _list_predictions(plan_facts: JsonObject, result: JobResult) -> dict[str, str]:
    rows = {}
    for stage, label in {"text": "text", "denoise": "steps", "decode": "decode", "total": "all"}.items():
        if stage in result.seconds:
            rows[f"measured, {label}"] = f"{result.seconds[stage]:.3f} s"
    predicted = plan_facts.get("predicted") or {}
    if not predicted.get("plans"):
        rows["predicted"] = "nothing: run <code>ditile calibrate</code> on this machine once"
        return rows
    price = predicted["plans"][0]
    call = predicted["call"]
    latency = price["latency_s"]
    rows["predicted, steps"] = f"{latency:.3f} s ({call['width']}x{call['height']}, {call['steps']} steps)"
    parts = {"compute": "compute_s", "idle": "bubble_s", "messages": "exposed_comm_s"}
    for label, name in parts.items():
        seconds = price[name]
        rows[f"of which {label}"] = f"{seconds:.3f} s"
    predicted_shape = (call["width"], call["height"], call["steps"])
    shape = (*result.size, result.num_steps)
    if shape == predicted_shape and latency and "denoise" in result.seconds:
        ratio = result.seconds["denoise"] / latency
        rows["measured / predicted"] = f"{ratio:.2f}"
    return rows


def _render_skipped(result: JobResult) -> str:
    """A row for each context of the cache, a cell for each step."""
    contexts = result.facts.get("left_out")
    if not contexts:
        return "<p>This server has no cache; <code>ditile serve --cache</code> has one.</p>"
    rows = {}
    notes = []
    for context in contexts:
        cached = set().union(*context["cached_steps"])
        name = f"stage {context['stage']}, {context['context']}"
        rows[name] = [step in cached for step in range(result.num_steps)]
        num_blocks = context["steps"] * context["blocks"]
        share = 100 * context["blocks_saved"] / max(num_blocks, 1)
        text = f"{name}: {len(cached)} of {result.num_steps} steps, {share:.0f} % of the blocks. {context['settings']}"
        notes.append(f"<p>{html.escape(text)}</p>")
    return _render_grid("Skipped steps", rows, result.num_steps, "computed", "skipped") + "".join(notes)


def _render_grid(title: str, rows: Mapping[str, Sequence[bool]], num_steps: int, fresh: str, stale: str) -> str:
    """A chart with a cell for each value, False `fresh` and True `stale`, and its legend."""
    length = len(next(iter(rows.values())))
    chart = Chart(title, list(rows), length)
    per_step = length // num_steps
    for step in range(num_steps):
        chart.add_step(step * per_step, step)
    for row, (label, values) in enumerate(rows.items()):
        for index, is_stale in enumerate(values):
            meaning = stale if is_stale else fresh
            color = STALE if is_stale else FRESH
            note = f"step {index // per_step + 1}, {label}: {meaning}"
            # A tenth is left between two cells.
            chart.add_bar(row, index, 0.9, color, note)
    return f"<p>{_render_legend({fresh: FRESH, stale: STALE})}</p>{chart.render()}"


def _render_table(rows: Mapping[str, str]) -> str:
    """A table of names and HTML."""
    cells = [_TABLE_ROW.format(name, value) for name, value in rows.items()]
    return f"<table><tbody>{''.join(cells)}</tbody></table>"


def _render_legend(colors: Mapping[str, str]) -> str:
    return " ".join(_LEGEND.format(color, text) for text, color in colors.items())
