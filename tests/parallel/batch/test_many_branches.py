"""More than two branches of guidance: in one call, in calls of their own, and in calls with unlike numbers of them.

A prediction that keeps all rows of its call is bitwise; one with fewer rows is multiplied in matrices of other shapes:
1e-5 relative in fp32.
"""

from __future__ import annotations

from typing import Any

import pytest
from diffusers.guiders import SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ditile.plan.errors import ModelError, PlanError
from ditile.plan.layout import count_most_in_rows, spread_branches
from ditile.plan.plan import Plan
from tests.pool import Pool, share
from tests.runner.cases import close, divided
from tests.zoo import ZOO
from tests.zoo.entry import film
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4
FOUR: dict[str, Any] = {
    "stg_scale": 1.0, "modality_scale": 3.0, "audio_stg_scale": 1.0, "audio_modality_scale": 3.0,
    "spatio_temporal_guidance_blocks": [1],
}  # fmt: skip
"""LTX-2: a call with two branches, and two calls with one."""
THREE: dict[str, Any] = {"modality_scale": 3.0, "audio_modality_scale": 3.0}
STALE = {"cfg": 3, "distrifusion": 2, "warmup": STEPS}
UNGUIDED = {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}


def make_guided() -> Any:
    """Qwen-Image of modular blocks, with three calls a step."""
    pipe = ZOO["qwen-image-modular"].make()
    skipped = LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=False)
    guider = SkipLayerGuidance(
        guidance_scale=3.0, skip_layer_config=skipped, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0
    )
    pipe.update_components(guider=guider)
    return pipe


def draw(pipe: Any, name: str, changes: dict[str, Any]) -> list[Tensor]:
    return list_tensors(pipe(**ZOO[name].call() | {"num_inference_steps": STEPS} | changes))


def count_calls(pipe: Any) -> list[int]:
    """The rows of each call of the transformer that this rank computes from now on."""
    rows: list[int] = []

    def note(module: Any, args: Any) -> None:
        rows.append(len(args[0]))

    names = ("img_in", "proj_in", "visual_embeddings")
    embedder = next(getattr(pipe.transformer, name) for name in names if hasattr(pipe.transformer, name))
    embedder.register_forward_pre_hook(note)
    return rows


def compare(name: str, plans: list[dict[str, Any]], changes: dict[str, Any]) -> list[list[int]]:
    """On a rank: draws like the pipeline alone under each plan; the rows of its calls."""
    pipe = make_guided() if name == "qwen-image-modular" else ZOO[name].make()
    wanted = share(f"{name} {changes}", draw, pipe, name, changes)
    calls, rows = [], count_calls(pipe)
    for plan in plans:
        rows.clear()
        with divided(pipe, **plan) as runner:
            for got, want in zip(draw(runner, name, changes), wanted, strict=True):
                close(got, want, (name, plan))
        calls.append(list(rows))
    return calls


def test_four_predictions_on_four_ranks(pool: Pool) -> None:
    """A failure means that LTX-2's branches are mixed up, or that a rank computes more than its own after step 0."""
    first = [2, 1, 1]
    assert pool.run(compare, 4, "ltx-2", [{"cfg": 4}], FOUR) == [[[*first, *[1] * (STEPS - 1)]]] * 4


@pytest.mark.nightly
def test_four_predictions_on_fewer_ranks(pool: Pool) -> None:
    """Two ranks learn in step 1 that the calls can be spread. A failure means that they compute more than half."""
    two = pool.run(compare, 2, "ltx-2", [{"cfg": 2}], FOUR)
    assert two == [[[1, 1, 1] * 2 + [2] * 2], [[1, 1, 1] * 2 + [1, 1] * 2]]
    three = pool.run(compare, 3, "ltx-2", [{"cfg": 3}], FOUR | UNGUIDED)
    assert three == [[[1] * (3 + STEPS - 1)]] * 3


def test_a_guider_of_three_branches(pool: Pool) -> None:
    """The third one begins with step 1. On three ranks each has a call, on two one has two.

    A failure means that a guider gets another call's prediction, or that it is refused as it has two calls at first."""
    shared = [1] * (STEPS - 2)
    assert pool.run(compare, 3, "qwen-image-modular", [{"cfg": 3}], {}) == [
        [[1, 1] + [1, 1] + shared],
        [[1, 1] + [1, 1] + shared],
        [[1, 1] + [1] + shared],
    ]
    assert pool.run(compare, 2, "qwen-image-modular", [{"cfg": 2}], {}) == [
        [[1, 1] + [1, 1] + shared * 2],
        [[1, 1] + [1, 1] + shared],
    ]


@pytest.mark.nightly
def test_tiles_in_one_call_are_divided(pool: Pool) -> None:
    """Kandinsky 6 draws tiles of a video as rows of a call. A failure means that every rank computes all tiles."""
    tiles = {"video": film(5, 16, 28), "tiles_batch_size": 2}
    calls = pool.run(compare, 2, "kandinsky-6-super-resolution", [{"cfg": 2}], tiles)
    assert calls == [[[1] * STEPS]] * 2


def refuse(name: str, plan: dict[str, Any], changes: dict[str, Any]) -> str:
    with divided(ZOO[name].make(), **plan) as runner, pytest.raises((ModelError, PlanError)) as raised:
        draw(runner, name, changes)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "plan", "changes", "says"),
    [
        ("wan-2.1", {"cfg": 3}, {}, "was called 2 time(s) in a step, with 2 branches; use cfg=2"),
        (
            "ltx-2",
            STALE,
            THREE,
            "in a step, with 3 branches, and stages and stale keys keep the calls whole; use cfg=2",
        ),
    ],
)
def test_too_many_groups(pool: Pool, name: str, plan: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    """The number that works is named."""
    for line in pool.run(refuse, Plan(**plan).world, name, plan, changes):
        assert says in line and "\n" not in line, line


@given(rows=st.lists(st.integers(1, 4), min_size=1, max_size=4), ranks=st.integers(1, 5), keeps=st.booleans())
def test_every_branch_has_one_rank(rows: list[int], ranks: int, keeps: bool) -> None:
    """Nobody has two branches more than another, unless calls stay whole."""
    spread = spread_branches(rows, ranks, keeps_calls=keeps)
    for call, count in enumerate(rows):
        assert [branch for own in spread for branch in own[call]] == list(range(count)) or keeps
        assert sum(len(own[call]) for own in spread) == count
    loads = [sum(map(len, own)) for own in spread]
    assert keeps or max(loads) - min(loads) <= 1
    assert keeps or max(loads) <= count_most_in_rows(rows, ranks)
