"""A rank of the suite: answers items one after the other, and writes a line for each as soon as it is known."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ditile.cache.config_text import parse_cache_line
from ditile.distributed import env
from ditile.distributed.backend import pick_device
from ditile.distributed.mesh import find_local_rank
from ditile.distributed.transport import gather_json
from ditile.measure.bench.cells import ONE_RANK, BenchCell
from ditile.measure.bench.gpu import items as suite
from ditile.measure.bench.gpu.items import SuiteItem, SuiteTask
from ditile.measure.bench.random_models import RandomModel
from ditile.measure.bench.subjects import create_bench_subject
from ditile.measure.evaluate.metrics import ImageArrays, compute_psnr
from ditile.measure.rows import Row, RowFile
from ditile.measure.sessions import list_host_syncs, release_memory, time_call, use_cache_within
from ditile.measure.verify import verify_plan
from ditile.plan.errors import DitileError
from ditile.plan.extras import is_installed
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.requests.options import VerifyOptions
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.runner import parallelize

ROUNDS = 2
"""Calls that are timed, after one that is not; the median counts."""
SHAPES = "shapes-flux"
SHAPES_OF_FEW_STEPS = "shapes-flux-turbo"
CAPTION = "a large red circle above a small blue square on a white background"
# bfloat16 counts to 256 in whole numbers: this width has 272 tokens in a row.
WIDE_SIZE = (64, 4352)
LATE = "no time left"
SHARED = "ranks share one GPU: what would be timed is gloo, which sends through the CPU"


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
        row: Row = {"skipped": LATE}
        # The clocks of hosts differ, so rank 0 decides.
        if not gather_json(time.time() > task.ends_at, session.group)[0]:
            try:
                row = ANSWERS[item.part](session, item)
            except DitileError as error:  # the same on every rank
                row = {"error": str(error)}
        if session.rank == 0:
            row["took_s"] = round(time.perf_counter() - began, 2)
            open_suite_file(task.out).append([describe_item(item, session.world) | row])
        release_memory()
        env.report_progress()


def open_suite_file(path: str | Path) -> RowFile:
    """The file of lines, which all sessions of a suite add to."""
    return RowFile(Path(path), "part")


def describe_item(item: SuiteItem, ranks: int) -> Row:
    """The beginning of an item's line."""
    return {"part": item.part, "what": item.what, "size": item.size or None, "ranks": ranks}


@dataclass(frozen=True)
class TimedCall:
    """A timed call: its latents, and the numbers of the slowest rank.

    Attributes:
        latents: its result; None on ranks that did not generate.
        seconds: the median of some calls.
        first_s: seconds of the first call, which loads kernels or compiles.
        peak_gb: of the allocator; None on a CPU.
    """

    latents: Tensor | None
    seconds: float
    first_s: float
    peak_gb: float | None


