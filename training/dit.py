"""Train one transformer: `python -m training.dit pixart --minutes 90 [--init FOLDER] [--resume]`.

Pictures are rendered and encoded on the fly, one bucket (height x width) a step, batches of about equally
many tokens. The learning rate and the mix of buckets follow the fraction of the wall-clock budget that is
used up. Checkpoints are written atomically.
"""

import argparse
import json
import os
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from training.attention import PlainAttention
from training.conditions import TextEncoders, drop
from training.latents import load_basis
from training.models import Kind, make
from training.optim import MasterOptimiser, learning_rate
from training.scenes import describe_scene, render_scene, sample_scene

OUT = Path(__file__).parent / "out"
ASSETS = Path(__file__).parent.parent / "src" / "ditile" / "model" / "assets"
Bucket = tuple[int, int]  # height, width in pixels

MIXES: dict[str, dict[Bucket, float]] = {
    "small": {(128, 128): 0.7, (128, 192): 0.15, (192, 128): 0.15},
    "mixed": {(128, 128): 0.4, (128, 192): 0.15, (192, 128): 0.15, (192, 192): 0.2, (256, 256): 0.1},
    "large": {
        (128, 128): 0.1,
        (128, 192): 0.05,
        (192, 128): 0.05,
        (192, 192): 0.15,
        (192, 256): 0.125,
        (256, 192): 0.125,
        (256, 256): 0.4,
    },
}


@dataclass(kw_only=True)
class Progress:
    """Where a run is; kept in its checkpoint."""

    steps: int = 0
    images: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


class Run:
    """One training run: model, optimiser, random state and progress, and the folder they are kept in."""

    def __init__(self, kind: Kind, encoders: TextEncoders, folder: Path, *, lr: float, tokens: int, seed: int) -> None:
        self.kind = kind
        self.encoders = encoders
        self.folder = folder
        self.tokens = tokens
        self.basis = load_basis()
        self.rng = random.Random(seed)
        self.optimiser = MasterOptimiser(kind.model, lr=lr, weight_decay=0.01)
        self.progress = Progress()

    def step(self, fraction: float, mix: str) -> tuple[Bucket, float]:
        """One step at a fraction of the budget on a bucket of one of MIXES; the bucket and the loss."""
        buckets = MIXES[mix]
        height, width = bucket = self.rng.choices(list(buckets), list(buckets.values()))[0]
        batch = max(2, round(self.tokens * 64 / (height * width)))
        scenes = [sample_scene(self.rng, held_out=False) for _ in range(batch)]
        latents = self.basis.latents([render_scene(scene, height, width) for scene in scenes])
        conditions = self.encoders(drop([describe_scene(scene) for scene in scenes], 0.1))
        with PlainAttention():
            loss = self.kind.loss(latents, conditions)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step(learning_rate(fraction))
        self.progress.steps += 1
        self.progress.images += batch
        return bucket, loss.item()

    def save(self) -> None:
        """The state to go on from, and the averaged model to look at."""
        state = {
            "optimiser": self.optimiser.state_dict(),
            "progress": json.dumps(vars(self.progress)),
            "torch_rng": torch.get_rng_state(),
            "scene_rng": json.dumps(self.rng.getstate()),
        }
        torch.save(state, self.folder / "state.pt.new")
        os.replace(self.folder / "state.pt.new", self.folder / "state.pt")
        fresh = self.folder / "transformer.new"
        final = self.folder / "transformer"
        with self.optimiser.averaged():
            self.kind.model.save_pretrained(fresh)  # type: ignore[operator]
        shutil.rmtree(final, ignore_errors=True)
        fresh.rename(final)
        (self.folder / "progress.json").write_text(json.dumps(vars(self.progress), indent=1))

    def resume(self) -> None:
        """Go on from `save`."""
        state = torch.load(self.folder / "state.pt", weights_only=True)
        self.optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(**json.loads(state["progress"]))
        torch.set_rng_state(state["torch_rng"])
        version, internal, gauss = json.loads(state["scene_rng"])
        self.rng.setstate((version, tuple(internal), gauss))


def train(
    run: Run,
    *,
    minutes: float,
    late_mix: str,
    late_from: float,
    log_every: int = 50,
    save_every_s: float = 180.0,
) -> None:
    """Train until the wall-clock budget, downtime between resumed runs not counted, is used up.

    The buckets are those of "mixed" up to the fraction `late_from` of the budget, of `late_mix` from there on.
    """
    progress = run.progress
    wall_0 = time.monotonic() - progress.wall_s
    cpu_0 = time.process_time() - progress.cpu_s
    losses: dict[Bucket, list[float]] = {}
    saved = progress.wall_s
    while progress.wall_s < minutes * 60:
        fraction = progress.wall_s / (minutes * 60)
        bucket, loss = run.step(fraction, "mixed" if fraction < late_from else late_mix)
        losses.setdefault(bucket, []).append(loss)
        progress.wall_s, progress.cpu_s = time.monotonic() - wall_0, time.process_time() - cpu_0
        if progress.steps % log_every == 0:
            _log(progress, losses)
            losses = {}
        if progress.wall_s - saved > save_every_s:
            run.save()
            saved = progress.wall_s
    run.save()


def _log(progress: Progress, losses: dict[Bucket, list[float]]) -> None:
    means = {f"{h}x{w}": round(sum(x) / len(x), 4) for (h, w), x in sorted(losses.items())}
    progress.history.append(
        {"steps": progress.steps, "images": progress.images, "cpu_s": round(progress.cpu_s, 1), **means}
    )
    print(
        f"{progress.steps} images {progress.images} cpu {progress.cpu_s:.0f} wall {progress.wall_s:.0f} {means}",
        flush=True,
    )


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="train one transformer")
    parser.add_argument("kind", choices=("pixart", "flux"))
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock budget; the learning rate ends there")
    parser.add_argument("--init", type=Path, help="transformer folder to start from instead of fresh weights")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--encoders", type=Path, help="model folder with tokenizer and text encoders")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tokens", type=int, default=3072, help="image tokens a step")
    parser.add_argument("--late-mix", choices=tuple(MIXES), default="large", help="buckets of the later part")
    parser.add_argument(
        "--late-from", type=float, default=0.35, help="fraction of the budget at which the later part begins"
    )
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if fast else "float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    kind = make(args.kind)
    if args.init:
        kind.model.load_state_dict(type(kind.model).from_pretrained(args.init).state_dict())  # type: ignore[attr-defined]
    dtype: torch.dtype = getattr(torch, args.dtype)
    kind.model.to(dtype)
    encoders = TextEncoders(
        args.encoders or ASSETS / f"shapes-{kind.name}", tokens=kind.text_tokens, masked=kind.masked, dtype=dtype
    )
    folder = OUT / kind.name
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(kind, encoders, folder, lr=args.lr, tokens=args.tokens, seed=args.seed)
    if args.resume and (folder / "state.pt").exists():
        run.resume()
    train(run, minutes=args.minutes, late_mix=args.late_mix, late_from=args.late_from)


if __name__ == "__main__":
    main()
