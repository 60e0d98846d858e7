"""Train the VAE of shapes-wan, whose latents are the linear ones: `python -m training.wan_vae --minutes 30 --init
FOLDER [--device cuda]`.

The decoder learns to invert the linear encoding, then the encoder to imitate it. Nothing of this depends on the
transformer. `--check` measures a folder.
"""

import argparse
import copy
import random
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from training.budget import Step, add_budget_options, capture, compute_seconds_left, replace_folder, train_steps
from training.motions import FRAMES, SIDE, draw_clips, jitter_clips, make_clip_tensors, sample_motion_caption
from training.optim import MasterOptimiser
from training.video_latents import GroupBasis, load_group_basis

OUT = Path(__file__).parent / "out" / "wan"
ASSETS = Path(__file__).parent.parent / "src" / "ditile" / "model" / "assets"
LOG_VARIANCE = -6.0
# At the transformer's scale.
LATENT_NOISE = 0.04
# Of the budget.
DECODER_SHARE = 0.6


class VaeTrainer:
    """The VAE on one device and the steps that train its halves, on clips of random captions."""

    def __init__(self, init: Path, captions: list[str], basis: GroupBasis, *, batch: int) -> None:
        device = basis.mean.device
        self.basis = basis
        self.batch = batch
        self.clips = make_clip_tensors(captions, device)
        self.count = len(captions)
        self.vae = AutoencoderKLWan.from_pretrained(init, torch_dtype=torch.float32).to(device)

    def make_optimiser(self, half: str, lr: float) -> MasterOptimiser:
        """Muon for the filters of a half, "decoder" or "encoder", and AdamW for the rest of it."""
        vae = self.vae
        parts = nn.ModuleList([vae.encoder, vae.quant_conv])
        if half == "decoder":
            parts = nn.ModuleList([vae.decoder, vae.post_quant_conv])
        self.optimiser = MasterOptimiser(parts, lr=lr, weight_decay=0.01, ema=0.995, hidden=_is_filter_matrix)
        return self.optimiser

    def train_decoder(self) -> torch.Tensor:
        """One step of absolute, squared and gradient errors, from slightly noisy latents; the mean squared error."""
        video = self._sample_clips()
        latents = self.basis.scale(self.basis.raw(video))
        raw = self.basis.unscale(latents + LATENT_NOISE * torch.randn_like(latents))
        d = decode_unclamped(self.vae, raw) - video.permute(0, 4, 1, 2, 3)
        edges = d.diff(dim=-1).abs().mean() + d.diff(dim=-2).abs().mean()
        squared = d.pow(2).mean()
        self._update(d.abs().mean() + squared + 0.5 * edges)
        return squared.detach()

    def train_encoder(self) -> torch.Tensor:
        """One step to the linear latents, at a small constant variance; the mean squared error at the model's scale."""
        video = self._sample_clips()
        mean, log_variance = self.vae._encode(video.permute(0, 4, 1, 2, 3)).chunk(2, 1)
        d = (mean - self.basis.raw(video)) / self.basis.std.view(1, -1, 1, 1, 1)
        squared = d.pow(2).mean()
        variance_error = (log_variance - LOG_VARIANCE).pow(2).mean()
        self._update(squared + 0.1 * d.abs().mean() + 0.01 * variance_error)
        return squared.detach()

    def _sample_clips(self) -> torch.Tensor:
        pick = torch.randint(self.count, (self.batch,), device=self.basis.mean.device)
        return draw_clips(jitter_clips(self.clips.select(pick)), FRAMES, SIDE)

    def _update(self, loss: torch.Tensor) -> None:
        self.optimiser.update(torch.autograd.grad(loss, self.optimiser.work))

    def save(self, folder: Path) -> None:
        """The VAE in bf16, with the average of the half that is trained."""

        def write(fresh: Path) -> None:
            with self.optimiser.averaged():
                copy.deepcopy(self.vae).bfloat16().save_pretrained(fresh)

        replace_folder(folder, write)


def decode_unclamped(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """`vae.decode` of raw latents without its clamp, which has no gradient beyond the bounds."""
    vae.clear_cache()
    x = vae.post_quant_conv(latents)
    frames = []
    for i in range(x.shape[2]):
        # The decoder counts its convolutions up from here, and keeps their frames for the next piece.
        vae._conv_idx = [0]
        options = {"feat_cache": vae._feat_map, "feat_idx": vae._conv_idx}
        if i == 0:
            options["first_chunk"] = True
        frames.append(vae.decoder(x[:, :, i : i + 1], **options))
    vae.clear_cache()
    return torch.cat(frames, 2)


@torch.no_grad()
def measure_fidelity(vae: AutoencoderKLWan, basis: GroupBasis, count: int = 32, seed: int = 9) -> dict[str, float]:
    """PSNR in dB of held-out clips decoded from the linear latents and from the VAE's own encoding, and the error of
    the latter's latents at the transformer's scale."""
    rng = random.Random(seed)
    device = basis.mean.device
    captions = [sample_motion_caption(rng, held_out=True) for _ in range(count)]
    video = draw_clips(make_clip_tensors(captions, device), FRAMES, SIDE)
    x = video.permute(0, 4, 1, 2, 3)
    raw = basis.raw(video)
    own = vae.encode(x).latent_dist.mean
    error = (basis.scale(own) - basis.scale(raw)).pow(2).mean()
    figures = {"latent_mse": round(error.item(), 4)}
    for name, latents in (("linear", raw), ("encoder", own)):
        squared = (vae.decode(latents).sample - x).pow(2)
        for part, errors in (("", squared), ("_first_frame", squared[:, :, :1])):
            # The values are from -1 to 1: a peak of 2, and its square 4.
            decibels = 10 * torch.log10(4 / errors.mean((1, 2, 3, 4)))
            figures[name + part] = round(decibels.mean().item(), 2)
    return figures


def _is_filter_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim >= 4 and len(parameter) > 8 and parameter[0].numel() > 8


def main() -> None:
    """Train both halves, or measure a folder."""
    parser = argparse.ArgumentParser(description="train the VAE of shapes-wan")
    add_budget_options(parser)
    parser.add_argument("--init", type=Path, default=ASSETS / "shapes-wan" / "vae", help="folder to start from")
    parser.add_argument("--out", type=Path, default=OUT / "vae")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=32, help="clips a step")
    parser.add_argument("--captions", type=int, default=20_000, help="captions that clips are drawn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="train nothing, measure the folder of --init")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    rng = random.Random(args.seed)
    basis = load_group_basis(args.device)
    captions = [sample_motion_caption(rng, held_out=False) for _ in range(args.captions)]
    trainer = VaeTrainer(args.init, captions, basis, batch=args.batch)
    print(measure_fidelity(trainer.vae, basis), flush=True)
    if args.check:
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for half, train, share in (
        ("decoder", trainer.train_decoder, DECODER_SHARE),
        ("encoder", trainer.train_encoder, 1.0),
    ):
        seconds = compute_seconds_left(args, share)
        optimiser = trainer.make_optimiser(half, args.lr)
        optimiser.set_rate(0.01)
        step = capture(Step(name=half, run=train), args)
        train_steps([step], optimiser, seconds=seconds, hold=0.4, save=lambda: trainer.save(args.out))
        optimiser.load_average()
    print(measure_fidelity(trainer.vae, basis), flush=True)


if __name__ == "__main__":
    main()
