"""Guidance in some steps only: exact axes draw it, and where calls are cut it is refused before a step is done."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
from diffusers.callbacks import SD3CFGCutoffCallback

from ditile.model import pipeline_calls
from ditile.model.pipeline_calls import explain_callback_refusal, explain_latent_cut, is_guidance_timed
from ditile.plan.errors import ModelError, StateError
from tests.model.loop_source import find_latent_cuts, find_timed_guidance
from tests.parallel.batch.test_batch import close, made
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run
from tests.zoo import ZOO

STEPS = 6
ROUNDING = 1e-5
EXACT = ({"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"cfg": 2}, {"data": 2}, {"distrifusion": 2, "warmup": STEPS})


def test_tables_are_what_the_loops_of_diffusers_say() -> None:
    """A failure means that calls are rehearsed in all steps for nothing, or not where they change."""
    timed = {}
    cuts = {}
    for name in dir(diffusers):
        kind = getattr(diffusers, name, None) if name.endswith("Pipeline") else None
        if not inspect.isclass(kind):
            continue
        function = inspect.unwrap(kind.__call__)
        deciding = find_timed_guidance(function)
        if deciding:
            asked = deciding & inspect.signature(function).parameters.keys()
            timed[name] = asked - {"num_inference_steps", "timesteps", "sigmas"}
        for names in find_latent_cuts(function).values():
            cuts[name] = names
    assert timed == {name: set(names) for name, names in pipeline_calls._TIMED_GUIDANCE.items()}
    assert cuts == {name: {argument} for name, argument in pipeline_calls._LATENT_CUTS.items()}


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


def truncated() -> None:
    entry = ZOO["lumina-2"]

    def draw(pipe: Any, **changes: Any) -> Any:
        return pipe(**entry.call() | {"num_inference_steps": STEPS, "cfg_trunc_ratio": 0.5} | changes).images

    pipe = entry.make()
    wanted, guided = draw(pipe), draw(pipe, cfg_trunc_ratio=1.0)
    for plan in EXACT:
        with divided(pipe, **plan) as runner:
            close(draw(runner), wanted, plan, ROUNDING)
    done: list[int] = []
    with divided(pipe, pipefusion=2, warmup=STEPS) as runner:
        with pytest.raises(StateError, match=r"its model on \[1\] rows in step 3 and on \[1, 1\] in the first one"):
            draw(runner, callback_on_step_end=lambda _, step, *__: done.append(step) or {})
        assert not done
        close(draw(runner, cfg_trunc_ratio=1.0), guided, "guidance in all steps", ROUNDING)
    # The first step without a second call is synchronous, and so are its keys those of one call.
    with divided(pipe, distrifusion=2, warmup=1) as runner:
        assert draw(runner).shape == wanted.shape
        assert runner.report.synchronous == [0, 3]


def test_lumina_2_ends_guidance_by_an_argument(pool: Pool) -> None:
    """A failure means that a call which any of these plans can compute is refused, or refused in mid-run."""
    pool.run(truncated, 2)


def cut_off() -> None:
    def ends() -> dict[str, Any]:
        callback = SD3CFGCutoffCallback(cutoff_step_ratio=0.5)
        return {"callback_on_step_end": callback, "num_inference_steps": STEPS}

    # In fp32 the distance would be that of two kernels, which differ by processor.
    pipe = made("sd3")
    wanted = run(pipe, "sd3", **ends())
    for plan in EXACT:
        with divided(pipe, **plan) as runner:
            close(run(runner, "sd3", **ends()), wanted, plan)
    for plan in ({"pipefusion": 2, "warmup": STEPS}, {"distrifusion": 2, "warmup": 1}):
        with divided(pipe, **plan) as runner, pytest.raises(ModelError, match="SD3CFGCutoffCallback sets _guidance_sc"):
            run(runner, "sd3", **ends())


def test_a_callback_ends_guidance(pool: Pool) -> None:
    """A failure means that keys of two branches are kept for one, or that a callback is met in mid-run alone."""
    pool.run(cut_off, 2)


def end_by_attribute(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
    if step == 2:
        pipe._guidance_scale = 1.0
    return {}


def ended_by_the_user() -> None:
    """Met when it is done: nothing is known of a callback of the user's before it is called."""
    call = {"callback_on_step_end": end_by_attribute, "num_inference_steps": STEPS}
    pipe = made("sd3")
    expected = run(pipe, "sd3", **call)
    for plan in ({"pipefusion": 2, "warmup": STEPS}, {"distrifusion": 2, "warmup": 1}):
        with divided(pipe, **plan) as runner, pytest.raises(ModelError, match="end_by_attribute sets _guidance_scale"):
            run(runner, "sd3", **call)
    with divided(pipe, ulysses=2) as runner:
        close(run(runner, "sd3", **call), expected, "whole steps")


def test_a_callback_of_the_user_ends_guidance(pool: Pool) -> None:
    """A failure means an error of shapes, or that stages wait for a branch that is not computed."""
    pool.run(ended_by_the_user, 2)


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
    assert (explain_callback_refusal(MAKE["sd3"](), call, STEPS) is not None) == is_refused
