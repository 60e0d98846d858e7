"""Latents of clips without a learned encoder, in the causal layout of Wan's VAE: the first frame by itself, then groups
of four frames.

A group of 4 x 4 x 4 pixels is projected on eight principal directions; the first frame is read as a group that stands
still, so that a channel means the same in all latent frames. Raw latents are what the VAE encodes to; the transformer
sees (raw - mean) / std, as WanPipeline has it, which carries the partial whitening. `python -m training.video_latents
--seed 5` fits the basis and writes wan-basis.safetensors.
"""

import argparse
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from training.latents import PATCH, WHITENING
from training.motions import FRAMES, SIDE, draw_clips, jitter_clips, make_clip_tensors, sample_motion_caption

BASIS = Path(__file__).parent / "wan-basis.safetensors"
GROUP, CHANNELS = 4, 8  # frames of a group
GAIN = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBasis:
    """Pixels to raw latents: encode [192, C] of a group, first [48, C] of the first frame; their mean and std [C]."""

    encode: torch.Tensor
    first: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor

    def raw(self, video: torch.Tensor) -> torch.Tensor:
        """[B, F, H, W, 3] in -1..1 to raw latents [B, C, 1 + (F - 1) / 4, H / 4, W / 4]."""
        z = cut_groups(video[:, :1]) @ self.first
        if video.shape[1] > 1:
            z = torch.cat([z, cut_groups(video[:, 1:]) @ self.encode], 1)
        return z.permute(0, 4, 1, 2, 3).contiguous()

    def scale(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw latents to those of the transformer."""
        return (raw - self.mean.view(1, -1, 1, 1, 1)) / self.std.view(1, -1, 1, 1, 1)

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """The inverse of `scale`."""
        return latents * self.std.view(1, -1, 1, 1, 1) + self.mean.view(1, -1, 1, 1, 1)


def load_group_basis(device: torch.device, path: Path = BASIS) -> GroupBasis:
    """The basis the bundled model was trained with."""
    return GroupBasis(**load_file(path, device=str(device)))


def cut_groups(video: torch.Tensor) -> torch.Tensor:
    """[B, F, H, W, 3] to [B, F / n, H / 4, W / 4, n * 48], n = min(F, 4)."""
    batch, frames, height, width, _ = video.shape
    n = min(frames, GROUP)
    x = video.reshape(batch, frames // n, n, height // PATCH, PATCH, width // PATCH, PATCH, 3)
    return x.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(batch, frames // n, height // PATCH, width // PATCH, -1)


def fit_group_basis(video: torch.Tensor) -> GroupBasis:
    """Fit the basis; the mean variance over channels of the transformer's latents is 1."""
    x = cut_groups(video[:, 1:]).flatten(0, -2).double()
    mean = x.mean(0)
    values, vectors = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
    values = values.flip(0)[:CHANNELS]
    vectors = vectors.flip(1)[:, :CHANNELS]
    std = values.sqrt() ** WHITENING
    std = std * (values / std**2).mean().sqrt()
    encode = vectors * GAIN
    tensors = {
        "encode": encode,
        "first": encode.view(GROUP, -1, CHANNELS).sum(0),
        "mean": mean @ encode,
        "std": std * GAIN,
    }
    return GroupBasis(**{name: tensor.float().contiguous() for name, tensor in tensors.items()})


def main() -> None:
    """Fit the basis on 500 clips and save it."""
    parser = argparse.ArgumentParser(description="fit the linear latent basis of clips")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, default=BASIS)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    captions = [sample_motion_caption(rng, held_out=False) for _ in range(500)]
    clips = jitter_clips(make_clip_tensors(captions, torch.device("cpu")))
    save_file(asdict(fit_group_basis(draw_clips(clips, FRAMES, SIDE))), args.out)


if __name__ == "__main__":
    main()
