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

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

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
