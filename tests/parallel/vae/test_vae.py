"""The divided autoencoder equals the undivided one, on every rank; sums are reordered, so not bitwise but to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, AutoencoderTiny
from diffusers.models.attention_processor import SlicedAttnProcessor
from torch import nn

import ditile
from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.parallel.vae.halo import GroupLinks, Halo, RowWindow, Strip
from ditile.parallel.vae.layers import normalize_strip
from ditile.parallel.vae.parallel_vae import ParallelVAE
from ditile.plan.errors import ModelError
from ditile_lab.bench.session import LiveBytes
from tests import tiny
from tests.pool import Pool, on_ranks, share
from tests.runner.cases import divided

ASSETS = Path(ditile.__file__).parent / "model" / "assets"
LAYOUTS: dict[str, dict[str, Any]] = {
    "sd3 and flux": {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
    "pixart": {"latent_channels": 4},
    "no attention": {"latent_channels": 4, "mid_block_add_attention": False},
}
BUNDLED = ("shapes-pixart", "shapes-flux")
BOUND = 1e-5


class Case(NamedTuple):
    """One picture through one autoencoder."""

    layout: str = "sd3 and flux"
    height: int = 12
    width: int = 5
    pixels: int = 72
    batch: int = 1
    block_size: int | None = None
    unlike: bool = False

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each rank: a rank next to a small share has a large one."""
        ranks = dist.get_world_size()
        return (7.0, 1.0, 3.0, 1.0, 2.0, 5.0, 1.0, 1.0)[:ranks] if self.unlike else (1.0,) * ranks


def autoencoder(layout: str) -> AutoencoderKL:
    """The layers of the real one, with few channels; norms that matter."""
    if layout in BUNDLED:
        return AutoencoderKL.from_pretrained(ASSETS / layout / "vae").eval()
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(4, 8, 16, 16), layers_per_block=2, norm_num_groups=4, **LAYOUTS[layout],
    )  # fmt: skip
    return tiny.randomise(vae, gain=1.0)  # type: ignore[return-value]


def axis() -> Axis:
    """All ranks of the case."""
    ranks = tuple(range(dist.get_world_size()))
    return Axis("image", ranks, dist.get_rank(), dist.group.WORLD if len(ranks) > 1 else None)


