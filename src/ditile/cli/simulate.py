"""`ditile verify --simulate cuda`: what the ranks of a plan would do on GPUs, before anybody rents them.

Configs are read and weights are not. One process runs rank after rank on a simulated GPU, from the embeddings of a text
to latents. Beside the memory that is seen stands what the planner predicts of the same call.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from ditile.cli.options import VerifyOptions
from ditile.distributed import env
from ditile.distributed.console import show_progress_bar
from ditile.errors import PlanError, StateError
from ditile.plan.plan import AUTO, Plan
from ditile.plan.units import format_bytes
from ditile.planner import hardware
from ditile.planner.answer import format_ranks
from ditile.planner.memory import count_rank_memory
from ditile.planner.question import PlanQuestion
from ditile.planner.simulation.call import SimulatedCall, simulate_rank
from ditile.planner.simulation.gpu import AFTER, CALL, REHEARSAL, SETUP, Finding, SimulationError
from ditile.planner.subject import PlanSubject
from ditile.runner.load import choose_dtype_name, find_model_source

GPU = "h100-nvlink"
"""A profile of GPUs; the memory of a call is the same on all of them."""
RANKS_BESIDE = 8
"""Columns of ranks in a table of 80 columns."""
RANKS_TOGETHER = (AUTO, "sequence", "separate")
"""Values of `warmup_mode` in which a rank goes on from what others send beside activations."""
LATER = "later steps"
PLACES = {SETUP: "connecting", CALL: "before the loop", REHEARSAL: REHEARSAL, AFTER: "behind the loop"}


class SimulatedRank(NamedTuple):
    """A rank: what it did, and the bytes at its peak that the planner predicts, text encoders left out."""

    rank: int
    call: SimulatedCall
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class PlanSimulation:
    """The result of a simulation.

    Attributes:
        title: the call and the plan.
        ranks: those that were simulated, in order.
    """

    title: str
    ranks: Sequence[SimulatedRank]

    @property
    def findings(self) -> Mapping[Finding, list[int]]:
        """What must not happen on a GPU -> the ranks on which it does."""
        found: dict[Finding, list[int]] = {}
        for each in self.ranks:
            for finding in each.call.record.findings:
                found.setdefault(finding, []).append(each.rank)
        return found

    @property
    def is_proven(self) -> bool:
        """Whether a GPU has nothing to complain of."""
        return not self.findings

    def render_tables(self) -> list[Table | str]:
        """What the command shows, in tables of 80 columns at most; lines of code are not cut."""
        most = max(each.call.record.peak_bytes for each in self.ranks)
        name, unit = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
        return [
            self.title,
            f"{name} of each rank, without text encoders and decode",
            _make_memory_table(self.ranks, unit),
            f"{name} at the peak of each step, by rank",
            *_make_rank_tables(self.ranks, _list_step_peaks(self.ranks, unit)),
            "messages of the call",
            _make_message_table(self.ranks),
            "how often the host waits for the GPU, by rank",
            *_make_rank_tables(self.ranks, _list_sync_counts(self.ranks)),
            "where it waits: times (the most of a rank), and the line of code",
            *_list_sync_sites(self.ranks),
            *_list_findings(self.findings),
        ]


def simulate_plan(proof: VerifyOptions, plan: Plan) -> PlanSimulation:
    """Simulates ranks of a plan on a model by name.

    Raises:
        PlanError, ModelError, LoadError: if the model, the call or the plan does not fit, or cannot be simulated.
        StateError: if a GPU would refuse what a rank does.
    """
    ranks = _pick_ranks(proof, plan)
    source = find_model_source(proof.model, weights=False)
    dtype: torch.dtype = getattr(torch, choose_dtype_name(source, proof.dtype, on_gpu=True))
    call = _fill_call_arguments(proof, plan)
    with contextlib.redirect_stdout(sys.stderr):
        predict = _make_memory_predictor(proof.model, source, plan, call, dtype)
        simulated = []
        with show_progress_bar("simulated ranks", len(ranks)) as advance:
            for rank in ranks:
                simulated.append(SimulatedRank(rank, _simulate_one(source, plan, rank, call, dtype), predict(rank)))
                advance(1)
    size = " x ".join(str(call[name]) for name in ("height", "width", "num_frames") if call.get(name))
    what = f"{proof.model}, {size}, {proof.steps} steps, {str(dtype).removeprefix('torch.')}"
    return PlanSimulation(f"{what}; {plan}; torch {torch.__version__} on simulated GPUs, without weights", simulated)


def _pick_ranks(proof: VerifyOptions, plan: Plan) -> Sequence[int]:
    if env.read_torchrun_place() is not None:
        raise PlanError("simulate=cuda runs all ranks in one process; start it without torchrun")
    if plan.warmup == AUTO:
        raise PlanError(f"warmup={AUTO} decides by numbers, and nothing is known of them here; simulate with warmup=1")
    if plan.tensor > 1:
        raise PlanError(f"tensor={plan.tensor} cannot be simulated: there are no weights to cut; leave tensor out")
    if plan.warmup_mode in RANKS_TOGETHER:
        raise PlanError(
            f"warmup_mode={plan.warmup_mode} cannot be simulated: a rank takes part in what others answer, and ranks "
            "are simulated one by one; simulate with warmup_mode=serial or pipelined"
        )
    ranks = range(plan.world) if proof.ranks is None else sorted(set(proof.ranks))
    if wrong := [rank for rank in ranks if not 0 <= rank < plan.world]:
        raise PlanError(f"ranks={wrong[0]} is none of '{plan}', which has ranks 0 to {plan.world - 1}")
    return ranks


def _fill_call_arguments(proof: VerifyOptions, plan: Plan) -> dict[str, Any]:
    """The arguments of the call: a picture for each replica."""
    asked = {name: getattr(proof, name) for name in ("model", "height", "width", "frames", "steps", "guidance")}
    call = PlanQuestion(**asked, num_images=plan.data).fill_call_arguments()
    return call | ({} if proof.true_cfg is None else {"true_cfg_scale": proof.true_cfg})


def _make_memory_predictor(
    model: str, source: Path | str, plan: Plan, call: Mapping[str, Any], dtype: torch.dtype
) -> Callable[[int], int]:
    """Returns (rank -> the bytes at its peak, as the planner predicts them for what is simulated)."""
    subject = PlanSubject.from_configs(model, source)
    job = subject.make_plan_job(plan, subject.make_call_shape(call, dtype.itemsize))
    profile, tokens = hardware.load_profile(GPU), subject.count_text_tokens(call)

    def predict_peak_bytes(rank: int) -> int:
        memory = count_rank_memory(subject, job, profile, rank, tokens)
        return memory.denoising_peak - memory.text + memory.vae

    return predict_peak_bytes


def _simulate_one(
    source: Path | str, plan: Plan, rank: int, call: Mapping[str, Any], dtype: torch.dtype
) -> SimulatedCall:
    try:
        return simulate_rank(source, plan, rank, call, dtype=dtype)
    except SimulationError as error:
        raise StateError(f"rank {rank} on a simulated GPU: {error}") from error


# Tables


def _make_memory_table(ranks: Sequence[SimulatedRank], unit: float) -> Table:
    table = Table("rank")
    for title in ("weights", "keys", "peak", "in", "planned", "planned / peak"):
        table.add_column(title, justify="right", no_wrap=True)
    for rank, call, planned in ranks:
        peak = call.record.peak_bytes
        places = {place: counts.peak_bytes for place, counts in call.record.places.items() if place != SETUP}
        where = PLACES.get(place := max(places, key=lambda name: places[name]), place)
        sizes = [f"{size / unit:.2f}" for size in (call.weight_bytes, call.key_bytes, peak)]
        table.add_row(str(rank), *sizes, where, f"{planned / unit:.2f}", f"{planned / peak:.3f}")
    return table


def _make_rank_tables(ranks: Sequence[SimulatedRank], rows: Mapping[str, Sequence[str]]) -> Iterator[Table]:
    """A row of numbers by rank for each name; so many ranks beside each other as 80 columns hold."""
    for first in range(0, len(ranks), RANKS_BESIDE):
        shown = slice(first, first + RANKS_BESIDE)
        table = Table("")
        for each in ranks[shown]:
            table.add_column(str(each.rank), justify="right", no_wrap=True)
        for name, cells in rows.items():
            table.add_row(name, *cells[shown])
        yield table


def _list_step_peaks(ranks: Sequence[SimulatedRank], unit: float) -> dict[str, list[str]]:
    """The peak in each step, in units by rank; steps that are alike share a row."""
    peaks: dict[str, list[float]] = {}
    for index, each in enumerate(ranks):
        for place, counts in each.call.record.places.items():
            if place != SETUP:
                row = peaks.setdefault(_name_step(place), [0.0] * len(ranks))
                row[index] = max(row[index], counts.peak_bytes)
    runs: list[tuple[list[str], list[str]]] = []
    for name, row in peaks.items():
        cells = [f"{size / unit:.2f}" for size in row]
        if runs and runs[-1][1] == cells and all(each.startswith("step") for each in (name, *runs[-1][0])):
            runs[-1][0].append(name)
        else:
            runs.append(([name], cells))
    return {
        names[0] if len(names) == 1 else f"{names[0]} to {names[-1].removeprefix('step ')}": cells
        for names, cells in runs
    }


def _name_step(place: str) -> str:
    """The step of a micro-step, or what a place outside of the loop is called."""
    return PLACES.get(place, place.partition(" patch")[0])


def _group_place(place: str) -> str:
    """The same, but for steps behind the first one, which are alike."""
    step = _name_step(place)
    return LATER if step.startswith("step ") and step != "step 0" else step


def _make_message_table(ranks: Sequence[SimulatedRank]) -> Table:
    """Messages by kind; ranks that start the same share a row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for each in ranks:
        sizes: dict[tuple[str, str], list[int]] = {}
        for message in each.call.record.messages:
            if message.place != SETUP:
                sizes.setdefault((message.kind, "NCCL" if message.on_gpu else "gloo"), []).append(message.num_bytes)
        for (kind, carrier), all_bytes in sorted(sizes.items()):
            counted = str(len(all_bytes)), format_bytes(sum(all_bytes)), format_bytes(max(all_bytes))
            rows.setdefault((kind, carrier, *counted), []).append(each.rank)
    table = Table("rank", "kind", "over")
    for title in ("number", "bytes", "largest"):
        table.add_column(title, justify="right", no_wrap=True)
    for cells, alike in sorted(rows.items(), key=lambda row: row[1]):
        table.add_row(format_ranks(alike), *cells)
    if not rows:
        table.add_row(format_ranks([each.rank for each in ranks]), "none", "", "0", "0 B", "")
    return table


