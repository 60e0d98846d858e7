"""The options of `ditile evaluate` and `ditile fit`. Nothing here imports torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from ditile.cache.config_text import NO_CACHE
from ditile.cache.fitted.schedule import FEWEST_FORECAST_STEPS
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.option_classes import CallArguments, Count, Ranks, Scale, define_option, options
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.facts import count_request_steps
from ditile.runner.requests.options import (
    GUIDANCE,
    CallOptions,
    DeviceOptions,
    GenerateOptions,
    ModelOptions,
    Seed,
    Strength,
)
from ditile.runner.requests.outputs import check_output_files
from ditile_lab.rows import list_folder_outputs


class EvaluationSetting(NamedTuple):
    """A plan and a cache, as text; equal text is one setting.

    Attributes:
        plan: the plan, in the form of `str(Plan)`.
        cache: a cache in one line (`ditile.cache.config_text`), or `none`.
    """

    plan: str
    cache: str

    def __str__(self) -> str:
        if self == ORIGINAL:
            return "original"
        if self.cache == NO_CACHE:
            return self.plan
        return f"{self.plan}; {self.cache}"

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return Plan.parse(self.plan).world

    @property
    def cache_arguments(self) -> CallArguments:
        """Return the keyword arguments of `enable_cache`; without a cache, its cache_config is None."""
        return CacheOptions(cache_line=self.cache).build_cache_arguments()

    @property
    def has_original_plan(self) -> bool:
        """Return whether one process generates with the whole pipeline, with or without a cache."""
        return self.plan == ORIGINAL.plan


ORIGINAL = EvaluationSetting(str(Plan()), NO_CACHE)


@options()
class EvaluateOptions(ModelOptions):
    """The generated images: every caption by the original pipeline, and by each plan with each cache.

    Raises:
        ModelError: if a value is out of its range, or a cache is unknown.
        PlanError: if a plan cannot be read, has data above 1, or there is none besides the original.
    """

    plans: str = define_option(
        "pipefusion=2 patches=4; ulysses=2", "plans, with ; between them; pipefusion=1 is one process"
    )
    caches: str | None = define_option(
        None,
        f"caches for each plan, with ; between them (docs/caching.md); by default {NO_CACHE}, and DBCache",
        metavar="LINES",
    )
    captions: str = define_option("bundled", "bundled, a file of one per line, or coco:FILE of annotations", reads=True)
    num: Count | None = define_option(None, "captions to generate; 10, or all if there are fewer")
    seed: int = define_option(0, "seed of the first caption; they count up")
    guidance: Scale | None = define_option(None, GUIDANCE, example=3.5)
    negative_prompt: str | None = define_option(None, "what to keep out", metavar="TEXT")

    def __post_init__(self) -> None:
        self.build_generate_options()
        if not self.candidate_settings:
            caches = "; ".join(self.cache_lines)
            raise PlanError(f"plans={self.plans!r} and caches={caches!r} leave nothing besides the original")

    @property
    def candidate_settings(self) -> list[EvaluationSetting]:
        """Return all plans with all caches, each once, without the original. Raises the errors of the class."""
        settings = []
        cache_lines = self.cache_lines
        for text in _split_at_semicolons(self.plans) or [ORIGINAL.plan]:
            plan = Plan.parse(text)
            # Each of its images equals one rank's, so there is nothing to compare.
            if plan.data > 1:
                raise PlanError(
                    f"data={plan.data} makes more images at a time, each as before; leave data out of '{plan}'"
                )
            for line in cache_lines:
                setting = EvaluationSetting(str(plan), " ".join(line.split()))
                # This raises for a cache that cannot be read.
                _ = setting.cache_arguments
                if setting != ORIGINAL:
                    settings.append(setting)
        return list(dict.fromkeys(settings))

    @property
    def cache_lines(self) -> list[str]:
        """Return the caches of each plan, in one line each."""
        if self.caches is not None:
            return _split_at_semicolons(self.caches) or [NO_CACHE]
        # With a warmup of all steps, the cache would skip nothing.
        warmup = max(1, min(4, count_request_steps(self.build_generate_options()) // 4))
        return [NO_CACHE, f"F=1 W={warmup} R=0.12 taylor=1"]

    def build_generate_options(self) -> GenerateOptions:
        """Return the options of `ditile generate` for a caption's image. Raises the errors of the class."""
        return self.to_generate_options(prompt="a caption")


