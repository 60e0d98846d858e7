"""Live bytes are exact: memory figures in docs and tests rest on them."""

from __future__ import annotations

import torch

from ditile.planner.footprint import LiveBytes


def test_live_bytes_by_hand() -> None:
    """A failure means that memory is counted twice, or kept after it is freed."""
    before = torch.ones(500)
    with LiveBytes() as live:
        first = torch.empty(1000)
        assert (live.now, live.peak, live.largest) == (4000, 4000, 4000)
        view, mine = first.view(10, 100), before.add_(1)  # neither is new
        assert live.now == 4000 and mine is before
        second = first[:250] + 1
        assert live.now == 5000
        del first
        assert live.now == 5000  # the view still holds it
        del view
        assert live.now == 1000
        second.mul_(2)
    assert (live.now, live.peak, live.largest) == (1000, 5000, 4000)
