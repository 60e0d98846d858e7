"""Every autoencoder of diffusers by rows, and by tiles where rows cannot be, is equal to the whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.parallel.vae.halo import Strip
from ditile.parallel.vae.parallel_vae import PROVEN, ParallelVAE, explain_rows_refusal, install_row_forwards
from ditile.parallel.vae.tiles import SharedCoder, install_tile_forwards
from ditile.plan.errors import ModelError
from ditile_lab.study.autoencoders import simulate_ranks
from tests import tiny
from tests.parallel.vae.test_vae import BOUND, axis, distance
from tests.pool import Pool

FOUR = (8, 8, 8, 8)
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
TIMES = {"temperal_downsample": [False, True, True]}
SMALL = {"latent_channels": 4, "block_out_channels": FOUR, "layers_per_block": 1, "norm_num_groups": 4}
BLOCKS_2D = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
LTX = {"latent_channels": 8, "block_out_channels": FOUR, "layers_per_block": (1,) * 5}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd": ("AutoencoderKL", {**SMALL, **BLOCKS_2D}),
    "flux 2": ("AutoencoderKLFlux2", {**SMALL, **BLOCKS_2D}),
    "wan 2.1": ("AutoencoderKLWan", {**WAN, **TIMES}),
    "wan 2.2": (
        "AutoencoderKLWan", {**WAN, **TIMES, "is_residual": True, "patch_size": 2, "in_channels": 12,
                             "out_channels": 12, "scale_factor_spatial": 16},
    ),
    "qwen-image": ("AutoencoderKLQwenImage", {**WAN, **TIMES}),
    "qwen-image 2.1": ("AutoencoderKLQwenImage21", {**WAN, **TIMES}),
    "hunyuan video": ("AutoencoderKLHunyuanVideo", SMALL),
    "hunyuan video 1.5": (
        "AutoencoderKLHunyuanVideo15",
        {"latent_channels": 4, "block_out_channels": (16,) * 4, "layers_per_block": 1, "spatial_compression_ratio": 8},
    ),
    "hunyuan image": (
        "AutoencoderKLHunyuanImage",
        {"in_channels": 3, "out_channels": 3, "latent_channels": 8, "block_out_channels": (32,) * 4,
         "layers_per_block": 1, "spatial_compression_ratio": 8, "sample_size": 64},
    ),
    "cogvideox": ("AutoencoderKLCogVideoX", SMALL),
    "ltx": ("AutoencoderKLLTXVideo", {**LTX, "decoder_block_out_channels": FOUR, "decoder_layers_per_block": (1,) * 5}),
    "ltx 2": (
        "AutoencoderKLLTX2Video",
        {**LTX, "decoder_block_out_channels": (8, 16, 32), "decoder_layers_per_block": (1,) * 4},
    ),
    "ltx 2.5": (
        "AutoencoderKLLTX2Video",
        {**LTX, "decoder_block_out_channels": (8, 16, 16, 32), "decoder_layers_per_block": (1,) * 5,
         "decoder_spatio_temporal_scaling": (True,) * 4, "decoder_inject_noise": (False,) * 5,
         "decoder_spatial_padding_mode": "zeros", "upsample_residual": (False,) * 4, "upsample_factor": (2, 2, 1, 2),
         "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial")},
    ),
    "mochi": (
        "AutoencoderKLMochi",
        {"latent_channels": 4, "encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4,
         "layers_per_block": (1,) * 5},
    ),
    "cosmos": ("AutoencoderKLCosmos", {"latent_channels": 4, "encoder_block_out_channels": (8, 8, 8, 8),
                                       "decode_block_out_channels": (8, 8, 8, 8), "num_layers": 1,
                                       "attention_resolutions": (8,), "resolution": 64}),
}  # fmt: skip


def make(name: str) -> Any:
    torch.manual_seed(0)
    kind, config = CONFIGS[name]
    return tiny.randomise(getattr(diffusers, kind)(**config), gain=1.0).eval()


def make_latents(vae: Any, rows: int) -> Tensor:
    """Brighter below than above."""
    channels = getattr(vae.config, "latent_channels", None) or vae.config.z_dim
    is_video = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    frames = (2,) if is_video else (1,) if "QwenImage" in type(vae).__name__ else ()
    return torch.randn(1, channels, *frames, rows, 4) + torch.linspace(0, 2, rows)[:, None]


def decode(vae: Any, latents: Tensor) -> Tensor:
    picture: Tensor = vae.decode(latents, return_dict=False)[0]
    return picture


def encode(vae: Any, picture: Tensor) -> Tensor:
    mean: Tensor = vae.encode(picture).latent_dist.mode()
    return mean


def test_every_class_is_here() -> None:
    assert {kind for kind, _ in CONFIGS.values()} == PROVEN


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_the_whole(name: str) -> None:
    """A failure means seams, or frames of which each rank has another history."""
    vae = make(name)
    latents = make_latents(vae, 7)
    picture = decode(vae, latents)
    mean = encode(vae, picture)
    calls: list[tuple[Callable[[Any], Tensor], Tensor]] = [
        (lambda mine: decode(mine, latents), picture), (lambda mine: encode(mine, picture), mean),
    ]  # fmt: skip
    for weights in ((1.0, 1.0), (99.0, 1.0), (1.0, 5.0, 2.0)):
        for call, want in calls:
            results = simulate_ranks(vae, install_row_forwards, weights, call)
            assert max(distance(got, want) for got in results) < BOUND
    if name in ("wan 2.1", "ltx"):  # more ranks than rows: a strip of none
        low = make_latents(vae, 2)
        results = simulate_ranks(vae, install_row_forwards, (1.0,) * 3, lambda mine: decode(mine, low))
        assert max(distance(got, decode(vae, low)) for got in results) < BOUND


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
    assert "has no vae" in (explain_rows_refusal(None) or "")
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
