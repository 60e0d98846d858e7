"""Training on one device until a time of day: steps that a CUDA graph replays, a learning rate over the time that is
given, the loss from time to time, and a state that is saved often enough to lose little.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from training.optim import MasterOptimiser, learning_rate

STEPS_BETWEEN_WAITS = 20  # for the device, so that the steps that are queued end soon after the budget
WARMUP_STEPS = 3  # before a capture, as torch asks for


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A kind of step: it trains on a batch of its own making and gives the loss, a scalar on the device."""

    name: str
    run: Callable[[], torch.Tensor]


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """--minutes or --until, --device and --eager."""
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="wall-clock budget; the learning rate ends there")
    budget.add_argument("--until", type=float, help="the same as a time, in seconds since the epoch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--eager", action="store_true", help="launch every kernel instead of replaying a CUDA graph")


def compute_seconds_left(args: argparse.Namespace, share: float = 1.0) -> float:
    """The seconds of a share of what is left of the budget."""
    whole = args.minutes * 60 if args.until is None else args.until - time.time()
    return float(max(1.0, share * whole))


def capture(step: Step, args: argparse.Namespace) -> Step:
    """The step as one CUDA graph, as a small model's step is bound by its launches. On a CPU, the step itself."""
    if args.eager or args.device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_STEPS):
            step.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step.run()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return Step(name=step.name, run=replay)


def train_steps(
    steps: Sequence[Step],
    optimiser: MasterOptimiser,
    *,
    seconds: float,
    hold: float,
    save: Callable[[], None],
    log_every_s: float = 5.0,
    save_every_s: float = 30.0,
) -> int:
    """Takes the steps in turn until the seconds are over, and saves. Returns how many steps there were."""
    start = logged = saved = time.monotonic()
    count = 0
    totals: dict[str, list[torch.Tensor]] = {}
    while (now := time.monotonic()) - start < seconds:
        step = steps[count % len(steps)]
        optimiser.set_rate(learning_rate((now - start) / seconds, hold=hold))
        totals.setdefault(step.name, []).append(step.run().clone())
        optimiser.average()
        count += 1
        if count % STEPS_BETWEEN_WAITS == 0 and totals[step.name][-1].is_cuda:
            torch.cuda.synchronize()
        if time.monotonic() - logged > log_every_s:
            losses = {name: round(torch.stack(values).mean().item(), 4) for name, values in totals.items()}
            logged = time.monotonic()
            totals = {}
            print(f"{count} steps, {logged - start:.0f} s: {losses}", flush=True)
        if time.monotonic() - saved > save_every_s:
            save()
            saved = time.monotonic()
    save()
    print(f"{count} steps in {time.monotonic() - start:.1f} s", flush=True)
    return count


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder beside its place and moves it there, so that a process that ends leaves a whole one."""
    fresh = folder.with_name(f".{folder.name}.new")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    write(fresh)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
