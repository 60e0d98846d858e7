"""`ditile evaluate`: what plans and caches do to pictures, and how much sooner these are there.

Every caption is drawn by the original pipeline (one process, no cache) and by each plan with each cache, with the same
seed. Pictures are judged against the original's, against their captions, and as a set against the original's and
reference pictures. What comes out is a table, `evaluation.json` (from which `ditile generate --min-psnr` picks), a
sheet of pictures side by side, and quality over latency as a figure (docs/evaluation.md).
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch

import ditile
from ditile.cli import files
from ditile.cli.bench.machine import load
from ditile.cli.dry_run import planned
from ditile.cli.evaluate.captions import Caption, captions_of
from ditile.cli.evaluate.draw import Task, Turn, draw
from ditile.cli.evaluate.options import ORIGINAL, Evaluate, Judge, Session, Setting
from ditile.cli.evaluate.scores import Judged, Panel
from ditile.cli.evaluate.store import Key, Row, Store, complete, summed_up
from ditile.cli.generate import planned_call, quiet
from ditile.distributed import cpus, env
from ditile.distributed.launch import launch
from ditile.distributed.mesh import part
from ditile.errors import ModelError
from ditile.models.registry import specs
from ditile.plan.plan import Plan
from ditile.planner.budget import FILE
from ditile.runner.load import defaults, find

if TYPE_CHECKING:
    from rich.table import Table

CAPTIONS = 10
SHEET, PARETO = "contact-sheet.png", "pareto.png"
INTERLEAVED = (
    "each caption by the original and all settings in turn, one session for each number of ranks, in an order that "
    "rotates; seconds of the whole call (text, denoising, decoding), ratios within a turn, medians over captions"
)
APART = (
    "one plan after another, the original first; seconds of the whole call (text, denoising, decoding), ratios to the "
    "same caption of the original, medians over captions"
)


def evaluate(wanted: Evaluate, judge: Judge, session: Session) -> dict[str, Any] | None:
    """Draws what is not there yet, judges, and writes everything. Rank 0 returns what `evaluation.json` says.

    Raises:
        DitileError: if something does not fit; nothing was written then.
    """
    quiet()
    settings = wanted.settings
    _check(wanted, settings)
    captions = captions_of(wanted.captions, wanted.num, CAPTIONS)
    threads = session.threads or max(1, cpus.cores() // max(s.world for s in settings))
    job, store = _job(wanted, session, threads), Store(Path(session.out))
    rows: dict[Key, Row] = {}
    panel = None
    if _is_first():
        store.check(job)
        rows = store.rows(captions, wanted.seed)
        panel = Panel.of(judge, wanted.model, captions)
    for task in _tasks(wanted, session, job, settings, threads):
        turns = _turns(task, captions, settings, rows)
        if turns or env.torchrun() is not None:
            _run(task, turns)
        rows = store.rows(captions, wanted.seed) if _is_first() else {}
    if env.torchrun() is not None:
        part()
    if panel is None:
        return None
    return _finish(wanted, session, store, panel, captions, rows)


def as_table(found: Mapping[str, Any]) -> Table:
    """The means for people."""
    from rich.table import Table

    inception, space = found["frechet"]["is_inception"], found["frechet"]["space"]
    distance = "FID" if inception else f"Frechet ({space})"
    columns = [(name, about["title"], about["digits"]) for name, about in found["metrics"].items()]
    columns += [("frechet_original", f"{distance} to original", 3)]
    columns += [("frechet_references", f"{distance} to references", 3)] if found["references"] else []
    shown = Table(title=f"{found['model']}, {found['captions']['count']} caption(s)", title_justify="left")
    for title in ("plan", "cache", "ranks", "seconds", "latency", "speed-up", "saved, %"):
        shown.add_column(title, overflow="fold", justify="left" if title in ("plan", "cache") else "right")
    for _, title, _ in columns:
        shown.add_column(title, justify="right")
    for row in found["settings"]:
        plan = "original" if row["setting"] == str(ORIGINAL) else row["plan"]
        shown.add_row(
            plan, row["cache"], str(row["world"]), f"{row['seconds']:.2f}", f"{100 * row['latency_ratio']:.0f} %",
            f"{row['speedup']:.2f}x", f"{100 * row['blocks_saved']:.0f}",
            *(f"{row[name]:.{digits}f}" if name in row else "-" for name, _, digits in columns),
        )  # fmt: skip
    return shown


def remarks(found: Mapping[str, Any]) -> Iterable[str]:
    """What a reader of the table must know."""
    yield f"latency: {found['measured']['how']}"
    again = found["measured"]["original_again_psnr"]
    if again is not None:
        same = "the same pictures" if again >= 100 else f"other pictures, at worst {again:.1f} dB away"
        yield f"the original, drawn again in later turns, made {same}"
    frechet = found["frechet"]
    if not frechet["is_inception"]:
        yield f"Frechet distances are of {frechet['space']}, which is not FID ({frechet['why']})"
    if found["captions"]["count"] <= frechet["features"]:
        count = found["captions"]["count"]
        yield f"{count} pictures for {frechet['features']} features: such distances only rank settings"
    for name, why in found["absent"].items():
        yield f"no {name}: {why}"


def _check(wanted: Evaluate, settings: Sequence[Setting]) -> None:
    """Raises `PlanError` or `ModelError` unless all settings fit the model, and torchrun's ranks."""
    source = find(wanted.model)
    place = env.torchrun()
    for setting in settings:
        if place is not None and not setting.is_alone and setting.world != place.world:
            Plan.parse(setting.plan).check_world(place.world)
    try:
        index = diffusers.DiffusionPipeline.load_config(source)
    except OSError as error:
        raise ModelError(f"model {wanted.model!r} cannot be loaded: {' '.join(str(error).split())}") from error
    known = {cls.__name__ for cls in specs()}
    if index.get("transformer", (None, None))[1] not in known:
        return  # what no table describes says no itself when it is divided, before it draws
    for setting in settings:
        planned(wanted.generate("a caption"), Plan.parse(setting.plan), setting.configs)


