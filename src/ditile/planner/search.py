"""Searches the plans for a model, a call and a machine, the fastest first.

Degrees are divisors of the ranks; the patches of each stage are 1, 2 or 4. A formula sorts the plans. In that order
memory is counted until enough plans fit, and these are simulated. `predict_skipped_steps` applies the rules of a cache
to the steps before anything is measured.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ditile.cache.build import build_skip_rules
from ditile.cache.config import DBCacheConfig
from ditile.cache.skip_rules import DecisionRecord, RuleVerdict
from ditile.plan.cost import PlannedCall
from ditile.plan.errors import PlanError
from ditile.plan.plan import AUTO, AXES, FEW_STEPS, SEQUENCE, Plan
from ditile.plan.shape import Shape
from ditile.planner.memory import count_host_memory, count_peak_bytes
from ditile.planner.ops import CacheSkips
from ditile.planner.price import Price, Pricer
from ditile.planner.profile import Profile
from ditile.planner.seconds import compute_decode_seconds, compute_text_seconds
from ditile.planner.subject import PlanSubject

MOST_PATCHES = 32
SHOWN = 8
"""The number of plans that a search returns."""
SIFTED = 2 * SHOWN
"""The number of plans for which other kinds of warmup are tried."""
SIFTED_OF_FEW_STEPS = 8 * SIFTED
"""The same of a call of few steps, of which synchronous ones are a large part."""
LAST = 10**9
"""In the order of a search, behind all plans."""
ABOVE = 1.01
"""The formula's latency is at most this times that of the simulation."""
WORTH = 1.05
"""A second synchronous step that stages share is taken if the loop then takes at most this times as long."""
CLOSE_STEPS = 0.75
"""The share of its steps from which a few-step model draws more alike than with stale keys."""
APPROXIMATE_GAIN = 0.05
"""Approximations are proposed where they save this share of a loop."""
ROWS_GAIN = 0.02
"""The decode is divided by rows where that saves this share of a call of few steps."""
FACTORS = (1, 2, 4)
"""Patches for each stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """The bounds of a search.

    Attributes:
        devices: ranks at most, over all hosts.
        hosts: the number of hosts.
        memory_bytes: memory of a device; by default that of the profile.
        host_memory_bytes: memory of a host; by default that of the profile, if it is known.
        max_latency_s: plans that take longer are left out.
        warmup: synchronous steps of plans with stale keys; None is one, or as many as cost hardly more.
        all_devices: only plans that use every device.
        offload: of all plans; "blocks" where nothing else fits.
    """

    devices: int
    hosts: int = 1
    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    max_latency_s: float | None = None
    warmup: int | None = None
    all_devices: bool = False
    offload: Literal["none", "blocks"] = "none"


@dataclass(frozen=True, slots=True)
class HostBound:
    """What a host has for its ranks, and the plans that it has too little memory for.

    Attributes:
        ranks: how many they are.
        memory_bytes: of the host; 0 if they are not known.
        rejected: bytes that are too many, and the plan.
    """

    ranks: int
    memory_bytes: int
    rejected: list[tuple[int, Plan]] = field(default_factory=list)

    @classmethod
    def from_request(cls, wanted: SearchRequest, profile: Profile) -> HostBound:
        """The bound of a search on a machine."""
        return cls(wanted.devices // wanted.hosts, wanted.host_memory_bytes or profile.host_memory_bytes)

    def accepts(self, subject: PlanSubject, job: PlannedCall) -> bool:
        """Whether the weights that stay in the host's memory fit it, as far as it is known; if not, that is noted."""
        if job.plan.offload == "none" or not self.memory_bytes:
            return True
        excess = count_host_memory(subject, job, self.ranks).kept - self.memory_bytes
        if excess > 0:
            self.rejected.append((excess, job.plan))
        return excess <= 0

    def make_error(self) -> PlanError | None:
        """What is said of the rejected plan that needs least; None if none was rejected."""
        if not self.rejected:
            return None
        excess, plan = min(self.rejected, key=lambda each: each[0])
        remedy = "quantize, or a smaller model"
        if plan.world > plan.pipefusion * plan.tensor:
            remedy = "divide them over the ranks of a host by pipefusion or tensor, quantize, or a smaller model"
        return PlanError(
            f"'{plan}' keeps {_format_gigabytes(self.memory_bytes + excess)} of weights in the host's memory, and "
            f"there are {_format_gigabytes(self.memory_bytes)}; more of it, {remedy}"
        )


