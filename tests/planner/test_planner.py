"""The planner against its parts: exact counts, the schedule's own formula, and plans that run.

No test here asserts that a prediction is right: `ditile bench` measures that.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ditile.cache.config_text import parse_cache_line
from ditile.model.known import CONFIGS
from ditile.plan import cost
from ditile.plan.errors import PlanError
from ditile.plan.layout import Grid
from ditile.plan.plan import Plan
from ditile.plan.schedule import Op, OpKind
from ditile.plan.simulate import bound_speedup
from ditile.planner import hardware
from ditile.planner.kernel_times import Work
from ditile.planner.memory import RankMemory, count_peaks_of_ranks, count_rank_memory
from ditile.planner.ops import CacheSkips, OpPricer
from ditile.planner.profile import Curve, Link, Profile
from ditile.planner.question import PlanQuestion
from ditile.planner.search import PlanSearch, SearchRequest, iterate_plans, make_pricer, predict_skipped_steps
from ditile.planner.seconds import RankTokens, merge_work
from ditile.planner.subject import PlanSubject
from ditile.runner.model_files import find_model_source

RATE = Curve((1.0,), (1e9,))
EVEN = Profile(
    name="even", source="a test", memory_bytes=10**12, element_size=4, matmul=RATE, attention=RATE,
    pointwise=dict.fromkeys(("pointwise", "norm", "gelu"), Curve((1.0,), (1e18,))), kernel_s=0.0, runs_ahead=False,
    micro_s=0.0, link=Link(latency_s=0.0, bandwidth=1e18),
)  # fmt: skip
"""Every operation takes a nanosecond, messages and numbers nothing."""
SMALL = {"height": 256, "width": 256, "num_inference_steps": 8, "prompt": "a prompt"}


def subject(name: str) -> PlanSubject:
    published = CONFIGS / name
    return PlanSubject.from_configs(name, published if published.exists() else find_model_source(name))


def call(name: str, **changes: Any) -> dict[str, Any]:
    return PlanQuestion(model=name).fill_call_arguments() | changes


def count_work_flops(work: Work, tokens: RankTokens) -> float:
    """Operations of matrices and attention."""
    total = 0.0
    for kernel, times in work.items():
        width = {"matmul": kernel.size[1] / 2, "attention": tokens.count_keys(kernel.keys)}.get(kernel.kind, 0)
        total += times * 4 * tokens.batch * tokens.count_tokens(kernel.stream) * kernel.size[0] * width
    return total


@pytest.mark.parametrize("name", ["shapes-flux", "shapes-pixart", "sd3.5-medium", "flux.1-dev"])
def test_operations_are_those_of_the_forward(name: str) -> None:
    """At a size other than the one that was counted; a failure means that a kernel grows with the wrong tokens."""
    one = subject(name)
    counted, grid, text = one.transformer_work, Grid(6, 10), 23
    assert one.family.example is not None
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        config: Any = one.transformer.config
        one.transformer(**one.family.example(config, grid, text), return_dict=False)
    of_blocks = (*counted.blocks, *counted.block_steps, *counted.block_once)
    rest = (counted.first, counted.last, counted.every, counted.step, counted.once)
    total = count_work_flops(merge_work([*of_blocks, *rest]), RankTokens(1, 60, text, 60, text))
    assert total == counter.get_total_flops()


@pytest.mark.parametrize("text", ["pipefusion=2 patches=4", "pipefusion=4 patches=4 warmup=3", "patches=2", "data=1"])
def test_equal_stages_and_free_messages_take_the_makespan(text: str) -> None:
    """The price is the schedule's: with one cost for each row of tokens it is that of `bound_speedup`."""
    one = subject("shapes-pixart")
    shape = one.make_call_shape(call("shapes-pixart", **SMALL))
    job = one.make_plan_job(Plan.parse(text), shape)
    pricer = make_pricer(one, SMALL, EVEN)
    alone = pricer.price_call(one.make_plan_job(Plan(), shape)).latency_s
    price = pricer.price_call(job)
    assert price.exposed_s == pytest.approx(0, abs=1e-9)
    assert price.latency_s / alone == pytest.approx(1 / bound_speedup(job.step_schedule), rel=0.06)
    assert price.latency_s == pytest.approx(price.compute_s + price.bubble_s)


