"""The nodes: a server, images, edits, videos, LoRAs, and the status of the server.

A node's key is never an input, as workflows are shared and are written into images: see `client.find_key`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import image_files
from .client import Client, ServerError, find_default_address

CATEGORY = "ditile"
# The largest whole number that a browser keeps exactly.
LARGEST_SEED = 2**53 - 1
NUM_PREVIEWS = 3
PREVIEW_PIXELS = 512
# How long a node waits for the server to say whether it has changed, before anything is run.
CHANGED_SECONDS = 3.0
OWN = "the model's own"


@dataclass(frozen=True)
class Server:
    """What the wire of a server holds: only its address."""

    address: str


def define_seed() -> tuple[str, dict[str, Any]]:
    """A seed with ComfyUI's choice of how it changes after each run."""
    return ("INT", {"default": 0, "min": 0, "max": LARGEST_SEED, "control_after_generate": True})


def define_prompt(tooltip: str, default: str = "") -> tuple[str, dict[str, Any]]:
    """A text of several lines."""
    return ("STRING", {"default": default, "multiline": True, "dynamicPrompts": True, "tooltip": tooltip})


def define_count(tooltip: str, most: int) -> tuple[str, dict[str, Any]]:
    """A number that is the model's own at 0."""
    return ("INT", {"default": 0, "min": 0, "max": most, "tooltip": f"{tooltip}; 0: {OWN}"})


def define_scale(tooltip: str, most: float) -> tuple[str, dict[str, Any]]:
    """A number that is the model's own at -1."""
    limits = {"default": -1.0, "min": -1.0, "max": most, "step": 0.05, "tooltip": f"{tooltip}; -1: {OWN}"}
    return ("FLOAT", limits)


def define_common_inputs() -> dict[str, Any]:
    """Inputs of images and videos besides the prompt and the seed. All of them may keep their defaults."""
    return {
        "negative_prompt": define_prompt("what to keep out, where the model takes it"),
        "width": define_count("pixels", 16384),
        "height": define_count("pixels", 16384),
        "steps": define_count("denoising steps", 10000),
        "guidance": define_scale("how strongly the prompt guides", 100.0),
        "lora": ("DITILE_LORA", {"tooltip": "LoRAs of the server"}),
    }


class DitileServer:
    """A server."""

    CATEGORY = CATEGORY
    FUNCTION = "connect_server"
    RETURN_TYPES = ("DITILE_SERVER",)
    RETURN_NAMES = ("server",)
    DESCRIPTION = "A ditile server by its address. Its key is in ~/.config/ditile/keys.json or DITILE_API_KEY."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The address."""
        return {
            "required": {"address": ("STRING", {"default": find_default_address(), "tooltip": "of `ditile serve`"})}
        }

    @classmethod
    def IS_CHANGED(cls, address: str) -> Any:  # noqa: N802
        """What is served: ComfyUI runs the workflow again when the model or the plan changes."""
        try:
            return _describe_served(Client(address, limit_seconds(CHANGED_SECONDS)))
        except ServerError:
            return float("nan")

    def connect_server(self, address: str) -> tuple[Server]:
        """Asks whether the server is there.

        Raises:
            ServerError: if it is not, or asks for another key.
        """
        _describe_served(Client(address, check_interrupt))
        return (Server(address),)


class DitileLoRA:
    """A LoRA of the server's folder; several are chained."""

    CATEGORY = CATEGORY
    FUNCTION = "add_lora"
    RETURN_TYPES = ("DITILE_LORA",)
    RETURN_NAMES = ("lora",)
    DESCRIPTION = "A LoRA by its name on the server (ditile serve --lora-dir); the status node lists the names."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """Name, strength, and those before it."""
        strength = {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.05}
        return {
            "required": {
                "name": ("STRING", {"default": "", "tooltip": "its file's name without .safetensors"}),
                "strength": ("FLOAT", strength),
            },
            "optional": {"previous": ("DITILE_LORA", {"tooltip": "LoRAs that are used too"})},
        }

    def add_lora(
        self, name: str, strength: float, previous: Mapping[str, float] | None = None
    ) -> tuple[dict[str, float]]:
        """The LoRAs before it, and this one.

        Raises:
            ValueError: if it has no name, or is among those before it.
        """
        name = name.strip()
        loras = dict(previous or {})
        if not name:
            raise ValueError("the LoRA has no name; the status node lists those of the server")
        if name in loras:
            raise ValueError(f"LoRA {name!r} is there twice; add the strengths in one node")
        return ({**loras, name: strength},)


