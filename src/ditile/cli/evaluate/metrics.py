"""What is measured of each picture: against the original pipeline's, or against its caption.

PSNR and SSIM are always there. The others need a package or weights that nothing here downloads; what is not there is
named with its reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ditile.cli.evaluate.caption_check import judge_picture
from ditile.cli.evaluate.frechet import BROKEN, hub_file, line_of
from ditile.cli.evaluate.scenes import parse_caption
from ditile.errors import ModelError
from ditile.runner.load import list_bundled_models

Pictures = NDArray[np.uint8]


def compute_psnr(a: Pictures, b: Pictures) -> NDArray[np.float64]:
    """Peak signal-to-noise ratio of each pair in dB; equal pictures count as 100 dB."""
    error = ((a.astype(np.float64) - b) ** 2).mean(axis=(1, 2, 3)) / 255**2
    decibels: NDArray[np.float64] = 10 * np.log10(1 / np.maximum(error, 1e-10))
    return decibels


def compute_ssim(a: Pictures, b: Pictures) -> NDArray[np.float64]:
    """Structural similarity of each pair (Wang et al. 2004) with 7 x 7 uniform windows, as scikit-image's default.

    Written out to spare the dependency on scipy.
    """

    def average_windows(x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(x, 7, stride=1)

    x, y = (torch.from_numpy(p).double().permute(0, 3, 1, 2) / 255 for p in (a, b))
    mx, my = average_windows(x), average_windows(y)
    sample = 49 / 48  # unbiased covariance
    vx, vy, vxy = (
        (average_windows(p * q) - m) * sample for p, q, m in ((x, x, mx * mx), (y, y, my * my), (x, y, mx * my))
    )
    index = (2 * mx * my + 1e-4) * (2 * vxy + 9e-4) / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4))
    found: NDArray[np.float64] = index.mean(dim=(1, 2, 3)).numpy()
    return found


Picture = NDArray[np.uint8]
ALEXNET = "alexnet-owt-7be5be79.pth"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number for each picture.

    Attributes:
        name: of the field in rows.
        title: of the column, with its unit.
        digits: behind the point.
        of: the picture `[H, W, 3]`, the original one, and the caption -> the number.
        exact: what the original gets against itself; None if it is measured like the others.
        whole: judged as drawn, not resized.
    """

    name: str
    title: str
    digits: int
    measure: Callable[[Picture, Picture, str], float]
    exact: float | None = None
    whole: bool = False


def load_available_metrics(
    model: str, captions: Sequence[str], clip: str | None
) -> tuple[list[Metric], dict[str, str]]:
    """The metrics that can be taken here, and why others cannot.

    Raises:
        ModelError: if `clip` is named and cannot be loaded.
    """
    metrics = [
        Metric("psnr", "PSNR, dB", 1, lambda a, b, _: float(compute_psnr(a[None], b[None])[0]), exact=100.0),
        Metric("ssim", "SSIM", 4, lambda a, b, _: float(compute_ssim(a[None], b[None])[0]), exact=1.0),
    ]
    absent: dict[str, str] = {}
    makers: tuple[tuple[str, Callable[[], Metric | str]], ...] = (
        ("lpips", _load_lpips_metric),
        ("clip", lambda: "no CLIP was named; add --clip FOLDER" if clip is None else _load_clip_metric(clip)),
        ("image_reward", _load_image_reward_metric),
        ("all_right", lambda: _build_all_right_metric(model, captions)),
    )
    for name, make in makers:
        metric_or_reason = make()
        if isinstance(metric_or_reason, str):
            absent[name] = metric_or_reason
        else:
            metrics.append(metric_or_reason)
    return metrics, absent


def resize_picture(picture: Picture, side: int | None) -> Picture:
    """A picture as a square of `side` pixels, its shape not kept, as clean-fid does; as it is where that is None."""
    if side is None or picture.shape[:2] == (side, side):
        return picture
    return np.array(Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC))


