"""What every family is asked to do, a row each, and the drawings that show whether it does.

All drawings of an entry are one case of two ranks. Before ranks meet, one draws plain and the other what one process
draws with stale keys and with a cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditile
from ditile import DBCacheConfig, Plan
from ditile.parallel.pipefusion.loop import Loop
from ditile.plan.errors import DitileError
from ditile.runner import caching
from ditile.runner.runner import build_single_runner
from ditile_lab.study.prove import StillPipeline, ensure_anatomies
from tests.zoo import ZOO
from tests.zoo.entry import Entry
from tests.zoo.own import OWN

EVERY = {**ZOO, **OWN}
DOUBLE = frozenset({"krea-2", "krea-2-modular"})
"""Entries whose random weights make much of the last bit of a number: they are drawn in float64."""
LOOSE = dict.fromkeys(("kandinsky-5-image", "kandinsky-5-edit", "kandinsky-5", "kandinsky-5-image-to-video"), 3e-4)
"""The same of entries that compute in float32 whatever they are given: a share of the largest value."""
ENOUGH = 99
CACHED_STEPS = 4


class Row(NamedTuple):
    """A drawing under a plan, and what it must equal.

    Attributes:
        plan: degrees and more; `patches` is added to those that have a warmup and no `distrifusion`.
        like: the drawing of one process that it must equal: `plain`, `two` (pictures), `stale alone` or `cached`.
        tolerance: of the largest value; 0 is bit for bit.
        threshold: of a cache; None is none, -1 what tells the steps of one process apart.
    """

    plan: Mapping[str, Any]
    like: str = "plain"
    tolerance: float = 1e-5
    threshold: float | None = None


ROWS: dict[str, Row] = {
    "pipefusion": Row({"pipefusion": 2, "warmup": ENOUGH}, tolerance=0.0),
    "stale": Row({"pipefusion": 2, "warmup": 1}, "stale alone", 0.0),
    "ulysses": Row({"ulysses": 2}),
    "ring": Row({"ring": 2}),
    "gather": Row({"gather": 2}),
    "distrifusion": Row({"distrifusion": 2, "warmup": ENOUGH}),
    "tensor": Row({"tensor": 2}),
    "cfg": Row({"cfg": 2}),
    "data": Row({"data": 2}, "two"),
    "cache, pipefusion": Row({"pipefusion": 2, "warmup": 1}, "stale alone", 0.0, threshold=0.0),
    "cache, ulysses": Row({"ulysses": 2}, "cached", threshold=-1.0),
}
"""The rows of two ranks; `derive` and `proof` are rows too, of one process, and `hybrid` is one of four ranks."""

HYBRID = Row({"pipefusion": 2, "warmup": ENOUGH, "ulysses": 2})
REFERENCES = Row({"pipefusion": 2, "warmup": ENOUGH, "references": 0}, tolerance=0.0)
"""Asked of the entries that give their transformer pictures as tokens beside those of the image."""
ALONE = ("plain", "two", "stale alone", "cached")


class Outcome(NamedTuple):
    """What came of a drawing: tensors and what a cache skipped, or why it was refused, and after how many steps."""

    drawn: tuple[Tensor, ...] = ()
    skipped: tuple[Any, ...] = ()
    refusal: str = ""
    steps: int = 0


def draw_rows(name: str, patches: int, rows: Mapping[str, Row]) -> dict[str, Outcome]:
    """On each of two ranks or more: the outcome of each row, and on the first two what these are compared with."""
    alone = {"plain"} | {row.like for row in rows.values()}
    warnings.simplefilter("ignore")
    entry, rank = EVERY[name], dist.get_rank()
    torch.set_default_dtype(torch.float64 if name in DOUBLE else torch.float32)
    pipe = entry.make()
    if name in OWN:
        ensure_anatomies(pipe, build_single_runner)
    outcomes: dict[str, Outcome] = {}
    if rank == 0:
        outcomes |= {key: _draw_plain(pipe, entry, key) for key in ("plain", "two") if key in alone}
    threshold = [0.0]
    if rank == 1:
        if "stale alone" in alone:
            outcomes["stale alone"] = draw_row(pipe, entry, Row({"patches": patches, "warmup": 1}), build_single_runner)
        if "cached" in alone:
            threshold[0], outcomes["cached"] = _draw_cached(pipe, entry)
    dist.broadcast_object_list(threshold, src=1)
    for key, row in rows.items():
        if row.threshold is not None and row.threshold < 0:
            row = row._replace(threshold=threshold[0])
        if "warmup" in row.plan and "distrifusion" not in row.plan:
            row = row._replace(plan={**row.plan, "patches": patches})
        outcomes[key] = draw_row(pipe, entry, row, parallelize_whole)
    return outcomes


def draw_padded_prompts(name: str, patches: int) -> None:
    """On a rank: two prompts of unlike length, with shared synchronous steps and without."""
    entry, plan = EVERY[name], {"pipefusion": 2, "patches": patches}
    assert entry.padded_prompt is not None
    pipe, drawn = entry.make(), []
    for mode in ({"warmup_mode": "serial"}, {"warmup_mode": "sequence"}):
        runner = parallelize_whole(pipe, Plan(**plan, **mode))
        drawn.append(list(list_tensors(runner(**entry.padded_prompt()))))
        runner.restore()
    assert not (problem := compare_drawings(drawn[1], drawn[0], 1e-5)), problem


def parallelize_whole(pipe: Any, plan: Plan) -> Any:
    return ditile.parallelize(pipe, plan, keep_weights=True)


def draw_row(pipe: Any, entry: Entry, row: Row, build: Callable[[Any, Plan], Any]) -> Outcome:
    """Draws under a plan; the pipeline is whole again afterwards, and without a cache."""
    call = entry.two_images() if row.like == "two" and entry.two_images else entry.call()
    if row.like == "cached":
        call["num_inference_steps"] = CACHED_STEPS
    with counted_steps() as steps:
        try:
            if row.threshold is not None:
                _enable_cache(pipe, row.threshold)
            runner = build(pipe, Plan(**row.plan))
            try:
                drawn = tuple(list_tensors(runner(**call)))
                return Outcome(drawn, _list_skipped(pipe) if row.threshold else ())
            finally:
                runner.restore()
        except DitileError as error:
            return Outcome(refusal=str(error), steps=len(steps))
        finally:
            if row.threshold is not None:
                ditile.disable_cache(pipe)


def _draw_plain(pipe: Any, entry: Entry, key: str) -> Outcome:
    call = entry.call if key == "plain" else entry.two_images
    return Outcome() if call is None else Outcome(tuple(list_tensors(pipe(**call()))))


def _draw_cached(pipe: Any, entry: Entry) -> tuple[float, Outcome]:
    """A threshold between the differences that one process measures, and what it draws with it."""
    row = Row({}, "cached", threshold=1e-12)
    try:
        _enable_cache(pipe, 1e-12)
    except DitileError as error:
        return 0.0, Outcome(refusal=str(error))
    pipe(**entry.call() | {"num_inference_steps": CACHED_STEPS})
    reports = [report.to_dict() for report in caching.summary(pipe, logging=False)]
    ditile.disable_cache(pipe)
    found = sorted(d for r in reports for each in r["decisions"] for _, d in each["differences"] if d)
    gaps = [(b / a, (a * b) ** 0.5) for a, b in zip(found, found[1:], strict=False)]
    threshold = max(gaps)[1] if gaps else 1.0
    row = row._replace(threshold=threshold)
    _enable_cache(pipe, threshold)
    drawn = tuple(list_tensors(pipe(**entry.call() | {"num_inference_steps": CACHED_STEPS})))
    skipped = _list_skipped(pipe)
    ditile.disable_cache(pipe)
    return threshold, Outcome(drawn, skipped)


def _enable_cache(pipe: Any, threshold: float) -> None:
    ditile.enable_cache(pipe, DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=threshold))


def _list_skipped(pipe: Any) -> tuple[Any, ...]:
    return tuple(tuple(e.skipped) for report in caching.summary(pipe, logging=False) for e in report.decisions)


@contextmanager
def counted_steps() -> Iterator[list[int]]:
    """The steps that a divided pipeline has done."""
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        end_step = Loop._end_step

        def end_and_count(self: Any, step: int, *args: Any, **kwargs: Any) -> None:
            end_step(self, step, *args, **kwargs)
            # A proof of a model makes steps of its own.
            if not isinstance(self._pipe, StillPipeline):
                done.append(step)

        patch.setattr(Loop, "_end_step", end_and_count)
        yield done


def list_tensors(value: Any) -> list[Tensor]:
    """All tensors and arrays in what a pipeline returned."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, numpy.ndarray):
        return [torch.from_numpy(value)]
    values: Iterable[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    )
    return [found for one in values for found in list_tensors(one)]


