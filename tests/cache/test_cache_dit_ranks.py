"""What scripts for cache-dit say of several ranks and of kernels, with `import ditile as cache_dit`, on a tiny FLUX.

A failure would mean that a script which runs there does not run here, or that ranks leave out other steps than one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

import ditile as cache_dit
from ditile import DBCacheConfig, ParallelismConfig
from tests.cache.test_cache_dit_scripts import flux, left_out, picture
from tests.pool import Pool


def config_of(**parallel: Any) -> dict[str, Any]:
    return {
        "cache_config": DBCacheConfig(Fn_compute_blocks=1, residual_diff_threshold=0.12),
        "parallelism_config": ParallelismConfig(**parallel),
    }


def on_rank(sizes: dict[str, Any]) -> tuple[Any, list[list[int]]]:
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
    "tensor parallel": {"tp_size": 2},
    "fields": {"ulysses_size": 2, "ulysses_anything": True, "attention_backend": "native"},
    "a plan of its own": {"ulysses_size": 2, "parallel_kwargs": {"cp_plan": PLAN_OF_FLUX}},
}


@pytest.mark.parametrize("name", PARALLEL)
def test_two_ranks(pool: Pool, name: str) -> None:
    """The picture of one process, up to the order of sums, and its steps."""
    pipe = flux(2, 4)
    cache_dit.enable_cache(pipe, cache_config=config_of()["cache_config"])
    wanted, steps = picture(pipe, 14), left_out(pipe)
    for latents, found in pool.run(on_rank, 2, PARALLEL[name]):
        assert found == steps != [[]]
        assert torch.allclose(latents, wanted, rtol=1e-4, atol=1e-4)


def quantized_on_rank() -> tuple[Any, Any]:
    """Without and with quantized weights, which are those of this rank's share."""
    pictures = []
    for more in ({}, {"quantize_config": {"quant_type": "int8_weight_only"}}):
        pipe = flux(2, 4)
        cache_dit.enable_cache(pipe, **config_of(tp_size=2) | more)
        pictures.append(picture(pipe, 14))
        assert left_out(pipe) != [[]]
    return pictures[0], pictures[1]


def test_quantized_weights_of_a_share(pool: Pool) -> None:
    """A failure means that weights are quantized before they are shared out, which no kernel of torchao can do."""
    for plain, quantized in pool.run(quantized_on_rank, 2):
        assert 0 < float((quantized - plain).norm() / plain.norm()) < 0.1
