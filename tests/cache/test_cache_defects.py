"""What other caches for diffusion transformers were seen to get wrong, and which test here would see it.

| | defect | test |
|---|---|---|
| A | the class of the pipeline is patched: a second cached pipeline, or a plain one, raises | here: two_pipelines |
| B | DBPrune raises where blocks have one stream | test_cache_limits: pruned_blocks; test_cache_options |
| C | Ulysses with its overlap, and ring: another picture, without a word | test_cache_plans, "async_ulysses" |
| D | decisions are reduced over all processes, whatever they do | here: replicas |
| E | guidance of 1 or less, on a model that is called twice else, counts two steps for one | here: guidance |
| F | FoCa overshoots after a gap; TaylorSeer has no slope before the fourth step | test_forecast; test_cache_options |
| G | one image of a batch decides for all | test_cache_rows |
| H | memory is kept after the call | test_cache_options: nothing_is_remembered; test_cache_pipelines |
| I | each list of blocks measures, and waits for the device | here: one_measure |
| J | a budget never resets; masks have holes; a static mask may not begin with 0 | unit: cache_rules, step_mask |
| K | a property of a config recurses | test_cache_config |
| L | attention classes of diffusers are patched: another model raises | here: classes |
| M | an error leaves counts behind; two threads mix two pictures | here: threads; test_cache_pipelines: errors |
"""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ditile
from ditile.model.hooks.protocols import SkipAgreement
from ditile.plan.errors import StateError
from ditile.runner import caching
from tests.cache.pictures import settings_for, skipped
from tests.families import FAMILIES
from tests.parallel.pipefusion.moves import outputs
from tests.parallel.sequence.planned import wan_pipeline
from tests.pool import Pool
from tests.runner.cases import MAKE, different, same

STEPS, SPARE = 8, 4
SETTINGS = settings_for(STEPS, SPARE)
CACHE, EXACT, PRUNE, REST, draw = SETTINGS


@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3"])
def test_two_pipelines_of_a_class_do_not_know_of_each_other(name: str) -> None:
    """A: after one of two cached pipelines was disabled, the other, and any plain one, raised. A failure means that
    something is set on a class, or that pipelines share what they remember."""
    one, other, plain = MAKE[name](), MAKE[name](), MAKE[name]()
    classes = [type(plain), type(plain.scheduler), *{type(module) for module in plain.transformer.modules()}]
    before = [dict(vars(cls)) for cls in classes]
    wanted = draw(plain, name)
    ditile.enable_cache(one, CACHE)
    ditile.enable_cache(other, CACHE.reset(max_warmup_steps=2))
    same(draw(plain, name), wanted, "a plain one beside two cached ones")
    first, second = draw(one, name), draw(other, name)
    assert skipped(one)[0] == REST and skipped(other)[0] == list(range(2, STEPS))
    different(first, second)
    ditile.disable_cache(one)
    same(draw(one, name), wanted, "the one that was disabled")
    same(draw(other, name), second, "the one that was not")
    same(draw(plain, name), wanted, "the plain one")
    assert [dict(vars(cls)) for cls in classes] == before
    with pytest.raises(StateError):
        caching.summary(one, logging=False)


