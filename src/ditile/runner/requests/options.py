"""The options of a request, and of the engine that draws it, checked when they are made. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ditile.plan.checks import check_counts, check_finite_number, check_positive_number
from ditile.plan.errors import ModelError
from ditile.plan.flags import define_option
from ditile.plan.plan import TEXT_AFTER
from ditile.runner.model_files import DTYPES

Dtype = Literal["float32", "bfloat16", "float16"]
LEAST_FPS, MOST_FPS = 0.01, 1000
"""Frames a second. Below, a GIF has no number for how long a frame stays; above, a WebP has none."""
GIF_MOST_FPS = 100
GUIDANCE = "how strongly the prompt guides; as the model has it by default"
TRUE_CFG = "the same with a second branch, for models whose --guidance is embedded, such as FLUX.1-dev"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a command, and the size and steps of its pictures; None is the model's own value."""

    # Empty, so that a class with slots of its own can inherit from several of these classes.
    __slots__ = ()

    model: str = define_option("shapes-pixart", "a bundled model, a folder or a hub id", metavar="NAME", reads=True)
    steps: int | None = define_option(None, "denoising steps; the model's own by default", metavar="N")
    height: int | None = define_option(None, "pixels; the model's own size by default", metavar="N")
    width: int | None = define_option(None, "pixels; the model's own size by default", metavar="N")

    def check_model_options(self) -> None:
        """Raises `ModelError` if a value is out of its range."""
        check_counts(self, "steps", "height", "width")

    def to_generate_options(self, **changes: Any) -> GenerateOptions:
        """The options of `ditile generate` with the same values, as far as it has the fields.

        Args:
            changes: fields with other values.

        Raises:
            ModelError: if a value is out of its range.
        """
        names = [field.name for field in dataclasses.fields(GenerateOptions) if hasattr(self, field.name)]
        return GenerateOptions(**{name: getattr(self, name) for name in names} | changes)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device of each rank, and the type in which it computes."""

    __slots__ = ()

    dtype: Dtype | None = define_option(None, "float32 for bundled models and on CPUs, else bfloat16", choices=DTYPES)
    device: str | None = define_option(None, "each rank's own GPU where there are some, else cpu", metavar="DEVICE")
    threads: int | None = define_option(
        None, "CPU threads of each rank; the cores are shared out by default", metavar="N"
    )
    stall_timeout: float = define_option(
        60.0, "seconds after which a run is ended in which no rank reads, computes or makes progress", metavar="S"
    )

    def check_device_options(self) -> None:
        """Raises `ModelError` if a value is out of its range."""
        check_counts(self, "threads")
        check_positive_number(self.stall_timeout, "stall_timeout", "time", example=60)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(DeviceOptions):
    """How ranks compute, besides the plan and the cache."""

    __slots__ = ()

    attention: str | None = define_option(
        None, "attention kernel: native, flash, sage, ..; by default the model's own", metavar="NAME"
    )
    text_after: Literal["keep", "offload", "free"] = define_option(
        "keep", "text encoders when denoising begins: keep them, offload to the CPU, or free", choices=TEXT_AFTER
    )
    compile: bool | Literal["auto"] = define_option(
        False,
        "torch.compile the blocks of the transformer; the first picture takes longer; auto: where there is a GPU",
        metavar="auto",
        implied=True,
    )
    cuda_graphs: bool = define_option(
        False, "record the blocks of each patch as CUDA graphs, which start at once; for patches of few tokens"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(ModelOptions):
    """What to draw. None leaves a value to the model's `generation.json`, or else to its pipeline.

    Raises:
        ModelError: if a value is out of its range.
    """

    prompt: str | None = define_option(None, "what to draw", positional=True)
    prompts_file: str | None = define_option(
        None, "draw a picture for each line of a file; resumes where it stopped", metavar="FILE", reads=True
    )
    guidance: float | None = define_option(None, GUIDANCE, metavar="X")
    true_cfg: float | None = define_option(None, TRUE_CFG, metavar="X")
    negative_prompt: str | None = define_option(None, "what to keep out; FLUX heeds it with --true-cfg", metavar="TEXT")
    seed: int | None = define_option(
        None, "seed of the first image; random by default, and reported; 0 with --prompts-file", metavar="N"
    )
    num_images: int = define_option(1, "images, with seeds that count up", metavar="N")
    frames: int | None = define_option(None, "frames of a video; the model's own by default", metavar="N")
    fps: float | None = define_option(None, "frames a second of a video; the model's own by default", metavar="X")
    image: tuple[str, ...] | None = define_option(
        None, "a picture to start from; once more for each further reference", metavar="FILE", reads=True, repeats=True
    )
    mask: str | None = define_option(
        None, "where --image is drawn anew: white, or transparent; of its size", metavar="FILE", reads=True
    )
    control_image: str | None = define_option(
        None, "a picture for a ControlNet, such as of edges", metavar="FILE", reads=True
    )
    controlnet: str | None = define_option(
        None, "the ControlNet: a folder or a hub id, safetensors only", metavar="NAME", reads=True
    )
    video: str | None = define_option(
        None, "a video to start from; with --frames only so many frames of it", metavar="FILE", reads=True
    )
    last_image: str | None = define_option(
        None, "the last frame of a video whose first is --image", metavar="FILE", reads=True
    )
    strength: float | None = define_option(
        None, "how far to leave --image or --video behind, above 0 and up to 1", metavar="X"
    )

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompts_file is not None:
            raise ModelError(f"PROMPT {self.prompt!r} and prompts_file={self.prompts_file!r}: give one of them")
        if self.prompt is not None and not self.prompt.strip():
            raise ModelError("the prompt is empty; say what to draw")
        if self.prompts_file is not None and self.num_images > 1:
            raise ModelError(f"num_images={self.num_images}: a file of prompts makes one for each line; leave it out")
        self.check_model_options()
        check_counts(self, "num_images", "frames")
        if self.fps is not None:
            check_positive_number(self.fps, "fps", "rate", example=16)
            if not LEAST_FPS <= self.fps <= MOST_FPS:
                raise ModelError(f"fps={self.fps:g} is not between {LEAST_FPS:g} and {MOST_FPS:g}; try fps=16")
        check_guidance(self)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ModelError(f"seed={self.seed} is out of range; try seed=0")
        self._check_conditions()
        if self.strength is not None and not 0 < self.strength <= 1:
            raise ModelError(f"strength={self.strength} is not above 0 and up to 1; try strength=0.6")

    def _check_conditions(self) -> None:
        if self.strength is not None and self.image is None and self.video is None:
            raise ModelError(f"strength={self.strength} needs a picture to start from; add --image FILE")
        for name in ("mask", "last_image"):
            if getattr(self, name) is not None and self.image is None:
                raise ModelError(f"{name}={getattr(self, name)!r} goes with a picture; add --image FILE")
        if self.controlnet is not None and self.control_image is None and self.mask is None:
            raise ModelError(f"controlnet={self.controlnet!r} is shown nothing; add --control-image FILE")

    @property
    def conditions(self) -> dict[str, Any]:
        """What it starts from besides words: option -> its file, of `image` all files."""
        names = ("image", "mask", "control_image", "video", "last_image")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to_call_arguments(self) -> dict[str, Any]:
        """The given values under the names that diffusers uses, without guidance, conditions and the rate."""
        values = {
            "prompt": self.prompt,
            "num_inference_steps": self.steps,
            "negative_prompt": self.negative_prompt,
            "height": self.height,
            "width": self.width,
            "strength": self.strength,
            "true_cfg_scale": self.true_cfg,
            "num_frames": self.frames,
        }
        return {name: value for name, value in values.items() if value is not None}


def check_guidance(options: Any) -> None:
    """Raises `ModelError` unless the scales of guidance of options are None or finite numbers."""
    for name in ("guidance", "true_cfg"):
        check_finite_number(getattr(options, name), name, example=3.5, optional=True)