class DitileGenerate:
    """Images of a prompt."""

    CATEGORY = CATEGORY
    FUNCTION = "generate_images"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("images", "info")
    DESCRIPTION = "Generates images on a ditile server. Images of a batch have seeds that count up."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """Server, prompt, seed, and what may be left to the model."""
        batch = {"default": 1, "min": 1, "max": 64, "tooltip": "images, with seeds that count up"}
        required = define_required_inputs("what to generate", batch_size=("INT", batch))
        return {"required": required, "optional": define_common_inputs()}

    def generate_images(
        self, server: Server, prompt: str, seed: int, batch_size: int = 1, **optional: Any
    ) -> tuple[Any, str]:
        """Images [B, H, W, 3], and what the server says of them.

        Raises:
            ServerError: if it refuses or fails.
        """
        fields = {"prompt": prompt, "seed": seed, "n": batch_size, **collect_fields(optional)}
        return generate_batch(server, "/v1/images/generations", fields)


class DitileEdit:
    """Images that start from images."""

    CATEGORY = CATEGORY
    FUNCTION = "edit_images"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("images", "info")
    DESCRIPTION = "Edits an image on a ditile server; with a mask only where that is painted."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """Server, image, prompt, seed, mask, and what may be left to the model."""
        image = ("IMAGE", {"tooltip": "a batch of several where the model composes several"})
        required = define_required_inputs("what to generate, or to change", image=image)
        strength = define_scale("how far the result may depart from the image, above 0 and up to 1", 1.0)
        mask = ("MASK", {"tooltip": "where the image is generated again"})
        return {"required": required, "optional": {"strength": strength, **define_common_inputs(), "mask": mask}}

    def edit_images(
        self, server: Server, image: Any, prompt: str, seed: int, mask: Any = None, **optional: Any
    ) -> tuple[Any, str]:
        """Images [B, H, W, 3], and what the server says of them.

        Raises:
            ServerError: if it refuses or fails.
            ValueError: if the mask is empty.
        """
        fields = {"prompt": prompt, "seed": seed, "image": image_files.encode_images(image), **collect_fields(optional)}
        if mask is not None:
            fields["mask"] = image_files.encode_mask(mask, image)
        return generate_batch(server, "/v1/images/edits", fields)


class DitileImageToVideo:
    """A video that starts from an image, or of a prompt alone."""

    CATEGORY = CATEGORY
    FUNCTION = "generate_video"
    RETURN_TYPES = ("IMAGE", "FLOAT", "STRING", "AUDIO")
    RETURN_NAMES = ("frames", "fps", "info", "audio")
    DESCRIPTION = "Generates a video on a ditile server, from an image if one is connected. Connect it to Create Video."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """Server, prompt, seed, image, length, and what may be left to the model."""
        required = define_required_inputs("what happens")
        fps = {"default": 0.0, "min": 0.0, "max": 240.0, "step": 0.01, "tooltip": f"frames a second; 0: {OWN}"}
        optional = {
            "num_frames": define_count("frames", 10000),
            "fps": ("FLOAT", fps),
            **define_common_inputs(),
            "image": ("IMAGE", {"tooltip": "the first frame, where the model takes one"}),
        }
        return {"required": required, "optional": optional}

    def generate_video(
        self, server: Server, prompt: str, seed: int, image: Any = None, **optional: Any
    ) -> tuple[Any, float, str, Any]:
        """Frames [B, H, W, 3], how many a second, what the server says of them, and their sound, which may be None.

        Raises:
            ServerError: if it refuses or fails.
        """
        video_format = image_files.choose_video_format()
        fields = {"prompt": prompt, "seed": seed, "output_format": video_format, **collect_fields(optional)}
        if image is not None:
            fields["input_reference"] = image_files.encode_images(image)
        show_progress = start_progress(100)
        job, content = Client(server.address, check_interrupt).generate_video(fields, show_progress)
        show_progress(100)
        frames = image_files.decode_video(content, video_format)
        fps = float(job["fps"])
        sound = image_files.decode_sound(content, video_format, len(frames) / fps)
        return frames, fps, describe_answer(job, {"seconds", "num_frames", "fps"}), sound


