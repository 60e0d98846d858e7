"""Writes a call's result to files: images, videos and sounds, with texts about how they were made."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ditile.distributed import files
from ditile.model.pipeline_calls import list_call_parameters
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments, JsonObject, drop_missing
from ditile.plan.plan import Plan
from ditile.runner.model_files import FRAME_RATE, read_generation_defaults
from ditile.runner.requests import pictures, videos
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import (
    VIDEO_FIELDS,
    find_frame_rate,
)
from ditile.runner.sounds import Sound, encode_wav, list_sounds

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL import Image

    from ditile.runner.requests.videos import Video

SAMPLERS = {
    "EulerDiscreteScheduler": "Euler",
    "FlowMatchEulerDiscreteScheduler": "Euler",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "DPMSolverSDEScheduler": "DPM++ SDE",
    "HeunDiscreteScheduler": "Heun",
    "FlowMatchHeunDiscreteScheduler": "Heun",
    "LMSDiscreteScheduler": "LMS",
    "PNDMScheduler": "PLMS",
    "DDIMScheduler": "DDIM",
    "UniPCMultistepScheduler": "UniPC",
    "LCMScheduler": "LCM",
}
"""Class of diffusers -> the name that AUTOMATIC1111 has for it."""
_NEGATIVE = "Negative prompt"


def build_png_texts(
    request: GenerateOptions,
    plan: Plan,
    cache: CacheOptions,
    call: CallArguments,
    conditions: CallArguments | None,
    promise: JsonObject | None,
) -> dict[str, str]:
    """Build the texts that a file keeps about how its content was made, all but its prompt and seed.

    Args:
        conditions: what it starts from, as in `bind_conditions`.
        promise: what was promised for the request's bounds; None if it has none.
    """
    settings = cache.describe_settings(pictures.hide_local_path)
    config = settings.get("cache_config", {})
    if config.get("schedule") is not None:
        # Above, the function is only for LoRAs.
        config["schedule"] = pictures.hide_local_path(config["schedule"])
    # A server keeps the inputs of requests under names of its own, so they are described by size and content.
    described: JsonObject = {}
    for name, value in (conditions or {}).items():
        if name == "image":
            described[name] = [_describe_frames([image], is_video=False) for image in value]
        elif name == "video":
            described[name] = _describe_frames(value, is_video=True)
        else:
            described[name] = _describe_frames([value], is_video=False)
    if request.controlnet is not None:
        described["controlnet"] = pictures.hide_local_path(request.controlnet)
    texts = {
        "Software": f"ditile {version('ditile')}",
        "model": pictures.hide_local_path(request.model),
        "plan": str(plan),
        "settings": json.dumps(call),
    }
    if described:
        texts["conditions"] = json.dumps(described)
    if settings:
        texts["cache"] = json.dumps(settings)
    if promise:
        texts["promise"] = json.dumps(promise)
    if request.components:
        texts["components"] = json.dumps(pictures.describe_weight_files(request.components))
    return texts


def describe_settings(pipe: DiffusionPipeline, call: CallArguments, texts: Mapping[str, str]) -> JsonObject:
    """Describe a call in the words of AUTOMATIC1111. The seed and the size belong to a picture, and are None here.

    Args:
        texts: the result of `build_png_texts`.
    """
    complete: CallArguments = {}
    for name, parameter in list_call_parameters(pipe).items():
        if parameter.default is not inspect.Parameter.empty:
            complete[name] = parameter.default
    complete |= call
    scheduler = type(getattr(pipe, "scheduler", None)).__name__
    return {
        _NEGATIVE: complete.get("negative_prompt") or None,
        "Steps": complete.get("num_inference_steps"),
        "Sampler": SAMPLERS.get(scheduler, scheduler.removesuffix("Scheduler")),
        "CFG scale": complete.get("guidance_scale"),
        "True CFG scale": complete.get("true_cfg_scale"),
        "Seed": None,
        "Size": None,
        "Model": texts["model"],
        "Denoising strength": complete.get("strength"),
        "Version": f"ditile {version('ditile')}",
    }


def add_picture_texts(
    texts: Mapping[str, str],
    settings: JsonObject,
    prompt: str | None,
    seed: int,
    drawn: Image.Image | Video | Sound,
) -> dict[str, str]:
    """Return all texts of one image, video or sound: of its request, its prompt, its seed and AUTOMATIC1111's text.

    Args:
        texts, settings: the results of `build_png_texts` and `describe_settings`.
    """
    prompt = prompt or ""
    size = None
    if isinstance(drawn, np.ndarray):
        # A video is [F, H, W, 3].
        height, width = drawn.shape[1:3]
        size = f"{width}x{height}"
    elif not isinstance(drawn, Sound):
        size = "{}x{}".format(*drawn.size)
    values = settings | {"Seed": seed, "Size": size}
    lines = [prompt]
    negative = values.pop(_NEGATIVE, None)
    if negative is not None:
        lines.append(f"{_NEGATIVE}: {negative}")
    parts = []
    for name, value in drop_missing(values).items():
        text = str(value)
        # AUTOMATIC1111 would take this for several values.
        if not set(text).isdisjoint(",:\n"):
            text = json.dumps(text, ensure_ascii=False)
        parts.append(f"{name}: {text}")
    # The programs that read this text look for "Steps: " at the beginning of the last line.
    lines.append(", ".join(parts))
    return {**texts, "prompt": prompt, "seed": str(seed), pictures.PARAMETERS: "\n".join(lines)}


def _describe_frames(frames: Any, *, is_video: bool) -> str:
    """Describe an image or a video's frames by size, number, and a digest of the pixels."""
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(frame.convert("RGB").tobytes())
    size = f"{frames[0].width}x{frames[0].height}"
    if is_video:
        size += f"x{len(frames)}"
    return f"{size} {digest.hexdigest()[:16]}"


