"""The options of the commands, checked when they are made. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ditile.distributed import files
from ditile.errors import ModelError
from ditile.plan.checks import check_counts, check_finite_number, check_positive_number
from ditile.plan.flags import define_option
from ditile.plan.plan import TEXT_AFTER
from ditile.runner.load import DTYPES, HUB_ID

Dtype = Literal["float32", "bfloat16", "float16"]
MAX_OUTPUTS_TRIED = 64
"""Outputs that are opened before a run; pictures of a file of prompts are in one folder."""
VIDEO_SUFFIXES = (".mp4", ".webp", ".gif")
LEAST_FPS, MOST_FPS = 0.01, 1000
"""Frames a second. Below, a GIF has no number for how long a frame stays; above, a WebP has none."""
COCO_PREFIX = "coco:"
"""Before the name of a file of captions that is one of COCO's annotations."""
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
    image: str | None = define_option(None, "a picture to start from", metavar="FILE", reads=True)
    strength: float | None = define_option(None, "how far to leave --image behind, above 0 and up to 1", metavar="X")

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
        _check_guidance(self)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ModelError(f"seed={self.seed} is out of range; try seed=0")
        if self.strength is not None and self.image is None:
            raise ModelError(f"strength={self.strength} needs a picture to start from; add --image FILE")
        if self.strength is not None and not 0 < self.strength <= 1:
            raise ModelError(f"strength={self.strength} is not above 0 and up to 1; try strength=0.6")

    def to_call_arguments(self) -> dict[str, Any]:
        """The given values under the names that diffusers uses, without guidance, the picture and the rate."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(DeviceOptions):
    """Where to run, and what to write.

    Raises:
        ModelError: if a value is out of its range.
    """

    plan: str | None = define_option(
        None, 'all of a plan, such as "pipefusion=2 patches=4", or auto: what ditile plan puts first', metavar="PLAN"
    )
    out: str | None = define_option(
        None,
        "the PNG to write, of a video the .mp4, .webp or .gif, which gets a poster .png beside it; several get -0, "
        "-1, .. in their names; ditile-image.png or ditile-video.mp4 by default",
        metavar="FILE",
    )
    out_dir: str | None = define_option(
        None, "folder for the pictures of a file of prompts: 0000.png, ..", metavar="DIR"
    )
    attention: str | None = define_option(
        None, "attention kernel: native, flash, sage, ..; by default the model's own", metavar="NAME"
    )
    text_after: Literal["keep", "offload", "free"] = define_option(
        "keep", "text encoders when denoising begins: keep them, offload to the CPU, or free", choices=TEXT_AFTER
    )
    compile: bool = define_option(False, "torch.compile the blocks of the transformer; the first picture takes longer")
    cuda_graphs: bool = define_option(
        False, "record the blocks of each patch as CUDA graphs, which start at once; for patches of few tokens"
    )
    trace: str | None = define_option(None, "write a Chrome trace of every rank", metavar="FILE")
    json: str | None = define_option(None, "write the summary as JSON; - is the standard output", metavar="FILE")
    dry_run: bool = define_option(False, "show how the work would be divided, without reading weights")

    def __post_init__(self) -> None:
        self.check_device_options()
        if self.out is not None and Path(self.out).suffix.lower() not in ("", ".png", *VIDEO_SUFFIXES):
            stem = Path(self.out).stem
            raise ModelError(
                f"out={self.out!r}: pictures are written as PNG; name it {stem}.png; videos {stem}.mp4, .webp or .gif"
            )

    def name_output(self, *, video: bool) -> RunOptions:
        """The options with a file to write, of a picture or of a video.

        Raises:
            ModelError: if the file that is given is of the other kind.
        """
        out = Path(self.out or ("ditile-video" if video else "ditile-image"))
        if os.path.isdir(out):  # False for what is no name at all, which is told later
            raise ModelError(f"out={self.out!r} is a folder; give a file in it")
        path = out if out.suffix else Path(f"{out}.{'mp4' if video else 'png'}")
        if video and path.suffix.lower() not in VIDEO_SUFFIXES:
            raise ModelError(f"out={self.out!r}: this model draws videos; name it {path.stem}.mp4, .webp or .gif")
        if not video and path.suffix.lower() != ".png":
            raise ModelError(f"out={self.out!r}: pictures are written as PNG; name it {path.stem}.png")
        return dataclasses.replace(self, out=str(path))

    def list_image_paths(self, count: int) -> list[Path]:
        """The paths of `count` pictures or videos."""
        return [self._output_path] if count == 1 else [self.build_image_path(str(k)) for k in range(count)]

    def build_image_path(self, number: str) -> Path:
        """The path of one picture or video of several."""
        if self.out_dir is not None:
            return Path(self.out_dir, f"{number}{self._output_path.suffix}")
        return self._output_path.with_stem(f"{self._output_path.stem}-{number}")

    @property
    def _output_path(self) -> Path:
        assert self.out is not None, "name_output comes first"
        return Path(self.out)

    def check_output_paths(self, paths: Sequence[Path], *others: Any) -> None:
        """Raises `ModelError` unless these pictures and all other output files can be written, each to its own file.

        Args:
            paths: of the pictures, or of the videos, beside which there are posters.
            others: the other options of the command, for the files that they name.
        """
        named = [("trace", self.trace), ("json", self.json if self.json != "-" else None)]
        written = [(name, Path(value)) for name, value in named if value is not None]
        folder = None if self.out_dir is None else Path(self.out_dir)
        if folder is None:
            written += [("out", each) for path in paths for each in dict.fromkeys((path, path.with_suffix(".png")))]
            check_writable("out", self._output_path)
        elif os.path.exists(folder) and not folder.is_dir():  # os.path.exists is False without permission
            raise ModelError(f"out_dir={self.out_dir!r} is a file; give a folder")
        elif not os.path.exists(folder):
            written += [("out_dir", folder)]
        else:
            written += [("out_dir", path) for path in paths]
        check_output_files(written, *others)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions(DeviceOptions, ModelOptions):
    """The options of `ditile verify`: a model and a short call of it.

    Raises:
        ModelError: if a value is out of its range.
    """

    steps: int = define_option(6, "denoising steps, at least 3", metavar="N")
    guidance: float | None = define_option(None, GUIDANCE, metavar="X")
    true_cfg: float | None = define_option(None, TRUE_CFG, metavar="X")
    prompt: str = define_option("a red circle on a white background", "what to draw", metavar="TEXT")

    def __post_init__(self) -> None:
        self.check_model_options()
        self.check_device_options()
        _check_guidance(self)
        if self.steps < 3:
            raise ModelError(f"steps={self.steps} leave nothing to be stale; try steps=6")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsOptions:
    """What `ditile models` shows."""

    markdown: bool = define_option(False, "the matrix of families and methods as Markdown")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """What `ditile calibrate` measures.

    Raises:
        ModelError: if a value is out of its range.
    """

    out: str | None = define_option(
        None, "where to keep it; where `ditile plan` looks for it by default", metavar="FILE"
    )
    name: str | None = define_option(None, "of the machine; its device's by default", metavar="NAME")
    ranks: int | None = define_option(None, "ranks that compute at once: its GPUs, or else its cores", metavar="N")
    threads: int = define_option(1, "CPU threads of each rank", metavar="N")
    dtype: Dtype | None = define_option(None, "float32 on CPUs, else bfloat16", choices=DTYPES)

    def __post_init__(self) -> None:
        check_counts(self, "ranks", "threads")

    def check_profile_path(self) -> None:
        """Raises `ModelError` unless the profile can be written."""
        if self.out is not None:
            check_output_files([("out", Path(self.out))], self)


def check_output_files(written: Sequence[tuple[str, Path]], *options: Any) -> None:
    """Raises `ModelError` unless each output of a command can be written, and is neither another one nor an input.

    Args:
        written: (option, path) of each output.
        options: the options of the command, with the files that it reads.
    """
    files.check_different_files(list_input_files(*options), written)
    for name, path in written[:MAX_OUTPUTS_TRIED]:
        check_writable(name, path)


def list_input_files(*options: Any) -> Iterator[tuple[str, Path]]:
    """(option, path) of the files that options name; of a folder, such as a model's, those that belong to it."""
    for each in options:
        for field in dataclasses.fields(each):
            value = getattr(each, field.name) if field.metadata.get("reads") else None
            if value is not None:
                path = Path(str(value).removeprefix(COCO_PREFIX))
                yield field.name, path
                if path.is_dir():
                    own = (path / "model_index.json", path / "generation.json", *path.glob("*/*"))
                    yield from ((field.name, file) for file in own if file.is_file())