@pytest.mark.parametrize(
    ("name", "interlink"), [("shapes-flux", None), ("shapes-pixart", None), ("flux.1-dev", "10Gbit")]
)
def test_the_fastest_of_all_simulated_plans_are_found(name: str, interlink: str | None) -> None:
    """A failure means that the bound, in whose order plans are simulated, is above the simulation or far below it: a
    search would miss the best plan, or simulate them all."""
    one = subject(name)
    arguments, profile = call(name, height=512, width=512), hardware.load_profile("l40-pcie", interlink)
    shape, wanted = one.make_call_shape(arguments, profile.element_size), SearchRequest(devices=16, hosts=2)
    pricer, simulated = make_pricer(one, arguments, profile, 8), list[float]()
    for plan in iterate_plans(one, shape, wanted):
        job = one.make_plan_job(plan, shape)
        simulated.append(pricer.predict_latency(job))
        assert 0 < pricer.bound_latency(job) <= simulated[-1] * 1.0001, plan
    result = PlanSearch(one, arguments, profile, wanted).find_fastest_plans()
    # The last one is of one device, whatever is faster.
    first = [price.latency_s for price in result.prices[:-1] if price.plan.warmup_mode == "serial"]
    assert first == pytest.approx(sorted(simulated)[: len(first)], rel=0.01)
    assert first and result.prices[0].latency_s <= min(simulated) * 1.0001


def test_plans_are_legal_and_distinct() -> None:
    one = subject("flux.1-dev")
    shape = one.make_call_shape(call("flux.1-dev"), 2)
    result = list(iterate_plans(one, shape, SearchRequest(devices=16)))
    assert len(result) == len(set(map(str, result)))
    facts = shape.collect_facts("x", len(one.block_hooks.chain))
    assert all(not plan.illegal(facts) and 16 % plan.world == 0 for plan in result)
    assert {plan.world for plan in result} == {1, 2, 4, 8, 16}
    for name in ("pipefusion", "ring", "gather", "distrifusion", "ulysses", "tensor"):
        assert any(getattr(plan, name) > 1 for plan in result), name
    assert not any(plan.cfg > 1 or plan.data > 1 for plan in result), "one image, and embedded guidance"


def test_memory_falls_with_the_stages_and_is_said_when_it_lacks() -> None:
    one, arguments, profile = subject("flux.1-dev"), call("flux.1-dev"), hardware.load_profile("l40-pcie")
    shape = one.make_call_shape(arguments, 2)
    alone, staged = (one.make_plan_job(Plan.parse(text), shape) for text in ("data=1", "pipefusion=8"))
    assert count_rank_memory(one, alone, profile).weights > 4 * count_rank_memory(one, staged, profile).weights, (
        "double blocks are larger"
    )
    peaks = [max(count_peaks_of_ranks(one, job, profile).values()) for job in (staged, alone)]
    assert peaks[0] < peaks[1]
    with pytest.raises(PlanError, match=r"no plan fits 2\.00 GB a device: '.*' needs least, .* GB more"):
        PlanSearch(one, arguments, profile, SearchRequest(devices=8, memory_bytes=2 * 10**9)).find_fastest_plans()
    with pytest.raises(PlanError, match=r"no plan takes at most 0\.001 s: the fastest"):
        PlanSearch(one, arguments, profile, SearchRequest(devices=8, max_latency_s=0.001)).find_fastest_plans()


def test_blocks_are_offloaded_where_nothing_else_fits() -> None:
    """Two blocks are on the device in place of a stage's, and their way there is paid for where it takes longest."""
    flux, shape, given = subject("flux.1-dev"), {"num_inference_steps": 4}, SearchRequest(devices=2)
    asked = call("flux.1-dev", **shape)
    profile = hardware.load_profile("rtx-4090")
    whole = PlanSearch(flux, asked, profile, given).find_fastest_plans()
    # The last one is of one device, which has no room for all blocks.
    *whole_prices, alone_price = whole.prices
    assert alone_price.plan.offload == "blocks" and all(price.plan.offload == "none" for price in whole_prices)
    least = min(price.memory_bytes for price in whole_prices)
    tight = PlanSearch(
        flux, asked, profile, dataclasses.replace(given, memory_bytes=least - 4 * 10**9)
    ).find_fastest_plans()
    assert all(price.plan.offload == "blocks" for price in tight.prices)
    for text in ("pipefusion=2 patches=2", "tensor=2"):
        plan = Plan.parse(text)
        kept, away = (
            flux.make_plan_job(dataclasses.replace(plan, offload=offload), flux.make_call_shape(asked, 2))
            for offload in ("none", "blocks")
        )
        pricer = make_pricer(flux, asked, profile)
        blocks, parameters = kept.stages[0], flux.count_block_parameters(plan.tensor)
        saved = sum(parameters[block] for block in blocks) - 2 * parameters[0]
        memories = [count_rank_memory(flux, job, profile).weights for job in (kept, away)]
        assert memories[0] - memories[1] == 2 * saved
        computed, streamed = (OpPricer(pricer, job, CacheSkips()) for job in (kept, away))
        op = Op(OpKind.COMPUTE, 2, 0 if plan.pipefusion > 1 else None)
        way = 2 * sum(kept.weights.blocks[block] for block in blocks) / plan.tensor / profile.host_bandwidth
        alone = computed.get_op_seconds(0, op, free=False)
        assert streamed.get_op_seconds(0, op, free=False) == pytest.approx(max(alone, way))
        assert (way > alone) == (plan.pipefusion > 1), "one of both is bound by its weights"


