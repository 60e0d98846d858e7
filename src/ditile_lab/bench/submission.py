"""A submission: what `ditile bench --submit FILE` measured, as one checked file that docs/results.md can show.

It has what a reader needs to judge and to repeat it: the card, the versions, the call, each plan with its seconds, and
a digest of the image, by which two machines can tell whether they generated the same one.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from ditile.distributed import files
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile_lab.bench.cells import ONE_RANK
from ditile_lab.rows import Row

Text = Annotated[str, Field(min_length=1, max_length=200)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**16)]


def _check_plan(text: str) -> str:
    try:
        return text and str(Plan.parse(text))
    except PlanError as error:
        raise ValueError(str(error)) from error


class SubmittedRun(BaseModel):
    """One plan at one size.

    Attributes:
        plan: in the form of `str(Plan)`; "" is the plain pipeline on one rank.
        cache: a cache in one line, or "".
        height, width: pixels; None is the model's own size.
        seconds: the median of the calls that counted.
        digest: SHA-256 of the numbers of the images; None if it was not kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: Annotated[str, AfterValidator(_check_plan)]
    cache: Annotated[str, Field(max_length=500)] = ""
    height: Count | None = None
    width: Count | None = None
    seconds: Positive
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None


class Versions(BaseModel):
    """The versions of the packages on which seconds and images depend most."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ditile: Text
    torch: Text
    diffusers: Text


class Submission(BaseModel):
    """The runs of one model on one machine.

    Attributes:
        card: the name of its GPU, or of its processor.
        cards: how many of them were used.
        dtype: None is the default of the model and the card.
        output: what a call ends with; None if that was not kept.
        remark: what else a reader must know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    date: datetime.date
    card: Text
    cards: Count
    versions: Versions
    model: Text
    dtype: Text | None = None
    steps: Count | None = None
    output: Literal["image", "latent"] | None = None
    remark: Annotated[str, Field(max_length=200)] = ""
    runs: Annotated[tuple[SubmittedRun, ...], Field(min_length=1)]

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Submission:
        """Collect the rows of one session."""
        first = rows[0]
        machine: Mapping[str, Any] = first["machine"]
        most_ranks = max(row["world"] for row in rows)
        return cls(
            date=datetime.datetime.fromisoformat(first["when"]).date(),
            card=(machine["gpus"] or [machine["processor"]])[0],
            cards=min(most_ranks, len(machine["gpus"])) or 1,
            versions=Versions(ditile=machine["ditile"], torch=machine["torch"], diffusers=machine["diffusers"]),
            model=first["model"],
            dtype=first["dtype"],
            steps=first["steps"],
            output=first["output"],
            runs=tuple(_collect_run(row) for row in rows),
        )

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        files.write_atomically(path, self.model_dump_json(indent=1) + "\n")


def _collect_run(row: Row) -> SubmittedRun:
    return SubmittedRun(
        plan="" if row["plan"] == ONE_RANK else row["plan"],
        cache=row["cache"],
        height=row["height"],
        width=row["width"],
        seconds=row["median_s"],
        digest=row.get("digest"),
    )


def digest_output(output: Any) -> str:
    """Return the SHA-256 of the numbers of a call's images or latents, whatever device they are on."""
    numbers = output[0]
    if isinstance(numbers, Tensor):
        # numpy has no bfloat16.
        numbers = numbers.detach().float().cpu().numpy()
    return hashlib.sha256(np.ascontiguousarray(numbers).tobytes()).hexdigest()
