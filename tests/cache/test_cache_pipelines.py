"""Caches on whole pipelines: their own pictures where nothing is left out, and by hand where something is, to the bit.

What `enable_cache` puts on a pipeline is gone after `disable_cache`, and what it remembers after each call.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn

import ditile
from ditile.cache.cached import IdleCacheWarning, find_model_cache
from ditile.model.block_lists import find_block_lists
from ditile.runner import caching
from tests.cache.hand import by_hand
from tests.cache.pictures import draw_plain_and_cached, settings_for, skipped
from tests.runner.cases import MAKE, different, same

STEPS, SPARE = 8, 3
SETTINGS = settings_for(STEPS, SPARE)
CACHE, EXACT, PRUNE, REST, draw = SETTINGS


def everything(pipe: Any) -> dict[str, Any]:
    """What pipeline, scheduler and modules hold."""
    modules = {path: dict(vars(module)) for path, module in pipe.transformer.named_modules()}
    return modules | {"pipe": dict(vars(pipe)), "scheduler": dict(vars(pipe.scheduler)), "class": {"": type(pipe)}}


def unchanged(pipe: Any, before: dict[str, Any]) -> None:
    """Raises unless they hold the same things under the same names."""
    for path, held in everything(pipe).items():
        assert list(held) == list(before[path]), f"{path or 'transformer'}: {set(held) ^ set(before[path])}"
        for key, value in held.items():
            changes = path in ("scheduler", "pipe")  # with every call
            assert changes or value is before[path][key], f"{path}.{key}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", MAKE)
def test_steps_are_left_out_and_none_at_the_limit(name: str) -> None:
    """None at threshold 0, nor at 1e-12 where every step is measured, nor after the cache was taken off; else all but
    the first, and the second call knows nothing of the first. A failure means that a cache changes pictures that it was
    told to leave alone, leaves something behind, counts calls for steps, or remembers pictures."""
    pipe, branches = MAKE[name](), 2 if name == "flux true cfg" else 1
    plain, before = draw(pipe, name), everything(pipe)
    for config in (CACHE, PRUNE):
        for threshold in (0.0, 1e-12):
            assert ditile.enable_cache(pipe, config.reset(residual_diff_threshold=threshold)) is pipe
            same(draw(pipe, name), plain, f"{config} {threshold}")
            assert not any(skipped(pipe))
            ditile.disable_cache(pipe)
            unchanged(pipe, before)
        ditile.enable_cache(pipe, config)
        got = draw(pipe, name)
        assert skipped(pipe) == [REST] * branches * (1 if config is CACHE else len(block_chain(pipe)) - 1)
        different(got, plain, name)
        assert find_model_cache(pipe.transformer).memory_bytes == 0 < find_model_cache(pipe.transformer).kept_bytes
        same(draw(pipe, name), got, "the second call")
        [report] = caching.summary(pipe, logging=False)
        assert (report.steps, report.cached_steps) == (STEPS, REST)
        assert report.saved == pytest.approx(len(REST) / STEPS * report.middle / report.blocks)
        ditile.disable_cache(pipe)
    same(draw(pipe, name), plain, "the cache was taken off")


def list_hooks(pipe: Any) -> list[Any]:
    hooks: list[Any] = []
    for part in pipe.components.values():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return hooks


def test_calls_leave_no_hooks_and_advise_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failure means that every call leaves hooks on text encoders for good, or logs the same line again."""
    pipe = MAKE["flux"]()
    before = list_hooks(pipe)
    ditile.enable_cache(pipe, CACHE)
    cached = list_hooks(pipe)
    for _ in range(3):
        draw(pipe, "flux", prompt="a red circle " * 40)
    assert list_hooks(pipe) == cached
    [line] = [message for message in caplog.messages if "are read" in message]
    assert line.startswith("the prompt has ")
    ditile.disable_cache(pipe)
    assert list_hooks(pipe) == before


@pytest.mark.parametrize("again", [True, False], ids=["cached again", "cache taken off"])
def test_a_transformer_that_is_replaced_is_freed(again: bool) -> None:
    """A failure means that the weights of the old one stay in memory, or that something is left on the pipeline."""
    pipe, other = MAKE["flux"](), MAKE["flux"]()
    plain, kind = draw(other, "flux"), type(pipe)
    ditile.enable_cache(pipe, CACHE)
    cached = draw(pipe, "flux")
    old = weakref.ref(pipe.transformer)
    pipe.transformer = other.transformer
    with pytest.warns(IdleCacheWarning, match="is no longer in the FluxPipeline.*call ditile.enable_cache again"):
        same(draw(pipe, "flux"), plain)
    if again:
        ditile.enable_cache(pipe, CACHE)
        same(draw(pipe, "flux"), cached)
    ditile.disable_cache(pipe)
    gc.collect()
    assert old() is None and type(pipe) is kind
    assert not {"step", "set_timesteps"} & vars(pipe.scheduler).keys()
    same(draw(pipe, "flux"), plain)


