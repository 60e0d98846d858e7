"""What is posted ahead never waits for what a rank has yet to launch: under NCCL launching may wait for all receives.

A failure, a hang, means that the first picture on GPUs can deadlock where a kernel is loaded.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from torch import nn

from ditile.distributed.transport import PeerChannel
from ditile.plan.plan import Plan
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run, same, unfused

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
        with unfused():
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
