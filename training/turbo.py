"""Teach shapes-flux to generate in four steps without guidance: `python -m training.turbo pool` and, at the same time,
`python -m training.turbo train --minutes 32`.

The student's target on each of its four intervals is the guided teacher's velocity in the middle of the interval (the
midpoint rule), on states that the student's own steps reach from noise. `pool` writes such pairs without end, with the
newest averaged student; `train` samples them, the least sampled ones first. Weights of both are fp32.
"""

import argparse
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel

from training.budget import add_budget_options, compute_seconds_left, replace_folder
from training.conditions import Conditions, TextEncoders
from training.latents import load_basis
from training.models import FLUX_TOKENS, image_ids, pack
from training.optim import MasterOptimiser, learning_rate
from training.scenes import describe_scene, render_scene, sample_scene

HERE = Path(__file__).parent
OUT = HERE / "out" / "turbo"
ASSETS = HERE.parent / "src" / "ditile" / "model" / "assets"
TEACHER = ASSETS / "shapes-flux"
SIDE = 128
TOKEN = 8
SHIFT = 1.5
STEPS = 4
GUIDANCE = 2.0
# Of the intervals: the first one's loss is far larger.
LOSS_WEIGHTS = (0.3, 1.0, 2.0, 2.0)
# The ending of a shard that is being written.
UNFINISHED = ".part"
PUBLISHED = "student"


def shift_sigma(t: float) -> float:
    """The noise level of a time, as the scheduler of shapes-flux shifts it."""
    return SHIFT * t / (1 + (SHIFT - 1) * t)


SIGMAS = [shift_sigma(1 - k / STEPS) for k in range(STEPS + 1)]
MIDDLES = [shift_sigma(1 - (k + 0.5) / STEPS) for k in range(STEPS)]


