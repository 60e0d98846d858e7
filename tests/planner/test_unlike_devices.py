"""Plans for devices that are not alike: shares by speed and memory, from names and from a calibration of ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.planner import choose, hardware
from ditile.planner.choose import answer_question
from ditile.planner.memory import count_rank_memory
from ditile.planner.price import Price
from ditile.planner.profile import Profile, RankDevice
from ditile.planner.question import PlanQuestion, load_machine_profile
from ditile.planner.search import PlanSearch, SearchRequest, make_pricer
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions
from tests.planner.test_planner import EVEN, SMALL, call, subject


def rate_ranks(profile: Profile, *speeds: float, memory: int = 10**12) -> Profile:
    """The profile as calibrated with ranks of these speeds."""
    ranks = tuple(
        RankDevice(name=f"device {rank}", memory_bytes=memory, speed=speed) for rank, speed in enumerate(speeds)
    )
    return dataclasses.replace(profile, ranks=ranks, devices=len(ranks))


def join_ranks(*speeds: float) -> Profile:
    return hardware.join_devices(rate_ranks(EVEN, *speeds).list_measured_ranks())


def predict(profile: Profile, plan: str) -> float:
    one = subject("shapes-pixart")
    job = one.make_plan_job(Plan.parse(plan), one.make_call_shape(SMALL))
    return make_pricer(one, SMALL, profile).predict_latency(job)


@pytest.mark.parametrize("axis", ["ring=2", "ulysses=2", "distrifusion=2"])
def test_shares_by_speed_end_together(axis: str) -> None:
    """A device and one of half its speed: 1.5 times as fast as the first alone, within the rows that do not divide.

    A failure means that the simulation takes ranks for alike, or that tokens or heads are not shared out.
    """
    profile = join_ranks(1.0, 0.5)
    alone = predict(profile, "pipefusion=1")
    assert alone == predict(EVEN, "pipefusion=1")
    assert alone / predict(profile, axis) == pytest.approx(1.0, rel=0.05)
    # Three does not divide the heads, which Ulysses shares out.
    close = pytest.approx(1.5, rel=0.1 if axis == "ulysses=2" else 0.05)
    assert alone / predict(profile, f"{axis} token_weights=2,1") == close
    # Devices that are alike, with shares that are not.
    assert alone / predict(EVEN, f"{axis} token_weights=2,1") == close


def test_the_search_gives_each_device_its_share() -> None:
    """A failure means that two cards are as fast as two of the slower kind."""
    profile = hardware.load_profile("rtx-5090,rtx-4090")
    assert [device.name for device in profile.by_rank] == ["rtx-5090", "rtx-4090"]
    assert profile.link.bandwidth == hardware.load_profile("rtx-4090").link.bandwidth and profile.devices == 2
    answer = answer_question(PlanQuestion(model="flux.1-dev", hardware="rtx-5090,rtx-4090"))
    found = answer.to_json_dict()["plans"][0]
    best = Plan.parse(found["plan"])
    assert best.pipefusion == 2 and (best.stage_weights or best.stage_blocks)
    one = subject("flux.1-dev")
    arguments = PlanQuestion(model="flux.1-dev").fill_call_arguments()
    fast, slow = map(len, one.make_plan_job(best, one.make_call_shape(arguments)).stages)
    assert fast > slow
    peaks = [rank["peak"] for rank in found["memory_by_rank"]]
    assert peaks[0] <= 32e9 and peaks[1] <= 24e9
    cards = "rtx-5090,rtx-4090"
    equal = dataclasses.replace(best, stage_weights=None, stage_blocks=None, rank_weights=None)
    [price] = answer_question(PlanQuestion(model="flux.1-dev", hardware=cards, price=str(equal))).result.prices
    assert price.latency_s > 1.1 * found["latency_s"]
    # No cut at another block would be faster.
    for blocks in (fast - 1, fast + 1):
        cut = dataclasses.replace(best, stage_weights=None, stage_blocks=(blocks, 57 - blocks))
        question = PlanQuestion(model="flux.1-dev", hardware=cards, price=str(cut))
        assert answer_question(question).result.prices[0].latency_s >= found["latency_s"]
    words = "".join(part for part in answer.render_tables() if isinstance(part, str))
    assert "on rtx-5090 + rtx-4090:" in words


def test_the_slowest_rank_decides_outside_of_the_loop() -> None:
    """Text encoders and decode of each replica. A failure means that a second, slower card costs nothing there."""
    one = subject("shapes-flux-turbo")
    arguments = call("shapes-flux-turbo", num_images_per_prompt=2)

    def find(profile: Profile, plan: str) -> Price:
        found = PlanSearch(one, arguments, profile, SearchRequest(devices=2, whole_calls=True))
        return found.price_plan(Plan.parse(plan)).prices[0]

    # A quarter of the rows is a whole number of them.
    unlike = join_ranks(1.0, 1 / 3)
    for plan, decode, text in (
        ("data=2", 3, 3), ("data=2 text=split", 3, 3), ("data=2 text=first", 3, 3),
        ("ring=2", 1, 3), ("ring=2 vae=rows text=split", 3, 2), ("ring=2 text=first", 1, 1),
        ("ring=2 vae=rows text=split token_weights=3,1", 1, 1.5),
        ("pipefusion=2 patches=4 vae=rows text=split rank_weights=3,1 stage_blocks=8,4", 1, 1.5),
    ):  # fmt: skip
        alike = find(EVEN, plan)
        priced = find(unlike, plan)
        assert priced.decode_s == pytest.approx(decode * alike.decode_s), plan
        assert priced.text_s == pytest.approx(text * alike.text_s), plan
    # The first rank of each replica has its encoders.
    shape = one.make_call_shape(arguments)
    job = one.make_plan_job(Plan.parse("data=2 ring=2 text=first"), shape)
    assert [count_rank_memory(one, job, EVEN, rank).text > 0 for rank in range(4)] == [True, False, True, False]


def test_blocks_go_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of one speed, of which one is smaller. A failure means that a plan is refused which would fit."""
    whole = hardware.load_profile("rtx-5090")
    small = dataclasses.replace(whole, name="small", memory_bytes=145 * 10**8)
    one = subject("flux.1-dev")
    call = {"height": 1024, "width": 1024, "num_inference_steps": 28, "prompt": "", "max_sequence_length": 512}
    # A host that has no room for weights.
    request = SearchRequest(devices=2, all_devices=True, host_memory_bytes=10**9)
    for devices in ((whole, small), (small, whole)):
        result = PlanSearch(one, call, hardware.join_devices(devices), request).find_fastest_plans()
        best = result.prices[0].plan
        assert best.stage_blocks is not None and best.offload == "none"
        roomy = devices.index(whole)
        assert best.stage_blocks[roomy] > best.stage_blocks[1 - roomy]
        roomier = dataclasses.replace(request, host_memory_bytes=None)
        faster = PlanSearch(one, call, hardware.join_devices(devices), roomier).find_fastest_plans().prices[0]
        assert faster.plan.offload_ranks == (1 - roomy,) and faster.latency_s < 0.95 * result.prices[0].latency_s
    monkeypatch.setattr(choose, "load_machine_profile", lambda question: hardware.join_devices((whole, small)))
    with pytest.raises(PlanError, match=r"needs 2\d\.\d\d GB on rank 1, and there are 14\.50 GB"):
        answer_question(PlanQuestion(model="flux.1-dev", price="pipefusion=2 patches=2", cuda_graphs=False))


@pytest.mark.parametrize(("speed", "is_used"), [(0.5, True), (0.8, True), (0.95, False), (1.0, False)])
def test_measured_ranks_count_where_they_differ_by_a_tenth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speed: float, is_used: bool
) -> None:
    """`--plan auto` of the command and the server. A failure means that it waits for the slow one, or follows noise."""
    path = tmp_path / "profile.json"
    measured = rate_ranks(EVEN, 1.0, speed)
    path.write_text(measured.to_json())
    assert Profile.from_json_file(path) == measured
    monkeypatch.setenv("DITILE_PROFILE", str(path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(choose, "_decide_on_first_rank", lambda decide, run: decide(1))
    request = GenerateOptions(height=256, width=256, steps=8)
    plan = choose.resolve_plan_option("auto", request, RunOptions(), Plan())[0]
    assert plan.world == 2
    assert bool(plan.stage_weights or plan.stage_blocks or plan.token_weights) == is_used
    assert bool(load_machine_profile(PlanQuestion()).by_rank) == is_used
    # Asked for by name, however little they differ.
    assert load_machine_profile(PlanQuestion(devices_of=str(path))).by_rank
    assert json.loads(path.read_text())["ranks"][1]["speed"] == speed
