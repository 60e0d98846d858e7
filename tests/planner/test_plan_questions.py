"""Questions to `ditile plan`: hosts, bounds beside a given plan, short memory, few steps, and promises."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ditile.cache.config import FittedScheduleConfig
from ditile.cache.fitted.schedule import Schedule, StepBudget
from ditile.cli.main import main
from ditile.model.known import CONFIGS
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.planner import hardware
from ditile.planner.choose import answer_question
from ditile.planner.ops import CacheSkips, OpPricer
from ditile.planner.profile import DecodeWork, Link, Profile
from ditile.planner.promise import MARGIN_DB, Bounds, Promise, choose_promise, find_schedule
from ditile.planner.question import PlanQuestion
from ditile.planner.search import PlanSearch, SearchRequest, SearchResult, make_pricer
from ditile.planner.subject import PlanSubject
from tests.planner.test_planner import EVEN, call, subject

FLUX = "--model flux.1-dev --hardware l40-pcie"


@pytest.mark.parametrize("text", ["ring=2 tensor=4", "distrifusion=2 tensor=4", "ulysses=2 tensor=4"])
def test_the_prediction_is_gathered_over_the_link_that_tokens_cross(text: str) -> None:
    """Ranks with other tokens are on the other host. A failure means that a gather between hosts costs nothing."""
    one, profile = (
        PlanSubject.from_configs("flux.1-dev", CONFIGS / "flux.1-dev"),
        hardware.load_profile("l40-pcie", "1Gbit"),
    )
    shape = one.make_call_shape({"height": 512, "width": 512, "num_inference_steps": 4, "prompt": ""}, 2)
    pricer, job = make_pricer(one, {}, profile, 4), one.make_plan_job(Plan.parse(text), shape)
    assert pricer.price_call(job).exposed_s > make_pricer(one, {}, profile).price_call(job).exposed_s
    assert OpPricer(pricer, job, CacheSkips()).get_axis_link(text.split("=")[0]).bandwidth < profile.link.bandwidth / 10
    assert OpPricer(pricer, job, CacheSkips()).get_axis_link("pipefusion") == profile.link, "no axis, no other host"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            f"{FLUX} --devices 8 --hosts 3 --interlink 10Gbit",
            "devices=8 cannot be split evenly over hosts=3; give --devices",
        ),
        (f"{FLUX} --devices 1 --price pipefusion=2", "'pipefusion=2' needs 2 devices, and there are devices=1"),
        (f"{FLUX} --memory 1GB --price pipefusion=2", "needs 27.55 GB a device, and there are 1.00 GB"),
        (f"{FLUX} --host-memory 8GB --price offload=blocks", "keeps 40.80 GB of weights in the host's memory, and"),
        (f"{FLUX} --max-latency 0.1 --price pipefusion=8", "s, and max_latency=0.1"),
        (f"{FLUX} --warmup 2 --price pipefusion=2", "warmup=2 is for a search; say it in price='pipefusion=2'"),
        (f"{FLUX} --cache R=0.1", "decides by what it measures; say which share"),
    ],
)
def test_bad_questions_get_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure means that a bound is not looked at: beside a plan that is given as in a search."""
    assert main(["plan", *words.split(" ")]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize(("height", "devices", "also"), [(1024, 2, "text=split"), (4096, 8, "text=split vae=rows")])
def test_text_encoders_and_decode_are_shared_out_where_memory_is_short(height: int, devices: int, also: str) -> None:
    """A failure means that a search says no plan fits where one does, or shares out what there is room for."""
    profile, one = hardware.load_profile("rtx-4090"), PlanSubject.from_configs("flux.1-dev", CONFIGS / "flux.1-dev")
    call = {"height": height, "width": height, "num_inference_steps": 28, "prompt": "", "max_sequence_length": 512}
    result = PlanSearch(one, call, profile, SearchRequest(devices=devices)).find_fastest_plans()
    words = str(result.prices[0].plan)
    assert words.endswith(also) and result.too_large
    assert all(price.memory_bytes <= profile.memory_bytes for price in result.prices)
    question = PlanQuestion(
        model="flux.1-dev", hardware="rtx-4090", height=height, width=height, devices=devices, price=words,
        cuda_graphs=False,
    )  # fmt: skip
    given = answer_question(question).result
    assert given.prices[0].memory_bytes == result.prices[0].memory_bytes


def test_the_answer_says_what_a_host_must_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks that divide tokens keep the weights twice, and those of stages once.

    A failure means a machine with two GPUs that runs out of the host's memory while it loads."""
    words = ["plan", "--model", "flux.1-dev", "--hardware", "rtx-4090", "--price"]

    def read_host(plan: str) -> dict[str, int]:
        assert main([*words, plan, "--json", "-"]) == 0
        host: dict[str, int] = json.loads(capsys.readouterr().out)["plans"][0]["memory_of_host"]
        return host

    stages, copies = read_host("pipefusion=2 patches=2 offload=blocks"), read_host("ulysses=2 offload=blocks")
    assert copies["kept"] == 2 * stages["kept"] > 0
    assert copies["loading"] >= copies["kept"] and stages["loading"] > stages["kept"]
    assert read_host("pipefusion=8 patches=8 text=split")["kept"] == 0
    assert main([*words, "pipefusion=2 patches=2 offload=blocks", "--host-memory", "42GB"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "weights of blocks come from the host's memory" in shown and "all ranks of a host keep 40.80 GB" in shown
    assert "warning: while they load, the ranks of a host need up to 43.81 GB of its memory, and there are 42" in shown


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


def test_text_and_decode_are_in_the_call() -> None:
    """A decode of twice the pixels takes twice as long, and rows share it out; a short call under a plan of several
    ranks is decoded by rows, and a plan that is to be priced stays as it is."""
    assert EVEN.compute_text_seconds(1000, 50) == pytest.approx(2 * 1000 * 50 / 1e9)
    work = DecodeWork(operations=1e6, exchanges=10)
    waits = dataclasses.replace(EVEN, link=Link(latency_s=0.01, bandwidth=1e18, call_s=0.02))
    assert EVEN.compute_decode_seconds(work, 1000, 1) == pytest.approx(1.0)
    assert waits.compute_decode_seconds(work, 2000, 1 / 4) == pytest.approx(2 / 4 + 10 * 0.03)
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


NUM_STEPS = 20
FAST = Plan(ulysses=2)
SLOW = Plan()


def make_budget(num_computed: int) -> StepBudget:
    """A budget that loses less the more it computes: 10 dB for each step, 5 dB more than that at worst."""
    weights = {step: (1.0, 0.0) for step in range(num_computed, NUM_STEPS)}
    mean_db = 10.0 * num_computed
    return StepBudget(
        computed=tuple(range(num_computed)),
        weights=weights,
        predicted_db=mean_db,
        mean_db=mean_db,
        worst_db=mean_db - 5,
    )


BUNDLED, _ = find_schedule("shapes-flux", NUM_STEPS, None, {})
assert BUNDLED is not None
SCHEDULE = BUNDLED.model_copy(update={"budgets": tuple(map(make_budget, (3, 5, 7)))})


def predict_seconds(plan: Plan, num_computed: int) -> float:
    """A second for each step, half of it on two ranks."""
    return num_computed / plan.world


def choose(bounds: Bounds, schedule: Schedule | None = SCHEDULE) -> Promise:
    return choose_promise(bounds, "a-model", NUM_STEPS, [SLOW, FAST], schedule=schedule, predict=predict_seconds)


@pytest.mark.parametrize(
    ("bounds", "num_computed"),
    [
        ({"seconds": 11.0}, 20),
        ({"seconds": 4.9}, 7),
        ({"seconds": 1.6}, 3),
        # A budget must have been a margin above the bound when it was measured.
        ({"min_psnr": 50.0 - MARGIN_DB}, 5),
        ({"min_psnr": 40.0, "seconds": 4.0}, 7),
    ],
)
def test_the_steps_that_keep_the_bounds(bounds: dict[str, float], num_computed: int) -> None:
    """Within a time as many steps as possible, for a loss as few; a failure breaks a promise, or wastes time."""
    promise = choose(Bounds(**bounds))
    assert (promise.num_computed, promise.plan) == (num_computed, FAST)
    assert promise.seconds == num_computed / 2
    if num_computed < NUM_STEPS:
        assert (promise.mean_db, promise.worst_db) == (10.0 * num_computed, 10.0 * num_computed - 5)
        assert promise.cache_config == FittedScheduleConfig(steps=num_computed)
    else:
        assert (promise.mean_db, promise.cache_config) == (None, None)


@pytest.mark.parametrize(
    ("bounds", "schedule", "says"),
    [
        ({"seconds": 1.0}, SCHEDULE, "seconds=1 cannot be kept: the fastest that could be is 'ulysses=2' computes 3"),
        ({"seconds": 1.6, "min_psnr": 45.0}, SCHEDULE, "seconds=1.6 and min_psnr=45 cannot be kept"),
        ({"min_psnr": 45.0}, None, "there is none of a-model for 20 steps; run `ditile fit --model a-model"),
        ({"seconds": 1.0}, None, "as long as about 30 images, and add --schedule FILE"),
    ],
)
def test_what_cannot_be_kept_says_what_could(bounds: dict[str, float], schedule: Schedule | None, says: str) -> None:
    with pytest.raises(PlanError) as info:
        choose(Bounds(**bounds), schedule)
    assert says in str(info.value)


def test_a_schedule_of_another_size_is_refused_before_anything_is_promised() -> None:
    """With the command that fits one of the size. A failure means a promise that the model then refuses to keep."""
    schedule, path = find_schedule("shapes-flux", 20, None, {"height": 128, "width": 128})
    assert schedule is not None
    size = {"height": 256, "width": 128}
    assert find_schedule("shapes-flux", 20, None, size) == (None, None)
    with pytest.raises(PlanError, match=r"is for height=128, and the call has 256; .* with the options of this call"):
        find_schedule("shapes-flux", 20, path, size)
    with pytest.raises(PlanError, match="needs a fitted schedule: .* with the options of this call"):
        choose_promise(Bounds(min_psnr=40), "shapes-flux", 20, [SLOW], schedule=None)
