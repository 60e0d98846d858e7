"""Pipelines that make arguments of their model from the latents, or from the last prediction, in their own code.

What is exact is the pipeline bit for bit, and the same with stale keys on one, two and three ranks; all else is refused
before the first step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from torch import Tensor

from ditile.plan.errors import StateError
from tests import tiny
from tests.families import FAMILIES
from tests.pool import Pool
from tests.runner.cases import different, divided, same

STEPS, PATCHES = 4, 3


class Made(FluxPipeline):
    """Its model has twice the channels of its latents, and `kind` says what is in the others."""

    kind = "squares"

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], num_inference_steps: int = STEPS) -> Tensor:
        latents = inputs["hidden_states"]
        self.scheduler.set_timesteps(num_inference_steps)
        predicted = torch.zeros_like(latents)
        for t in self.scheduler.timesteps:
            more, call = latents, dict(inputs)
            if self.kind == "squares":
                more = latents * latents
            elif self.kind == "means":
                more = latents.mean(1, keepdim=True).expand_as(latents)
            elif self.kind == "guided":
                call["pooled_projections"] = inputs["pooled_projections"] + latents.mean()
            elif self.kind == "conditioned on itself":
                more = predicted
            call |= {"hidden_states": torch.cat([latents, more], -1), "timestep": t.expand(len(latents)) / 1000}
            predicted = self.transformer(**call, return_dict=False)[0]
            latents = self.scheduler.step(predicted, t, latents, return_dict=False)[0]
        return latents


def make(kind: str) -> tuple[Any, dict[str, Any]]:
    family = FAMILIES["FluxTransformer2DModel"]
    channels = family.inputs()["hidden_states"].shape[-1]
    changes = {"in_channels": 2 * channels, "out_channels": channels}
    transformer = tiny.randomise(family._replace(config=family.config | changes).make(), gain=1.0)
    parts = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = tiny.quiet(Made(transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), **parts))
    pipe.kind = kind
    return pipe, family.inputs()


def paint(kind: str, stages: int, is_refused: bool) -> Tensor | None:
    """On a rank: twice without anything stale, and the stale picture, or that it is refused."""
    pipe, inputs = make(kind)
    want = pipe(inputs)
    with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=STEPS) as runner:
        for _ in range(2):
            same(runner(inputs), want, (kind, stages))
        if is_refused:
            with pytest.raises(StateError, match="from latents of other patches"):
                runner(inputs, STEPS + 2)  # the last ones are stale
    with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=1) as runner:
        if is_refused:
            for _ in range(2):
                with pytest.raises(
                    StateError, match=rf"Made makes .* from latents of other patches.*use warmup={STEPS}"
                ):
                    runner(inputs)
            return None
        first = runner(inputs)
        same(runner(inputs), first)
        different(first, want)
        return first


def test_what_is_made_of_a_patchs_own_latents(pool: Pool) -> None:
    """A failure means that such a pipeline is refused, or that stages see other latents."""
    drawn = [each for ranks in (1, 2, 3) for each in pool.run(paint, ranks, "squares", ranks, False)]
    for each in drawn:
        same(each, drawn[0])


@pytest.mark.parametrize("kind", ["means", "guided"])
def test_what_is_made_of_all_latents(pool: Pool, kind: str) -> None:
    """Exact where every step is synchronous, also on a stage between, and refused else. A failure means a picture that
    is silently another one there."""
    for ranks in (1, 3):
        pool.run(paint, ranks, kind, ranks, True)


def refuse(stages: int) -> None:
    pipe, inputs = make("conditioned on itself")
    for warmup in (1, STEPS):
        with (
            divided(pipe, pipefusion=stages, patches=PATCHES, warmup=warmup) as runner,
            pytest.raises(StateError, match="hidden_states for its model from what the model predicted last"),
        ):
            runner(inputs)


def test_what_is_made_of_the_last_prediction(pool: Pool) -> None:
    """Other stages than the last have none. A failure means a picture that is silently another one."""
    pool.run(refuse, 2, 2)
