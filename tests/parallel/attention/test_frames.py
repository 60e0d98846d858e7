"""How many Python calls one attention layer and one micro-step cost: the limits of `benchmarks.frames`."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from benchmarks.frames import (
    LIMITS,
    MICRO_STEP_LIMIT,
    PLANS,
    FrameCounts,
    count_frames,
    find_attention_frames,
    find_micro_step_frames,
)
from tests.pool import Pool


def count_without_checks(plan: dict[str, Any]) -> FrameCounts:
    """On a rank: what is counted where no ages are asserted."""
    with mock.patch.dict(os.environ, {"DITILE_CHECK": ""}):
        return count_frames(plan)


@pytest.mark.parametrize("name", list(PLANS))
def test_one_attention_and_one_micro_step_stay_within_their_frames(pool: Pool, name: str) -> None:
    """A failure means that something is derived anew in each layer or call, or a closure made, that could be kept."""
    counts = pool.run(count_without_checks, 2, dict(PLANS[name]))
    for each in counts:
        assert find_attention_frames(each) <= LIMITS[name]
    if name == "pipefusion":
        assert find_micro_step_frames(counts[0]) <= MICRO_STEP_LIMIT
