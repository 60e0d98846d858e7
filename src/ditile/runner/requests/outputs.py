"""Options for where a command runs and what it writes, and the checks of output files before anything runs."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ditile.distributed import files
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import define_option, options
from ditile.runner.requests.options import EngineOptions, GenerateOptions, PlannedOptions
from ditile.runner.requests.pipelines import OutputKind

MAX_OUTPUTS_TRIED = 64
"""The most outputs that are opened before a run; the images of a file of prompts are in one folder."""
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_SUFFIXES = (".mp4", ".webp", ".gif")
SUFFIXES: Mapping[OutputKind, tuple[str, ...]] = {
    "image": PICTURE_SUFFIXES,
    "video": VIDEO_SUFFIXES,
    "sound": (".wav",),
}
"""What a model makes -> the suffixes of its files, beginning with the default file's suffix."""
PLACEHOLDER = re.compile(r"\{\{|\}\}|\{model\}|\{(seed|index)(:0?\d{1,2}d?)?\}")
"""A placeholder in the name of an output file, or two braces for one."""
COCO_PREFIX = "coco:"
"""The prefix of the name of a file of captions that is one of COCO's annotations."""


@options()
class RunOptions(PlannedOptions, EngineOptions):
    """The place to run, and the files to write."""

    out: str | None = define_option(
        None,
        "the file to write: .png, .jpg, .webp, .mp4, .gif, .wav; a video has a poster .png too; in its name {seed}, "
        "{index} and {model} are replaced, and without the first two several files get -0, -1, ..; ditile-image.png, "
        "-video.mp4 or -sound.wav by default",
        metavar="FILE",
    )
    out_dir: str | None = define_option(None, "folder for the images of a file of prompts: 0000.png, ..")
    warm: bool = define_option(
        False, "generate once before, unseen and in few steps: no image pays for what is done once"
    )
    trace: str | None = define_option(None, "write a Chrome trace of every rank", metavar="FILE")
    save_latents: str | None = define_option(
        None, "write the latents before the decode, for ditile decode: .safetensors", metavar="FILE"
    )
    json: str | None = define_option(None, "write the summary as JSON; - is the standard output", metavar="FILE")
    dry_run: bool = define_option(False, "show how the work is divided, without reading weights")

    def __post_init__(self) -> None:
        if self.save_latents is not None and not self.save_latents.endswith(".safetensors"):
            raise ModelError(
                f"save_latents={self.save_latents!r} is a safetensors file; name it {self.save_latents}.safetensors"
            )
        if self.out is None:
            return
        rest = PLACEHOLDER.sub("", self.out)
        if "{" in rest or "}" in rest:
            raise ModelError(
                f"out={self.out!r} has a brace of no placeholder; known are {{seed}}, {{index}}, {{index:04}} and "
                "{model}"
            )

    def name_output(self, request: GenerateOptions, kind: OutputKind) -> RunOptions:
        """Return the options with a name for the file to write, which depends on what the model makes.

        Raises:
            ModelError: if the given file is of another kind.
        """
        if self.out is None:
            # The default name gets a number if an input has that name.
            inputs = {files.identify_file(Path(path)) for _, path in list_named_paths(request)}
            stem = f"ditile-{kind}"
            suffix = SUFFIXES[kind][0]
            number = 1
            while True:
                name = stem if number == 1 else f"{stem}-{number}"
                run = dataclasses.replace(self, out=name + suffix)
                written = set()
                for path in run.list_image_paths(request.num_images, request.seed or 0, request.model):
                    # A video has a poster, which is a .png of the same name.
                    written |= {files.identify_file(path), files.identify_file(path.with_suffix(".png"))}
                if written.isdisjoint(inputs):
                    return run
                number += 1
        # `isdir` is False for a name that no file can have; such a name is refused when it is opened.
        if os.path.isdir(self.out):
            raise ModelError(f"out={self.out!r} is a folder; give a file in it")
        path = Path(self.out)
        if not path.suffix:
            path = Path(self.out + SUFFIXES[kind][0])
        suffixes = SUFFIXES[kind]
        if path.suffix.lower() not in suffixes:
            others = ", ".join(suffix for suffix in suffixes[:-1] if suffix != ".jpeg")
            shown = f"{others} or {suffixes[-1]}".removeprefix(" or ")
            raise ModelError(f"out={self.out!r}: this model makes {kind}s; name it {path.stem}{shown}")
        return dataclasses.replace(self, out=str(path))

    def list_image_paths(self, count: int, seed: int, model: str) -> list[Path]:
        """List the paths of `count` images or videos. The first has this seed."""
        if count == 1:
            return [self._fill_placeholders(0, seed, model)]
        return [self.build_image_path(k, seed + k, model) for k in range(count)]

    def build_image_path(self, index: int, seed: int, model: str, *, digits: int = 1) -> Path:
        """Build the path of one image or video of several. Its number has at least `digits` digits."""
        path = self._fill_placeholders(index, seed, model)
        number = f"{index:0{digits}}"
        if self.out_dir is not None:
            return Path(self.out_dir, f"{number}{path.suffix}")
        if any(match[1] for match in PLACEHOLDER.finditer(self.out or "")):
            return path
        return path.with_stem(f"{path.stem}-{number}")

    def _fill_placeholders(self, index: int, seed: int, model: str) -> Path:
        assert self.out is not None, "name_output comes first"
        return Path(self.out.format(index=index, seed=seed, model=Path(model).name))

    def check_output_paths(self, paths: Sequence[Path], *others: Any, video: bool) -> None:
        """Raise `ModelError` unless these images and all other output files can be written, each to its own file.

        Args:
            paths: the paths of the images, or of the videos, which have posters.
            others: the other options of the command, for the files that they name.
        """
        written = []
        if self.trace is not None:
            written.append(("trace", Path(self.trace)))
        if self.save_latents is not None:
            written.append(("save_latents", Path(self.save_latents)))
        if self.json not in (None, "-"):
            written.append(("json", Path(self.json or "")))
        if self.out_dir is None:
            written += [("out", path) for path in paths]
            if video:
                written += [("out", path.with_suffix(".png")) for path in paths]
            check_writable("out", paths[0])
        # os.path.exists is False without permission, where the method of Path raises.
        elif not os.path.exists(self.out_dir):
            written.append(("out_dir", Path(self.out_dir)))
        elif not os.path.isdir(self.out_dir):
            raise ModelError(f"out_dir={self.out_dir!r} is a file; give a folder")
        else:
            written += [("out_dir", path) for path in paths]
        check_output_files(written, *others)


