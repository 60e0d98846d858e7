"""Caches on whole pipelines: their own pictures where nothing is left out, and by hand where something is, to the bit.

What `enable_cache` puts on a pipeline is gone after `disable_cache`, and what it remembers after each call. Under every
exact plan a cache leaves out the steps that one process leaves out, on every rank: in float64, with a threshold in a
gap of the differences that one process measured, so that rounding decides nothing.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ditile
from ditile.cache.cached import IdleCacheWarning, find_model_cache
from ditile.cache.config import DBCacheConfig, DBPruneConfig, TaylorSeerCalibratorConfig
from ditile.model.block_lists import find_block_lists
from ditile.model.hooks.kv_store import KeyStore
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.runner import caching
from ditile.runner.runner import parallelize
from tests.cache.hand import by_hand
from tests.cache.pictures import draw_plain_and_cached, settings_for, skipped
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, call_of, different, divided, make_double, run, same
from tests.zoo import ZOO

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


def test_a_refusal_after_quantization_enables_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = MAKE["flux"]()
    ditile.enable_cache(pipe, quantize_config={"quant_type": "int8_weight_only"})
    monkeypatch.setattr(caching, "_divide_and_quantize", Mock(side_effect=[PlanError("no ranks"), None]))
    with pytest.raises(PlanError):
        ditile.enable_cache(pipe)
    assert find_model_cache(pipe.transformer) is None


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


TOLERANCE = 1e-6


class Case(NamedTuple):
    """A pipeline of `MAKE`, a plan, the cache, and changes of the call."""

    name: str
    plan: str
    config: Any = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2, max_continuous_cached_steps=2)
    calibrator: Any = None
    changes: dict[str, Any] = {}


DB_PRUNE = DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=2)
NO_PROBE = DBCacheConfig(Fn_compute_blocks=0, max_warmup_steps=2)
TAYLOR = TaylorSeerCalibratorConfig()
TWO = {"num_images_per_prompt": 2}
MECHANISMS = [
    Case("pixart sigma", "ulysses=2"),
    Case("pixart sigma", "ring=2", DB_PRUNE),
    Case("pixart sigma", "cfg=2"),
    Case("pixart sigma", "data=2", changes=TWO),
    Case("pixart sigma", "tensor=2 split_scheme=sequence"),
    Case("pixart sigma", "pipefusion=2 patches=1", calibrator=TAYLOR),
]
"""An axis each."""
CASES = [
    Case("pixart sigma", "pipefusion=2 warmup=99"),
    Case("pixart sigma", "pipefusion=4 patches=1", DB_PRUNE),
    Case("flux true cfg", "cfg=2"),
    Case("flux", "pipefusion=3 patches=1", NO_PROBE),
    Case("pixart sigma", "ulysses=2 cfg=2", NO_PROBE, TAYLOR),
    Case("flux", "ulysses=3 uaa=true", calibrator=TAYLOR),
    Case("flux", "tensor=2"),
    Case(
        "flux",
        "pipefusion=3 patches=2 warmup=99",
        DBCacheConfig(Fn_compute_blocks=2, Bn_compute_blocks=1, max_warmup_steps=2),
    ),
    Case("sd3", "distrifusion=2 warmup=99"),
    Case("sd3.5 medium", "pipefusion=2 patches=1 ulysses=2", DB_PRUNE),
]


def draw_case(case: Case, threshold: float, plan: str | None) -> tuple[Tensor, list[dict[str, Any]]]:
    """Latents, and what was decided here, alone or on a rank."""
    pipe = MAKE[case.name]()
    make_double(pipe)
    caching.enable_cache(pipe, case.config.reset(residual_diff_threshold=threshold), case.calibrator)
    call = call_of(case.name, num_inference_steps=STEPS, **case.changes)
    runner = pipe if plan is None else parallelize(pipe, Plan.parse(plan))
    latents = runner(**call).images
    return latents, [report.to_dict() for report in caching.summary(pipe, logging=False)]


def safe(case: Case) -> tuple[float, Tensor, list[dict[str, Any]]]:
    """A threshold that leaves steps out and computes others, with no difference near it; and what it gives."""
    for threshold in (0.55, 0.35, 0.7, 0.25, 0.45, 0.9, 0.15, 0.1, 0.05):
        latents, reports = draw_case(case, threshold, None)
        differences = [d for r in reports for each in r["decisions"] for _, d in each["differences"]]
        skipped = sum(len(each["skipped"]) for r in reports for each in r["decisions"])
        margin = min((abs(d - threshold) for d in differences), default=0.0)
        if skipped and any(d >= threshold for d in differences) and margin > 1e-3:
            return threshold, latents, reports
    raise AssertionError(f"no threshold tells the steps of {case.name} apart")


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*MECHANISMS, *CASES], ids=lambda case: f"{case.name}, {case.plan}, {case.config}")
def test_ranks_skip_what_one_process_skips(pool: Pool, case: Case) -> None:
    """Decisions and latents are those of one process. A failure of decisions means that ranks decided on a part of
    the image, or on another's; of latents alone, that what is remembered belongs to other tokens or rows."""
    threshold, wanted, reports = safe(case)
    plan = Plan.parse(case.plan)
    skipped = {(e["branch"], e["unit"]): e["skipped"] for e in reports[0]["decisions"]}
    seen = set()
    for rank, (latents, found) in enumerate(pool.run(draw_case, plan.world, case, threshold, case.plan)):
        assert float((latents - wanted).abs().max() / wanted.std()) < TOLERANCE, f"rank {rank}"
        if isinstance(case.config, DBPruneConfig) or plan.data > 1:
            continue
        for each in found[0]["decisions"]:
            key, steps = (each["branch"], each["unit"]), each["skipped"]
            assert steps == skipped[key] or (plan.cfg > 1 and not steps), f"rank {rank}, {key}"
            seen |= {key} if steps else set()
    assert seen or isinstance(case.config, DBPruneConfig) or plan.data > 1


