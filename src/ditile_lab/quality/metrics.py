"""The scores of images, by torchmetrics: against the original pipeline's image, or against the caption.

PSNR and SSIM are always measured. LPIPS, the FID and the CLIP score need weights, and nothing here downloads any. A
metric that cannot be measured is reported with the reason.
"""

from __future__ import annotations

import importlib
import math
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

from ditile.distributed.heartbeat import is_out_of_memory
from ditile.model.known import list_bundled_models
from ditile.plan.errors import ModelError, join_error_lines
from ditile.plan.extras import advise_torchvision, is_installed, require_extra
from ditile_lab.quality.caption_check import judge_image, parse_caption

ImageArray = NDArray[np.uint8]  # [H, W, 3]
ImageArrays = NDArray[np.uint8]  # [N, H, W, 3]
# These are files of weights in torch's hub folder, for LPIPS and for the FID.
ALEXNET = "alexnet-owt-7be5be79.pth"
INCEPTION = "weights-inception-2015-12-05-6726825d.pth"
# Importing a package raises these if it lacks another one, or does not fit this torch.
IMPORT_ERRORS = (ImportError, RuntimeError, AttributeError)


@dataclass(frozen=True, slots=True)
class Metric:
    """A number measured for each image.

    Attributes:
        name: its field in rows.
        title: its column, with the unit.
        digits: the digits after the point.
        measure: the image `[H, W, 3]`, the original one, and the caption -> the number.
        exact: the number of the original against itself; None if it is measured like the others.
        whole: whether it judges the image as generated, not resized.
    """

    name: str
    title: str
    digits: int
    measure: Callable[[ImageArray, ImageArray, str], float]
    exact: float | None = None
    whole: bool = False


def check_torchmetrics() -> None:
    """Raise `ModelError` unless torchmetrics can be imported."""
    require_extra("evaluate", "ditile evaluate", ["torchmetrics"])
    try:
        importlib.import_module("torchmetrics")
    except IMPORT_ERRORS as error:
        raise ModelError(f"torchmetrics cannot be imported: {join_error_lines(error, 160)}") from error


def compute_psnr(a: ImageArrays, b: ImageArrays) -> NDArray[np.float64]:
    """Compute the peak signal-to-noise ratio of each pair in dB; equal images count 100 dB.

    It is implemented here because `ditile bench` also compares images, without an extra.
    """
    differences = (a.astype(np.float64) - b) / 255
    mean_squares = np.square(differences).mean(axis=(1, 2, 3))
    # The floor of the error corresponds to 100 dB.
    decibels: NDArray[np.float64] = -10 * np.log10(np.maximum(mean_squares, 1e-10))
    return decibels


def compute_ssim(a: ImageArrays, b: ImageArrays) -> NDArray[np.float64]:
    """Compute the structural similarity of each pair (Wang et al. 2004), with 7 x 7 uniform windows like
    scikit-image."""
    require_extra("evaluate", "the SSIM", ["torchmetrics"])
    from torchmetrics.functional.image import structural_similarity_index_measure

    # torchmetrics divides the variance of a window by 49 pixels and scikit-image by 48. The factor 49 / 48 cancels in
    # the index if the constant of the variances is divided by it.
    k2 = 0.03 * math.sqrt(48 / 49)
    _, index = structural_similarity_index_measure(
        _to_float_tensors(a),
        _to_float_tensors(b),
        gaussian_kernel=False,
        kernel_size=7,
        data_range=1.0,
        k2=k2,
        reduction="none",
        return_full_image=True,
    )
    # Windows at the edge include reflected pixels, so only windows inside the image count.
    return index[..., 3:-3, 3:-3].mean(dim=(1, 2, 3)).numpy()


def load_available_metrics(
    model: str, captions: Sequence[str], clip: str | None
) -> tuple[list[Metric], dict[str, str]]:
    """Load the metrics that can be measured here, and name -> reason for the others.

    Raises:
        ModelError: if `clip` is given and cannot be loaded.
    """
    metrics = [
        Metric("psnr", "PSNR, dB", 1, lambda a, b, _: float(compute_psnr(a[None], b[None])[0]), exact=100.0),
        Metric("ssim", "SSIM", 4, lambda a, b, _: float(compute_ssim(a[None], b[None])[0]), exact=1.0),
    ]
    clip_metric: Metric | str = "no CLIP was named; add --clip FOLDER"
    if clip is not None:
        clip_metric = _load_clip_metric(clip)
    others = {
        "lpips": _load_lpips_metric(),
        "clip": clip_metric,
        "all_right": _build_all_right_metric(model, captions),
    }
    absent: dict[str, str] = {}
    for name, metric_or_reason in others.items():
        if isinstance(metric_or_reason, str):
            absent[name] = metric_or_reason
        else:
            metrics.append(metric_or_reason)
    return metrics, absent


