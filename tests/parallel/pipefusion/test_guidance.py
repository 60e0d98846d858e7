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
from diffusers.callbacks import SD3CFGCutoffCallback
from diffusers.guiders import (
    AdaptiveProjectedGuidance,
    ClassifierFreeGuidance,
    ClassifierFreeZeroStarGuidance,
    MagnitudeAwareGuidance,
    TangentialClassifierFreeGuidance,
)

from ditile.model.pipeline_calls import explain_callback_refusal, explain_latent_cut, is_guidance_timed
from ditile.plan.errors import DitileError, ModelError, StateError
from ditile.runner import runner as runner_module
from tests.parallel.batch.test_batch import close, made
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, different, divided, run, same
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
    """A failure means another contrast on some ranks, an approximation in silence, or a needless refusal."""
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


TIMED_STEPS = 6
ROUNDING = 1e-5
EXACT = (
    {"ulysses": 2},
    {"ring": 2},
    {"tensor": 2},
    {"cfg": 2},
    {"data": 2},
    {"distrifusion": 2, "warmup": TIMED_STEPS},
)


class OwnLoop(diffusers.FluxPipeline):  # type: ignore[misc]
    """A loop of which nothing is known."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_a_call_asks_for_other_steps_by_its_arguments() -> None:
    pipe = ZOO["lumina-2"].make()
    assert not is_guidance_timed(pipe, {"num_inference_steps": 9, "cfg_trunc_ratio": 1.0})
    assert is_guidance_timed(pipe, {"cfg_trunc_ratio": 0.5})
    flux = MAKE["flux"]()
    assert not is_guidance_timed(flux, {})
    flux.__class__ = OwnLoop
    assert is_guidance_timed(flux, {})
    assert explain_latent_cut(diffusers.ChronoEditPipeline, {"enable_temporal_reasoning": False}) is None
    refusal = explain_latent_cut(diffusers.ChronoEditPipeline, {"enable_temporal_reasoning": True})
    assert refusal is not None and "enable_temporal_reasoning=False" in refusal


@on_ranks(2)
def test_lumina_2_ends_guidance_by_an_argument() -> None:
    """A failure means that a call which any of these plans can compute is refused, or refused in mid-run."""
    entry = ZOO["lumina-2"]

    def draw(pipe: Any, **changes: Any) -> Any:
        return pipe(**entry.call() | {"num_inference_steps": TIMED_STEPS, "cfg_trunc_ratio": 0.5} | changes).images

    pipe = entry.make()
    wanted, guided = draw(pipe), draw(pipe, cfg_trunc_ratio=1.0)
    for plan in EXACT:
        with divided(pipe, **plan) as runner:
            close(draw(runner), wanted, plan, tolerance=ROUNDING)
    done: list[int] = []
    with divided(pipe, pipefusion=2, warmup=TIMED_STEPS) as runner:
        with pytest.raises(StateError, match=r"its model on \[1\] rows in step 3 and on \[1, 1\] in the first one"):
            draw(runner, callback_on_step_end=lambda _, step, *__: done.append(step) or {})
        assert not done
        close(draw(runner, cfg_trunc_ratio=1.0), guided, "guidance in all steps", tolerance=ROUNDING)
    # The first step without a second call is synchronous, and so are its keys those of one call.
    with divided(pipe, distrifusion=2, warmup=1) as runner:
        assert draw(runner).shape == wanted.shape
        assert runner.report.synchronous == [0, 3]


def end_by_attribute(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
    if step == 2:
        pipe._guidance_scale = 1.0
    return {}


@pytest.mark.parametrize("name", ["SD3CFGCutoffCallback", "end_by_attribute"])
@on_ranks(2)
def test_a_callback_ends_guidance(name: str) -> None:
    """One of diffusers, or the user's. A failure means that keys of two branches are kept for one, an error of shapes,
    or that stages wait for a branch that is not computed."""

    def ends() -> dict[str, Any]:
        callback = SD3CFGCutoffCallback(cutoff_step_ratio=0.5) if name.startswith("SD3") else end_by_attribute
        return {"callback_on_step_end": callback, "num_inference_steps": TIMED_STEPS}

    # In fp32 the distance would be that of two kernels, which differ by processor.
    pipe = made("sd3")
    wanted = run(pipe, "sd3", **ends())
    # The user's leaves the prompts of two branches, which one row of latents is multiplied with.
    for plan in EXACT if name.startswith("SD3") else EXACT[:1]:
        with divided(pipe, **plan) as runner:
            close(run(runner, "sd3", **ends()), wanted, plan)
    for plan in ({"pipefusion": 2, "warmup": TIMED_STEPS}, {"distrifusion": 2, "warmup": 1}):
        with divided(pipe, **plan) as runner, pytest.raises(ModelError, match=f"{name} sets _guidance_scale"):
            run(runner, "sd3", **ends())


@pytest.mark.parametrize(
    ("callback", "scale", "is_refused"),
    [
        (SD3CFGCutoffCallback(cutoff_step_ratio=0.5), 3.0, True),
        (SD3CFGCutoffCallback(cutoff_step_ratio=0.5), 1.0, False),
        (SD3CFGCutoffCallback(cutoff_step_ratio=1.0), 3.0, False),
        (None, 3.0, False),
    ],
)
def test_callbacks_that_end_guidance_are_told_from_others(callback: Any, scale: float, is_refused: bool) -> None:
    """A failure means that a callback is refused which changes no calls, or that one that does is met in mid-run."""
    call = {"callback_on_step_end": callback, "guidance_scale": scale}
    assert (explain_callback_refusal(MAKE["sd3"](), call, TIMED_STEPS) is not None) == is_refused
