"""The questions of the suite: each is an item that stands alone, and gives one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from ditile.measure.bench.options import Workload
from ditile.measure.bench.sweeps import Fits, list_method_plans, list_representative_plans
from ditile.plan.plan import Plan

DEVICE_AGAINST_CPU = "one process, against the CPU"
EXACT = "warmup = steps"
GRAPHS = "cuda_graphs, against none"
WIDE = "bf16, wider than its numbers count"
SYNCHRONISATIONS = "host synchronisations in a call of 4 patches"
COMPILED = "4 patches, compiled"
RECORDED = "4 patches, cuda_graphs"
IDLE_CACHE = "a cache that leaves out nothing"
CACHES = ("F=1 W=1 R=0.12", "F=1 W=1 R=0.3")
CACHE_DIT = "cache-dit"
DIFFUSERS = "diffusers, ulysses"
XDIT = "xDiT, ulysses"
FEW = ("warmup=1", "warmup=2 warmup_mode=sequence")
WIRE = "wire_dtype"


class SuiteItem(NamedTuple):
    """A question.

    Attributes:
        part: what it belongs to.
        what: which one it is; a plan in one line, where it is about a plan.
        size: pixels of a side; 0 where the question has its own.
    """

    part: str
    what: str
    size: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuiteTask:
    """The items of one session of ranks.

    Attributes:
        items: the questions, in their order.
        work: the call that is timed.
        out: the file of lines.
        ends_at: `time.time()` behind which no item is begun.
        small: whether everything is tiny.
    """

    items: tuple[SuiteItem, ...]
    work: Workload
    out: str
    ends_at: float
    small: bool


def list_one_rank_items(sizes: Iterable[int], *, gpu: bool) -> list[SuiteItem]:
    """What one rank is asked: exactness, then seconds, synchronisations, compile, caches and memory."""
    first, *others = sizes
    exact = [*([DEVICE_AGAINST_CPU] if gpu else []), "patches=4", "patches=4 offload=blocks", "vae=rows"]
    items = [SuiteItem("exact", what) for what in (*exact, *([GRAPHS] if gpu else []), WIDE)]
    items += [SuiteItem("methods", text, first) for text in ("patches=1", "patches=4", "patches=8")]
    items.append(SuiteItem("synchronisations", SYNCHRONISATIONS, first))
    items += [SuiteItem("compile", what, first) for what in (COMPILED, *([RECORDED] if gpu else []))]
    items += [SuiteItem("caches", what, first) for what in (IDLE_CACHE, *CACHES)]
    items.append(SuiteItem("memory", "patches=1 offload=blocks", first))
    items += [SuiteItem("methods", text, size) for size in others for text in ("patches=1", "patches=4", "patches=8")]
    return [*items, SuiteItem("others", CACHE_DIT, first)]


def list_all_rank_items(ranks: int, size: int, fits: Fits, *, quick: bool, small: bool) -> list[SuiteItem]:
    """What all ranks are asked together: verify, then methods, few steps, bytes on the wire, and other libraries."""
    plans = list_representative_plans(ranks, fits) if quick else list_method_plans(ranks, fits)
    checked = [Plan(pipefusion=ranks, patches=2 * ranks), Plan(ulysses=ranks), Plan(ring=ranks), Plan(tensor=ranks)]
    items = [SuiteItem("verify", str(plan)) for plan in checked[: 1 if small else 2 if quick else None]]
    items += [SuiteItem("methods", str(plan), size) for plan in plans if plan.data == 1 and fits(plan)]
    items += [SuiteItem("memory", f"{Plan(pipefusion=ranks, patches=2 * ranks)} offload=blocks", size)]
    items += [SuiteItem("few steps", f"pipefusion={ranks} patches={ranks} {how}") for how in FEW]
    items += [SuiteItem("wire", text) for text in _list_wire_plans(ranks)]
    return [*items, SuiteItem("others", DIFFUSERS, size), SuiteItem("others", XDIT, size)]


def _list_wire_plans(ranks: int) -> list[str]:
    """Plans of smaller messages, where plans have such a field."""
    if WIRE not in {field.name for field in dataclasses.fields(Plan)}:
        return []
    patches = f"pipefusion={ranks} patches={2 * ranks}"
    return [f"{text} {WIRE}={dtype}" for text in (patches, f"ulysses={ranks}") for dtype in ("fp8", "int8")]
