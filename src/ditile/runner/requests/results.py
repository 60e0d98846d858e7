"""From a call's result to files: pictures and videos, with how they were made."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ditile.model.pipeline_calls import list_call_parameters
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.model_files import FRAME_RATE, read_generation_defaults
from ditile.runner.requests import pictures, videos
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.metadata import PARAMETERS, format_parameters
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import (
    VIDEO_FIELDS,
    find_frame_rate,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL import Image

    from ditile.runner.requests.videos import Video


def build_png_texts(
    wanted: GenerateOptions,
    plan: Plan,
    cache: CacheOptions,
    call: dict[str, Any],
    conditions: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The texts in a picture's file that say how it was made, without its prompt and seed.

    Args:
        wanted, plan, cache: what was asked for.
        call: the arguments of the call.
        conditions: what it starts from, as of `bind_conditions`.
    """
    settings = cache.describe_settings()
    if "lora" in settings:
        settings["lora"] = pictures.hide_local_path(settings["lora"])
    return {
        "Software": f"ditile {version('ditile')}",
        "model": pictures.hide_local_path(wanted.model),
        "plan": str(plan),
        "settings": json.dumps(call),
        **_describe_conditions(wanted, conditions or {}),
    } | ({"cache": json.dumps(settings)} if settings else {})


def add_picture_texts(
    texts: Mapping[str, str],
    pipe: DiffusionPipeline,
    call: Mapping[str, Any],
    prompt: str | None,
    seed: int,
    drawn: Image.Image | Video,
) -> dict[str, str]:
    """The texts of one picture or video: those of its request, its prompt and seed, and what AUTOMATIC1111 writes.

    Args:
        texts: as of `build_png_texts`.
        pipe, call: what made it.
        prompt, seed, drawn: of this one.
    """
    by_default = {name: parameter.default for name, parameter in list_call_parameters(pipe).items()}
    own = {name: value for name, value in by_default.items() if value is not inspect.Parameter.empty}
    # A video is [F, H, W, 3].
    width, height = (drawn.shape[2], drawn.shape[1]) if isinstance(drawn, np.ndarray) else drawn.size
    parameters = format_parameters(
        own | dict(call),
        prompt=prompt or "",
        seed=seed,
        size=(int(width), int(height)),
        model=texts["model"],
        scheduler=type(getattr(pipe, "scheduler", None)).__name__,
    )
    return {**texts, "prompt": prompt or "", "seed": str(seed), PARAMETERS: parameters}


def _describe_conditions(wanted: GenerateOptions, conditions: Mapping[str, Any]) -> dict[str, str]:
    """What it was made from, by size and content: a served picture is made from files that have other names."""
    described: dict[str, Any] = {
        name: [_describe_content(one) for one in value] if name == "image" else _describe_content(value)
        for name, value in conditions.items()
    }
    if wanted.controlnet is not None:
        described["controlnet"] = pictures.hide_local_path(wanted.controlnet)
    return {"conditions": json.dumps(described)} if described else {}


def _describe_content(content: Image.Image | Sequence[Image.Image]) -> str:
    """The size of a picture or of a video's frames, how many these are, and a digest of the pixels."""
    frames = content if isinstance(content, Sequence) else [content]
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(frame.convert("RGB").tobytes())
    size = "x".join(map(str, (*frames[0].size, *([len(frames)] if isinstance(content, Sequence) else ()))))
    return f"{size} {digest.hexdigest()[:16]}"


def list_drawn(result: Any) -> Sequence[Image.Image | Video]:
    """The pictures or the videos of a pipeline's result; none of None, which the other ranks have."""
    if result is None:
        return []
    images: Sequence[Image.Image] | None = getattr(result, "images", None)
    if images is not None:
        return images
    return videos.convert_to_videos(next(getattr(result, name) for name in VIDEO_FIELDS if hasattr(result, name)))


def choose_fps(pipe: DiffusionPipeline, wanted: GenerateOptions, call: Mapping[str, Any]) -> float:
    """Frames a second of a video: as given, else as the model or its class has it."""
    own = read_generation_defaults(wanted.model).get(FRAME_RATE) or find_frame_rate(pipe, call)
    return float(wanted.fps or own or videos.DEFAULT_FPS)


def encode_drawn(
    drawn: Image.Image | Video, format: str, quality: int, fps: float, texts: Mapping[str, str]
) -> tuple[bytes, bytes | None]:
    """A picture or a video as the bytes of a file, and the poster of a video; see `encode_picture`, `encode_video`."""
    from PIL import Image

    if isinstance(drawn, Image.Image):
        return pictures.encode_picture(drawn, format, quality, texts), None
    return videos.encode_video(drawn, format, fps, texts), videos.encode_poster(drawn, fps, texts)


def write_drawn(drawn: Image.Image | Video, path: str, fps: float, texts: dict[str, str]) -> None:
    """Writes a picture, or a video and its poster."""
    from PIL import Image

    try:
        Path(path).parent.mkdir(exist_ok=True)
        if isinstance(drawn, Image.Image):
            pictures.save_picture_with_texts(drawn, Path(path), texts)
        else:
            videos.save_video_with_poster(drawn, Path(path), fps, texts)
    except OSError as error:
        raise ModelError(f"out={path!r} cannot be written: {error}") from error