def list_drawn(pipe: Any, result: Any) -> Sequence[Image.Image | Video | Sound]:
    """List a result's images, videos or sounds. The result is None, and the list empty, on ranks that get none."""
    if result is None:
        return []
    images: Sequence[Image.Image] | None = getattr(result, "images", None)
    if images is not None:
        return images
    for name in VIDEO_FIELDS:
        if hasattr(result, name):
            return videos.convert_to_videos(getattr(result, name))
    return list_sounds(pipe, result)


def list_outputs(pipe: Any, result: Any) -> list[tuple[Image.Image | Video | Sound, Sound | None]]:
    """List what a pipeline's result holds, like `list_drawn`, with each video's sound."""
    drawn = list_drawn(pipe, result)
    sounds: Sequence[Sound | None] = [None] * len(drawn)
    if any(hasattr(result, name) for name in VIDEO_FIELDS):
        sounds = list_sounds(pipe, result) or sounds
    return [*zip(drawn, sounds, strict=True)]


def choose_fps(pipe: DiffusionPipeline, request: GenerateOptions, call: CallArguments) -> float:
    """Choose the frames a second of a video: of the request, otherwise of the model's files or its class."""
    model_rate = read_generation_defaults(request.model).get(FRAME_RATE)
    return float(request.fps or model_rate or find_frame_rate(pipe, call) or videos.DEFAULT_FPS)


def encode_drawn(
    drawn: Image.Image | Video | Sound,
    format: str,
    quality: int,
    fps: float,
    texts: Mapping[str, str],
    sound: Sound | None = None,
) -> tuple[bytes, bytes | None]:
    """Return the bytes of the file, and those of the poster if it is a video.

    See `encode_picture`, `encode_video` and `encode_wav`.
    """
    from PIL import Image

    if isinstance(drawn, Image.Image):
        return pictures.encode_picture(drawn, format, quality, texts), None
    if isinstance(drawn, Sound):
        return encode_wav(drawn, texts), None
    return videos.encode_video(drawn, format, fps, texts, sound), videos.encode_poster(drawn, fps, texts)


def write_drawn(
    drawn: Image.Image | Video | Sound, path: str, fps: float, texts: dict[str, str], sound: Sound | None = None
) -> None:
    """Write an image, a sound, or a video with its sound and its poster."""
    file = Path(path)
    suffix = file.suffix.lower()
    format = pictures.PICTURE_FORMATS.get(suffix, suffix.removeprefix("."))
    content, poster = encode_drawn(drawn, format, pictures.FILE_QUALITY, fps, texts, sound)
    try:
        file.parent.mkdir(exist_ok=True)  # the folder of --out-dir may be new
        # A poster says that its video is whole, so it is written last.
        if poster is not None:
            videos.build_poster_path(file).unlink(missing_ok=True)
        files.write_atomically(file, content)
        if poster is not None:
            files.write_atomically(videos.build_poster_path(file), poster)
    except OSError as error:
        raise ModelError(f"out={path!r} cannot be written: {error}") from error
