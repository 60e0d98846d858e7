"""Images as ComfyUI's tensors, [B, H, W, C] of floats from 0 to 1, and as files of a server."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageSequence


def encode_images(images: Any) -> list[str]:
    """A batch [B, H, W, C] as PNGs in data URLs; of four channels the fourth is left out."""
    pixels = _convert_to_bytes(images)
    assert pixels.ndim == 4, f"a batch of images has four axes, not {pixels.ndim}"
    return [_encode_png(Image.fromarray(np.ascontiguousarray(image[..., :3]))) for image in pixels]


def encode_mask(mask: Any, images: Any) -> str:
    """A mask [H, W] or [1, H, W], 1 where the first image is generated again, as a PNG that is transparent there.

    Args:
        mask: of any size; it is resized to the images.
        images: the batch that it belongs to.

    Raises:
        ValueError: if it is zero everywhere, as the mask of a file without transparency is, or there are several.
    """
    pixels = _convert_to_bytes(mask)
    if pixels.ndim == 2:
        pixels = pixels[None]
    if len(pixels) > 1:
        raise ValueError(f"there are {len(pixels)} masks; connect one")
    if not pixels.any():
        raise ValueError("the mask is empty; paint it in ComfyUI's mask editor, or connect none")
    height, width = images.shape[1:3]
    regenerated = Image.fromarray(pixels[0]).resize((width, height), Image.Resampling.BILINEAR)
    transparent = Image.new("RGBA", (width, height))
    transparent.putalpha(regenerated.point(lambda value: 255 - value))
    return _encode_png(transparent)


def decode_images(files: Sequence[bytes]) -> Any:
    """Files of images of one size as a tensor [B, H, W, 3]."""
    return _convert_to_tensor([_read_pixels(Image.open(io.BytesIO(content))) for content in files])


def choose_video_format() -> str:
    """mp4 if PyAV, which comes with ComfyUI, is there; otherwise gif, which has 256 colours."""
    if importlib.util.find_spec("av") is None:
        return "gif"
    return "mp4"


def decode_video(content: bytes, video_format: str) -> Any:
    """The frames of a file as a tensor [B, H, W, 3]."""
    if video_format == "gif":
        with Image.open(io.BytesIO(content)) as moving:
            return _convert_to_tensor([_read_pixels(frame) for frame in ImageSequence.Iterator(moving)])
    import av

    with av.open(io.BytesIO(content)) as container:
        return _convert_to_tensor([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def decode_sound(content: bytes, video_format: str, seconds: float) -> dict[str, Any] | None:
    """The sound of a video's file as ComfyUI's AUDIO, as long as the video; None if it is mute."""
    if video_format == "gif":
        return None
    import av
    import torch

    with av.open(io.BytesIO(content)) as container:
        if not container.streams.audio:
            return None
        rate = container.streams.audio[0].rate
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    # AAC has frames of a fixed size, so the last one may reach beyond the video.
    samples = np.concatenate(frames, axis=1)[:, : round(seconds * rate)]
    return {"waveform": torch.from_numpy(np.ascontiguousarray(samples))[None], "sample_rate": rate}


def open_preview(content: bytes) -> Image.Image:
    """A preview as ComfyUI shows it."""
    return Image.open(io.BytesIO(content)).convert("RGB")


def _read_pixels(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image.convert("RGB"))


def _convert_to_bytes(tensor: Any) -> np.ndarray[Any, Any]:
    if hasattr(tensor, "cpu"):
        tensor = tensor.cpu()
    values = np.round(255 * np.asarray(tensor, dtype=np.float32))
    return np.clip(values, 0, 255).astype(np.uint8)


def _convert_to_tensor(images: Sequence[np.ndarray[Any, Any]]) -> Any:
    # Only here: ComfyUI has it, and nothing else of these nodes needs it.
    import torch

    return torch.from_numpy(np.stack(images).astype(np.float32) / 255)


def _encode_png(image: Image.Image) -> str:
    encoded = io.BytesIO()
    image.save(encoded, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode("ascii")
