"""The options of the commands, checked when they are made. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import os
import re
import string
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditile.distributed import env, files
from ditile.plan.checks import check_counts
from ditile.plan.errors import ModelError
from ditile.plan.flags import define_option
from ditile.runner.model_files import DTYPES
from ditile.runner.requests.options import (
    GUIDANCE,
    TRUE_CFG,
    DeviceOptions,
    Dtype,
    EngineOptions,
    GenerateOptions,
    ModelOptions,
    check_guidance,
)

MAX_OUTPUTS_TRIED = 64
"""Outputs that are opened before a run; pictures of a file of prompts are in one folder."""
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_SUFFIXES = (".mp4", ".webp", ".gif")
PLACEHOLDERS = ("seed", "index", "model")
"""Of the name of an output file."""
NUMBER_FORMAT = re.compile(r"0?\d{0,2}d?")
"""How a placeholder of a number may be written, such as 04."""
COCO_PREFIX = "coco:"
"""Before the name of a file of captions that is one of COCO's annotations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(EngineOptions):
    """Where to run, and what to write.

    Raises:
        ModelError: if a value is out of its range.
    """

    plan: str | None = define_option(
        None, 'all of a plan, such as "pipefusion=2 patches=4", or auto: what ditile plan puts first', metavar="PLAN"
    )
    out: str | None = define_option(
        None,
        "the file to write: .png, .jpg or .webp, of a video .mp4, .webp or .gif; in its name {seed}, {index} and "
        "{model} are replaced, and without the first two several files get -0, -1, ..; beside a video is a poster "
        ".png; ditile-image.png or ditile-video.mp4 by default",
        metavar="FILE",
    )
    out_dir: str | None = define_option(
        None, "folder for the pictures of a file of prompts: 0000.png, ..", metavar="DIR"
    )
    warm: bool = define_option(
        False, "draw once before, unseen and in few steps: no picture pays for what is made once"
    )
    trace: str | None = define_option(None, "write a Chrome trace of every rank", metavar="FILE")
    json: str | None = define_option(None, "write the summary as JSON; - is the standard output", metavar="FILE")
    dry_run: bool = define_option(False, "show how the work would be divided, without reading weights")

    def __post_init__(self) -> None:
        self.check_device_options()
        if self.out is None:
            return
        check_placeholders(self.out)
        if Path(self.out).suffix.lower() not in ("", *PICTURE_SUFFIXES, *VIDEO_SUFFIXES):
            stem = Path(self.out).stem
            raise ModelError(
                f"out={self.out!r}: its ending is no format; name a picture {stem}.png, .jpg or .webp, and a video "
                f"{stem}.mp4, .webp or .gif"
            )

    def name_output(self, wanted: GenerateOptions, *, video: bool) -> RunOptions:
        """The options with a file to write, of a picture or of a video.

        Without a given one, it is none of those that the call starts from.

        Raises:
            ModelError: if the file that is given is of the other kind.
        """
        if self.out is None:
            return self._choose_output(wanted, video=video)
        out = Path(self.out)
        if os.path.isdir(out):  # False for what is no name at all, which is told later
            raise ModelError(f"out={self.out!r} is a folder; give a file in it")
        path = out if out.suffix else Path(f"{out}.{'mp4' if video else 'png'}")
        suffix = path.suffix.lower()
        if video and suffix not in VIDEO_SUFFIXES:
            raise ModelError(f"out={self.out!r}: this model draws videos; name it {path.stem}.mp4, .webp or .gif")
        if not video and suffix not in PICTURE_SUFFIXES:
            raise ModelError(f"out={self.out!r}: this model draws pictures; name it {path.stem}.png, .jpg or .webp")
        return dataclasses.replace(self, out=str(path))

    def _choose_output(self, wanted: GenerateOptions, *, video: bool) -> RunOptions:
        """The options with the default file, numbered where that is one of the inputs."""
        inputs = {files.identify_file(Path(path)) for _, path in list_named_paths(wanted)}
        stem = "ditile-video" if video else "ditile-image"
        suffix = ".mp4" if video else ".png"
        number = 1
        while True:
            name = stem if number == 1 else f"{stem}-{number}"
            run = dataclasses.replace(self, out=name + suffix)
            paths = run.list_image_paths(wanted.num_images, wanted.seed or 0, wanted.model)
            written = {files.identify_file(each) for path in paths for each in (path, path.with_suffix(".png"))}
            if not written & inputs:
                return run
            number += 1

    def list_image_paths(self, count: int, seed: int, model: str) -> list[Path]:
        """The paths of `count` pictures or videos, of which the first has this seed."""
        if count == 1:
            return [self._fill_placeholders(0, seed, model)]
        return [self.build_image_path(k, seed + k, model) for k in range(count)]

    def build_image_path(self, index: int, seed: int, model: str, *, digits: int = 1) -> Path:
        """The path of one picture or video of several; `digits` are those of its number at least."""
        path = self._fill_placeholders(index, seed, model)
        number = f"{index:0{digits}}"
        if self.out_dir is not None:
            return Path(self.out_dir, f"{number}{path.suffix}")
        tells_apart = {"seed", "index"} & set(list_placeholders(self.out or ""))
        return path if tells_apart else path.with_stem(f"{path.stem}-{number}")

    def _fill_placeholders(self, index: int, seed: int, model: str) -> Path:
        assert self.out is not None, "name_output comes first"
        return Path(self.out.format(index=index, seed=seed, model=Path(model).name))

    def check_output_paths(self, paths: Sequence[Path], *others: Any, video: bool) -> None:
        """Raises `ModelError` unless these pictures and all other output files can be written, each to its own file.

        Args:
            paths: of the pictures, or of the videos, beside which there are posters.
            others: the other options of the command, for the files that they name.
            video: whether they are videos.
        """
        named = [("trace", self.trace), ("json", self.json if self.json != "-" else None)]
        written = [(name, Path(value)) for name, value in named if value is not None]
        folder = None if self.out_dir is None else Path(self.out_dir)
        if folder is None:
            for path in paths:
                written += [("out", path), *([("out", path.with_suffix(".png"))] if video else [])]
            check_writable("out", paths[0])
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
    image: tuple[str, ...] | None = define_option(
        None, "a picture to start from; once more for each further one", metavar="FILE", reads=True, repeats=True
    )
    frames: int | None = define_option(None, "frames of a video; the model's own by default", metavar="N")
    plan: str | None = define_option(None, 'all of a plan, such as "pipefusion=2 patches=4"', metavar="PLAN")

    def __post_init__(self) -> None:
        self.check_model_options()
        self.check_device_options()
        check_counts(self, "frames")
        check_guidance(self)
        if self.steps < 3:
            raise ModelError(f"steps={self.steps} leave nothing to be stale; try steps=6")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsOptions:
    """What `ditile models` shows."""

    name: str | None = define_option(
        None, "show only what has this in its name, such as qwen; everything by default", positional=True
    )
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
        path = env.find_profile_path() if self.out is None else Path(self.out)
        if self.out is None:
            # The user's cache folder may not be there yet.
            path.parent.mkdir(parents=True, exist_ok=True)
        check_output_files([("out", path)], self)


