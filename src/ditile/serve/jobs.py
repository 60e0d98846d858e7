"""A job: what one client requested, its progress, and its result.

    queued -> running -> done | failed | cancelled
    queued -> cancelled | failed

A job that has ended never changes again. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import re
import time
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from ditile.plan.errors import DitileError
from ditile.plan.option_classes import JsonObject
from ditile.planner.promise import Bounds
from ditile.runner.requests.options import GenerateOptions

State = Literal["queued", "running", "done", "failed", "cancelled"]
Kind = Literal["image", "video"]
OutputFormat = Literal["png", "jpeg", "webp", "mp4", "gif"]
# Name of a file -> its content.
Files = dict[str, bytes]

# Input files. Further images to start from are image-1, image-2, ..
INPUT_IMAGE = "image"
INPUT_MASK = "mask"
# Output files of a video in addition to the video itself. Images and videos are 0.png, 1.png, .. or 0.mp4, ..
POSTER = "thumbnail.png"
SPRITESHEET = "spritesheet.png"
_FOLDERS = re.compile(r"(?<![\w:/])/(?:[^\s/'\"]+/)+")


def shorten_line(error: object, limit: int = 300) -> str:
    """Return the text of an error as one line, without the folders of paths: these name users and projects."""
    return " ".join(_FOLDERS.sub("", str(error)).split())[:limit]


class NotReadyError(DitileError):
    """The server generates nothing now: its ranks are starting, or it is ending."""


class RanksFailedError(NotReadyError):
    """The ranks fail whenever they are started."""


class JobNotFoundError(DitileError):
    """There is no such job or file, or it has another owner."""


class QueueFullError(DitileError):
    """The queue is full; `retry_after` is the number of seconds after which it probably has room."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to generate, already checked.

    Attributes:
        options: as in `ditile generate`; `seed` is set, and `image` and `mask` are names of input files, not paths.
        output_format: the format of the files.
        output_compression: the quality of jpeg and webp, 0 to 100; 100 is the best.
        num_previews: how many previews the client wants while the image is generated.
        loras: the name of a LoRA, one of `ServeOptions.list_lora_names` -> its scale.
        computed_steps: the number of steps that call the model; the others are forecast. None leaves it to the server.
        bounds: bounds for choosing the computed steps instead.
        timeout: seconds after its arrival at which the job is ended; None for the server's own limit.
        client: values that the API must return to the client, as JSON types; they do not change what is generated.
    """

    options: GenerateOptions
    output_format: OutputFormat = "png"
    output_compression: int = 100
    num_previews: int = 0
    loras: dict[str, float] = field(default_factory=dict)
    computed_steps: int | None = None
    bounds: Bounds = field(default_factory=Bounds)
    timeout: float | None = None
    client: JsonObject = field(default_factory=dict)

    def to_json(self) -> JsonObject:
        """Return the request as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: JsonObject) -> Request:
        """Build a request from the result of `to_json`."""
        options = dict(values["options"])
        # Earlier versions stored one image as a plain text.
        if isinstance(options.get("image"), str):
            options["image"] = (options["image"],)
        # Jobs that an earlier version stored have no bounds.
        bounds = Bounds(**values.get("bounds", {}))
        return cls(**values | {"options": GenerateOptions(**options), "bounds": bounds})


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a job failed.

    Attributes:
        code: "refused" (the request does not fit the model or the plan), "rank_failed", "ranks_failed" (in each
            start), "out_of_memory", "timeout", "restarted" (the server ended first) or "internal".
        message: one line for the client, with a suggestion.
    """

    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """The result of a job that is done.

    Attributes:
        files: names of the output files, in the order of the seeds.
        seeds: the seed of each image or video.
        size: (width, height) in pixels.
        seconds: the times of the call: total, text, denoise, decode.
        num_steps: how many steps ran.
        frames, fps: the number of frames of a video and their rate; 0 for an image.
        facts: JSON types for /metrics and /v1/plan: reports of the ranks, steps a cache skipped, batch size, promise.
        warnings: what the ranks left out of the request, such as the end of a long prompt.
    """

    files: list[str]
    seeds: list[int]
    size: tuple[int, int]
    seconds: dict[str, float]
    num_steps: int
    frames: int = 0
    fps: float = 0.0
    facts: JsonObject = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: JsonObject) -> JobResult:
        """Build a result from its fields as JSON types."""
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The state of a job at one moment. A change makes a new `Job`.

    Attributes:
        id: "image_" or "video_" and 24 letters and digits.
        owner: the name of the client's key; "" where keys are not required.
        progress: percent of the steps, 0 to 100; 100 only when it is done.
        created, started, ended, expires: seconds since 1970; None if it has not happened.
        attempts: how often ranks have started on it.
        step, num_steps: in news of a running job, the steps done so far, and the steps in all.
        preview: in news, a PNG of the running latents, if there is a new one.
        preview_index: the number of the preview, from 0.
    """

    id: str
    owner: str
    kind: Kind
    request: Request
    state: State = "queued"
    progress: int = 0
    created: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    expires: float | None = None
    attempts: int = 0
    failure: Failure | None = None
    result: JobResult | None = None
    step: int = 0
    num_steps: int = 0
    preview: bytes | None = None
    preview_index: int = 0

    @property
    def has_ended(self) -> bool:
        """Return whether the job has ended and will not change any more."""
        return self.state not in ("queued", "running")

    @property
    def warnings(self) -> list[str]:
        """Return the warnings about the request; those of the ranks come with the result."""
        found: list[str] = [] if self.result is None else self.result.warnings
        return [*self.request.client["warnings"], *found]