def _load_lpips_metric() -> Metric | str:
    """LPIPS (arXiv 1801.03924) on AlexNet, by the package lpips or by torchmetrics."""
    here = [name for name in ("lpips", "torchmetrics") if importlib.util.find_spec(name)]
    if not here or not importlib.util.find_spec("torchvision"):
        return "neither lpips nor torchmetrics is installed" if not here else "torchvision is not installed"
    if hub_file(ALEXNET) is None:
        return f"{ALEXNET} is not in torch's hub folder"
    model, why = None, []
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchvision, about names of arguments
        for name in here:
            try:
                model = model or _load_lpips_model(name)
            except BROKEN as error:
                why.append(f"{name} cannot be imported: {line_of(error)}")
    if model is None:
        return "; ".join(why)
    measure = model

    @torch.inference_mode()
    def compute_lpips(a: Picture, b: Picture, _: str) -> float:
        return float(measure(_to_signed_tensor(a), _to_signed_tensor(b)))

    return Metric("lpips", "LPIPS", 4, compute_lpips, exact=0.0)


def _load_lpips_model(name: str) -> Any:
    """The model of one of the two packages, whose weights are on disk."""
    if name == "lpips":
        return importlib.import_module("lpips").LPIPS(net="alex", verbose=False).eval()
    package: Any = importlib.import_module("torchmetrics.image.lpip")
    return package.LearnedPerceptualImagePatchSimilarity(net_type="alex").eval()


def _load_clip_metric(name: str) -> Metric:
    """100 times the cosine of picture and caption (arXiv 2104.08718, without its factor)."""
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    try:
        model: Any = CLIPModel.from_pretrained(name, local_files_only=True, use_safetensors=True).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
        processor: Any = CLIPImageProcessorPil.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"clip={name!r} is no CLIP that transformers can load from disk: {line_of(error)}") from error

    @torch.inference_mode()
    def compute_clip_score(a: Picture, _: Picture, caption: str) -> float:
        length = model.config.text_config.max_position_embeddings
        text_tokens = tokenizer(caption, return_tensors="pt", truncation=True, max_length=length)
        image_inputs = processor(images=Image.fromarray(a), return_tensors="pt")
        out = model(input_ids=text_tokens["input_ids"], attention_mask=text_tokens["attention_mask"], **image_inputs)
        return 100 * float(torch.nn.functional.cosine_similarity(out.image_embeds, out.text_embeds))

    return Metric(f"clip:{name}", "CLIP score", 2, compute_clip_score)


def _load_image_reward_metric() -> Metric | str:
    """ImageReward (arXiv 2304.05977)."""
    if not importlib.util.find_spec("ImageReward"):
        return "ImageReward is not installed"
    folder = Path.home() / ".cache" / "ImageReward"
    weights, config = folder / "ImageReward.pt", folder / "med_config.json"
    if not (weights.is_file() and config.is_file()):
        return "ImageReward.pt and med_config.json are not in its cache folder"
    import huggingface_hub

    if not isinstance(huggingface_hub.try_to_load_from_cache("bert-base-uncased", "vocab.txt"), str):
        return "its tokenizer, bert-base-uncased, is not in the hub's cache"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            package: Any = importlib.import_module("ImageReward")
            model = package.load(str(weights), device="cpu", med_config=str(config))
    except (*BROKEN, OSError) as error:
        return f"ImageReward cannot be loaded: {line_of(error)}"

    @torch.inference_mode()
    def compute_image_reward(a: Picture, _: Picture, caption: str) -> float:
        return float(model.score(caption, Image.fromarray(a)))

    return Metric("image_reward", "ImageReward", 3, compute_image_reward)


def _build_all_right_metric(model: str, captions: Sequence[str]) -> Metric | str:
    """Whether a picture of a bundled model shows all that its caption says, in per cent."""
    if model not in list_bundled_models():
        return "only pictures of bundled models can be checked"
    try:
        for caption in captions:
            parse_caption(caption)
    except ValueError:
        return "captions are not of the bundled models' kind"

    def score_picture(picture: Picture, _original: Picture, caption: str) -> float:
        return 100.0 * judge_picture(picture, caption).all_right

    return Metric("all_right", "right, %", 0, score_picture, whole=True)


def _to_signed_tensor(picture: Picture) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1
