"""`ditile plan`: the question, and its answer as a table, as words and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from ditile.cache.line import configs_of
from ditile.distributed import env
from ditile.distributed.console import console, writes
from ditile.errors import ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.plan.units import amount, rounded
from ditile.planner import hardware
from ditile.planner.budget import choose, described, stored
from ditile.planner.caches import expected
from ditile.planner.price import Price
from ditile.planner.profile import Profile
from ditile.planner.question import Ask
from ditile.planner.search import Found, Missed, Wanted, priced, search
from ditile.planner.subject import CONFIGS, Subject, known
from ditile.runner.load import defaults, find

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 8
ALIKE = 0.005
"""Plans whose latencies differ by less are as fast as each other; of a latency, a part that is not worth a word."""


def machine(ask: Ask) -> Profile:
    """The profile that is asked about.

    Raises:
        PlanError: if there is none.
        ModelError: if a file is none.
    """
    if ask.hardware is not None:
        return hardware.profile(ask.hardware, ask.interlink)
    path = Path(ask.profile) if ask.profile is not None else env.profile()
    found = Profile.read(path) if ask.profile is not None or path.exists() else None
    if ask.hosts > 1 and ask.interlink is None and (found is None or found.interlink is None):
        raise PlanError(
            f"hosts={ask.hosts} are joined by a link; measure it with `ditile calibrate` under torchrun on all of "
            "them, or tell `ditile plan` which, such as --interlink 10Gbit"
        )
    if found is None:
        raise PlanError(
            "this machine was not measured yet: run `ditile calibrate`, or name one with --hardware; "
            f"known are {', '.join(hardware.known())}"
        )
    return found if ask.interlink is None else hardware.joined(found, ask.interlink)


def called(ask: Ask) -> dict[str, Any]:
    """The arguments of the call, the model's own where none are given."""
    own = _published(ask.model) if ask.model in known() else defaults(ask.model)
    given = {
        "height": ask.height, "width": ask.width or ask.height, "num_inference_steps": ask.steps,
        "guidance_scale": ask.guidance, "num_frames": ask.frames,
    }  # fmt: skip
    prompt = {"prompt": "a prompt", "num_images_per_prompt": ask.num_images}
    return own | prompt | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Answer:
    """Prices, the best first; `uncounted` text encoders, whose configs could not be read, are in no memory."""

    model: str
    hardware: str
    devices: int
    found: Found
    uncounted: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "model": self.model, "hardware": self.hardware, "devices": self.devices, "legal": self.found.legal,
            "uncounted": list(self.uncounted), "too_large": self._missed(),
            "plans": [
                {
                    "plan": str(price.plan), "latency_s": price.latency_s, "memory_bytes": price.memory_bytes,
                    "bytes_per_step": price.bytes_per_step, "exposed_comm_s": price.exposed_s,
                    "bubble_s": price.bubble_s, "compute_s": price.compute_s, "why": why,
                }
                for price, why in zip(self.found.prices, reasons(self.found.prices), strict=True)
            ],
        }  # fmt: skip

    def _missed(self) -> dict[str, Any] | None:
        """The plan that is missed most for want of memory."""
        missed = self.found.missed
        return missed and {
            "plan": str(missed.price.plan), "latency_s": missed.price.latency_s, "lacks_bytes": missed.lacks,
            "memory_bytes": missed.price.memory_bytes, "why": missed_by(missed, self.found.prices[0]),
        }  # fmt: skip

    def choice(self) -> str:
        """The first plan, on one line."""
        best = self.found.prices[0]
        return f"planned: {best.plan} (predicted {rounded(best.latency_s)} s a loop on {self.hardware})"

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.as_dict(), indent=2)

    def as_table(self) -> Table:
        """For people."""
        from rich.table import Table

        plans = "1 plan" if self.found.legal == 1 else f"{self.found.legal} plans searched"
        title = f"{self.model} on {self.devices} x {self.hardware}: {plans}"
        if self.found.too_large:
            title += f", {len(self.found.too_large)} of the fastest too large"
        shown = Table("plan", "latency, s", "compute", "exposed", "bubble", "memory", "sent a step", "why", title=title)
        lines = [f"too large: {missed_by(self.found.missed, self.found.prices[0])}"] if self.found.missed else []
        if self.uncounted:
            lines.append(f"not in the memory: {', '.join(self.uncounted)}, of which there is no config here")
        shown.caption = "\n".join(lines) or None
        prices = self.found.prices[:SHOWN]
        for price, why in zip(prices, reasons(prices), strict=True):
            shown.add_row(
                str(price.plan), rounded(price.latency_s), rounded(price.compute_s), rounded(price.exposed_s, 2),
                rounded(price.bubble_s, 2), amount(price.memory_bytes), amount(price.bytes_per_step), why,
            )  # fmt: skip
        return shown


