"""Searches the plans for a model, a call and a machine, the fastest first.

Degrees are divisors of the ranks; the patches of each stage are 1, 2 or 4. Plans are simulated in the order of a bound:
the seconds their busiest stage is occupied. No plan is faster, so the search ends when the fastest plans so far are
faster than the next bound. `predict_skipped_steps` applies a cache's rules to the steps before anything is measured.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from ditile.cache.build import build_skip_rules
from ditile.cache.calls.scheduled import spread_steps
from ditile.cache.config import (
    BlockCacheConfig,
    CacheConfig,
    Calibration,
    DBPruneConfig,
    DMDCalibratorConfig,
    FittedScheduleConfig,
)
from ditile.cache.methods.spectrum import SpectrumConfig
from ditile.cache.step_rules import DecisionRecord, RuleVerdict
from ditile.plan.cost import PlannedCall
from ditile.plan.errors import PlanError
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import AUTO, AXES, FEW_STEPS, OUTER, Facts, Plan, WireDtype, compute_coordinates
from ditile.plan.shape import Shape
from ditile.planner.memory import count_host_memory, count_peaks_of_ranks
from ditile.planner.ops import NO_SKIPS, CachedCalls, CacheSkips
from ditile.planner.price import Price, Pricer
from ditile.planner.profile import Profile
from ditile.planner.subject import PlanSubject

MOST_PATCHES = 32
FACTORS = (1, 2, 4)
"""Patches for each stage."""
SHOWN = 8
"""The number of plans that a search returns."""
SIMULATED = 2 * SHOWN
"""The minimum number of simulated plans. For these, other kinds of warmup are tried."""
SIMULATED_OF_FEW_STEPS = 8 * SIMULATED
"""The minimum number of simulated plans for a call of few steps, where synchronous steps are a large part."""
WORTH = 1.05
"""A second synchronous step shared by stages is taken if it lengthens the loop at most by this factor."""

PACKING_GAIN = 0.1
"""Messages are packed, which is an approximation, if that saves this share of a call."""
ROWS_GAIN = 0.02
"""The decode is divided by rows if that saves this share of a call of few steps."""
PROMPT_TOKENS = 512
"""Tokens of a prompt if a call does not give their number."""
ALIKE = 1.02
"""Ranks get equal shares if their speeds differ by a smaller factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """The bounds of a search.

    Attributes:
        devices: the largest number of ranks, over all hosts.
        hosts: the number of hosts.
        memory_bytes: memory of a device; by default as in the profile.
        host_memory_bytes: memory of a host; by default as in the profile, where it may be unknown.
        max_latency_s: plans that take longer are left out.
        warmup: synchronous steps of plans with stale keys; None is one, or more if they cost hardly more.
        all_devices: whether only plans that use every device are searched.
        whole_calls: whether prices include text and decode for any number of steps.
        exact: whether only plans with attention to fresh keys are searched.
        wire_dtype: a type that messages may have, in plans that become faster by it.
        offload: the mode of all plans; if no plan fits without offloading, the search goes on with "blocks".
        records: whether steps are recorded, where a plan and the machine allow it.
    """

    devices: int
    hosts: int = 1
    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    max_latency_s: float | None = None
    warmup: int | None = None
    all_devices: bool = False
    whole_calls: bool = False
    exact: bool = False
    wire_dtype: WireDtype | None = None
    offload: Literal["none", "blocks"] = "none"
    records: bool = False

    @property
    def ranks_of_host(self) -> int:
        """Return the number of ranks on each host."""
        return self.devices // self.hosts


