"""The answer of `ditile plan`, in a table and in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING

from ditile.plan.numbers import format_bytes, format_number
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.plan.plan import FEW_STEPS
from ditile.planner.memory import HostMemory, RankMemory
from ditile.planner.search import SearchResult
from ditile.runner.requests.console import make_numbered_tables

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The result of `ditile plan`.

    Attributes:
        model, hardware, devices: those of the question.
        result: the prices, the fastest plan first.
        call: the priced call: `height` and `width` (pixels), `frames`, `steps`, `images`, `dtype`, `guidance` (None if
            the pipeline has none), the number of `pictures`, and tokens of `references` (None if it is not known how
            many).
        uncounted: text encoders with unreadable configs, missing in every count of memory.
        memories: for each plan, the needs of each of its ranks.
        hosts: for each plan, the host memory needed by the ranks of a host.
        host_memory_bytes: bytes of a host's memory; 0 if they are not known.
        is_unlike: whether `hardware` names the device of each rank.
        models: the number of transformers that are called in turns; every rank has all of them in memory.
    """

    model: str
    hardware: str
    devices: int
    result: SearchResult
    call: CallArguments
    uncounted: tuple[str, ...] = ()
    memories: tuple[tuple[RankMemory, ...], ...] = ()
    hosts: tuple[HostMemory, ...] = ()
    host_memory_bytes: int = 0
    is_unlike: bool = False
    models: int = 1

    def to_json_dict(self) -> JsonObject:
        """Convert the answer to JSON types for programs."""
        plans = []
        for price, ranks, host in zip(self.result.prices, self.memories, self.hosts, strict=True):
            plans.append(
                {
                    "plan": str(price.plan),
                    "latency_s": price.latency_s,
                    "memory_bytes": price.memory_bytes,
                    "bytes_per_step": price.bytes_per_step,
                    "exposed_comm_s": price.exposed_s,
                    "bubble_s": price.bubble_s,
                    "compute_s": price.compute_s,
                    "text_s": price.text_s,
                    "decode_s": price.decode_s,
                    "memory_by_rank": [rank._asdict() | {"peak": rank.peak_bytes} for rank in ranks],
                    "memory_of_host": host._asdict(),
                }
            )
        return {
            "model": self.model,
            "hardware": self.hardware,
            "devices": self.devices,
            "call": dict(self.call),
            "legal": self.result.legal,
            "uncounted": list(self.uncounted),
            "host_memory_bytes": self.host_memory_bytes or None,
            "plans": plans,
        }

    def describe_call(self) -> str:
        """Describe the priced call in one line."""
        call = self.call
        parts = [f"{call['width']} x {call['height']} px", f"{call['steps']} steps", str(call["dtype"])]
        if call["frames"] != 1:
            parts.append(f"{call['frames']} frames")
        if call["images"] != 1:
            parts.append(f"{call['images']} images")
        if call["references"]:
            parts.append(f"{call['references']} tokens of references")
        if call["guidance"] is not None:
            parts.append(f"guidance {call['guidance']:g}")
        return f"{self.model}, {', '.join(parts)}"

    def describe_choice(self) -> str:
        """Describe the first plan on one line."""
        best = self.result.prices[0]
        return f"planned: {best.plan} (predicted {format_number(best.latency_s)} s a loop on {self.hardware})"

    def to_json(self) -> str:
        """Format the result of `to_json_dict` in JSON."""
        return json.dumps(self.to_json_dict(), indent=2)

    def render_tables(self) -> list[Table | str]:
        """Format the answer for people."""
        prices = self.result.prices
        labels = [str(price.plan) for price in prices]
        columns: dict[str, list[str]] = {}
        for price in prices:
            cells = {
                "latency, s": format_number(price.latency_s),
                "compute": format_number(price.compute_s),
                "exposed": format_number(price.exposed_s, 2),
                "bubble": format_number(price.bubble_s, 2),
                "memory": format_bytes(price.memory_bytes),
                "sent a step": format_bytes(price.bytes_per_step),
            }
            for title, cell in cells.items():
                columns.setdefault(title, []).append(cell)
        plans = f"{self.result.legal} plans searched"
        if self.result.legal == 1:
            plans = "1 plan"
        machine = self.hardware if self.is_unlike else f"{self.devices} x {self.hardware}"
        heading = f"on {machine}: {plans}"
        if self.result.too_large:
            heading += f", {self.result.too_large} of the fastest do not fit as they are"
        if prices[0].plan.offload == "blocks":
            heading += "; with weights of blocks in the host's memory (offload=blocks) those below fit"
        tables: list[Table | str] = [self.describe_call(), "\n".join(wrap(heading, 80))]
        tables += make_numbered_tables(labels, columns)
        tables.append("GB of each rank under plan 1; keys are those of the step before")
        tables.append(make_memory_table(self.memories[0]))

        tables += ["\n".join(wrap(remark, 80)) for remark in self._iterate_remarks()]
        return tables

    def _iterate_remarks(self) -> Iterator[str]:
        """Yield the remarks below the tables."""
        best = self.result.prices[0]
        if self.models > 1 and best.plan.offload == "none":
            yield f"weights are those of {self.models} transformers, which are on the device all the time"
        yield from self._describe_host_memory()
        if best.is_recorded:
            yield "priced with recorded steps, as images after the first ones have them (docs/gpu.md)"
        # In longer calls text and decode are a small part, and were not priced.
        if self.call["steps"] <= FEW_STEPS:
            yield (
                f"the whole call under plan 1: {format_number(best.call_s)} s, text encoders "
                f"{format_number(best.text_s, 2)} of it and decode {format_number(best.decode_s, 2)}"
            )

        if self.call["pictures"]:
            tokens = ", and their tokens, if there are any" if self.call["references"] is None else ""
            yield (
                f"not in the seconds: the {self.call['pictures']} image(s) that it starts from: "
                f"what encodes them{tokens}"
            )
        if self.uncounted:
            yield f"not in the memory: {', '.join(self.uncounted)}, of which there is no config here"

    def _describe_host_memory(self) -> Iterator[str]:
        """Yield remarks on the first plan's host memory, if weights are kept there or do not fit while they load."""
        host = self.hosts[0]
        plan = self.result.prices[0].plan
        keeps_blocks = plan.offload == "blocks"
        is_short = 0 < self.host_memory_bytes < host.loading
        if keeps_blocks:
            blocks = "blocks"
            if plan.offload_ranks is not None:
                blocks = f"blocks of rank {format_ranks(plan.offload_ranks)}"
            yield (
                f"weights of {blocks} come from the host's memory, under what is computed: all ranks of a host keep "
                f"{format_bytes(host.kept)} there, pinned (docs/loading.md)"
            )
        needs = f"while they load, the ranks of a host need up to {format_bytes(host.loading)} of its memory"
        if is_short:
            yield f"warning: {needs}, and there are {format_bytes(self.host_memory_bytes)}"
        elif keeps_blocks:
            yield needs


