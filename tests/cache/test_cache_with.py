"""Caches with what else is done to a pipeline: LoRAs, ControlNets, hooks that offload, two transformers, plans."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import ditile
from ditile import BlockAdapter, DBCacheConfig, ParamsModifier, Plan
from ditile.cache.cached import find_model_cache
from ditile.plan.errors import StateError
from ditile.runner import caching
from ditile.runner.runner import parallelize
from tests.cache.hand import by_hand
from tests.cache.pictures import draw_plain_and_cached, settings_for, skipped
from tests.model.hooks.compiling import WAYS, Counting
from tests.parallel.sequence.planned import wan_pipeline
from tests.pool import on_ranks
from tests.runner.cases import MAKE, different, run, same
from tests.runner.loras import NAMES, edits, folder_of
from tests.tiny import randomise
from tests.zoo import ZOO

STEPS, SPARE = 6, 2
SETTINGS = settings_for(STEPS, SPARE)
CACHE, EXACT, PRUNE, REST, draw = SETTINGS


# LoRAs


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")  # of the second LoRA
@pytest.mark.parametrize("name", NAMES)
def test_every_state_of_loras(name: str, tmp_path: Path) -> None:
    """Loaded, scaled, switched, fused, unloaded: with the cache on before, and put on after, and exactly the pipeline's
    where nothing is left out. A failure means that a LoRA does not reach the blocks, or goes around the cache."""
    folder = folder_of(name, tmp_path)
    first, other = MAKE[name](), MAKE[name]()
    ditile.enable_cache(first, CACHE)
    for what, edit in edits(name).items():
        edit(first, folder)
        edit(other, folder)
        plain = draw(other, name)
        ditile.enable_cache(other, EXACT)
        same(draw(other, name), plain, f"{what}, nothing left out")
        ditile.enable_cache(other, CACHE)
        got = draw(first, name)
        same(got, draw(other, name), f"{what}, the cache before or after")
        different(got, plain, what)
        assert skipped(first) == skipped(other) == [REST]
        ditile.disable_cache(other)
    ditile.disable_cache(first)
    same(draw(first, name), plain)


# ControlNets


def with_controlnet() -> tuple[Any, dict[str, Any]]:
    return ZOO["flux-controlnet"].make(), {
        "control_image": torch.rand(1, 3, 32, 24),
        "controlnet_conditioning_scale": 0.6,
    }


def test_controlnets() -> None:
    """What a ControlNet adds between blocks is in what is kept, once. A failure means that it is lost where steps are
    cached, added twice, or that a probe sees it where it is not its own."""
    (pipe, control), name = with_controlnet(), "flux"

    def draw(*args: Any, **changes: Any) -> Any:
        return run(*args, num_inference_steps=STEPS, **changes)

    plain = draw(pipe, name, **control)
    different(plain, draw(pipe, name, **control | {"controlnet_conditioning_scale": 0.0}), "no control")
    for config in (EXACT, PRUNE.reset(residual_diff_threshold=1e-12)):
        ditile.enable_cache(pipe, config)
        same(draw(pipe, name, **control), plain, f"{config}")
    ditile.disable_cache(pipe)
    for first, last in ((1, 0), (2, 1)):
        with by_hand(pipe, threshold=9e9, spare=SPARE, first=first, last=last):
            wanted = draw(pipe, name, **control)
        different(wanted, plain)
        ditile.enable_cache(pipe, CACHE.reset(Fn_compute_blocks=first, Bn_compute_blocks=last))
        same(draw(pipe, name, **control), wanted, f"F{first} B{last}")
        assert skipped(pipe) == [REST]
        ditile.disable_cache(pipe)
    same(draw(pipe, name, **control), plain)


def test_control_that_ends_in_mid_run() -> None:
    """The step in which it does computes, and with steady control no other one does for its sake. A failure means that
    what enters behind the probe is not noticed, so that control goes on where it should have ended."""
    pipe, control = with_controlnet()
    randomise(pipe.transformer, gain=0.3)  # as slow from step to step as a trained model

    def draw(**changes: Any) -> Any:
        return run(pipe, "flux", num_inference_steps=12, **control, **changes)

    plain = draw(control_guidance_end=0.5)
    ditile.enable_cache(pipe, CACHE.reset(residual_diff_threshold=0.15))
    draw()
    steady = {step for branch in skipped(pipe) for step in branch}
    got = draw(control_guidance_end=0.5)
    [found] = {tuple(branch) for branch in skipped(pipe)}
    assert steady - set(found) == {6}
    assert float((got - plain).norm() / plain.norm()) < 0.06


# Hooks that offload


def hook(transformer: nn.Module) -> None:
    """On the transformer and on each of its blocks, as offloading puts them."""
    for module in (transformer, *transformer.transformer_blocks):
        add_hook_to_module(module, ModelHook())


def unhook(transformer: nn.Module) -> None:
    remove_hook_from_module(transformer, recurse=True)


ORDERS = [
    order
    for order in itertools.permutations(("cache", "hook", "no cache", "no hook"))
    if order.index("cache") < order.index("no cache") and order.index("hook") < order.index("no hook")
]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_hooks_come_and_go_in_any_order(order: tuple[str, ...]) -> None:
    """A failure means that a cache is lost with a hook that was there before it, without a word; that one of the two
    takes the other off; or that something of the cache is left behind."""
    pipe = MAKE["pixart sigma"]()
    plain = draw(pipe, "pixart sigma")
    ditile.enable_cache(pipe, CACHE)
    fast = draw(pipe, "pixart sigma")
    ditile.disable_cache(pipe)
    does = {"hook": hook, "no hook": unhook, "cache": None, "no cache": None}
    is_cached = False
    for what in order:
        if what == "cache":
            ditile.enable_cache(pipe, CACHE)
        elif what == "no cache":
            ditile.disable_cache(pipe)
        else:
            does[what](pipe.transformer)  # type: ignore[misc]
        is_cached = what == "cache" or (is_cached and what != "no cache")
        same(draw(pipe, "pixart sigma"), fast if is_cached else plain, f"{what} of {order}")
    for module in pipe.transformer.modules():
        left = vars(module).get("forward")
        assert left is None or left.__func__ is type(module).forward, "accelerate itself leaves the module's own"
        assert not [key for key in vars(module) if "ditile" in key or key == "_old_forward"]


@pytest.mark.parametrize("config", [CACHE, PRUNE], ids=str)
@pytest.mark.parametrize("how", ["accelerate", "blocks to disk", "layers to disk"])
def test_weights_that_are_elsewhere(how: str, config: Any, tmp_path: Path) -> None:
    """Weights that are brought back for a block alone, by accelerate or diffusers' group offloading: before and after
    the cache is put on. A failure means that a block runs without its weights after some were left out."""
    name, pictures = "flux", []
    for order in (("cache",), ("cache", "offload"), ("offload", "cache")):
        pipe = MAKE[name]()
        for what in order:
            if what == "cache":
                ditile.enable_cache(pipe, config)
            elif how == "accelerate":
                accelerate.cpu_offload(pipe.transformer, torch.device("cpu"))
            else:
                pipe.transformer.enable_group_offload(
                    torch.device("cpu"), num_blocks_per_group=1, offload_to_disk_path=str(tmp_path / "-".join(order)),
                    offload_type="block_level" if how.startswith("blocks") else "leaf_level",
                )  # fmt: skip
        pictures.append(draw(pipe, name))
        pictures.append(draw(pipe, name))
        assert all(steps == REST for steps in skipped(pipe))
    assert all(near(picture, pictures[0]) for picture in pictures)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for sums in another order: weights that lie elsewhere in memory, residuals of each stage apart."""
    return float((one - other).abs().max()) <= 3e-5 * float(other.abs().max())


