"""A server in this process for tests of HTTP, with ranks that are none: they paint what real ones would draw.

Real ranks take seconds to start, and cannot be told to fail, to wait or to draw at a given pace.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from PIL import Image

import ditile
from ditile.runner.requests.facts import ModelFacts, collect_facts
from ditile.serve.app import create_app
from ditile.serve.jobs import POSTER, SPRITESHEET, Failure, JobResult
from ditile.serve.link import Batch, BatchJob
from ditile.serve.metrics import Metrics
from ditile.serve.options import ServeOptions
from ditile.serve.replica import ReplicaEvent
from ditile.serve.server import add_page, configure_http, open_listener
from ditile.serve.service import Service

EDITS = "shapes-flux"
PROMPT = "a large red circle on the left on a gray background"


@lru_cache
def collect_known_facts(model: str) -> ModelFacts:
    """The facts of a bundled model."""
    return collect_facts(ditile.load(model), model, "pipefusion=2")


class PaintedReplica:
    """Answers batches with plain pictures, a step at a time.

    Args:
        on_event: told what happens.
        facts: of the model that it plays.

    Attributes:
        pace: seconds of a step.
        failure: of the next jobs.
        batches: what it was given.
    """

    name, state = "0", "starting"

    def __init__(self, on_event: Callable[[ReplicaEvent], None], facts: ModelFacts) -> None:
        self.pace, self.failure, self.facts = 0.0, None, facts
        self.batches: list[Batch] = []
        self._tell: Any = on_event
        self._stopped: set[str] = set()
        self._work: set[Any] = set()

    def start(self) -> None:
        self.state = "ready"
        self._report("ready")

    def generate(self, batch: Batch) -> None:
        self.state = "drawing"
        self.batches.append(batch)
        self._work.add(asyncio.get_running_loop().create_task(self._paint_batch(batch)))

    def stop(self, batch_id: str) -> None:
        self._stopped.add(batch_id)

    async def end(self) -> None:
        self.state = "down"

    async def _paint_batch(self, batch: Batch) -> None:
        steps = batch.jobs[0].request.options.steps or 4
        for step in range(1, steps + 1):
            await asyncio.sleep(self.pace)
            if batch.id in self._stopped:
                break
            self._report("step", batch, step=step, num_steps=steps)
            for job in batch.jobs:
                if step <= job.request.num_previews:
                    files = {"preview": paint_picture((8, 8), step, "png")}
                    self._report("preview", batch, job_id=job.id, step=step - 1, files=files)
        for job in batch.jobs if batch.id not in self._stopped else ():
            if self.failure is not None:
                self._report("failed", batch, job_id=job.id, failure=self.failure)
            else:
                result, files = self._paint_job(job, steps)
                self._report("done", batch, job_id=job.id, result=result, files=files)
        self.state = "ready"
        self._report("ended", batch)

    def _report(self, kind: Any, batch: Batch | None = None, **values: Any) -> None:
        batch_id = None if batch is None else batch.id
        self._tell(ReplicaEvent(kind=kind, replica=self, batch_id=batch_id, **values))

    def _paint_job(self, job: BatchJob, steps: int) -> tuple[JobResult, dict[str, bytes]]:
        options, kind = job.request.options, job.request.output_format
        size = (options.width or self.facts.size[0], options.height or self.facts.size[1])
        seeds = [options.seed + k for k in range(options.num_images)]
        files = {f"{k}.{kind}": paint_picture(size, seed, kind) for k, seed in enumerate(seeds)}
        result = JobResult(
            files=list(files), seeds=seeds, size=size, num_steps=steps,
            seconds={"total": 1.0, "text": 0.1, "denoise": 0.8, "decode": 0.1},
        )  # fmt: skip
        if self.facts.is_video:
            frames = options.frames or self.facts.find_default("num_frames")
            result = dataclasses.replace(result, frames=frames, fps=options.fps or self.facts.fps)
            files |= {name: paint_picture(size, 1, "png") for name in (POSTER, SPRITESHEET)}
        return result, files


class Served:
    """A server that listens: its address, its service and its painted group."""

    def __init__(self, service: Service, app: FastAPI, port: int) -> None:
        self.service, self.app, self.url = service, app, f"http://127.0.0.1:{port}"
        self.group: PaintedReplica = service._replicas[0]  # type: ignore[assignment]
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def post(self, path: str, values: Any = None, **how: Any) -> httpx.Response:
        return self.client.post(path, json=values, **how)

    def fail_next_jobs(self, code: str | None, message: str = "it failed") -> None:
        self.group.failure = None if code is None else Failure(code=code, message=message)


@contextlib.contextmanager
def serve_painted(folder: Path, model: str = EDITS, *, page: bool = False, **flags: Any) -> Iterator[Served]:
    """A server on a free port of this machine, in a thread."""
    options = ServeOptions(model=model, port=0, state=str(folder), **flags)
    facts = collect_known_facts(model)
    with serve_groups(options, lambda _, tell: PaintedReplica(tell, facts), page=page) as served:
        yield served


@contextlib.contextmanager
def serve_groups(options: ServeOptions, make_replica: Any, *, page: bool = False) -> Iterator[Served]:
    """The same with groups of any kind."""
    started: list[Any] = []
    has_started = threading.Event()

    async def serve() -> None:
        service = Service(options, make_replica)
        await service.start()
        app = create_app(service)
        if page:
            add_page(app, service)
        server = uvicorn.Server(configure_http(app))
        listener = open_listener(options)
        listening = asyncio.ensure_future(server.serve([listener]))
        try:
            await service.wait_until_ready()
            while not server.started:
                await asyncio.sleep(0.01)
            started.extend([service, server, app, listener.getsockname()[1]])
        finally:
            has_started.set()
        await listening
        await service.drain(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    has_started.wait(300)
    served = Served(started[0], started[2], started[3])
    try:
        yield served
    finally:
        served.client.close()
        started[1].should_exit = True
        thread.join(60)


@contextlib.contextmanager
def connect_openai(url: str) -> Iterator[Any]:
    """Yield OpenAI's client of a server."""
    import openai

    with httpx.Client(trust_env=False, timeout=120) as transport:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport)


def paint_picture(size: tuple[int, int], seed: int, kind: str = "png") -> bytes:
    """A plain picture whose colour says the seed; of a video one frame as GIF."""
    encoded = io.BytesIO()
    Image.new("RGB", size, (seed % 256, seed // 256 % 256, 7)).save(encoded, "gif" if kind == "mp4" else kind)
    return encoded.getvalue()


def open_picture(encoded: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


def read_metric(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of one sample; 0 if there is none."""
    return metrics.registry.get_sample_value(name, labels) or 0.0


def read_error(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after a check of its form."""
    error: dict[str, Any] = json.loads(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    return error
