"""A session: what each rank does to measure cells side by side.

For each number of ranks: an untimed run of everything, in which memory is watched too; then rounds, in each of which
every cell has its turn, behind the plain pipeline on one rank at its size. A speed-up is thus a ratio within a round.
Pipelines of a world are loaded once and stay; plans that divide no weights share one.
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

from ditile.cli.bench.cells import ONE_RANK, Cell, by_world
from ditile.cli.bench.options import Workload
from ditile.cli.bench.runs import append
from ditile.cli.bench.subjects import Subject, subject_of
from ditile.cli.bench.turns import bar, cached, timed_loop
from ditile.cli.bench.worlds import Worlds, free_to_move, meet
from ditile.cli.generate import quiet
from ditile.distributed import env
from ditile.distributed.mesh import Communicators, pick_device
from ditile.distributed.transport import gather_json
from ditile.models.registry import model_of
from ditile.plan.plan import Plan
from ditile.planner.disturbance import Again, Gauge
from ditile.planner.live import LiveBytes
from ditile.runner.runner import Runner, parallelize

PAUSES = 100
"""Tenths of a second that a run waits at most for others to leave, before it is made again."""
UNTIMED = 2
"""Runs of a cell that are not counted: one as the others are, and one in which memory is watched."""
SHARED = ("text_encoder", "text_encoder_2", "text_encoder_3", "vae")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the ranks of a session are told.

    Attributes:
        work: what runs.
        todo: the cells, each with the rounds that are left.
        keys: what a cell's runs are kept under; those of the plain pipeline too.
        bounds: of the speed-up of a cell, where they are known.
        out: the folder.
        threads: of each rank.
        cores: that may be used.
        load: of the machine before the session, where it says.
        remeasure: how often a run may be made again that others disturbed.
        title: of the progress bar.
    """

    work: Workload
    todo: Sequence[tuple[Cell, int]]
    keys: Mapping[Cell, str]
    bounds: Mapping[Cell, float]
    out: str
    threads: int
    cores: Sequence[int] | None
    load: float | None = None
    remeasure: int = 0
    title: str = "runs"

    def to_json(self) -> str:
        """For a rank that is started with a line of text."""
        maps = {name: list(getattr(self, name).items()) for name in ("keys", "bounds")}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(values | maps | {"work": dataclasses.asdict(self.work)})

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The inverse."""
        values = json.loads(text)
        maps = {name: {Cell(*cell): value for cell, value in values[name]} for name in ("keys", "bounds")}
        todo = [(Cell(*cell), left) for cell, left in values["todo"]]
        return cls(**values | maps | {"todo": todo, "work": Workload(**values["work"])})


def run(task: Task) -> None:
    """Measures, on every rank. Rank 0 writes a line for each run."""
    quiet()
    torch.set_num_threads(task.threads)
    worlds = Worlds.join(task.work.stall_timeout, task.cores)
    task = Task.from_json(worlds.first(task.to_json()))  # rank 0 knows what is there already
    groups = by_world(cell for cell, _ in task.todo)
    total = sum(_runs(cells, dict(task.todo)) for cells in groups.values())
    with bar(task.title, total, shown=worlds.rank == 0) as advance:
        for world, cells in groups.items():
            with worlds.of(world, task.threads) as inside:
                if inside:
                    _World(task, cells, advance).measure()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    worlds.part()


def in_turn(cells: Sequence[Cell], number: int) -> list[Cell]:
    """The cells of a round: in each, another one follows the plain pipeline, behind which a machine may be faster."""
    first = number % len(cells) if cells else 0
    return [*cells[first:], *cells[:first]]


def _runs(cells: Sequence[Cell], left: Mapping[Cell, int]) -> int:
    """Runs of the cells of one world, the plain pipeline's included."""
    sizes = {cell.one_rank for cell in cells}
    rounds = max(left[cell] for cell in cells)
    plain = sum(1 for k in range(rounds) for one in sizes if any(c.one_rank == one and left[c] > k for c in cells))
    return UNTIMED * (len(cells) + len(sizes)) + sum(left[cell] for cell in cells) + plain