def distance(results: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the largest value; shapes must agree."""
    assert results.shape == wanted.shape and results.dtype == wanted.dtype
    return float((results - wanted).abs().max() / wanted.abs().max())


def inputs(vae: AutoencoderKL, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and a picture that are brighter below than above."""
    torch.manual_seed(1)
    latents = torch.randn(case.batch, vae.config.latent_channels, case.height, case.width)
    picture = torch.randn(case.batch, 3, case.pixels, 8 * case.width)
    return latents + torch.linspace(0, 3, case.height)[:, None], picture + torch.linspace(0, 2, case.pixels)[:, None]


def whole(vae: AutoencoderKL, latents: torch.Tensor, picture: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The decoded picture, mean and log-variance of the encoded one."""
    posterior = vae.encode(picture).latent_dist
    return vae.decode(latents, return_dict=False)[0], posterior.mean, posterior.logvar


@torch.no_grad()
def compared(cases: list[Case]) -> list[list[float]]:
    """Distances of each case: of the decoded picture, and of mean and log-variance of the encoded one."""
    results = []
    for case in cases:
        vae = autoencoder(case.layout)
        latents, picture = inputs(vae, case)
        decoded, *encoded = share(f"whole {case}", whole, vae, latents, picture)
        parallel = ParallelVAE(vae, axis(), Traffic(), block_size=case.block_size, weights=case.weights)
        with parallel.install_forwards():
            mine = vae.decode(latents, return_dict=False, generator=torch.Generator())[0]
            posterior = vae.encode(picture).latent_dist
        results.append([
            distance(mine, decoded), distance(posterior.mean, encoded[0]), distance(posterior.logvar, encoded[1]),
        ])  # fmt: skip
    return results


CASES = [
    Case(height=13, pixels=101),
    Case("pixart", height=11, pixels=77, block_size=7, batch=2),
    Case(height=3, pixels=24, batch=2, block_size=2),  # with more ranks than rows some have none
    Case("shapes-flux", height=33, pixels=100),
    Case(height=14, pixels=120, block_size=3, unlike=True),
    Case("pixart", height=9, pixels=72, unlike=True),
]
MORE = [
    *(Case(layout) for layout in LAYOUTS),
    *(Case(layout, height=32, pixels=128) for layout in BUNDLED),
    Case(height=9, pixels=64, block_size=1),
    Case("pixart", height=3, pixels=24),
    Case(height=10),
]

RANKS = [(2, CASES + MORE), (3, CASES + MORE), (4, CASES), (8, CASES)]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "cases"), RANKS)
def test_equals_the_undivided(pool: Pool, ranks: int, cases: list[Case]) -> None:
    """A failure means seams, wrong colours or a wrong latent in every divided picture."""
    for rank, of_cases in enumerate(pool.run(compared, ranks, cases)):
        for case, distances in zip(cases, of_cases, strict=True):
            assert max(distances) < BOUND, f"rank {rank} of {ranks}, {case}: {distances}"


@on_ranks(3)
@torch.no_grad()
def test_slicing_and_tiling_work_as_ever() -> None:
    """A failure means that a divided autoencoder ignores the user's slicing, or blends other tiles."""
    results = []
    for height, turn_on in ((9, "enable_slicing"), (50, "enable_tiling")):
        vae = autoencoder("pixart")
        vae.tile_sample_min_size, vae.tile_latent_min_size = 128, 16
        latents, _ = inputs(vae, Case("pixart", height=height, batch=3))
        getattr(vae, turn_on)()
        wanted = vae.decode(latents).sample
        with ParallelVAE(vae, axis(), Traffic()).install_forwards():
            results.append(distance(vae.decode(latents).sample, wanted))
    assert max(results) < BOUND


@torch.no_grad()
def normed(height: int) -> list[float]:
    """Rows of which each has another mean, far from zero."""
    torch.manual_seed(2)
    x = torch.randn(2, 8, height, 6) + 30 * torch.linspace(-1, 1, height)[:, None] + 100
    norm: Any = tiny.randomise(nn.GroupNorm(4, 8))
    wanted = norm(x)
    exact = nn.functional.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double())
    strip = Strip(GroupLinks(axis(), Traffic()), (1.0,) * axis().num_ranks)
    own = strip.select_own_rows(x)
    results = strip.gather_image(normalize_strip(norm, own, strip))
    parts = strip.start_strip_gather(
        normalize_strip(norm, own.flatten(2), strip).permute(2, 0, 1), units=6
    ).wait_for_tensors()
    tokens = torch.cat(parts)
    return [
        distance(results, wanted), distance(tokens.permute(1, 2, 0).view(x.shape), wanted),
        distance(results.double(), exact),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_statistics_are_of_the_whole_picture(pool: Pool, ranks: int) -> None:
    """xDiT's decoder averaged the variances of the strips; a failure means that ours leaves out their means, too."""
    for distances in pool.run(normed, ranks, 11):
        assert max(distances) < BOUND


@on_ranks(2)
def test_nothing_is_left_behind() -> None:
    """A failure means that an autoencoder stays divided after a call, or after an interrupt."""
    vae = autoencoder("pixart")
    before = {name: dict(vars(module)) for name, module in vae.named_modules()}
    keys, processors = list(vae.state_dict()), dict(vae.attn_processors)
    with pytest.raises(KeyboardInterrupt), ParallelVAE(vae, axis(), Traffic()).install_forwards():
        assert list(vae.state_dict()) == keys and type(vae) is AutoencoderKL
        assert [name for name, _ in vae.named_modules()] == list(before)
        raise KeyboardInterrupt
    assert {name: dict(vars(module)) for name, module in vae.named_modules()} == before
    assert vae.attn_processors == processors


def adapted(vae: AutoencoderKL) -> None:
    vae.decoder.conv_in = nn.Sequential(vae.decoder.conv_in)


def hooked(vae: AutoencoderKL) -> None:
    conv = vae.encoder.conv_in
    conv.forward = lambda x: x


def circular(vae: AutoencoderKL) -> None:
    vae.decoder.conv_out.padding_mode = "circular"


class FarSighted(nn.Module):
    """A convolution whose rows see the mean of the picture, which no rank has alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made + x.mean()


def far_sighted(vae: AutoencoderKL) -> None:
    vae.decoder.conv_in = FarSighted(vae.decoder.conv_in)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            far_sighted,
            "AutoencoderKL.decode by rows differs from the whole by .*; call its enable_tiling.*use vae=whole",
        ),
        (
            lambda vae: vae.set_attn_processor(SlicedAttnProcessor(1)),
            "SlicedAttnProcessor is not stock; call vae.set_attn_processor",
        ),
        (hooked, "encoder.conv_in .* its forward is replaced; remove the hook"),
        (circular, "pads rows by .*circular.*; call its enable_tiling.*use vae=whole"),
    ],
)
def test_what_is_not_exact_is_refused(change: Any, message: str) -> None:
    """A failure means a picture with seams instead of an error."""
    vae = autoencoder("pixart")
    parallel = ParallelVAE(vae, Axis(), Traffic())
    change(vae)
    with pytest.raises(ModelError, match=message), parallel.install_forwards():
        pass
    with pytest.raises(ModelError, match=message):
        ParallelVAE(vae, Axis(), Traffic())


def test_other_autoencoders_are_tried() -> None:
    """What is not known is divided if that is exact, and said so if it cannot be seen."""
    changed = autoencoder("pixart")
    adapted(changed)
    ParallelVAE(changed, Axis(), Traffic())
    ParallelVAE(
        AutoencoderTiny(encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4), Axis(), Traffic()
    )


HEIGHT, WIDTH, BATCH, FLOAT = 13, 6, 2, 4


@torch.no_grad()
def sent() -> tuple[dict[str, int], dict[str, int]]:
    traffic, vae = Traffic(), autoencoder("pixart")
    with ParallelVAE(vae, axis(), traffic).install_forwards():
        vae.decode(torch.randn(BATCH, 4, HEIGHT, WIDTH))
    return traffic.bytes, traffic.calls


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_lower_the_peak(pool: Pool, ranks: int) -> None:
    """A failure means that a normalized copy of the strip is held beside it, so that blocks save nothing."""
    for whole, blocks in zip(pool.run(kept_bytes, ranks, None), pool.run(kept_bytes, ranks, 8), strict=True):
        for (strip, _), (block, _) in ((whole[1], blocks[1]), (whole[3], blocks[3])):
            assert block < 0.88 * strip


PLANS: list[dict[str, Any]] = [
    {"pipefusion": 2, "warmup": 99, "vae": "rows"},
    {"ulysses": 2, "vae": "rows", "rank_weights": (99.0, 1.0)},  # the second rank has one row
    {"tensor": 2, "vae": "rows"},
    {"ulysses": 2, "vae": "rows", "vae_block_size": 3},
]


def pictures(family: str) -> list[Any]:
    """The plain pipeline's, and those of each plan on this rank."""
    pipe = tiny.FAMILIES[family]()
    call = {"height": 40, "width": 24, "output_type": "np", "num_images_per_prompt": 2}
    results = [pipe(**tiny.arguments(family, **call)).images]
    for plan in PLANS:
        with divided(pipe, **plan) as runner:
            results.append(runner(**tiny.arguments(family, **call)).images)
    return results


@pytest.mark.parametrize("family", ["flux", "pixart", "sd3"])
def test_rows_of_the_picture(pool: Pool, family: str) -> None:
    """Odd latent rows, two images. A failure means that the decode of a plan is not that of the pipeline."""
    for plain, *results in pool.run(pictures, 2, family):
        for plan, got in zip(PLANS, results, strict=True):
            assert np.abs(got - plain).max() < 1e-5, plan


def block_sizes(plan: dict[str, Any]) -> set[int]:
    """Of the convolutions of one decode."""
    pipe, results, pass_through = tiny.flux(), set(), Strip.begin_operation

    def noted(strip: Strip, window: RowWindow) -> Halo:
        results.add(strip.block_size)
        return pass_through(strip, window)

    with pytest.MonkeyPatch.context() as patch, divided(pipe, **plan) as runner:
        patch.setattr(Strip, "begin_operation", noted)
        runner(**tiny.arguments("flux", height=40, width=24, output_type="np"))
    return results


def test_the_blocks_of_a_plan_reach_the_convolutions(pool: Pool) -> None:
    """A failure means that a plan says so and nothing is done in blocks; one rank alone has them, too."""
    plan = {"ulysses": 1, "vae": "rows", "vae_block_size": 3}
    assert pool.run(block_sizes, 1, plan) == [{3}]