def _job(wanted: Evaluate, session: Session, threads: int) -> dict[str, Any]:
    """What all pictures have in common."""
    call = planned_call(wanted.generate("a caption"), defaults(wanted.model))
    del call["prompt"], call["num_images_per_prompt"]
    return {
        "model": wanted.model, "call": call, "dtype": session.dtype, "device": session.device, "threads": threads,
        "together": not session.one_at_a_time,
    }  # fmt: skip


def _tasks(
    wanted: Evaluate, session: Session, job: dict[str, Any], settings: Sequence[Setting], threads: int
) -> list[Task]:
    """The sessions in their order. Settings of one process go with those of the most ranks, or are the first by far."""

    def task(world: int, plans: Iterable[str], original: bool, title: str) -> Task:
        return Task(wanted, session, job, world, tuple(plans), original, threads, title)

    plans = list(dict.fromkeys(setting.plan for setting in settings if not setting.is_alone))
    world = {plan: Plan.parse(plan).world for plan in plans}
    if session.one_at_a_time:
        return [task(1, (), True, "one process"), *(task(world[plan], [plan], False, plan) for plan in plans)]
    worlds = sorted({*world.values()}, reverse=True) or [1]
    return [
        task(n, [plan for plan in plans if world[plan] == n], True, f"{n} rank(s)" if n > 1 else "one process")
        for n in worlds
    ]


def _turns(task: Task, captions: Sequence[Caption], settings: Sequence[Setting], rows: Mapping[Key, Row]) -> list[Turn]:
    """The captions of a session of which pictures are not there. Rank 0's count."""
    first = not task.session.one_at_a_time or not task.plans
    mine = [s for s in settings if s.plan in task.plans or (s.is_alone and first)]
    if first:
        mine = [ORIGINAL, *mine]
    turns = []
    for place, caption in enumerate(captions):
        left = tuple(setting for setting in mine if (setting, place) not in rows)
        if left:
            turns.append(Turn(place, caption.text, task.wanted.seed + place, left))
    return turns


def _run(task: Task, turns: list[Turn]) -> None:
    if env.torchrun() is None and task.world > 1:
        launch(draw, task.world, (task, turns), threads=task.threads, stall_timeout=task.session.stall_timeout)
    else:
        draw(task, turns)


def _finish(
    wanted: Evaluate, session: Session, store: Store, panel: Panel, captions: Sequence[Caption], rows: dict[Key, Row]
) -> dict[str, Any]:
    """Judges, sums up and writes."""
    count = len(captions)
    there = complete(rows, count)
    settings = [
        *(s for s in [ORIGINAL, *wanted.settings] if s in there),
        *(s for s in there if s not in wanted.settings),
    ]
    settings = list(dict.fromkeys(settings))
    judged: Judged = panel.judge(store, rows, settings, count)
    scored = {(setting, place): rows[setting, place] for setting in settings for place in range(count)}
    store.score(scored, captions, wanted.seed)
    figure = importlib.util.find_spec("matplotlib") is not None
    absent = judged.absent | ({} if figure else {PARETO: "matplotlib is not installed"})
    again = [row["original_again_psnr"] for row in rows.values() if row["original_again_psnr"] is not None]
    found = {
        "model": wanted.model, "job": _job_of(store), "captions": {
            "source": wanted.captions, "count": count, "seed": wanted.seed,
        },
        "measured": {
            "how": APART if session.one_at_a_time else INTERLEAVED, "date": f"{datetime.date.today()}",
            "original_again_psnr": min(again, default=None), **_machine(),
        },
        "metrics": judged.metrics, "absent": absent, "frechet": judged.frechet,
        "resize": panel.side, "references": judged.references,
        "settings": [row | judged.distances[row["setting"]] for row in summed_up(rows, settings, count)],
    }  # fmt: skip
    files.write_json(store.out / FILE, found)
    _draw_sheet(store, settings, captions, rows)
    if figure:
        from ditile.cli.evaluate.plots import tradeoff

        tradeoff(found, store.out / PARETO)
    return found


def _draw_sheet(store: Store, settings: Sequence[Setting], captions: Sequence[Caption], rows: dict[Key, Row]) -> None:
    from ditile.cli.evaluate.contact_sheet import ROWS, sheet

    columns = [
        (setting, [(store.path(setting, k), rows[setting, k]["scores"]["psnr"]) for k in range(len(captions))][:ROWS])
        for setting in settings
    ]
    sheet(columns, [caption.text for caption in captions][:ROWS]).save(store.out / SHEET)


def _job_of(store: Store) -> Any:
    from ditile.cli.evaluate.store import JOB

    return json.loads((store.out / JOB).read_text("utf-8"))


def _machine() -> dict[str, Any]:
    """Where it ran, and with what."""
    names = sorted({torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())})
    return {
        "machine": ", ".join(names) or f"{cpus.cores()} core(s), {platform.machine()}", "load_average": load(),
        "python": platform.python_version(), "ditile": ditile.__version__, "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }  # fmt: skip


def _is_first() -> bool:
    """Whether this process writes."""
    place = env.torchrun()
    return place is None or place.rank == 0
