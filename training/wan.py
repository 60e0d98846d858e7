"""Train the transformer of shapes-wan: `python -m training.wan --minutes 120 --init FOLDER [--device cuda]`.

Clips are sampled, drawn and encoded to linear latents on the device that trains, with the text states of a table of
captions that the frozen encoder makes once, so that a step asks nothing of the host. Wan has relative positions only:
a linear reader of every token's frame, row and column after the third block keeps these blocks telling where a token
is, which pure noise does not say.
"""

import argparse
import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from training.attention import PlainAttention
from training.budget import Step, add_budget_options, capture, compute_seconds_left, replace_folder, train_steps
from training.motions import (
    FRAMES,
    SIDE,
    ClipTensors,
    draw_clips,
    jitter_clips,
    make_clip_tensors,
    sample_motion_caption,
)
from training.optim import MasterOptimiser
from training.video_latents import GROUP, GroupBasis, load_group_basis

HERE = Path(__file__).parent
OUT = HERE / "out" / "wan"
ASSETS = HERE.parent / "src" / "ditile" / "model" / "assets"
READER = "reader.safetensors"  # beside a transformer that was saved here; the bundled one's is wan-reader.safetensors
NO_CAPTION = 0.1  # share of clips whose text is the empty one, which guidance needs
PADDED = (64, 226, 512)  # lengths that captions are padded to; the default of WanPipeline is 512
TOKEN = 8  # pixels of a token's side
POSITION_BLOCKS = 3
POSITION_WEIGHT = 0.03
POSITION_NOISE = 0.6
TURN = ("clip", "clip", "clip", "clip", "clip", "picture")  # a picture is the first frame of a clip


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionTable:
    """Captions with all that a step asks of them: entry 0 is the empty caption, entry k + 1 is of clip k.

    states [N + 1, L, D] are zero from a caption's end on, and length [N + 1] counts its tokens.
    """

    clips: ClipTensors
    states: torch.Tensor
    length: torch.Tensor


@torch.no_grad()
def make_caption_table(folder: Path, captions: list[str], device: torch.device) -> CaptionTable:
    """The table of captions, from the tokenizer and the text encoder of a pipeline's folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder").eval().to(device)
    batch = tokenizer(["", *captions], padding="longest", return_tensors="pt").to(device)
    pairs = zip(batch.input_ids.split(1024), batch.attention_mask.split(1024), strict=True)
    states = torch.cat([encoder(ids, attention_mask=mask).last_hidden_state * mask[..., None] for ids, mask in pairs])
    return CaptionTable(clips=make_clip_tensors(captions, device), states=states, length=batch.attention_mask.sum(1))


class PaddedTextProcessor:
    """Cross-attention to captions padded with zero states, which WanPipeline does not mask: n equal keys are one key
    with log n added to its score. `bias` [B, 1, 1, L] is set before a forward, and all blocks share it.
    """

    def __init__(self) -> None:
        self.bias: torch.Tensor | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        q, k, v = (
            x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for x in (
                attn.norm_q(attn.to_q(hidden_states)),
                attn.norm_k(attn.to_k(encoder_hidden_states)),
                attn.to_v(encoder_hidden_states),
            )
        )
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        result: torch.Tensor = attn.to_out[0](out.transpose(1, 2).flatten(2))
        return result


class PlaceReader(nn.Module):
    """Reads frame, row and column of every token from the states [B, N, D] that some blocks make."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sides = {"t": 1 + (FRAMES - 1) // GROUP, "y": 2 * SIDE // TOKEN, "x": 2 * SIDE // TOKEN}  # half tokens
        self.heads = nn.ModuleDict({axis: nn.Linear(width, n) for axis, n in sides.items()})

    def loss(self, states: torch.Tensor, frames: int, grid: int, weights: torch.Tensor) -> torch.Tensor:
        """Sum of the cross entropies, averaged over clips with these weights [B]."""
        states = functional.layer_norm(states, states.shape[-1:])
        at = torch.arange(grid, device=states.device) * 2
        places = torch.meshgrid(torch.arange(frames, device=states.device), at, at, indexing="ij")
        total = torch.zeros(len(states), device=states.device)
        for axis, place in zip("tyx", places, strict=True):
            logits = self.heads[axis](states)
            target = place.flatten().expand(len(states), -1)
            total = total + functional.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(1)
        return (total * weights).sum() / weights.sum().clamp(min=1)


