"""Plan says no early. A failure would mean that a plan that cannot run gets as far as the ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditile import Plan, PlanError
from ditile.plan.layout import Grid, Layout, Split
from ditile.plan.plan import AXES, SEQUENCE, Facts

CHOICES = {name: get_args(kind) for name, kind in get_type_hints(Plan).items()}
MODES = CHOICES["warmup_mode"]
PER_STAGE = st.integers(1, 50)
SPEED = st.floats(0.01, 100)


@st.composite
def plans(draw: Any) -> Plan:
    """Any legal plan."""
    degrees = {name: draw(st.integers(1, 5)) for name in AXES}
    degrees["distrifusion" if draw(st.booleans()) else "pipefusion"] = 1
    outer = "distrifusion" if degrees["distrifusion"] > 1 else draw(st.sampled_from(("ring", "gather")))
    degrees |= {name: 1 for name in ("ring", "gather", "distrifusion") if name != outer}
    stages = degrees["pipefusion"]
    of_stages = {"size": stages, "kind": draw(st.sampled_from([None, "stage_blocks", "stage_weights"]))}
    values = PER_STAGE if of_stages["kind"] == "stage_blocks" else SPEED
    cut = {of_stages["kind"]: draw(st.lists(values, min_size=stages, max_size=stages))} if of_stages["kind"] else {}
    token_ranks = math.prod(degrees[name] for name in SEQUENCE)
    weights = draw(st.none() | st.lists(SPEED, min_size=token_ranks, max_size=token_ranks))
    of_tensor = draw(st.none() | st.lists(SPEED, min_size=degrees["tensor"], max_size=degrees["tensor"]))
    shared_out = max(degrees[name] for name in ("ring", "gather", "ulysses", "tensor")) > 1
    divides_tokens = max(degrees[name] for name in SEQUENCE) > 1
    vae = draw(st.sampled_from(CHOICES["vae"]))
    offload, world = draw(st.sampled_from(CHOICES["offload"])), math.prod(degrees.values())
    of_image = world // degrees["data"]
    of_ranks = draw(st.none() | st.lists(SPEED, min_size=of_image, max_size=of_image)) if vae == "rows" else None
    some_ranks = st.none() | st.sets(st.integers(0, world - 1), min_size=1, max_size=4)
    mode = draw(st.sampled_from(MODES[:2] if shared_out else MODES)) if stages > 1 else "serial"
    return Plan(
        **degrees, **cut, warmup_mode=mode,
        patches=None if degrees["distrifusion"] > 1 else draw(st.none() | st.integers(1, 64)),
        warmup=draw(st.integers(0, 99)),
        token_weights=weights, tensor_weights=of_tensor, rank_weights=of_ranks,
        uaa=draw(st.none() | st.booleans()) if weights is of_tensor is None else None,
        async_ulysses=degrees["ulysses"] > 1 and draw(st.booleans()),
        split_scheme=draw(st.sampled_from(CHOICES["split_scheme"])),
        wire_dtype=draw(st.sampled_from((None, "fp8", "int8"))) if divides_tokens or stages > 1 else None,
        text=draw(st.sampled_from(CHOICES["text"])),
        vae=vae, vae_block_size=draw(st.none() | st.integers(1, 512)) if vae == "rows" else None,
        offload=offload, offload_ranks=draw(some_ranks.map(lambda x: x and [*x])) if offload == "blocks" else None,
    )  # fmt: skip


@given(plans())
def test_a_plan_survives_its_line_and_json(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan and "\n" not in str(plan)
    assert Plan(**json.loads(json.dumps(plan.to_dict()))) == plan


NAN = float("nan")
REFUSED: list[tuple[dict[str, Any] | str, str]] = [
    ({"pipefuson": 2}, "Plan(pipefuson=..) is not known; did you mean pipefusion?"),
    ({"pipefusion": 0}, "pipefusion=0 should be greater than or equal to 1; try pipefusion=1"),
    ({"pipefusion": True}, "pipefusion=True"),
    ({"ulysses": "2"}, "ulysses='2'"),
    ({"warmup": -1}, "warmup=-1 should be greater than or equal to 0; try warmup=0"),
    ({"references": 0, "patches": 1}, "use patches=2 or more"),
    ({"warmup_mode": "none"}, "'serial', 'pipelined', 'sequence' or 'auto'"),
    ({"vae_block_size": 64}, "vae_block_size=64 belongs to vae=rows; add it"),
    ({"uaa": "yes"}, "uaa='yes' should be a valid boolean"),
    ({"pipefusion": 2, "stage_blocks": (3,)}, "give 2 numbers"),
    ({"pipefusion": 2, "stage_blocks": (3, 0)}, "should be greater than or equal to 1; try stage_blocks=7,7,8"),
    ({"pipefusion": 2, "stage_weights": (1, 0)}, "greater than or equal to 0.000000001"),
    ({"pipefusion": 2, "stage_weights": (1, NAN)}, "finite number"),
    ({"pipefusion": 2, "stage_weights": (1, 1), "stage_blocks": (3, 4)}, "and rank_weights for decode and text"),
    ({"cfg": 2, "data": 2, "vae": "rows", "rank_weights": (1, 2, 1, 2)}, "has shares for 2; give 2 numbers"),
    ({"ring": 2, "ulysses": 2, "token_weights": (1, 2)}, "has shares for 4; give 4 numbers"),
    (
        {"tensor": 2, "tensor_weights": (1, 2, 3)},
        "has 3 numbers, and 'tensor=2",
    ),
    ({"tensor": 2, "tensor_weights": (1, 2), "uaa": False}, "uaa is off; leave one of them out"),
    ({"ring": 2, "offload": "blocks", "offload_ranks": (2,)}, "offload_ranks=2 does not name ranks of this plan, each"),
    ({"distrifusion": 2, "pipefusion": 2}, "spend the same staleness; set one of them to 1"),
    ({"distrifusion": 2, "ring": 2}, "ring=2 and distrifusion=2 split the same tokens; use one of them, and ulysses"),
    ({"distrifusion": 2, "gather": 2}, "gather=2 and distrifusion=2 split the same tokens"),
    ({"ring": 2, "gather": 2}, "split the same tokens; use one of them"),
    ({"pipefusion": 2, "gather": 2, "warmup_mode": "sequence"}, "gather=2 splits tokens or weights already"),
    ({"distrifusion": 2, "patches": 2}, "leave patches out"),
    ({"async_ulysses": True}, "ulysses=2 or more"),
    ({"tensor": 2, "wire_dtype": "int8"}, "use it with pipefusion, ulysses, ring, gather or distrifusion"),
    ({"pipefusion": 2, "warmup_mode": "separate"}, "warmup_mode='separate'"),
    ("pipefusion", "write name=value with data, cfg"),
    ("pipefusion=2 pipefusion=2", "each once"),
    ("stage_blocks=1,x", "'1,x' should be a valid integer, such as 7,7,8"),
]
"""Values of fields, or a line for `Plan.parse`; and the value or the hint that the error must have."""


@pytest.mark.parametrize(("asked", "says"), REFUSED)
def test_what_is_no_plan_is_refused_with_its_value_and_a_hint(asked: dict[str, Any] | str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(asked) if isinstance(asked, str) else Plan(**asked)
    assert says in str(caught.value) and isinstance(caught.value, ValueError) and "\n" not in str(caught.value)


def test_what_does_not_fit_is_refused() -> None:
    plan = Plan(pipefusion=4, patches=6)
    plan.check_world(4)
    plan.check(Facts(blocks=4, rows=6))
    with pytest.raises(PlanError, match="needs 4"):
        plan.check_world(3)
    with pytest.raises(PlanError, match="try 1 to 3; and .* try 1 to 5"):
        plan.check(Facts(blocks=3, rows=5))


def test_weights_count_in_the_rows_that_ulysses_splits() -> None:
    """A failure means that a plan is legal whose first step ends."""
    facts = Facts(rows=8, tokens_per_row=4)
    even = Plan(distrifusion=2, ulysses=8)
    assert not even.illegal(facts)
    weights = (9.0,) * 8 + (1.0,) * 8
    (line,) = dataclasses.replace(even, token_weights=weights).illegal(facts)
    assert "split a patch of 4 tokens" in line
    layout = Layout.cut_into_patches(Grid(8, 4), 1, 0, "none")
    with pytest.raises(PlanError, match="a share of the image has fewer tokens than the 8 ranks"):
        Split(1, 2, 8, weights=weights).shard_tokens(layout, None)


FACTS = Facts(model="M", blocks=6, heads=4, rows=8, tokens_per_row=2, branches=1)
UNLIKE = Facts(branches=4, call_rows=(2, 1, 1))


@pytest.mark.parametrize(
    ("plan", "says", "facts"),
    [
        (Plan(pipefusion=7), "pipefusion=7 exceeds the 6 blocks of M; try 1 to 6", FACTS),
        (Plan(pipefusion=2, stage_blocks=(3, 4)), "give 2 numbers that add up to 6", FACTS),
        (Plan(tensor=3), "tensor=3 does not divide the 4 heads of M; try 1, 2, 4", FACTS),
        (Plan(ulysses=3, uaa=False), "ulysses=3 does not divide the 4 heads of M and uaa is off; try 1, 2, 4,", FACTS),
        (Plan(ulysses=4, tensor=2, uaa=False), "2 heads of each of tensor=2 of M and uaa is off; try 1, 2, or", FACTS),
        (Plan(patches=9), "patches=9 exceeds the 8 token rows of this image; try 1 to 8", FACTS),
        (Plan(distrifusion=9), "distrifusion=9 exceeds the 8 token rows", FACTS),
        (Plan(patches=8, ring=3), "a patch of 2 tokens, less than one each; try 1 to 2", FACTS),
        (Plan(distrifusion=4, ulysses=5), "a patch of 4 tokens", FACTS),
        (Plan(cfg=2), "cfg=2 divides branches of guidance, and this call has 1", FACTS),
        # Patches that nobody asked for are not named, where blocks are too few.
        (Plan(pipefusion=9), "pipefusion=9 exceeds the 6 blocks of M; try 1 to 6", FACTS),
        (Plan(pipefusion=9), "pipefusion=9 makes as many patches", Facts(rows=8)),
        (Plan(pipefusion=9), "try patches=1 to 8", Facts(rows=8)),
        # Guidance is on, with another number of branches.
        (Plan(cfg=3), "cfg=3 divides branches of guidance, and this call has 2; use cfg=2", Facts(branches=2)),
        (Plan(cfg=4, distrifusion=2), "this call has 4, and stale keys keep its calls whole; use cfg=2", UNLIKE),
        (Plan(pipefusion=2), "the calls of a step have 2, 1, 1 branches", UNLIKE),
    ],
)  # fmt: skip
def test_what_the_facts_forbid(plan: Plan, says: str, facts: Facts) -> None:
    """Each rule alone; with unknown facts there is nothing to say."""
    violations = plan.illegal(facts)
    assert len(violations) == 1 and says in violations[0], violations
    assert plan.illegal(Facts()) == []
    assert Plan(cfg=4).illegal(UNLIKE) == []


@given(plans())
def test_a_large_model_and_image_allow_every_plan(plan: Plan) -> None:
    """Whose tensor degree divides the heads, whatever is combined."""
    facts = Facts(heads=60, rows=400, tokens_per_row=64, text=512, branches=5)
    assert plan.illegal(facts) == [] or (plan.uaa is False and "uaa" in plan.illegal(facts)[0])