class SizedJob(NamedTuple):
    """A call under a plan, with the memory that it needs.

    Attributes:
        job: the call.
        memory: bytes needed by the rank that needs most.
        lacks: bytes missing on the rank with the least room, or in the host's memory if every rank has enough; below 0
            if nothing is missing.
        rank, there: the rank with the least room, and the memory of its device.
        rooms: bytes that each rank has left; ranks that are alike may be represented by the first.
        on_host: whether memory is missing on the host.
    """

    job: PlannedCall
    memory: int
    lacks: int
    rank: int
    there: int
    rooms: Mapping[int, int]
    on_host: bool


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        prices: the prices of plans that fit, the fastest first; without `all_devices` also one device's, if it fits.
        too_large: the number of examined plans that do not fit the memory. The search ends when enough plans fit.
        legal: the number of searched plans, which are all that the model and the call allow.
    """

    prices: tuple[Price, ...]
    too_large: int = 0
    legal: int = 1


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off. A search makes many objects, and each collection would scan all of torch's."""
    # A caller may have turned it off before.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class PlanSearch:
    """One model, one call, one machine, and the bounds of a search."""

    subject: PlanSubject
    call: CallArguments
    profile: Profile
    request: SearchRequest
    skips: CacheSkips = NO_SKIPS

    @cached_property
    def shape(self) -> Shape:
        """Return the shape of the call."""
        return self.subject.make_call_shape(self.call, self.profile.element_size)

    @cached_property
    def pricer(self) -> Pricer:
        """Make the pricer of the plans."""
        request = self.request
        return make_pricer(self.subject, self.call, self.profile, request.ranks_of_host, records=request.records)

    @cached_property
    def _facts(self) -> Facts:
        return self.subject.collect_facts(self.shape)

    def _get_device_bytes(self, rank: int = 0) -> int:
        """Return the memory of a rank's device."""
        return self.request.memory_bytes or self.profile.get_rank_profile(rank).memory_bytes

    def _name_place(self, rank: int) -> str:
        if self.profile.by_rank:
            return f"on rank {rank}"
        return "a device"

    @cached_property
    def _device_speeds(self) -> Sequence[float]:
        """Return how many calls a second each rank's device makes by itself; empty if all are alike."""
        job = self._make_job(Plan(offload=self.request.offload))
        speeds = []
        for rank in range(len(self.profile.by_rank)):
            device = self.profile.get_rank_profile(rank)
            pricer = make_pricer(self.subject, self.call, device, records=self.request.records)
            speeds.append(1 / pricer.predict_latency(job, self.skips))
        return speeds

    @_pause_garbage_collection()
    def find_fastest_plans(self) -> SearchResult:
        """Return the fastest of all legal plans that fit, with their prices.

        Raises:
            PlanError: if no plan fits the memory or the latency.
        """
        too_large: list[SizedJob] = []
        too_large_for_host: list[SizedJob] = []
        prices: list[Price] = []
        num_simulated = SIMULATED if self.shape.steps > FEW_STEPS else SIMULATED_OF_FEW_STEPS
        # The bound is cheap, and the simulation of a schedule is not.
        jobs_by_bound = self.sort_jobs_by_bound()
        for bound, job in jobs_by_bound:
            # Plans come in the order of their bounds, so none of the later ones is faster than those shown.
            if len(prices) >= num_simulated and bound > prices[SHOWN - 1].latency_s:
                break
            if not self._gains_by_packing(job):
                continue
            for sized in self._iterate_variants(job.plan):
                if sized.lacks <= 0:
                    self._insert_price(prices, sized)
                elif sized.on_host:
                    too_large_for_host.append(sized)
                else:
                    too_large.append(sized)
        # Tapes need memory. Leaving them out is tried before costlier changes; offloaded plans have none.
        if self.request.records and all(price.plan.offload != "none" for price in prices):
            return self._give_up_recording().find_fastest_plans()
        # Offloading costs time in every step, so it is tried only where nothing fits without it.
        if not prices and self.request.offload == "none":
            return replace(self, request=replace(self.request, offload="blocks")).find_fastest_plans()
        if too_large_for_host and not prices:
            raise self._make_host_memory_error(min(too_large_for_host, key=lambda sized: sized.lacks))
        if not prices:
            raise self._make_memory_error(too_large)
        # Another warmup only changes the synchronous steps, so it is only worth a trial for plans that are fast
        # already.
        for price in prices[:num_simulated]:
            for plan in self.iterate_other_warmups(self._make_job(price.plan)):
                sized = self.fit_plan_to_memory(plan)
                if sized.lacks <= 0:
                    self._insert_price(prices, sized)
        prices = self._complete_prices(prices)
        # Readers compare many devices with one first, so its price is shown too.
        if not self.request.all_devices and all(price.plan.world > 1 for price in prices):
            prices += self._price_one_device()
        limit = self.request.max_latency_s or math.inf
        allowed = [price for price in prices if price.latency_s <= limit]
        if not allowed:
            raise PlanError(
                f"no plan takes at most {limit:g} s: the fastest, '{prices[0].plan}', takes "
                f"{prices[0].latency_s:.3g} s; use more devices, fewer steps or a cache"
            )
        return SearchResult(tuple(allowed), len(too_large), len(jobs_by_bound))

    def _price_one_device(self) -> list[Price]:
        """Return a list with the price of the plan for one device; empty if it does not fit."""
        for plan in (Plan(), Plan(offload="blocks")):
            sized = self._size_job(self._make_job(plan))
            if sized.lacks <= 0:
                return [self._complete_price(self._price_job(sized))]
        return []

    def price_plan(self, plan: Plan) -> SearchResult:
        """Return the price of one plan, without changing it.

        Raises:
            PlanError: if it does not fit the model, the devices, the memory or the latency.
        """
        request = self.request
        if plan.world > request.devices:
            raise PlanError(f"'{plan}' needs {plan.world} devices, and there are devices={request.devices}")
        sized = self._size_plan(plan)
        if sized.lacks > 0 and request.records:
            return self._give_up_recording().price_plan(plan)
        if sized.on_host:
            raise self._make_host_memory_error(sized)
        if sized.lacks > 0:
            needed = f"{_format_gigabytes(sized.there + sized.lacks)} {self._name_place(sized.rank)}"
            raise PlanError(f"'{plan}' needs {needed}, and there are {_format_gigabytes(sized.there)}")
        price = self._complete_price(self._price_job(sized), may_divide=False)
        limit = request.max_latency_s
        if limit is not None and price.latency_s > limit:
            raise PlanError(f"'{plan}' takes {price.latency_s:.3g} s, and max_latency={limit:g}")
        return SearchResult((price,))

    def predict_call_seconds(self, plan: Plan, num_computed: int) -> float:
        """Predict the seconds of the whole call if only `num_computed` of its steps compute and the others are
        forecast."""
        # A forecast takes microseconds, so it is as if the call had fewer steps.
        request = replace(self.request, whole_calls=True)
        fewer = replace(self, call=self.call | {"num_inference_steps": num_computed}, request=request)
        [price] = fewer.price_plan(plan).prices
        return price.call_s

    def _give_up_recording(self) -> PlanSearch:
        """Return the same search without recorded steps."""
        return replace(self, request=replace(self.request, records=False))

    def _iterate_variants(self, plan: Plan) -> Iterator[SizedJob]:
        """Yield the plan fitted to memory; if devices are not alike, also with weights in the host's memory."""
        sized = self.fit_plan_to_memory(plan)
        is_moved = sized.job.plan.stage_blocks != plan.stage_blocks
        if self.profile.by_rank and (sized.lacks > 0 or is_moved):
            offloaded = self._offload_lacking_ranks(plan)
            if offloaded is not None and (offloaded.lacks <= 0 or offloaded.on_host):
                yield offloaded
        yield sized

    def _offload_lacking_ranks(self, plan: Plan) -> SizedJob | None:
        """Return the plan with blocks in the host's memory for ranks short of memory; None if that changes nothing."""
        smallest = replace(plan, **dict(self.subject.memory_saving_options))
        # Calls with offloaded weights have no tapes.
        sized = self._size_job(self._make_job(smallest), records=False)
        if sized.lacks <= 0 or sized.on_host:
            return None
        ranks = []
        for rank in range(plan.world):
            if sized.rooms[rank] < 0 or plan.offloads_rank(rank):
                ranks.append(rank)
        named_ranks = None if len(ranks) == plan.world else tuple(ranks)
        offloaded = replace(plan, offload="blocks", offload_ranks=named_ranks)
        if offloaded == plan:
            return None
        return self.fit_plan_to_memory(offloaded)

    def fit_plan_to_memory(self, plan: Plan) -> SizedJob:
        """Return the plan, or a variant of it that fits the memory; if none fits, the one that lacks least.

        The variants divide the decode by rows, split the text encoders, or do both; last, they also move blocks.
        """
        unchanged = self._size_plan(plan)
        options = self.subject.memory_saving_options
        if unchanged.lacks <= 0 or plan.world == 1:
            return unchanged
        # Saving memory may cost time outside of the loop, so the plan itself comes first, and all options last.
        smallest = self._size_plan(replace(plan, **dict(options)))
        if smallest.lacks > 0:
            moved = [self._move_blocks(unchanged), self._move_blocks(smallest)]
            for sized in moved:
                if sized.lacks <= 0:
                    return sized
            return min(moved, key=lambda sized: sized.lacks)
        # A single option may be enough, and costs less than all of them.
        for name, value in options:
            sized = self._size_plan(replace(plan, **{name: value}))
            if sized.lacks <= 0:
                return sized
        return smallest

    def _move_blocks(self, sized: SizedJob) -> SizedJob:
        """Move blocks from stages short of memory to those with the most room."""
        if not self.profile.by_rank:
            return sized
        best = sized
        # Each trial moves one block, so more trials than there are blocks would move some back.
        for _ in range(sum(map(len, sized.job.stages))):
            plan = sized.job.plan
            rooms = [self._get_device_bytes()] * plan.pipefusion
            # Ranks of a stage have the same blocks, so the fullest of them decides.
            for rank, room in sized.rooms.items():
                stage = sized.job.plan_rank(rank).stage
                # If the host lacks memory, moving blocks away from offloaded ranks makes room there.
                if sized.on_host and plan.offloads_rank(rank):
                    room = -sized.lacks
                rooms[stage] = min(rooms[stage], room)
            giver = rooms.index(min(rooms))
            taker = rooms.index(max(rooms))
            if sized.lacks <= 0 or rooms[taker] <= 0:
                break
            # A stage must keep at least one block.
            if len(sized.job.stages[giver]) == 1:
                break
            sized = self._size_job(self._move_block(sized.job, giver, taker))
            best = min(best, sized, key=lambda each: each.lacks)
        return best

    def _move_block(self, job: PlannedCall, giver: int, taker: int) -> PlannedCall:
        """Move one block of a call from a stage to another."""
        blocks = [len(stage) for stage in job.stages]
        blocks[giver] -= 1
        blocks[taker] += 1
        plan = replace(job.plan, stage_weights=None, stage_blocks=tuple(blocks))
        # The dropped stage weights also divided the decode and the text encoders, which now need their own.
        if job.plan.stage_weights is not None:
            plan = weigh_ends(plan, self._device_speeds)
        return self._make_job(plan)

    def _find_shorter_loop(self, price: Price) -> Price | None:
        """Return the price with one block moved to another stage; None if no move makes the loop shorter."""
        # Stages also do work besides their blocks, which the weights used to cut them leave out.
        job = self._make_job(price.plan)
        # Only moves to or from the busiest stage help, because all others wait for it.
        busiest = self.pricer.find_busiest_stage(job, self.skips)
        trials = []
        for giver, taker in itertools.permutations(range(len(job.stages)), 2):
            if busiest in (giver, taker) and len(job.stages[giver]) > 1:
                moved = self._move_block(job, giver, taker)
                trials.append((self.pricer.bound_latency(moved, self.skips), moved))
        for bound, moved in sorted(trials, key=lambda trial: trial[0]):
            # A loop is not shorter than its bound, which takes no simulation.
            if bound >= price.latency_s:
                break
            sized = self._size_job(moved)
            if sized.lacks <= 0 and self.pricer.predict_latency(moved, self.skips) < price.latency_s:
                return self._price_job(sized)
        return None

    def iterate_other_warmups(self, job: PlannedCall) -> Iterator[Plan]:
        """Yield the plan with other warmup modes that could make its synchronous steps shorter.

        If the request gives no number of synchronous steps, stages that share them take one more if it costs little.
        """
        plan = job.plan
        if plan.pipefusion == 1 or plan.warmup == 0:
            return
        # Micro-batches are rows of the batch, so one row cannot be split.
        if job.shape.divide_batch(plan).batch > 1:
            yield replace(plan, warmup_mode="pipelined")
        # Stages share a step by splitting its tokens, which excludes other splits of tokens and of weights.
        if plan.token_ranks * plan.tensor > 1 or not self.subject.streams_weights:
            return
        shared = replace(plan, warmup_mode="sequence")
        chosen = replace(plan, warmup_mode=AUTO)
        if chosen.resolve_warmup() == shared:
            yield chosen
            return
        # A number of synchronous steps in the request is kept.
        if self.request.warmup is not None:
            yield shared
            return
        seconds = [self.pricer.predict_latency(self._make_job(each), self.skips) for each in (chosen, shared)]
        yield chosen if seconds[0] <= WORTH * seconds[1] else shared

    def sort_jobs_by_bound(self) -> list[tuple[float, PlannedCall]]:
        """Return every plan with the seconds its busiest stage is occupied, the fastest first."""
        jobs = []
        for plan in iterate_plans(self.subject, self.shape, self.request):
            equal = self._make_job(plan)
            jobs.append(equal)
            if not self._device_speeds:
                continue
            weighted = self._make_job(weigh_shares(plan, self._device_speeds))
            # Very unequal weights may leave a rank without tokens, and nearly equal ones change nothing.
            if not weighted.plan.illegal(self._facts) and not weighted.has_shares_of(equal):
                jobs.append(weighted)
        if self.request.wire_dtype is not None:
            for job in [*jobs]:
                if not job.plan.sends_activations:
                    continue
                packed = self._make_job(replace(job.plan, wire_dtype=self.request.wire_dtype))
                if not packed.plan.illegal(self._facts):
                    jobs.append(packed)
        bounds = [(self.pricer.bound_latency(job, self.skips), job) for job in jobs]
        return sorted(bounds, key=lambda bounded: bounded[0])

    def _gains_by_packing(self, job: PlannedCall) -> bool:
        """Return whether packed messages make a call clearly shorter. A call without them passes."""
        if job.plan.wire_dtype is None:
            return True
        unpacked = self._make_job(replace(job.plan, wire_dtype=None))
        seconds = self.pricer.predict_latency(unpacked, self.skips)
        return self.pricer.predict_latency(job, self.skips) <= (1 - PACKING_GAIN) * seconds

    def _make_job(self, plan: Plan) -> PlannedCall:
        """Make the call under a plan."""
        return self.subject.make_plan_job(plan, self.shape)

    def _size_plan(self, plan: Plan) -> SizedJob:
        return self._size_job(self._make_job(plan))

    def _size_job(self, job: PlannedCall, *, records: bool | None = None) -> SizedJob:
        if records is None:
            records = self.request.records
        records = records and self.skips.can_be_recorded(job.plan)
        peaks = count_peaks_of_ranks(self.subject, job, self.profile, self.pricer.text_tokens, records=records)
        rooms = {}
        for rank, peak in peaks.items():
            rooms[rank] = self._get_device_bytes(rank) - peak
        fullest = min(rooms, key=rooms.__getitem__)
        lacks = -rooms[fullest]
        on_host = False
        # Offloaded weights need memory of the host. A host with unknown memory is taken to have enough.
        if lacks <= 0 and job.plan.offload != "none" and self.host_bytes:
            host = count_host_memory(self.subject, job, self.request.ranks_of_host)
            on_host = host.kept > self.host_bytes
            if on_host:
                lacks = host.kept - self.host_bytes
        there = rooms[fullest] + peaks[fullest]
        return SizedJob(job, max(peaks.values()), lacks, fullest, there, rooms, on_host)

    def _price_job(self, sized: SizedJob) -> Price:
        return self.pricer.price_call(sized.job, self.skips, sized.memory)

    def _insert_price(self, prices: list[Price], sized: SizedJob) -> None:
        bisect.insort(prices, self._price_job(sized), key=lambda known: known.latency_s)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of a host's memory; 0 if they are not known."""
        return self.request.host_memory_bytes or self.profile.host_memory_bytes

    def _make_host_memory_error(self, sized: SizedJob) -> PlanError:
        plan = sized.job.plan
        remedy = "quantize, or a smaller model"
        if plan.world > plan.pipefusion * plan.tensor:
            remedy = "divide them over the ranks of a host by pipefusion or tensor, quantize, or a smaller model"
        return PlanError(
            f"'{plan}' keeps {_format_gigabytes(self.host_bytes + sized.lacks)} of weights in the host's memory, and "
            f"there are {_format_gigabytes(self.host_bytes)}; more of it, {remedy}"
        )

    def _make_memory_error(self, too_large: Sequence[SizedJob]) -> PlanError:
        smallest = min(too_large, key=lambda sized: (sized.lacks, sized.job.plan.world))
        place = self._name_place(smallest.rank)
        return PlanError(
            f"no plan fits {_format_gigabytes(smallest.there)} {place}: '{smallest.job.plan}' needs least, "
            f"{_format_gigabytes(smallest.there + smallest.lacks)}, {_format_gigabytes(smallest.lacks)} more; "
            "use more devices, quantize, or a smaller image"
        )

    def _complete_prices(self, prices: Sequence[Price]) -> list[Price]:
        """Return the prices to show, with balanced stages, the fastest first."""
        if self.profile.by_rank:
            # Balancing leads a plan to the same cut from any start, so only its fastest start is kept.
            fastest: dict[Plan, Price] = {}
            for price in prices:
                fastest.setdefault(replace(price.plan, stage_blocks=None, stage_weights=None, rank_weights=None), price)
            shown = list(fastest.values())[:SHOWN]
            balanced = []
            for price in shown:
                # Single blocks move from stage to stage while that makes the loop shorter.
                while (better := self._find_shorter_loop(price)) is not None:
                    price = better
                sized = self._size_plan(weigh_ends(price.plan, self._device_speeds))
                # Weights for decode and text are left out if memory is short.
                if sized.lacks <= 0:
                    price = replace(price, plan=sized.job.plan, memory_bytes=sized.memory)
                balanced.append(price)
            prices = sorted(balanced, key=lambda price: price.latency_s)
        completed = [self._complete_price(price) for price in prices[:SHOWN]]
        # In a short call the decode and the text encoders are a large part of the time.
        if self.shape.steps <= FEW_STEPS:
            completed.sort(key=lambda price: price.call_s)
        return completed

    def _complete_price(self, price: Price, *, may_divide: bool = True) -> Price:
        """Add the seconds of text and decode to the price of a short call. The decode is divided by rows if it pays."""
        if self.shape.steps > FEW_STEPS and not self.request.whole_calls:
            return price
        subject = self.subject
        plan = price.plan
        text, decode = self._predict_ends(self._make_job(plan))
        completed = replace(price, text_s=text, decode_s=decode)
        if not may_divide or not subject.divides_decode or plan.vae == "rows":
            return completed
        by_rows = self._make_job(weigh_ends(replace(plan, vae="rows"), self._device_speeds))
        _, divided = self._predict_ends(by_rows)
        if decode - divided < ROWS_GAIN * completed.call_s:
            return completed
        sized = self._size_job(by_rows)
        if sized.lacks > 0:
            return completed
        return replace(completed, plan=by_rows.plan, decode_s=divided, memory_bytes=sized.memory)

    def _predict_ends(self, job: PlannedCall) -> tuple[float, float]:
        """Predict the seconds until the slowest replica has encoded its text, and those of the slowest decode."""
        subject = self.subject
        # Encoders read two prompts at most, regardless of the branches made of them.
        prompts = min(self.shape.branches_per_call * self.shape.calls, 2)
        tokens = int(self.call.get("max_sequence_length") or PROMPT_TOKENS) * prompts
        work = subject.count_decode_work(self.shape.frames)
        shape = job.shape
        pixels = math.ceil(shape.images / job.plan.data) * shape.height * shape.width // subject.vae_scale**2
        text = [0.0] * job.plan.data
        decode = 0.0
        for rank in range(job.plan.world):
            planned = job.plan_rank(rank)
            share = planned.compute_decode_share(shape.height // subject.vae_scale)
            device = self.profile.get_rank_profile(rank)
            own = planned.text_share * device.compute_text_seconds(subject.text, tokens)
            # Ranks that split the layers compute one after the other, and those with all layers compute at once.
            if job.plan.text == "each":
                text[planned.data] = max(text[planned.data], own)
            else:
                text[planned.data] += own
            if share > 0:
                decode = max(decode, device.compute_decode_seconds(work, pixels, share))
        return max(text), decode


def weigh_shares(plan: Plan, speeds: Sequence[float]) -> Plan:
    """Return the plan with shares that let ranks of unlike speeds end together. Like speeds leave it unchanged.

    Args:
        plan: a plan with equal shares.
        speeds: the speed of each rank's device, in any unit.
    """
    token_speeds = [0.0] * (plan.token_ranks * plan.distrifusion)
    tensor_speeds = [0.0] * plan.tensor
    places = []
    for rank in range(plan.world):
        place = compute_coordinates(plan, rank)
        token_place = plan.find_token_place(place)
        places.append((place["pipefusion"], token_place, place["tensor"]))
        token_speeds[token_place] += speeds[rank]
        tensor_speeds[place["tensor"]] += speeds[rank]
    stage_speeds = [float("inf")] * plan.pipefusion
    for rank, (stage, token_place, tensor_place) in enumerate(places):
        # A stage is done when its last rank is.
        token_share = token_speeds[token_place] / sum(token_speeds)
        tensor_share = tensor_speeds[tensor_place] / sum(tensor_speeds)
        share = token_share * tensor_share
        stage_speeds[stage] = min(stage_speeds[stage], speeds[rank] / share)
    return replace(
        plan,
        stage_weights=_round_weights(stage_speeds),
        token_weights=_round_weights(token_speeds),
        tensor_weights=_round_weights(tensor_speeds),
    )


def weigh_ends(plan: Plan, speeds: Sequence[float]) -> Plan:
    """Return the plan with weights for decode and text on ranks of unlike speeds.

    They make the ranks end together, if the plan divides these parts.

    Args:
        plan: made by `weigh_shares` or by the user; it is unchanged if its other weights already give these shares.
        speeds: the speed of each rank's device, in any unit; empty if all are alike.
    """
    if not speeds:
        return plan
    plan = replace(plan, rank_weights=None)
    if not plan.divides_ends:
        return plan
    num_ranks = plan.world // plan.data
    # The weights serve all replicas, so the slowest rank at each place decides.
    weights = _round_weights([min(speeds[rank : plan.world : num_ranks]) for rank in range(num_ranks)])
    if weights == _round_weights(plan.list_rank_weights()):
        return plan
    return replace(plan, rank_weights=weights or (1.0,) * num_ranks)


def _round_weights(speeds: Sequence[float]) -> tuple[float, ...] | None:
    """Return speeds as multiples of the lowest one, with two decimals; None if they are alike."""
    lowest = min(speeds)
    if max(speeds) < ALIKE * lowest:
        return None
    return tuple(round(speed / lowest, 2) for speed in speeds)


def _format_gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def make_pricer(
    subject: PlanSubject, call: CallArguments, profile: Profile, host: int | None = None, *, records: bool = False
) -> Pricer:
    """Make the pricer of a model's calls.

    Args:
        subject, call: the model and the call.
        profile: the machine.
        host: the number of ranks on a host; None if there is one host.
        records: see `MachineWork`.
    """
    text_tokens = subject.count_text_tokens(call)
    return Pricer(subject.transformer_work, profile, text_tokens, host, records, subject.join_stored_weights())


def iterate_plans(subject: PlanSubject, shape: Shape, request: SearchRequest) -> Iterator[Plan]:
    """Yield every plan allowed by the model and the call, on all devices or, unless `all_devices`, on a divisor of
    them."""
    facts = subject.collect_facts(shape)
    worlds = [request.devices] if request.all_devices else list_divisors(request.devices)
    # Other numbers are tried later, only for the fastest plans.
    warmup = 1 if request.warmup is None else request.warmup
    for world in worlds:
        for degrees in _iterate_degrees(world, shape):
            for patches in _iterate_patch_counts(degrees, warmup):
                plan = Plan(**degrees, **patches, offload=request.offload)
                if request.exact and plan.attends_to_stale_keys:
                    continue
                if subject.can_run_plan(plan) and not plan.illegal(facts):
                    yield plan


def _iterate_degrees(world: int, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yield degrees with the product `world`. At most one axis besides Ulysses splits tokens."""
    branches = shape.branches_per_call * shape.calls
    for factors in _iterate_products(world, len(AXES)):
        degrees = dict(zip(AXES, factors, strict=True))
        # cfg needs a branch for each rank, data an image, and tensor must divide the heads.
        if degrees["cfg"] > branches or degrees["data"] > shape.images:
            continue
        if shape.heads % degrees["tensor"]:
            continue
        # DistriFusion and PipeFusion would both keep stale keys of patches.
        if degrees["distrifusion"] > 1 and degrees["pipefusion"] > 1:
            continue
        if sum(degrees[name] > 1 for name in OUTER) < 2:
            yield degrees


def _iterate_products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield a number's factorizations into `factors` factors, in every order."""
    if factors == 1:
        yield (number,)
        return
    for first in list_divisors(number):
        for others in _iterate_products(number // first, factors - 1):
            yield first, *others


def _iterate_patch_counts(degrees: Mapping[str, int], warmup: int) -> Iterator[dict[str, Any]]:
    stages = degrees["pipefusion"]
    if stages == 1:
        # Only stale keys need synchronous steps before them.
        yield {"warmup": warmup} if degrees["distrifusion"] > 1 else {}
        return
    for factor in FACTORS:
        if stages * factor <= MOST_PATCHES:
            yield {"patches": stages * factor, "warmup": warmup}


@lru_cache
def list_divisors(number: int) -> list[int]:
    """List the divisors of a number, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def predict_skipped_steps(
    config: CacheConfig | None, steps: int, hit_rate: float | None = None, forecast: Calibration | None = None
) -> CacheSkips:
    """Predict the steps left out by a cache, and the way its calls are recorded.

    Args:
        config: the cache; None leaves nothing out.
        steps: the number of steps in the generation.
        forecast: the calibrator that forecasts skipped outputs, if there is one.
        hit_rate: the share of the measured steps that is left out, from 0 to 1. Caches that only decide by rules (a
            threshold of 1, a static mask) need none.

    Raises:
        PlanError: if the cache measures differences and no hit rate is given, or its skips are not known before a call.
    """
    if config is None:
        return NO_SKIPS
    if isinstance(config, FittedScheduleConfig):
        # A fitted schedule leaves out as many steps as these, but different ones.
        computed = spread_steps(steps, config.count_computed(steps)).list_computed_steps()
        return CacheSkips(steps=frozenset(range(steps)) - frozenset(computed), first=0)
    if not isinstance(config, BlockCacheConfig):
        raise PlanError(f"{config}: what this cache leaves out is not known before a call; plan without it")
    rules = build_skip_rules(config, steps)
    record = DecisionRecord()
    hits = 0.0
    for step in range(steps):
        verdict = RuleVerdict.COMPUTE
        if not rules.never_skips:
            verdict = rules.decide_without_difference(step, record)
        if verdict is RuleVerdict.MEASURE:
            if hit_rate is None:
                raise PlanError(
                    f"a threshold of {rules.threshold:g} decides by what it measures; say which share of those "
                    "steps it is expected to leave out, such as --hit-rate 0.5"
                )
            hits += hit_rate
        # Hits are spread evenly over the measured steps; 1e-9 allows for the rounding of sums.
        is_hit = verdict is RuleVerdict.MEASURE and hits >= 1 - 1e-9
        if is_hit:
            hits -= 1
        skipped = is_hit or verdict is RuleVerdict.SKIP
        rules.record_decision(step, record, skipped=skipped, difference=None)
    calls = CachedCalls.KNOWN if rules.decide_alone else CachedCalls.PROBED
    # Each block decides for itself, or the host computes the weights of a forecast.
    if isinstance(config, DBPruneConfig | SpectrumConfig) or isinstance(forecast, DMDCalibratorConfig):
        calls = CachedCalls.CODE
    first = rules.config.Fn_compute_blocks
    last = rules.config.Bn_compute_blocks
    return CacheSkips(steps=frozenset(record.skipped), first=first, last=last, calls=calls)
