"""How many Python calls one attention layer costs: the limits of `benchmarks.frames`."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from benchmarks.frames import LIMITS, PLANS, count_frames, find_attention_frames
from tests.pool import Pool


def count_without_checks(plan: dict[str, Any]) -> int:
    """On a rank: frames of one attention layer, where no ages are asserted."""
    with mock.patch.dict(os.environ, {"DITILE_CHECK": ""}):
        return find_attention_frames(count_frames(plan))


@pytest.mark.parametrize("name", list(PLANS))
def test_one_attention_stays_within_its_frames(pool: Pool, name: str) -> None:
    """A failure means that something is derived anew in each layer, or a closure made, that could be kept."""
    for frames in pool.run(count_without_checks, 2, dict(PLANS[name])):
        assert frames <= LIMITS[name]