def check_output_files(written: Sequence[tuple[str, Path]], *options: Any) -> None:
    """Raise `ModelError` unless each output of a command can be written, and is neither another one nor an input.

    Args:
        written: (option, path) of each output.
        options: the options of the command, with the files that it reads.
    """
    files.check_different_files(list_input_files(*options), written)
    for name, path in written[:MAX_OUTPUTS_TRIED]:
        check_writable(name, path)


def list_input_files(*options: Any) -> Iterator[tuple[str, Path]]:
    """Yield (option, path) of the files that options name. A folder, such as a model's, yields the files that belong to
    it."""
    for part in options:
        for name, value in list_named_paths(part):
            path = Path(value.removeprefix(COCO_PREFIX))
            yield name, path
            # Unlike the method of Path, this is False for a name that is too long.
            if not os.path.isdir(path):
                continue
            own_files = (path / "model_index.json", path / "generation.json")
            for file in (*own_files, *path.glob("*"), *path.glob("*/*")):
                if file.is_file():
                    yield name, file


def list_named_paths(options: Any) -> Iterator[tuple[str, str]]:
    """Yield (option, text) of the files and folders that options name to be read."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        reads = field.metadata.get("reads")
        if value is None or not reads:
            continue
        paths = value if isinstance(value, tuple) else [value]
        for path in paths:
            # Some texts say more than the path, which a function takes out of them.
            text = reads(path) if callable(reads) else str(path)
            yield field.name, text


def check_writable(name: str, path: Path) -> None:
    """Raise `ModelError` unless a file can be written."""
    if "\0" in str(path):
        raise ModelError(f"{name}={str(path)!r} is not a file name: it has a NUL")
    try:
        if path.is_dir():
            raise ModelError(f"{name}={str(path)!r} is a folder; give a file in it")
        if not path.parent.is_dir():
            raise ModelError(f"{name}={str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
        if path.exists():
            with path.open("ab"):
                return
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                return
    except OSError as error:
        raise ModelError(f"{name}={str(path)!r} cannot be written: {error.strerror}") from error
