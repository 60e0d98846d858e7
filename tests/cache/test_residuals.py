"""What is remembered of left out blocks is a copy: blocks behind them may write into their tokens in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ditile.cache.forecast import Reuse
from ditile.cache.segment import Residuals
from ditile.cache.skip_decision import WHOLE_BATCH, CacheCall
from ditile.model.hooks.protocols import CallPosition


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("start", [None, torch.full((1, 3, 2), 2.0)], ids=["no start", "start"])
def test_tokens_that_are_written_in_place_are_not_what_is_remembered(hidden: bool, start: Tensor | None) -> None:
    """A failure would mean pictures that drift with each step that is left out."""
    kept, call = Residuals(lambda stream: Reuse(), hidden=hidden), CacheCall(CallPosition(0), 0, [WHOLE_BATCH], 1)
    out = torch.full((1, 3, 2), 5.0)
    kept.store_residuals("image", call, start, out, [False])
    out.add_(1.0)
    later = call._replace(step=1)
    behind = kept.forecast_tokens("image", later, start)
    assert torch.equal(behind, torch.full((1, 3, 2), 5.0))
    behind.add_(1.0)
    assert torch.equal(kept.forecast_tokens("image", later, start), torch.full((1, 3, 2), 5.0)), (
        "nor is what is handed out"
    )
