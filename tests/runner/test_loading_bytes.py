"""What a rank holds while it loads: its share and a little more; and what it reads is its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.loading import KINDS, measured, write_pipeline
from tests.pool import Pool

RANKS = 4


@pytest.fixture(scope="module")
def model() -> Iterator[tuple[str, int]]:
    """A FLUX pipeline of 1024 channels in bfloat16, about 400 MB in one file, and its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder, write_pipeline(Path(folder), heads=8, double=2, single=8, layers=0, dtype=torch.bfloat16)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_rank_holds_its_share_while_it_loads(pool: Pool, model: tuple[str, int], dtype: str, size: int) -> None:
    """A failure means that a rank reads, keeps or casts weights that are not its own. float32 is a cast."""
    folder, whole = model
    actual: list[dict[str, Any]] = pool.run(measured, RANKS, folder, "first", dtype)
    for rank, of_rank in enumerate(actual):
        assert of_rank["transformer_read"] == of_rank["transformer"] * 2 // size
        for kind in KINDS:
            assert of_rank[kind] <= of_rank["limit"] < 0.75 * whole * size // 2, (rank, kind, of_rank)
        assert of_rank["RssAnon"] > 0.8 * of_rank["transformer"], "the peak was not seen"
