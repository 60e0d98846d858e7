"""What a rank sends and holds while it decodes its rows: formulas worked out by hand, counted exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from ditile.distributed.transport import Traffic
from ditile.parallel.vae.parallel_vae import ParallelVAE
from ditile.planner.footprint import LiveBytes
from tests.parallel.vae.test_vae import autoencoder, axis
from tests.pool import Pool

HEIGHT, WIDTH, BATCH, FLOAT = 13, 6, 2, 4


@torch.no_grad()
def sent() -> tuple[dict[str, int], dict[str, int]]:
    traffic, vae = Traffic(), autoencoder("pixart")
    with ParallelVAE(vae, axis(), traffic).install_forwards():
        vae.decode(torch.randn(BATCH, 4, HEIGHT, WIDTH))
    return traffic.bytes, traffic.calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_the_formula(pool: Pool, ranks: int) -> None:
    """A failure means that halos are wider than a row or travel doubled, or that sizes or pictures travel as well."""
    convolutions, norms = 33, 30
    row = 180 + 2 * 112 + 4 * 64 + 8 * 32  # channels of the inputs of all convolutions, by width: 4, 8, 16, 16 of them
    for rank, (size, calls) in enumerate(pool.run(sent, ranks)):
        neighbours = (rank > 0) + (rank < ranks - 1)
        rows = round(HEIGHT * (rank + 1) / ranks) - round(HEIGHT * rank / ranks)
        halos = neighbours * row * WIDTH
        to_each = norms * 3 * 4 + rows * WIDTH * 2 * 16 + 3 * 8 * rows * 8 * WIDTH  # statistics, keys, the picture
        assert size == {"vae": BATCH * FLOAT * (halos + (ranks - 1) * to_each)}
        assert calls == {"vae": neighbours * convolutions + norms + 2}


def wide() -> AutoencoderKL:
    """The channels of the real one divided by 8, so that pictures of 3 channels are as small beside them."""
    torch.manual_seed(0)
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4, latent_channels=16,
        block_out_channels=(16, 32, 64, 64), layers_per_block=2, norm_num_groups=4,
    ).eval()  # fmt: skip


@torch.no_grad()
def kept_bytes(block_size: int | None) -> list[tuple[int, int]]:
    """Peak and largest tensor: whole and divided, decoding and then encoding."""
    vae, results = wide(), []
    latents, picture = torch.randn(1, 16, 32, 8), torch.randn(1, 3, 256, 64)
    calls: list[Any] = [lambda: vae.decode(latents), lambda: vae.encode(picture)]
    for call in calls:
        with LiveBytes() as whole:
            call()
        with ParallelVAE(vae, axis(), Traffic(), block_size=block_size).install_forwards(), LiveBytes() as mine:
            call()
        results += [(whole.peak, whole.largest), (mine.peak, mine.largest)]
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_lower_the_peak(pool: Pool, ranks: int) -> None:
    """A failure means that a normalized copy of the strip is held beside it, so that blocks save nothing."""
    for whole, blocks in zip(pool.run(kept_bytes, ranks, None), pool.run(kept_bytes, ranks, 8), strict=True):
        for (strip, _), (block, _) in ((whole[1], blocks[1]), (whole[3], blocks[3])):
            assert block < 0.88 * strip
