"""A rank of the suite: answers items one after the other, and writes a line for each as soon as it is known."""

from __future__ import annotations

import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ditile.cache.config_text import parse_cache_line
from ditile.distributed import env
from ditile.distributed.backend import pick_device
from ditile.distributed.mesh import find_local_rank
from ditile.distributed.transport import gather_json
from ditile.measure.bench.cells import BenchCell
from ditile.measure.bench.gpu import items as suite
from ditile.measure.bench.gpu.items import SuiteItem, SuiteTask
from ditile.measure.bench.random_models import RandomModel
from ditile.measure.bench.subjects import RandomSubject, create_bench_subject
from ditile.measure.bench.turns import use_cache_within
from ditile.measure.evaluate.metrics import compute_psnr
from ditile.measure.verify import run_plan_checks
from ditile.plan.errors import DitileError
from ditile.plan.extras import is_installed
from ditile.plan.plan import Plan
from ditile.runner.load import defaults, load
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.runner import parallelize

ROUNDS = 2
"""Calls that are timed, behind one that is not; the median counts."""
SHAPES, SHAPES_OF_FEW_STEPS = "shapes-flux", "shapes-flux-turbo"
CAPTION = "a large red circle above a small blue square on a white background"
IDLE_CACHE_LINE = "F=1 W=1 R=0"
WIDE_SIZE = (64, 4352)
LATE = "no time left"


def run_suite_items(task: SuiteTask) -> None:
    """Answers the items of a task; every rank calls it, and rank 0 writes the lines.

    Raises:
        RuntimeError: whatever an item raises that is no refusal: these ranks are lost, and the caller starts others for
            the items that have no line yet.
    """
    silence_libraries()
    session = SuiteSession(task)
    for item in task.items:
        began = time.perf_counter()
        try:
            row = {"skipped": LATE} if session.is_late() else ANSWERS[item.part](session, item)
        except DitileError as error:  # every rank refuses alike
            row = {"error": str(error)}
        session.append_row(item, row | {"took_s": round(time.perf_counter() - began, 2)})
        session.release_memory()


class TimedCall(NamedTuple):
    """What a call took.

    Attributes:
        latents: its result.
        seconds: the median of some calls, on the slowest rank.
        first_s: those of the first call, which loads kernels or compiles.
        peak_gb: of the allocator, on the rank that needs most; None on a CPU.
    """

    latents: Tensor
    seconds: float
    first_s: float
    peak_gb: float | None