# Two transformers


def wan(**config: Any) -> tuple[Any, dict[str, Any]]:
    pipe, call = wan_pipeline()
    return pipe, call | {"num_inference_steps": 10}


def frames(pipe: Any, call: dict[str, Any]) -> Any:
    return pipe(**call, generator=torch.Generator().manual_seed(0)).frames


def test_transformers_in_turns_have_a_warmup_each() -> None:
    """A failure means that the second transformer of Wan 2.2 goes on counting where the first one stopped, so that its
    first steps are not computed; or that branches of guidance are mixed up."""
    pipe, call = wan()
    counts = [0, 0]
    for k, transformer in enumerate((pipe.transformer, pipe.transformer_2)):
        transformer.register_forward_pre_hook(lambda *_, k=k: counts.__setitem__(k, counts[k] + 1))
    plain, got = draw_plain_and_cached(pipe, SETTINGS, lambda: frames(pipe, call))
    steps = [count // 6 for count in counts]
    assert sum(steps) == 10 and min(steps) > 3
    assert skipped(pipe) == [list(range(SPARE, steps[0]))] * 2 + [list(range(SPARE, steps[1]))] * 2
    assert find_model_cache(pipe.transformer).memory_bytes == find_model_cache(pipe.transformer_2).memory_bytes == 0
    same(frames(pipe, call), got)
    both = [pipe.transformer, pipe.transformer_2]
    modifiers = [[ParamsModifier(cache_config=DBCacheConfig(max_warmup_steps=warmup))] for warmup in (1, 3)]
    ditile.enable_cache(BlockAdapter(pipe=pipe, transformer=both, params_modifiers=modifiers), CACHE)
    frames(pipe, call)
    assert skipped(pipe) == [list(range(1, steps[0]))] * 2 + [list(range(3, steps[1]))] * 2
    ditile.disable_cache(pipe)
    same(frames(pipe, call), plain)


# Plans


@pytest.mark.parametrize("name", ["pixart sigma"])
@on_ranks(2)
def test_before_or_after_parallelize(name: str) -> None:
    """A failure means that the order matters, that a stage knows nothing of its cache, or that `restore` and
    `disable_cache` take off what is not theirs."""
    plan, found = Plan(pipefusion=2, patches=1, warmup=99), []
    alone = MAKE[name]()
    ditile.enable_cache(alone, CACHE)
    wanted, plain = draw(alone, name), draw(ditile.disable_cache(alone), name)
    for order in ("before", "after", "runner"):
        pipe = MAKE[name]()
        if order == "before":
            ditile.enable_cache(pipe, CACHE)
        runner = ditile.parallelize(pipe, plan, keep_weights=True)
        if order == "after":
            assert ditile.enable_cache(pipe, CACHE) is pipe
        if order == "runner":
            assert ditile.enable_cache(runner, CACHE) is runner
        found.append(draw(runner, name))
        same(draw(runner, name), found[-1], f"{order}, the second call")
        reports = caching.summary(runner, logging=False)
        assert [report.stage for report in reports] == [0, 1]
        assert all(each.skipped == REST for report in reports for each in report.decisions)
        if order == "before":
            runner.restore()
            same(draw(pipe, name), wanted, "restored, the cache still on")
            assert all(steps == REST for steps in skipped(pipe))
        else:
            ditile.disable_cache(runner)
            same(draw(runner, name), plain, "the cache was taken off")
            with pytest.raises(StateError):
                caching.summary(runner, logging=False)
            runner.restore()
        same(draw(ditile.disable_cache(pipe), name), plain, f"{order}, nothing left")
        assert not {"step", "set_timesteps"} & vars(pipe.scheduler).keys()
    pictures = [wanted, *found]
    same(pictures[2:], [pictures[1]] * 2, "the order")
    assert near(pictures[1], pictures[0])


UNLIKE: list[DBCacheConfig | None] = [
    None,
    CACHE.reset(residual_diff_threshold=0.5),
    CACHE.reset(steps_computation_mask=[1, 1, 0, 0, 0, 1]),
]


@on_ranks(2)
def test_ranks_with_different_caches_are_refused() -> None:
    """A failure means that ranks decide differently, on a part of the image each: a hang, or a wrong picture."""
    pipe = MAKE["flux"]()
    runner = ditile.parallelize(pipe, Plan(ulysses=2))
    plain = draw(runner, "flux")
    for theirs in UNLIKE:
        ditile.disable_cache(pipe)
        mine = theirs if dist.get_rank() else CACHE
        if mine is not None:
            ditile.enable_cache(pipe, mine)
        with pytest.raises(StateError, match="call all ranks alike"):
            draw(runner, "flux")
    ditile.disable_cache(pipe)
    same(draw(runner, "flux"), plain)


COMPILED = DBCacheConfig(
    Fn_compute_blocks=1, max_warmup_steps=2, residual_diff_threshold=0.5, steps_computation_policy="static",
    steps_computation_mask=(1, 1, 0, 1, 0, 1),
)  # fmt: skip
SIX_STEPS = {"num_inference_steps": 6}
MOST = 6
"""Graphs of a class of blocks under PipeFusion; 4 without."""


@pytest.mark.parametrize(
    ("way", "order", "patches"),
    [
        ("whole", "cached first", 3),
        ("in place", "cached first", 1),
        ("blocks", "compiled first", 3),
    ],
)
def test_compiled_and_cached_equal_cached(way: str, order: str, patches: int) -> None:
    """The picture is that of the cache alone, steps were left out, and the second picture makes no graph.

    A failure of equality means that dynamo traced a hook, so that what it decided once was taken for ever; of the
    second picture, that a step, patch or decision was guarded.
    """
    name = "pixart sigma" if way == "in place" else "flux"
    plan = Plan(patches=patches, warmup=1)
    pipe = MAKE[name]()
    caching.enable_cache(pipe, COMPILED)
    wanted = run(pipe if patches == 1 else parallelize(pipe, plan), name, **SIX_STEPS)
    torch._dynamo.reset()
    pipe, count = MAKE[name](), Counting()
    steps = [lambda: WAYS[way](pipe, backend=count), lambda: caching.enable_cache(pipe, COMPILED)]
    for step in steps if order == "compiled first" else reversed(steps):
        step()
    runner = pipe if patches == 1 else parallelize(pipe, plan)
    same(run(runner, name, **SIX_STEPS), wanted, way)
    assert all(caching.summary(pipe, logging=False)[0].decisions[0].skipped), "nothing was left out"
    graphs = count.take()
    assert graphs and max(graphs.values()) <= (4 if patches == 1 else MOST), graphs
    same(run(runner, name, **SIX_STEPS), wanted, way)
    assert not count.take()
    caching.disable_cache(pipe)