class SuiteSession:
    """What the items of one rank share: the device, the pipeline that is timed, and the plain pipeline's numbers."""

    def __init__(self, task: SuiteTask) -> None:
        self.task = task
        self.subject = create_bench_subject(task.work)
        self.device = pick_device(task.work.device, find_local_rank())
        self.rank = 0
        self.world = 1
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
            self.group = dist.group.WORLD
        self._pipe: Any = None
        self._plain_calls: dict[int, TimedCall] = {}
        self._plain_images: dict[str, ImageArrays] = {}

    @property
    def pipe(self) -> Any:
        """The pipeline that is timed, whole and on the device."""
        if self._pipe is None:
            # The weights of a large random model are made on the device: on the CPU that takes minutes.
            self._pipe = self.subject.create_whole_pipeline(self.device)
        return self._pipe

    def make_call(self, size: int) -> CallArguments:
        """New arguments of the call that is timed; it returns latents."""
        return self.subject.make_call_arguments(self.pipe, BenchCell(ONE_RANK, "", size, size), self.device)

    def time_target(self, target: Callable[..., Any], size: int, group: dist.ProcessGroup | None) -> TimedCall:
        """Times a pipeline or runner on the ranks of a group, which all call it."""
        seconds = []
        latents = None
        for index in range(1 + ROUNDS):
            call = self.make_call(size)
            # The peak of the first call would include what compiling and choosing kernels needs.
            if self.device.type == "cuda" and index == 1:
                torch.cuda.synchronize(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            result, took = time_call(partial(target, **call), self.device)
            seconds.append(took)
            latents = result[0]
            env.report_progress()
        peak_gb = 0.0
        if self.device.type == "cuda":
            peak_gb = torch.cuda.max_memory_allocated(self.device) / 1e9
        numbers = gather_json([statistics.median(seconds[1:]), seconds[0], peak_gb], group)
        slowest, first, peak = (max(values) for values in zip(*numbers, strict=True))
        return TimedCall(latents, slowest, first, peak or None)

    def time_plain(self, size: int) -> TimedCall:
        """The plain pipeline, on rank 0 alone while the others wait; they get its numbers."""
        if size not in self._plain_calls:
            numbers = None
            latents = None
            if self.rank == 0:
                timed = self.time_target(self.pipe, size, None)
                latents = timed.latents
                numbers = [timed.seconds, timed.first_s, timed.peak_gb]
            self._plain_calls[size] = TimedCall(latents, *gather_json(numbers, self.group)[0])
        return self._plain_calls[size]

    def compare_with_plain(self, target: Callable[..., Any], size: int) -> Row:
        """The seconds and memory of a target on all ranks, and how far its latents are from the plain pipeline's."""
        plain = self.time_plain(size)
        timed = self.time_target(target, size, self.group)
        row: Row = {
            "seconds": timed.seconds,
            "of_plain": timed.seconds / plain.seconds,
            "first_s": timed.first_s,
            "peak_gb": timed.peak_gb,
            "plain_s": plain.seconds,
            "plain_gb": plain.peak_gb,
            "relative": None,
            "finite": None,
        }
        if timed.latents is not None and plain.latents is not None:
            latents = timed.latents.float().cpu()
            reference = plain.latents.float().cpu()
            row["relative"] = float((latents - reference).norm() / reference.norm())
            row["finite"] = bool(latents.isfinite().all())
        return row

    def compare_plan_with_plain(self, plan: Plan, size: int, *, cuda_graphs: bool = False, **options: Any) -> Row:
        """The same of a plan, with the bytes that all ranks sent; the pipeline is whole again afterwards."""
        # Before the pipeline is divided.
        self.time_plain(size)
        # Steps are recorded only in rows that say so: "auto" would decide by how busy the host is.
        options |= {"keep_weights": True, "cuda_graphs": cuda_graphs}
        runner = parallelize(self.pipe, plan, self.device, **options)
        try:
            row = self.compare_with_plain(runner, size)
            sent = 0
            if runner.report is not None:
                sent = runner.report.bytes_sent
            row["sent_bytes"] = sum(gather_json(sent, self.group))
            return row
        finally:
            if not runner.is_broken:
                runner.restore()
                # Offloaded blocks come back on the CPU.
                self.pipe.to(self.device)

    def generate_shapes(
        self,
        plan: Plan | None = None,
        model: str = SHAPES,
        device: torch.device | None = None,
        *,
        cuda_graphs: bool = False,
    ) -> ImageArrays:
        """A bundled model's image `[1, H, W, 3]` in float32, plain or under a plan of all ranks."""
        device = device or self.device
        runner: Any = load(model, dtype=torch.float32)
        runner.set_progress_bar_config(disable=True)
        if plan is None:
            runner.to(device)
        else:
            runner = parallelize(runner, plan, device, cuda_graphs=cuda_graphs)
        call = defaults(model) | {"num_inference_steps": self.count_steps(model), "output_type": "np"}
        image = runner(CAPTION, generator=torch.Generator("cpu").manual_seed(0), **call).images[0]
        images: ImageArrays = (np.asarray(image) * 255).round().astype(np.uint8)[None]
        return images

    def count_steps(self, model: str) -> int:
        """Denoising steps of a bundled model's image."""
        if model == SHAPES and self.task.small:
            return 4
        return int(defaults(model)["num_inference_steps"])

    def compare_images(self, images: ImageArrays, model: str = SHAPES) -> Row:
        """Compares an image with the plain pipeline's image on this device."""
        if model not in self._plain_images:
            self._plain_images[model] = self.generate_shapes(model=model)
        return describe_difference(images, self._plain_images[model])


def describe_difference(images: ImageArrays, reference: ImageArrays) -> Row:
    """The PSNR of an image, and whether it equals its reference."""
    return {"psnr_db": float(compute_psnr(images, reference)[0]), "equal": bool(np.array_equal(images, reference))}


def answer_exactness(session: SuiteSession, item: SuiteItem) -> Row:
    """The bundled model on this device under a plan of one rank, against the plain pipeline there."""
    if item.what == suite.WIDE:
        return _answer_wide_image(session)
    if item.what == suite.DEVICE_AGAINST_CPU:
        return session.compare_images(session.generate_shapes(device=torch.device("cpu")))
    if item.what == suite.GRAPHS:
        plan = Plan(patches=4)
        recorded = session.generate_shapes(plan, cuda_graphs=True)
        return describe_difference(recorded, session.generate_shapes(plan))
    # With a synchronous step for every step no key is stale, so the image must be the same.
    plan = replace(Plan.parse(item.what), warmup=session.count_steps(SHAPES))
    return session.compare_images(session.generate_shapes(plan))


def _answer_wide_image(session: SuiteSession) -> Row:
    """Whether an image in bfloat16 with more columns than bfloat16 counts is the same in patches and whole."""
    model = RandomModel(family="flux", blocks=3, heads=2, head_dim=16)
    height, width = WIDE_SIZE
    images = []
    for plan in (None, Plan(patches=3, warmup=2)):
        target = model.create_pipeline(height, torch.bfloat16, session.device)
        if plan is not None:
            target = parallelize(target, plan, session.device, cuda_graphs=False)
        call = model.make_call_arguments(height, width, 2, torch.bfloat16, session.device)
        images.append(target(**call).images)
    return {"equal": bool(torch.equal(*images))}


def answer_plan_seconds(session: SuiteSession, item: SuiteItem) -> Row:
    """Seconds and memory of a plan, compared with the plain pipeline on one rank."""
    if item.what == suite.ALL_METHODS:
        return {"skipped": SHARED}
    return session.compare_plan_with_plain(Plan.parse(item.what), item.size)


def answer_compiled_seconds(session: SuiteSession, item: SuiteItem) -> Row:
    """The same, with compiled or recorded blocks."""
    options = {"cuda_graphs": True}
    if item.what == suite.COMPILED:
        options = {"compile": True}
    # To try the suite in tiny sizes, blocks are called as compiled ones, and run as they are: to compile takes long.
    stance = "force_eager" if session.task.small else "default"
    with torch.compiler.set_stance(stance):
        return session.compare_plan_with_plain(Plan(patches=4), item.size, **options)


def answer_synchronisations(session: SuiteSession, item: SuiteItem) -> Row:
    """How often the host waits for the device in a call, and where."""
    if session.device.type != "cuda":
        return {"skipped": "not applicable on a CPU"}
    runner = parallelize(session.pipe, Plan(patches=4), session.device, keep_weights=True, cuda_graphs=False)
    # Constants are made in the first call, which may wait.
    runner(**session.make_call(item.size))
    with list_host_syncs() as places:
        torch.cuda.set_sync_debug_mode("warn")
        runner(**session.make_call(item.size))
    runner.restore()
    return {"count": len(places), "places": dict(Counter(places)), "steps": session.subject.get_num_steps()}


def answer_cache_seconds(session: SuiteSession, item: SuiteItem) -> Row:
    """Seconds of the plain pipeline with a cache."""
    line = item.what
    if line == suite.CACHE_DIT and not is_installed("cache_dit"):
        return {"skipped": "cache-dit is not installed"}
    session.time_plain(item.size)
    if line == suite.CACHE_DIT:
        with _use_cache_dit(session.pipe):
            return session.compare_with_plain(session.pipe, item.size)
    if line == suite.IDLE_CACHE:
        line = "F=1 W=1 R=0"
    with use_cache_within(session.pipe, parse_cache_line(line), item.what):
        return session.compare_with_plain(session.pipe, item.size)


@contextmanager
def _use_cache_dit(pipe: Any) -> Iterator[None]:
    """Gives a pipeline the cache of cache-dit, with the settings of ours."""
    cache_dit: Any = import_module("cache_dit")
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=0.12
    )
    cache_dit.enable_cache(pipe, cache_config=config)
    try:
        yield
    finally:
        cache_dit.disable_cache(pipe)


