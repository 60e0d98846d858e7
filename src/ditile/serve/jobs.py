"""A job: what one client wants drawn, how far it is, and what came of it.

    queued -> running -> done | failed | cancelled
    queued -> cancelled | failed

A job that has ended never changes again. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from ditile.plan.errors import DitileError
from ditile.runner.requests.options import GenerateOptions

State = Literal["queued", "running", "done", "failed", "cancelled"]
Kind = Literal["image", "video"]
OutputFormat = Literal["png", "jpeg", "webp", "mp4", "gif"]
ENDED: tuple[State, ...] = ("done", "failed", "cancelled")

INPUT_IMAGE, INPUT_MASK = "image", "mask"
"""Names of input files; further pictures to start from are image-1, image-2, .."""
POSTER, SPRITESHEET = "thumbnail.png", "spritesheet.png"
"""Names of output files of a video beside the video itself. Pictures and videos are 0.png, 1.png, .. or 0.mp4, .."""


class NotReadyError(DitileError):
    """The server draws nothing now: its ranks start, or it ends."""


class RanksFailedError(NotReadyError):
    """The ranks fail whenever they are started."""


class JobNotFoundError(DitileError):
    """No such job or file, or another owner's."""


class QueueFullError(DitileError):
    """As many jobs wait as may.

    Attributes:
        retry_after: seconds after which there is likely a place.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be drawn, as it was checked when it came.

    Attributes:
        options: as of `ditile generate`; `seed` is set, and `image` and `mask` are names of input files, no paths.
        output_format: of the files.
        output_compression: of jpeg and webp, 0 to 100; 100 is the best quality.
        num_previews: how many previews a client wants to see while the picture is drawn.
        loras: name -> scale of LoRAs of the server's folder.
        timeout: seconds from its arrival after which the job is ended; None for the server's own limit.
        client: what the API was told and has to repeat, as JSON types; it does not change what is drawn.
    """

    options: GenerateOptions
    output_format: OutputFormat = "png"
    output_compression: int = 100
    num_previews: int = 0
    loras: dict[str, float] = field(default_factory=dict)
    timeout: float | None = None
    client: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        values = {name.name: getattr(self, name.name) for name in dataclasses.fields(self)}
        options = {name.name: getattr(self.options, name.name) for name in dataclasses.fields(self.options)}
        return values | {"options": options}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Request:
        """What `to_json` gave."""
        given = values["options"]
        image = given.get("image")
        names = None if image is None else (image,) if isinstance(image, str) else tuple(image)
        return cls(**values | {"options": GenerateOptions(**given | {"image": names})})


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a job failed.

    Attributes:
        code: "refused" (the request does not fit the model or the plan), "rank_failed", "ranks_failed" (in each
            start), "out_of_memory", "timeout", "restarted" (the server was) or "internal".
        message: one line for the client, which says what would work.
    """

    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What came of a job that is done.

    Attributes:
        files: names of the output files, in the order of the seeds.
        seeds: of each picture or video.
        size: (width, height) in pixels.
        seconds: of the call: total, text, denoise, decode.
        num_steps: how many steps ran.
        frames, fps: of a video; 0 for a picture.
        facts: for the page and /v1/plan, as JSON types: reports of the ranks, steps left out by a cache, batch size.
    """

    files: list[str]
    seeds: list[int]
    size: tuple[int, int]
    seconds: dict[str, float]
    num_steps: int
    frames: int = 0
    fps: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job at one moment; it is replaced, not changed.

    Attributes:
        id: "image_" or "video_" and 24 letters and digits.
        owner: the name of the key that it came with; "" where keys are not asked for.
        progress: percent of the steps, 0 to 100; 100 only when it is done.
        created, started, ended, expires: seconds since 1970; None for what has not happened.
        attempts: how often ranks have begun to draw it.
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
    drawn: Drawn | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """News of a job for those who watch it.

    Attributes:
        job: as it is now.
        step, num_steps: how many steps of how many were made.
        preview: a PNG of the running latents, if there is a new one.
        preview_index: its number from 0.
    """

    job: Job
    step: int = 0
    num_steps: int = 0
    preview: bytes | None = None
    preview_index: int = 0
