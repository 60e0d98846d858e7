"""diffusers' own configs of parallelism divide any pipeline, with the images of the plan that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig

import ditile
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.runner.diffusers_configs import convert_config
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, draw_plain, run, same

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (ContextParallelConfig(ring_degree=2, ulysses_degree=4), Plan(ring=2, ulysses=4)),
        (ContextParallelConfig(ulysses_degree=2, ulysses_anything=True), Plan(ulysses=2)),
        (TensorParallelConfig(tp_degree=2), Plan(tensor=2)),
        (ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=3)), Plan(ring=3)),
        (ParallelConfig(tensor_parallel_config=TensorParallelConfig(tp_degree=3)), Plan(tensor=3)),
        (ParallelConfig(), Plan()),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_stands_for_a_plan(config: Any, plan: Plan) -> None:
    assert convert_config(config) == plan


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ContextParallelConfig(ring_degree=2, convert_to_fp32=False), "convert_to_fp32=False cannot be honoured"),
        (TensorParallelConfig(tp_degree=2, mesh="a mesh"), "mesh='a mesh' cannot be honoured"),
        (Plan(ulysses=2), "is not a ParallelConfig, ContextParallelConfig or TensorParallelConfig"),
        ({"ulysses_degree": 2}, "config={'ulysses_degree': 2} is not"),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_its_value(config: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        convert_config(config)


def test_a_model_without_its_pipeline_is_refused() -> None:
    with pytest.raises(ModelError, match="FluxTransformer2DModel is a model; give its pipeline"):
        ditile.enable_parallelism(MAKE["flux"]().transformer, ContextParallelConfig(ring_degree=2))


def draw_by_configs(name: str, configs: list[Any]) -> list[Any]:
    """The images under each config, each with those under its plan."""
    pairs = []
    for config in configs:
        runner = ditile.enable_parallelism(MAKE[name](), config, keep_weights=True)
        with divided(MAKE[name](), ulysses=runner.plan.ulysses, tensor=runner.plan.tensor) as own:
            pairs.append((run(runner, name), run(own, name)))
        runner.restore()
    return pairs


@pytest.mark.parametrize("name", ["flux", "pixart sigma"])
def test_images_are_those_of_the_plan(pool: Pool, name: str) -> None:
    """PixArt has neither of diffusers' tables. A failure means that a config divides otherwise than its plan."""
    configs = [ContextParallelConfig(ulysses_degree=2), TensorParallelConfig(tp_degree=2)]
    for pairs in pool.run(draw_by_configs, 2, name, configs):
        for by_config, by_plan in pairs:
            same(by_config, by_plan)


def draw_with_diffusers_alone(name: str, config: Any) -> tuple[Any, Any, Any]:
    """The images by diffusers' own division of the transformer, by ditile's for the same config, and by one rank."""
    pipe = MAKE[name]()
    with pytest.MonkeyPatch.context() as patch:
        # diffusers looks for an accelerator, and divides by the number of them.
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        pipe.transformer.enable_parallelism(config=config)
    theirs = run(pipe, name)
    return theirs, run(ditile.enable_parallelism(MAKE[name](), config), name), draw_plain(name)


def test_images_are_those_of_diffusers_own_division(pool: Pool) -> None:
    """Up to rounding: sums of attention are made in the same order, products of other shapes."""
    for theirs, ours, plain in pool.run(draw_with_diffusers_alone, 2, "flux", ContextParallelConfig(ulysses_degree=2)):
        scale = plain.abs().max()
        assert float((theirs - ours).abs().max() / scale) < TOLERANCE
        assert float((plain - ours).abs().max() / scale) < TOLERANCE
