"""A session: each rank's part in measuring cells side by side.

For each number of ranks, all cells run twice without being counted, once to measure memory. Then come rounds: in each,
the plain pipeline on one rank runs at each size, and then every cell of that size. So a speed-up is a ratio within a
round. Pipelines of a world are loaded once and stay in memory; plans that divide no weights share one.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ditile.distributed import env
from ditile.distributed.backend import pick_device
from ditile.distributed.mesh import Communicators
from ditile.distributed.transport import gather_json
from ditile.measure.bench.cells import ONE_RANK, BenchCell, group_cells_by_world
from ditile.measure.bench.options import Workload
from ditile.measure.bench.runs import append_run
from ditile.measure.bench.subjects import BenchSubject, create_bench_subject
from ditile.measure.bench.turns import time_denoising_loop, use_cache_within
from ditile.measure.bench.worlds import Worlds, allow_all_cores, wait_for_all_ranks
from ditile.model.registry import find_loop_model
from ditile.plan.plan import Plan
from ditile.planner.calibrate import DisturbanceGuard, SlowdownGauge
from ditile.planner.footprint import LiveBytes
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.runner import Runner, parallelize

PAUSES = 100
"""Tenths of a second that a run waits at most for a quiet machine, before it is repeated."""
UNTIMED = 2
"""Runs of a cell that are not counted: one to warm up, and one in which memory is measured."""
SHARED = ("text_encoder", "text_encoder_2", "text_encoder_3", "vae")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTask:
    """The task of a session, for all its ranks.

    Attributes:
        work: the call that is measured.
        todo: the cells, each with the number of rounds that are missing.
        keys: cell -> the key of its runs, also for cells of the plain pipeline.
        bounds: cell -> the bound of its speed-up, if it is known.
        out: the folder of the runs.
        threads: CPU threads of each rank.
        cores: the cores that may be used; None if the system does not say.
        load: the load average before the session, if the system says it.
        remeasure: how often a disturbed run may be repeated.
        title: the title of the progress bar.
    """

    work: Workload
    todo: Sequence[tuple[BenchCell, int]]
    keys: Mapping[BenchCell, str]
    bounds: Mapping[BenchCell, float]
    out: str
    threads: int
    cores: Sequence[int] | None
    load: float | None = None
    remeasure: int = 0
    title: str = "runs"

    def to_json(self) -> str:
        """The task as text, for a rank that is started by a command."""
        maps = {name: list(getattr(self, name).items()) for name in ("keys", "bounds")}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(values | maps | {"work": dataclasses.asdict(self.work)})

    @classmethod
    def from_json(cls, text: str) -> BenchTask:
        """The inverse of `to_json`."""
        values = json.loads(text)
        maps = {name: {BenchCell(*cell): value for cell, value in values[name]} for name in ("keys", "bounds")}
        todo = [(BenchCell(*cell), left) for cell, left in values["todo"]]
        return cls(**values | maps | {"todo": todo, "work": Workload(**values["work"])})


def run_session(task: BenchTask) -> None:
    """Measures the cells of a task; every rank calls it, and rank 0 writes a line for each run."""
    silence_libraries()
    torch.set_num_threads(task.threads)
    worlds = Worlds.join_shared_store(task.work.stall_timeout, task.cores)
    # Only rank 0 has read the folder, so its task has the runs that are missing.
    task = BenchTask.from_json(worlds.broadcast_text(task.to_json()))
    groups = group_cells_by_world(cell for cell, _ in task.todo)
    total = sum(_count_session_runs(cells, dict(task.todo)) for cells in groups.values())
    with show_progress_bar(task.title, total, shown=worlds.rank == 0) as advance:
        for world, cells in groups.items():
            with worlds.create_world_group(world, task.threads) as inside:
                if inside:
                    _WorldBenchmark(task, cells, advance).measure_all_cells()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    worlds.leave_shared_store()


def rotate_cells(cells: Sequence[BenchCell], number: int) -> list[BenchCell]:
    """The cells in the order of a round: each round another one is first, because a machine may be faster then."""
    first = number % len(cells) if cells else 0
    return [*cells[first:], *cells[:first]]


def _count_session_runs(cells: Sequence[BenchCell], left: Mapping[BenchCell, int]) -> int:
    """Runs of the cells of one world, the plain pipeline's included."""
    sizes = {cell.one_rank_baseline for cell in cells}
    rounds = max(left[cell] for cell in cells)
    plain = sum(
        1 for k in range(rounds) for one in sizes if any(c.one_rank_baseline == one and left[c] > k for c in cells)
    )
    return UNTIMED * (len(cells) + len(sizes)) + sum(left[cell] for cell in cells) + plain


