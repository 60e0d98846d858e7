"""The questions of the suite: each stands alone, and gives one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ditile.measure.bench.options import Workload
from ditile.measure.bench.sweeps import Fits, list_method_plans, list_representative_plans

DEVICE_AGAINST_CPU = "one process, against the CPU"
GRAPHS = "cuda_graphs, against none"
WIDE = "bf16, wider than its numbers count"
SYNCHRONISATIONS = "host synchronisations in a call of 4 patches"
COMPILED = "4 patches, compiled"
RECORDED = "4 patches, cuda_graphs"
IDLE_CACHE = "a cache that skips nothing"
CACHES = ("F=1 W=1 R=0.12", "F=1 W=1 R=0.3")
CACHE_DIT = f"cache-dit, {CACHES[0]}"
ALL_METHODS = "each method"
PATCH_PLANS = ("patches=1", "patches=4", "patches=8")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteTask:
    """The items of one session of ranks.

    Attributes:
        items: the questions, in their order.
        work: the call that is timed.
        out: the file of lines.
        ends_at: `time.time()` after which no item is begun.
        small: whether everything is tiny.
    """

    items: tuple[SuiteItem, ...]
    work: Workload
    out: str
    ends_at: float
    small: bool


def list_one_rank_items(sizes: Iterable[int], *, gpu: bool) -> list[SuiteItem]:
    """The questions for one rank: exactness first, then seconds, caches, synchronisations, compile and memory."""
    first, *others = sizes
    exact = ["patches=4", "patches=4 offload=blocks", "vae=rows", WIDE]
    compiled = [COMPILED]
    if gpu:
        exact = [DEVICE_AGAINST_CPU, *exact, GRAPHS]
        compiled.insert(0, RECORDED)
    items = [
        *_make_items("exact", exact),
        *_make_items("methods", PATCH_PLANS, first),
        *_make_items("caches", [IDLE_CACHE, *CACHES], first),
        *_make_items("synchronisations", [SYNCHRONISATIONS], first),
        # Slow to prepare: compiling takes a minute, and blocks of a large model are copied to the host.
        *_make_items("compile", compiled, first),
        *_make_items("memory", ["patches=1 offload=blocks"], first),
    ]
    # Other sizes are what may be missing when the time is over.
    for size in others:
        items += _make_items("methods", PATCH_PLANS, size)
    # Last, as it leaves a forward of its own in the transformer.
    return [*items, *_make_items("caches", [CACHE_DIT], first)]


def _make_items(part: str, questions: Iterable[str], size: int = 0) -> list[SuiteItem]:
    return [SuiteItem(part, what, size) for what in questions]


def list_all_rank_items(
    ranks: int, size: int, fits: Fits, *, quick: bool, small: bool, share_gpu: bool
) -> list[SuiteItem]:
    """The questions for all ranks together: few steps, smaller messages and verify, then methods and memory."""
    pipefusion = f"pipefusion={ranks} patches={2 * ranks}"
    few_steps = f"pipefusion={ranks} patches={ranks}"
    verified = [pipefusion, f"ulysses={ranks}", f"ring={ranks}", f"tensor={ranks}"]
    plans = list_method_plans(ranks, fits)
    if quick:
        plans = list_representative_plans(ranks, fits)
        verified = verified[:2]
    if small:
        verified = verified[:1]
    # Replicas generate other images than one rank, with which all others are compared.
    methods = [str(plan) for plan in plans if plan.data == 1 and fits(plan)]
    # Their seconds would be those of gloo, which carries gigabytes through the CPU: one line says so.
    if share_gpu:
        methods = [ALL_METHODS]
    items = _make_items("few steps", [f"{few_steps} warmup=1", f"{few_steps} warmup=2 warmup_mode=sequence"])
    for what in (pipefusion, f"ulysses={ranks}"):
        items += _make_items("wire", [f"{what} wire_dtype=fp8", f"{what} wire_dtype=int8"])
    return [
        *items,
        *_make_items("verify", verified),
        *_make_items("methods", methods, size),
        *_make_items("memory", [f"{pipefusion} offload=blocks"], size),
    ]