class SizedJob(NamedTuple):
    """A call under a plan, and the bytes of the rank that needs most."""

    job: PlannedCall
    memory: int


class NearMiss(NamedTuple):
    """A plan that does not fit, and the bytes that a device lacks for it."""

    price: Price
    lacks: int


class FewerSteps(NamedTuple):
    """A call of one rank with fewer steps.

    Attributes:
        steps, all_steps: of it, and of the call that was asked for.
        seconds: of the whole call.
    """

    steps: int
    all_steps: int
    seconds: float

    @property
    def is_better(self) -> bool:
        """Whether pictures change less by it than by stale keys, as measured at four steps (docs/pipefusion.md)."""
        return self.steps >= CLOSE_STEPS * self.all_steps


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        prices: of the plans that fit, the fastest first.
        too_large: the plans that need more memory than there is, the fastest first; only plans that were looked at
            before enough fitted (all plans, if none fits).
        legal: how many plans were searched: all that the model and the call allow.
        missed: the fastest of `too_large`, if it would be as fast as the first plan that fits.
        fewer: fewer steps on one rank that are as fast as the first plan, if it is one of few steps and of stale keys.
        packed: the fastest of these plans with messages in eight bits a number, where that saves `APPROXIMATE_GAIN`.
        references: the fastest of them with references in synchronous steps alone, where that saves as much.
        serial: a given plan whose `warmup_mode` is auto with serial in its place, where that is faster here.
    """

    prices: tuple[Price, ...]
    too_large: tuple[SizedJob, ...]
    legal: int
    missed: NearMiss | None = None
    fewer: FewerSteps | None = None
    packed: Price | None = None
    references: Price | None = None
    serial: Price | None = None


class _PlanEstimate(NamedTuple):
    """A plan that is sorted by the formula's seconds, and then by the order of the search.

    Attributes:
        is_whole: whether the formula was computed to its end; if not, the latency is at least these seconds.
        memory: bytes of the rank that needs most, once they are counted.
    """

    seconds: float
    order: int
    job: PlannedCall
    is_whole: bool = True
    memory: int = 0

    def to_sized_job(self) -> SizedJob:
        """The plan with its bytes."""
        return SizedJob(self.job, self.memory)


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off: a search makes many objects, and each collection would scan all of torch's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_pause_garbage_collection()
def search_plans(
    subject: PlanSubject,
    call: Mapping[str, Any],
    profile: Profile,
    wanted: SearchRequest,
    skips: CacheSkips | None = None,
) -> SearchResult:
    """The fastest of all legal plans that fit, with their prices.

    Raises:
        PlanError: if no plan fits the memory or the latency.
    """
    shape = subject.make_call_shape(call, profile.element_size)
    pricer = make_pricer(subject, call, profile, wanted.devices // wanted.hosts)
    space, limit = wanted.memory_bytes or profile.memory_bytes, wanted.max_latency_s
    queue, too_large = _queue_by_estimate(subject, shape, pricer, wanted, skips), list[_PlanEstimate]()
    host = HostBound.from_request(wanted, profile)
    legal = len(queue)

    def iterate_fitting_plans() -> Iterator[_PlanEstimate]:
        while queue:
            first = heapq.heappop(queue)
            if not first.is_whole:
                heapq.heappush(queue, first._replace(seconds=pricer.estimate_latency(first.job, skips), is_whole=True))
                continue
            job, memory = fit_plan_to_memory(subject, shape, pricer, first.job.plan, space)
            candidate = first._replace(job=job, memory=memory)
            if memory > space:
                too_large.append(candidate)
            elif host.accepts(subject, job):
                yield candidate

    in_order = iterate_fitting_plans()
    sifted = list(itertools.islice(in_order, SIFTED if shape.steps > FEW_STEPS else SIFTED_OF_FEW_STEPS))
    sifted += _try_other_warmups(subject, pricer, sifted, wanted.warmup, space, skips)
    fits = _select_fastest(pricer, heapq.merge(sorted(sifted), in_order), skips)
    if not fits and wanted.offload == "none":
        return search_plans(subject, call, profile, replace(wanted, offload="blocks"), skips)
    if not fits:
        raise host.make_error() or _make_memory_error(too_large, space)
    fits = [complete_price(subject, pricer, call, price, shape, space) for price in fits]
    if shape.steps <= FEW_STEPS:
        fits.sort(key=lambda price: price.call_s)
    kept = [price for price in fits if limit is None or price.latency_s <= limit]
    if not kept:
        raise _make_latency_error(fits[0], limit)
    missed = _find_near_miss(pricer, too_large[0], kept[0], space, skips) if too_large else None
    lesser = find_fewer_steps(subject, pricer, call, shape, space, kept[0])
    unfit = map(_PlanEstimate.to_sized_job, too_large)
    packed = find_packed_messages(subject, pricer, shape, kept, skips)
    left_out = find_left_out_references(subject, pricer, shape, kept, space, skips)
    return SearchResult(tuple(kept), tuple(unfit), legal, missed, lesser, packed, left_out)


def _try_other_warmups(
    subject: PlanSubject,
    pricer: Pricer,
    sifted: list[_PlanEstimate],
    warmup: int | None,
    space: int,
    skips: CacheSkips | None,
) -> list[_PlanEstimate]:
    """The estimates of plans that fit, with their synchronous steps run otherwise; behind all others in the order."""
    tried = list[_PlanEstimate]()
    for candidate in sifted:
        for plan in iterate_other_warmups(subject, pricer, candidate.job, warmup, skips):
            job, memory = fit_plan_to_memory(subject, candidate.job.shape, pricer, plan, space)
            if memory <= space:
                order = LAST + len(tried)
                tried.append(_PlanEstimate(pricer.estimate_latency(job, skips), order, job, memory=memory))
    return tried


def _make_latency_error(fastest: Price, limit: float | None) -> PlanError:
    return PlanError(
        f"no plan takes at most {limit:g} s: the fastest, '{fastest.plan}', takes {fastest.latency_s:.3g} s; "
        "use more devices, fewer steps or a cache"
    )


def _make_memory_error(too_large: Sequence[_PlanEstimate], space: int) -> PlanError:
    smallest = min(too_large, key=lambda rough: (rough.memory, rough.order))
    return PlanError(
        f"no plan fits {_format_gigabytes(space)} a device: '{smallest.job.plan}' needs least, "
        f"{_format_gigabytes(smallest.memory)}, {_format_gigabytes(smallest.memory - space)} more; "
        "use more devices, quantize, or a smaller picture"
    )


def price_single_plan(
    subject: PlanSubject,
    call: Mapping[str, Any],
    profile: Profile,
    wanted: SearchRequest,
    plan: Plan,
    skips: CacheSkips | None = None,
) -> Price:
    """The price of one plan, without variants that need less memory.

    Raises:
        PlanError: if it does not fit the model, the devices, the memory or the latency.
    """
    if plan.world > wanted.devices:
        raise PlanError(f"'{plan}' needs {plan.world} devices, and there are devices={wanted.devices}")
    job = subject.make_plan_job(plan, subject.make_call_shape(call, profile.element_size))
    pricer = make_pricer(subject, call, profile, wanted.devices // wanted.hosts)
    memory, space = count_peak_bytes(subject, job, profile, pricer.text_tokens), wanted.memory_bytes
    if memory > (space := space or profile.memory_bytes):
        needs, there = _format_gigabytes(memory), _format_gigabytes(space)
        raise PlanError(f"'{plan}' needs {needs} a device, and there are {there}")
    host = HostBound.from_request(wanted, profile)
    if not host.accepts(subject, job) and (error := host.make_error()):
        raise error
    price, limit = pricer.price_call(job, skips, memory), wanted.max_latency_s
    price = complete_price(subject, pricer, call, price, job.shape, space, may_divide=False)
    if limit is not None and price.latency_s > limit:
        raise PlanError(f"'{plan}' takes {price.latency_s:.3g} s, and max_latency={limit:g}")
    return price


def price_given_plan(
    subject: PlanSubject,
    call: Mapping[str, Any],
    profile: Profile,
    wanted: SearchRequest,
    plan: Plan,
    skips: CacheSkips | None = None,
) -> SearchResult:
    """The price of one plan; with warmup_mode=auto, which knows no links, that of as many serial steps beside it.

    Raises:
        PlanError: as of `price_single_plan`.
    """
    price, serial = price_single_plan(subject, call, profile, wanted, plan, skips), None
    resolved = plan.resolve_warmup(streams=subject.streams_weights)
    if plan.warmup_mode == AUTO and resolved.warmup_mode != "serial":
        pricer = make_pricer(subject, call, profile, wanted.devices // wanted.hosts)
        shape = subject.make_call_shape(call, profile.element_size)
        in_turn = pricer.price_call(subject.make_plan_job(replace(resolved, warmup_mode="serial"), shape), skips)
        serial = in_turn if in_turn.latency_s < price.latency_s else None
    return SearchResult((price,), (), 1, serial=serial)


def fit_plan_to_memory(subject: PlanSubject, shape: Shape, pricer: Pricer, plan: Plan, space: int) -> SizedJob:
    """The plan, or a variant under which a call fits a device; if none fits, the one that needs the least memory.

    The variants divide the decode by rows, share out the text encoders, or do both.
    """

    def size_plan_variant(**also: Any) -> SizedJob:
        job = subject.make_plan_job(replace(plan, **also) if also else plan, shape)
        return SizedJob(job, count_peak_bytes(subject, job, pricer.profile, pricer.text_tokens))

    unchanged = size_plan_variant()
    if unchanged.memory <= space or plan.world == 1 or not subject.memory_saving_options:
        return unchanged
    smallest = size_plan_variant(**dict(subject.memory_saving_options))
    if smallest.memory > space:
        return min(unchanged, smallest, key=lambda each: each.memory)
    either = (size_plan_variant(**{name: value}) for name, value in subject.memory_saving_options)
    return next((one for one in either if one.memory <= space), smallest)


def _format_gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _queue_by_estimate(
    subject: PlanSubject, shape: Shape, pricer: Pricer, wanted: SearchRequest, skips: CacheSkips | None
) -> list[_PlanEstimate]:
    """Every plan, as a heap; the formula stops for plans that are slower than the fastest ones so far."""
    estimates, least = list[_PlanEstimate](), [math.inf] * SIFTED
    for order, plan in enumerate(iterate_plans(subject, shape, wanted)):
        job, most = subject.make_plan_job(plan, shape), least[-1]
        seconds = pricer.estimate_latency(job, skips, most)
        estimates.append(_PlanEstimate(seconds, order, job, seconds <= most))
        bisect.insort(least, seconds)
        least.pop()
    heapq.heapify(estimates)
    return estimates


def _select_fastest(pricer: Pricer, rough: Iterable[_PlanEstimate], skips: CacheSkips | None) -> list[Price]:
    """The fastest plans in order; a plan is simulated unless its formula alone says that it is too slow."""
    fastest: list[Price] = []
    for each in rough:
        if len(fastest) >= SHOWN and each.seconds > ABOVE * fastest[SHOWN - 1].latency_s:
            break
        price = pricer.price_call(each.job, skips, each.memory)
        bisect.insort(fastest, price, key=lambda known: known.latency_s)
    return fastest[:SHOWN]


def _find_near_miss(
    pricer: Pricer, nearest: _PlanEstimate, best: Price, space: int, skips: CacheSkips | None
) -> NearMiss | None:
    """`nearest`, the fastest plan that does not fit, if it is as fast as the best one in the simulation too."""
    if nearest.seconds > ABOVE * best.latency_s:
        return None
    price = pricer.price_call(nearest.job, skips, nearest.memory)
    return NearMiss(price, nearest.memory - space) if price.latency_s <= best.latency_s else None


def make_pricer(subject: PlanSubject, call: Mapping[str, Any], profile: Profile, host: int | None = None) -> Pricer:
    """The pricer of a model's calls; `host` is the number of ranks on a host, None if there is one host."""
    return Pricer(subject.transformer_work, profile, subject.count_text_tokens(call), host)


