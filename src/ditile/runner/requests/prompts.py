"""Files of prompts: one image per line, named by its number, and the lines whose images are still missing.

An image is not generated again if its file is whole and says that it was made from the same prompt, seed and settings.
So the same command resumes a run that was stopped. Line k has seed + k.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ditile.distributed import files
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.plan.plan import Plan
from ditile.runner.model_files import choose_dtype_name, find_model_source
from ditile.runner.requests import pictures
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions, list_named_paths
from ditile.runner.requests.pipelines import OutputKind
from ditile.runner.requests.seeds import choose_random_seed
from ditile.runner.requests.videos import build_poster_path
from ditile.runner.sounds import read_wav_texts

MIN_DIGITS = 4
MAX_HASHED_BYTES = 2**36
"""The most bytes of a file that is hashed, more than any LoRA has."""
FIELDS_NOT_COMPARED = ("prompt", "prompts_file", "seed", "num_images", "transformer", "component")


class PromptLine(NamedTuple):
    """An image to make."""

    prompt: str
    seed: int
    path: str


def read_prompts(name: str, option: str = "prompts_file") -> list[str]:
    """Read the prompts in an option's file: its lines, except for blank ones and those that begin with #.

    Raises:
        ModelError: if it cannot be read, is not UTF-8, or has no prompt.
    """
    try:
        text = files.read_text(name)
    except (OSError, ValueError) as error:
        raise ModelError(f"{option}={name!r} cannot be read as text: {files.describe_error(error)}") from error
    prompts = []
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith("#"):
            prompts.append(line)
    if not prompts:
        raise ModelError(f"{option}={name!r} has no prompt; write one per line")
    return prompts


def list_prompt_lines(request: GenerateOptions, run: RunOptions) -> list[PromptLine]:
    """List a line for every image: of one prompt, or of every prompt of a file.

    Without a seed the first line of a file has seed 0, so that the same command resumes.

    Raises:
        ModelError: as `read_prompts`.
    """
    if request.prompts_file is None:
        first_seed = choose_random_seed() if request.seed is None else request.seed
        paths = run.list_image_paths(request.num_images, first_seed, request.model)
        return [PromptLine(request.prompt or "", first_seed + k, str(path)) for k, path in enumerate(paths)]
    prompts = read_prompts(request.prompts_file)
    digits = max(MIN_DIGITS, len(str(len(prompts) - 1)))
    lines = []
    for k, prompt in enumerate(prompts):
        seed = (request.seed or 0) + k
        path = run.build_image_path(k, seed, request.model, digits=digits)
        lines.append(PromptLine(prompt, seed, str(path)))
    return lines


def describe_request(
    request: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions, base: CallArguments
) -> str:
    """Describe in JSON everything that an image depends on, besides its prompt and seed. Images with equal text are the
    same.

    The text has digests of given files, the dtype that this machine chooses, and no `data`, on which no image depends.
    It is kept in images, so it has no local paths.

    Raises:
        ModelError: if a file cannot be read, or the dtype is not known.
    """
    description: JsonObject = {}
    for field in dataclasses.fields(request):
        if field.name not in FIELDS_NOT_COMPARED:
            description[field.name] = [] if field.metadata["reads"] else getattr(request, field.name)
    contents: dict[str, str] = {}
    for name, path in list_named_paths(request):
        if name not in FIELDS_NOT_COMPARED:
            description[name].append(pictures.hide_local_path(path))
            contents |= _describe_file(path)
    for choice in cache.loras.values():
        contents |= _describe_file(choice.source)
    if request.components:
        description["components"] = pictures.describe_weight_files(request.components)
    # No image depends on which replica or rank makes it.
    plan = dataclasses.replace(plan, data=1, offload_ranks=None)
    # Earlier versions wrote images with these keys. As long as the text is equal, a run of theirs can be resumed.
    description |= {
        "dtype": choose_dtype_name(find_model_source(request.model, components=request.components), run.dtype),
        "contents": contents,
        "attention": run.attention,
        "plan": str(plan),
        "defaults": dict(base),
    }
    settings = cache.describe_settings(pictures.hide_local_path)
    if settings:
        description["cache"] = settings
    return json.dumps(description, sort_keys=True)


def _describe_file(name: str) -> dict[str, str]:
    """Map the name of a file without its folder to a digest of its content. Empty for a folder or a hub id."""
    if not Path(name).is_file():
        return {}
    try:
        content = files.read_file(name, MAX_HASHED_BYTES)
    except OSError as error:
        raise ModelError(f"{name!r} cannot be read: {error}") from error
    return {pictures.hide_local_path(name): hashlib.sha256(content).hexdigest()}


def select_missing_lines(all_lines: Sequence[PromptLine], description: str, *, kind: OutputKind) -> list[PromptLine]:
    """Select the lines whose image is missing, is not whole, or was made by another request.

    Args:
        all_lines: all lines of the file.
        description: the text of the request, from `describe_request`.
        kind: what the model makes; the poster of a video says how it was made.
    """
    missing_lines = []
    # A file that is cut short has no texts, and is made again.
    for line in all_lines:
        path = Path(line.path)
        texts = {}
        if path.is_file() and kind == "sound":
            texts = read_wav_texts(path)
        elif path.is_file():
            described_file = build_poster_path(path) if kind == "video" else path
            texts = pictures.read_picture_texts(described_file)
        expected = {"prompt": line.prompt, "seed": str(line.seed), "request": description}
        if any(texts.get(name) != text for name, text in expected.items()):
            missing_lines.append(line)
    return missing_lines
