"""Options of commands: the request, the devices, the engine that runs it. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ditile.plan.errors import ModelError
from ditile.plan.flag_parser import format_flag
from ditile.plan.option_classes import (
    CallArguments,
    Count,
    Frames,
    Images,
    Pixels,
    Ranks,
    Scale,
    Seconds,
    Steps,
    define_option,
    drop_missing,
    options,
)
from ditile.runner.model_files import collect_component_files

Dtype = Literal["float32", "bfloat16", "float16"]
# Frames a second. A slower GIF or a faster WebP has no number for how long a frame stays.
LEAST_FPS = 0.01
MOST_FPS = 1000
GIF_MOST_FPS = 100


FrameRate = Annotated[float, Field(ge=LEAST_FPS, le=MOST_FPS)]
Strength = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# In JSON several paths are a list.
Paths = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
# The shell expands ~ only at the start of a word, and not in --model=~/x.
ModelName = Annotated[str, AfterValidator(os.path.expanduser)]
GUIDANCE = "how strongly the prompt guides; as the model has it by default"
TRUE_CFG = "the same by a second, negative branch, for models whose --guidance is embedded, such as FLUX.1-dev"


@options()
class SourceOptions:
    """The model of a command, and files with weights in place of its own."""

    model: ModelName = define_option(
        "shapes-pixart",
        "a bundled or published model, a folder or a hub id",
        metavar="NAME",
        aliases=("--model-path",),
        reads=True,
    )
    transformer: str | None = define_option(None, "short for --component transformer=FILE", reads=True)
    component: Paths | None = define_option(
        None,
        "a .safetensors or .gguf file with the weights of transformer, transformer_2, text_encoder or vae in place of "
        "the model's own; once more for each further one",
        metavar="NAME=FILE",
        reads=lambda text: text.partition("=")[2],
        repeats=True,
    )

    @property
    def components(self) -> dict[str, str]:
        """Return the files with weights of components: component -> file.

        Raises:
            ModelError: if a text has no name or no file, or a component has two files.
        """
        return collect_component_files(self.transformer, self.component or ())


@options()
class ModelOptions(SourceOptions):
    """The model of a command, and the size and steps of its images; None is the model's own value."""

    steps: Steps | None = define_option(None, "denoising steps; the model's own by default")
    height: Pixels | None = define_option(None, "pixels; the model's own size by default")
    width: Pixels | None = define_option(None, "pixels; the model's own size by default")

    def to_generate_options(self, **changes: Any) -> GenerateOptions:
        """Return the options of `ditile generate` that have the values of these options.

        Args:
            changes: fields with other values.

        Raises:
            ModelError: if a value is out of its range.
        """
        names = [field.name for field in dataclasses.fields(GenerateOptions) if hasattr(self, field.name)]
        return GenerateOptions(**{name: getattr(self, name) for name in names} | changes)


@options()
class CallOptions(ModelOptions):
    """The model of a command, and what its calls have besides words; None is the model's own value."""

    guidance: Scale | None = define_option(None, GUIDANCE, example=3.5)
    true_cfg: Scale | None = define_option(None, TRUE_CFG, example=3.5)
    frames: Frames | None = define_option(None, "frames of a video; the model's own by default")
    image: Paths | None = define_option(
        None, "an image to start from; once more for each further one", reads=True, repeats=True
    )


@options()
class PlannedOptions:
    """The plan of a command in one text."""

    plan: str | None = define_option(
        None, 'a whole plan, such as "pipefusion=2 patches=4", or auto; auto is what ditile plan puts first'
    )
    profile: str | None = define_option(
        None,
        "for --plan auto or a bound: a machine that `ditile calibrate` measured; by default this one, if calibrated",
        metavar="FILE",
        reads=True,
    )


@options()
class DeviceOptions:
    """The device of each rank, and the type in which it computes."""

    dtype: Dtype | None = define_option(None, "float32 for bundled models and on CPUs, otherwise bfloat16")
    device: str | None = define_option(None, "each rank's own GPU if there are any, otherwise cpu")
    threads: Ranks | None = define_option(None, "CPU threads of each rank; the cores are divided by default")
    stall_timeout: Seconds = define_option(60.0, "seconds without progress of any rank after which a run is ended")


@options()
class EngineOptions(DeviceOptions):
    """The way ranks compute, besides the plan and the cache."""

    attention: str | None = define_option(
        None,
        "attention kernel: native, flash, sage, ..; by default the model's own",
        metavar="NAME",
        aliases=("--attn",),
    )
    text_after: Literal["keep", "offload", "free"] = define_option(
        "keep", "text encoders when denoising begins: keep them, offload to the CPU, or free"
    )
    compile: bool | Literal["auto"] = define_option(
        False,
        "torch.compile the blocks of the transformer; the first image takes longer; auto: where there is a GPU",
        metavar="auto",
        implied=True,
    )
    cuda_graphs: bool = define_option(
        False,
        "record calls of the model as CUDA graphs, which start at once; not yet run on two GPUs (docs/gpu.md)",
        metavar="true|false",
        implied=True,
    )


