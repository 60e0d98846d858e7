"""Latents without a learned encoder: PCA of 4x4x3 pixel patches, partly whitened, to four channels.

An encoding is one matrix product, so the transformers can be trained before and beside the VAE; the VAE's
decoder is then trained to invert it and its encoder to imitate it. `python -m training.latents --seed 5` fits
the basis and writes basis.safetensors.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ditile_lab.quality.caption_check import Image
from training.scenes import render_scene, sample_scene

BASIS = Path(__file__).parent / "basis.safetensors"
PATCH = 4
CHANNELS = 4
WHITENING = 0.6  # 0 keeps the variances of the principal components, 1 makes them equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """Pixels to latents and back: mean [48], encode [48, C], decode [C, 48]."""

    mean: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor

    def latents(self, images: list[Image]) -> torch.Tensor:
        """Latents [B, C, H/4, W/4], fp32, of equally large images."""
        return ((patches(images) - self.mean) @ self.encode).permute(0, 3, 1, 2).contiguous()


def load_basis(path: Path = BASIS) -> Basis:
    """The basis the bundled models were trained with."""
    tensors = load_file(path)
    return Basis(mean=tensors["mean"], encode=tensors["encode"], decode=tensors["decode"])


def pixels(images: list[Image]) -> torch.Tensor:
    """Images as [B, H, W, 3] in -1..1."""
    return torch.from_numpy(np.stack(images)).float() / 127.5 - 1


def patches(images: list[Image]) -> torch.Tensor:
    """Images as [B, H/4, W/4, 48] in -1..1."""
    x = pixels(images)
    b, h, w, _ = x.shape
    x = x.view(b, h // PATCH, PATCH, w // PATCH, PATCH, 3).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h // PATCH, w // PATCH, PATCH * PATCH * 3)


def fit(images: list[Image]) -> Basis:
    """Fit the basis; the latents' mean variance over channels is 1."""
    x = patches(images).reshape(-1, PATCH * PATCH * 3).double()
    mean = x.mean(0)
    values, vectors = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
    values = values.flip(0)[:CHANNELS]
    vectors = vectors.flip(1)[:, :CHANNELS]
    scale = values.sqrt() ** WHITENING
    scale = scale * (values / scale**2).mean().sqrt()
    return Basis(mean=mean.float(), encode=(vectors / scale).float(), decode=(vectors * scale).T.float().contiguous())


def main() -> None:
    """Fit the basis on 600 renders at 128 px and save it."""
    parser = argparse.ArgumentParser(description="fit the linear latent basis")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, default=BASIS)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    basis = fit([render_scene(sample_scene(rng, held_out=False), 128, 128) for _ in range(600)])
    save_file({"mean": basis.mean, "encode": basis.encode, "decode": basis.decode}, args.out)


if __name__ == "__main__":
    main()