def check_lora_source(source: str) -> None:
    """Raises `ModelError` unless `source` exists, or has the form of a hub id."""
    if not Path(source).exists() and not HUB_ID.fullmatch(source):
        raise ModelError(f"lora={source!r} is no file; give one, a folder or a hub id (owner/name)")


def check_writable(name: str, path: Path) -> None:
    """Raises `ModelError` unless a file can be written."""
    try:
        if path.is_dir():
            raise ModelError(f"{name}={str(path)!r} is a folder; give a file in it")
        if not path.parent.is_dir():
            raise ModelError(f"{name}={str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
        if path.is_fifo():  # it blocks where it is opened and nobody reads yet
            if not os.access(path, os.W_OK):
                raise ModelError(f"{name}={str(path)!r} cannot be written")
        elif path.exists():
            with path.open("ab"):
                return
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                return
    except ModelError:
        raise
    except ValueError as error:  # a name with a NUL
        raise ModelError(f"{name}={str(path)!r} is no name of a file: {error}") from error
    except OSError as error:
        raise ModelError(f"{name}={str(path)!r} cannot be written: {error.strerror}") from error


def _check_guidance(options: GenerateOptions | VerifyOptions) -> None:
    """Raises `ModelError` unless the scales of guidance are None or finite numbers."""
    for name in ("guidance", "true_cfg"):
        check_finite_number(getattr(options, name), name, example=3.5, optional=True)
