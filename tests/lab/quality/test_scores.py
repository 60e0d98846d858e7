"""Scores of pictures: what torchmetrics makes of them, and what is missing without its packages and weights.

Where a package or weights are not here, a stub stands in: it has the signature of torchmetrics 1.9 or image-reward 1.5,
refuses what these refuse, and keeps what it is given.
"""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.image import fid, lpip

from ditile_lab.quality import scores
from ditile_lab.quality.metrics import (
    ALEXNET,
    INCEPTION,
    Metric,
    compute_psnr,
    compute_ssim,
    load_available_metrics,
    load_inception_features,
)
from ditile_lab.quality.scores import SetDistances

CAPTION = "a large red circle in the center on a black background"
PICTURE = np.zeros((8, 12, 3), np.uint8)
PICTURE[..., 0], PICTURE[..., 1], PICTURE[0, 0] = 255, 51, (0, 102, 255)
OTHER = PICTURE[::-1].copy()
PACKAGES = ("torchvision", "torch_fidelity", "ImageReward")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with torchmetrics alone: no other package and no weights."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: tmp_path))
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    return tmp_path


def install(patch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Puts a module where it is imported from."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    patch.setitem(sys.modules, name, module)


def on_disk(path: Path) -> Path:
    """A file, empty, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def metric_of(name: str) -> Metric:
    """One that must be there."""
    available, absent = load_available_metrics("shapes-flux", [CAPTION], None)
    assert name not in absent, absent[name]
    return next(metric for metric in available if metric.name == name)


def channels(picture: Any) -> Tensor:
    """`[1, 3, H, W]`, as 0 to 255."""
    return torch.from_numpy(picture.transpose(2, 0, 1)[None].copy())


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


class Lpips(nn.Module):
    """The distance is the mean difference."""

    given: tuple[Any, ...] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__()
        assert options == {"net_type": "alex"}

    def forward(self, img1: Tensor, img2: Tensor) -> Tensor:
        assert not self.training and not torch.is_grad_enabled()
        for image in (img1, img2):
            assert image.ndim == 4 and image.shape[1] == 3 and image.min() >= -1, "what torchmetrics refuses"
        type(self).given = (img1, img2)
        return (img1 - img2).abs().mean()


def test_lpips_is_given_both_pictures_from_minus_one_to_one(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """`[1, 3, H, W]`, red first. A failure means distances that no paper has, a download, or a traceback."""
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.9.1+cu126"}.__getitem__)
    advice = "pip install torchvision==0.24.1 --index-url https://download.pytorch.org/whl/cu126"
    absent = load_available_metrics("shapes-flux", [CAPTION], None)[1]
    assert absent["lpips"] == f"torchvision is not installed: {advice}"
    install(monkeypatch, "torchvision")
    assert ALEXNET in load_available_metrics("shapes-flux", [CAPTION], None)[1]["lpips"], "nothing is downloaded"
    on_disk(home / "hub" / "checkpoints" / ALEXNET)
    monkeypatch.setattr(lpip, "LearnedPerceptualImagePatchSimilarity", Lpips, raising=False)
    lpips = metric_of("lpips")
    assert lpips.measure(PICTURE, OTHER, CAPTION) == pytest.approx(
        float((channels(PICTURE).double() - channels(OTHER)).abs().mean()) / 127.5
    )
    for given, picture in zip(Lpips.given, (PICTURE, OTHER), strict=True):
        torch.testing.assert_close(given, 2 * channels(picture).float() / 255 - 1)
    assert lpips.exact == 0.0
    monkeypatch.delattr(lpip, "LearnedPerceptualImagePatchSimilarity")
    _, absent = load_available_metrics("shapes-flux", [CAPTION], None)
    assert absent["lpips"].startswith("torchvision cannot be imported: ")


class Inception(nn.Module):
    """Features are the means of the colours."""

    given: list[Tensor] = []

    def __init__(self, *args: Any) -> None:
        super().__init__()
        bound = INCEPTION_SIGNATURE.bind(*args).arguments
        assert (bound["name"], bound["features_list"]) == ("inception-v3-compat", ["2048"])
        assert Path(bound["feature_extractor_weights_path"]).is_file()

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.uint8 and x.ndim == 4 and x.shape[1] == 3, "what torch-fidelity refuses"
        assert not torch.is_grad_enabled()
        self.given.append(x)
        return x.float().mean((2, 3))


INCEPTION_SIGNATURE = inspect.signature(fid.NoTrainInceptionV3)


def test_inception_is_given_bytes(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """As the picture has them, red first. A failure means another FID than the published one, or a download."""
    for package in PACKAGES[:2]:
        assert f"{package} is not installed: pip install" in str(load_inception_features())
        install(monkeypatch, package)
    assert f"{INCEPTION} is not in torch's hub folder" in str(load_inception_features())
    on_disk(home / "hub" / "checkpoints" / INCEPTION)
    assert "torch_fidelity cannot be imported: " in str(load_inception_features()), "of a package that is none"
    monkeypatch.setattr(fid, "NoTrainInceptionV3", Inception)
    monkeypatch.setattr(Inception, "given", [])
    extract = load_inception_features()
    assert not isinstance(extract, str) and extract(PICTURE).shape == (1, 3)
    assert torch.equal(Inception.given[0], channels(PICTURE))


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
