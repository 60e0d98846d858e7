"""What a rank of the server does: it loads and divides the model once, and then draws one batch of jobs after another.

Every rank gets every message of the server in the same order, so that no rank waits in a collective while there is
nothing to do. Rank 0 alone answers.
"""

from __future__ import annotations

import contextlib
import io
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import ditile
from ditile.cache.report import summarize_cache_reports
from ditile.distributed import env
from ditile.errors import DitileError, StoppedError
from ditile.requests.arguments import (
    build_batch_call,
    build_call_arguments,
    build_object_arguments,
    check_cache_steps,
)
from ditile.requests.facts import collect_facts
from ditile.requests.options import GenerateOptions
from ditile.requests.pipelines import convert_value_errors
from ditile.requests.prepare import prepare_runner
from ditile.requests.results import build_png_texts, choose_fps, encode_drawn, list_drawn
from ditile.runner.callbacks import StepWatch
from ditile.runner.load import defaults
from ditile.serve.jobs import INPUT_IMAGE, POSTER, Drawn, Request
from ditile.serve.link import GroupSetup, MessageLink

IDLE_SECONDS = 5.0
"""How often a rank that has nothing to do says that it lives."""


class BatchJob(NamedTuple):
    """A job as a rank sees it: its id, what to draw, and the files that came with it."""

    id: str
    request: Request
    inputs: dict[str, bytes]