@dataclass(slots=True)
class _World:
    """The cells of one number of ranks, on one of them."""

    task: Task
    cells: Sequence[Cell]
    advance: Callable[[int], None]
    rank: int = field(init=False)
    subject: Subject = field(init=False)
    device: torch.device = field(init=False)
    slower: Gauge = field(init=False)
    again: Again = field(init=False)
    """Of the last run that counts."""
    whole: Any = field(init=False, default=None)
    runners: dict[str, Runner] = field(init=False, default_factory=dict)
    loop: list[float] = field(init=False, default_factory=list)
    """Seconds of the pieces of the plain pipeline's last loop."""

    def measure(self) -> None:
        """All of it."""
        self.rank, self.subject = dist.get_rank(), subject_of(self.task.work)
        place = env.torchrun()
        self.device = pick_device(self.task.work.device, 0 if place is None else place.local_rank)
        self.slower = Gauge(dist.group.WORLD, self.device)
        left = dict(self.task.todo)
        plain = list(dict.fromkeys(cell.one_rank for cell in self.cells))
        self._load()
        for cell in (*plain, *self.cells):
            self._warm(cell)
        for k in range(max(left.values())):
            for one in plain:
                due = [cell for cell in self.cells if cell.one_rank == one and left[cell] > k]
                if due:
                    seconds = self._counted(one)
                    self._write(one, {"seconds": seconds, "loop": sum(self.loop), "pieces": [self.loop]})
                for cell in in_turn(due, k):
                    timed = {"one_rank_s": seconds, "one_rank_pieces": self.loop, "seconds": self._counted(cell)}
                    self._write(cell, timed | {"bound": self.task.bounds.get(cell)} | self._reported(cell))

    def _load(self) -> None:
        """The pipelines: a whole one where it is needed, and one for each plan that divides weights."""
        plans, groups = [Plan.parse(text) for text in dict.fromkeys(cell.plan for cell in self.cells)], Communicators()
        if self.rank == 0 or any(_shares(plan) for plan in plans):
            self.whole = self.subject.pipeline(None)
            self.whole.to(self.device)
        for plan in plans:
            pipe = self.whole if _shares(plan) else self.subject.pipeline(plan)
            if not _shares(plan) and plan.text == "each" and self.whole is not None:
                shared = {name: part for name in SHARED if (part := getattr(self.whole, name, None)) is not None}
                pipe.register_modules(**shared)
            runner = parallelize(pipe, plan, device=self.task.work.device, groups=groups)
            runner.trace = True
            self.runners[str(plan)] = runner

    def _warm(self, cell: Cell) -> None:
        """The runs that are not counted."""
        self._run(cell)
        self.advance(1)
        if self.task.remeasure:
            self.slower()  # learns what its best is
        self._write(cell, {"memory": self._memory(cell)})

    def _counted(self, cell: Cell) -> float:
        """Seconds of a call that counts."""
        self.again = Again(self.slower, self.task.remeasure, PAUSES)
        seconds = self.again.measured(lambda: self._run(cell))
        self.advance(1)
        return seconds

    def _run(self, cell: Cell) -> float:
        """Seconds of a call: of the slowest rank, from when all were ready."""
        seconds = 0.0
        with self._ready(cell) as call:
            self._settle()
            began = time.perf_counter()
            if call is not None:
                call()
                self._settle()
                seconds = time.perf_counter() - began
        return float(max(gather_json(seconds, dist.group.WORLD)))

    def _memory(self, cell: Cell) -> list[dict[str, int]]:
        """Bytes of each rank that computes, without the VAE where that is not divided. Costs a run."""
        found: dict[str, int] | None = None
        with self._ready(cell, latent=cell.plan == ONE_RANK or cell.parsed.vae == "whole") as call:
            if call is not None:
                peak = self._peak(call)
                runner = self.runners.get(cell.plan)
                report = None if runner is None else runner.report
                keys, cache = (report.key_bytes, report.cache_bytes) if report is not None else (0, 0)
                parameters = held(self.whole if runner is None else runner.pipe)
                found = {
                    "parameters": parameters, "keys": keys, "cache": cache,
                    "activations": max(0, peak - keys - cache),
                }  # fmt: skip
        self.advance(1)
        return [one for one in gather_json(found, dist.group.WORLD) if one is not None]

    def _peak(self, call: Callable[[], None]) -> int:
        """The most bytes that a call had at one time besides the weights."""
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
    def _ready(self, cell: Cell, *, latent: bool = False) -> Iterator[Callable[[], None] | None]:
        """Everything in place for one call, on all ranks at once; None where this rank waits meanwhile."""
        plain = cell.plan == ONE_RANK
        target = self.whole if plain else self.runners[cell.plan]
        with cached(target, cell.configs, cell.label):
            meet()
            if plain and self.rank > 0:
                yield None
                return
            arguments = self.subject.call(self.whole if plain else target.pipe, cell)
            arguments |= {"output_type": "latent"} if latent else {}
            arguments |= {} if plain else {"output": "first"}

            def call() -> None:
                target(**arguments)

            if not plain:
                yield call
                return
            with free_to_move(self.task.cores), timed_loop(model_of(self.whole)) as taken:
                yield call
            self.loop = taken()

    def _reported(self, cell: Cell) -> dict[str, Any]:
        """What every rank has to say of the last call."""
        reports = self.runners[cell.plan].reports()
        return {
            "bytes_sent": [report["bytes_sent"] for report in reports],
            "loop": max(sum(report["step_seconds"]) for report in reports),
            "pieces": [report["step_seconds"] for report in reports],
            "steps": reports[0]["steps"],
            "exposed": [exposed(report) for report in reports],
        }

    def _write(self, cell: Cell, record: dict[str, Any]) -> None:
        if self.rank == 0:
            when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            about = {"world": cell.world, "when": when, "load": self.task.load}
            if "seconds" in record and self.task.remeasure and self.slower.watches:
                about |= {"again": self.again.made, "slower": self.again.last, "product_s": self.slower.best_s}
            append(self.task.out, self.task.keys[cell], record | about)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def exposed(report: Mapping[str, Any]) -> dict[str, Any]:
    """The share of the steps' time in which a rank waited for messages and computed nothing.

    Returns:
        share: of all steps; warmup: the part of it in synchronous steps, where others are not; kinds: parts by kind.
    """
    total = sum(report["step_seconds"]) or 1.0
    kinds = {kind: sum(seconds) / total for kind, seconds in report["waited"].items()}
    warm = [step for step in report["synchronous"] if len(report["synchronous"]) < report["steps"]]
    early = sum(seconds[step] for seconds in report["waited"].values() for step in warm) / total
    return {"share": sum(kinds.values()), "warmup": early, "kinds": kinds}


def held(pipe: Any) -> int:
    """Bytes of the weights that a pipeline's models hold here, the VAE's apart."""
    models = [part for name, part in pipe.components.items() if isinstance(part, nn.Module) and name != "vae"]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if not tensor.is_meta}
    return sum(storages.values())


def _shares(plan: Plan) -> bool:
    """Whether a plan leaves the whole pipeline on every rank, which others may use too."""
    return not plan.divides_weights and plan.text == "each"
