"""A file of prompts: one picture per line, named by its number, and the lines whose pictures are still missing.

A picture is not drawn again if its file is whole and says that it was made from the same prompt, seed and settings. So
the same command resumes a run that was stopped. Line k has seed + k.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ditile.distributed import files
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.model_files import choose_dtype_name, find_model_source
from ditile.runner.requests import pictures
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.command_options import RunOptions, list_named_paths
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.videos import build_poster_path

MIN_DIGITS = 4
MAX_HASHED_BYTES = 2**36
"""More than any LoRA has."""
FIELDS_NOT_COMPARED = ("prompt", "prompts_file", "seed", "num_images")


class PromptLine(NamedTuple):
    """A picture to make."""

    prompt: str
    seed: int
    path: str


def read_prompts(name: str, option: str = "prompts_file") -> list[str]:
    """The prompts of a file that an option names: its lines without blank ones and those that begin with #.

    Raises:
        ModelError: if it cannot be read, is not UTF-8, or has none.
    """
    try:
        text = files.read_text(name)
    except (OSError, ValueError) as error:
        raise ModelError(f"{option}={name!r} cannot be read as text: {files.describe_error(error)}") from error
    prompts = [line.strip() for line in text.splitlines()]
    prompts = [line for line in prompts if line and not line.startswith("#")]
    if not prompts:
        raise ModelError(f"{option}={name!r} has no prompt; write one per line")
    return prompts


def list_prompt_lines(wanted: GenerateOptions, run: RunOptions) -> list[PromptLine]:
    """A line for every prompt of the file; without a seed the first is 0, so that the same command resumes.

    Raises:
        ModelError: as `read_prompts`.
    """
    assert wanted.prompts_file is not None
    prompts, seed = read_prompts(wanted.prompts_file), wanted.seed or 0
    digits = max(MIN_DIGITS, len(str(len(prompts) - 1)))
    return [
        PromptLine(prompt, seed + k, str(run.build_image_path(k, seed + k, wanted.model, digits=digits)))
        for k, prompt in enumerate(prompts)
    ]


def describe_request(
    wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions, own: Mapping[str, Any]
) -> str:
    """All that a picture depends on besides its prompt and seed, as JSON; pictures with equal text are the same.

    It has the contents of given files, the dtype that this machine chooses, and no `data`, on which no picture depends.
    It is kept in pictures, so it has no local paths.

    Raises:
        ModelError: if a file cannot be read, or the dtype is not known.
    """
    fields = [field for field in dataclasses.fields(wanted) if field.name not in FIELDS_NOT_COMPARED]
    inputs = [path for field, path in list_named_paths(wanted) if field not in FIELDS_NOT_COMPARED]
    request_fields = {
        field.name: [pictures.hide_local_path(path) for name, path in list_named_paths(wanted) if name == field.name]
        if field.metadata["reads"]
        else getattr(wanted, field.name)
        for field in fields
    }
    run_fields = {
        "dtype": choose_dtype_name(find_model_source(wanted.model), run.dtype),
        "contents": {
            pictures.hide_local_path(name): _hash_file_content(name)
            for name in (*inputs, cache.lora)
            if name and Path(name).is_file()
        },
        "attention": run.attention,
        "plan": str(replace(plan, data=1)),
        "defaults": dict(own),
    }
    settings = cache.describe_settings()
    if "lora" in settings:
        settings["lora"] = pictures.hide_local_path(settings["lora"])
    run_fields |= {"cache": settings} if settings else {}
    return json.dumps(request_fields | run_fields, sort_keys=True)


def _hash_file_content(name: str) -> str:
    try:
        return hashlib.sha256(files.read_file(name, MAX_HASHED_BYTES)).hexdigest()
    except OSError as error:
        raise ModelError(f"{name!r} cannot be read: {error}") from error


def select_missing_lines(all_lines: Sequence[PromptLine], wanted: str, *, has_posters: bool) -> list[PromptLine]:
    """The lines whose picture is missing, is not whole, or was made by another request than `wanted`.

    Args:
        all_lines, wanted: of the file, and as of `describe_request`.
        has_posters: whether they are videos, whose posters say how they were made.
    """
    return [line for line in all_lines if not _has_matching_picture(line, wanted, has_posters=has_posters)]


def _has_matching_picture(line: PromptLine, wanted: str, *, has_posters: bool) -> bool:
    path = Path(line.path)
    if not path.is_file():
        return False
    texts = pictures.read_picture_texts(build_poster_path(path) if has_posters else path)
    return {"prompt": line.prompt, "seed": str(line.seed), "request": wanted}.items() <= texts.items()
