"""The answer of `ditile plan`, as a table and as JSON; `ditile.plan_for` returns its first plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch.distributed

from ditile.cache.config_text import parse_cache_line
from ditile.model.pipeline_calls import list_call_parameters
from ditile.plan.errors import PlanError
from ditile.plan.plan import FEW_STEPS, Plan
from ditile.plan.shape import fill_call_defaults
from ditile.plan.units import format_bytes, format_number
from ditile.planner import hardware
from ditile.planner.budget import choose, describe_setting, load_evaluation
from ditile.planner.memory import HostMemory, RankMemory, count_host_memory, count_rank_memory
from ditile.planner.price import Price
from ditile.planner.profile import Profile
from ditile.planner.question import PlanQuestion, load_machine_profile
from ditile.planner.search import (
    NearMiss,
    SearchRequest,
    SearchResult,
    predict_skipped_steps,
    price_given_plan,
    search_plans,
)
from ditile.planner.subject import PlanSubject
from ditile.runner.model_files import find_model_source
from ditile.runner.requests.console import is_writing_process, make_console, make_numbered_tables

if TYPE_CHECKING:
    from rich.table import Table

DTYPES_BY_SIZE = {2: "bfloat16", 4: "float32"}
"""Bytes of a number -> the type for which a machine's profile is."""
MOSTLY_DISTURBED = 0.5
"""A calibration of which a larger share was disturbed says little of the machine."""
OTHERS = {
    "packed": ("an approximation", "docs/traffic.md"),
    "references": ("an approximation", "docs/pipefusion.md"),
    "serial": ("auto knows no speed of links", "docs/pipefusion.md"),
}
"""Further plans of a result -> what they are, and the page that says more."""
ALIKE = 0.005
"""Plans whose latencies differ by a smaller share count as equally fast; a smaller part of a latency is not named."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What `ditile plan` found.

    Attributes:
        model, hardware, devices: those of the question.
        result: the prices, the fastest plan first.
        call: the call that is priced: `height` and `width` (pixels), `frames`, `steps`, `images`, `dtype`, `guidance`
            (None if the pipeline has none), `pictures` that are given, and tokens of `references` (None if it is not
            known how many).
        disturbed: the share of the machine's calibration that other processes slowed; 0 for a datasheet.
        uncounted: text encoders whose configs could not be read, so that no memory includes them.
        memories: of each plan, what each of its ranks needs.
        hosts: of each plan, what the ranks of a host need of its memory.
        host_memory_bytes: bytes of a host's memory; 0 if they are not known.
        models: transformers that are called in turns; memory has all of them on every rank.
    """

    model: str
    hardware: str
    devices: int
    result: SearchResult
    call: Mapping[str, Any]
    disturbed: float = 0.0
    uncounted: tuple[str, ...] = ()
    memories: tuple[tuple[RankMemory, ...], ...] = ()
    hosts: tuple[HostMemory, ...] = ()
    host_memory_bytes: int = 0
    models: int = 1

    def to_json_dict(self) -> dict[str, Any]:
        """The answer for programs."""
        missed = self.result.missed
        return {
            "model": self.model,
            "hardware": self.hardware,
            "devices": self.devices,
            "call": dict(self.call),
            "disturbed": self.disturbed,
            "legal": self.result.legal,
            "uncounted": list(self.uncounted),
            "host_memory_bytes": self.host_memory_bytes or None,
            "too_large": missed
            and {
                "plan": str(missed.price.plan),
                "latency_s": missed.price.latency_s,
                "lacks_bytes": missed.lacks,
                "memory_bytes": missed.price.memory_bytes,
                "why": describe_near_miss(missed, self.result.prices[0]),
            },
            "fewer_steps": self.result.fewer
            and {**self.result.fewer._asdict(), "why": describe_fewer_steps(self.result)},
            **{
                name: each
                and {
                    "plan": str(each.plan),
                    "latency_s": each.latency_s,
                    "bytes_per_step": each.bytes_per_step,
                    "why": describe_other_plan(name, each, self.result.prices[0]),
                }
                for name, each in self._list_others()
            },
            "plans": list(
                map(self._describe_price, range(len(self.result.prices)), explain_prices(self.result.prices))
            ),
        }

    def _describe_price(self, number: int, why: str) -> dict[str, Any]:
        """One of the plans for programs."""
        price = self.result.prices[number]
        return {
            "plan": str(price.plan),
            "latency_s": price.latency_s,
            "memory_bytes": price.memory_bytes,
            "bytes_per_step": price.bytes_per_step,
            "exposed_comm_s": price.exposed_s,
            "bubble_s": price.bubble_s,
            "compute_s": price.compute_s,
            "text_s": price.text_s,
            "decode_s": price.decode_s,
            "why": why,
            "memory_by_rank": [rank._asdict() | {"peak": rank.peak_bytes} for rank in self.memories[number]],
            "memory_of_host": self.hosts[number]._asdict(),
        }

    def describe_call(self) -> str:
        """What is priced, in one line."""
        call = self.call
        parts = [f"{call['width']} x {call['height']} px", f"{call['steps']} steps", str(call["dtype"])]
        parts += [] if call["frames"] == 1 else [f"{call['frames']} frames"]
        parts += [] if call["images"] == 1 else [f"{call['images']} images"]
        parts += [f"{call['references']} tokens of references"] if call["references"] else []
        parts += [] if call["guidance"] is None else [f"guidance {call['guidance']:g}"]
        return f"{self.model}, {', '.join(parts)}"

    def describe_choice(self) -> str:
        """The first plan, on one line, and on others what is wrong with the prediction."""
        best = self.result.prices[0]
        choice = f"planned: {best.plan} (predicted {format_number(best.latency_s)} s a loop on {self.hardware})"
        return "\n".join([choice, *self._list_warnings()])

    def to_json(self) -> str:
        """The same as `to_json_dict`, as text."""
        return json.dumps(self.to_json_dict(), indent=2)

    def render_tables(self) -> list[Table | str]:
        """The answer for people."""
        plans = "1 plan" if self.result.legal == 1 else f"{self.result.legal} plans searched"
        title = f"on {self.devices} x {self.hardware}: {plans}"
        if self.result.too_large:
            title += f", {len(self.result.too_large)} of the fastest too large"
        prices = self.result.prices
        labels = [f"{price.plan}\n{why}" for price, why in zip(prices, explain_prices(prices), strict=True)]
        columns = {
            "latency, s": [format_number(price.latency_s) for price in prices],
            "compute": [format_number(price.compute_s) for price in prices],
            "exposed": [format_number(price.exposed_s, 2) for price in prices],
            "bubble": [format_number(price.bubble_s, 2) for price in prices],
            "memory": [format_bytes(price.memory_bytes) for price in prices],
            "sent a step": [format_bytes(price.bytes_per_step) for price in prices],
        }
        parts = [self.describe_call(), title, *make_numbered_tables(labels, columns)]
        parts += [
            "GB of each rank under plan 1; keys are those of the step before",
            make_memory_table(self.memories[0]),
        ]
        if self.models > 1:
            parts.append(f"weights are those of {self.models} transformers, which are on the device all the time")
        if self.result.missed:
            parts.append("\n".join(wrap(f"too large: {describe_near_miss(self.result.missed, prices[0])}", 80)))
        best = prices[0]
        parts += ["\n".join(wrap(line, 80)) for line in self._describe_host_memory()]
        if self.call["steps"] <= FEW_STEPS:
            parts.append(
                f"the whole call under plan 1: {format_number(best.call_s)} s, text encoders "
                f"{format_number(best.text_s, 2)} of it and decode {format_number(best.decode_s, 2)}"
            )
        for name, other in self._list_others():
            if other is not None:
                parts.append("\n".join(wrap(describe_other_plan(name, other, best), 80)))
        if self.result.fewer:
            parts.append("\n".join(wrap(describe_fewer_steps(self.result), 80)))
        if count := self.call["pictures"]:
            tokens = ", and their tokens, if there are any" if self.call["references"] is None else ""
            what = f"what encodes them{tokens}"
            parts.append("\n".join(wrap(f"not in the seconds: the {count} picture(s) that it starts from: {what}", 80)))
        if self.uncounted:
            parts.append(f"not in the memory: {', '.join(self.uncounted)}, of which there is no config here")
        return [*parts, *self._list_warnings()]

    def _describe_host_memory(self) -> Iterator[str]:
        """What the first plan needs of a host's memory: where weights stay there, and where loading may not fit."""
        host = self.hosts[0]
        stays = self.result.prices[0].plan.offload == "blocks"
        is_short = 0 < self.host_memory_bytes < host.loading
        if stays:
            yield (
                "weights of blocks come from the host's memory, under what is computed: all ranks of a host keep "
                f"{format_bytes(host.kept)} there, pinned (docs/loading.md)"
            )
        if stays or is_short:
            there = f", and there are {format_bytes(self.host_memory_bytes)}" if is_short else ""
            yield (
                f"{'warning: ' if is_short else ''}while they load, the ranks of a host need up to "
                f"{format_bytes(host.loading)} of its memory{there}"
            )

    def _list_others(self) -> list[tuple[str, Price | None]]:
        """Plans that are none of those that are ranked; see `SearchResult`."""
        return [(name, getattr(self.result, name)) for name in OTHERS]

    def _list_warnings(self) -> list[str]:
        if self.disturbed <= MOSTLY_DISTURBED:
            return []
        return [
            f"warning: others slowed the cores in {self.disturbed:.0%} of the time in which {self.hardware} was "
            "measured; run `ditile calibrate` again when it is quiet"
        ]