def _list_sync_counts(ranks: Sequence[SimulatedRank]) -> dict[str, list[str]]:
    """Waits of the host by place, by rank."""
    counts: list[Counter[str]] = []
    for each in ranks:
        counts.append(Counter())
        for sync, times in each.call.record.syncs.items():
            counts[-1][_group_place(sync.place)] += times
    places = [PLACES[SETUP], PLACES[CALL], REHEARSAL, "step 0", LATER, PLACES[AFTER]]
    return {place: [str(count[place]) for count in counts] for place in places}


def _list_sync_sites(ranks: Sequence[SimulatedRank]) -> Iterator[str]:
    """Two lines for each line of code at which the host waits: place, times and what; and which line of which file."""
    most: dict[tuple[str, str, str], int] = {}
    for each in ranks:
        counts: Counter[tuple[str, str, str]] = Counter()
        for sync, times in each.call.record.syncs.items():
            counts[_group_place(sync.place), sync.kind, sync.site.partition(" < ")[0]] += times
        for key, times in counts.items():
            most[key] = max(most.get(key, 0), times)
    for (place, kind, site), times in most.items():
        yield f"  {place:<16}{times:>6}  {kind}"
        yield f"    {site or 'outside of ditile and diffusers'}"


def _list_findings(findings: Mapping[Finding, list[int]]) -> Iterator[str]:
    if not findings:
        yield "no finding: nothing that a GPU would refuse, and no message whose memory is used or freed too early"
    for (kind, what, site), ranks in findings.items():
        yield f"finding on rank {format_ranks(ranks)}: {kind}: {what}"
        yield f"    {site}"