@options()
class DecodeOptions(DeviceOptions, SourceOptions):
    """The options of `ditile decode`: a file of latents, and how they are decoded."""

    file: str = define_option(
        "", "latents of ditile generate: --save-latents, or kept after a failed decode", positional=True, reads=True
    )
    out: str | None = define_option(None, "the file to write, as of ditile generate", metavar="FILE")
    # None only here: a file of latents names its model.
    model: ModelName | None = define_option(  # type: ignore[assignment]
        None, "the model whose VAE decodes, where it has moved; by default the latents' own", metavar="NAME", reads=True
    )
    tiling: bool = define_option(False, "decode in overlapping tiles: less memory, and seams are blended")
    slicing: bool = define_option(
        False, "decode one image of a batch at a time: less memory, and equal but for rounding"
    )
    ranks: Ranks = define_option(1, "processes that decode a strip of rows each")
    vae_block_size: Count | None = define_option(None, "rows that a convolution computes at a time: less memory")

    def __post_init__(self) -> None:
        if not self.file:
            raise ModelError("there is nothing to decode; give a FILE of ditile generate --save-latents")


_NEEDS = {
    "strength": ("image", "video"),
    "mask": ("image",),
    "last_image": ("image",),
    "controlnet": ("control_image", "mask"),
}
"""An option of a request -> the options of which at least one must be given too, for the first to have an effect."""


@options()
class GenerateOptions(CallOptions):
    """What to generate. None leaves a value to the model's `generation.json`, or to its pipeline."""

    prompt: str | None = define_option(None, "what to generate", positional=True, aliases=("--prompt",))
    prompts_file: str | None = define_option(
        None, "generate an image for each line of a file; resumes where it stopped", reads=True
    )
    negative_prompt: str | None = define_option(
        None, "what to keep out; FLUX honors it with --true-cfg", metavar="TEXT"
    )
    seed: Seed | None = define_option(
        None, "seed of the first image; random by default, and reported; 0 with --prompts-file"
    )
    num_images: Images = define_option(1, "images, with seeds that count up")
    fps: FrameRate | None = define_option(None, "frames a second of a video; the model's own by default", example=16)
    sound_seconds: Seconds | None = define_option(
        None, "seconds of the sound of a pipeline of sound alone; the class's own by default", example=10
    )
    mask: str | None = define_option(
        None, "where --image is generated again: white, or transparent; of its size", reads=True
    )
    control_image: str | None = define_option(None, "an image for a ControlNet, such as of edges", reads=True)
    controlnet: str | None = define_option(
        None, "the ControlNet: a folder or a hub id, safetensors only", metavar="NAME", reads=True
    )
    video: str | None = define_option(
        None, "a video to start from; with --frames only that many frames of it", reads=True
    )
    last_image: str | None = define_option(None, "the last frame of a video whose first is --image", reads=True)
    strength: Strength | None = define_option(
        None, "how far the result may depart from --image or --video, above 0 and up to 1", example=0.6
    )

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompts_file is not None:
            raise ModelError(f"PROMPT {self.prompt!r} and prompts_file={self.prompts_file!r}: give one of them")
        if self.prompt is not None and not self.prompt.strip():
            raise ModelError("the prompt is empty; say what to generate")
        if self.prompts_file is not None and self.num_images > 1:
            raise ModelError(f"num_images={self.num_images}: a file of prompts makes one for each line; leave it out")
        for name, needed in _NEEDS.items():
            value = getattr(self, name)
            if value is not None and all(getattr(self, other) is None for other in needed):
                raise ModelError(f"{name}={value!r} goes with an image; add {format_flag(needed[0])} FILE")

    @property
    def conditions(self) -> CallArguments:
        """Return the inputs besides words: option -> its file. `image` has a tuple of files."""
        values = {name: getattr(self, name) for name in ("image", "mask", "control_image", "video", "last_image")}
        return drop_missing(values)

    def to_call_arguments(self) -> CallArguments:
        """Return the values under the names of diffusers, without guidance, conditions and the frame rate.

        Classes have several names for the seconds of a sound, so `sound_seconds` keeps its name.
        """
        values = {
            "prompt": self.prompt,
            "num_inference_steps": self.steps,
            "negative_prompt": self.negative_prompt,
            "height": self.height,
            "width": self.width,
            "strength": self.strength,
            "true_cfg_scale": self.true_cfg,
            "num_frames": self.frames,
            "sound_seconds": self.sound_seconds,
        }
        return drop_missing(values)


@options()
class VerifyOptions(PlannedOptions, DeviceOptions, CallOptions):
    """The options of `ditile verify`: a model and a short call of it."""

    # With fewer steps nothing could be stale.
    steps: Annotated[int, Field(ge=3, le=10_000)] = define_option(6, "denoising steps, at least 3", example=6)
    prompt: str = define_option("a red circle on a white background", "what to generate", metavar="TEXT")
    recorded: bool = define_option(
        False,
        "calls with recorded steps (cuda_graphs) against those without, on 2 GPUs or more; each axis, or the plan",
    )


@options()
class ModelsOptions:
    """The options of `ditile models`, which shows models."""

    name: str | None = define_option(
        None,
        "show only what has this in its name, such as qwen; or what is in a file or a folder; everything by default",
        positional=True,
    )
