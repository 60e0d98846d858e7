"""What a rank holds: its share of the weights, and nothing after the call."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.loading import KINDS, measured, write_pipeline
from ditile.plan.plan import Plan
from ditile.runner.runner import Runner, parallelize
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, run

SIZE = {"height": 40, "width": 56}
LISTS = {
    "flux": ("transformer_blocks", "single_transformer_blocks"),
    "pixart sigma": ("transformer_blocks",),
    "sd3.5 medium": ("transformer_blocks",),
}


def parameters(name: str, ranks: int) -> tuple[list[str], int, int]:
    """On a rank: the blocks with weights, parameters in blocks, and all others."""
    pipe = MAKE[name]()
    parallelize(pipe, Plan(pipefusion=ranks))
    blocks: dict[str, int] = {}
    for path in LISTS[name]:
        for index, block in enumerate(pipe.transformer.get_submodule(path).children()):
            blocks[f"{path}.{index}"] = sum(p.numel() for p in block.parameters())
    everything = sum(p.numel() for p in pipe.transformer.parameters())
    return [block for block, count in blocks.items() if count], sum(blocks.values()), everything - sum(blocks.values())


@pytest.mark.parametrize("name", LISTS)
def test_parameters_are_the_share_and_the_ends(pool: Pool, name: str) -> None:
    """A failure means that a rank keeps blocks of other stages, or lacks embeddings or head."""
    whole = pool.run(parameters, 1, name, 1)[0]
    for ranks in (2, 3, 4):
        actual = pool.run(parameters, ranks, name, ranks)
        assert [block for blocks, _, _ in actual for block in blocks] == whole[0]
        assert sum(share for _, share, _ in actual) == whole[1]
        assert all(rest == whole[2] for _, _, rest in actual)
        assert max(share for _, share, _ in actual) < whole[1]


def moved(name: str) -> tuple[int, int, int]:
    """Parameters of the transformer and of the text encoders when something is first moved, and of the whole."""
    pipe, seen = MAKE[name](), list[tuple[int, int]]()
    encoders = [part for key, part in pipe.components.items() if key.startswith("text_encoder")]
    whole = sum(p.numel() for p in pipe.transformer.parameters())

    def look(*_: Any, **__: Any) -> None:
        text = sum(p.numel() for part in encoders for p in part.parameters())
        seen.append((sum(p.numel() for p in pipe.transformer.parameters()), text))
        raise InterruptedError("nothing is moved in this test")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(type(pipe), "to", look)
        patch.setattr(torch.nn.Module, "_apply", look)
        parallelize(pipe, Plan(pipefusion=2, text="first"), device="meta")
    return *seen[0], whole


@pytest.mark.parametrize("name", LISTS)
def test_blocks_are_freed_before_anything_is_moved(pool: Pool, name: str) -> None:
    """A failure means that a model which fits two devices by half is moved to each as a whole."""
    shares = [sum(actual[1:]) for actual in pool.run(parameters, 2, name, 2)]
    for rank, (mine, text, whole) in enumerate(pool.run(moved, 2, name)):
        assert mine == shares[rank] < whole
        assert (text == 0) == (rank == 1)


def _call(runner: Runner, name: str) -> int:
    run(runner, name, **SIZE)
    # What a rank sends is alive until its peer has it.
    dist.barrier()
    return min(_count_tensors() for _ in range(10))


def _count_tensors() -> int:
    # gloo's threads hold what a collective was given for a moment longer.
    time.sleep(0.02)
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("name", LISTS)
@on_ranks(2)
def test_nothing_outlives_the_call(name: str) -> None:
    """A failure means that a picture's keys or constants stay in memory, or the pipeline is left seated."""
    # What an earlier case left in this process may go at any time: the collector lists nothing that is frozen.
    gc.collect()
    gc.freeze()
    pipe = MAKE[name]()
    runner = parallelize(pipe, Plan(pipefusion=2, patches=3), keep_weights=True)
    counts = [_call(runner, name) for _ in range(3)]
    assert type(pipe.scheduler.timesteps) is torch.Tensor
    runner.restore()
    assert counts == counts[:1] * 3


RANKS = 4


@pytest.fixture(scope="module")
def model() -> Iterator[tuple[str, int]]:
    """A FLUX pipeline of 1024 channels in bfloat16, about 400 MB in one file, and its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder, write_pipeline(Path(folder), heads=8, double=2, single=8, layers=0, dtype=torch.bfloat16)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_rank_holds_its_share_while_it_loads(pool: Pool, model: tuple[str, int], dtype: str, size: int) -> None:
    """A failure means that a rank reads, keeps or casts weights that are not its own. float32 is a cast."""
    folder, whole = model
    actual: list[dict[str, Any]] = pool.run(measured, RANKS, folder, "first", dtype)
    for rank, of_rank in enumerate(actual):
        assert of_rank["transformer_read"] == of_rank["transformer"] * 2 // size
        for kind in KINDS:
            assert of_rank[kind] <= of_rank["limit"] < 0.75 * whole * size // 2, (rank, kind, of_rank)
        assert of_rank["RssAnon"] > 0.8 * of_rank["transformer"], "the peak was not seen"