EVERY_OTHER = CacheSkips(steps=frozenset(range(0, 8, 2)), first=0)


@pytest.mark.parametrize(
    ("name", "plan", "bandwidth", "part"),
    [("shapes-pixart", Plan(), 1e18, "latency_s"), ("shapes-flux", Plan(ulysses=2), 1e6, "exposed_s")],
)
def test_a_cache_leaves_out_steps_and_exchanges(name: str, plan: Plan, bandwidth: float, part: str) -> None:
    one = subject(name)
    job = one.make_plan_job(plan, one.make_call_shape(call(name, **SMALL)))
    pricer = make_pricer(one, SMALL, dataclasses.replace(EVEN, link=Link(latency_s=0.0, bandwidth=bandwidth)))
    whole, half = (getattr(pricer.price_call(job, skips), part) for skips in (CacheSkips(), EVERY_OTHER))
    # What is left out is not exchanged, but the tokens behind the blocks are gathered in every step.
    received = job.image_layout.image_tokens * (1 - 1 / plan.world) * job.shape.token_channels * job.shape.element_size
    gathered = 8 * job.count_calls_in_step(1) * received / bandwidth
    assert half == pytest.approx((whole + gathered) / 2, rel=0.005)


def test_the_messages_of_a_warmup_group_are_priced() -> None:
    """Weights of blocks and keys of all layers, in bytes by the formulas and in seconds: on a link with nothing under
    it at least those of what the ranks send, each over its own."""
    one = subject("shapes-pixart")
    shape = one.make_call_shape(call("shapes-pixart", **SMALL), 4)
    rate, job = 1e6, one.make_plan_job(Plan(pipefusion=2, warmup_mode="sequence"), shape)
    slow = dataclasses.replace(EVEN, link=Link(latency_s=0.0, bandwidth=rate, overlap=0.0))
    sent = [cost.count_traffic_bytes(job, rank) for rank in range(job.plan.world)]
    price = make_pricer(one, SMALL, slow).price_call(job)
    once = sum(of_rank.get("data", 0) + of_rank.get("result", 0) for of_rank in sent)
    assert price.bytes_per_step * shape.steps == sum(sum(of_rank.values()) for of_rank in sent) - once
    assert all(any(of_rank.get(kind) for of_rank in sent) for kind in ("keys", "weights"))
    gathered = max(of_rank["keys"] for of_rank in sent[:2] if "keys" in of_rank)
    lent = sum(cost.count_weight_stream_bytes(job, block) for block in range(len(job.weights.blocks)))
    calls = sum(job.count_calls_in_step(step) for step in range(job.step_schedule.warmup))
    assert price.exposed_s > (gathered + calls * lent) / rate > 0.0
    assert make_pricer(one, SMALL, EVEN).price_call(job).exposed_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("line", "hit_rate", "skipped"),
    [("F=1 W=4 R=1", None, 16), ("F=1 W=2 R=1 MC=1", None, 9), ("F=1 W=4 R=0.12", 0.5, 8)],
)
def test_a_cache_is_played_before_it_runs(line: str, hit_rate: float | None, skipped: int) -> None:
    """Its own rules decide; a failure would mean a latency for another cache than the one that runs."""
    left = predict_skipped_steps(parse_cache_line(line)["cache_config"], 20, hit_rate)
    assert (len(left.steps), left.first, left.last) == (skipped, 1, 0)