class WanTrainer:
    """The transformer and its reader on one device, their optimiser, and the steps that train them."""

    def __init__(self, init: Path, table: CaptionTable, basis: GroupBasis, *, lr: float, batch: int) -> None:
        device = basis.mean.device
        self.table = table
        self.basis = basis
        self.batch = batch
        self.model = WanTransformer3DModel.from_pretrained(init, torch_dtype=torch.float32).to(device)
        self.reader = PlaceReader(self.model.config.num_attention_heads * self.model.config.attention_head_dim)
        saved = init / READER
        self.reader.load_state_dict(load_file(saved if saved.exists() else HERE / f"wan-{READER}"))
        self.reader.to(device)
        self.padded = torch.tensor(PADDED, device=device)
        self.text = PaddedTextProcessor()
        self.states: list[torch.Tensor] = []
        for block in self.model.blocks:
            block.attn2.set_processor(self.text)
        self.model.blocks[POSITION_BLOCKS - 1].register_forward_hook(lambda m, args, out: self.states.append(out))
        both = nn.ModuleDict({"model": self.model, "reader": self.reader})
        self.optimiser = MasterOptimiser(both, lr=lr, weight_decay=0.01, ema=0.995, hidden=_is_block_matrix)

    def train_on(self, frames: int) -> torch.Tensor:
        """One step on clips of so many frames; the mean squared error of the velocity (rectified flow)."""
        device = self.basis.mean.device
        batch = self.batch
        pick = torch.randint(len(self.table.states) - 1, (batch,), device=device)
        latents = self.basis.scale(
            self.basis.raw(draw_clips(jitter_clips(self.table.clips.select(pick)), frames, SIDE))
        )
        text = torch.where(torch.rand(batch, device=device) < NO_CAPTION, 0, pick + 1)
        sigma = sample_sigmas(batch, 0.2 if frames == 1 else 0.5, device)
        noise = torch.randn_like(latents)
        s = sigma.view(-1, 1, 1, 1, 1)
        states, self.text.bias = self._pad(text)
        self.states.clear()
        with PlainAttention():
            out = self.model((1 - s) * latents + s * noise, sigma * 1000, states, return_dict=False)[0]
            loss = (out - (noise - latents)).pow(2).mean()
            where = self.reader.loss(
                self.states.pop(), latents.shape[2], SIDE // TOKEN, (sigma > POSITION_NOISE).float()
            )
            grads = torch.autograd.grad(loss + POSITION_WEIGHT * where, self.optimiser.work)
        self.optimiser.update(grads)
        return loss.detach()

    def _pad(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, L + 1, D] of which the last is the padding, and the bias [B, 1, 1, L + 1] of their scores."""
        states = self.table.states[text]
        length = self.table.length[text]
        padded = self.padded[torch.randint(len(PADDED), text.shape, device=text.device)]
        at = torch.arange(states.shape[1], device=text.device)
        bias = torch.where(at < length[:, None], 0.0, -1e9)
        bias = torch.cat([bias, torch.log((padded - length).float())[:, None]], 1)
        return functional.pad(states, (0, 0, 0, 1)), bias[:, None, None]

    def save(self, folder: Path) -> None:
        """The averaged transformer, in bf16, and its reader."""

        def write(fresh: Path) -> None:
            with self.optimiser.averaged():
                model = copy.deepcopy(self.model).bfloat16()
                model.save_pretrained(fresh)
                save_file(self.reader.state_dict(), fresh / READER)

        replace_folder(folder, write)


def sample_sigmas(count: int, shift: float, device: torch.device) -> torch.Tensor:
    """Noise levels [B] whose logits are normal and stratified; a clip gets more noise than a picture."""
    share = (torch.arange(count, device=device) + torch.rand(count, device=device)) / count
    return torch.sigmoid(torch.special.ndtri(share.clamp(1e-4, 1 - 1e-4)) * 1.3 + shift)


def _is_block_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and "blocks" in name


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="train the transformer of shapes-wan")
    add_budget_options(parser)
    parser.add_argument("--init", type=Path, default=ASSETS / "shapes-wan" / "transformer", help="folder to start from")
    parser.add_argument("--parts", type=Path, default=ASSETS / "shapes-wan", help="with tokenizer and text_encoder")
    parser.add_argument("--out", type=Path, default=OUT / "transformer")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--batch", type=int, default=64, help="clips a step")
    parser.add_argument("--captions", type=int, default=40_000, help="captions that clips are drawn from")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    rng = random.Random(args.seed)
    captions = [sample_motion_caption(rng, held_out=False) for _ in range(args.captions)]
    table = make_caption_table(args.parts, captions, args.device)
    trainer = WanTrainer(args.init, table, load_group_basis(args.device), lr=args.lr, batch=args.batch)
    trainer.optimiser.set_rate(0.01)
    frames = {"clip": FRAMES, "picture": 1}
    steps = {name: capture(Step(name=name, run=lambda n=n: trainer.train_on(n)), args) for name, n in frames.items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    train_steps(
        [steps[name] for name in TURN],
        trainer.optimiser,
        seconds=compute_seconds_left(args),
        hold=0.5,
        save=lambda: trainer.save(args.out),
    )


if __name__ == "__main__":
    main()
