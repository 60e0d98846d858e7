"""The question that `ditile plan` answers. It imports no torch, so that the command line shows its help at once."""

from __future__ import annotations

from dataclasses import dataclass

from ditile.errors import PlanError
from ditile.plan.checks import check_counts, check_finite_number, check_whole_number
from ditile.plan.flags import define_option

MAX_STEPS = 1000
"""Upper bound of a search; more steps than schedulers have timesteps take minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion:
    """The model, the call, the machine and the bounds that a plan is searched for.

    Raises:
        PlanError: if a value is out of its range.
    """

    model: str = define_option(
        "shapes-pixart", "a published model, a bundled one, a folder or a hub id", metavar="NAME", reads=True
    )
    height: int | None = define_option(None, "pixels; the model's own size by default", metavar="N")
    width: int | None = define_option(None, "pixels; the model's own size by default", metavar="N")
    frames: int | None = define_option(None, "of a video; the model's own number by default", metavar="N")
    steps: int | None = define_option(None, "denoising steps", metavar="N")
    guidance: float | None = define_option(None, "how strongly the prompt guides", metavar="X")
    num_images: int = define_option(1, "images at once", metavar="N")
    hardware: str | None = define_option(
        None, "such as l40-pcie; this machine, as calibrated, by default", metavar="NAME"
    )
    profile: str | None = define_option(None, "a machine that `ditile calibrate` measured", metavar="FILE", reads=True)
    devices: int | None = define_option(None, "devices in all; those of the machine by default", metavar="N")
    hosts: int = define_option(1, "hosts that they are in", metavar="N")
    interlink: str | None = define_option(None, "bandwidth between hosts, such as 10Gbit", metavar="RATE")
    memory: str | None = define_option(
        None, "of a device, such as 48GB; that of the hardware by default", metavar="SIZE"
    )
    max_latency: float | None = define_option(None, "seconds that are allowed", metavar="S")
    warmup: int | None = define_option(None, "synchronous steps of plans with stale keys; 1 by default", metavar="W")
    cache: str | None = define_option(
        None, 'a cache in one line, such as "F=1 W=4 R=0.12" (docs/caching.md); none by default', metavar="LINE"
    )
    hit_rate: float | None = define_option(
        None, "share of the steps that the cache measures and is expected to leave out, 0 to 1", metavar="X"
    )
    price: str | None = define_option(None, "price one plan instead of searching", metavar="PLAN")
    json: str | None = define_option(None, "write the answer as JSON; - is the standard output", metavar="FILE")

    def __post_init__(self) -> None:
        check_counts(self, "height", "width", "frames", "steps", "devices", "hosts", "num_images", error=PlanError)
        check_finite_number(self.guidance, "guidance", example=3.5, error=PlanError, optional=True)
        check_whole_number(self.steps, "steps", most=MAX_STEPS, error=PlanError, optional=True)
        if self.hardware is not None and self.profile is not None:
            raise PlanError(f"hardware={self.hardware!r} and profile={self.profile!r}: give one of them")
        if self.hosts > 1 and self.interlink is None and self.hardware is not None:
            raise PlanError(f"hosts={self.hosts} are joined by a link; say which, such as --interlink 10Gbit")
        if self.hosts == 1 and self.interlink is not None:
            raise PlanError(f"interlink={self.interlink!r} joins hosts, and there is one; add --hosts N")
        if self.max_latency is not None and not self.max_latency > 0:
            raise PlanError(f"max_latency={self.max_latency} is no time; give seconds above 0")
        if self.price is not None and not self.price.strip():
            raise PlanError(f"price={self.price!r} says nothing; write name=value, such as pipefusion=2")
        if self.price is not None and self.warmup is not None:
            raise PlanError(f"warmup={self.warmup} is for a search; say it in price={self.price!r}")
        if self.hit_rate is not None and self.cache is None:
            raise PlanError(f"hit_rate={self.hit_rate} is for a cache; add --cache LINE")
        if self.hit_rate is not None and not 0 <= self.hit_rate <= 1:
            raise PlanError(f"hit_rate={self.hit_rate} is not between 0 and 1; try --hit-rate 0.5")
