"""An AutoencoderKL whose latents are the linear ones: `python -m training.vae --decoder 200 --encoder 60
--seed 0`.

The decoder learns to invert the linear encoding on crops around things, the encoder to imitate it; budgets
are CPU-seconds of one thread. Nothing of this depends on the transformers. `--check FOLDER` measures a saved
one. Writes training/out/vae.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import nn

from ditile_lab.quality.caption_check import Image
from training.latents import CHANNELS, Basis, load_basis, pixels
from training.optim import MasterOptimiser, learning_rate
from training.scenes import render_scene, sample_scene

OUT = Path(__file__).parent / "out" / "vae"
LOG_VARIANCE = -6.0


def make_vae() -> AutoencoderKL:
    """0.65 million parameters, 4 pixels a latent."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        sample_size=128,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    with torch.no_grad():
        vae.quant_conv.bias[CHANNELS:] = LOG_VARIANCE
        vae.quant_conv.weight[CHANNELS:] *= 0.05
    return vae.bfloat16()


def crops(rng: random.Random, progress: float) -> list[Image]:
    """Crops of renders of several sizes, mostly around a thing; larger and fewer as training goes on."""
    side = 128
    count = 2
    if progress < 0.55:
        side = 32
        count = 8
    elif progress < 0.85:
        side = 64
        count = 4
    return [_crop(rng, side) for _ in range(count)]


def iterate_progress(budget: float) -> Iterator[float]:
    """The share of a budget of CPU seconds that is spent, before each step, until it is over."""
    start = time.process_time()
    progress = 0.0
    while progress < 1:
        yield progress
        progress = (time.process_time() - start) / budget


def train_decoder(vae: AutoencoderKL, basis: Basis, rng: random.Random, budget: float) -> None:
    """Absolute, squared and gradient errors of pixels from slightly noisy latents."""
    part = nn.ModuleList([vae.decoder, vae.post_quant_conv])
    optimiser = MasterOptimiser(part, lr=2e-3, ema=0.99)
    for progress in iterate_progress(budget):
        images = crops(rng, progress)
        latents = basis.latents(images)
        out = vae.decode((latents + 0.04 * torch.randn_like(latents)).bfloat16()).sample.float()
        d = out - pixels(images).permute(0, 3, 1, 2)
        edges = d.diff(dim=-1).abs().mean() + d.diff(dim=-2).abs().mean()
        (d.abs().mean() + d.pow(2).mean() + 0.5 * edges).backward()
        optimiser.step(learning_rate(progress, warmup=0.03, hold=0.03))
    _adopt(optimiser, vae)


def train_encoder(vae: AutoencoderKL, basis: Basis, rng: random.Random, budget: float) -> None:
    """Imitate the linear encoding, at a small constant variance."""
    part = nn.ModuleList([vae.encoder, vae.quant_conv])
    optimiser = MasterOptimiser(part, lr=2e-3, ema=0.99)
    for progress in iterate_progress(budget):
        images = crops(rng, progress)
        x = pixels(images).permute(0, 3, 1, 2)
        mean, log_variance = vae.quant_conv(vae.encoder(x.bfloat16())).float().chunk(2, 1)
        d = mean - basis.latents(images)
        error = d.pow(2).mean() + 0.1 * d.abs().mean()
        variance_error = (log_variance - LOG_VARIANCE).pow(2).mean()
        (error + 0.01 * variance_error).backward()
        optimiser.step(learning_rate(progress, warmup=0.03, hold=0.03))
    _adopt(optimiser, vae)


@torch.no_grad()
def fidelity(vae: AutoencoderKL, basis: Basis, side: int, count: int = 16, seed: int = 9) -> dict[str, float]:
    """PSNR in dB of pictures decoded from the linear latents, and from the VAE's own encoding."""
    rng = random.Random(seed)
    images = [render_scene(sample_scene(rng), side, side) for _ in range(count)]
    x = pixels(images).permute(0, 3, 1, 2)
    own = vae.encode(x.bfloat16()).latent_dist.mean
    psnr = {}
    for name, latents in (("linear", basis.latents(images)), ("encoder", own)):
        out = vae.decode(latents.bfloat16()).sample.float().clamp(-1, 1)
        psnr[name] = round((10 * torch.log10(4 / (out - x).pow(2).mean((1, 2, 3)))).mean().item(), 2)
    return psnr


def _crop(rng: random.Random, side: int) -> Image:
    full = rng.choice((128, 192, 256))
    scene = sample_scene(rng, held_out=False)
    image = render_scene(scene, full, full)
    thing = rng.choice(scene.things)
    centers = [v + rng.uniform(-0.12, 0.12) if rng.random() < 0.7 else rng.random() for v in (thing.y, thing.x)]
    top, left = (4 * round(min(max(0.0, c * full - side / 2), full - side) / 4) for c in centers)
    return image[top : top + side, left : left + side]


def _adopt(optimiser: MasterOptimiser, vae: AutoencoderKL) -> None:
    with optimiser.averaged():
        vae.save_pretrained(OUT)
    optimiser.load_average()


def main() -> None:
    """Train both halves, or measure a folder."""
    parser = argparse.ArgumentParser(description="train the autoencoder")
    parser.add_argument("--decoder", type=float, default=200.0, metavar="CPU_S")
    parser.add_argument("--encoder", type=float, default=60.0, metavar="CPU_S")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="train nothing, measure this one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    basis = load_basis()
    rng = random.Random(args.seed)
    if args.check:
        vae = AutoencoderKL.from_pretrained(args.check, torch_dtype=torch.bfloat16)
    else:
        vae = make_vae()
        train_decoder(vae, basis, rng, args.decoder)
        train_encoder(vae, basis, rng, args.encoder)
    for side in (128, 192, 256):
        print(side, fidelity(vae, basis, side))


if __name__ == "__main__":
    main()