def answer_question(ask: PlanQuestion, *, all_devices: bool = False) -> Answer:
    """The answer to a question.

    Args:
        ask: the question.
        all_devices: search only plans that use every device, as when the ranks were started already.

    Raises:
        PlanError: if no plan fits, or the plan to be priced does not.
        ModelError, LoadError: if the model cannot be planned for.
    """
    profile = load_machine_profile(ask)
    source = find_model_source(ask.model, weights=False)
    subject = PlanSubject.from_configs(ask.model, source, ["image"] if ask.image else [])
    call = ask.fill_call_arguments() | subject.bind_pictures(ask.read_pictures())
    plan = ask.priced_plan
    devices = ask.devices or (profile.devices if plan is None else plan.world)
    if devices % ask.hosts:
        raise PlanError(f"devices={devices} are not shared out evenly by hosts={ask.hosts}; give --devices")
    wanted = SearchRequest(
        devices=devices,
        hosts=ask.hosts,
        memory_bytes=None if ask.memory is None else hardware.parse_byte_amount(ask.memory),
        host_memory_bytes=None if ask.host_memory is None else hardware.parse_byte_amount(ask.host_memory),
        max_latency_s=ask.max_latency,
        warmup=ask.warmup,
        all_devices=all_devices,
    )
    cache = None if ask.cache is None else parse_cache_line(ask.cache)["cache_config"]
    skips = predict_skipped_steps(cache, subject.make_call_shape(call, profile.element_size).steps, ask.hit_rate)
    if plan is None:
        result = search_plans(subject, call, profile, wanted, skips)
    else:
        devices = plan.world
        result = price_given_plan(subject, call, profile, wanted, plan, skips)
    return Answer(
        ask.model,
        profile.name,
        devices,
        result,
        _describe_priced_call(subject, call, profile.element_size) | {"pictures": len(ask.image or ())},
        profile.disturbed,
        subject.uncounted,
        tuple(_list_rank_memories(subject, call, profile, price.plan) for price in result.prices),
        tuple(_count_host_memory(subject, call, profile, price.plan, wanted) for price in result.prices),
        wanted.host_memory_bytes or profile.host_memory_bytes,
        subject.models,
    )


