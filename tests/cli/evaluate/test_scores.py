"""Scores that need a package which is not here: each is called as the real one is declared, with what it wants to have.

A stub has the signature of the released package, refuses what that refuses, and keeps what it is given: lpips 0.1.4,
torchmetrics 1.9, image-reward 1.5, clean-fid 0.1.35, torch-fidelity 0.4.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from ditile.cli.evaluate.frechet import CleanFid, TorchFidelity, space
from ditile.cli.evaluate.metrics import ALEXNET, Metric, load_available_metrics

CAPTION = "a large red circle in the center on a black background"
PICTURE = np.zeros((8, 12, 3), np.uint8)
PICTURE[..., 0], PICTURE[..., 1], PICTURE[0, 0] = 255, 51, (0, 102, 255)
OTHER = PICTURE[::-1].copy()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine: no package and no weights."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: tmp_path))
    for name in ("lpips", "torchmetrics", "torchvision", "ImageReward", "cleanfid", "torch_fidelity"):
        monkeypatch.setitem(sys.modules, name, None)
    return tmp_path


def install(patch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Puts a module, and the packages that it is in, where they are imported from."""
    parts = name.split(".")
    for k in range(1, len(parts) + 1):
        path = ".".join(parts[:k])
        made = sys.modules.get(path) or ModuleType(path)
        made.__spec__, made.__path__ = ModuleSpec(path, None, is_package=True), []
        patch.setitem(sys.modules, path, made)
    vars(sys.modules[name]).update(content)


def on_disk(path: Path) -> Path:
    """A file, empty, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def metric_of(name: str) -> Metric:
    """One that must be there."""
    found, absent = load_available_metrics("shapes-flux", [CAPTION], None)
    assert name not in absent, absent[name]
    return next(metric for metric in found if metric.name == name)


def channels(picture: Any) -> Tensor:
    """`[1, 3, H, W]`, as 0 to 255."""
    return torch.from_numpy(picture.transpose(2, 0, 1)[None].copy())


class LPIPS(nn.Module):
    """The distance is the mean difference."""

    given: tuple[Any, ...] = ()

    def __init__(
        self, pretrained: bool = True, net: str = "alex", version: str = "0.1", lpips: bool = True,
        spatial: bool = False, pnet_rand: bool = False, pnet_tune: bool = False, use_dropout: bool = True,
        model_path: str | None = None, eval_mode: bool = True, verbose: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (pretrained, net, version, lpips, spatial, pnet_rand, verbose) == (
            True, "alex", "0.1", True, False, False, False,
        )  # fmt: skip

    def forward(self, in0: Tensor, in1: Tensor, retPerLayer: bool = False, normalize: bool = False) -> Tensor:  # noqa: N803
        assert not retPerLayer and not normalize and not self.training and not torch.is_grad_enabled()
        type(self).given = (in0, in1)
        return (in0 - in1).abs().mean((1, 2, 3), keepdim=True)


class OfTorchmetrics(nn.Module):
    """The same, of the other package."""

    given: tuple[Any, ...] = ()

    def __init__(
        self, net_type: str = "alex", reduction: str | None = "mean", normalize: bool = False, **kwargs: Any
    ) -> None:
        super().__init__()
        assert (net_type, reduction, normalize, kwargs) == ("alex", "mean", False, {})

    def forward(self, img1: Tensor, img2: Tensor) -> Tensor:
        for image in (img1, img2):
            assert image.ndim == 4 and image.shape[1] == 3 and image.min() >= -1, "what torchmetrics refuses"
        type(self).given = (img1, img2)
        return (img1 - img2).abs().mean()


@pytest.mark.parametrize(
    ("module", "content"),
    [
        ("lpips", {"LPIPS": LPIPS}),
        ("torchmetrics.image.lpip", {"LearnedPerceptualImagePatchSimilarity": OfTorchmetrics}),
    ],
)
def test_lpips_is_given_both_pictures_from_minus_one_to_one(
    monkeypatch: pytest.MonkeyPatch, home: Path, module: str, content: dict[str, Any]
) -> None:
    """`[1, 3, H, W]`, red first. A failure means distances that no paper has."""
    install(monkeypatch, "torchvision")
    install(monkeypatch, module, **content)
    _, absent = load_available_metrics("shapes-flux", [CAPTION], None)
    assert ALEXNET in absent["lpips"], "nothing is downloaded"
    on_disk(home / "hub" / "checkpoints" / ALEXNET)
    lpips, (stub,) = metric_of("lpips"), content.values()
    assert lpips.measure(PICTURE, OTHER, CAPTION) == pytest.approx(
        float((channels(PICTURE).double() - channels(OTHER)).abs().mean()) / 127.5
    )
    for given, picture in zip(stub.given, (PICTURE, OTHER), strict=True):
        assert given.dtype == torch.float32
        torch.testing.assert_close(given, 2 * channels(picture).float() / 255 - 1)
    assert lpips.exact == 0.0


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The other one is taken; if there is none, the reason is said. A failure means a traceback after hours."""

    def broken(**_: Any) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    install(monkeypatch, "torchvision")
    install(monkeypatch, "lpips", LPIPS=broken)
    on_disk(home / "hub" / "checkpoints" / ALEXNET)
    _, absent = load_available_metrics("shapes-flux", [CAPTION], None)
    assert absent["lpips"] == "lpips cannot be imported: operator torchvision::nms does not exist"
    install(monkeypatch, "torchmetrics.image.lpip", LearnedPerceptualImagePatchSimilarity=OfTorchmetrics)
    assert metric_of("lpips").measure(PICTURE, PICTURE, CAPTION) == 0


