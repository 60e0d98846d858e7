"""Calls of few steps: the ways of warming up, the whole call, and fewer steps on one rank."""

from __future__ import annotations

import dataclasses

import pytest

from ditile.plan.plan import Plan
from ditile.planner.footprint import DecodeWork
from ditile.planner.profile import Link, Profile
from ditile.planner.search import PlanSearch, SearchRequest, SearchResult, make_pricer
from ditile.planner.seconds import compute_decode_seconds, compute_text_seconds
from tests.planner.test_planner import EVEN, call, subject

TURBO = "shapes-flux-turbo"


def search(profile: Profile) -> SearchResult:
    arguments = call(TURBO, height=512, width=512)
    return PlanSearch(subject(TURBO), arguments, profile, SearchRequest(devices=4)).find_fastest_plans()


def slow_down(bandwidth: float) -> Profile:
    return dataclasses.replace(EVEN, link=Link(latency_s=0.0, bandwidth=bandwidth))


@pytest.mark.parametrize(
    ("profile", "warmup", "mode"),
    [(EVEN, None, "auto"), (slow_down(1e6), None, "sequence"), (EVEN, 1, "sequence"), (EVEN, 3, "auto")],
)
def test_how_stages_share_synchronous_steps(profile: Profile, warmup: int | None, mode: str) -> None:
    """A second one is taken where it is nearly free, and where nobody asked for another number."""
    one, arguments = subject(TURBO), call(TURBO, height=512, width=512)
    shape, plan = one.make_call_shape(arguments, 4), Plan(pipefusion=4, patches=4, warmup=warmup or 1)
    search = PlanSearch(one, arguments, profile, SearchRequest(devices=4, warmup=warmup))
    others = list(search.iterate_other_warmups(one.make_plan_job(plan, shape)))
    assert others == [dataclasses.replace(plan, warmup_mode=mode)]


def test_the_price_of_auto_is_that_of_what_it_takes() -> None:
    one, arguments = subject(TURBO), call(TURBO)
    pricer, shape = make_pricer(one, arguments, slow_down(1e9)), one.make_call_shape(arguments, 4)
    auto, taken = (
        pricer.price_call(one.make_plan_job(Plan.parse(f"pipefusion=4 patches=4 {rest}"), shape))
        for rest in ("warmup_mode=auto", "warmup=2 warmup_mode=sequence")
    )
    assert dataclasses.replace(auto, plan=taken.plan) == taken


def test_text_and_decode_are_in_the_call() -> None:
    """A decode of twice the pixels takes twice as long, and rows share it out; a short call under a plan of several
    ranks is decoded by rows, and a plan that is to be priced stays as it is."""
    assert compute_text_seconds(1000, 50, EVEN) == pytest.approx(2 * 1000 * 50 / 1e9)
    work = DecodeWork(operations=1e6, exchanges=10)
    waits = dataclasses.replace(EVEN, link=Link(latency_s=0.01, bandwidth=1e18, call_s=0.02))
    assert compute_decode_seconds(work, 1000, 1, EVEN) == pytest.approx(1.0)
    assert compute_decode_seconds(work, 2000, 1 / 4, waits) == pytest.approx(2 / 4 + 10 * 0.03)
    assert subject(TURBO).count_decode_work().operations > 1e5
    for price in search(EVEN).prices:
        assert price.call_s == price.text_s + price.latency_s + price.decode_s > price.latency_s > 0
        assert price.plan.vae == ("rows" if price.plan.world > 1 else "whole")
    plan_search = PlanSearch(subject(TURBO), call(TURBO), EVEN, SearchRequest(devices=4))
    result = plan_search.price_plan(Plan(pipefusion=4))
    priced = result.prices[0]
    assert priced.plan == Plan(pipefusion=4) and priced.decode_s > 0
    late = dataclasses.replace(EVEN, link=Link(latency_s=10.0, bandwidth=1e18))
    assert {price.plan.vae for price in search(late).prices} == {"whole"}
