"""What fitted schedules promise, and what captions outside of the fit give.

    python -m benchmarks.promises shapes-flux --captions 24
    python -m benchmarks.promises shapes-flux-turbo --schedule turbo-8.json

Every caption is generated with all steps, and with each budget of which the file says the mean and the worst PSNR.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch

import ditile
from ditile.cache.fitted.schedule import read_shipped_schedules
from ditile.planner.promise import MARGIN_DB
from ditile_lab.quality.schedule_fit import Frames, compute_decibels
from training.evaluate import list_captions


def find_schedule(model: str, path: str | None) -> ditile.Schedule:
    """Return the schedule of a file, or the one that comes with a model for its own steps."""
    if path is not None:
        return ditile.Schedule.read(path)
    steps = ditile.defaults(model)["num_inference_steps"]
    for schedule in read_shipped_schedules().values():
        if schedule.model == model and schedule.num_steps == steps:
            return schedule
    raise SystemExit(f"no schedule of {model} for {steps} steps comes with ditile; give --schedule FILE")


def compare(model: str, schedule: ditile.Schedule, count: int) -> dict[int, list[float]]:
    """Return the PSNR of each caption against all steps, by the number of computed steps."""
    pipe = ditile.load(model)
    pipe.set_progress_bar_config(disable=True)
    found: dict[int, list[float]] = {}
    for seed, caption in enumerate(list_captions(model, count)):

        def draw(prompt: str = caption, seed: int = seed) -> Frames:
            call: dict[str, Any] = ditile.defaults(model) | {"prompt": prompt, "output_type": "np"}
            call["num_inference_steps"] = schedule.num_steps
            result = pipe(**call, generator=torch.Generator().manual_seed(seed))
            pixels = getattr(result, "frames", None)
            if pixels is None:
                pixels = result.images
            return np.asarray(np.rint(pixels * 255), np.uint8)

        reference = draw()
        for budget in schedule.budgets:
            if budget.mean_db is None:
                continue
            ditile.enable_cache(pipe, ditile.FittedScheduleConfig(steps=budget.size, schedule=schedule))
            found.setdefault(budget.size, []).append(compute_decibels(draw(), reference))
            ditile.disable_cache(pipe)
        print(f"{seed + 1} of {count}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure, and print a line for each budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--schedule", help="file of ditile fit; by default the one that comes with the model")
    parser.add_argument("--captions", type=int, default=24, help="held-out captions")
    options = parser.parse_args()
    schedule = find_schedule(options.model, options.schedule)
    found = compare(options.model, schedule, options.captions)
    print("| model | steps | computed | promised | stated mean (worst) | held out, mean (worst) | below |")
    print("| :-- | --: | --: | --: | --: | --: | --: |")
    for budget in schedule.budgets:
        if budget.size not in found:
            continue
        decibels = found[budget.size]
        # Images of this share are worse than the worst image that the file states.
        below = sum(value < budget.worst_db for value in decibels)
        cells = [
            options.model,
            str(schedule.num_steps),
            str(budget.size),
            f"{budget.mean_db - MARGIN_DB:.1f}",
            f"{budget.mean_db:.1f} ({budget.worst_db:.1f})",
            f"{np.mean(decibels):.1f} ({min(decibels):.1f})",
            f"{below} of {len(decibels)}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