class DitileStatus:
    """The status of a server."""

    CATEGORY = CATEGORY
    FUNCTION = "read_status"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("status",)
    OUTPUT_NODE = True
    DESCRIPTION = "Health, model, plan, LoRAs and the last measurement of a ditile server."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The server."""
        return {"required": {"server": ("DITILE_SERVER",)}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:  # noqa: N802
        """Always: a status is never old."""
        return float("nan")

    def read_status(self, server: Server) -> dict[str, Any]:
        """Text for the node and its output.

        Raises:
            ServerError: if there is no answer.
        """
        client = Client(server.address, check_interrupt)
        models = client.read_json("/v1/models")["data"]
        status = {
            "health": client.read_json("/health", may_fail=True),
            "models": [model["id"] for model in models],
            "loras": models[0]["loras"],
            "plan": client.read_json("/v1/plan"),
        }
        text = json.dumps(status, indent=2)
        return {"ui": {"text": [text]}, "result": (text,)}


def define_required_inputs(prompt: str, **more: Any) -> dict[str, Any]:
    """The required inputs of a node that generates: a server, a prompt, a seed, and more."""
    return {"server": ("DITILE_SERVER",), "prompt": define_prompt(prompt), "seed": define_seed(), **more}


def collect_fields(optional: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of a node's optional inputs, without those that are left to the model."""
    names = {"steps": "num_inference_steps", "guidance": "guidance_scale"}
    # Values that leave an input to the model; of others 0, and no LoRA.
    defaults = {"negative_prompt": "", "guidance": -1, "strength": -1}
    fields = {}
    for name, value in optional.items():
        if value is not None and value != {} and value != defaults.get(name, 0):
            fields[names.get(name, name)] = value
    return fields


def generate_batch(server: Server, path: str, fields: Mapping[str, Any]) -> tuple[Any, str]:
    """Images of a stream, with previews on the node meanwhile.

    Raises:
        ServerError: if the server refuses or fails.
    """
    show_progress = start_progress(NUM_PREVIEWS + 1)
    events = Client(server.address, check_interrupt).stream_events(path, {**fields, "partial_images": NUM_PREVIEWS})
    # The generator is closed with the node, and with it the connection: then the server ends the work.
    with contextlib.closing(events):
        completed = []
        for event in events:
            content = base64.b64decode(event["b64_json"])
            if event["type"].endswith(".partial_image"):
                show_progress(event["partial_image_index"] + 1, content)
            else:
                completed.append((event, content))
    if not completed:
        raise ServerError("the server ended before the image was done; run it again")
    show_progress(NUM_PREVIEWS + 1)
    return image_files.decode_images([content for _, content in completed]), describe_answer(completed[0][0], set())


def describe_answer(answer: Mapping[str, Any], more: set[str]) -> str:
    """Seed, size, seconds of work and warnings of an answer as JSON; warnings go to ComfyUI's log too."""
    for warning in answer.get("warnings") or []:
        print(f"ditile: {warning}")
    names = {"seed", "size", "inference_time_s", "warnings", *more}
    return json.dumps({name: value for name, value in answer.items() if name in names})


def start_progress(total: int) -> Any:
    """A function that shows what is done of `total`, and a preview as a file, on the node."""
    try:
        from comfy.utils import ProgressBar
    except ImportError:
        return lambda done, preview=None: None
    bar = ProgressBar(total)

    def show_progress(done: int, preview: bytes | None = None) -> None:
        shown = None
        if preview is not None:
            shown = ("JPEG", image_files.open_preview(preview), PREVIEW_PIXELS)
        bar.update_absolute(done, total, shown)

    return show_progress


def limit_seconds(seconds: float) -> Callable[[], None]:
    """A check that raises `ServerError` after some seconds."""
    deadline = time.monotonic() + seconds

    def check_deadline() -> None:
        if time.monotonic() > deadline:
            raise ServerError(f"no answer within {seconds:g} s")

    return check_deadline


def check_interrupt() -> None:
    """Raises ComfyUI's own exception if its user has pressed Cancel."""
    try:
        from comfy.model_management import throw_exception_if_processing_interrupted
    except ImportError:
        return
    throw_exception_if_processing_interrupted()


def _describe_served(client: Client) -> str:
    """Model, its file, plan and cache. Raises `ServerError` if there is no answer."""
    plan = client.read_json("/v1/plan")
    return json.dumps([plan.get(name) for name in ("model", "components", "plan", "cache")])


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "DitileServer": DitileServer,
    "DitileGenerate": DitileGenerate,
    "DitileEdit": DitileEdit,
    "DitileImageToVideo": DitileImageToVideo,
    "DitileLoRA": DitileLoRA,
    "DitileStatus": DitileStatus,
}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "DitileServer": "ditile server",
    "DitileGenerate": "ditile generate",
    "DitileEdit": "ditile edit",
    "DitileImageToVideo": "ditile image to video",
    "DitileLoRA": "ditile LoRA",
    "DitileStatus": "ditile status",
}