class Reward:
    """ImageReward's model."""

    given: tuple[Any, ...] = ()

    def score(self, prompt: str, image: Any) -> float:
        assert isinstance(prompt, str) and isinstance(image, Image.Image), "what ImageReward refuses"
        assert not torch.is_grad_enabled(), "half a billion parameters would keep what a gradient needs"
        type(self).given = (prompt, image)
        return 1.5


def test_image_reward_is_given_the_caption_and_a_picture(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The judged one, from its own folder. A failure means a download, or the score of another picture."""
    folder = home / ".cache" / "ImageReward"

    def load(
        name: str = "ImageReward-v1.0", device: Any = "cpu", download_root: str | None = None,
        med_config: str | None = None,
    ) -> Reward:  # fmt: skip
        assert (Path(name), Path(str(med_config))) == (folder / "ImageReward.pt", folder / "med_config.json")
        assert str(device) == "cpu" and download_root is None
        return Reward()

    install(monkeypatch, "ImageReward", load=load)
    assert "cache folder" in load_available_metrics("shapes-flux", [CAPTION], None)[1]["image_reward"]
    for name in ("ImageReward.pt", "med_config.json"):
        on_disk(folder / name)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    assert "bert-base-uncased" in load_available_metrics("shapes-flux", [CAPTION], None)[1]["image_reward"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "vocab.txt")
    assert metric_of("image_reward").measure(PICTURE, OTHER, CAPTION) == 1.5
    prompt, image = Reward.given
    assert prompt == CAPTION and image.mode == "RGB" and np.array_equal(np.asarray(image), PICTURE)


class InceptionV3W(nn.Module):
    """clean-fid's."""

    given = torch.empty(0)

    def __init__(self, path: str, download: bool = True, resize_inside: bool = False) -> None:
        super().__init__()
        assert Path(path, CleanFid.FILE).is_file() and not download and not resize_inside

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] == x.shape[3] == 299 and not self.training and not torch.is_grad_enabled()
        type(self).given = x
        return x.mean((2, 3)).repeat(1, 683)[:, :2048]


def build_resizer(mode: str) -> Any:
    """clean-fid's: one channel at a time by Pillow, in float, not rounded."""
    assert mode == "clean"

    def sized(x: Any) -> Any:
        assert x.dtype == np.uint8 and x.shape[2] == 3
        each = [Image.fromarray(x[:, :, k].astype(np.float32)).resize((299, 299), Image.BICUBIC) for k in range(3)]
        return np.stack([np.asarray(image).clip(0, 255) for image in each], 2).astype(np.float32)

    return sized


def test_clean_fid_resizes_and_is_given_0_to_255(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Of pictures of several sizes at once, red first. A failure means an FID that is not clean-fid's."""
    install(monkeypatch, "cleanfid.inception_torchscript", InceptionV3W=InceptionV3W)
    install(monkeypatch, "cleanfid.resize", build_resizer=build_resizer)
    assert f"{CleanFid.FILE} is not in" in str(space()[1])
    on_disk(home / CleanFid.FILE)  # where clean-fid itself puts it
    made, why = space()
    assert made.name == "inception (clean-fid)" and made.is_inception and why is None
    flat = np.full((20, 30, 3), (255, 128, 0), np.uint8)
    features = made([flat, PICTURE])
    assert features.shape == (2, 2048) and features.dtype == np.float64
    assert InceptionV3W.given.dtype == torch.float32
    assert InceptionV3W.given[0].mean((1, 2)).tolist() == pytest.approx([255, 128, 0])
    assert features[0, :3] == pytest.approx([255, 128, 0])


class FeatureExtractorInceptionV3(nn.Module):
    """torch-fidelity's, which resizes by itself."""

    given: list[Tensor] = []

    def __init__(
        self, name: str, features_list: list[str], feature_extractor_weights_path: str | None = None,
        feature_extractor_internal_dtype: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert isinstance(name, str) and features_list == ["2048"] and feature_extractor_internal_dtype is None
        assert Path(str(feature_extractor_weights_path)).is_file() and not kwargs

    def forward(self, x: Tensor) -> tuple[Tensor]:
        assert x.dtype == torch.uint8, "what torch-fidelity refuses"
        assert x.dim() == 4 and x.shape[1] == 3, f"Input is not Bx3xHxW: {x.shape}"
        assert not self.training and not torch.is_grad_enabled()
        self.given.append(x)
        return (x.float().mean((2, 3)).repeat(1, 683)[:, :2048],)


def test_torch_fidelity_is_given_bytes(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """One picture after the other, as they are. A failure means an assertion of that package, or another FID."""
    monkeypatch.setattr(FeatureExtractorInceptionV3, "given", [])
    install(
        monkeypatch, "torch_fidelity.feature_extractor_inceptionv3",
        FeatureExtractorInceptionV3=FeatureExtractorInceptionV3,
    )  # fmt: skip
    assert f"{TorchFidelity.FILE} is not in" in str(space()[1]) and "cleanfid is not installed" in str(space()[1])
    on_disk(home / "hub" / "checkpoints" / TorchFidelity.FILE)
    made, why = space()
    assert made.name == "inception (torch-fidelity)" and made.is_inception and why is None
    features = made([PICTURE, np.zeros((4, 4, 3), np.uint8)])
    assert features.shape == (2, 2048) and features.dtype == np.float64 and not features[1].any()
    assert torch.equal(FeatureExtractorInceptionV3.given[0], channels(PICTURE))
