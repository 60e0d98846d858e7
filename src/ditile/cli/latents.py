"""Files of latents: all that the decode of a call reads, in one safetensors file.

Tensors are its tensors, and everything else is JSON in its metadata. `ditile generate` writes one before the decode on
request, and after a decode that failed; `ditile decode` reads it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from ditile.distributed import files
from ditile.model.decode_tail import DecodeState, DecodeTail
from ditile.plan.errors import LoadError, ModelError, add_note, join_error_lines
from ditile.plan.option_classes import JsonObject
from ditile.runner.model_files import open_safetensors
from ditile.runner.requests.options import FrameRate
from ditile.runner.requests.pipelines import OutputKind

METADATA = "ditile_latents"
"""The name of the metadata that holds the JSON."""


class LatentsFacts(BaseModel):
    """The metadata of a file of latents.

    Attributes:
        model, components, dtype: what the decode loads.
        kind, fps: what it makes.
        pictures: the prompt and the seed of each image, video or sound.
        call, texts: how they were made, for the texts of their files.
        diffusers: the version of the pipeline.
        pipeline, place, attributes: as in `DecodeTail` and `DecodeState`.
        names: the local variables that the tail reads.
        values: of those that are set; a tensor is the name of one in the file.
        parts: each model that decodes -> a digest of its config.
    """

    model_config = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")

    model: str
    components: dict[str, str]
    dtype: str
    kind: OutputKind
    fps: FrameRate
    pictures: list[tuple[str | None, int]] = Field(min_length=1)
    call: JsonObject
    texts: dict[str, str]
    diffusers: str
    pipeline: str
    place: int
    attributes: dict[str, bool | int | float | str | None]
    names: list[str]
    values: JsonObject
    parts: dict[str, str]

    def find_tail(self) -> DecodeTail:
        """Find the decode in the installed diffusers. Raises `ModelError` if it reads other values there."""
        pipeline = getattr(diffusers, self.pipeline, None)
        tail = None
        if isinstance(pipeline, type) and issubclass(pipeline, diffusers.DiffusionPipeline):
            tail = DecodeTail.find_after(pipeline, self.place)
        if tail is None or tail.list_names() != self.names or not self.values.keys() <= set(self.names):
            raise ModelError(
                f"the latents are of {self.pipeline} of diffusers {self.diffusers}, whose decode is another one in "
                f"diffusers {diffusers.__version__}; install that version"
            )
        return tail


class LatentsKeeper:
    """Keeps the latents of a call until what is decoded of them is written.

    Args:
        pipe: the pipeline.
        described: what `LatentsFacts` has of the request.
        out: the first file that the decode makes.
        path: the file of latents to write in any case; None to write one only after a failure.
    """

    def __init__(self, pipe: Any, described: JsonObject, out: Path, path: Path | None) -> None:
        self._pipe = pipe
        self._described = described
        self._out = out
        self._path = path
        self._kept: tuple[dict[str, Tensor], LatentsFacts] | None = None
        self._writes = False
        self._refusal = "their call does not end with a decode"

    def take_latents(self, state: DecodeState) -> None:
        """Copy what the decode will read, and write it on request. It is called after the last step.

        Nothing is serialized unless it is written.
        """
        tail = state.tail
        parts = {}
        for name, part in self._pipe.components.items():
            if name in tail.attributes and isinstance(part, nn.Module):
                parts[name] = digest_config(part)
        tensors: dict[str, Tensor] = {}
        values = {}
        for name, value in state.values.items():
            try:
                values[name] = _store_value(value, name, tensors)
            except TypeError as error:
                # An input of the call may have the name of what the tail makes.
                if name not in tail.list_names(ast.Store):
                    self._refusal = f"their decode reads {error}"
                    return
        facts = LatentsFacts(
            **self._described,
            diffusers=diffusers.__version__,
            pipeline=tail.pipeline.__name__,
            place=tail.place,
            attributes=state.attributes,
            names=tail.list_names(),
            values=values,
            parts=parts,
        )
        self._kept = (tensors, facts)
        # Ranks that do not decode have the same latents, and tell of the file that another one writes.
        self._writes = values.get("output_type") != "latent"
        if self._path is not None:
            self._write_file(self._path)

    @contextlib.contextmanager
    def keep_on_failure(self) -> Iterator[None]:
        """Write the latents if what follows the last step fails, and name their file in the error.

        Raises:
            ModelError: at the end, if they were to be written and cannot be kept.
        """
        self._kept = None
        try:
            yield
        except Exception as error:
            if self._kept is not None:
                add_note(error, self._write_file(self._path or self._out.with_suffix(".latents.safetensors")))
            raise
        if self._path is not None and self._refusal:
            latents = f"the latents of {type(self._pipe).__name__}"
            raise ModelError(f"save_latents={str(self._path)!r}: {latents} are not kept, but decoded: {self._refusal}")

    def _write_file(self, path: Path) -> str:
        """Write the latents, and return a line that says how to decode them."""
        assert self._kept is not None
        tensors, facts = self._kept
        try:
            if self._writes:
                path.parent.mkdir(exist_ok=True)
                files.write_atomically(path, safetensors.torch.save(tensors, {METADATA: facts.model_dump_json()}))
        except OSError as error:
            self._refusal = str(error.strerror)
            return f"its latents cannot be kept in {path}: {error.strerror}"
        self._refusal = ""
        command = shlex.join(["ditile", "decode", str(path), "--out", str(self._out)])
        return f"its latents are kept; decode them by: {command}"


def read_facts(path: Path) -> LatentsFacts:
    """Read the metadata of a file of latents.

    Raises:
        LoadError: if it cannot be read, or is a file of something else.
    """
    metadata = open_safetensors(path, "np").metadata() or {}
    if METADATA not in metadata:
        raise LoadError(f"{path} has no latents of ditile; give a file of ditile generate --save-latents")
    try:
        return LatentsFacts.model_validate_json(metadata[METADATA])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise LoadError(f"{path} has latents that are not of this version: {first['loc']}: {first['msg']}") from None


def read_values(path: Path, facts: LatentsFacts, device: torch.device) -> dict[str, Any]:
    """Read the values of the local variables onto a device.

    Raises:
        LoadError: if they are not what the metadata says.
    """
    try:
        tensors = safetensors.torch.load_file(path)
        return {name: _restore_value(stored, tensors, device) for name, stored in facts.values.items()}
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
        raise LoadError(f"{path} is not whole: {type(error).__name__}: {join_error_lines(error)}") from error


def digest_config(part: Any) -> str:
    """Compute a digest of a model's class and config, without the names of files."""
    config = getattr(part, "config", {})
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    own = {name: value for name, value in values.items() if not name.startswith("_")}
    text = json.dumps([type(part).__name__, own], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _store_value(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, with its tensors put into `tensors`. Raises `TypeError` for what cannot be kept."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, list | tuple):
        items = [_store_value(item, f"{name}.{place}", tensors) for place, item in enumerate(value)]
        # Sizes of tensors become tuples.
        kind = list if isinstance(value, list) else tuple
        return {kind.__name__: items}
    stored = {"tensor": name}
    if isinstance(value, torch.Generator):
        stored["generator"] = value.device.type
        value = value.get_state()
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}, a {type(value).__name__}")
    # The decode may change its own in place.
    tensors[name] = value.detach().to("cpu", copy=True).contiguous()
    return stored


def _restore_value(stored: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """Return what `_store_value` stored, with tensors on a device."""
    if not isinstance(stored, dict):
        return stored
    if "dtype" in stored:
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[stored["dtype"]]
    for kind in (list, tuple):
        if kind.__name__ in stored:
            return kind(_restore_value(item, tensors, device) for item in stored[kind.__name__])
    if "tensor" not in stored:
        return device
    tensor = tensors[stored["tensor"]]
    if "generator" in stored:
        return torch.Generator(stored["generator"]).set_state(tensor)
    return tensor.to(device)