def answer(ask: Ask, *, all_devices: bool = False) -> Answer:
    """The answer to a question.

    Args:
        ask: the question.
        all_devices: only plans that use every device: the ranks that are there already.

    Raises:
        PlanError: if no plan fits, or the priced one does not.
        ModelError, LoadError: if the model cannot be planned for.
    """
    profile, source = machine(ask), CONFIGS / ask.model if ask.model in known() else _found(ask.model)
    call = called(ask)
    subject = Subject.of(ask.model, source)
    plan = None if ask.price is None else Plan.parse(ask.price)
    devices = ask.devices or (profile.devices if plan is None else plan.world)
    if devices % ask.hosts:
        raise PlanError(f"devices={devices} are not shared out evenly by hosts={ask.hosts}; give --devices")
    wanted = Wanted(
        devices=devices, hosts=ask.hosts, memory_bytes=None if ask.memory is None else hardware.amount(ask.memory),
        max_latency_s=ask.max_latency, warmup=1 if ask.warmup is None else ask.warmup, all_devices=all_devices,
    )  # fmt: skip
    cache = None if ask.cache is None else configs_of(ask.cache)["cache_config"]
    left = expected(cache, subject.shape(call, profile.element_size).steps, ask.hit_rate)
    if plan is None:
        found = search(subject, call, profile, wanted, left)
    else:
        devices, found = plan.world, Found((priced(subject, call, profile, wanted, plan, left),), (), 1)
    return Answer(ask.model, profile.name, devices, found, subject.uncounted)


def plan_for(
    model: str = "shapes-pixart", *, min_psnr: float | None = None, evaluation: str | None = None, **asked: Any
) -> Plan:
    """The plan that is predicted to be the fastest for a model, on this machine as `ditile calibrate` measured it.

    The first rank says it in one line on standard error.

    Args:
        model: a published model, a bundled one, a folder or a hub id.
        min_psnr: in dB: instead, the fastest plan without a cache that was evaluated (`ditile evaluate`) with at least
            that; `devices` and `max_latency` are its upper bounds.
        evaluation: the folder of that evaluation; the one that comes with the model by default.
        asked: `height`, `width`, `steps`, `guidance`, `num_images`, `hardware`, `devices`, `memory` and the others of
            `ditile plan`.

    Raises:
        PlanError: if the machine was not measured and none is named, no plan fits it or the quality, or a word of the
            question is not known.
        ModelError, LoadError: if the model cannot be planned for, or was not evaluated.
    """
    if min_psnr is not None:
        if others := sorted(set(asked) - {"devices", "max_latency"}):
            raise PlanError(f"min_psnr={min_psnr:g} asks an evaluation, which has no {others[0]}; leave it out")
        found = stored(model, evaluation)
        rows = [row for row in found["settings"] if row["cache"] == "none"]
        row = choose(rows, min_psnr=min_psnr, max_latency=asked.get("max_latency"), world=asked.get("devices"))
        where = found.get("measured", {}).get("machine", "another machine")
        _say(f"picked: {described(row)}, as evaluated on {where}")
        return Plan.parse(row["plan"])
    known_words = [field.name for field in dataclasses.fields(Ask)]
    if unknown := sorted(set(asked) - set(known_words)):
        raise PlanError(f"{unknown[0]}= is nothing that a plan is asked for by; there are {', '.join(known_words)}")
    answered = answer(Ask(model=model, **asked))
    _say(answered.choice())
    return answered.found.prices[0].plan


def _say(line: str) -> None:
    group = torch.distributed
    if writes() and not (group.is_available() and group.is_initialized() and group.get_rank() > 0):
        console(stderr=True).print(line, soft_wrap=True)


def reasons(prices: Sequence[Price]) -> Iterator[str]:
    """What the first is made of, and why each other is not the first."""
    best = prices[0]
    yield f"the fastest: {made_of(best)}" if len(prices) > 1 else made_of(best)
    for price in prices[1:]:
        slower, more = price.latency_s / best.latency_s - 1, price.memory_bytes - best.memory_bytes
        if slower < ALIKE:
            yield f"as fast within {ALIKE:.1%}" + (f": {amount(more)} more memory" if more > 0 else "")
            continue
        mine, others = _parts(price), _parts(best)
        name = max(mine, key=lambda kind: mine[kind] - others[kind])
        yield f"{slower:.0%} slower: {rounded(mine[name] - others[name], 2)} s more {name}"


def made_of(price: Price) -> str:
    """The share of compute, and the largest part beside it."""
    parts = _parts(price)
    share = {kind: parts[kind] / price.latency_s for kind in parts}
    name = max(("exposed communication", "bubble"), key=lambda kind: share[kind])
    return f"{share['compute']:.0%} compute, then {share[name]:.0%} {name}" if share[name] >= ALIKE else "all compute"


def missed_by(missed: Missed, best: Price) -> str:
    """What is missed for want of memory."""
    price, faster = missed.price, 1 - missed.price.latency_s / best.latency_s
    would = f"{faster:.0%} faster" if faster >= ALIKE else "as fast as the first"
    return f"'{price.plan}' would be {would}, {rounded(price.latency_s)} s, and lacks {amount(missed.lacks)} a device"


def _parts(price: Price) -> dict[str, float]:
    return {"compute": price.compute_s, "exposed communication": price.exposed_s, "bubble": price.bubble_s}


def _found(model: str) -> Any:
    try:
        return find(model, weights=False)
    except ModelError as error:
        raise ModelError(f"{error}; published models that can be planned for: {', '.join(known())}") from error


def _published(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / model / "generation.json").read_text("utf-8"))
    return found
