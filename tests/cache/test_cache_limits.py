"""Caches on every transformer of the table, without a pipeline.

Where nothing may be left out the numbers are the model's own, and where something is, those of the same rule by hand
(`hand.py`): both to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ditile.cache.cached import find_model_cache
from ditile.cache.config import DBCacheConfig, DBPruneConfig
from ditile.cache.forecast import Reuse
from ditile.cache.segment import Residuals
from ditile.cache.unit_decision import WHOLE_BATCH, CacheCall
from ditile.model.block_lists import find_block_lists
from ditile.model.hooks.protocols import CallPosition
from ditile.runner import caching
from tests.cache.hand import Hand, HandPrune
from tests.cache.pictures import RUN, STEPS, calls, enable, outputs, skipped, tensors, untouched
from tests.families import EVERY
from tests.runner.cases import different, same

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
CACHED, MIDDLE, ALWAYS = [1, 3], 0.06, 1.0
F1 = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=0)
F2B1 = F1.reset(Fn_compute_blocks=2, Bn_compute_blocks=1)
PRUNE = DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=0)


class Made(NamedTuple):
    """A transformer, and what it returns in each step."""

    name: str
    model: nn.Module
    wanted: list[list[Tensor]]


@pytest.fixture(scope="module", params=RUN)
def made(request: pytest.FixtureRequest) -> Made:
    model = EVERY[request.param].make()
    return Made(request.param, model, outputs(request.param, model))


@pytest.fixture(autouse=True)
def off(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves no cache to the next one."""
    yield
    if "made" in request.fixturenames:
        caching.disable_cache(request.getfixturevalue("made").model)


@pytest.mark.nightly
def test_nothing_left_out_is_the_model(made: Made) -> None:
    """At threshold 0, where nothing is looked at; at 1e-12, where every step is measured, and computed; and after the
    cache was taken off. A failure means that a cache changes a picture that it was told to leave alone."""
    name, model, wanted = made
    for config, threshold in ((F2B1, 0.0), (F2B1, 1e-12), (PRUNE, 1e-12)):
        enable(model, config.reset(residual_diff_threshold=threshold))
        same(outputs(name, model), wanted, f"{config} {threshold}")
        assert not any(skipped(model))
        found = [d for report in caching.summary(model, logging=False) for d in report.differences]
        assert (len(found) >= STEPS - 1) == (threshold > 0)
        assert find_model_cache(model).memory_bytes == 0
        caching.disable_cache(model)
        untouched(model)
    same(tensors(model(**next(calls(name)))), wanted[0], "the cache was taken off")


@pytest.mark.nightly
def test_cached_steps_are_the_probe_and_what_was_added_before(made: Made) -> None:
    """To the bit, with a threshold in the middle and with one that caches whatever it can. A failure means that a
    stream is lost or belongs to another block, or that what is kept was written to."""
    name, model, wanted = made
    for config, threshold, steps in ((F1, MIDDLE, CACHED), (F2B1, ALWAYS, list(range(1, STEPS)))):
        limit = 9e9 if threshold is ALWAYS else threshold
        hand = Hand(model, find_block_lists(model), config.Fn_compute_blocks, config.Bn_compute_blocks, limit)
        by_hand = outputs(name, hand)
        assert hand.skipped == steps, f"{hand.differences}"
        different(by_hand[1][0], wanted[1][0], "a cached step that is exact tells nothing")
        enable(model, config.reset(residual_diff_threshold=threshold))
        same(outputs(name, model), by_hand, f"{name} {threshold}")
        assert skipped(model) == [steps]
        caching.disable_cache(model)


@pytest.mark.nightly
def test_pruned_blocks_add_what_they_added_before(made: Made) -> None:
    """To the bit. A failure means that a block is compared with, or replaced by, another."""
    name, model, _ = made
    hand = HandPrune(model, find_block_lists(model), threshold=MIDDLE)
    by_hand = outputs(name, hand)
    enable(model, PRUNE.reset(residual_diff_threshold=MIDDLE))
    same(outputs(name, model), by_hand, name)
    assert skipped(model) == [hand.cached.get(index, []) for index in range(len(hand.segments))]
    assert any(hand.cached.values()) and len(hand.segments) >= 3


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