@dataclass(slots=True)
class _WorldBenchmark:
    """Measures the cells of one number of ranks, on one of these ranks."""

    task: BenchTask
    cells: Sequence[BenchCell]
    advance: Callable[[int], None]
    rank: int = field(init=False)
    subject: BenchSubject = field(init=False)
    device: torch.device = field(init=False)
    slower: SlowdownGauge = field(init=False)
    again: DisturbanceGuard = field(init=False)
    """The guard of the last counted run."""
    whole: Any = field(init=False, default=None)
    runners: dict[str, Runner] = field(init=False, default_factory=dict)
    loop: list[float] = field(init=False, default_factory=list)
    """Seconds of the parts of the plain pipeline's last loop."""

    def measure_all_cells(self) -> None:
        """Runs all rounds of all cells."""
        self.rank, self.subject = dist.get_rank(), create_bench_subject(self.task.work)
        place = env.read_torchrun_place()
        self.device = pick_device(self.task.work.device, 0 if place is None else place.local_rank)
        self.slower = SlowdownGauge(dist.group.WORLD, self.device)
        left = dict(self.task.todo)
        plain = list(dict.fromkeys(cell.one_rank_baseline for cell in self.cells))
        self._load_pipelines()
        for cell in (*plain, *self.cells):
            self._run_untimed(cell)
        for k in range(max(left.values())):
            for one in plain:
                due = [cell for cell in self.cells if cell.one_rank_baseline == one and left[cell] > k]
                if due:
                    seconds = self._measure_call(one)
                    self._append_record(one, {"seconds": seconds, "loop": sum(self.loop), "pieces": [self.loop]})
                for cell in rotate_cells(due, k):
                    timed = {"one_rank_s": seconds, "one_rank_pieces": self.loop, "seconds": self._measure_call(cell)}
                    self._append_record(
                        cell, timed | {"bound": self.task.bounds.get(cell)} | self._collect_reports(cell)
                    )

    def _load_pipelines(self) -> None:
        """Loads a whole pipeline if it is needed, and one for each plan that divides weights."""
        plans, groups = [Plan.parse(text) for text in dict.fromkeys(cell.plan for cell in self.cells)], Communicators()
        if self.rank == 0 or any(_uses_whole_pipeline(plan) for plan in plans):
            self.whole = self.subject.create_pipeline(None)
            self.whole.to(self.device)
        for plan in plans:
            pipe = self.whole if _uses_whole_pipeline(plan) else self.subject.create_pipeline(plan)
            if not _uses_whole_pipeline(plan) and plan.text == "each" and self.whole is not None:
                shared = {name: part for name in SHARED if (part := getattr(self.whole, name, None)) is not None}
                pipe.register_modules(**shared)
            runner = parallelize(pipe, plan, device=self.task.work.device, groups=groups)
            runner.trace = True
            self.runners[str(plan)] = runner

    def _run_untimed(self, cell: BenchCell) -> None:
        """Makes the runs of a cell that are not counted."""
        self._time_call(cell)
        self.advance(1)
        if self.task.remeasure:
            self.slower()  # the gauge learns the machine's best
        self._append_record(cell, {"memory": self._measure_memory(cell)})

    def _measure_call(self, cell: BenchCell) -> float:
        """Seconds of a counted call, which is repeated if it was disturbed."""
        self.again = DisturbanceGuard(self.slower, self.task.remeasure, PAUSES)
        seconds = self.again.measure_undisturbed(lambda: self._time_call(cell))
        self.advance(1)
        return seconds

    def _time_call(self, cell: BenchCell) -> float:
        """Seconds of a call on the slowest rank, from the moment when all ranks were ready."""
        seconds = 0.0
        with self._prepare_call(cell) as call:
            self._synchronize_device()
            began = time.perf_counter()
            if call is not None:
                call()
                self._synchronize_device()
                seconds = time.perf_counter() - began
        return float(max(gather_json(seconds, dist.group.WORLD)))

    def _measure_memory(self, cell: BenchCell) -> list[dict[str, int]]:
        """Bytes of each rank that computes, by use, without the VAE if that is not divided. It makes a run."""
        bytes_by_use: dict[str, int] | None = None
        with self._prepare_call(cell, latent=cell.plan == ONE_RANK or cell.plan_object.vae == "whole") as call:
            if call is not None:
                peak = self._measure_peak_bytes(call)
                runner = self.runners.get(cell.plan)
                report = None if runner is None else runner.report
                keys, cache = (report.key_bytes, report.cache_bytes) if report is not None else (0, 0)
                parameters = count_weight_bytes(self.whole if runner is None else runner.pipe)
                bytes_by_use = {"parameters": parameters, "keys": keys, "cache": cache}
                bytes_by_use["activations"] = max(0, peak - keys - cache)
        self.advance(1)
        return [one for one in gather_json(bytes_by_use, dist.group.WORLD) if one is not None]

    def _measure_peak_bytes(self, call: Callable[[], None]) -> int:
        """The most bytes that a call needs at one time, without the weights."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            call()
            return int(torch.cuda.max_memory_allocated(self.device)) - before
        gc.collect()
        with LiveBytes() as live:
            call()
        peak: int = live.peak
        return peak

    @contextmanager
    def _prepare_call(self, cell: BenchCell, *, latent: bool = False) -> Iterator[Callable[[], None] | None]:
        """Prepares one call on all ranks at once, and yields it; yields None if this rank only waits."""
        plain = cell.plan == ONE_RANK
        target = self.whole if plain else self.runners[cell.plan]
        with use_cache_within(target, cell.cache_configs, cell.display_label):
            wait_for_all_ranks()
            if plain and self.rank > 0:
                yield None
                return
            arguments = self.subject.make_call_arguments(self.whole if plain else target.pipe, cell, self.device)
            arguments |= {"output_type": "latent"} if latent else {}
            arguments |= {} if plain else {"output_on": "first"}

            def call_target() -> None:
                target(**arguments)

            if not plain:
                yield call_target
                return
            with allow_all_cores(self.task.cores), time_denoising_loop(find_loop_model(self.whole)) as taken:
                yield call_target
            self.loop = taken()

    def _collect_reports(self, cell: BenchCell) -> dict[str, Any]:
        """Bytes, seconds and exposed shares of every rank in the last call."""
        reports = self.runners[cell.plan].reports()
        return {
            "bytes_sent": [report["bytes_sent"] for report in reports],
            "loop": max(sum(report["step_seconds"]) for report in reports),
            "pieces": [report["step_seconds"] for report in reports],
            "steps": reports[0]["steps"],
            "exposed": [compute_exposed_shares(report) for report in reports],
        }

    def _append_record(self, cell: BenchCell, record: dict[str, Any]) -> None:
        if self.rank == 0:
            when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            about = {"world": cell.num_ranks, "when": when, "load": self.task.load}
            if "seconds" in record and self.task.remeasure and self.slower.watches:
                about |= {"again": self.again.num_repeats, "slower": self.again.last, "product_s": self.slower.best_s}
            append_run(self.task.out, self.task.keys[cell], record | about)

    def _synchronize_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compute_exposed_shares(report: Mapping[str, Any]) -> dict[str, Any]:
    """The share of the steps' time in which a rank waited for messages and computed nothing.

    Returns:
        share: that of all steps; warmup: its part in synchronous steps, if not all are; kinds: its parts by kind.
    """
    total = sum(report["step_seconds"]) or 1.0
    kinds = {kind: sum(seconds) / total for kind, seconds in report["waited"].items()}
    warm = [step for step in report["synchronous"] if len(report["synchronous"]) < report["steps"]]
    early = sum(seconds[step] for seconds in report["waited"].values() for step in warm) / total
    return {"share": sum(kinds.values()), "warmup": early, "kinds": kinds}


def count_weight_bytes(pipe: Any) -> int:
    """Bytes of the weights of a pipeline's models on this rank, without the VAE."""
    models = [part for name, part in pipe.components.items() if isinstance(part, nn.Module) and name != "vae"]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if not tensor.is_meta}
    return sum(storages.values())


def _uses_whole_pipeline(plan: Plan) -> bool:
    """Whether a plan leaves the whole pipeline on every rank, so that plans can share it."""
    return not plan.divides_weights and plan.text == "each"
