"""Plans under NCCL's order (see `nccl`): they end, with the pictures that gloo gives, bit for bit.

A failure, most likely a hang, means that ranks on GPUs wait for each other for ever. To try a plan, add a row.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditile.cache.config import DBCacheConfig
from ditile.distributed.transport import PeerChannel, Traffic
from ditile.plan.plan import Plan
from ditile.runner.caching import enable_cache
from tests.distributed.nccl import in_order
from tests.pool import CaseError, Pool
from tests.runner.cases import MAKE, divided, run, same

LARGE = {"height": 40, "width": 56, "max_sequence_length": 7}
LATENTS = {"callback_on_step_end_tensor_inputs": ["latents"]}
TWO = {"num_images_per_prompt": 2}
CACHED = {"num_inference_steps": 6}
PROBE = DBCacheConfig(Fn_compute_blocks=3, max_warmup_steps=1, residual_diff_threshold=0.5)  # longer than a stage

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("flux", "pipefusion=2 patches=2 warmup=0", {}),
    ("flux", "pipefusion=3 patches=3", LATENTS),
    ("flux true cfg", "pipefusion=4 patches=4 warmup=2", LATENTS),
    ("sd3.5 medium", "pipefusion=3 patches=2 warmup=2 warmup_mode=pipelined", LATENTS),
    ("pixart sigma", "pipefusion=3 patches=3 warmup=2 warmup_mode=sequence", {}),
    ("flux true cfg", "pipefusion=3 patches=3 warmup=2 warmup_mode=sequence", LATENTS),
    ("pixart sigma", "pipefusion=3 patches=3 warmup=2 warmup_mode=sequence", LARGE),
    ("flux", "pipefusion=2 patches=3 ring=2", LARGE),
    ("sd3.5 medium", "pipefusion=2 patches=3 ulysses=2 async_ulysses=true", LARGE),
    ("flux", "pipefusion=2 patches=3 tensor=2 text=first vae=rows", {"output_type": "pt"}),
    ("sd3.5 medium", "ring=2 ulysses=2 text=split vae=rows", {"output_type": "pt"}),
    ("pixart sigma", "distrifusion=3 vae=rows", LARGE | {"output_type": "pt"}),
    ("sd3.5 medium", "cfg=2 distrifusion=2", TWO),
    ("pixart sigma", "data=3 vae=rows", TWO | {"output_type": "pt"}),  # one replica has no image
    ("pixart sigma", "data=2 cfg=2 pipefusion=2 patches=3", TWO),
    ("flux", "pipefusion=3 patches=2", CACHED),
    ("sd3.5 medium", "pipefusion=2 patches=3 ulysses=2", CACHED),
]  # fmt: skip


def in_both_orders(name: str, plan: str, call: dict[str, Any]) -> list[int]:
    """On a rank: a picture on gloo, then in order, lazy and eager; how many operations went through queues."""
    given = dict(call)
    if "callback_on_step_end_tensor_inputs" in given:
        given["callback_on_step_end"] = lambda pipe, step, t, tensors: tensors
    pipe, words = MAKE[name](), asdict(Plan.parse(plan))
    if call == CACHED:
        enable_cache(pipe, PROBE)
    with divided(pipe, **words) as runner:
        wanted = run(runner, name, **given)
    done = []
    # Lazy communicators are made in the first picture, so that a second one finds them there.
    for eager, turns in ((False, 2), (True, 1)):
        with in_order(eager=eager) as order, divided(pipe, **words) as runner:
            for turn in range(turns):
                same(run(runner, name, **given), wanted, f"{plan}, eager={eager}, turn {turn}")
        done.append(order.done)
    return done


@pytest.mark.parametrize(("name", "plan", "call"), ROWS, ids=[f"{name} {plan}" for name, plan, _ in ROWS])
def test_plans_keep_the_order(pool: Pool, name: str, plan: str, call: dict[str, Any]) -> None:
    done = pool.run(in_both_orders, Plan.parse(plan).world, name, plan, call)
    assert all(map(all, done)), "nothing was put in order"


def cross(ordered: bool) -> float:
    """Messages both ways between two ranks; the first has posted its receive before it sends."""
    with in_order(eager=False) if ordered else nullcontext():
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        channel, number = PeerChannel(group, 1 - rank, "test", Traffic()), torch.full((1,), float(rank))
        channel.post_receive(None, (1,), number)
        received = None if rank == 0 else channel.receive_message(None)
        channel.send_tensor(number)
        return float(channel.receive_message(None) if received is None else received)


def test_a_hang_is_found(pool: Pool) -> None:
    """Gloo delivers them, NCCL would not. A failure means that the tests above would find no hang."""
    assert pool.run(cross, 2, False) == [1.0, 0.0]
    with pytest.raises(CaseError, match="cross hung"):
        pool.run(cross, 2, True, timeout=3)
