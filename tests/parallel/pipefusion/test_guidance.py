"""Guidance that takes a statistic of the whole prediction, remembers earlier ones, or perturbs blocks.

Bit for bit the pipeline on two and three ranks where all of a prediction is of the step at hand. In stale steps a
statistic is one of a prediction that is partly one step old, said once; a memory is refused before the first step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import pytest
import torch
from diffusers.guiders import (
    AdaptiveProjectedGuidance,
    ClassifierFreeGuidance,
    ClassifierFreeZeroStarGuidance,
    MagnitudeAwareGuidance,
    TangentialClassifierFreeGuidance,
)

import ditile
from ditile.plan.errors import DitileError, ModelError
from ditile.plan.plan import Plan
from ditile.runner import runner as runner_module
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import different, divided, same
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, PATCHES = 4, 3
RESCALED: dict[str, dict[str, Any]] = {
    "ltx": {"guidance_rescale": 0.7},
    "ltx-condition": {"guidance_rescale": 0.7},
    "easy-animate": {"guidance_rescale": 0.7},
    "ltx-2": {"guidance_rescale": 0.6, "audio_guidance_rescale": 0.5},
}
GUIDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rescaled": (ClassifierFreeGuidance, {"guidance_scale": 3.0, "guidance_rescale": 0.5}),
    "momentum": (AdaptiveProjectedGuidance, {"adaptive_projected_guidance_momentum": -0.5}),
    "zero star": (ClassifierFreeZeroStarGuidance, {"guidance_scale": 3.0}),
    "magnitude": (MagnitudeAwareGuidance, {"guidance_scale": 3.0}),
    "tangential": (TangentialClassifierFreeGuidance, {"guidance_scale": 3.0}),
}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    if name in GUIDERS:
        kind, settings = GUIDERS[name]
        pipe = ZOO["qwen-image-modular"].make()
        pipe.update_components(guider=kind(**settings))
        return pipe, {}
    return ZOO[name].make(), RESCALED.get(name, {})


def draw(pipe: Any, name: str, changes: dict[str, Any]) -> list[torch.Tensor]:
    call = ZOO["qwen-image-modular" if name in GUIDERS else name].call()
    return list_tensors(pipe(**call | {"num_inference_steps": STEPS} | changes))


REFUSED = {
    "momentum": "remembers earlier predictions",
    "hunyuan-image": "remembers earlier predictions",
    # Their first step is zero, or they decompose the prediction.
    "zero star": "never: .*places of a patch cannot be told",
    "tangential": "never: .*places of a patch cannot be told",
}
"""Guidance that does not go with stale steps, or not with patches at all, and how it is refused."""


def guide(name: str, stages: int) -> tuple[list[torch.Tensor] | str, list[str]]:
    """On a rank: twice without anything stale, bit for bit; twice with stale steps, or why not; and what is logged."""
    pipe, changes = make(name)
    want = draw(pipe, name, changes)
    try:
        with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=STEPS) as runner, logged() as lines:
            for _ in range(2):
                same(draw(runner, name, changes), want, (name, stages))
    except DitileError as error:
        return f"never: {error}", []
    assert not lines, lines
    if changes:
        different(want[0], draw(pipe, name, dict.fromkeys(changes, 0.0))[0], "without")
    with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=STEPS - 2) as runner, logged() as lines:
        try:
            stale = [draw(runner, name, changes) for _ in range(2)]
        except ModelError as error:
            return str(error), lines
        if changes:  # what the signature has is said alike, whether it is named or not
            draw(runner, name, {})
    same(*stale, name)
    different(stale[0][0], want[0], name)
    return stale[0], lines


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that a runner logs, but for those about the plan."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module.LOG, "warning", lines.append)
        yield lines
    lines[:] = [line for line in lines if "guidance" in line]


@pytest.mark.parametrize("name", [*RESCALED, *GUIDERS, "hunyuan-image"])
def test_a_statistic_of_the_whole_prediction(pool: Pool, name: str) -> None:
    """A failure means a picture of other contrast on some ranks, an approximation in silence, or a refusal where there
    is nothing stale."""
    found = {ranks: pool.run(guide, ranks, name, ranks) for ranks in (1, 2, 3)}
    one, lines = found[1][0]
    for ranks, rows in found.items():
        for rank, (drawn, said) in enumerate(rows):
            if name in REFUSED:
                assert isinstance(drawn, str) and re.search(REFUSED[name], drawn), drawn
                continue
            same(drawn, one, (name, ranks, rank))
            assert said == ([] if rank else lines), (ranks, rank, said)
    if name not in REFUSED:
        values = [f"{key}={value}" for key, value in RESCALED.get(name, {}).items()] or [GUIDERS[name][0].__name__]
        assert "partly one step old" in lines[0] and all(value in lines[0] for value in values), lines
        assert len(lines) == 1 + (name == "ltx-2"), lines


class Recorder(ClassifierFreeGuidance):
    """Remembers whether predictions were numbers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.finite: list[bool] = []

    def forward(self, pred_cond: torch.Tensor, pred_uncond: torch.Tensor | None = None) -> Any:
        self.finite.append(bool(torch.isfinite(pred_cond).all()))
        return super().forward(pred_cond, pred_uncond)


def test_a_guider_keeps_nothing_of_a_rehearsal() -> None:
    """It is what it was before: a failure means that its first step has NaN in what it remembers."""
    pipe = ZOO["qwen-image-modular"].make()
    pipe.update_components(guider=Recorder(guidance_scale=3.0))
    with divided(pipe, patches=PATCHES, warmup=1) as runner:
        for _ in range(2):
            pipe.guider.finite.clear()
            draw(runner, "momentum", {})
            assert pipe.guider.finite == [True] * (1 + PATCHES * (STEPS - 1))


def test_perturbed_attention_and_skipped_layers_are_refused() -> None:
    """Their attention sees this rank's tokens alone, and their layers are named by iterations."""
    parts = {name: part for name, part in tiny.sd3().components.items() if "image_encoder" not in name}
    parts.pop("feature_extractor", None)
    perturbed = tiny.quiet(diffusers.StableDiffusion3PAGPipeline(**parts, pag_applied_layers=["blocks.1"]))
    for plan in ({"patches": 2}, {"patches": 2, "warmup": STEPS}):
        with pytest.raises(ModelError, match="puts an attention of its own.*use data or tensor"):
            ditile.parallelize(perturbed, Plan(**plan))
