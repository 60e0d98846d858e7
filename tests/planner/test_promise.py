"""Bounds on seconds and on PSNR, and the promises that keep them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ditile.cache.config import FittedScheduleConfig
from ditile.cache.fitted.identity import Identity
from ditile.cache.fitted.schedule import Schedule, StepBudget
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.planner.promise import MARGIN_DB, Bounds, Promise, choose_promise, find_schedule

NUM_STEPS = 10
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


SCHEDULE = Schedule(
    model="a-model",
    identity=Identity(
        model_class="AModel",
        weights=({},),
        guidance={},
        size={},
        scheduler="Euler",
        solver={},
        sigmas=tuple(1 - step / NUM_STEPS for step in range(NUM_STEPS)),
        latents=(16, 4),
    ),
    captions=8,
    budgets=tuple(make_budget(size) for size in (3, 5, 7)),
)


def predict_seconds(plan: Plan, num_computed: int) -> float:
    """A second for each step, half of it on two ranks."""
    return num_computed / plan.world


def choose(bounds: Bounds, schedule: Schedule | None = SCHEDULE, *, predicts: bool = True) -> Promise:
    predict = predict_seconds if predicts else None
    return choose_promise(bounds, "a-model", NUM_STEPS, [SLOW, FAST], schedule=schedule, predict=predict)


@pytest.mark.parametrize(
    ("bounds", "num_computed"),
    [
        ({"seconds": 9.0}, 10),
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
        ({"min_psnr": 45.0}, None, "there is none of a-model for 10 steps; run `ditile fit --model a-model"),
        ({"seconds": 1.0}, None, "as long as about 30 images, and add --schedule FILE"),
    ],
)
def test_what_cannot_be_kept_says_what_could(bounds: dict[str, float], schedule: Schedule | None, says: str) -> None:
    with pytest.raises(PlanError) as info:
        choose(Bounds(**bounds), schedule)
    assert says in str(info.value)


def test_a_promise_travels_as_json() -> None:
    promise = choose(Bounds(min_psnr=40.0))
    assert Promise.from_json_dict(promise.to_json_dict(), "a-model", None) == promise


def test_a_schedule_of_other_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    SCHEDULE.write(path)
    assert find_schedule("a-model", NUM_STEPS, str(path)) == (SCHEDULE, str(path))
    with pytest.raises(PlanError, match="has 10 steps, and the call 12; run `ditile fit"):
        find_schedule("a-model", 12, str(path))
    assert find_schedule("a-model", NUM_STEPS, None) == (None, None)


def test_a_schedule_of_another_size_is_refused_before_anything_is_promised() -> None:
    """With the command that fits one of the size. A failure means a promise that the model then refuses to keep."""
    schedule, path = find_schedule("shapes-flux", 20, None, {"height": 128, "width": 128})
    assert schedule is not None
    size = {"height": 256, "width": 128}
    assert find_schedule("shapes-flux", 20, None, size) == (None, None)
    with pytest.raises(PlanError, match=r"is for height=128, and the call has 256; .* --height 256 --width 128`"):
        find_schedule("shapes-flux", 20, path, size)
    with pytest.raises(PlanError, match="needs a fitted schedule: .* --height 256 --width 128`"):
        choose_promise(Bounds(min_psnr=40), "shapes-flux", 20, [SLOW], schedule=None, size=size)