@on_ranks(2)
def test_nothing_is_remembered_while_the_picture_is_decoded() -> None:
    """A failure means that keys of all layers are in memory where it is needed most."""
    pipe, held = MAKE["flux"](), []
    caching.enable_cache(pipe, DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2))
    decode = pipe.vae.decode

    def seen(*args: Any, **kwargs: Any) -> Any:
        alive = [one for one in gc.get_objects() if isinstance(one, KeyStore)]
        held.append((len(alive), find_model_cache(pipe.transformer).memory_bytes))
        return decode(*args, **kwargs)

    pipe.vae.decode = seen
    runner = parallelize(pipe, Plan(pipefusion=2, patches=2))
    runner(**call_of("flux", output_type="pt"))
    assert held == [(0, 0)]
    assert all(report.kept_bytes for report in caching.summary(pipe, logging=False)), "and what it was is still told"


@on_ranks(4)
def test_restore_gives_the_groups_of_caches_back() -> None:
    """A failure means that each runner leaves threads behind, and communicators on GPUs."""
    pipe, groups = MAKE["pixart sigma"](), dist.distributed_c10d._world.pg_map
    caching.enable_cache(pipe, NO_PROBE)
    before = len(groups)
    runner = parallelize(pipe, Plan(pipefusion=2, ulysses=2), keep_weights=True)
    runner(**call_of("pixart sigma"))
    during = len(groups)
    runner.restore()
    assert during > before == len(groups)


@pytest.mark.filterwarnings("ignore")
def test_a_second_transformer_in_the_loop_is_cached_too() -> None:
    """Regression: a runner knew the caches of those models alone that it divides, and another one left out nothing."""
    one, steps = ZOO["ideogram-4"], {"num_inference_steps": 4}
    pipe = one.make()
    ditile.enable_cache(pipe, DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=9.0))
    wanted = pipe(**one.call() | steps)[0]
    runner = parallelize(pipe, Plan(), keep_weights=True)
    assert torch.equal(runner(**one.call() | steps)[0], wanted)
    reports = caching.summary(pipe, logging=False)
    assert [each.decisions[0].skipped for each in reports] == [[1, 2, 3]] * 2


def draw_with_a_probe(wire_dtype: str | None) -> dict[str, int]:
    """On a rank: bytes by kind of a call whose first three blocks, which a probe compares, are of two stages."""
    cache = DBCacheConfig(Fn_compute_blocks=3, max_warmup_steps=1, residual_diff_threshold=0.9)
    pipe = ditile.enable_cache(MAKE["pixart sigma"](), cache_config=cache)
    with divided(pipe, pipefusion=2, patches=2, warmup=1, wire_dtype=wire_dtype) as runner:
        run(runner, "pixart sigma", num_inference_steps=5)
        return dict(runner.mesh.traffic.bytes)


def test_the_input_of_a_probe_is_not_packed(pool: Pool) -> None:
    """A failure: the change of tokens is measured between numbers that were rounded and numbers that were not."""
    exact, packed = (pool.run(draw_with_a_probe, 2, wire_dtype)[0] for wire_dtype in (None, "int8"))
    assert packed["probe"] == exact["probe"] > 0
    assert packed["activations"] < exact["activations"] / 3