def iterate_plans(subject: PlanSubject, shape: Shape, wanted: SearchRequest) -> Iterator[Plan]:
    """Every plan that the model and the call allow, on all devices or, unless `all_devices`, on a divisor of them."""
    facts = shape.collect_facts(type(subject.transformer).__name__, len(subject.block_hooks.chain))
    for world in [wanted.devices] if wanted.all_devices else list_divisors(wanted.devices):
        for degrees in _iterate_degrees(world, shape):
            for more in _iterate_patch_counts(degrees, 1 if wanted.warmup is None else wanted.warmup):
                plan = Plan(**degrees, **more, offload=wanted.offload)
                if subject.can_run_plan(plan) and not plan.illegal(facts):
                    yield plan


def _iterate_degrees(world: int, shape: Shape) -> Iterator[dict[str, Any]]:
    """Degrees whose product is `world`. DistriFusion excludes PipeFusion and ring."""
    branches = shape.branches_per_call * shape.calls
    for factors in _iterate_products(world, len(AXES)):
        degrees = dict(zip(AXES, factors, strict=True))
        if degrees["cfg"] > min(branches, 2) or degrees["data"] > shape.images or shape.heads % degrees["tensor"]:
            continue
        if degrees["distrifusion"] == 1 or degrees["pipefusion"] == degrees["ring"] == 1:
            yield degrees


