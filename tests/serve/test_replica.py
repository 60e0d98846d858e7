"""Groups of real ranks: what they draw, how they stop, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from diffusers import FluxPipeline
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from PIL import Image

import ditile
from ditile.cli import main
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.serve.jobs import Request
from ditile.serve.link import Batch, BatchJob, WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.replica import LocalReplica, ReplicaEvent

PROMPT = "a large red circle on the left on a gray background"


def make_job(name: str, prompt: str = PROMPT, **options: Any) -> BatchJob:
    wanted = GenerateOptions(**{"prompt": prompt, "seed": 5, "steps": 4} | options)
    return BatchJob(f"image_{name}", Request(options=wanted))


class Driven:
    """Groups of ranks, and the events that came from them."""

    def __init__(self, make_replica: Any, num_groups: int) -> None:
        self._events: asyncio.Queue[ReplicaEvent] = asyncio.Queue()
        self.groups = [make_replica(str(number), self._events.put_nowait) for number in range(num_groups)]
        self.group = self.groups[0]

    async def draw(self, name: str, *jobs: BatchJob) -> list[ReplicaEvent]:
        self.group.generate(Batch(name, list(jobs)))
        return await self.wait_for("ended")

    async def begin(self, name: str) -> list[ReplicaEvent]:
        """Begin a batch that takes long, and return the events up to its first step."""
        self.group.generate(Batch(name, [make_job(name, steps=400)]))
        return await self.wait_for("step")

    async def wait_for(self, kind: str) -> list[ReplicaEvent]:
        """Return all events up to the first of a kind."""
        seen: list[ReplicaEvent] = []
        while not seen or seen[-1].kind != kind:
            seen.append(await asyncio.wait_for(self._events.get(), 150))
        return seen

    async def wait_for_loss(self, batch_id: str, seconds: float) -> str:
        """Return the reason for which a batch is lost, as soon as there are ranks again."""
        since = time.monotonic()
        down = (await self.wait_for("down"))[-1]
        assert time.monotonic() - since < seconds
        assert (down.batch_id, down.failure.code) == (batch_id, "rank_failed")
        assert "\n" not in down.failure.message
        await self.wait_for("ready")
        return str(down.failure.message)


@contextlib.asynccontextmanager
async def drive_groups(make_replica: Any, num_groups: int = 1) -> AsyncIterator[Driven]:
    """Yield groups of which the first is ready."""
    driven = Driven(make_replica, num_groups)
    for group in driven.groups:
        group.start()
    try:
        await driven.wait_for("ready")
        yield driven
    finally:
        await asyncio.gather(*(group.end() for group in driven.groups))


def drive(model: str, plan: str, lora_dir: str | None = None) -> contextlib.AbstractAsyncContextManager[Driven]:
    options = ServeOptions(model=model, lora_dir=lora_dir, max_loras=1)
    setup = WorkerSetup(options=options, plan=Plan.parse(plan), cache=CacheOptions())
    return drive_groups(lambda name, on_event: LocalReplica(name, setup, on_event))


def find_rank(number: int) -> psutil.Process:
    (rank,) = [p for p in psutil.Process().children() if p.cmdline()[3:5] == ["ditile-rank", str(number)]]
    return rank


def list_files(events: list[ReplicaEvent]) -> list[dict[str, bytes]]:
    return [event.files for event in events if event.kind == "done"]


async def test_ranks_draw_refuse_and_stop() -> None:
    """A failure would mean another picture after or between other requests; test_clients compares with the command."""
    async with drive("shapes-pixart", "pipefusion=2") as driven:
        events = await driven.draw("first", make_job("a"))
        (files,) = first = list_files(events)
        assert [event.step for event in events if event.kind == "step"] == [1, 2, 3, 4]
        # What the pipeline refuses ends the job alone.
        (failed, _) = await driven.draw("refused", make_job("b", height=33))
        assert failed.kind == "failed"
        assert failed.failure.code == "refused"
        assert "try height=32" in failed.failure.message
        # A stopped batch has no picture, and ends within two steps.
        steps = await driven.begin("long")
        driven.group.stop("long")
        steps += await driven.wait_for("ended")
        assert not list_files(steps)
        assert len(steps) < 200
        # Sums of a batch are rounded in another order.
        four = list_files(await driven.draw("four", *(make_job(f"d{seed}", seed=seed) for seed in (5, 6, 7, 8))))
        assert len(four) == 4
        alone, batched = (
            np.asarray(Image.open(io.BytesIO(png)), np.int16) for png in (files["0.png"], four[0]["0.png"])
        )
        assert np.abs(alone - batched).max() <= 1
        mixed = await driven.draw("mixed", make_job("g"), make_job("h", height=33))
        assert [event.job_id for event in mixed if event.kind == "done"] == ["image_g"]
        assert [event.job_id for event in mixed if event.kind == "failed"] == ["image_h"]
        assert list_files(await driven.draw("again", make_job("f"))) == first


def write_lora(path: Path, seed: int) -> None:
    """Save a random LoRA of the attention of shapes-flux."""
    torch.manual_seed(seed)
    transformer = ditile.load("shapes-flux").transformer
    get_peft_model(transformer, LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    factors = get_peft_model_state_dict(transformer)
    FluxPipeline.save_lora_weights(path.parent, transformer_lora_layers=factors, weight_name=path.name)


def read_pixels(events: list[ReplicaEvent]) -> Any:
    return np.asarray(Image.open(io.BytesIO(list_files(events)[0]["0.png"])))


async def test_each_request_has_its_own_loras(tmp_path: Path) -> None:
    """A failure would mean that a request is drawn with the LoRA of another one, or ends the ranks."""
    for seed, name in enumerate(("ink.v1", "oil")):
        write_lora(tmp_path / f"{name}.safetensors", seed)
    out, file = tmp_path / "ink.png", tmp_path / "ink.v1.safetensors"
    words = ["--model", "shapes-flux", "--pipefusion", "2", "--steps", "4", "--seed", "5", "--out", str(out)]
    assert main.main(["generate", PROMPT, *words, "--lora", str(file)]) == 0
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    async with drive("shapes-flux", "pipefusion=2", lora_dir=str(tmp_path)) as driven:

        def make(*names: str) -> BatchJob:
            job = make_job("-".join(names) or "plain")
            return replace(job, request=replace(job.request, loras=dict.fromkeys(names, 1.0)))

        plain = list_files(await driven.draw("plain", make()))
        # What is drawn before another LoRA was there is what is drawn after it.
        wanted = {"oil": read_pixels(await driven.draw("lora", make("oil"))), "ink.v1": np.asarray(Image.open(out))}
        for number, name in enumerate(("ink.v1", "oil", "ink.v1")):
            assert (read_pixels(await driven.draw(f"lora-{number}", make(name))) == wanted[name]).all()
        assert (wanted["oil"] != wanted["ink.v1"]).any()
        (failed, _) = await driven.draw("broken", make("broken"))
        assert failed.kind == "failed"
        assert "lora='broken' cannot be loaded" in failed.failure.message
        assert str(tmp_path) not in failed.failure.message
        assert list_files(await driven.draw("again", make())) == plain
        both = read_pixels(await driven.draw("both", make("ink.v1", "oil")))
        assert (both != wanted["ink.v1"]).any()
        assert (both != wanted["oil"]).any()


@pytest.mark.alone
async def test_a_rank_that_dies_is_noticed_and_started_again() -> None:
    """A failure would mean a server that waits for a rank that has gone."""
    async with drive("shapes-pixart", "pipefusion=2") as driven:
        before = list_files(await driven.draw("before", make_job("a")))
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
            await driven.begin(f"lost by {number}")
            find_rank(1).send_signal(number)
            assert (await driven.wait_for_loss(f"lost by {number}", 6)).startswith("rank 1")
            assert list_files(await driven.draw(f"after {number}", make_job("c"))) == before


async def test_previews_come_while_a_picture_is_drawn_and_do_not_change_it() -> None:
    """A failure would mean a client that waits without a picture, or another picture for one who looks."""
    async with drive("shapes-flux", "pipefusion=2 patches=2") as driven:
        options = GenerateOptions(prompt=PROMPT, seed=5, steps=8)
        plain, watched = (BatchJob(f"image_{n}", Request(options=options, num_previews=n)) for n in (0, 3))
        alone = list_files(await driven.draw("plain", plain))
        events = await driven.draw("watched", watched)
        previews = [event for event in events if event.kind == "preview"]
        assert [event.step for event in previews] == [0, 1, 2]
        assert list_files(events) == alone
        picture = read_pixels(events).astype(np.float32)
        errors = []
        for event in previews:
            seen = np.asarray(Image.open(io.BytesIO(event.files["preview"])), np.float32)
            assert seen.shape == picture.shape
            errors.append(float(np.abs(seen - picture).mean()))
        flat = float(np.abs(picture.mean(axis=(0, 1)) - picture).mean())
        assert errors[-1] < errors[0] and errors[-1] < 0.5 * flat, (errors, flat)