def answer_verification(session: SuiteSession, item: SuiteItem) -> Row:
    """The checks of `ditile verify`, on the bundled model."""
    options = VerifyOptions(model=SHAPES, steps=4, device=session.task.work.device)
    verdict = verify_plan(options, Plan.parse(item.what))
    return {
        "ok": verdict.is_proven,
        "failed": [f"{check.name}: {check.says}" for check in verdict.checks if check.ok is False],
        "checks": {check.name: check.ok for check in verdict.checks},
        "where": verdict.title,
    }


def answer_image(session: SuiteSession, item: SuiteItem) -> Row:
    """The PSNR of the bundled model's image under a plan of all ranks to the image of one process."""
    model = SHAPES_OF_FEW_STEPS if item.part == "few steps" else SHAPES
    images = session.generate_shapes(Plan.parse(item.what), model)
    return session.compare_images(images, model) | {"steps": session.count_steps(model)}


ANSWERS: Mapping[str, Callable[[SuiteSession, SuiteItem], Row]] = {
    "exact": answer_exactness,
    "verify": answer_verification,
    "methods": answer_plan_seconds,
    "memory": answer_plan_seconds,
    "synchronisations": answer_synchronisations,
    "compile": answer_compiled_seconds,
    "caches": answer_cache_seconds,
    "few steps": answer_image,
    "wire": answer_image,
}
"""Part -> the function that answers its items."""