class SuiteSession:
    """What items of one rank share: the device, the pipeline that is timed, and what the plain pipeline takes.

    Args:
        task: the task.
    """

    def __init__(self, task: SuiteTask) -> None:
        self.task, self.subject = task, create_bench_subject(task.work)
        self.device = pick_device(task.work.device, find_local_rank())
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.group = dist.group.WORLD if self.world > 1 else None
        self._pipe: Any = None
        self._plain: dict[int, TimedCall] = {}
        self._shapes: dict[Any, np.ndarray[Any, Any]] = {}

    def is_late(self) -> bool:
        """Whether nothing may be begun any more, on all ranks alike."""
        return bool(gather_json(time.time() > self.task.ends_at, self.group)[0])

    def append_row(self, item: SuiteItem, row: Mapping[str, Any]) -> None:
        """Writes the line of an item."""
        if self.rank == 0:
            about = {"part": item.part, "what": item.what, "size": item.size or None, "ranks": self.world}
            with Path(self.task.out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(about | dict(row)) + "\n")

    def release_memory(self) -> None:
        """Gives memory of the last item back, and tells `launch` that there is progress."""
        env.report_progress()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def pipe(self) -> Any:
        """The pipeline that is timed, whole and on the device."""
        if self._pipe is None:
            self._pipe = self.create_pipeline()
        return self._pipe

    def create_pipeline(self) -> Any:
        """Another pipeline of the same weights."""
        if isinstance(self.subject, RandomSubject):
            model = RandomModel.parse_model_name(self.subject.name)
            return model.create_pipeline(self.task.work.height or 512, self.subject.torch_dtype, self.device)
        return self.subject.create_pipeline(None).to(self.device)

    def make_call(self, size: int) -> dict[str, Any]:
        """New arguments of the call that is timed; it returns latents."""
        return self.subject.make_call_arguments(self.pipe, BenchCell("", "", "", size, size), self.device)

    def time_call(self, draw: Callable[..., Any], size: int) -> TimedCall:
        """Times a pipeline or runner on all ranks that call it."""
        seconds: list[float] = []
        for index in range(1 + ROUNDS):
            call = self.make_call(size)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                if index == 1:
                    torch.cuda.reset_peak_memory_stats(self.device)
            began = time.perf_counter()
            result = draw(**call)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began)
            env.report_progress()
        peak = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else None
        return TimedCall(result[0], statistics.median(seconds[1:]), seconds[0], peak)

    def time_plain(self, size: int) -> TimedCall:
        """The plain pipeline, on rank 0 alone while the others wait; they have its seconds and no latents."""
        if size not in self._plain:
            timed = self.time_call(self.pipe, size) if self.rank == 0 else None
            numbers = gather_json(None if timed is None else list(timed[1:]), self.group)[0]
            self._plain[size] = timed or TimedCall(torch.empty(0), *numbers)
        return self._plain[size]

    def compare_call(self, timed: TimedCall, size: int) -> dict[str, Any]:
        """The seconds of a call beside those of the plain pipeline, and how far its latents are from that one's."""
        plain = self.time_plain(size)
        everyone = gather_json([timed.seconds, timed.first_s, timed.peak_gb or 0.0], self.group)
        seconds, first, peak = (max(values) for values in zip(*everyone, strict=True))
        relative = finite = None
        if self.rank == 0:
            got, wanted = timed.latents.float().cpu(), plain.latents.float().cpu()
            relative, finite = float((got - wanted).norm() / wanted.norm()), bool(got.isfinite().all())
        return {
            "seconds": seconds,
            "of_plain": seconds / plain.seconds,
            "first_s": first,
            "peak_gb": peak or None,
            "plain_s": plain.seconds,
            "plain_gb": plain.peak_gb,
            "relative": relative,
            "finite": finite,
        }

    def draw_shapes(
        self, plan: Plan | None = None, dtype: torch.dtype = torch.float32, device: Any = None, **more: Any
    ) -> np.ndarray[Any, Any]:
        """The bundled model's picture, [1, H, W, 3] in whole numbers up to 255; a plan may be of all ranks."""
        pipe: Any = load(SHAPES, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        device = device or self.device
        runner = pipe.to(device) if plan is None else parallelize(pipe, plan, device, **more)
        return _draw_picture(runner, SHAPES, self.shape_steps)

    @property
    def shape_steps(self) -> int:
        """Steps of the bundled model's picture."""
        return 4 if self.task.small else int(defaults(SHAPES)["num_inference_steps"])

    def remember_shapes(self, key: Any, draw: Callable[[], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """A picture that several items are compared with."""
        if key not in self._shapes:
            self._shapes[key] = draw()
        return self._shapes[key]


def _draw_picture(runner: Any, model: str, steps: int) -> np.ndarray[Any, Any]:
    call = defaults(model) | {"num_inference_steps": steps, "output_type": "np"}
    picture = runner(CAPTION, generator=torch.Generator("cpu").manual_seed(0), **call).images[0]
    pictures: np.ndarray[Any, Any] = (np.asarray(picture) * 255).round().astype(np.uint8)[None]
    return pictures


def _compare_pictures(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"psnr_db": float(compute_psnr(got, wanted)[0]), "equal": bool(np.array_equal(got, wanted))}


def answer_exactness(session: SuiteSession, item: SuiteItem) -> dict[str, Any]:
    """The bundled model on this device under a plan of one rank, against the plain pipeline there."""
    if item.what == suite.WIDE:
        return _answer_wide_picture(session)
    plain = session.remember_shapes("plain", session.draw_shapes)
    if item.what == suite.DEVICE_AGAINST_CPU:
        return _compare_pictures(plain, session.draw_shapes(device=torch.device("cpu")))
    if item.what == suite.GRAPHS:
        stale = Plan(patches=4)
        return _compare_pictures(session.draw_shapes(stale, cuda_graphs=True), session.draw_shapes(stale))
    plan = replace(Plan.parse(item.what), warmup=session.shape_steps)
    return _compare_pictures(session.draw_shapes(plan), plain)


def _answer_wide_picture(session: SuiteSession) -> dict[str, Any]:
    """A picture in bf16 with more columns than a number of bf16 counts, in patches and whole."""
    model = RandomModel(family="flux", blocks=3, heads=2, head_dim=16)
    height, width = WIDE_SIZE
    drawn = []
    for plan in (None, Plan(patches=3, warmup=2)):
        pipe = model.create_pipeline(height, torch.bfloat16, session.device)
        draw = pipe if plan is None else parallelize(pipe, plan, session.device)
        call = model.make_call_arguments(height, width, 2, torch.bfloat16, session.device)
        drawn.append(draw(**call).images)
    return {"equal": bool(torch.equal(*drawn))}


def answer_plan_seconds(session: SuiteSession, item: SuiteItem) -> dict[str, Any]:
    """Seconds and memory of a plan, beside those of the plain pipeline on one rank."""
    return _time_runner(session, Plan.parse(item.what), item.size)


def _time_runner(session: SuiteSession, plan: Plan, size: int, **more: Any) -> dict[str, Any]:
    session.time_plain(size)
    runner = parallelize(session.pipe, plan, session.device, keep_weights=True, **more)
    try:
        timed = session.time_call(runner, size)
        report = runner.report
        row = session.compare_call(timed, size)
        sent = sum(gather_json(report.bytes_sent if report else 0, session.group))
        return row | {"sent_bytes": sent}
    finally:
        if not runner.is_broken:
            runner.restore()
            session.pipe.to(session.device)


def answer_compiled_seconds(session: SuiteSession, item: SuiteItem) -> dict[str, Any]:
    """The same, with compiled or recorded blocks."""
    more = {"compile": True} if item.what == suite.COMPILED else {"cuda_graphs": True}
    # To try the suite in tiny sizes, blocks are called as compiled ones, and run as they are: to compile takes long.
    with torch.compiler.set_stance("force_eager" if session.task.small else "default"):
        return _time_runner(session, Plan(patches=4), item.size, **more)


def answer_synchronisations(session: SuiteSession, item: SuiteItem) -> dict[str, Any]:
    """How often the host waits for the device in a call, and where."""
    if session.device.type != "cuda":
        return {"skipped": "not applicable on a CPU"}
    runner = parallelize(session.pipe, Plan(patches=4), session.device, keep_weights=True)
    runner(**session.make_call(item.size))
    with warnings.catch_warnings(record=True) as seen, _warn_of_synchronisations():
        warnings.simplefilter("always")
        runner(**session.make_call(item.size))
    runner.restore()
    places: dict[str, int] = {}
    for each in seen:
        if "synchroniz" in str(each.message):
            place = f"{Path(each.filename).name}:{each.lineno}"
            places[place] = places.get(place, 0) + 1
    return {"count": sum(places.values()), "places": places, "steps": session.subject.get_num_steps()}


@contextmanager
def _warn_of_synchronisations() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def answer_cache_seconds(session: SuiteSession, item: SuiteItem) -> dict[str, Any]:
    """Seconds of the plain pipeline with a cache."""
    session.time_plain(item.size)
    line = IDLE_CACHE_LINE if item.what == suite.IDLE_CACHE else item.what
    with use_cache_within(session.pipe, parse_cache_line(line), item.what):
        return session.compare_call(session.time_call(session.pipe, item.size), item.size)


def answer_verification(session: SuiteSession, item: SuiteItem) -> dict[str, Any]:
    """The checks of `ditile verify`, on the bundled model."""

    def make_pipeline(plan: Plan | None) -> Any:
        pipe: Any = load(SHAPES, plan=plan)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def make_arguments(pipe: Any) -> dict[str, Any]:
        call = defaults(SHAPES) | {"num_inference_steps": 4, "output_type": "latent", "prompt": CAPTION}
        return call | {"generator": torch.Generator("cpu").manual_seed(0)}

    checks, where = run_plan_checks(make_pipeline, make_arguments, Plan.parse(item.what), 4, session.task.work.device)
    failed = [f"{check.name}: {check.says}" for check in checks if check.ok is False]
    return {"ok": not failed, "failed": failed, "checks": {check.name: check.ok for check in checks}, "where": where}


def answer_picture(session: SuiteSession, item: SuiteItem) -> dict[str, Any]:
    """The PSNR of the bundled model's picture under a plan of all ranks to that of one process."""
    few = item.part == "few steps"
    model = SHAPES_OF_FEW_STEPS if few else SHAPES
    steps = int(defaults(model)["num_inference_steps"]) if few else session.shape_steps

    def draw_picture(plan: Plan | None) -> np.ndarray[Any, Any]:
        pipe: Any = load(model, dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        runner = pipe.to(session.device) if plan is None else parallelize(pipe, plan, session.device)
        return _draw_picture(runner, model, steps)

    plain = session.remember_shapes(model, lambda: draw_picture(None))
    return _compare_pictures(draw_picture(Plan.parse(item.what)), plain) | {"steps": steps}


Peer = Callable[[Any, int], AbstractContextManager[Callable[..., Any]]]
"""(pipeline of its own, ranks) -> what draws, within a context."""
PACKAGES = {suite.CACHE_DIT: "cache_dit", suite.XDIT: "xfuser", suite.DIFFUSERS: "diffusers"}
"""What each of the other libraries is."""


@contextmanager
def use_cache_dit(pipe: Any, ranks: int) -> Iterator[Callable[..., Any]]:
    """cache-dit's cache with its own defaults."""
    cache_dit: Any = import_module("cache_dit")
    cache_dit.enable_cache(pipe)
    try:
        yield pipe
    finally:
        cache_dit.disable_cache(pipe)


@contextmanager
def use_diffusers_parallelism(pipe: Any, ranks: int) -> Iterator[Callable[..., Any]]:
    """diffusers' context parallelism, with Ulysses."""
    from diffusers import ContextParallelConfig

    pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))
    yield pipe


@contextmanager
def use_xdit(pipe: Any, ranks: int) -> Iterator[Callable[..., Any]]:
    """xDiT's wrapper around the pipeline, with Ulysses."""
    xfuser: Any = import_module("xfuser")
    engine, call = xfuser.xFuserArgs(model="", ulysses_degree=ranks).create_config()
    yield xfuser.xDiTParallel(pipe, engine, call)


PEERS: Mapping[str, Peer] = {
    suite.CACHE_DIT: use_cache_dit,
    suite.DIFFUSERS: use_diffusers_parallelism,
    suite.XDIT: use_xdit,
}


def answer_other_library(session: SuiteSession, item: SuiteItem) -> dict[str, Any]:
    """Seconds of another library on the same pipeline, where it is installed."""
    if not is_installed(PACKAGES[item.what]):
        return {"skipped": f"{PACKAGES[item.what]} is not installed"}
    if session.world > 1 and session.device.type != "cuda":
        return {"skipped": f"{item.what} divides pictures over GPUs alone"}
    session.time_plain(item.size)
    with PEERS[item.what](session.create_pipeline(), session.world) as draw:
        return session.compare_call(session.time_call(draw, item.size), item.size)


ANSWERS: Mapping[str, Callable[[SuiteSession, SuiteItem], dict[str, Any]]] = {
    "exact": answer_exactness,
    "verify": answer_verification,
    "methods": answer_plan_seconds,
    "memory": answer_plan_seconds,
    "synchronisations": answer_synchronisations,
    "compile": answer_compiled_seconds,
    "caches": answer_cache_seconds,
    "few steps": answer_picture,
    "wire": answer_picture,
    "others": answer_other_library,
}
"""Part -> what answers its items."""
