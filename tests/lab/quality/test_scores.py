"""Scores of pictures: what torchmetrics makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ditile_lab.quality import scores
from ditile_lab.quality.metrics import compute_psnr, compute_ssim
from ditile_lab.quality.scores import SetDistances


def pairs() -> tuple[Any, Any]:
    """ImageArrays that differ by noise, by one pixel, and not at all."""
    random = np.random.default_rng(0)
    a = random.integers(0, 256, (3, 20, 26, 3), dtype=np.uint8)
    b = np.clip(a + random.integers(-9, 10, a.shape), 0, 255).astype(np.uint8)
    b[1], b[2] = a[1], a[2]
    b[1, 0, 0] ^= 1
    return a, b


def test_psnr_is_the_mean_square_in_decibels() -> None:
    """To rounding (1e-12). A failure means that stored evaluations cannot be compared."""
    a, b = pairs()
    squares = ((a.astype(float) - b) ** 2).mean((1, 2, 3))
    wanted = [*(10 * np.log10(255**2 / squares[:2])), 100.0]
    np.testing.assert_allclose(compute_psnr(a, b), wanted, rtol=0, atol=1e-12)


def test_ssim_is_that_of_seven_by_seven_windows() -> None:
    """To rounding (1e-12): windows that lie in the picture, with unbiased variances, written out window by window. A
    failure means that stored evaluations cannot be compared."""
    a, b = pairs()
    x, y = (np.lib.stride_tricks.sliding_window_view(p / 255, (7, 7), (1, 2)) for p in (a, b))
    mx, my = x.mean((-1, -2)), y.mean((-1, -2))
    vx, vy = x.var((-1, -2), ddof=1), y.var((-1, -2), ddof=1)
    vxy = ((x - mx[..., None, None]) * (y - my[..., None, None])).sum((-1, -2)) / 48
    index = (2 * mx * my + 0.01**2) * (2 * vxy + 0.03**2) / ((mx**2 + my**2 + 0.01**2) * (vx + vy + 0.03**2))
    np.testing.assert_allclose(compute_ssim(a, b), index.mean((1, 2, 3)), rtol=0, atol=1e-12)
    assert compute_ssim(a, b)[2] == pytest.approx(1.0, abs=1e-12)


def test_the_distance_of_sets_is_that_of_normal_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In closed form, of one set after another. A failure means that all distances are off."""
    monkeypatch.setattr(scores, "NUM_FEATURES", 2)
    random = np.random.default_rng(0)
    original, first, second, references = random.normal(size=(4, 6, 2)) * [[[3.0, 1.0]]] + random.normal(size=(4, 1, 2))
    sets = SetDistances(lambda picture: torch.from_numpy(picture)[None])

    def distance(a: Any, b: Any) -> float:
        # of a 2 x 2 matrix M with positive eigenvalues: tr sqrt(M) = sqrt(tr M + 2 sqrt(det M))
        c, d = np.cov(a.T), np.cov(b.T)
        root = np.sqrt(np.trace(c @ d) + 2 * np.sqrt(np.linalg.det(c @ d)))
        return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(c) + np.trace(d) - 2 * root)

    for each in references:
        sets.add_reference(each)
    for name, pictures in (("original", original), ("first", first), ("second", second)):
        for picture in pictures:
            sets.add_image(picture, is_original=name == "original")
        distances = sets.take_distances(is_original=name == "original")
        to_original = 0.0 if name == "original" else distance(pictures, original)
        assert distances == {
            "frechet_original": pytest.approx(to_original, rel=1e-9),
            "frechet_references": pytest.approx(distance(pictures, references), rel=1e-9),
        }
