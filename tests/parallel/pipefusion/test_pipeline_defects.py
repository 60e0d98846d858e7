"""What other pipeline-parallel DiT systems were seen to get wrong, and which test here would see it.

| defect | test |
|---|---|
| warmup 0 crashes, or reads the last picture's keys | test_limits: a_call_knows_nothing_of_the_one_before |
| another text length, batch or resolution in the second call crashes | the same; test_limits: every_way_to_call |
| guidance of 1 or less crashes PixArt | test_limits: without_guidance |
| Euler and UniPC crash; other schedulers are rewritten | test_schedulers: every_scheduler_is_exact |
| callbacks crash, or see each patch with old latents | test_callbacks |
| an uneven last patch | test_limits: any_number_of_stages_is_one_stage (10 rows, M = 3, 7) |
| stages that do not divide the blocks; FLUX's two lists | test_limits: nothing_stale_is_the_plain_pipeline (5 blocks) |
| SD3's keys updated twice; SD3.5's dual attention crashes | test_limits, sd3 and sd3.5 medium |
| shapes agreed by messages that block | here; traffic/test_bytes |
| the whole device is waited for in the hot path | here |
| no accelerator, no import | every test |
| PipeFusion x Ulysses: K/V of the warmup are kept rank by rank, later ones patch by patch | test_hybrids |
| the same: ranks disagree on the shares of an uneven last patch | test_hybrids, "large"; unit/test_layout |
| the same: all stale K/V are exchanged again for every patch | plan/test_cost |
| tokens padded to the degree, and the padding attended to | test_tokens: any_number (140 tokens, 3 and 8 ranks) |
| SD3.5's dual attention crashes when ranks share the tokens | test_tokens and test_hybrids, sd3.5 medium |
| tensor x Ulysses gives another picture | test_tokens: any_number; test_hybrids |
| tensor parallelism is accepted, and does nothing | plan/test_cost; benchmarks/tests/test_traffic |
| every replica draws the same image under data parallelism | test_batch: no_two_images_are_alike |
| group norms of the divided VAE take each rank's own statistics | test_vae: statistics_are_of_the_whole_picture |
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ditile.distributed.transport import PeerChannel
from ditile.plan.plan import Plan
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run, same

WAITS = ("barrier", "send", "recv", "all_gather_object", "broadcast_object_list", "batch_isend_irecv")
"""Calls of torch.distributed that block, agree on shapes, or pickle."""


def forbidden(name: str) -> Any:
    return mock.Mock(side_effect=AssertionError(f"{name} was called in the middle of a picture"))


def without_waiting(name: str, plan: dict[str, Any], waits: tuple[str, ...]) -> None:
    pipe = MAKE[name]()
    with divided(pipe, patches=3, **plan) as runner:
        wanted = run(runner, name)
        no_waits = mock.patch.multiple(dist, **{wait: forbidden(wait) for wait in waits})
        with no_waits, mock.patch.multiple(torch.cuda, synchronize=forbidden("synchronize")):
            same(run(runner, name), wanted)


@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3"])
def test_nothing_blocks_but_the_wait_for_a_message(pool: Pool, name: str) -> None:
    """A failure means that ranks shake hands, pickle, or wait for the whole device."""
    pool.run(without_waiting, 2, name, {"pipefusion": 2}, WAITS)


@pytest.mark.parametrize("name", ["flux", "sd3.5 medium"])
@pytest.mark.parametrize("axis", ["ulysses", "ring"])
def test_nor_in_a_hybrid(pool: Pool, name: str, axis: str) -> None:
    """Ranks that gather start all sends and receives at once, and then wait. A failure is as above."""
    pool.run(without_waiting, 4, name, {"pipefusion": 2, axis: 2}, WAITS[:-1])


LARGE = {"height": 40, "width": 56, "max_sequence_length": 7}
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("flux", "pipefusion=2", {}),
    ("flux", "pipefusion=2 patches=1", {}),
    ("flux", "pipefusion=2 patches=3", LARGE),
    ("flux true cfg", "pipefusion=2", {}),
    ("flux true cfg", "pipefusion=3 patches=4 warmup=2", LARGE),
    ("pixart sigma", "pipefusion=2 patches=4 warmup=2", LARGE),
    ("sd3.5 medium", "pipefusion=3 warmup=0", {}),
    ("sd3.5 medium", "pipefusion=2 patches=3 warmup=2 warmup_mode=pipelined", LARGE),
    ("flux true cfg", "pipefusion=2 warmup=2 warmup_mode=pipelined", {}),
    ("pixart sigma", "pipefusion=2 cfg=2 patches=2", LARGE),
    ("flux", "pipefusion=2 patches=3 ulysses=2", LARGE),
]


class Here:
    """A receive that has ended."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def waiting(name: str, plan: str, call: dict[str, Any]) -> int:
    """On a rank: a picture in which every Linear waits for all receives, as if NCCL's; how many there were."""
    pipe = MAKE[name]()
    with pytest.MonkeyPatch.context() as patch, divided(pipe, **asdict(Plan.parse(plan))) as runner:
        wanted = run(runner, name, **call)
        patch.setattr(PeerChannel, "occupies_device", lambda self, device: True)
        fusion, count = runner._parts.pipefusion, 0
        channels = [box.channel for box in (fusion._activations_in, fusion._latents_in) if box is not None]

        def launch(*_: Any) -> None:
            nonlocal count
            for one in channels:
                for k, receipt in enumerate(one._posted):
                    if not isinstance(receipt.work, Here):
                        receipt.work.wait()
                        one._posted[k] = receipt._replace(work=Here())
                        count += 1

        for module in pipe.transformer.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(launch)
        same(run(runner, name, **call), wanted)
    return count


@pytest.mark.parametrize(("name", "plan", "call"), ROWS, ids=[f"{name} {plan}" for name, plan, _ in ROWS])
def test_receives_wait_for_no_work_of_their_own(pool: Pool, name: str, plan: str, call: dict[str, Any]) -> None:
    counts = pool.run(waiting, Plan.parse(plan).world, name, plan, call, timeout=60)
    assert any(counts) or Plan.parse(plan).num_patches < Plan.parse(plan).pipefusion, "nothing was posted ahead"