def list_placeholders(name: str) -> list[str]:
    """The placeholders of the name of an output file."""
    return [field for _, field, _, _ in string.Formatter().parse(name) if field is not None]


def check_placeholders(name: str) -> None:
    """Raises `ModelError` unless all braces of the name of an output file are placeholders that there are."""
    known = "there are {seed}, {index} and {model}; write {{ for a brace"
    try:
        parts = list(string.Formatter().parse(name))
    except ValueError as error:
        raise ModelError(f"out={name!r}: {error}; {known}") from None
    for _, field, form, conversion in parts:
        if field is None:
            continue
        if field not in PLACEHOLDERS or conversion is not None:
            raise ModelError(f"out={name!r}: {{{field}}} is no placeholder; {known}")
        if form and (field == "model" or NUMBER_FORMAT.fullmatch(form) is None):
            raise ModelError(f"out={name!r}: {{{field}:{form}}} is no form of a number; try {{index:04}}")


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
        for name, value in list_named_paths(each):
            path = Path(value.removeprefix(COCO_PREFIX))
            yield name, path
            if os.path.isdir(path):  # unlike the method it is False for a name that is too long
                own = (path / "model_index.json", path / "generation.json", *path.glob("*"), *path.glob("*/*"))
                yield from ((name, file) for file in own if file.is_file())


def list_named_paths(options: Any) -> Iterator[tuple[str, str]]:
    """(option, text) of the files and folders that options name to be read."""
    for field in dataclasses.fields(options):
        if field.metadata.get("reads") and (value := getattr(options, field.name)) is not None:
            yield from ((field.name, str(each)) for each in (value if isinstance(value, tuple) else (value,)))


def check_writable(name: str, path: Path) -> None:
    """Raises `ModelError` unless a file can be written."""
    if "\0" in str(path):
        raise ModelError(f"{name}={str(path)!r} is no name of a file: it has a NUL")
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
    except OSError as error:
        raise ModelError(f"{name}={str(path)!r} cannot be written: {error.strerror}") from error
