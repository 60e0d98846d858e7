"""Blocks whose weights stay in the host's memory draw the same picture, and two of them at most are on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditile
from ditile.distributed import cpus
from ditile.distributed.transport import gather_json
from ditile.model.anatomies import build_block_hooks
from ditile.parallel.pipefusion.block_offload import NUM_BUFFERS, BlockOffload, HostCopies, explain_offload_refusal
from ditile.plan.cost import count_flat_bytes
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.runner import compose
from ditile.runner import runner as runners
from tests.pool import Pool
from tests.runner import loras
from tests.runner.cases import MAKE, different, divided, run, same
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["flux", "wan-2.2", "qwen-image", "z-image", "ltx-2", "stable-diffusion-3", "pixart-sigma", "flux-2"]


class LateCopies(HostCopies):
    """A stream that copies nothing until it is waited for, and then in order; what it writes is NaN until then."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.started: list[tuple[Tensor, Tensor, int]] = []
        self.num_computed = self.num_done = 0
        self.largest = 0

    def start_copy(self, target: Tensor, source: Tensor, after: Any) -> int:
        assert after is not None, "a copy waits for what its buffer was used for"
        target.fill_(255)  # NaN in all types of floating point
        self.started.append((target, source, after))
        self.largest = max(self.largest, target.numel())
        return len(self.started)

    def wait_for_copy(self, copied: int) -> None:
        for target, source, _ in self.started[self.num_done : copied]:
            target.copy_(source)
        self.num_done = max(self.num_done, copied)

    def mark_computed(self) -> int:
        self.num_computed += 1
        return self.num_computed


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LateCopies]]:
    copies: list[LateCopies] = []

    def make_copies(device: torch.device) -> LateCopies:
        copies.append(LateCopies(device))
        return copies[-1]

    monkeypatch.setattr(compose, "HostCopies", make_copies)
    yield copies


def draw(runner: Any, name: str, **more: Any) -> list[Tensor]:
    return [x.clone() for x in list_tensors(runner(**ZOO[name].call() | {"num_inference_steps": 4} | more))]


def equal(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_streamed_blocks_draw_the_same_picture(name: str, made: list[LateCopies]) -> None:
    """A failure means that a block ran before its weights were there, or with those of another one."""
    plan = {"pipefusion": 1, "patches": 2, "warmup": 1}
    pipe = ZOO[name].make()
    runner = ditile.parallelize(pipe, Plan(**plan), keep_weights=True)
    wanted = draw(runner, name)
    runner.restore()
    before = {key: x.clone() for key, x in pipe.transformer.state_dict().items()}
    runner = ditile.parallelize(pipe, Plan(**plan, offload="blocks"), keep_weights=True)
    for _ in range(2):
        assert equal(draw(runner, name), wanted)
    assert len(made[0].started) > 2
    runner.restore()
    after = pipe.transformer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_two_buffers_of_the_largest_block_are_on_the_device(made: list[LateCopies]) -> None:
    """The peak of weights by formula. A failure means that a stage does not fit where the planner says that it does."""
    pipe = MAKE["flux"]()
    blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    sizes = [count_flat_bytes(p.numel() * p.element_size() for p in block.parameters()) for block in blocks]
    with divided(pipe, patches=2, offload="blocks") as runner:
        run(runner, "flux")
        buffers = {target.untyped_storage().data_ptr() for target, _, _ in made[0].started}
        assert {target.untyped_storage().nbytes() for target, _, _ in made[0].started} == {max(sizes)}
        assert len(buffers) == NUM_BUFFERS < len(blocks)
        # Each block comes once in a call of the transformer; the first one is expected behind the last.
        first = made[0].started[: len(blocks)]
        assert [source.numel() for _, source, _ in first] == sizes
        assert not runner._parts.offload._buffers, "buffers stay between calls"


def draw_on_ranks(plans: list[dict[str, Any]]) -> list[Tensor]:
    drawn = []
    for plan in plans:
        with divided(MAKE["sd3.5 medium"](), **plan) as runner:
            drawn.append(run(runner, "sd3.5 medium"))
    return drawn


def test_blocks_are_streamed_under_every_axis(pool: Pool) -> None:
    """Equal, bit for bit, to the same plan without offload; the blocks of a stage follow each other in a circle."""
    plans: list[dict[str, Any]] = [
        {"pipefusion": 2, "patches": 3},
        {"pipefusion": 2, "patches": 2, "warmup": 2, "warmup_mode": "sequence"},
        {"pipefusion": 2, "patches": 2, "warmup": 2, "warmup_mode": "pipelined"},
        {"tensor": 2},
        {"tensor": 2, "split_scheme": "sequence"},
        {"ulysses": 2},
        {"ring": 2},
        {"distrifusion": 2},
        {"cfg": 2},
    ]
    wanted = pool.run(draw_on_ranks, 2, plans)
    for got, plain in zip(pool.run(draw_on_ranks, 2, [p | {"offload": "blocks"} for p in plans]), wanted, strict=True):
        for plan, one, other in zip(plans, got, plain, strict=True):
            same(one, other, plan)


def test_what_cannot_be_streamed_is_refused_in_one_line() -> None:
    with pytest.raises(PlanError, match="cuda_graphs=True: weights of offload=blocks come and go"):
        runners.build_recorder(True, Plan(offload="blocks"), torch.device("cuda"))
    pipe = MAKE["flux"]()
    pipe.transformer.enable_layerwise_casting(torch.float16, torch.float32)
    with pytest.raises(ModelError, match="has hooks of diffusers or accelerate around forwards"):
        runners.parallelize(pipe, Plan(offload="blocks"))

    class Params4bit(torch.nn.Parameter):  # as of bitsandbytes
        quant_state = None

    pipe = MAKE["flux"]()
    layer = pipe.transformer.transformer_blocks[1].ff.net[2]
    layer.weight = Params4bit(layer.weight.detach())
    with pytest.raises(ModelError, match=r"1.ff.net.2.weight is a Params4bit, which keeps more than its numbers"):
        runners.parallelize(pipe, Plan(offload="blocks"))
    known = build_block_hooks(MAKE["flux"]().transformer)
    known.anatomy = dataclasses.replace(known.anatomy, outside=("transformer_blocks.0.norm1",))
    assert "computes with transformer_blocks.0.norm1 outside of its block" in (explain_offload_refusal([known]) or "")


def refuse_for_memory(room: int, ranks: tuple[int, ...] | None) -> tuple[str, list[int]]:
    """On a rank: what is said where a host has so many bytes more than these ranks keep, and what each keeps."""
    kept: list[int] = []
    count = BlockOffload.count_host_bytes

    def note_bytes(offload: BlockOffload) -> int:
        kept.append(count(offload))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockOffload, "count_host_bytes", note_bytes)
        plan = Plan(pipefusion=2, stage_blocks=(4, 1), offload="blocks", offload_ranks=ranks)
        ditile.parallelize(MAKE["flux"](), plan, keep_weights=True).restore()
        total = sum(gather_json(sum(kept), dist.group.WORLD))
        patch.setattr(cpus, "count_memory_bytes", lambda: total + room)
        try:
            ditile.parallelize(MAKE["flux"](), plan, keep_weights=True).restore()
        except PlanError as error:
            return str(error), kept
    return "", kept


