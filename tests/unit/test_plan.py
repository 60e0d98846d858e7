"""Plan says no early. A failure would mean that a plan that cannot run gets as far as the ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditile import Plan, PlanError


@st.composite
def plans(draw: Any) -> Plan:
    stages = draw(st.integers(1, 9))
    blocks = draw(st.none() | st.lists(st.integers(1, 50), min_size=stages, max_size=stages))
    patches = draw(st.none() | st.integers(1, 64))
    return Plan(pipefusion=stages, patches=patches, warmup=draw(st.integers(0, 99)), stage_blocks=blocks)


@given(plans())
def test_a_plan_survives_its_line_and_json(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan(**json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pipefusion": 0}, "pipefusion=0"),
        ({"pipefusion": True}, "pipefusion=True"),
        ({"pipefusion": 1.5}, "pipefusion=1.5"),
        ({"patches": 0}, "patches=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"warmup_mode": "none"}, "serial"),
        ({"pipefusion": 2, "stage_blocks": (3,)}, "give 2 numbers"),
        ({"pipefusion": 2, "stage_blocks": (3, 0)}, "at least 1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_value(values: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        Plan(**values)
    assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["pipefusion", "stages=2", "pipefusion=2 pipefusion=2", "patches=x"])
def test_a_line_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.parse(text)


def test_defaults_and_derived_numbers() -> None:
    assert (Plan().world, Plan().num_patches, str(Plan())) == (1, 1, "pipefusion=1")
    assert (Plan(pipefusion=3).world, Plan(pipefusion=3).num_patches) == (3, 3)
    assert Plan(pipefusion=3, patches=5).num_patches == 5


def test_what_does_not_fit_is_refused() -> None:
    plan = Plan(pipefusion=4, patches=6)
    for fits in (lambda: plan.check_world(4), lambda: plan.check_blocks("M", 4), lambda: plan.check_rows(6)):
        fits()
    with pytest.raises(PlanError, match="needs 4"):
        plan.check_world(3)
    with pytest.raises(PlanError, match="try 1 to 3"):
        plan.check_blocks("M", 3)
    with pytest.raises(PlanError, match="try 1 to 5"):
        plan.check_rows(5)
    with pytest.raises(PlanError, match="add up to 8"):
        Plan(pipefusion=2, stage_blocks=(3, 4)).check_blocks("M", 8)
