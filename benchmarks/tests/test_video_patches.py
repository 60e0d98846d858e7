"""The comparison of cuts of a video draws what the engine draws, where the engine cuts so."""

from __future__ import annotations

import numpy as np
import torch

import ditile
from benchmarks.video_patches import (  # fmt: skip
    GRID,
    METHODS,
    MODEL,
    CutJob,
    StaleAttention,
    generate_clips,
    make_cuts_table,
    measure_cuts,
    number_patches,
)
from training.evaluate import list_captions

CAPTIONS = list_captions(MODEL, 1)


def test_rows_are_the_patches_of_the_engine() -> None:
    """A failure means that the figures are of another method than ditile's."""
    pipe = ditile.load(MODEL)
    simulated = generate_clips(pipe, CAPTIONS, 5, lambda: StaleAttention(number_patches("rows", 4), METHODS[0], 1))
    plain = generate_clips(pipe, CAPTIONS, 5)
    runner = ditile.parallelize(pipe, ditile.Plan(pipefusion=1, patches=4, warmup=1), device="cpu")
    drawn = generate_clips(runner, CAPTIONS, 5)
    assert np.abs(drawn.astype(int) - simulated).max() <= 1 < np.abs(drawn.astype(int) - plain).max()


def test_each_cut_shares_out_all_tokens_alike() -> None:
    for patches in (2, 4):
        for cut in ("runs", "rows"):
            assert torch.bincount(number_patches(cut, patches)).tolist() == [np.prod(GRID) // patches] * patches
    rows = number_patches("rows", 2).view(GRID)
    assert (rows[:, :4] == 0).all() and (rows[:, 4:] == 1).all()


def test_every_method_and_cut_has_a_row_and_the_control_is_far_off() -> None:
    pipe = ditile.load(MODEL)
    pipe.set_progress_bar_config(disable=True)
    found = list(measure_cuts(pipe, CAPTIONS, CutJob(captions=1, patches="2", steps=4)))
    assert [(row["method"], row["cut"]) for row in found[1:]] == [(m, c) for m in METHODS for c in ("runs", "rows")]
    assert min(row["psnr"] for row in found[1:5]) > max(row["psnr"] for row in found[5:])
    assert make_cuts_table(found).row_count == 3
