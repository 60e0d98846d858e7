"""Autoencoders that cannot be divided by rows: their tiles are distributed, and equal the tiled calls bit for bit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import diffusers
import pytest
import torch

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.parallel.vae.halo import Strip
from ditile.parallel.vae.parallel_vae import ParallelVAE, explain_rows_refusal
from ditile.parallel.vae.tiles import SharedCoder, install_tile_forwards
from ditile.plan.errors import ModelError
from ditile_lab.study.autoencoders import simulate_ranks
from tests.parallel.vae.test_vae import axis
from tests.pool import Pool


def make_dc() -> Any:
    """Sana's: linear attention looks at the whole picture."""
    torch.manual_seed(0)
    blocks = ("ResBlock", "EfficientViTBlock")
    vae = diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=8, encoder_block_types=blocks,
        decoder_block_types=blocks, encoder_block_out_channels=(8, 16), decoder_block_out_channels=(8, 16),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
    )  # fmt: skip
    vae.enable_tiling(16, 16, 12, 12)
    return vae.eval()


def install(stack: ExitStack, vae: Any, strip: Strip) -> None:
    install_tile_forwards(stack, vae, strip._links, strip._weights)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0), (1.0, 4.0, 1.0), (1.0, 0.001)])
def test_tiles_of_several_ranks_are_the_tiled_call(weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded and decoded; each rank codes its share of the pixels, within a tile, so that a slow one may code none."""
    vae, tiles = make_dc(), []
    latents = torch.randn(1, 4, 19, 13)
    with torch.no_grad():
        picture = vae.decode(latents, return_dict=False)[0]
        again = vae.encode(picture, return_dict=False)[0]
    choose_owner = SharedCoder._choose_owner

    def choose_and_count(self: SharedCoder, numbers: int) -> int:
        owner = choose_owner(self, numbers)
        if owner == self._links.index:
            tiles.append((owner, numbers))
        return owner

    monkeypatch.setattr(SharedCoder, "_choose_owner", choose_and_count)
    drawn = simulate_ranks(vae, install, weights, lambda mine: mine.decode(latents, return_dict=False)[0])
    assert len(tiles) == 12 and all(torch.equal(one, picture) for one in drawn)
    total = sum(numbers for _, numbers in tiles)
    largest = max(numbers for _, numbers in tiles)
    for rank, weight in enumerate(weights):
        coded = sum(numbers for owner, numbers in tiles if owner == rank)
        assert coded == pytest.approx(total * weight / sum(weights), abs=largest) and (coded > 0) is (weight >= 1)
    found = simulate_ranks(vae, install, weights, lambda mine: mine.encode(picture, return_dict=False)[0])
    assert all(torch.equal(one, again) for one in found)


def test_tiles_are_used_where_rows_cannot_be_and_are_asked_for() -> None:
    vae = make_dc()
    assert "cannot be divided by rows" in (explain_rows_refusal(vae) or "")
    parallel = ParallelVAE(vae, Axis("image"), Traffic())
    latents = torch.randn(1, 4, 19, 13)
    with torch.no_grad():
        want = vae.decode(latents, return_dict=False)[0]
        with parallel.install_forwards():
            assert "decode" in vars(vae)
            assert torch.equal(vae.decode(latents, return_dict=False)[0], want)
    assert "decode" not in vars(vae)
    vae.disable_tiling()
    with pytest.raises(
        ModelError, match=r"call its enable_tiling\(\), so that tiles are distributed, or use vae=whole"
    ):
        ParallelVAE(vae, Axis("image"), Traffic())


def decode_by_tiles(seed: int, weights: tuple[float, ...] | None) -> tuple[bool, dict[str, int]]:
    """On a rank: whether what several processes decode is the tiled picture."""
    vae, traffic = make_dc(), Traffic()
    latents = torch.randn(1, 4, 19, 13, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        want = vae.decode(latents, return_dict=False)[0]
        with ParallelVAE(vae, axis(), traffic, weights=weights).install_forwards():
            drawn = [vae.decode(latents, return_dict=False)[0] for _ in range(2)]
    return all(torch.equal(one, want) for one in drawn), dict(traffic.bytes)


@pytest.mark.parametrize(("ranks", "weights"), [(2, None), (3, (3.0, 1.0, 1.0))])
def test_tiles_travel_between_processes(pool: Pool, ranks: int, weights: tuple[float, ...] | None) -> None:
    for is_equal, sent in pool.run(decode_by_tiles, ranks, 5, weights):
        assert is_equal and sent["vae"] > 0
