"""What scripts for cache-dit say, with `import ditile as cache_dit`: each snippet of its guides, on tiny pipelines.

Model, device and prompt are replaced, and nothing else. A failure would mean that a script which runs there does not
run here, or runs and leaves nothing out. What needs a kernel or a card that is absent says so in one line.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

import ditile as cache_dit
from ditile import DBCacheConfig, DBPruneConfig, ModelError, ParallelismConfig, TaylorSeerCalibratorConfig
from ditile.cache.cached import IdleCacheWarning
from tests import tiny
from tests.pool import Pool, on_ranks


def flux(double: int = 4, single: int = 8) -> Any:
    """So that steps change as little as those of a trained model."""
    pipe = tiny.flux(double, single)
    tiny.randomise(pipe.transformer, gain=0.3)
    return pipe


def picture(pipe: Any, steps: int = 28) -> Any:
    return pipe(**tiny.arguments("flux", num_inference_steps=steps)).images


def left_out(pipe: Any) -> list[list[int]]:
    """The cached steps of each context."""
    return [report.cached_steps for report in cache_dit.summary(pipe, logging=False)]


def test_settings_that_leave_no_block_are_said() -> None:
    """Twelve blocks, and all of them probe. Where warnings are errors nothing was changed."""
    pipe = flux()
    before = [vars(block).get("forward") for block in pipe.transformer.transformer_blocks]
    with pytest.warns(IdleCacheWarning, match="all 12 blocks of .* always compute then.*try Fn_compute_blocks=2$"):
        cache_dit.enable_cache(pipe, cache_config=DBCacheConfig(Fn_compute_blocks=12))
    picture(pipe, 2)
    assert cache_dit.summary(pipe, logging=False) == []
    cache_dit.disable_cache(pipe)
    with pytest.raises(IdleCacheWarning):
        cache_dit.enable_cache(pipe, DBPruneConfig(Fn_compute_blocks=1, non_prune_block_ids=list(range(1, 12))))
    assert [vars(block).get("forward") for block in pipe.transformer.transformer_blocks] == before


def test_a_refresh_changes_what_it_is_given() -> None:
    """The fields that a config was given, as with modifiers. A failure means that all others fall back to defaults."""
    pipe = flux(2, 4)
    model = pipe.transformer
    cache_dit.enable_cache(model, {"Fn_compute_blocks": 1, "max_warmup_steps": 2, "enable_taylorseer": True})
    assert cache_dit.strify(model) == "DBCache_F1B0_W2I1M0MC0_R0.08_T1O1"
    config = DBCacheConfig().reset(num_inference_steps=8, residual_diff_threshold=0.5)
    cache_dit.refresh_context(
        model, cache_config=config, calibrator_config=TaylorSeerCalibratorConfig(taylorseer_order=2), verbose=True
    )
    assert cache_dit.strify(model) == "DBCache_F1B0_W2I1M0MC0_R0.5_T1O2"
    cache_dit.refresh_context(model, cache_config={"max_warmup_steps": 4})
    assert cache_dit.strify(model) == "DBCache_F1B0_W4I1M0MC0_R0.5_T1O2"
    picture(pipe, 8)
    assert left_out(model) != [[]]
    for wrong in (3, {"max_warmup_step": 4}):
        with pytest.raises(ModelError):
            cache_dit.refresh_context(model, cache_config=wrong)


def test_a_generation_in_which_nothing_was_left_out_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failure means that a cache which does nothing is taken for one that works."""
    pipe = flux()
    cache_dit.enable_cache(pipe, "F=1 W=1 R=1e-9")
    for _ in range(2):
        picture(pipe)
    [line] = caplog.messages
    assert "left out nothing: the smallest difference was 0." in line


def config_of(**parallel: Any) -> dict[str, Any]:
    return {
        "cache_config": DBCacheConfig(Fn_compute_blocks=1, residual_diff_threshold=0.12),
        "parallelism_config": ParallelismConfig(**parallel),
    }


def draw_on_rank(sizes: dict[str, Any]) -> tuple[Any, list[list[int]]]:
    """A picture of a pipeline that is called as ever, on every rank."""
    pipe = flux(2, 4)
    cache_dit.enable_cache(pipe, **config_of(**sizes))
    return picture(pipe, 14), left_out(pipe)


PLAN_OF_FLUX = {
    "": {
        "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, split_output=False),
        "encoder_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, split_output=False),
        "img_ids": ContextParallelInput(split_dim=0, expected_dims=2, split_output=False),
        "txt_ids": ContextParallelInput(split_dim=0, expected_dims=2, split_output=False),
    },
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}
PARALLEL: dict[str, dict[str, Any]] = {
    "async projections": {"ulysses_size": 2, "parallel_kwargs": {"experimental_async_qkv_proj": True}},
    "fields": {"ulysses_size": 2, "ulysses_anything": True, "attention_backend": "native"},
    "a plan of its own": {"ulysses_size": 2, "parallel_kwargs": {"cp_plan": PLAN_OF_FLUX}},
}


@pytest.mark.parametrize("name", PARALLEL)
def test_two_ranks(pool: Pool, name: str) -> None:
    """The picture of one process, up to the order of sums, and its steps."""
    pipe = flux(2, 4)
    cache_dit.enable_cache(pipe, cache_config=config_of()["cache_config"])
    wanted, steps = picture(pipe, 14), left_out(pipe)
    for latents, found in pool.run(draw_on_rank, 2, PARALLEL[name]):
        assert found == steps != [[]]
        assert torch.allclose(latents, wanted, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_quantized_weights_of_a_share() -> None:
    """A failure means that weights are quantized before they are shared out, which no kernel of torchao can do."""
    pictures = []
    for more in ({}, {"quantize_config": {"quant_type": "int8_weight_only"}}):
        pipe = flux(2, 4)
        cache_dit.enable_cache(pipe, **config_of(tp_size=2) | more)
        pictures.append(picture(pipe, 14))
        assert left_out(pipe) != [[]]
    plain, quantized = pictures
    assert 0 < float((quantized - plain).norm() / plain.norm()) < 0.1
