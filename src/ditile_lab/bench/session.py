"""A session: each rank's part in measuring cells side by side.

For each number of ranks, all cells run twice without being counted, once to measure memory. Then come rounds: in each,
the plain pipeline on one rank runs at each size, and then every cell of that size. So a speed-up is a ratio within a
round.
"""

from __future__ import annotations

import datetime
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ditile.distributed.backend import pick_device, release_memory
from ditile.distributed.mesh import find_local_rank
from ditile.distributed.transport import gather_json
from ditile.model.support import find_loop_model
from ditile.planner.footprint import StorageTracker
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.prepare import silence_libraries
from ditile_lab.bench.cells import ONE_RANK, BenchCell, group_cells_by_world
from ditile_lab.bench.options import Workload
from ditile_lab.bench.runs import append_run
from ditile_lab.bench.subjects import create_bench_subject
from ditile_lab.bench.submission import digest_output
from ditile_lab.bench.worlds import Worlds
from ditile_lab.rows import list_values
from ditile_lab.sessions import TurnPipelines, rotate, time_call, time_denoising_loop

UNTIMED = 2
"""Runs of a cell that are not counted: one to warm up, and one to measure memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTask:
    """The task of a session, for all its ranks.

    Attributes:
        work: the call that is measured.
        missing: cell -> the number of rounds that are missing.
        keys: cell -> the key of its runs, also for cells of the plain pipeline.
        bounds: cell -> the bound of its speed-up, if it is known.
        out: the folder of the runs.
        threads: CPU threads of each rank.
        cores: the usable cores.
        load: the load average before the session, if the system reports it.
    """

    work: Workload
    missing: Mapping[BenchCell, int]
    keys: Mapping[BenchCell, str]
    bounds: Mapping[BenchCell, float]
    out: str
    threads: int
    cores: Sequence[int]
    load: float | None = None


class LiveBytes(StorageTracker):
    """Bytes of the storages that operators make within it, without the memory that kernels use inside.

        with LiveBytes() as live:
            vae.decode(latents)
        live.peak, live.largest

    Attributes:
        now: bytes of the storages that were made and are still there.
        peak: the most that there were at one time.
        largest: bytes of the largest storage.
    """

    def __init__(self) -> None:
        super().__init__(self._count_storage)
        self.now = 0
        self.peak = 0
        self.largest = 0

    def _count_storage(self, tensor: Tensor) -> Callable[[], None]:
        size = tensor.untyped_storage().nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)

        def subtract_storage() -> None:
            self.now -= size

        return subtract_storage


def run_session(task: BenchTask) -> None:
    """Measure the cells of a task; every rank calls it, and rank 0 writes a line for each run."""
    silence_libraries()
    torch.set_num_threads(task.threads)
    worlds = Worlds.join_shared_store(task.work.stall_timeout, task.cores)
    # Only rank 0 has read the folder, so it tells the other ranks which runs are missing.
    text = worlds.broadcast_text(json.dumps(list(task.missing.items())))
    missing = {BenchCell(*cell): rounds for cell, rounds in json.loads(text)}
    groups = group_cells_by_world(missing)
    total = sum(count_session_runs(cells, missing) for cells in groups.values())
    with show_progress_bar("runs", total, shown=worlds.rank == 0) as advance:
        for world, cells in groups.items():
            with worlds.create_world_group(world, task.threads) as inside:
                if inside:
                    _WorldBenchmark(task, cells, advance).measure_rounds(missing)
                # The pipelines of a world are gone before the next world loads its own.
                release_memory()
    worlds.leave_shared_store()


def list_due_cells(cells: Sequence[BenchCell], missing: Mapping[BenchCell, int], number: int) -> list[list[BenchCell]]:
    """Return the cells of a round that need more runs, in groups of one size: the plain pipeline, then its plans."""
    groups: dict[BenchCell, list[BenchCell]] = {}
    for cell in cells:
        if missing[cell] > number:
            groups.setdefault(cell.one_rank_baseline, []).append(cell)
    return [[plain, *rotate(plans, number)] for plain, plans in groups.items()]


def count_session_runs(cells: Sequence[BenchCell], missing: Mapping[BenchCell, int]) -> int:
    """Count the runs of one world's cells, including the plain pipeline's."""
    count = UNTIMED * len({*cells, *(cell.one_rank_baseline for cell in cells)})
    for number in range(max(missing[cell] for cell in cells)):
        count += sum(map(len, list_due_cells(cells, missing, number)))
    return count


class _WorldBenchmark:
    """Measures the cells of one number of ranks, on one of these ranks."""

    def __init__(self, task: BenchTask, cells: Sequence[BenchCell], advance: Callable[[int], None]) -> None:
        self._task = task
        self._cells = cells
        self._advance = advance
        self._subject = create_bench_subject(task.work)
        self._device = pick_device(task.work.device, find_local_rank())
        plans = [cell.plan for cell in cells]
        self._pipelines = TurnPipelines(self._subject.create_pipeline, plans, self._device, cores=task.cores)
        for runner in self._pipelines.runners.values():
            runner.trace = True
        self._plain_pieces: list[float] = []
        self._digest: str | None = None

    def measure_rounds(self, missing: Mapping[BenchCell, int]) -> None:
        """Run all rounds of all cells, after the runs that are not counted."""
        plain_cells = dict.fromkeys(cell.one_rank_baseline for cell in self._cells)
        for cell in (*plain_cells, *self._cells):
            self._time_turn(cell)
            self._append_record(cell, {"memory": self._measure_memory(cell), "digest": self._digest})
        for number in range(max(missing[cell] for cell in self._cells)):
            for plain, *cells in list_due_cells(self._cells, missing, number):
                plain_seconds = self._time_turn(plain)
                pieces = self._plain_pieces
                self._append_record(plain, {"seconds": plain_seconds, "loop": sum(pieces), "pieces": [pieces]})
                for cell in cells:
                    record = {"one_rank_s": plain_seconds, "one_rank_pieces": pieces}
                    record["seconds"] = self._time_turn(cell)
                    record["bound"] = self._task.bounds.get(cell)
                    self._append_record(cell, record | self._collect_reports(cell))

    def _time_turn(self, cell: BenchCell) -> float:
        """Return the seconds of a call on the slowest rank, from the moment when all ranks were ready."""
        seconds = 0.0
        with self._prepare_call(cell) as call:
            if call is not None:
                output, seconds = time_call(call, self._device)
                # Ranks other than the first get no output.
                self._digest = None if output is None else digest_output(output)
        self._advance(1)
        return float(max(gather_json(seconds, dist.group.WORLD)))

    def _measure_memory(self, cell: BenchCell) -> list[dict[str, int]]:
        """Measure the bytes of each computing rank by use, without the VAE if it is not divided. This makes a run."""
        # Ranks that only wait have no sizes.
        sizes = None
        without_vae = cell.plan == ONE_RANK or cell.plan_object.vae == "whole"
        with self._prepare_call(cell, latent=without_vae) as call:
            if call is not None:
                peak = self._measure_peak_bytes(call)
                sizes = {"parameters": 0, "keys": 0, "cache": 0}
                pipe = self._pipelines.plain
                runner = self._pipelines.runners.get(cell.plan)
                if runner is not None:
                    pipe = runner.pipe
                    assert runner.report is not None
                    sizes |= {"keys": runner.report.key_bytes, "cache": runner.report.cache_bytes}
                sizes["activations"] = max(0, peak - sum(sizes.values()))
                sizes["parameters"] = count_weight_bytes(pipe)
        self._advance(1)
        everyone = gather_json(sizes, dist.group.WORLD)
        return [sizes_of_rank for sizes_of_rank in everyone if sizes_of_rank is not None]

    def _measure_peak_bytes(self, call: Callable[[], Any]) -> int:
        """Return the most bytes that a call needs at one time, without the weights."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            call()
            return int(torch.cuda.max_memory_allocated(self._device)) - before
        # Otherwise garbage tensors of the last call would be counted.
        gc.collect()
        with LiveBytes() as live:
            call()
        return int(live.peak)

    @contextmanager
    def _prepare_call(self, cell: BenchCell, *, latent: bool = False) -> Iterator[Callable[[], Any] | None]:
        """Prepare one call on all ranks at once, and yield it; yield None if this rank only waits."""
        with self._pipelines.prepare_turn(cell.plan, cell.cache_configs, cell.display_label) as target:
            if target is None:
                yield None
                return
            pipe = self._pipelines.plain
            loop_timer: Any = nullcontext()
            overrides = {}
            if latent:
                overrides["output_type"] = "latent"
            if cell.plan == ONE_RANK:
                # A runner traces its own loop.
                loop_timer = time_denoising_loop(find_loop_model(pipe))
            else:
                pipe = target.pipe
                overrides["output_on"] = "first"
            arguments = self._subject.make_call_arguments(pipe, cell, self._device) | overrides
            with loop_timer as read_pieces:
                yield lambda: target(**arguments)
            if read_pieces is not None:
                self._plain_pieces = read_pieces()

    def _collect_reports(self, cell: BenchCell) -> dict[str, Any]:
        """Collect bytes, seconds and exposed shares of every rank in the last call."""
        reports = self._pipelines.runners[cell.plan].reports()
        pieces = list_values(reports, "step_seconds")
        return {
            "bytes_sent": list_values(reports, "bytes_sent"),
            "loop": max(map(sum, pieces)),
            "pieces": pieces,
            "steps": reports[0]["steps"],
            "exposed": list(map(compute_exposed_shares, reports)),
        }

    def _append_record(self, cell: BenchCell, record: dict[str, Any]) -> None:
        if dist.get_rank() > 0:
            return
        when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        record |= {"world": cell.num_ranks, "when": when, "load": self._task.load}
        append_run(self._task.out, self._task.keys[cell], record)


def compute_exposed_shares(report: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the share of the steps' time in which a rank only waited for messages.

    Returns:
        share: the share of all steps; warmup: its part in synchronous steps, if not all are; kinds: its parts by kind.
    """
    total = sum(report["step_seconds"]) or 1.0
    warmup_steps = report["synchronous"]
    # If all steps are synchronous there is no warmup.
    if len(warmup_steps) == report["steps"]:
        warmup_steps = []
    kinds = {}
    warmup = 0.0
    for kind, seconds in report["waited"].items():
        kinds[kind] = sum(seconds) / total
        warmup += sum(seconds[step] for step in warmup_steps)
    return {"share": sum(kinds.values()), "warmup": warmup / total, "kinds": kinds}


def count_weight_bytes(pipe: Any) -> int:
    """Count the bytes of the pipeline's weights on this rank, without the VAE."""
    sizes = {}
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and name != "vae":
            for tensor in (*part.parameters(), *part.buffers()):
                # Blocks of other ranks are placeholders on the meta device.
                if not tensor.is_meta:
                    # The sizes are kept by address, so that tied weights count once.
                    sizes[tensor.data_ptr()] = tensor.nbytes
    return sum(sizes.values())