def judge_row(name: str, row: Row, outcomes: Sequence[Mapping[str, Outcome]], key: str) -> str:
    """What is wrong with a row, in a line; empty where it holds.

    Args:
        name: the entry.
        row: what it must equal.
        outcomes: of each rank.
        key: the row's name.
    """
    wanted = {of: each for of, each in (*outcomes[0].items(), *outcomes[1].items()) if of in ALONE}
    want, tolerance = wanted[row.like], max(row.tolerance, LOOSE.get(name, 0.0) if row.tolerance else 0.0)
    refusals = {each[key].refusal for each in outcomes}
    if len(refusals) == 1 and (refusal := refusals.pop()):
        steps = max(each[key].steps for each in outcomes)
        if steps or "\n" in refusal:
            return f"refused after {steps} steps: {refusal}"
        return f"refused: {refusal}"
    for rank, each in enumerate(outcomes):
        got = each[key]
        if got.refusal:
            return f"refused on rank {rank} alone: {got.refusal}"
        if want.refusal:
            return f"one process refused: {want.refusal}"
        if problem := compare_drawings(got.drawn, want.drawn, tolerance):
            return f"rank {rank}: {problem}"
        if row.like == "cached" and (got.skipped != want.skipped or not any(want.skipped)):
            return f"rank {rank} skipped {got.skipped}, and one process {want.skipped}"
    if row.like == "stale alone" and not compare_drawings(want.drawn, wanted["plain"].drawn, 0.0):
        return "stale keys changed nothing"
    return ""


def compare_drawings(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float) -> str:
    """How two drawings differ, in words; empty where they do not by more than a share of the largest value."""
    if len(got) != len(want) or not want:
        return f"{len(got)} tensors, and {len(want)} expected"
    for one, other in zip(got, want, strict=True):
        if one.shape != other.shape:
            return f"shape {tuple(one.shape)}, not {tuple(other.shape)}"
        if not other.isfinite().all():
            return "the plain drawing is not finite"
        difference = float((one.double() - other.double()).abs().max() / other.double().abs().max())
        if not difference <= tolerance:
            return f"differs by {difference:.1e}"
    return ""
