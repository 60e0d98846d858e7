"""Within a picture nothing blocks but the wait for a message, and no receive waits for work of its own rank."""

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


@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3.5 medium"])
def test_nothing_blocks_but_the_wait_for_a_message(pool: Pool, name: str) -> None:
    """A failure means that ranks shake hands, pickle, or wait for the whole device. In a hybrid, ranks that gather
    start all sends and receives at once, and then wait."""
    pool.run(without_waiting, 2, name, {"pipefusion": 2}, WAITS)
    pool.run(without_waiting, 4, name, {"pipefusion": 2, "ring": 2}, WAITS[:-1])


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