def make_memory_table(memories: Sequence[RankMemory]) -> Table:
    """Make a table of the memory of ranks, by kind, in 80 columns. Ranks with equal needs share a row."""
    from rich.table import Table

    table = Table("rank")
    parts = {"weights": "weights", "text": "text", "VAE": "vae", "keys": "keys", "activations": "activations"}
    if any(memory.tapes for memory in memories):
        parts["tapes"] = "tapes"
    parts |= {"decode": "decode", "peak": "peak_bytes"}
    for title in parts:
        table.add_column(title, justify="right", no_wrap=True)
    ranks_by_memory: dict[RankMemory, list[int]] = {}
    for rank, memory in enumerate(memories):
        ranks_by_memory.setdefault(memory, []).append(rank)
    for memory, ranks in ranks_by_memory.items():
        cells = [f"{getattr(memory, name) / 1e9:.2f}" for name in parts.values()]
        # Each run of ranks has a line of its own: many runs on one line would be wider than a terminal.
        table.add_row(format_ranks(ranks).replace(", ", "\n"), *cells)
    return table


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks in runs, such as "0, 2-5"."""
    runs = []
    # In a run, rank and index grow together, so their difference is constant.
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        if len(run) == 1:
            runs.append(str(run[0]))
        else:
            runs.append(f"{run[0]}-{run[-1]}")
    return ", ".join(runs)