def _count_host_memory(
    subject: PlanSubject, call: Mapping[str, Any], profile: Profile, plan: Plan, wanted: SearchRequest
) -> HostMemory:
    job = subject.make_plan_job(plan, subject.make_call_shape(call, profile.element_size))
    return count_host_memory(subject, job, wanted.devices // wanted.hosts)


def _list_rank_memories(
    subject: PlanSubject, call: Mapping[str, Any], profile: Profile, plan: Plan
) -> tuple[RankMemory, ...]:
    job = subject.make_plan_job(plan, subject.make_call_shape(call, profile.element_size))
    tokens = subject.count_text_tokens(call)
    return tuple(count_rank_memory(subject, job, profile, rank, tokens) for rank in range(plan.world))


def make_memory_table(memories: Sequence[RankMemory]) -> Table:
    """What ranks need, by kind, in 80 columns; ranks that need the same share a row."""
    from rich.table import Table

    table = Table("rank")
    for title in ("weights", "text", "VAE", "keys", "activations", "decode", "peak"):
        table.add_column(title, justify="right", no_wrap=True)
    ranks: dict[RankMemory, list[int]] = {}
    for rank, memory in enumerate(memories):
        ranks.setdefault(memory, []).append(rank)
    for memory, alike in ranks.items():
        parts = (memory.weights, memory.text, memory.vae, memory.keys, memory.activations, memory.decode)
        cells = [f"{size / 1e9:.2f}" for size in (*parts, memory.peak_bytes)]
        table.add_row(format_ranks(alike), *cells)
    return table


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as runs: 0, 2-5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _describe_priced_call(subject: PlanSubject, call: Mapping[str, Any], element_size: int) -> dict[str, Any]:
    """See `Answer.call`."""
    shape = subject.make_call_shape(call, element_size)
    config: Any = subject.transformer.config
    filled = fill_call_defaults(list_call_parameters(subject.pipeline), config, subject.vae_scale, call)
    scale = "true_cfg_scale" if "true_cfg_scale" in call else "guidance_scale"
    return {
        "height": shape.height,
        "width": shape.width,
        "frames": int(filled.get("num_frames", 1)),
        "steps": shape.steps,
        "images": shape.images,
        "dtype": DTYPES_BY_SIZE[element_size],
        "guidance": filled.get(scale),
        "references": shape.references,
    }


def plan_for(
    model: str = "shapes-pixart", *, min_psnr: float | None = None, evaluation: str | None = None, **asked: Any
) -> Plan:
    """The plan that is predicted to be the fastest for a model, on this machine as `ditile calibrate` measured it.

    The first rank prints it as one line on standard error.

    Args:
        model: a published model, a bundled one, a folder or a hub id.
        min_psnr: in dB. With it nothing is predicted: the plan is the fastest one without a cache that `ditile
            evaluate` measured with at least this PSNR; `devices` and `max_latency` are its upper bounds.
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
        measured = load_evaluation(model, evaluation)
        rows = [row for row in measured["settings"] if row["cache"] == "none"]
        row = choose(rows, min_psnr=min_psnr, max_latency=asked.get("max_latency"), world=asked.get("devices"))
        where = measured.get("measured", {}).get("machine", "another machine")
        _print_on_first_rank(f"picked: {describe_setting(row)}, as evaluated on {where}")
        return Plan.parse(row["plan"])
    known_words = [field.name for field in dataclasses.fields(PlanQuestion)]
    if unknown := sorted(set(asked) - set(known_words)):
        raise PlanError(f"{unknown[0]}= is nothing that a plan is asked for by; there are {', '.join(known_words)}")
    answered = answer_question(PlanQuestion(model=model, **asked))
    _print_on_first_rank(answered.describe_choice())
    return answered.result.prices[0].plan


def _print_on_first_rank(line: str) -> None:
    group = torch.distributed
    if is_writing_process() and not (group.is_available() and group.is_initialized() and group.get_rank() > 0):
        make_console(stderr=True).print(line, soft_wrap=True)


def explain_prices(prices: Sequence[Price]) -> Iterator[str]:
    """One phrase for each price: the parts of the first one's latency, and why each other plan is slower."""
    best = prices[0]
    yield f"the fastest: {describe_shares(best)}" if len(prices) > 1 else describe_shares(best)
    for price in prices[1:]:
        slower, more = price.latency_s / best.latency_s - 1, price.memory_bytes - best.memory_bytes
        if slower < ALIKE:
            yield f"as fast within {ALIKE:.1%}" + (f": {format_bytes(more)} more memory" if more > 0 else "")
            continue
        mine, others = _split_latency(price), _split_latency(best)
        name = max(mine, key=lambda kind: mine[kind] - others[kind])
        yield f"{slower:.0%} slower: {format_number(mine[name] - others[name], 2)} s more {name}"


def describe_shares(price: Price) -> str:
    """The share of compute in a latency, and the largest other part."""
    parts = _split_latency(price)
    share = {kind: parts[kind] / price.latency_s for kind in parts}
    name = max(("exposed communication", "bubble"), key=lambda kind: share[kind])
    return f"{share['compute']:.0%} compute, then {share[name]:.0%} {name}" if share[name] >= ALIKE else "all compute"


def describe_near_miss(missed: NearMiss, best: Price) -> str:
    """How fast a plan would be that does not fit, and the memory that it lacks."""
    price, faster = missed.price, 1 - missed.price.latency_s / best.latency_s
    would = f"{faster:.0%} faster" if faster >= ALIKE else "as fast as the first"
    lacks = f"lacks {format_bytes(missed.lacks)} a device"
    return f"'{price.plan}' would be {would}, {format_number(price.latency_s)} s, and {lacks}"


def describe_other_plan(name: str, other: Price, best: Price) -> str:
    """What an approximation, or another way to run synchronous steps, would save."""
    return (
        f"{OTHERS[name][0]}: '{other.plan}' would take {format_number(other.latency_s)} s, "
        f"{1 - other.latency_s / best.latency_s:.0%} less than plan 1 ({OTHERS[name][1]})"
    )


def describe_fewer_steps(result: SearchResult) -> str:
    """What one rank does in the time of the first plan, and which of both changes pictures less."""
    fewer, best = result.fewer, result.prices[0]
    if fewer is None:
        return ""
    times = f"{fewer.steps} of {fewer.all_steps} steps on one rank take {format_number(fewer.seconds)} s"
    whole = f"plan 1 takes {format_number(best.call_s)} s on {best.plan.world} ranks"
    if fewer.is_better:
        return f"{times}, and {whole}: the better bargain, which changes pictures less (docs/pipefusion.md)"
    return f"{times}, and {whole} and changes pictures less (docs/pipefusion.md)"


def _split_latency(price: Price) -> dict[str, float]:
    return {"compute": price.compute_s, "exposed communication": price.exposed_s, "bubble": price.bubble_s}
