"""Compares images of few calls with what a model means: `python -m benchmarks.finer_fits [CAPTIONS [MODEL]]`.

What it means is taken to be the image of many plain steps. Fits are on the last captions, and these are the first.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

import ditile
from ditile_lab.quality.captions import load_captions
from ditile_lab.quality.schedule_fit import compute_decibels

MANY = 96
"""Plain steps that stand for the solution."""
ROWS = [(20, None), (20, 8), (20, 10), (20, 12), (48, 6), (48, 8), (48, 10), (48, 12)]
"""Steps, and how many of them compute; None for all."""


def main(count: int = 12, model: str = "shapes-flux") -> None:
    pipe = ditile.load(model)
    pipe.set_progress_bar_config(disable=True)
    captions = [caption.text for caption in load_captions("bundled", None, count)]
    found: dict[tuple[int, int | None], list[float]] = {row: [] for row in ROWS}
    for number, caption in enumerate(captions):

        def draw(steps: int, caption: str = caption, seed: int = number) -> np.ndarray[Any, Any]:
            call = ditile.defaults(model) | {"prompt": caption, "num_inference_steps": steps}
            return np.asarray(pipe(**call, generator=torch.Generator().manual_seed(seed)).images[0])[None]

        truth = draw(MANY)
        for steps, computed in ROWS:
            if computed is not None:
                ditile.enable_cache(pipe, ditile.FittedScheduleConfig(steps=computed))
            found[steps, computed].append(compute_decibels(draw(steps), truth))
            ditile.disable_cache(pipe)
        print(f"{number + 1} of {count}", file=sys.stderr, flush=True)
    print(f"| calls | {model}, {count} captions | dB to {MANY} steps (worst) |")
    print("|--:|---|--:|")
    for (steps, computed), decibels in found.items():
        what = f"{steps} plain steps" if computed is None else f"fitted, of {steps}"
        print(f"| {computed or steps} | {what} | {np.mean(decibels):.1f} ({min(decibels):.1f}) |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