def _iterate_products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """A number as a product of so many factors, in every order."""
    if factors == 1:
        yield (number,)
        return
    for first in list_divisors(number):
        for others in _iterate_products(number // first, factors - 1):
            yield first, *others


def _iterate_patch_counts(degrees: Mapping[str, int], warmup: int) -> Iterator[dict[str, Any]]:
    stages = degrees["pipefusion"]
    if stages == 1:
        yield {"warmup": warmup} if degrees["distrifusion"] > 1 else {}
        return
    for factor in FACTORS:
        if stages * factor <= MOST_PATCHES:
            yield {"patches": stages * factor, "warmup": warmup}


def iterate_other_warmups(
    subject: PlanSubject, pricer: Pricer, job: PlannedCall, warmup: int | None, skips: CacheSkips | None
) -> Iterator[Plan]:
    """The plan with the other ways to run its synchronous steps that could make them shorter.

    `warmup` is how many there must be; None lets the stages that share them take another one where it costs little.
    """
    plan = job.plan
    if plan.pipefusion == 1 or plan.warmup == 0:
        return
    if job.shape.divide_batch(plan).batch > 1:
        yield replace(plan, warmup_mode="pipelined")
    if plan.token_ranks * plan.tensor > 1 or not subject.streams_weights:
        return
    asked, chosen = replace(plan, warmup_mode="sequence"), replace(plan, warmup_mode=AUTO)
    if chosen.resolve_warmup() == asked:
        yield chosen
        return
    seconds = [
        pricer.estimate_latency(subject.make_plan_job(each, job.shape), skips) if warmup is None else math.inf
        for each in (asked, chosen)
    ]
    yield chosen if seconds[1] <= WORTH * seconds[0] < math.inf else asked


def complete_price(
    subject: PlanSubject,
    pricer: Pricer,
    call: Mapping[str, Any],
    price: Price,
    shape: Shape,
    space: int,
    *,
    may_divide: bool = True,
) -> Price:
    """The price of a call of few steps with text and decode, which may be divided where that pays."""
    if shape.steps > FEW_STEPS:
        return price
    plan, profile = price.plan, pricer.profile
    images = math.ceil(shape.images / plan.data)
    pixels = images * shape.height * shape.width // subject.vae_scale**2
    text = compute_text_seconds(subject.text, subject.count_prompt_tokens(call, shape), profile)

    def compute_seconds(ranks: int) -> float:
        return compute_decode_seconds(subject.count_decode_work(shape.frames), pixels, ranks, profile)

    ranks = plan.world // plan.data
    whole, divided = compute_seconds(1), compute_seconds(ranks)
    done = replace(price, text_s=text, decode_s=divided if plan.vae == "rows" else whole)
    if not may_divide or not subject.divides_decode:
        return done
    if plan.vae == "rows" or whole - divided < ROWS_GAIN * done.call_s:
        return done
    by_rows = replace(plan, vae="rows")
    memory = count_peak_bytes(subject, subject.make_plan_job(by_rows, shape), profile, pricer.text_tokens)
    return replace(done, plan=by_rows, decode_s=divided, memory_bytes=memory) if memory <= space else done


def find_fewer_steps(
    subject: PlanSubject, pricer: Pricer, call: Mapping[str, Any], shape: Shape, space: int, best: Price
) -> FewerSteps | None:
    """The most steps that one rank makes in the time of a plan with stale keys; None if that is none."""
    plan = best.plan
    if shape.steps > FEW_STEPS or plan.world == 1 or not plan.attends_to_stale_keys:
        return None
    for steps in range(shape.steps - 1, 0, -1):
        job = subject.make_plan_job(Plan(), replace(shape, steps=steps))
        if count_peak_bytes(subject, job, pricer.profile, pricer.text_tokens) > space:
            return None
        price = complete_price(subject, pricer, call, pricer.price_call(job), job.shape, space)
        if price.call_s <= best.call_s:
            return FewerSteps(steps, shape.steps, price.call_s)
    return None


def find_packed_messages(
    subject: PlanSubject, pricer: Pricer, shape: Shape, prices: Sequence[Price], skips: CacheSkips | None = None
) -> Price | None:
    """The fastest of some plans if messages have eight bits a number; None where that saves little.

    It is an approximation, so it is proposed and never taken.
    """
    fastest: Price | None = None
    for price in prices:
        if any(getattr(price.plan, name) > 1 for name in ("pipefusion", *SEQUENCE)) and price.plan.wire_dtype is None:
            job = subject.make_plan_job(replace(price.plan, wire_dtype="int8"), shape)
            packed = pricer.price_call(job, skips, price.memory_bytes)
            fastest = packed if fastest is None or packed.latency_s < fastest.latency_s else fastest
    return _keep_gain(fastest, prices[0])


def find_left_out_references(
    subject: PlanSubject,
    pricer: Pricer,
    shape: Shape,
    prices: Sequence[Price],
    space: int,
    skips: CacheSkips | None = None,
) -> Price | None:
    """The fastest of some plans if references are computed in synchronous steps alone; None where that saves little.

    It is an approximation, so it is proposed and never taken.
    """
    fastest: Price | None = None
    facts = shape.collect_facts(type(subject.transformer).__name__, len(subject.block_hooks.chain))
    for price in prices if shape.references else ():
        patches = 2 if price.plan.pipefusion * price.plan.distrifusion == 1 else None
        warmup = price.plan.warmup if price.plan.warmup == AUTO else max(price.plan.warmup, 1)
        plan = replace(price.plan, references=0, patches=patches, warmup=warmup)
        if plan.illegal(facts) or not subject.can_run_plan(plan):
            continue
        job, memory = fit_plan_to_memory(subject, shape, pricer, plan, space)
        if memory <= space:
            without = pricer.price_call(job, skips, memory)
            fastest = without if fastest is None or without.latency_s < fastest.latency_s else fastest
    return _keep_gain(fastest, prices[0])


def _keep_gain(approximate: Price | None, best: Price) -> Price | None:
    """The price of an approximation that is worth to be proposed beside the best plan without; else None."""
    is_worth = approximate is not None and approximate.latency_s < (1 - APPROXIMATE_GAIN) * best.latency_s
    return approximate if is_worth else None


def list_divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]


