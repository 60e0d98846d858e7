"""The question for `ditile plan`, and its machine.

Nothing here imports torch, so that the command line shows its help and errors in a question at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated

from PIL import Image
from pydantic import Field

from ditile.cache.config_text import parse_cache_line
from ditile.distributed import cpus, env
from ditile.model.known import find_known_model
from ditile.plan.errors import PlanError
from ditile.plan.option_classes import (
    CallArguments,
    Frames,
    Images,
    Pixels,
    Ranks,
    Scale,
    Seconds,
    check_value,
    define_option,
    options,
)
from ditile.plan.plan import Plan, WireDtype
from ditile.planner import hardware
from ditile.planner.profile import Profile
from ditile.runner.model_files import defaults, find_model_source
from ditile.runner.requests.facts import build_dry_run_call
from ditile.runner.requests.options import TRUE_CFG, GenerateOptions, Paths, SourceOptions
from ditile.runner.requests.pictures import read_picture

MAX_STEPS = 1000
"""The most steps that a search accepts: schedulers have 1000 timesteps, and a search for more steps takes minutes."""
SearchedSteps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Share = Annotated[float, Field(ge=0, le=1)]


@options(error=PlanError)
class PlanQuestion(SourceOptions):
    """The model, the call, the machine and the bounds that a plan is searched for."""

    height: Pixels | None = define_option(None, "pixels; the model's own size by default")
    width: Pixels | None = define_option(None, "pixels; the model's own size by default")
    frames: Frames | None = define_option(None, "of a video; the model's own number by default")
    steps: SearchedSteps | None = define_option(None, "denoising steps")
    guidance: Scale | None = define_option(None, "how strongly the prompt guides", example=3.5)
    true_cfg: Scale | None = define_option(None, TRUE_CFG, example=3.5)
    negative_prompt: str | None = define_option(
        None, "what to keep out; some models are guided by a second branch with it alone", metavar="TEXT"
    )
    num_images: Images = define_option(1, "images at once")
    image: Paths | None = define_option(
        None,
        "an image that the call starts from, or its size, such as 1024x768; repeat it for each further reference",
        reads=True,
        repeats=True,
    )
    hardware: str | None = define_option(
        None,
        "such as l40-pcie, or the device of each rank: rtx-5090,rtx-4090; this machine, as calibrated, by default",
        metavar="NAME",
    )
    profile: str | None = define_option(None, "a machine that `ditile calibrate` measured", reads=True)
    devices_of: str | None = define_option(
        None,
        "a machine that `ditile calibrate` measured, each rank with its own device, however little they differ",
        reads=True,
    )
    devices: Ranks | None = define_option(
        None, "devices in all; those of the machine by default, and one where a card is named"
    )
    hosts: Ranks = define_option(1, "hosts that they are in")
    interlink: str | None = define_option(None, "bandwidth between hosts, such as 10Gbit", metavar="RATE")
    memory: str | None = define_option(
        None, "of a device, such as 48GB; that of the hardware by default", metavar="SIZE"
    )
    host_memory: str | None = define_option(
        None,
        "of a host, for all of its ranks, such as 64GB; that of this machine, where it is planned for",
        metavar="SIZE",
    )
    max_latency: Seconds | None = define_option(None, "seconds that are allowed")
    warmup: int | None = define_option(None, "synchronous steps of plans with stale keys; 1 by default", metavar="W")
    wire_dtype: WireDtype | None = define_option(
        None, "a type that messages may have, an approximation, where that saves a tenth of the time (docs/traffic.md)"
    )
    cache: str | None = define_option(
        None, 'a cache in one line, such as "F=1 W=4 R=0.12" (docs/caching.md); none by default', metavar="LINE"
    )
    hit_rate: Share | None = define_option(
        None,
        "share of the steps that the cache measures and is expected to leave out, 0 to 1",
        example=0.5,
    )
    cuda_graphs: bool = define_option(
        False,
        "price steps whose calls are recorded as CUDA graphs",
        metavar="true|false",
        implied=True,
    )
    price: str | None = define_option(None, "price one plan instead of searching", metavar="PLAN")
    json: str | None = define_option(None, "write the answer as JSON; - is the standard output", metavar="FILE")

    def __post_init__(self) -> None:
        named = []
        for name in ("hardware", "profile", "devices_of"):
            value = getattr(self, name)
            if value is not None:
                named.append(f"{name}={value!r}")
        if len(named) > 1:
            raise PlanError(f"{' and '.join(named)}: give one of them")
        if self.hosts > 1 and self.interlink is None and self.hardware is not None:
            raise PlanError(f"hosts={self.hosts} are joined by a link; say which, such as --interlink 10Gbit")
        if self.hosts == 1 and self.interlink is not None:
            raise PlanError(f"interlink={self.interlink!r} joins hosts, and there is one; add --hosts N")
        if self.price is not None and not self.price.strip():
            raise PlanError(f"price={self.price!r} says nothing; write name=value, such as pipefusion=2")
        if self.price is not None and self.warmup is not None:
            raise PlanError(f"warmup={self.warmup} is for a search; say it in price={self.price!r}")
        if self.price is not None and self.wire_dtype is not None:
            raise PlanError(f"wire_dtype={self.wire_dtype} is for a search; say it in price={self.price!r}")
        if self.hit_rate is not None and self.cache is None:
            raise PlanError(f"hit_rate={self.hit_rate} is for a cache; add --cache LINE")
        plan = self.priced_plan
        if self.cuda_graphs and plan is not None:
            refusal = plan.explain_no_recording()
            if refusal:
                raise PlanError(refusal)
        if self.memory is not None:
            hardware.parse_byte_amount(self.memory)
        if self.host_memory is not None:
            hardware.parse_byte_amount(self.host_memory, "host_memory")
        if self.cache is not None:
            parse_cache_line(self.cache)

    @property
    def priced_plan(self) -> Plan | None:
        """Return the one plan to price; None for a search."""
        if self.price is None:
            return None
        return Plan.parse(self.price)

    def read_pictures(self) -> list[Image.Image]:
        """Read the images that the call starts from; a size in place of a file makes a blank image.

        Raises:
            ModelError: if a file is not an image, or a side is out of its range.
        """
        pictures = []
        for text in self.image or ():
            size = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text)
            if size is None:
                pictures.append(read_picture(text, "image"))
                continue
            width, height = map(int, size.groups())
            check_value(Pixels, width, f"image={text!r}: width")
            check_value(Pixels, height, f"image={text!r}: height")
            # Pillow's own limit against decompression bombs; it is None where a user has switched it off.
            limit = Image.MAX_IMAGE_PIXELS or math.inf
            if width * height > limit:
                raise PlanError(f"image={text!r} has {width * height} pixels, and {limit} are the most; try 1024x1024")
            pictures.append(Image.new("RGB", (width, height)))
        return pictures

    def make_request(self) -> GenerateOptions:
        """Make a request for the call that is planned."""
        names = ("model", "height", "width", "frames", "steps", "guidance", "true_cfg", "negative_prompt", "num_images")
        return GenerateOptions(prompt="a prompt", **{name: getattr(self, name) for name in names})

    def fill_call_arguments(self) -> CallArguments:
        """Complete the arguments of the planned call with the model's defaults.

        Raises:
            ModelError, LoadError: those of `ditile.defaults`.
        """
        return build_dry_run_call(self.make_request(), defaults(self.model))

    def check_without_torch(self) -> None:
        """Check a question as far as possible before torch is imported.

        Raises:
            PlanError: as `load_machine_profile`, or if the plan to be priced does not fit a model known by name.
            ModelError, LoadError: if there is no such model or profile, or a file is not an image.
        """
        self.read_pictures()
        find_model_source(self.model, weights=False, components=self.components)
        load_machine_profile(self)
        known = find_known_model(self.model)
        if known is not None:
            known.check_call(self.priced_plan or Plan(), self.fill_call_arguments())


def load_machine_profile(ask: PlanQuestion) -> Profile:
    """Load the profile of the named machine, or of this one; if ranks differ, it has the device of each.

    Raises:
        PlanError: if the hardware is not known, this machine was not measured, or too few of its ranks were.
        ModelError: if a file is not a profile.
    """
    profile = _read_machine_profile(ask)
    if ask.devices_of is not None and not profile.ranks:
        raise PlanError(
            f"devices_of={ask.devices_of!r} has no measured ranks; run `ditile calibrate --ranks N` again, or give "
            "--hardware with the device of each rank"
        )
    if profile.has_unlike_ranks or ask.devices_of is not None:
        joined = hardware.join_devices(profile.list_measured_ranks())
        # `join_devices` counts the ranks of all hosts as devices, but `devices` counts those of one host.
        profile = dataclasses.replace(joined, devices=profile.devices)
    plan = ask.priced_plan
    devices = ask.devices
    if devices is None and plan is not None:
        devices = plan.world
    if devices is not None:
        profile.check_rank_count(devices)
    return profile


def _read_machine_profile(ask: PlanQuestion) -> Profile:
    if ask.hardware is not None:
        return hardware.load_profile(ask.hardware, ask.interlink)
    named_file = ask.profile or ask.devices_of
    path = env.find_profile_path()
    if named_file is not None:
        path = Path(named_file)
    profile = None
    # A named file must exist. If this machine has no profile, the errors below explain how to make one.
    if named_file is not None or path.exists():
        profile = Profile.from_json_file(path)
    if ask.hosts > 1 and ask.interlink is None and (profile is None or profile.interlink is None):
        raise PlanError(
            f"hosts={ask.hosts} are joined by a link; measure it with `ditile calibrate` under torchrun on all of "
            "them, or tell `ditile plan` which, such as --interlink 10Gbit"
        )
    if profile is None:
        raise PlanError(
            "this machine was not measured yet: run `ditile calibrate`, which takes some minutes, or name another one: "
            f"--profile FILE, or --hardware {', '.join(hardware.list_hardware())}"
        )
    if named_file is None and not profile.host_memory_bytes:
        # The profile was measured by a release that did not store the host's memory.
        profile = dataclasses.replace(profile, host_memory_bytes=cpus.count_memory_bytes())
    if ask.interlink is None:
        return profile
    return hardware.add_interlink(profile, ask.interlink)