def test_ranks_of_a_host_share_the_way_out() -> None:
    """Four lines of a ring cross the border of a host, and in an exchange of all eight everybody does."""
    one, arguments = subject("flux.1-dev"), call("flux.1-dev")
    shape, profile = one.make_call_shape(arguments, 2), hardware.load_profile("a100-nvlink", "10Gbit")
    whole = hardware.parse_bandwidth("10Gbit") / 8 * 0.9

    def bandwidth(axis: str, **degrees: int) -> float:
        pricer, job = make_pricer(one, arguments, profile, 4), one.make_plan_job(Plan(**degrees), shape)
        return OpPricer(pricer, job, CacheSkips()).get_axis_link(axis).bandwidth

    assert bandwidth("ring", ring=8) == whole
    assert bandwidth("ring", ring=2, ulysses=4) == bandwidth("pipefusion", pipefusion=2, ulysses=4) == whole / 4
    assert bandwidth("ulysses", ulysses=8) == pytest.approx(whole / (4 * 4 / 7))
    assert bandwidth("ulysses", ring=2, ulysses=4) == profile.link.bandwidth


def test_memory_is_the_papers_table() -> None:
    """Table 1 of arXiv 2405.14430: P/N of the weights, and (KV)L of DistriFusion beside (KV)L/N of PipeFusion."""
    one, arguments = subject("pixart-alpha"), call("pixart-alpha")
    shape, profile = one.make_call_shape(arguments, 2), hardware.load_profile("l40-pcie")

    def of(**degrees: int) -> RankMemory:
        return count_rank_memory(one, one.make_plan_job(Plan(**degrees), shape), profile)

    own = (one.parameter_counts.shared + one.replicated_numbers) * 2
    whole, keys = of().weights - own, of(distrifusion=2).keys
    assert keys == 2 * len(one.parameter_counts.blocks) * shape.batch * shape.num_tokens * shape.token_channels * 2
    for n in (2, 4):
        assert of(pipefusion=n).weights - own == whole // n
        assert of(tensor=n).weights - own == pytest.approx(whole // n, rel=0.01), "some biases are whole"
        assert of(ulysses=n).weights == of(ring=n).weights == of(distrifusion=n).weights == whole + own
        assert of(distrifusion=n).keys == keys and of(pipefusion=n).keys == keys // n
        assert of(ulysses=n).keys == of(ring=n).keys == of(tensor=n).keys == 0, "nothing outlives a step"


MEASURED = Path(__file__).parents[2] / "benchmarks" / "data" / "gpu"


RECORDED_RANKS = [
    (1024, "data=1"), (1024, "pipefusion=4 patches=4"), (1024, "pipefusion=8 patches=8"), (1024, "ulysses=4"),
    (1024, "ulysses=8"), (1024, "ring=4"), (1024, "distrifusion=4"),
    (2048, "data=1"), (2048, "pipefusion=8 patches=8"), (2048, "ulysses=8"),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("side", "plan"), RECORDED_RANKS)
def test_recorded_steps_are_priced_as_their_ranks_were_measured(side: int, plan: str) -> None:
    """The first rank of each plan alone, whose calls were recorded, within an eighth.

    A failure means that `ditile plan` has a wrong idea of what recorded steps bring on an H200."""
    rows = [json.loads(line) for line in (MEASURED / "h200-recorded-steps-prototype.jsonl").read_text().splitlines()]
    is_plain = plan == "data=1"
    wanted = {"px": side, "part": "plain"} if is_plain else {"px": side, "part": "alone", "plan": plan}
    (measured,) = [row["step_s"] for row in rows if wanted.items() <= row.items()]
    one = subject("flux.1-dev")
    size = {"height": side, "width": side, "num_inference_steps": 20, "guidance_scale": 3.5}
    job = one.make_plan_job(Plan.parse(plan), one.make_call_shape(size, 2))
    profile = hardware.load_profile("h200-nvlink")
    # Links take no time, as those of a rank alone. The host starts messages as it always does.
    alone = dataclasses.replace(profile, link=dataclasses.replace(profile.link, latency_s=0.0, bandwidth=1e18))
    ops = OpPricer(make_pricer(one, size, alone, records=True), job, CacheSkips())
    last_step_ops = ops.schedule.iter_step_ops(0, 19, job.count_calls_in_step(19))
    priced = sum(ops.get_op_seconds(0, op, free=False) for op in last_step_ops)
    assert priced == pytest.approx(measured, rel=0.125)