def predict_skipped_steps(config: DBCacheConfig | None, steps: int, hit_rate: float | None = None) -> CacheSkips:
    """The steps that a cache leaves out.

    Args:
        config: the cache; None leaves nothing out.
        steps: of the generation.
        hit_rate: the share, from 0 to 1, that is left out of the steps whose difference is measured. Caches whose rules
            alone decide (a threshold of 1, a static mask) need none.

    Raises:
        PlanError: if the cache measures differences and no hit rate is given.
    """
    if config is None:
        return CacheSkips()
    rules, record, hits = build_skip_rules(config, steps), DecisionRecord(), 0.0
    for step in range(steps):
        verdict = RuleVerdict.COMPUTE if rules.never_skips else rules.decide_without_difference(step, record)
        if verdict is RuleVerdict.MEASURE:
            if hit_rate is None:
                raise PlanError(
                    f"a threshold of {rules.threshold:g} decides by what it measures; say which share of those "
                    "steps it is expected to leave out, such as --hit-rate 0.5"
                )
            hits += hit_rate
        skipped = verdict is RuleVerdict.SKIP or (verdict is RuleVerdict.MEASURE and hits >= 1 - 1e-9)
        hits -= skipped and verdict is RuleVerdict.MEASURE
        rules.record_decision(step, record, skipped=skipped, difference=None)
    return CacheSkips(steps=frozenset(record.skipped), first=config.Fn_compute_blocks, last=config.Bn_compute_blocks)
