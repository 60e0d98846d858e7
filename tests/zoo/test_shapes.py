"""Pipelines of one's own without a text encoder: derived from the first call or an example, or refused in a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ditile
from ditile import Plan
from ditile.model.pipeline_calls import find_denoisers
from ditile.plan.errors import ModelError, StateError
from ditile_lab.study.prove import forget_anatomy
from tests.families import noise
from tests.pool import Pool
from tests.zoo import shapes
from tests.zoo.shapes import SHAPES, make_pipe

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", SHAPES)
def test_every_axis_draws_what_one_device_draws(pool: Pool, name: str) -> None:
    """A failure names the axis: a user's own model is divided wrongly, or refused though it can be divided."""
    assert pool.run(shapes.draw_plans, 2, name) == [{}, {}]


@pytest.fixture
def forgotten() -> Iterator[list[Any]]:
    """Pipelines whose models are forgotten after the test."""
    pipes: list[Any] = []
    yield pipes
    for pipe in pipes:
        forget_anatomy(next(iter(find_denoisers(pipe).values())))


def test_a_shape_that_cannot_be_divided_is_refused_with_its_reason(forgotten: list[Any]) -> None:
    """Before the first step, in one line; the remedy is the plan that works. A failure: a wrong picture."""
    says = "PositionTransformer: .* its blocks make something else of a part of the tokens, as with a table of posi"
    pipe = make_pipe(shapes.LabelPipeline, shapes.PositionTransformer)
    forgotten.append(pipe)
    call = {"labels": [3]}
    runner = ditile.parallelize(pipe, Plan(patches=2))
    with pytest.raises(ModelError, match=says) as caught:
        runner(**call)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("use a plan of data or cfg")
    assert pipe.scheduler.step_index is None
    want = pipe(**call, generator=torch.Generator().manual_seed(7))[0]
    assert torch.equal(ditile.parallelize(pipe, Plan())(**call, generator=torch.Generator().manual_seed(7))[0], want)


def test_a_runner_before_its_first_call_says_what_it_waits_for(forgotten: list[Any]) -> None:
    """What needs a divided pipeline is refused in a line; what does not, works. A failure: an AttributeError."""
    pipe = make_pipe(shapes.EmbedsPipeline, shapes.Transformer)
    forgotten.append(pipe)
    runner = ditile.parallelize(pipe, Plan(patches=2), keep_weights=True)
    assert "divided at its first call" in str(runner) and runner.job() is None
    assert not runner.is_broken and not runner.is_running
    with pytest.raises(StateError, match="call the runner first, or give parallelize .* example=dict"):
        runner.switch_pipeline(shapes.EmbedsPipeline)
    with pytest.raises(ModelError, match=r"could not be called with these arguments to look at it: TypeError: "):
        runner(prompt_embeds=3)
    drawn = runner(**shapes.give_embeds(1), output_on="first")
    assert drawn is not None and "divided at" not in str(runner) and runner.report is not None
    runner.restore()
    with pytest.raises(StateError, match="this runner was restored"):
        runner(**shapes.give_embeds(1))


def test_a_callback_of_an_own_pipeline_changes_the_latents(forgotten: list[Any]) -> None:
    """It is not called by the probes of the first call. A failure: an argument that the pipeline does not have."""
    pipe, called = make_pipe(shapes.PicturePipeline, shapes.PictureTransformer), []
    forgotten.append(pipe)

    def halve(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        called.append(step)
        return {"latents": values["latents"] / 2}

    def draw(pipe: Any) -> torch.Tensor:
        call = {"image": noise(1, 4, 5, 8), "generator": torch.Generator().manual_seed(3)}
        drawn: torch.Tensor = pipe(**call, callback_on_step_end=halve)[0]
        return drawn

    want = draw(pipe)
    assert torch.equal(draw(ditile.parallelize(pipe, Plan(patches=2, warmup=9))), want)
    assert called == [0, 1, 2] * 2


def test_ranks_must_make_the_first_call_alike(pool: Pool) -> None:
    """A failure: ranks derive different models, or wait for each other."""
    for message in pool.run(shapes.call_ranks_unlike, 2):
        assert re.match("rank 1 was called with prompt_embeds=.* call all ranks alike", message)
