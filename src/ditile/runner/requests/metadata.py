"""How an image was made, in the forms in which files keep it: AUTOMATIC1111's `parameters`, and EXIF of JPEG and WebP.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from PIL import Image

PARAMETERS = "parameters"
"""The key of AUTOMATIC1111's text, which other programs read."""
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
# Tags of EXIF.
IMAGE_DESCRIPTION = 0x010E
EXIF_IFD = 0x8769
USER_COMMENT = 0x9286
MAX_EXIF_BYTES = 2**16 - 64
"""A segment of a JPEG has no room for more."""


def format_parameters(
    call: Mapping[str, Any], *, prompt: str, seed: int, size: tuple[int, int], model: str, scheduler: str
) -> str:
    """The text that AUTOMATIC1111 keeps in an image.

    Args:
        call: the arguments of the call, those by default included.
        prompt, seed, size: of this image; the size is its width and height in pixels.
        model: its name.
        scheduler: its class.
    """
    values = {
        "Steps": call.get("num_inference_steps"),
        "Sampler": SAMPLERS.get(scheduler, scheduler.removesuffix("Scheduler")),
        "CFG scale": call.get("guidance_scale"),
        "True CFG scale": call.get("true_cfg_scale"),
        "Seed": seed,
        "Size": f"{size[0]}x{size[1]}",
        "Model": model,
        "Denoising strength": call.get("strength"),
        "Version": f"ditile {version('ditile')}",
    }
    lines = [prompt]
    if call.get("negative_prompt"):
        lines.append(f"Negative prompt: {call['negative_prompt']}")
    # The programs that read it look for "Steps: " at the beginning of the last line.
    lines.append(", ".join(f"{name}: {_quote_value(value)}" for name, value in values.items() if value is not None))
    return "\n".join(lines)


def _quote_value(value: Any) -> str:
    """A value as AUTOMATIC1111 writes it: what would be taken for several is quoted."""
    text = str(value)
    if set(text).isdisjoint(",:\n"):
        return text
    return json.dumps(text, ensure_ascii=False)


def encode_exif(texts: Mapping[str, str]) -> bytes:
    """The EXIF of a JPEG or a WebP: all texts as JSON, and AUTOMATIC1111's as the comment; empty if it is too long."""
    exif = Image.Exif()
    exif[IMAGE_DESCRIPTION] = json.dumps(dict(texts))
    if PARAMETERS in texts:
        comment = texts[PARAMETERS].encode("utf-16-be", "replace")
        exif[EXIF_IFD] = {USER_COMMENT: b"UNICODE\0" + comment}
    encoded: bytes = exif.tobytes()
    if len(encoded) > MAX_EXIF_BYTES:
        return b""
    return encoded


def decode_exif(image: Image.Image) -> dict[str, str]:
    """The texts that `encode_exif` kept; empty if there are none.

    Raises:
        ValueError: if they are no JSON.
    """
    description = image.getexif().get(IMAGE_DESCRIPTION)
    if not isinstance(description, str):
        return {}
    texts = json.loads(description)
    return texts if isinstance(texts, dict) else {}
