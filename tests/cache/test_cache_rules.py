"""When the cache leaves a step out. A failure would mean that it does where it was told not to, or never does.

The rules are run on sequences of differences that are made up, and held against what their documentation says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ditile.cache.config import DBCacheConfig
from ditile.cache.step_rules import DecisionRecord, RuleVerdict, SkipRules, relax_threshold
from ditile.cache.unit_decision import (
    WHOLE_BATCH,
    CacheCall,
    Difference,
    SkipDecider,
    compute_relative_difference,
    split_into_units,
)
from ditile.model.hooks.protocols import CallPosition, SkipAgreement

STEPS = 19


class Run(NamedTuple):
    """What became of a sequence of differences."""

    skipped: list[int]
    record: DecisionRecord


def drive(limits: DBCacheConfig, differences: Sequence[float], mask: Sequence[int] | None = None) -> Run:
    """Asks the rules at each step, and tells them what was decided."""
    rules, record = SkipRules(limits, None if mask is None else tuple(mask)), DecisionRecord()
    for step, difference in enumerate(differences):
        verdict = rules.decide_without_difference(step, record)
        found = difference if verdict is RuleVerdict.MEASURE else None
        skipped = verdict is RuleVerdict.SKIP or (found is not None and rules.should_skip_step(found, record))
        rules.record_decision(step, record, skipped=skipped, difference=found)
    return Run(record.skipped, record)


SHORT = {
    "threshold": "residual_diff_threshold",
    "budget": "max_accumulated_residual_diff_threshold",
    "budget_resets": "accumulated_resets",
}


def limits(static: bool = False, **changes: Any) -> DBCacheConfig:
    """Settings, of which some have shorter names here."""
    values = {
        SHORT.get(name, name): value for name, value in {"threshold": 0.5, "max_warmup_steps": 0, **changes}.items()
    }
    return DBCacheConfig(**values, steps_computation_policy="static" if static else "dynamic")


def left_out(changes: dict[str, Any], differences: Sequence[float] = (0.1,) * STEPS, mask: Any = None) -> list[int]:
    return drive(limits(**changes), differences, mask).skipped


def test_the_threshold() -> None:
    """A difference that equals it is computed; 0 leaves nothing out, 1 everything, and neither measures."""
    assert left_out({"threshold": 0.1}) == []
    assert left_out({"threshold": 0.1}, [0.0999] * 4) == [1, 2, 3]
    for threshold, wanted in ((0.0, 0), (1.0, STEPS - 1), (7.0, STEPS - 1)):
        skipped, record = drive(limits(threshold=threshold), [0.9] * STEPS)
        assert len(skipped) == wanted and record.differences == {}
    assert SkipRules(limits(threshold=0.0)).never_skips and not SkipRules(limits(threshold=1e-12)).never_skips
    assert (
        SkipRules(limits(threshold=0.0), (1, 0)).never_skips
        and not SkipRules(limits(threshold=0.0, static=True), (1, 0)).never_skips
    )


def test_numbers_that_are_none() -> None:
    """Regression: nothing that overflowed may pass for something that did not change."""
    assert left_out({}, [math.nan] * 5) == left_out({}, [math.inf] * 5) == []
    assert left_out({"budget": 3.0, "threshold": 1.0}, [math.nan] * 5) == []


@st.composite
def settings_of_a_run(draw: Any) -> tuple[SimpleNamespace, list[float], list[int] | None]:
    steps = draw(st.integers(1, 24))
    made = SimpleNamespace(
        threshold=draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])), max_warmup_steps=draw(st.integers(0, 8)),
        warmup_interval=draw(st.integers(1, 4)), max_cached_steps=draw(st.integers(-1, 6)),
        max_continuous_cached_steps=draw(st.integers(-1, 3)), budget=draw(st.sampled_from([None, 0.0, 0.3, 1.0])),
        budget_resets=draw(st.booleans()), static=draw(st.booleans()),
    )  # fmt: skip
    differences = [draw(st.sampled_from([0.0, 0.05, 0.15, 0.3, 0.7])) for _ in range(steps)]
    mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=steps, max_size=steps))
    return made, differences, mask


def why_computed(
    made: SimpleNamespace, differences: list[float], mask: list[int] | None, skipped: list[int], step: int
) -> Any:
    """Every reason in the documentation to compute a step, given the steps that were left out before it."""
    before = [s for s in skipped if s < step]
    computed = [s for s in range(step) if s not in before]
    streak = step - 1 - computed[-1] if computed else 0
    warmup = made.max_warmup_steps if mask is None or 0 not in mask else min(made.max_warmup_steps, mask.index(0))
    yield not computed
    yield step < warmup and step % made.warmup_interval == 0
    yield mask is not None and mask[step] == 1
    if mask is not None and made.static:
        return
    yield made.max_cached_steps >= 0 and len(before) >= made.max_cached_steps
    yield made.max_continuous_cached_steps >= 0 and streak >= made.max_continuous_cached_steps
    yield made.threshold <= 0
    if made.budget is not None and made.budget > 0:
        counted = before if not made.budget_resets else [s for s in before if s > computed[-1]]
        yield sum(differences[s] for s in counted) + differences[step] >= made.budget - 1e-12
    yield differences[step] >= made.threshold and made.threshold < 1.0


@given(settings_of_a_run())
def test_a_step_is_computed_where_there_is_a_reason_and_only_there(
    run: tuple[SimpleNamespace, list[float], Any],
) -> None:
    """Both ways, for all rules together."""
    made, differences, mask = run
    skipped = drive(limits(**vars(made)), differences, mask).skipped
    for step in range(len(differences)):
        reasons = any(why_computed(made, differences, mask, skipped, step))
        assert reasons == (step not in skipped), f"step {step} of {skipped}"


def test_the_dynamic_threshold_follows_the_first_five_differences() -> None:
    """1.25 times their mean, above the threshold that was set and below the highest that may be."""
    five = [0.1, 0.08, 0.12, 0.1, 0.1]
    assert relax_threshold(0.08, five, 1.25, 0.16) == pytest.approx(0.125)
    assert relax_threshold(0.08, [*five, 9.0], 1.25, 0.16) == pytest.approx(0.125), "later ones do not count"
    assert relax_threshold(0.08, five[:4], 1.25, 0.16) == 0.08, "not measured yet"
    assert relax_threshold(0.08, [0.2] * 5, 1.25, 0.16) == 0.08, "the step changed too much to be relaxed about"
    assert relax_threshold(0.08, [0.01] * 5, 1.25, 0.16) == 0.08, "it never falls"
    assert relax_threshold(0.08, [0.1, 0.0, 0.0, 0.1, 0.1], 1.25, 0.16) == pytest.approx(0.125), (
        "blocks that did not change"
    )
    assert relax_threshold(0.08, [0.0] * 5, 1.25, 0.16) == 0.08


@given(st.integers(1, 12), st.none() | st.integers(1, 6), st.sampled_from(["row", "image", "batch"]))
def test_units_share_out_the_rows(rows: int, images: int | None, couple: str) -> None:
    """Every row is in exactly one unit; an image has one in each branch of guidance, and they decide together."""
    units = split_into_units(rows, images, couple)
    covered = [row for unit in units for row in range(rows)[unit.batch_slice]]
    assert sorted(covered) == list(range(rows))
    assert [unit.place for unit in units] == list(range(len(units))) and all(u.among == len(units) for u in units)
    if couple == "image" and images and images > 1 and rows % images == 0:
        assert [list(range(rows)[unit.batch_slice]) for unit in units] == [
            list(range(k, rows, images)) for k in range(images)
        ]
    elif couple != "row":
        assert units == [WHOLE_BATCH]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_difference_is_that_of_the_means() -> None:
    """Also in parts: ranks that have some tokens each add up their sums."""
    before, now = noise(2, 6, 8), noise(2, 6, 8, seed=1)
    wanted = float((now - before).abs().mean() / before.abs().mean())
    measure = Difference()
    assert compute_relative_difference(*map(float, measure.sum_change_and_size(before, now))) == pytest.approx(
        wanted, rel=1e-6
    )
    parts = [measure.sum_change_and_size(before[:, k : k + 2], now[:, k : k + 2]) for k in (0, 2, 4)]
    assert compute_relative_difference(*(float(sum(of_each)) for of_each in zip(*parts, strict=True))) == pytest.approx(
        wanted, rel=1e-6
    )
    half = measure.sum_change_and_size(before.half(), now)  # what is kept may be of a smaller type
    assert compute_relative_difference(*map(float, half)) == pytest.approx(wanted, rel=1e-2)
    long = torch.ones(1, 70000, 1, dtype=torch.float16)
    assert [*map(float, measure.sum_change_and_size(long, long * 2))] == [70000, 70000], (
        "sums of halves must not overflow"
    )


def test_a_probe_of_zeros_says_nothing() -> None:
    """Such as of blocks whose gates are 0. A failure means that all is left out while the rest of the model changes."""
    for difference in (Difference(), Difference(important=0.5)):
        one = SkipDecider(SkipRules(limits(threshold=0.5)), difference)
        zeros, ones = torch.zeros(1, 4, 4), torch.ones(1, 4, 4)
        for step, (probe, wanted) in enumerate(((zeros, False), (zeros, False), (ones, False), (ones, True))):
            assert decide(one, probe, step) == [wanted], (difference, step)


def test_what_enters_behind_the_probe_counts() -> None:
    """The size of each argument, by image. A failure means that control that begins, ends or jumps is not noticed."""
    one, probe = decider(), torch.ones(2, 4, 4)
    sizes = [(4.0, 900.0)] * 2, [(5.0, 900.0), (5.0, 950.0)], [(0.0, 900.0), (5.0, 900.0)], [(4.0, 900.0)] * 2
    wanted = [False, False], [True, True], [False, True], [False, True]
    for step, (control, skips) in enumerate(zip(sizes, wanted, strict=True)):
        assert decide(one, probe, step, images=2, control=torch.tensor(control)) == skips, step


def decider(threshold: float = 0.5, **how: Any) -> SkipDecider:
    return SkipDecider(SkipRules(limits(threshold=threshold)), Difference(), **how)


def decide(
    one: SkipDecider,
    probe: Tensor,
    step: int,
    *,
    images: int | None = None,
    control: Tensor | None = None,
    **moment: Any,
) -> list[bool]:
    """One call of a model, and what is remembered of it."""
    at = CallPosition(step, images=images, **moment)
    call = CacheCall(at, step, split_into_units(len(probe), images, "image"), len(probe), control=control)
    skips = one.decide_skips(probe, call, SkipAgreement())
    one.store_probes(probe, call, skips)
    return skips


def test_images_are_decided_on_apart() -> None:
    """Of two images with two rows each (guidance, in front), the one that changed is computed, with both its rows."""
    one, probe = decider(), torch.ones(4, 3, 2)
    assert decide(one, probe, 0) == [False], "how many images there are is known after the first step"
    now = probe.clone()
    now[1] = 5.0  # the first branch of the second image
    assert decide(one, now, 1, images=2) == [True, False]
    assert decide(one, now, 2, images=2) == [True, True], "the second was renewed, the first is what it was"
    assert decide(one, probe, 3, images=2) == [True, False], "and is compared with its own last computed step"
    assert [record.skipped for _, _, _, record in one.iterate_records()] == [[1, 2, 3], [2]]


def test_branches_may_share_the_difference_of_the_first() -> None:
    """`cfg_diff_compute_separate=False`: both are left out or none."""
    one, probe = decider(shares=True), torch.ones(1, 3, 2)
    decide(one, probe, 0), decide(one, probe, 0, branch=1)
    assert decide(one, probe, 1) == [True] and decide(one, probe * 9, 1, branch=1) == [True]
    assert decide(one, probe * 9, 2) == [False] and decide(one, probe, 2, branch=1) == [False]


def test_a_patch_without_budget_holds_up_those_beside_it() -> None:
    """A failure would mean that a patch which has spent its budget is left out because another one has not."""
    one = SkipDecider(SkipRules(limits(threshold=0.8, budget=0.5)), Difference())
    probe, both = torch.ones(1, 4, 2), {"patches": (0, 1), "sizes": lambda: [2, 2]}
    assert decide(one, probe, 0, **both) == [False]
    assert decide(one, probe[:, :2] * 1.4, 1, patches=(0,)) == [True], "0.4 of 0.5 are spent"
    assert decide(one, probe[:, 2:], 1, patches=(1,)) == [True], "nothing is"
    assert decide(one, probe * 1.2, 2, **both) == [False], "0.2 more is too much for the first"
    assert decide(one, probe[:, 2:] * 1.4, 3, patches=(1,)) == [True], "and not for the second"


def test_patches_at_hand_are_decided_on_together() -> None:
    """In a synchronous step; later each by itself."""
    one, probe = decider(0.8), torch.ones(1, 4, 2)
    both: dict[str, Any] = {"patches": (0, 1), "sizes": lambda: [3, 1]}
    assert decide(one, probe, 0, **both) == [False]
    rough = probe.clone()
    rough[:, 3] = 9.0
    assert decide(one, rough, 1, **both) == [False], "8 / 4"
    assert decide(one, probe[:, :3], 2, patches=(0,)) == [True]
    assert decide(one, probe[:, 3:], 2, patches=(1,)) == [False], "8 / 9"
    assert decide(one, probe, 3, must_compute=True, **both) == [False], "what follows needs it"