def load_inception_features() -> Callable[[ImageArray], Tensor] | str:
    """Load a function that extracts the FID's features `[1, 2048]` of an image (arXiv 1706.08500), or return the
    reason.

    The network is the Inception of 2015, as torch-fidelity converted it.
    """
    reason = _explain_absence(("torchvision", "torch_fidelity"), INCEPTION)
    if reason is not None:
        return reason
    require_extra("evaluate", "the FID", ["torchmetrics"])
    try:
        package: Any = importlib.import_module("torchmetrics.image.fid")
        model = package.NoTrainInceptionV3("inception-v3-compat", ["2048"], str(_find_hub_file(INCEPTION)))
    except IMPORT_ERRORS as error:
        return f"torch_fidelity cannot be imported: {join_error_lines(error, 160)}"

    @torch.inference_mode()
    def extract_features(image: ImageArray) -> Tensor:
        features: Tensor = model(_to_byte_tensor(image)[None])
        return features

    return extract_features


def resize_image(image: ImageArray, side: int | None) -> ImageArray:
    """Resize an image to a square of `side` pixels, whatever its shape; unchanged if `side` is None."""
    if side is None or image.shape[:2] == (side, side):
        return image
    return np.array(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC))


def _load_lpips_metric() -> Metric | str:
    """Load LPIPS (arXiv 1801.03924) on AlexNet."""
    reason = _explain_absence(("torchvision",), ALEXNET)
    if reason is not None:
        return reason
    require_extra("evaluate", "LPIPS", ["torchmetrics"])
    try:
        package = importlib.import_module("torchmetrics.image.lpip")
        with warnings.catch_warnings():
            # torchvision warns about names of its own arguments.
            warnings.simplefilter("ignore")
            model = package.LearnedPerceptualImagePatchSimilarity(net_type="alex").eval()
    except IMPORT_ERRORS as error:
        return f"torchvision cannot be imported: {join_error_lines(error, 160)}"

    @torch.inference_mode()
    def compute_lpips(a: ImageArray, b: ImageArray, _: str) -> float:
        # The network takes values from -1 to 1.
        image = _to_byte_tensor(a)[None].float() / 127.5 - 1
        original = _to_byte_tensor(b)[None].float() / 127.5 - 1
        return float(model(image, original))

    return Metric("lpips", "LPIPS", 4, compute_lpips, exact=0.0)


class _ClipFeatures:
    """An adapter of a CLIP from transformers 5, with outputs that have fields, for torchmetrics, which needs
    tensors."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self._model = model

    def to(self, _: torch.device) -> _ClipFeatures:
        return self

    def get_image_features(self, pixels: Tensor) -> Any:
        return self._model.get_image_features(pixels).pooler_output

    def get_text_features(self, tokens: Tensor, mask: Tensor) -> Any:
        return self._model.get_text_features(tokens, mask).pooler_output


def _load_clip_metric(name: str) -> Metric:
    """Load CLIPScore (arXiv 2104.08718, without its factor): 100 times the cosine of image and caption, at least 0."""
    require_extra("evaluate", f"clip={name!r}", ["torchmetrics"])
    from torchmetrics.functional.multimodal import clip_score
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    try:
        model: Any = CLIPModel.from_pretrained(name, local_files_only=True, use_safetensors=True).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
        processor: Any = CLIPImageProcessorPil.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        reason = join_error_lines(error, 160)
        raise ModelError(f"clip={name!r} is not a CLIP that transformers can load from disk: {reason}") from error
    length = model.config.text_config.max_position_embeddings

    # torchmetrics passes either text or images.
    def prepare_inputs(text: list[str] | None = None, images: list[Tensor] | None = None, **_: Any) -> Any:
        if text is not None:
            return tokenizer(text, return_tensors="pt", truncation=True, max_length=length)
        return processor(images=images, return_tensors="pt")

    pair: Any = (_ClipFeatures(model), prepare_inputs)

    @torch.inference_mode()
    def compute_clip_score(a: ImageArray, _: ImageArray, caption: str) -> float:
        return float(clip_score(_to_byte_tensor(a), caption, lambda: pair))

    return Metric(f"clip:{name}", "CLIP score", 2, compute_clip_score)


def _build_all_right_metric(model: str, captions: Sequence[str]) -> Metric | str:
    """Build the metric for complete images of a bundled model: whether they show all of their caption, in per cent."""
    if model not in list_bundled_models():
        return "only images of bundled models can be checked"
    try:
        for caption in captions:
            parse_caption(caption)
    except ValueError:
        return "captions are not of the bundled models' kind"

    def score_image(image: ImageArray, _original: ImageArray, caption: str) -> float:
        return 100.0 * judge_image(image, caption).all_right

    return Metric("all_right", "right, %", 0, score_image, whole=True)


def _explain_absence(packages: Sequence[str], weights: str) -> str | None:
    """Name the missing package or file of weights in a phrase; None if all are there."""
    for package in packages:
        if is_installed(package):
            continue
        advice = f"pip install {package.replace('_', '-')}"
        if package == "torchvision":
            advice = advise_torchvision()
        return f"{package} is not installed: {advice}"
    if not _find_hub_file(weights).is_file():
        return f"{weights} is not in torch's hub folder"
    return None


def _find_hub_file(name: str) -> Path:
    """Return the path of a file of weights in torch's hub folder."""
    return Path(torch.hub.get_dir(), "checkpoints", name)


def _to_byte_tensor(image: ImageArray) -> Tensor:
    """Convert an image to `[3, H, W]`."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def _to_float_tensors(images: ImageArrays) -> Tensor:
    """Convert images to `[N, 3, H, W]`, from 0 to 1."""
    return torch.from_numpy(images / 255).permute(0, 3, 1, 2)
