"""Blocks that are recorded in one asynchronous step and replayed in later ones draw the same picture.

There is no GPU here: what stands in for a CUDA graph are the operators that a block called, which are called again on
the same memory, whatever the block has become; and what they wrote when they were recorded is undone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ditile
from ditile.model.hooks.kv_store import GenerationMemory
from ditile.parallel.pipefusion.graphs import BlockGraphs
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.runner import runner as runners
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["flux", "wan-2.2", "qwen-image", "z-image", "ltx-2", "stable-diffusion-3", "pixart-sigma", "flux-2"]


class Operators(TorchDispatchMode):
    """The operators that are called, with what they are given and return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def record_calls(fn: Callable[[], None], written: Sequence[Tensor]) -> Callable[[], None]:
    """What a function writes over when it is recorded is undone."""
    before = [x.clone() for x in written]
    with Operators() as operators:
        fn()
    for x, old in zip(written, before, strict=True):
        x.copy_(old)

    def replay() -> None:
        for func, args, kwargs, recorded in operators.calls:
            outs = _list_tensors(recorded)
            given = {x.untyped_storage().data_ptr() for x in _list_tensors((args, kwargs))}
            if func._schema.is_mutable:
                func(*args, **kwargs)
            elif any(x.untyped_storage().data_ptr() not in given for x in outs):  # else a view
                for x, new in zip(outs, _list_tensors(func(*args, **kwargs)), strict=True):
                    x.copy_(new)

    return replay


def _list_tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


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


def draw_three_times(name: str, plan: Plan) -> Any:
    """A runner with graphs, each of whose three pictures is that of one without."""
    pipe = ZOO[name].make()
    runner = ditile.parallelize(pipe, plan, keep_weights=True)
    want = draw(runner, name)
    runner.restore()
    runner = ditile.parallelize(pipe, plan, keep_weights=True, cuda_graphs=True)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(draw(runner, name), want, strict=True))
    return runner


@pytest.mark.rotating
@pytest.mark.parametrize("name", NAMES)
def test_replayed_blocks_draw_the_same_picture_in_every_call(name: str, graphs: list[BlockGraphs]) -> None:
    runner = draw_three_times(name, Plan(pipefusion=1, patches=2, warmup=1))
    assert graphs[0].recorded and graphs[0].replayed > 2 * graphs[0].recorded
    recorded = graphs[0].recorded
    draw(runner, name)
    assert graphs[0].recorded == recorded, "the same call was recorded again"
    runner.restore()


@pytest.mark.parametrize("name", ["flux", "qwen-image", "wan-2.2"])
def test_what_a_run_of_blocks_reads_stays_where_it_is(
    name: str, graphs: list[BlockGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every input of each block of a patch, its keys and values: addresses and shapes, in all asynchronous steps of two
    pictures. A failure means that a graph of all blocks of a patch would read what is not there any more."""
    seen: dict[Any, set[Any]] = {}
    steps: dict[Any, int] = {}
    fill, list_stores = BlockGraphs._fill_inputs, GenerationMemory.list_key_stores

    def describe(x: Tensor) -> tuple[Any, ...]:
        return x.data_ptr(), x.shape, x.stride(), x.dtype

    def note_inputs(self: BlockGraphs, recording: Any, run: Any, *more: Any) -> dict[str, Any]:
        statics = fill(self, recording, run, *more)
        leaves, spec = pytree.tree_flatten(statics)
        key = (run, id(recording))
        seen.setdefault(key, set()).add(tuple(describe(x) if isinstance(x, Tensor) else None for x in leaves))
        steps[key] = steps.get(key, 0) + 1
        return statics

    def note_keys(self: GenerationMemory, branch: int, block: str) -> Any:
        stores = list_stores(self, branch, block)
        for index, store in enumerate(stores):
            seen.setdefault((branch, block, index), set()).add(tuple(map(describe, store.list_tensors())))
        return stores

    monkeypatch.setattr(BlockGraphs, "_fill_inputs", note_inputs)
    monkeypatch.setattr(GenerationMemory, "list_key_stores", note_keys)
    runner = ditile.parallelize(
        ZOO[name].make(), Plan(pipefusion=1, patches=2, warmup=1), keep_weights=True, cuda_graphs=True
    )
    for _ in range(2):
        draw(runner, name)
    assert max(steps.values()) >= 3 and all(len(each) == 1 for each in seen.values())
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


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["flux", "z-image", "wan-2.2"])
def test_without_warmup_stale_keys_are_not_wiped(name: str, graphs: list[BlockGraphs]) -> None:
    """The first keys of a picture get their memory in a step of patches, which must not be recorded."""
    runner = draw_three_times(name, Plan(pipefusion=1, patches=2, warmup=0))
    assert graphs[0].replayed
    runner.restore()


def test_a_callback_that_changes_weights_is_seen(graphs: list[BlockGraphs]) -> None:
    def double(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 2:
            layer = pipe.transformer.transformer_blocks[0].ff.net[2]
            layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)
        return kwargs

    drawn = []
    for recorded in (False, True):
        pipe = ZOO["flux"].make()
        plan = Plan(pipefusion=1, patches=2, warmup=1)
        runner = ditile.parallelize(pipe, plan, keep_weights=True, cuda_graphs=recorded)
        drawn.append(draw(runner, "flux", callback_on_step_end=double, num_inference_steps=6))
        runner.restore()
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))
    assert graphs[0].replayed


def test_nothing_of_other_sizes_stays(graphs: list[BlockGraphs]) -> None:
    """A failure means that a server of many sizes fills its GPU."""
    pipe, plan = ZOO["flux"].make(), Plan(pipefusion=1, patches=2, warmup=1)
    runner = ditile.parallelize(pipe, plan, keep_weights=True, cuda_graphs=True)
    counts = []
    for size in (32, 48, 64):
        draw(runner, "flux", height=size, width=size)
        gc.collect()
        counts.append(len(graphs[0]._inputs))
    assert counts[0] == counts[1] == counts[2] > 0
    assert not [x for x in gc.get_objects() if isinstance(x, GenerationMemory) and x.key_bytes]
    runner.restore()


def test_a_block_that_cannot_be_recorded_runs_as_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a block reads a number of the GPU. It is said once."""

    def fail(fn: Callable[[], None], written: Sequence[Tensor]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(runners, "build_block_graphs", lambda plan, device, checks: BlockGraphs(fail, device))
    drawn = []
    for recorded in (False, True):
        pipe, plan = ZOO["wan-2.1"].make(), Plan(pipefusion=1, patches=2, warmup=1)
        runner = ditile.parallelize(pipe, plan, keep_weights=True, cuda_graphs=recorded)
        drawn.append(draw(runner, "wan-2.1"))
        runner.restore()
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))
    assert caplog.text.count("is not recorded as a CUDA graph, and runs without one: operation not permitted") == 1


def test_what_cannot_be_recorded_is_refused_in_one_line() -> None:
    pipe = ZOO["flux"].make()
    with pytest.raises(PlanError, match="needs a GPU"):
        ditile.parallelize(pipe, Plan(pipefusion=1, patches=2), cuda_graphs=True)
    for axis in ("ulysses", "ring", "tensor", "distrifusion"):
        with pytest.raises(PlanError, match=f"{axis}=2 sends messages within blocks"):
            runners.build_block_graphs(Plan(**{axis: 2}), torch.device("cuda"), None)
    with pytest.raises(PlanError, match="warmup=auto measures"):
        runners.build_block_graphs(Plan(pipefusion=2, warmup="auto"), torch.device("cuda"), None)