def block_chain(pipe: Any) -> list[Any]:
    return [block for each in find_block_lists(pipe.transformer) for block in each.blocks]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pixart sigma", "flux", "flux true cfg", "sd3", "sd3.5 medium"])
def test_pictures_are_those_of_a_cache_by_hand(name: str) -> None:
    """To the bit, with thresholds that leave some steps out and compute others. A failure means that a cached step is
    not the probe and what was added before, or belongs to another branch of guidance."""
    pipe, branches = MAKE[name](), 2 if name == "flux true cfg" else 1
    with by_hand(pipe, branches, spare=SPARE) as hands:
        draw(pipe, name)
    found = sorted(difference for hand in hands for difference in hand.differences if difference < 0.95)
    middle = range(len(found) // 4, len(found) - 1)
    gap = max(middle, key=lambda k: found[k + 1] - found[k])
    threshold = (found[gap] + found[gap + 1]) / 2
    with by_hand(pipe, branches, spare=SPARE, threshold=threshold) as hands:
        wanted = draw(pipe, name)
    ditile.enable_cache(pipe, CACHE.reset(residual_diff_threshold=threshold))
    same(draw(pipe, name), wanted, name)
    assert skipped(pipe) == [hand.skipped for hand in hands]
    assert any(hand.skipped for hand in hands) and any(hand.skipped != REST for hand in hands)


# Where a picture begins and ends


class StopError(Exception):
    """A user's own."""


def test_errors_anywhere_end_the_picture() -> None:
    """In the model, in the scheduler, and before the first step."""
    pipe = MAKE["sd3"]()
    ditile.enable_cache(pipe, CACHE)
    wanted = draw(pipe, "sd3")
    block = pipe.transformer.transformer_blocks[2]
    for owner, name, at in ((block.ff, "forward", 2), (pipe.scheduler, "step", 5), (pipe, "prepare_latents", 0)):
        before, count = vars(owner).get(name), [0]
        stock = getattr(owner, name)

        def failing(*args: Any, stock: Any = stock, at: int = at, count: list[int] = count, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] > at:
                raise StopError
            return stock(*args, **kwargs)

        vars(owner)[name] = failing
        with pytest.raises(StopError):
            draw(pipe, "sd3")
        vars(owner).pop(name) if before is None else vars(owner).update({name: before})
        assert find_model_cache(pipe.transformer).memory_bytes == 0, name
        same(draw(pipe, "sd3"), wanted, f"after an error in {name}")
    assert "step" not in vars(pipe.scheduler)


def test_guidance_that_ends_in_mid_run() -> None:
    """A callback that drops the rows of guidance, as diffusers' guide has it: what was remembered of other rows is not
    used. A failure is a crash, or one branch's residual in the place of another's."""
    pipe = MAKE["sd3"]()

    def drop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step != 4:
            return {}
        pipe._guidance_scale = 0.0
        return {name: tensor.chunk(2)[-1] for name, tensor in tensors.items()}

    inputs = ["prompt_embeds", "pooled_prompt_embeds"]
    call = {"callback_on_step_end": drop, "callback_on_step_end_tensor_inputs": inputs}
    draw_plain_and_cached(pipe, SETTINGS, lambda: draw(pipe, "sd3", **call))
    assert skipped(pipe) == [[3, 4], [6, 7]], "step 5 is the first with one row"


def test_guidance_that_leaves_blocks_out_itself() -> None:
    """SD3's skip-layer guidance calls the transformer once more, without some blocks: that call is computed. A failure
    is a crash, or a cached step that was no step of that call."""
    pipe, guided = MAKE["sd3"](), {"skip_guidance_layers": [1, 3], "skip_layer_guidance_stop": 0.9}
    plain = draw(pipe, "sd3", **guided)
    for config in (CACHE, PRUNE):
        ditile.enable_cache(pipe, config.reset(residual_diff_threshold=1e-12))
        same(draw(pipe, "sd3", **guided), plain)
        ditile.enable_cache(pipe, config)
        different(draw(pipe, "sd3", **guided), plain)
        assert skipped(pipe) == [REST] * (1 if config is CACHE else 3), "of the first call alone"
    ditile.disable_cache(pipe)
    same(draw(pipe, "sd3", **guided), plain)
