"""Every pipeline of the collection under every axis, with recorded calls: the same images as without, and what is not
recorded is in a table with its reason.
"""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.rotation import rotate
from tests.zoo.recorded import record_axes
from tests.zoo.rows import EVERY

pytestmark = pytest.mark.filterwarnings("ignore")

TIMEOUT = 240.0


@pytest.mark.parametrize("name", rotate(EVERY, always=("flux",)))
def test_every_axis_is_recorded(pool: Pool, name: str) -> None:
    """A failure means another image than without tapes, or a pipeline that is not recorded any more."""
    wrong: list[str] = []
    for rank, found in enumerate(pool.run(record_axes, 2, name, timeout=TIMEOUT)):
        for axis, outcome in found.items():
            if not outcome.is_equal:
                wrong.append(f"{axis}, rank {rank}: another image, {outcome.refusals}")
            elif not outcome.refusals and (outcome.problems or not outcome.played):
                wrong.append(f"{axis}, rank {rank}: {outcome.played} played, {outcome.problems}")
    assert not wrong, "\n".join(wrong)