def test_weights_that_the_host_has_no_room_for_are_refused(pool: Pool) -> None:
    """Of all of its ranks together, on each of them. A failure means a machine that runs out of memory instead."""
    assert [said for said, _ in pool.run(refuse_for_memory, 2, 0, None)] == ["", ""]
    results = pool.run(refuse_for_memory, 2, -1, None)
    for said, kept in results:
        assert "of weights in its memory, and it has" in said and "pipefusion or tensor" in said and "\n" not in said
        assert kept[0] == kept[1] > 0
    assert results[0][1][0] > 2 * results[1][1][0], "stages of four blocks and of one"
    # One rank alone, refused on both.
    (first, none), (second, kept) = pool.run(refuse_for_memory, 2, -1, (1,))
    assert first == second and "keep" in first and not none and kept == results[1][1]


def test_loras_are_streamed_with_their_blocks(tmp_path: Path, made: list[LateCopies]) -> None:
    """Loaded, scaled, fused and unloaded between calls. A failure means that a picture has the weights of before."""
    loras.write("flux", tmp_path, "one", 1)
    names = ("loaded", "scaled", "fused", "unfused", "unloaded")
    plain, wanted = MAKE["flux"](), []
    for name in names:
        loras.WITH_LOADER[name](plain, tmp_path)
        wanted.append(run(plain, "flux"))
    different(wanted[0], wanted[1])
    with divided(MAKE["flux"](), offload="blocks") as runner:
        run(runner, "flux")
        for name, picture in zip(names, wanted, strict=True):
            loras.WITH_LOADER[name](runner.pipe, tmp_path)
            same(run(runner, "flux"), picture, name)


@pytest.mark.parametrize("quant_type", ["float8_weight_only", "int8_weight_only", "int8"])
def test_quantized_weights_are_streamed(quant_type: str, made: list[LateCopies]) -> None:
    """Their numbers and scales are tensors inside of a tensor."""
    pipe = ditile.quantize(MAKE["flux"](), quant_type)
    wanted = run(pipe, "flux")
    with divided(pipe, offload="blocks") as runner:
        same(run(runner, "flux"), wanted)
    same(run(pipe, "flux"), wanted)
    with divided(MAKE["flux"](), offload="blocks") as runner:
        ditile.quantize(runner.pipe, quant_type)
        same(run(runner, "flux"), wanted)
