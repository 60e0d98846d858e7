"""Guidance in some steps only: exact axes draw it, and where calls are cut it is refused before a step is done."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
from diffusers.callbacks import SD3CFGCutoffCallback

from ditile.model.loop_source import find_timed_guidance
from ditile.model.pipeline_calls import explain_callback_refusal, is_guidance_timed
from ditile.plan.errors import DitileError, ModelError, StateError
from tests.parallel.batch.test_batch import close, made
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run
from tests.zoo import ZOO

STEPS = 6
ROUNDING = 1e-5
EXACT = ({"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"cfg": 2}, {"data": 2}, {"distrifusion": 2, "warmup": STEPS})


def test_what_decides_on_guidance_is_read_off_the_loop() -> None:
    """A failure means that a pipeline's calls are rehearsed in all steps for nothing, or not where they change."""
    expected: dict[Any, set[str]] = {
        diffusers.Lumina2Pipeline: {"cfg_trunc_ratio"},
        diffusers.ZImagePipeline: {"cfg_truncation"},
        diffusers.StableDiffusion3Pipeline: {"skip_layer_guidance_start", "skip_layer_guidance_stop"},
        diffusers.FluxPipeline: set(),
        diffusers.FluxInpaintPipeline: set(),
        diffusers.QwenImagePipeline: set(),
        diffusers.WanPipeline: set(),
    }
    for kind, names in expected.items():
        deciding = find_timed_guidance(inspect.unwrap(kind.__call__))
        assert names <= deciding and bool(deciding) == bool(names), (kind, deciding)
    pipe = ZOO["lumina-2"].make()
    assert not is_guidance_timed(pipe, {"num_inference_steps": 9, "cfg_trunc_ratio": 1.0})
    assert is_guidance_timed(pipe, {"cfg_trunc_ratio": 0.5})


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
        with pytest.raises(StateError, match="calls its model on 1 rows in step 3 and on 1 . 1 in the first one"):
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


def by_attribute(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
    if step == 2:
        pipe._guidance_scale = 1.0
    return {}


def by_function(pipe: Any, *_: Any) -> dict[str, Any]:
    return setattr(pipe, "_guidance_scale", 0) or {}  # noqa: B010


def raises_guidance(pipe: Any, *_: Any) -> dict[str, Any]:
    pipe._guidance_scale = 4.0
    return {}


@pytest.mark.parametrize(
    ("callback", "scale", "is_refused"),
    [
        (by_attribute, 3.0, True),
        (by_function, 3.0, True),
        (raises_guidance, 3.0, False),
        (by_attribute, 1.0, False),
        (SD3CFGCutoffCallback(cutoff_step_ratio=1.0), 3.0, False),
        (None, 3.0, False),
    ],
)
def test_callbacks_that_end_guidance_are_told_from_others(callback: Any, scale: float, is_refused: bool) -> None:
    """A failure means that a callback is refused which changes no calls, or that one that does is met in mid-run."""
    pipe = MAKE["sd3"]()
    call = {"callback_on_step_end": callback, "guidance_scale": scale}
    assert (explain_callback_refusal(pipe, call, STEPS) is not None) == is_refused


NOTHING: tuple[tuple[dict[str, Any], str], ...] = (
    ({"num_inference_steps": 0}, "num_inference_steps=0 leaves nothing to generate"),
    ({"num_images_per_prompt": -1}, "num_images_per_prompt=-1 leaves nothing"),
    ({"height": 0}, "height=0 leaves nothing"),
    ({"prompt": []}, "prompt is empty"),
    ({"sigmas": []}, "sigmas is empty"),
)


def nothing() -> None:
    for plan in ({"data": 2}, {"cfg": 2}, {"ulysses": 2}, {"pipefusion": 2}):
        with divided(MAKE["sd3"](), **plan) as runner:
            for changes, says in NOTHING:
                with pytest.raises(DitileError, match=says):
                    runner(**{"prompt": "a", "guidance_scale": 3.0} | changes)


def test_calls_that_ask_for_nothing(pool: Pool) -> None:
    """A failure means an error of ditile's own arithmetic in place of a line."""
    pool.run(nothing, 2)
