"""Files of latents: what the VAEs of a call are given, in one safetensors file.

The file holds the tensors, and its metadata holds everything else as JSON. `ditile generate` writes a file before the
decode on request, and after a decode that failed; `ditile decode` reads it. Latents are kept for the classes in
assets/decodes.json: one call of each VAE and diffusers' usual postprocessing make all that a call of these returns.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ditile.distributed import files
from ditile.model.fingerprint import fingerprint
from ditile.model.known import ASSETS
from ditile.model.pipeline_calls import list_call_parameters
from ditile.plan.errors import LoadError, ModelError, add_note
from ditile.plan.option_classes import CallArguments, JsonObject, Pixels
from ditile.runner.model_files import open_safetensors
from ditile.runner.requests.options import FrameRate
from ditile.runner.requests.pipelines import OutputKind
from ditile.runner.requests.results import add_picture_texts, list_outputs, write_drawn
from ditile.runner.runner import DecodeError

METADATA = "ditile_latents"
"""The name of the metadata that holds the JSON."""
LATENTS = "vae.z"
"""The tensor with the latents of images and videos; each tensor is named by component and argument of its `decode`."""
Part = Literal["vae", "audio_vae", "vocoder"]
"""The components that decode."""


class LatentsFacts(BaseModel):
    """The metadata of a file of latents: what the call makes, and what its decode needs besides tensors.

    Attributes:
        model, components, dtype: what the decode loads.
        parts: each component that decodes -> its config from `describe_config`; empty if latents are not kept.
        kind, fps: what the call makes.
        frames: the frames of each video, for the progress; 0 if they are not known.
        size: the result of `find_cut_size`.
        pictures: the prompt and the seed of each image or video.
        settings, texts: the results of `describe_settings` and `build_png_texts`, for the texts of the output files.
    """

    model_config = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")

    model: str
    components: dict[str, str]
    dtype: str
    parts: dict[Part, str]
    kind: OutputKind
    fps: FrameRate
    frames: int
    size: list[Pixels | None]
    pictures: list[tuple[str | None, int]] = Field(min_length=1)
    settings: JsonObject
    texts: dict[str, str]

    def write_outputs(self, pipe: Any, result: Any, paths: Sequence[str]) -> None:
        """Write what a call has made. Only rank 0 has a result."""
        # A call may return more than is written.
        outputs = list_outputs(pipe, result)
        for (drawn, sound), path, (prompt, seed) in zip(outputs, paths, self.pictures, strict=False):
            texts = add_picture_texts(self.texts, self.settings, prompt, seed, drawn)
            write_drawn(drawn, path, self.fps, texts, sound)


def explain_unkept(pipe: Any, call: CallArguments) -> str | None:
    """Return why the latents of a call are not kept; None if they are."""
    name = type(pipe).__name__
    proven = json.loads((ASSETS / "decodes.json").read_text("utf-8"))
    vae = getattr(pipe, "vae", None)
    if name not in proven or vae is None or np.any(vae.config.get("decoder_inject_noise", False)):
        return f"latents of {name} are not kept, as its decode is more than one call of a VAE, or draws noise"
    if None in find_cut_size(pipe, call):
        return f"{name} cuts what it decodes to the size of the call; give --height and --width"
    return None


def find_cut_size(pipe: Any, call: CallArguments) -> list[int | None]:
    """Find the width and height to which a call cuts what it decodes; an empty list if it cuts nothing."""
    name = "use_resolution_binning"
    # In classes with this argument it is on by default.
    if not call.get(name, name in list_call_parameters(pipe)):
        return []
    return [call.get("width"), call.get("height")]


def describe_config(part: Any) -> str:
    """Describe a model's class and config in short, without the names of files."""
    own = {name: value for name, value in getattr(part, "config", {}).items() if not name.startswith("_")}
    return str(fingerprint([type(part).__name__, own], "numbers"))


class LatentsKeeper:
    """Keeps the inputs of a call's VAEs until the decoded result is written.

    Args:
        facts: the facts of the call.
        out: the first file that the call makes.
        path: the file of latents to write in any case; None to write one only after a failure.
    """

    def __init__(self, facts: LatentsFacts, out: Path, path: str | None) -> None:
        self.facts = facts
        self._out = out
        self._path = path
        self._tensors: dict[str, Tensor] = {}
        self._failure: Exception | None = None
        self._refusal = ""

    def decode(self, part: str, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep a copy of the arguments of a part's first decode, write it on request, and decode."""
        if part in self.facts.parts and f"{part}.z" not in self._tensors:
            # Nothing else that the classes in decodes.json pass matters: AutoencoderKL does not use its generator.
            for name, value in inspect.signature(decode).bind(*args, **kwargs).arguments.items():
                if isinstance(value, Tensor):
                    # The decode may change its argument in place.
                    self._tensors[f"{part}.{name}"] = value.to("cpu", copy=True).contiguous()
            if self._path is not None:
                self._write_file(self._path)
        if self._failure is not None:
            raise self._failure
        try:
            return decode(*args, **kwargs)
        except RuntimeError as error:
            if part != "vae" or "audio_vae" not in self.facts.parts:
                raise
            # The error is raised when the sound is decoded, so that its latents are kept too.
            self._failure = error
            return (torch.zeros(1, 3, 1, 1, 1),)

    @contextlib.contextmanager
    def keep_on_failure(self) -> Iterator[None]:
        """Write the latents if what follows the last step fails, and name their file in the error.

        Raises:
            ModelError: at the end, if they were to be written and could not be.
        """
        try:
            yield
        except Exception as error:
            # Ranks that do not decode name the file that rank 0 writes.
            if self._tensors or (self.facts.parts and isinstance(error, DecodeError)):
                add_note(error, self._write_file(self._path or str(self._out.with_suffix(".latents.safetensors"))))
            raise
        if self._refusal:
            raise ModelError(self._refusal)

    def _write_file(self, path: str) -> str:
        """Write the latents if this rank has any, and return a line that says how to decode them."""
        try:
            if self._tensors:
                Path(path).parent.mkdir(exist_ok=True)
                metadata = {METADATA: self.facts.model_dump_json()}
                files.write_atomically(Path(path), safetensors.torch.save(self._tensors, metadata))
        except OSError as error:
            self._refusal = f"its latents cannot be kept in {path}: {error.strerror}"
            return self._refusal
        command = shlex.join(["ditile", "decode", path, "--out", str(self._out)])
        return f"its latents are kept; decode them by: {command}"


def read_facts(path: Path) -> tuple[LatentsFacts, int]:
    """Read a file's metadata and how many rows its latents have. Raises `LoadError` if it is no file of latents."""
    file = open_safetensors(path, "np")
    metadata = file.metadata() or {}
    if METADATA not in metadata or LATENTS not in {*file.keys()}:
        raise LoadError(f"{path} has no latents of ditile; give a file of ditile generate --save-latents")
    try:
        facts = LatentsFacts.model_validate_json(metadata[METADATA])
    except ValidationError as error:
        first = error.errors()[0]
        raise LoadError(f"{path} has latents that are not of this version: {first['loc']}: {first['msg']}") from None
    # Padded, so that even a tensor of one dimension has a second-last size.
    shape = [1, 1] + list(file.get_slice(LATENTS).get_shape())
    return facts, shape[-2]
