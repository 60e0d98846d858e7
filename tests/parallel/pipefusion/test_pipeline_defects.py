"""Within a picture nothing blocks but the wait for a message; `test_hangs` has receives and launches."""

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


@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3.5 medium"])
def test_nothing_blocks_but_the_wait_for_a_message(pool: Pool, name: str) -> None:
    """A failure means that ranks shake hands, pickle, or wait for the whole device. In a hybrid, ranks that gather
    start all sends and receives at once, and then wait."""
    pool.run(without_waiting, 2, name, {"pipefusion": 2}, WAITS)
    pool.run(without_waiting, 4, name, {"pipefusion": 2, "ring": 2}, WAITS[:-1])
