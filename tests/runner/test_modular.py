"""Modular pipelines: what a runner does that a pipeline of one class has no need of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import ComponentsManager
from diffusers.modular_pipelines import PipelineState

import ditile
from ditile import Plan
from ditile.plan.errors import StoppedError
from ditile.runner.callbacks import StepWatch
from ditile.runner.runner import Runner, build_single_runner
from tests.pool import Pool, on_ranks
from tests.runner import cases
from tests.tiny import flux
from tests.zoo import ZOO
from tests.zoo.modular import minimax_h3
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
PATCHES = Plan(patches=3, warmup=1)


def flux_call(**changes: Any) -> dict[str, Any]:
    return ZOO["flux-modular"].call() | {"output": "latents"} | changes


@pytest.fixture
def pipe() -> Any:
    return ZOO["flux-modular"].make()


@pytest.fixture
def runner(pipe: Any) -> Iterator[Runner]:
    runner = build_single_runner(pipe, PATCHES)
    yield runner
    runner.restore()


@on_ranks(2)
def test_a_stop_on_one_rank_ends_the_call_on_both() -> None:
    """And the next call is right; `output_on` gives rank 0 alone the result."""
    runner = ditile.parallelize(ZOO["flux-modular"].make(), Plan(pipefusion=2, patches=3, warmup=1))
    wanted = runner(**flux_call())
    assert (runner(**flux_call(), output_on="first") is None) == (dist.get_rank() == 1)
    stop = StepWatch(on_step=lambda step, _: runner.stop() if step == 1 and dist.get_rank() == 1 else None)
    with pytest.raises(StoppedError):
        runner(**flux_call(num_inference_steps=8), watch=stop)
    assert torch.equal(runner(**flux_call()), wanted)
    assert type(runner.pipe._blocks.sub_blocks["denoise"]).__name__ == "FluxCoreDenoiseStep"


@pytest.mark.parametrize("name", ["qwen-image-modular", "flux-inpaint", "wan-2.2"])
def test_two_threads_count_steps_apart(name: str) -> None:
    """Each runner counts its own steps by `enumerate`, of a tree of blocks or of one function: blends, sigmas and
    boundaries of the two calls have other lengths. A failure means that one call is drawn by the steps of another."""
    calls = [{"num_inference_steps": steps} for steps in (3, 5)]
    pipes = [ZOO[name].make() for _ in calls]
    runners = [build_single_runner(pipe, PATCHES) for pipe in pipes]
    make = ZOO[name].call
    wanted = [list_tensors(runner(**make() | call)) for runner, call in zip(runners, calls, strict=True)]
    found: dict[int, list[torch.Tensor]] = {}
    together = threading.Barrier(2)

    def draw(index: int) -> None:
        for _ in range(3):
            together.wait(30)
            found[index] = list_tensors(runners[index](**make() | calls[index]))

    threads = [threading.Thread(target=draw, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        cases.same(found[index], wanted[index])


def draw_both_workflows() -> list[torch.Tensor]:
    """On one of three ranks, or alone: a video of each checkpoint, by one runner."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    pipe = minimax_h3()
    runner = ditile.parallelize(pipe, Plan(pipefusion=ranks, patches=2, warmup=9)) if ranks > 1 else pipe
    drawn: list[torch.Tensor] = []
    for name in ("minimax-h3", "minimax-h3-references"):
        state = PipelineState({"references": []} if name.endswith("references") else {})
        drawn += list_tensors(runner(**ZOO[name].call() | {"state": state}))
    return drawn


def test_both_checkpoints_of_a_family_are_divided(pool: Pool) -> None:
    """MiniMax-H3 with both of its transformers: what is given says which one a call takes. Bit for bit."""
    wanted = draw_both_workflows()
    assert len(wanted) == 4 and wanted[0].shape == wanted[2].shape and not torch.equal(wanted[0], wanted[2])
    for drawn in pool.run(draw_both_workflows, 3):
        assert all(torch.equal(one, other) for one, other in zip(drawn, wanted, strict=True))


def make_offloaded(moved: list[str], where: str = "cpu") -> tuple[Any, ComponentsManager]:
    """FLUX whose components come to their device when they are called, and leave for others."""
    manager = ComponentsManager()
    pipe = diffusers.FluxAutoBlocks().init_pipeline(components_manager=manager)
    pipe.update_components(**{name: part for name, part in flux().components.items() if name in pipe.component_names})

    def offload_all(hooks: list[Any], model_id: str, **_: Any) -> list[Any]:
        moved.append(model_id.rsplit("_", 1)[0])
        return hooks

    manager.enable_auto_cpu_offload(device=where, offload_strategy=offload_all)
    return pipe, manager


@pytest.fixture
def cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ComponentsManager asks how much of its device is free, which torch does not say of a CPU."""
    monkeypatch.setattr(torch.cpu, "mem_get_info", lambda _: (0, 1), raising=False)


def test_a_manager_offloads_what_is_divided(cpu_memory: None, pipe: Any) -> None:
    """Its hooks move the model of each call; the picture, modules and weights are the same."""
    wanted, moved = pipe(**flux_call()), list[str]()
    offloaded, manager = make_offloaded(moved)
    runner = build_single_runner(offloaded, Plan(patches=3, warmup=9))
    model, weights = offloaded.transformer, list(offloaded.transformer.parameters())
    moved.clear()
    assert torch.equal(runner(**flux_call()), wanted) and "transformer" in moved
    assert offloaded.transformer is model
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    runner.restore()
    assert torch.equal(offloaded(**flux_call()), wanted)