class RankServer:
    """A rank with its runner.

    Args:
        setup: what to load.
        link: to the server.
    """

    def __init__(self, setup: GroupSetup, link: MessageLink) -> None:
        self._setup, self._link = setup, link
        self._pipe, self._runner = prepare_runner(setup.model, setup.engine, setup.plan, setup.cache)
        self._pipe.set_progress_bar_config(disable=True)
        self._answers = self._runner.mesh.rank == 0
        self._batches: queue.SimpleQueue[tuple[str, list[BatchJob]] | None] = queue.SimpleQueue()
        self._drawing: str | None = None

    def serve_batches(self) -> None:
        """Draws batches until the server says that this rank may leave.

        Raises:
            StateError: if the ranks cannot draw any more, as messages of a picture are still under way.
        """
        threading.Thread(target=self._receive_messages, daemon=True).start()
        if self._answers:
            facts = collect_facts(self._pipe, self._setup.model, self._setup.plan)
            self._link.send_message({"ready": facts.to_json()})
        while (batch := self._wait_for_batch()) is not None:
            self._drawing, jobs = batch
            stopped = self._draw_batch(jobs)
            ended, self._drawing = self._drawing, None
            self._answer({"ended": {"stopped": stopped}, "batch": ended})

    def _wait_for_batch(self) -> tuple[str, list[BatchJob]] | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._batches.get(timeout=IDLE_SECONDS)
            # Nothing hangs: there is nothing to do.
            env.report_progress()

    def _receive_messages(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message, files = self._link.receive_message()
                if "draw" in message:
                    self._batches.put((message["draw"], _read_jobs(message["jobs"], files)))
                elif message.get("stop") is not None:
                    # The server says so again until the batch has ended: the call may not have begun yet.
                    if message["stop"] == self._drawing:
                        self._runner.stop()
                else:
                    break
        self._batches.put(None)

    def _draw_batch(self, jobs: Sequence[BatchJob]) -> bool:
        """Draws the jobs of a batch; returns whether it was stopped."""
        try:
            self._draw_jobs(jobs)
        except StoppedError:
            return True
        except DitileError as error:
            if self._runner.is_broken:
                raise
            for job in jobs:
                self._answer({"failed": {"code": "refused", "message": str(error)}, "job": job.id})
        return False

    def _draw_jobs(self, jobs: Sequence[BatchJob]) -> None:
        wanted = [job.request.options for job in jobs]
        bases = [build_call_arguments(self._pipe, each, defaults(self._setup.model)) for each in wanted]
        check_cache_steps(self._setup.cache, bases[0])
        traced = self._runner.trace = bool(jobs[0].request.client.get("trace"))
        with convert_value_errors(self._pipe):
            result = self._runner(
                **self._build_call(jobs, bases), output="first", watch=StepWatch(on_step=self._note_step)
            )
        reports, left_out = self._runner.reports(), self._summarize_cache()
        trace = self._collect_trace() if traced else {}
        if self._answers:
            pictures = iter(list_drawn(result))
            facts = {"reports": reports, "left_out": left_out, "batch": len(jobs)}
            for job, base in zip(jobs, bases, strict=True):
                drawn, files = self._encode_job(job, base, [next(pictures) for _ in list_seeds(job.request.options)])
                self._send_drawn(job.id, replace(drawn, facts=facts), files | trace)

    def _note_step(self, step: int, num_steps: int) -> None:
        self._answer({"step": [step + 1, num_steps]})

    def _build_call(self, jobs: Sequence[BatchJob], bases: Sequence[dict[str, Any]]) -> dict[str, Any]:
        wanted = jobs[0].request.options
        if len(jobs) == 1:
            picture = _read_input(jobs[0].inputs, INPUT_IMAGE)
            seeds = list_seeds(wanted)
            return bases[0] | build_object_arguments(self._pipe, wanted, seeds, picture=picture)
        options = [job.request.options for job in jobs]
        each = [base for base, one in zip(bases, options, strict=True) for _ in list_seeds(one)]
        return build_batch_call(self._pipe, each, wanted, [seed for one in options for seed in list_seeds(one)])

    def _summarize_cache(self) -> list[dict[str, Any]]:
        if self._setup.cache.build_cache_arguments()["cache_config"] is None:
            return []
        return summarize_cache_reports([ditile.summary(self._runner, logging=False)])

    def _collect_trace(self) -> dict[str, bytes]:
        """The Chrome trace of the last call, on rank 0; all ranks call it."""
        with self._setup_trace_file() as path:
            self._runner.write_trace(path)
            return {"trace.json": path.read_bytes()} if self._answers else {}

    @contextlib.contextmanager
    def _setup_trace_file(self) -> Any:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="ditile-") as folder:
            yield Path(folder, "trace.json")

    def _encode_job(
        self, job: BatchJob, base: dict[str, Any], pictures: Sequence[Any]
    ) -> tuple[Drawn, dict[str, bytes]]:
        """What is said of a job, and its files, as `ditile generate` writes them."""
        request, report = job.request, self._runner.report
        assert report is not None
        wanted = replace(request.options, model=self._setup.model)
        texts = build_png_texts(wanted, self._setup.plan, self._setup.cache, base)
        fps, files, seeds = choose_fps(self._pipe, wanted, base), {}, list_seeds(wanted)
        names = [f"{k}.{request.output_format}" for k in range(len(pictures))]
        for name, seed, picture in zip(names, seeds, pictures, strict=True):
            own_texts = texts | {"prompt": wanted.prompt or "", "seed": str(seed)}
            format, quality = request.output_format, request.output_compression
            files[name], poster = encode_drawn(picture, format, quality, fps, own_texts)
            if poster is not None:
                files.setdefault(POSTER, poster)
        is_video = POSTER in files
        size = pictures[0].shape[2:0:-1] if is_video else pictures[0].size
        return Drawn(
            files=names,
            seeds=seeds,
            size=(int(size[0]), int(size[1])),
            seconds=dict(report.seconds),
            num_steps=report.steps,
            frames=len(pictures[0]) if is_video else 0,
            fps=fps if is_video else 0.0,
        ), files

    def _send_drawn(self, job_id: str, drawn: Drawn, files: Mapping[str, bytes]) -> None:
        self._answer({"drawn": asdict(drawn), "job": job_id}, files)

    def _answer(self, message: dict[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        if self._answers:
            self._link.send_message({"batch": self._drawing} | message, files)


def list_seeds(wanted: GenerateOptions) -> list[int]:
    """The seeds of the pictures of a request: they count up."""
    assert wanted.seed is not None, "the server has chosen one"
    return list(range(wanted.seed, wanted.seed + wanted.num_images))


def _read_jobs(jobs: Sequence[Mapping[str, Any]], files: Mapping[str, bytes]) -> list[BatchJob]:
    read = []
    for job in jobs:
        prefix = f"{job['id']}/"
        inputs = {name.removeprefix(prefix): content for name, content in files.items() if name.startswith(prefix)}
        read.append(BatchJob(job["id"], Request.from_json(job["request"]), inputs))
    return read


def _read_input(inputs: Mapping[str, bytes], name: str) -> Any:
    """A picture that came with a job, in RGB; None if there is none. The server has checked and encoded it anew."""
    from PIL import Image

    if name not in inputs:
        return None
    with Image.open(io.BytesIO(inputs[name]), formats=["PNG"]) as picture:
        return picture.convert("RGB")
