"""What the rehearsal of a call costs, as a share of one of its steps: CPU time, and what a call like it costs after.

    python -m benchmarks.rehearsal --rounds 5

The model is the bundled shapes-flux; its first step is whole, and what is in front of it is a rehearsal. Each round
draws twice: the first call is rehearsed, and the second one is recognised. Ratios are of one round.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ditile.parallel.pipefusion.dry_iterations import DryIterations
from ditile.parallel.pipefusion.known_calls import KnownCalls
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.plan.plan import Plan
from ditile.runner.callbacks import StepWatch
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.runner import parallelize
from ditile_lab.rows import write_json_file

MODEL = "shapes-flux"
STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalJob:
    """What is measured."""

    patches: int = define_option(4, "patches")
    rounds: int = define_option(5, "rounds of two calls")
    out: str | None = define_option(None, "write the figures as JSON", metavar="FILE")


def measure_rehearsals(
    pipe: Any, call: Mapping[str, Any], patches: int, rounds: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """The seconds of a whole step, and what is spent before the first one as shares of it; medians.

    Args:
        pipe: a pipeline.
        call: its arguments, without the number of steps.
        patches: how many.
        rounds: of two calls.
        clock: tells the time.
    """
    runner = parallelize(pipe, Plan(patches=patches, warmup=STEPS), device="cpu")
    loop = runner._parts.loop
    ends = list[float]()
    rehearse = loop._rehearse
    spent: list[float] = []

    def rehearse_and_measure(dry: DryIterations, timesteps: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        began = clock()
        yield from rehearse(dry, timesteps)
        spent.append(clock() - began)

    loop._rehearse = rehearse_and_measure  # type: ignore[method-assign]
    watch = StepWatch(on_step=lambda step, steps: ends.append(clock()))
    shares: dict[str, list[float]] = {"rehearsed": [], "recognised": []}
    seconds: list[float] = []
    for _ in range(rounds):
        loop._known_calls = KnownCalls()
        for way in shares:
            ends.clear()
            runner(**call, num_inference_steps=STEPS, watch=watch, generator=torch.Generator().manual_seed(0))
            seconds.append(median(after - before for before, after in zip(ends, ends[1:], strict=False)))
            shares[way].append(spent.pop() / seconds[-1])
    runner.restore()
    return {"step_s": median(seconds)} | {way: median(of_way) for way, of_way in shares.items()}


def make_rehearsal_table(found: Mapping[str, float], patches: int) -> Table:
    """What was found, for people."""
    shown = Table("patches", "a step, s", "rehearsal, of a step", "of a patch", "recognised, of a step")
    shares = found["rehearsed"], found["rehearsed"] / patches, found["recognised"]
    shown.add_row(str(patches), f"{found['step_s']:.3f}", *map("{:.1%}".format, shares))
    return shown


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, RehearsalJob, title="options")
    wanted = RehearsalJob(**collect_arguments(RehearsalJob, parser.parse_args()))
    torch.set_num_threads(1)
    pipe = load(MODEL)
    pipe.set_progress_bar_config(disable=True)
    call = {name: value for name, value in defaults(MODEL).items() if name != "num_inference_steps"}
    measure = functools.partial(measure_rehearsals, pipe, {"prompt": "a red circle", "output_type": "latent"} | call)
    found = measure(wanted.patches, wanted.rounds)
    Console().print(make_rehearsal_table(found, wanted.patches))
    if wanted.out is not None:
        write_json_file(Path(wanted.out), found)


if __name__ == "__main__":
    main()
