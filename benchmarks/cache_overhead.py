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
from ditile.distributed import files
from ditile.plan.flags import add_arguments, collect_arguments, define_option
from ditile.runner.caching import enable_cache, refresh_context

PLAIN, OURS, THEIRS = "none", "ditile", "cache-dit"
STATES = {"off": 0.0, "measured": 1e-12, "measured, left out": 0.9, "left out": 1.0}
FIRST = 8  # forwards that are not counted


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
        """The image behind all blocks."""
        for block in self.blocks:
            hidden_states, encoder_hidden_states = block(hidden_states, encoder_hidden_states)
        return hidden_states


def transformers(blocks: int, forwards: int) -> dict[tuple[str, str], nn.Module]:
    """(engine, state) -> a transformer, cached for one generation of so many forwards."""
    made: dict[tuple[str, str], nn.Module] = {(PLAIN, ""): Transformer(blocks)}
    for state, threshold in STATES.items():
        config = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2, residual_diff_threshold=threshold)
        made[OURS, state] = ours = enable_cache(Transformer(blocks), config)
        refresh_context(ours, forwards)
        if peer.is_installed():  # cache-dit patches classes, so each of its transformers has a class of its own
            theirs = type(f"Transformer{len(made)}", (Transformer,), {})(blocks)
            peer.enable_on_transformer(theirs, theirs.blocks, config, forwards)
            made[THEIRS, state] = theirs
    return made


@torch.no_grad()
def measure(blocks: int, job: CacheOverheadJob) -> dict[tuple[str, str], float]:
    """(engine, state) -> microseconds of a forward."""
    made = transformers(blocks, FIRST + job.rounds * job.forwards + 1)  # the last one would end the generation
    image, text = torch.randn(1, 4, 8), torch.randn(1, 2, 8)
    images = [image * (1 + k / 1e4) for k in range(job.forwards)]
    for model in made.values():
        _run_forwards(model, images[:FIRST], text)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in made}
    for _ in range(job.rounds):
        for name, model in made.items():
            began = time.thread_time()
            _run_forwards(model, images, text)
            times[name].append((time.thread_time() - began) / len(images) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def _run_forwards(model: Callable[..., Any], images: list[Tensor], text: Tensor) -> None:
    for image in images:
        model(hidden_states=image, encoder_hidden_states=text)


def make_overhead_rows(found: dict[int, dict[tuple[str, str], float]]) -> list[dict[str, Any]]:
    """One row for each engine and state: a forward of each length, what the cache adds, and its slope per block."""
    few, many = sorted(found)[-2:] if len(found) > 1 else (0, max(found))
    made = []
    for engine, state in found[many]:
        total = {n: times[engine, state] for n, times in found.items()}
        added = {n: total[n] - times[PLAIN, ""] for n, times in found.items()}
        slope = (added[many] - added.get(few, 0.0)) / (many - few)
        made.append({"engine": engine, "state": state, "total_us": total, "added_us": added, "per_block_us": slope})
    return made


def make_cache_overhead_table(found: list[dict[str, Any]]) -> Table:
    """The rows for people."""
    lengths = list(found[0]["total_us"])
    columns = [f"{kind}{n}" for kind in ("", "+") for n in lengths]
    shown = Table("cache", "state", *columns, "+ a block", title="µs of a forward of so many blocks; + over no cache")
    for row in found:
        numbers = [f"{row[kind][n]:.1f}" for kind in ("total_us", "added_us") for n in lengths]
        shown.add_row(row["engine"], row["state"], *numbers, f"{row['per_block_us']:.2f}")
    return shown


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, CacheOverheadJob, title="job")
    job = CacheOverheadJob(**collect_arguments(CacheOverheadJob, parser.parse_args()))
    torch.set_num_threads(1)
    found = make_overhead_rows({blocks: measure(blocks, job) for blocks in job.blocks})
    Console().print(make_cache_overhead_table(found))
    if job.out is not None:
        files.write_json_file(Path(job.out), found)


if __name__ == "__main__":
    main()