def as_alone(steps: list[int], prompts: list[str]) -> tuple[Any, list[list[int]]]:
    """On a rank of a group that has nothing to do with the cache: a picture of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    pipe = MAKE["pixart sigma"]()
    ditile.enable_cache(pipe, CACHE.reset(residual_diff_threshold=0.5, max_warmup_steps=1 + rank))
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "send", "recv", "isend")
    forbidden = mock.Mock(side_effect=AssertionError("a cache without a plan talked to another process"))
    with mock.patch.multiple(dist, **dict.fromkeys(names, forbidden)):
        latents = draw(pipe, "pixart sigma", num_inference_steps=steps[rank], prompt=prompts[rank])
    return latents, skipped(pipe)


def test_replicas_with_prompts_of_their_own(pool: Pool) -> None:
    """D: with any process group about, differences were averaged over all of it: replicas changed each other's
    pictures, and hung where one measured fewer steps than another."""
    found = pool.run(as_alone, 2, [8, 5], ["a red circle", "two blue squares on a ring"])
    pipe = MAKE["pixart sigma"]()
    for rank, (steps, prompt) in enumerate(((8, "a red circle"), (5, "two blue squares on a ring"))):
        ditile.enable_cache(pipe, CACHE.reset(residual_diff_threshold=0.5, max_warmup_steps=1 + rank))
        same(found[rank][0], draw(pipe, "pixart sigma", num_inference_steps=steps, prompt=prompt), f"rank {rank}")
        assert found[rank][1] == skipped(pipe)


@pytest.mark.parametrize("scale", [3.0, 1.0])
@pytest.mark.parametrize("model", ["flux true cfg", "wan"])
def test_guidance_is_seen_from_the_calls(model: str, scale: float) -> None:
    """E: without guidance there is one call in each step. It was taken for half a step, so that twice the warmup was
    computed, and steps were compared with the last but one."""
    calls = [0]
    if model == "wan":
        pipe, call = wan_pipeline()
        pipe.register_to_config(boundary_ratio=None)
        call |= {"guidance_scale": scale, "num_inference_steps": STEPS}
    else:
        pipe, call = MAKE[model](), {}
    ditile.enable_cache(pipe, CACHE)
    last = block_of(pipe.transformer)
    handle = last.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    if model == "wan":
        pipe(**call, generator=torch.Generator().manual_seed(0))
    else:
        draw(pipe, model, true_cfg_scale=scale)
    handle.remove()
    branches = 2 if scale > 1 else 1
    of_first = caching.summary(pipe, logging=False)[0].decisions
    assert [each.skipped for each in of_first] == [REST] * branches
    assert calls[0] >= branches * STEPS


def block_of(transformer: nn.Module) -> nn.Module:
    blocks = getattr(transformer, "blocks", None) or transformer.transformer_blocks
    return blocks[-1]


def test_one_measure_for_all_lists() -> None:
    """I: a model with two lists of blocks measured, and waited for the device, twice in a call; a pruned one once for
    each block, which it must."""
    for name in ("ChromaTransformer2DModel", "Flux2Transformer2DModel", "HunyuanVideoTransformer3DModel"):
        model = FAMILIES[name].make()
        ditile.enable_cache(model, CACHE.reset(residual_diff_threshold=1e-9, max_warmup_steps=0, num_inference_steps=5))
        with mock.patch.object(SkipAgreement, "sum_over_ranks", autospec=True, side_effect=lambda _, sums: sums) as add:
            outputs(name, model)
        assert add.call_count == 4, name


def patched(classes: list[type]) -> tuple[Any, Any]:
    """On two ranks: one pipeline cached and divided, and another that is neither."""
    before = [dict(vars(cls)) for cls in classes]
    pipe, plain = MAKE["pixart sigma"](), MAKE["pixart sigma"]()
    wanted = draw(plain, "pixart sigma")
    ditile.enable_cache(pipe, CACHE)
    runner = ditile.parallelize(pipe, ditile.Plan(ulysses=2), keep_weights=True)
    draw(runner, "pixart sigma")
    same(draw(plain, "pixart sigma"), wanted, "a plain pipeline beside it")
    assert [dict(vars(cls)) for cls in classes] == before
    runner.restore()
    return wanted, draw(plain, "pixart sigma")


def test_no_class_of_diffusers_is_touched(pool: Pool) -> None:
    """L: attention was patched for the whole process, and every other model with a mask raised."""
    attention = diffusers.models.attention_processor
    classes = [attention.AttnProcessor2_0, attention.Attention, diffusers.PixArtTransformer2DModel]
    for wanted, again in pool.run(patched, 2, [*classes, diffusers.PixArtSigmaPipeline]):
        same(again, wanted)


def test_two_threads_do_not_mix_two_pictures() -> None:
    """M: the second call is refused before it touches anything, with one clear error; the first one's picture is right,
    and so is the next one from another thread."""
    pipe = MAKE["flux"]()
    ditile.enable_cache(pipe, CACHE)
    wanted = draw(pipe, "flux")
    inside, refused = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    pictures: list[Any] = []

    def second() -> None:
        inside.wait(60)
        try:
            for _ in range(2):
                draw(pipe, "flux", prompt="two blue squares", num_inference_steps=3)
        except StateError as error:
            errors.append(error)
        refused.set()

    def wait(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        inside.set()
        assert refused.wait(60)
        return {}

    thread = threading.Thread(target=second)
    thread.start()
    same(draw(pipe, "flux", callback_on_step_end=wait), wanted, "the first thread's")
    thread.join()
    assert len(errors) == 1 and "two threads run one cached FluxPipeline" in str(errors[0])
    thread = threading.Thread(target=lambda: pictures.append(draw(pipe, "flux")))
    thread.start()
    thread.join()
    same(pictures[0], wanted, "one after the other")
    with pytest.raises(RuntimeError):
        draw(pipe, "flux", prompt_embeds=torch.zeros(1, 3, 7), pooled_prompt_embeds=torch.zeros(1, 32), prompt=None)
    same(draw(pipe, "flux"), wanted, "after an error")


def test_threads_with_pipelines_of_their_own() -> None:
    """A failure means that caches share something after all."""
    pipes = [MAKE["flux"]() for _ in range(2)]
    found: dict[int, Any] = {}
    for pipe in pipes:
        ditile.enable_cache(pipe, CACHE)
    wanted = [draw(pipe, "flux", seed=k) for k, pipe in enumerate(pipes)]
    threads = [threading.Thread(target=lambda k=k: found.update({k: draw(pipes[k], "flux", seed=k)})) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same([found[0], found[1]], wanted)