@options()
class JudgeOptions:
    """The judges of images. Other metrics are also measured if their packages and weights are there.

    Raises:
        ModelError: if a value is out of its range, or a folder has no image.
    """

    resize: int | None = define_option(None, "pixels of a side that images are resized to before they are judged")
    references: str | None = define_option(
        None, "folder of reference images, for the Frechet distance", metavar="FOLDER"
    )
    clip: str | None = define_option(
        None, "a CLIP that transformers loads from disk, for the CLIP score", metavar="NAME"
    )

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < 8:
            raise ModelError(f"resize={self.resize} is too small to judge; try resize=256")
        if self.references is not None and not list_images(Path(self.references)):
            raise ModelError(f"references={self.references!r} is not a folder with images (.png, .jpg, .jpeg, .webp)")


@options()
class SessionOptions(DeviceOptions):
    """The ranks, and the folder of the results."""

    out: str = define_option("evaluation", "folder for all that is written; resumes what is there", metavar="FOLDER")
    threads: Ranks | None = define_option(
        None,
        "CPU threads of each rank and of the original; by default the cores divided by the most ranks",
    )
    one_at_a_time: bool = define_option(
        False, "hold one setting in memory at a time: for large models; latencies are then not interleaved"
    )

    def check_output_folder(self, *others: Any) -> None:
        """Raise `ModelError` unless the folder's files can be written without overwriting a file read by `others`."""
        names = ["job.json", "pictures.jsonl", "evaluation.json", "contact-sheet.png"]
        check_output_files(list_folder_outputs(self.out, names), *others)


def list_images(folder: Path) -> list[Path]:
    """Return the images in a folder but not in its subfolders, sorted by name; none if there is no such folder."""
    if not os.path.isdir(folder):
        return []
    suffixes = (".png", ".jpg", ".jpeg", ".webp")
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)


def _split_at_semicolons(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


REFERENCE_RATIO = 2.4
"""Steps of the finer run for each of the pipeline's own: 48 for 20 are 10 dB closer to what the model means."""


@options()
class FitOptions(DeviceOptions, CallOptions):
    """The options of `ditile fit`: a model, a call of it, and captions."""

    captions: str = define_option("bundled", "bundled, a file of one per line, or coco:FILE of annotations", reads=True)
    num_captions: Annotated[int, Field(ge=1, le=1000)] = define_option(8, "captions to generate")
    reference_steps: Annotated[int, Field(ge=2, le=1000)] | None = define_option(
        None,
        "steps of the run that is fitted to; by default 2.4 times --steps, or --steps if these are few",
        example=48,
    )
    seed: Seed = define_option(1000, "seed of the first caption; they count up")
    negative_prompt: str | None = define_option(None, "what to keep out", metavar="TEXT")
    strength: Strength | None = define_option(
        None, "how far the result may depart from --image, above 0 and up to 1", example=0.6
    )
    out: str | None = define_option(None, "the file to write; schedule-MODEL-STEPS.json by default", metavar="FILE")

    def choose_reference_steps(self, own_steps: int) -> int:
        """Choose the number of steps of the run that is fitted to.

        A model of a few steps was trained to make just these.
        """
        if self.reference_steps is not None:
            return self.reference_steps
        if own_steps < FEWEST_FORECAST_STEPS:
            return own_steps
        return round(REFERENCE_RATIO * own_steps)

    def choose_file(self, num_steps: int) -> str:
        """Choose the file to write."""
        if self.out is not None:
            return self.out
        name = re.sub(r"[^\w.-]+", "-", self.model.rstrip("/").rpartition("/")[2])
        return f"schedule-{name}-{num_steps}.json"
