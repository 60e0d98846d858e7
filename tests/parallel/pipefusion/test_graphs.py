"""Blocks that are recorded in one asynchronous step and replayed in later ones draw the same picture.

There is no GPU here: what stands in for a CUDA graph runs the recorded calls of one block again, on the same memory,
and does nothing when it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ditile
from ditile.errors import PlanError
from ditile.parallel.pipefusion.graphs import BlockGraphs
from ditile.plan.plan import Plan
from ditile.runner import runner as runners
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["flux", "wan-2.2", "qwen-image", "z-image", "ltx-2", "stable-diffusion-3", "pixart-sigma", "flux-2"]


def record_calls(fn: Callable[[], None], written: Sequence[Tensor]) -> Callable[[], None]:
    """What a function writes when it is recorded is undone."""
    before = [x.clone() for x in written]
    fn()
    for x, old in zip(written, before, strict=True):
        x.copy_(old)
    return fn


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BlockGraphs]]:
    made: list[BlockGraphs] = []

    def build(plan: Plan, device: torch.device, checks: Any) -> BlockGraphs:
        made.append(BlockGraphs(record_calls, device))
        return made[-1]

    monkeypatch.setattr(runners, "build_block_graphs", build)
    yield made


def draw(runner: Any, name: str, **more: Any) -> list[Tensor]:
    return [x.clone() for x in list_tensors(runner(**ZOO[name].call() | {"num_inference_steps": 5} | more))]


@pytest.mark.parametrize("name", NAMES)
def test_replayed_blocks_draw_the_same_picture_in_every_call(name: str, graphs: list[BlockGraphs]) -> None:
    pipe, plan = ZOO[name].make(), Plan(pipefusion=1, patches=2, warmup=1)
    runner = ditile.parallelize(pipe, plan, keep_weights=True)
    want = draw(runner, name)
    runner.restore()
    runner = ditile.parallelize(pipe, plan, keep_weights=True, cuda_graphs=True)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(draw(runner, name), want, strict=True))
    assert graphs[0].recorded and graphs[0].replayed > 2 * graphs[0].recorded
    recorded = graphs[0].recorded
    draw(runner, name)
    assert graphs[0].recorded == recorded, "the same call was recorded again"
    runner.restore()


def test_other_weights_sizes_and_prompts_are_seen(graphs: list[BlockGraphs]) -> None:
    name, plan = "flux", Plan(pipefusion=1, patches=2, warmup=1)
    entry, pipe, other = ZOO[name], ZOO[name].make(), ZOO[name].make()
    runner = ditile.parallelize(pipe, plan, keep_weights=True, cuda_graphs=True)
    draw(runner, name)
    for more in (entry.larger(), entry.other_prompt(), entry.call()):
        like = ditile.parallelize(other, plan, keep_weights=True)
        more = more | {"num_inference_steps": 5}
        want = list_tensors(like(**more | {"generator": torch.Generator().manual_seed(7)}))
        like.restore()
        got = list_tensors(runner(**more | {"generator": torch.Generator().manual_seed(7)}))
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    for model in (pipe.transformer, other.transformer):
        weight = model.transformer_blocks[0].ff.net[2].weight
        model.transformer_blocks[0].ff.net[2].weight = torch.nn.Parameter(weight.detach() * 1.5)
    like = ditile.parallelize(other, plan, keep_weights=True)
    want = draw(like, name)
    like.restore()
    assert all(torch.equal(*pair) for pair in zip(draw(runner, name), want, strict=True))
    runner.restore()


def test_what_cannot_be_recorded_is_refused_in_one_line() -> None:
    pipe = ZOO["flux"].make()
    with pytest.raises(PlanError, match="needs a GPU"):
        ditile.parallelize(pipe, Plan(pipefusion=1, patches=2), cuda_graphs=True)
    for axis in ("ulysses", "ring", "tensor", "distrifusion"):
        with pytest.raises(PlanError, match=f"{axis}=2 sends messages within blocks"):
            runners.build_block_graphs(Plan(**{axis: 2}), torch.device("cuda"), None)
