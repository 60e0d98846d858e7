"""What a cache costs by itself: a transformer whose blocks do nothing, with the cache in every state it can be in.

    python -m benchmarks.cache_overhead
    python -m benchmarks.cache_overhead --blocks 2,57 --rounds 40 --out overhead.json

Numbers are microseconds of CPU time of one forward, with one thread, medians over interleaved rounds; cache-dit is
measured too if it is installed. Blocks pass on two streams of a few numbers, and the first block doubles the image, so
that there is a change to measure. The cache has four states: off (threshold 0), measured (no difference is below the
threshold), measured and left out (all are below, and only the first block runs), and left out without a measurement
(threshold 1).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import peer
from ditile.cache.config import DBCacheConfig
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.runner.caching import enable_cache, refresh_context
from ditile_lab.rows import write_json_file

PLAIN = "none"
OURS = "ditile"
THEIRS = "cache-dit"
STATES = {"off": 0.0, "measured": 1e-12, "measured, left out": 0.9, "left out": 1.0}
"""State -> the threshold that leads to it."""
FIRST = 8
"""Forwards that are not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOverheadJob:
    """What is measured."""

    blocks: tuple[int, ...] = define_option(
        (1, 2, 57), "blocks of the transformers; one alone leaves nothing out", metavar="N,N"
    )
    rounds: int = define_option(40, "interleaved rounds")
    forwards: int = define_option(50, "forwards of each transformer in a round")
    out: str | None = define_option(None, "write the rows as JSON too", metavar="FILE")


class PassThroughBlock(nn.Module):
    """Passes on what it is given."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Image and text."""
        return hidden_states, encoder_hidden_states


class FirstBlock(nn.Module):
    """Doubles the image."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Image and text."""
        return hidden_states + hidden_states, encoder_hidden_states


class Transformer(nn.Module):
    """Nothing but blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FirstBlock(), *(PassThroughBlock() for _ in range(blocks - 1))])

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        """The image after all blocks."""
        for block in self.blocks:
            hidden_states, encoder_hidden_states = block(hidden_states, encoder_hidden_states)
        return hidden_states


def create_transformers(blocks: int, forwards: int) -> dict[tuple[str, str], nn.Module]:
    """(engine, state) -> a transformer, cached for one generation of so many forwards."""
    models: dict[tuple[str, str], nn.Module] = {(PLAIN, ""): Transformer(blocks)}
    for state, threshold in STATES.items():
        config = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2, residual_diff_threshold=threshold)
        ours = enable_cache(Transformer(blocks), config)
        refresh_context(ours, forwards)
        models[OURS, state] = ours
        if peer.is_installed():
            # cache-dit patches classes, so each of its transformers has a class of its own.
            theirs = type(f"Transformer{len(models)}", (Transformer,), {})(blocks)
            peer.enable_on_transformer(theirs, theirs.blocks, config, forwards)
            models[THEIRS, state] = theirs
    return models


@torch.no_grad()
def measure(blocks: int, job: CacheOverheadJob) -> dict[tuple[str, str], float]:
    """(engine, state) -> microseconds of a forward."""
    # One forward more than are run: the last one would end the generation.
    models = create_transformers(blocks, FIRST + job.rounds * job.forwards + 1)
    image = torch.randn(1, 4, 8)
    text = torch.randn(1, 2, 8)
    # Each a little different, so that there is a difference to measure.
    images = [image * (1 + index / 1e4) for index in range(job.forwards)]
    for model in models.values():
        _run_forwards(model, images[:FIRST], text)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in models}
    for _ in range(job.rounds):
        for name, model in models.items():
            began = time.thread_time()
            _run_forwards(model, images, text)
            times[name].append((time.thread_time() - began) / len(images) * 1e6)
    return {name: statistics.median(rounds) for name, rounds in times.items()}


def _run_forwards(model: Callable[..., Any], images: list[Tensor], text: Tensor) -> None:
    for image in images:
        model(hidden_states=image, encoder_hidden_states=text)


def make_overhead_rows(times: dict[int, dict[tuple[str, str], float]]) -> list[dict[str, Any]]:
    """One row for each engine and state: a forward of each length, what the cache adds, and its slope per block."""
    lengths = sorted(times)
    many = lengths[-1]
    rows = []
    for engine, state in times[many]:
        total = {}
        added = {}
        for length in times:
            total[length] = times[length][engine, state]
            added[length] = total[length] - times[length][PLAIN, ""]
        slope = added[many] / many
        if len(lengths) > 1:
            few = lengths[-2]
            slope = (added[many] - added[few]) / (many - few)
        rows.append({"engine": engine, "state": state, "total_us": total, "added_us": added, "per_block_us": slope})
    return rows


def make_cache_overhead_table(rows: list[dict[str, Any]]) -> Table:
    """The rows for people."""
    table = Table("cache", "state", title="µs of a forward of so many blocks; + over no cache")
    lengths = list(rows[0]["total_us"])
    for prefix in ("", "+"):
        for length in lengths:
            table.add_column(f"{prefix}{length}")
    table.add_column("+ a block")
    for row in rows:
        numbers = [*row["total_us"].values(), *row["added_us"].values()]
        cells = [f"{number:.1f}" for number in numbers]
        table.add_row(row["engine"], row["state"], *cells, f"{row['per_block_us']:.2f}")
    return table


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, CacheOverheadJob, title="job")
    job = CacheOverheadJob(**collect_arguments(CacheOverheadJob, parser.parse_args()))
    torch.set_num_threads(1)
    rows = make_overhead_rows({blocks: measure(blocks, job) for blocks in job.blocks})
    Console().print(make_cache_overhead_table(rows))
    if job.out is not None:
        write_json_file(Path(job.out), rows)


if __name__ == "__main__":
    main()