class Velocity:
    """A transformer of shapes-flux's size on images of 128 x 128 pixels."""

    def __init__(self, folder: Path) -> None:
        self.model = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32)
        self.ids = image_ids(SIDE // TOKEN, SIDE // TOKEN), torch.zeros(FLUX_TOKENS, 3)

    def __call__(self, x: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """The velocity `[B, tokens, 16]` of states at noise levels `[B]`."""
        image, words = self.ids
        out: torch.Tensor = self.model(
            x,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=sigma,
            img_ids=image,
            txt_ids=words,
            return_dict=False,
        )[0]
        return out

    @torch.no_grad()
    def guide(self, x: torch.Tensor, conditions: Conditions, empty: Conditions, sigma: torch.Tensor) -> torch.Tensor:
        """The guided velocity, both branches in one call."""
        assert conditions.pooled is not None and empty.pooled is not None
        text = torch.cat([conditions.text, empty.text.expand(len(x), -1, -1)])
        pooled = torch.cat([conditions.pooled, empty.pooled.expand(len(x), -1)])
        positive, negative = self(torch.cat([x, x]), text, pooled, torch.cat([sigma, sigma])).chunk(2)
        return negative + GUIDANCE * (positive - negative)


class PairMaker:
    """Makes pairs: a state at the start of an interval, and the velocity that the student should have there."""

    def __init__(self, seed: int) -> None:
        self.rng, self.basis = random.Random(seed), load_basis()
        self.encoders = TextEncoders(TEACHER, tokens=FLUX_TOKENS, masked=False, dtype=torch.float32)
        self.teacher = self.student = Velocity(TEACHER / "transformer")
        self.empty = self.encoders([""])
        self.stamp = ""

    def renew_student(self, folder: Path) -> None:
        """Takes the newest averaged student, if there is a newer one."""
        ready = folder / "ready"
        if ready.exists() and (stamp := ready.read_text()) != self.stamp:
            self.student = Velocity(folder / PUBLISHED)
            self.stamp = stamp

    def make_shard(self, scenes: int) -> dict[str, torch.Tensor]:
        """Pairs of each interval for some scenes: `x` and `v` `[scenes, 4, tokens, 16]`, `text` and `pooled`.

        The last scene of a shard starts each interval from a noised render instead of the student's own state.
        """
        samples = [sample_scene(self.rng, held_out=False) for _ in range(scenes)]
        conditions = self.encoders([describe_scene(scene) for scene in samples])
        assert conditions.pooled is not None
        renders = pack(self.basis.latents([render_scene(scene, SIDE, SIDE) for scene in samples]))
        x = torch.randn_like(renders)
        states = []
        targets = []
        for index in range(STEPS):
            x = x.clone()
            start = SIGMAS[index]
            if index > 0:
                x[-1] = (1 - start) * renders[-1] + start * torch.randn_like(renders[-1])
            with torch.no_grad():
                step = self.student(x, conditions.text, conditions.pooled, torch.full((scenes,), start))
            # The half step costs nothing: the student's own step needs the same call.
            half = x + (MIDDLES[index] - start) * step
            states.append(x)
            middle = torch.full((scenes,), MIDDLES[index])
            targets.append(self.teacher.guide(half, conditions, self.empty, middle))
            x = x + (SIGMAS[index + 1] - start) * step
        return {
            "x": torch.stack(states, 1),
            "v": torch.stack(targets, 1),
            "text": conditions.text,
            "pooled": conditions.pooled,
        }


@dataclass(kw_only=True)
class PairPool:
    """The pairs that were read from a folder of shards, and how often each was drawn."""

    folder: Path
    rng: random.Random
    scenes: list[dict[str, torch.Tensor]] = field(default_factory=list)
    drawn: list[list[int]] = field(default_factory=list)
    files: set[str] = field(default_factory=set)

    def read_new_shards(self) -> None:
        """Reads what was written since the last time."""
        for path in sorted(self.folder.glob("*.pt")):
            if path.name in self.files:
                continue
            self.files.add(path.name)
            shard = torch.load(path, weights_only=True)
            for index in range(len(shard["x"])):
                self.scenes.append({name: values[index] for name, values in shard.items()})
                self.drawn.append([0] * STEPS)

    def may_draw(self, reuse: float) -> bool:
        """Whether pairs were drawn less than so many times in the mean."""
        return bool(self.scenes) and sum(map(sum, self.drawn)) < reuse * STEPS * len(self.scenes)

    def draw_batch(self, size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Pairs of every interval in turn, and their intervals `[size]`; the least drawn of some, the newest first."""
        names = ("x", "v", "text", "pooled")
        batch: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        intervals = [index % STEPS for index in range(size)]
        for interval in intervals:
            tries = self.rng.sample(range(len(self.scenes)), min(4, len(self.scenes)))
            place = min(tries, key=lambda place, interval=interval: (self.drawn[place][interval], -place))
            self.drawn[place][interval] += 1
            scene = self.scenes[place]
            batch["x"].append(scene["x"][interval])
            batch["v"].append(scene["v"][interval])
            batch["text"].append(scene["text"])
            batch["pooled"].append(scene["pooled"])
        return {name: torch.stack(batch[name]) for name in names}, torch.tensor(intervals)


class TurboTrainer:
    """The student and its optimiser. AdamW for everything: Muon's bf16 products are slow on CPUs without bf16 units."""

    def __init__(self, init: Path, *, lr: float) -> None:
        self.student = Velocity(init)
        self.optimiser = MasterOptimiser(self.student.model, lr=lr, ema=0.98, hidden=lambda name, parameter: False)

    def train_on(self, pairs: dict[str, torch.Tensor], intervals: torch.Tensor, scale: float) -> torch.Tensor:
        """One step at `scale` times the learning rate; the mean squared error of each pair `[B]`."""
        out = self.student(pairs["x"], pairs["text"], pairs["pooled"], torch.tensor(SIGMAS)[intervals])
        errors = (out - pairs["v"]).pow(2).mean((1, 2))
        (errors * torch.tensor(LOSS_WEIGHTS)[intervals]).mean().backward()  # type: ignore[no-untyped-call]
        self.optimiser.step(scale)
        return errors.detach()

    def publish(self, folder: Path) -> None:
        """Saves the averaged student for `pool` and for the assembly."""

        def write(fresh: Path) -> None:
            with self.optimiser.averaged():
                self.student.model.save_pretrained(fresh)

        replace_folder(folder / PUBLISHED, write)
        (folder / "ready").write_text(str(self.optimiser.steps))


def fill_pool(args: argparse.Namespace) -> None:
    """Writes shards until the budget is over."""
    pool = args.out / "pool"
    maker = PairMaker(args.seed)
    end = time.monotonic() + compute_seconds_left(args)
    pool.mkdir(parents=True, exist_ok=True)
    number = 0
    while time.monotonic() < end:
        maker.renew_student(args.out)
        fresh = pool / f"{args.seed}-{number:05d}{UNFINISHED}"
        torch.save(maker.make_shard(args.scenes), fresh)
        os.replace(fresh, fresh.with_suffix(".pt"))
        number += 1


def train(args: argparse.Namespace) -> None:
    """Trains until the budget is over; waits for the pool where pairs would be drawn too often."""
    args.out.mkdir(parents=True, exist_ok=True)
    pool = PairPool(folder=args.out / "pool", rng=random.Random(args.seed))
    trainer = TurboTrainer(args.init, lr=args.lr)
    seconds = compute_seconds_left(args)
    start = published = time.monotonic()
    errors: list[list[float]] = [[] for _ in range(STEPS)]
    while True:
        spent = time.monotonic() - start
        if spent >= seconds:
            break
        pool.read_new_shards()
        if not pool.may_draw(args.reuse):
            time.sleep(0.2)
            continue
        pairs, intervals = pool.draw_batch(args.batch)
        losses = trainer.train_on(pairs, intervals, learning_rate(spent / seconds, hold=args.hold))
        for k, error in zip(intervals.tolist(), losses.tolist(), strict=True):
            errors[k].append(error)
        if trainer.optimiser.steps % 50 == 0:
            means = [round(sum(values) / len(values), 4) for values in errors if values]
            row = {"step": trainer.optimiser.steps, "scenes": len(pool.scenes), "errors": means}
            print(json.dumps(row), flush=True)
            errors = [[] for _ in range(STEPS)]
        if time.monotonic() - published > args.publish:
            trainer.publish(args.out)
            published = time.monotonic()
    trainer.publish(args.out)


def main() -> None:
    """Parse the command line, and make pairs or train."""
    parser = argparse.ArgumentParser(description="distil shapes-flux to four steps")
    parser.add_argument("what", choices=("pool", "train"))
    add_budget_options(parser)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--scenes", type=int, default=4, help="pool: scenes of a shard")
    parser.add_argument("--init", type=Path, default=TEACHER / "transformer", help="train: folder to start from")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--hold", type=float, default=0.4, help="train: share of the budget before the rate falls")
    parser.add_argument("--batch", type=int, default=8, help="train: pairs a step")
    parser.add_argument("--publish", type=float, default=300, help="train: seconds between averaged students")
    parser.add_argument("--reuse", type=float, default=3.0, help="train: mean times that a pair may be drawn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.what == "pool":
        fill_pool(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
