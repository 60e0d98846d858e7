"""What a rank of the server does: it loads and divides the model once, and then draws one batch of jobs after another.

Every rank gets every message of the server in the same order, so that no rank waits in a collective while there is
nothing to do. Rank 0 alone answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import queue
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from ditile.cache.report import summarize_cache_reports
from ditile.distributed import env
from ditile.distributed.transport import gather_json
from ditile.model.pipeline_calls import find_call_owner
from ditile.plan.errors import DitileError, ModelError, StoppedError
from ditile.runner.caching import summary
from ditile.runner.callbacks import StepWatch
from ditile.runner.load import defaults
from ditile.runner.lora import forget_loras, list_loaded_loras, select_loras
from ditile.runner.requests.arguments import (
    build_batch_call,
    build_call_arguments,
    build_object_arguments,
    check_cache_steps,
)
from ditile.runner.requests.conditions import choose_pipeline_class
from ditile.runner.requests.facts import CallFacts, ModelFacts, collect_call_facts, collect_facts
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pictures import encode_png
from ditile.runner.requests.pipelines import convert_value_errors
from ditile.runner.requests.prepare import load_lora_weights, prepare_runner
from ditile.runner.requests.results import add_picture_texts, build_png_texts, choose_fps, encode_drawn, list_drawn
from ditile.runner.requests.videos import check_encoder, encode_spritesheet
from ditile.runner.runner import Runner
from ditile.runner.warm import choose_warm_steps
from ditile.serve.jobs import POSTER, SPRITESHEET, Drawn, Request
from ditile.serve.link import GroupSetup, MessageLink
from ditile.serve.previews import CallPreviews, PreviewDecoder

LOG = logging.getLogger("ditile")
WARM = ""
"""The id of the job of the warm-up picture."""
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
        self._kind, self._config = find_call_owner(self._pipe), dict(getattr(self._pipe, "config", {}))
        self._loras = LoraShelf(self._runner, setup.lora_dir, setup.max_loras)
        self._facts = collect_facts(self._pipe, setup.model, setup.plan)
        self._decoder = PreviewDecoder(find_latent_channels(self._pipe))
        self._answers = self._runner.mesh.rank == 0
        self._batches: queue.SimpleQueue[tuple[str, list[BatchJob]] | None] = queue.SimpleQueue()
        self._drawing: str | None = None

    def serve_batches(self) -> None:
        """Draws batches until the server says that this rank may leave.

        Raises:
            StateError: if the ranks cannot draw any more, as messages of a picture are still under way.
        """
        threading.Thread(target=self._receive_messages, daemon=True).start()
        self._draw_warm_picture()
        if self._answers:
            self._link.send_message({"ready": self._facts.to_json()})
        while (batch := self._wait_for_batch()) is not None:
            self._drawing, jobs = batch
            self._answer({"ended": {"stopped": self._draw_batch(jobs)}})
            self._drawing = None

    def _wait_for_batch(self) -> tuple[str, list[BatchJob]] | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._batches.get(timeout=IDLE_SECONDS)
            # Nothing hangs: there is nothing to do. The others would hide that rank 0 hangs behind a call.
            if self._answers:
                env.report_progress()

    def _receive_messages(self) -> None:
        with contextlib.ExitStack() as stack:
            # Whatever ends this thread lets the rank leave: it would hear nothing more.
            stack.callback(self._batches.put, None)
            stack.enter_context(contextlib.suppress(EOFError, OSError))
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

    def _draw_batch(self, jobs: Sequence[BatchJob]) -> bool:
        """Draws the jobs of a batch; returns whether it was stopped."""
        try:
            self._draw_jobs(jobs)
        except StoppedError:
            return True
        except DitileError as error:
            if self._runner.is_broken:
                raise
            if len(jobs) > 1:  # one of them is refused, and the others are not to suffer for it
                return any(self._draw_batch([job]) for job in jobs)
            self._refuse_job(jobs[0], error)
        return False

    def _refuse_job(self, job: BatchJob, error: Exception) -> None:
        message = " ".join(str(error).split())[:300]
        self._answer({"failed": {"code": "refused", "message": message}, "job": job.id})

    def _draw_jobs(self, jobs: Sequence[BatchJob]) -> None:
        kind = self._choose_class(jobs[0].request.options)
        self._pipe = self._runner.switch_pipeline(kind) if isinstance(kind, type) else self._pipe
        self._loras.use_loras(jobs[0].request.loras)
        wanted = [job.request.options for job in jobs]
        bases = [build_call_arguments(self._pipe, each, defaults(self._setup.model)) for each in wanted]
        check_cache_steps(self._setup.cache, bases[0])
        if self._facts.is_video:
            for job in jobs:
                check_encoder(Path(f"video.{job.request.output_format}"), job.request.options.fps)
        traced = self._runner.trace = bool(jobs[0].request.client.get("trace"))
        previews = self._plan_previews(jobs, bases[0])
        on_latents, latents_at = (previews.take_latents, previews.latents_at) if previews else (None, frozenset[int]())
        watch = StepWatch(on_step=self._note_step, on_latents=on_latents, latents_at=latents_at)
        with convert_value_errors(self._pipe):
            result = self._runner(**self._build_call(jobs, bases), output_on="first", watch=watch)
        reports, left_out = self._runner.reports(), self._summarize_cache()
        trace = self._collect_trace() if traced else {}
        if not self._answers:
            return
        drawn = list_drawn(result)
        self._fit_previews(previews, drawn)
        pictures, facts = iter(drawn), {"reports": reports, "left_out": left_out, "batch": len(jobs)}
        for job, base in zip(jobs, bases, strict=True):
            own = [next(pictures) for _ in list_seeds(job.request.options)]
            try:
                one, files = self._encode_job(job, base, own)
            except (ValueError, OSError) as error:  # such as a WebP of more pixels than that has
                self._refuse_job(job, error)
                continue
            self._answer({"drawn": asdict(replace(one, facts=facts)), "job": job.id}, files | trace)

    def _choose_class(self, wanted: GenerateOptions) -> Any:
        """The class of pipelines that draws from these conditions. Raises `ModelError` if there is none."""
        return choose_pipeline_class(self._kind, [*wanted.conditions], self._config)

    def _plan_previews(self, jobs: Sequence[BatchJob], base: Mapping[str, Any]) -> CallPreviews | None:
        """The previews of a call of one job, or what it teaches of latents; the same steps on every rank."""
        count, size = jobs[0].request.num_previews, find_call_size(self._facts, base)
        steps = count_steps(collect_call_facts(find_call_owner(self._pipe)), self._facts, base)
        if len(jobs) > 1 or size is None or steps == 0 or not (count or jobs[0].id == WARM):
            return None
        shown = [round((k + 1) * steps / (count + 1)) - 1 for k in range(count)]

        def send_preview(step: int, pictures: Sequence[Any]) -> None:
            if step in shown:
                png = encode_png(pictures[0], {})
                self._answer({"preview": shown.index(step), "job": jobs[0].id}, {"preview": png})

        # The last latents and the picture fit the map of the next previews.
        return CallPreviews(self._decoder, self._pipe.scheduler, {*shown, steps - 1} - {-1}, size, send_preview)

    def _fit_previews(self, previews: CallPreviews | None, drawn: Sequence[Any]) -> None:
        report = self._runner.report
        # Only the final latents are those of the picture.
        if previews is None or previews.last_latents is None or report is None:
            return
        if previews.last_step != report.steps - 1:
            return
        first = drawn[0] if isinstance(drawn[0], Image.Image) else [Image.fromarray(frame) for frame in drawn[0]]
        with contextlib.suppress(ModelError):  # latents of a layout of which there are no previews
            self._decoder.fit(previews.last_latents[:1], first)

    def _draw_warm_picture(self) -> None:
        """A picture that nobody asked for: it loads, allocates and compiles, and fits the map of previews."""
        is_cached = self._setup.cache.build_cache_arguments()["cache_config"] is not None
        steps = choose_warm_steps(self._setup.plan, is_cached=is_cached)
        prompt = self._facts.example or "a photo of a mountain lake in the morning"
        options = GenerateOptions(model=self._setup.model, prompt=prompt, steps=steps, seed=0)
        try:
            self._draw_jobs([BatchJob(WARM, Request(options=options), {})])
        except DitileError as error:
            if self._runner.is_broken:
                raise
            LOG.info("no warm-up picture: %s", error)

    def _note_step(self, step: int, num_steps: int) -> None:
        self._answer({"step": [step + 1, num_steps]})

    def _build_call(self, jobs: Sequence[BatchJob], bases: Sequence[dict[str, Any]]) -> dict[str, Any]:
        wanted = jobs[0].request.options
        if len(jobs) == 1:
            conditions = _decode_conditions(jobs[0])
            return bases[0] | build_object_arguments(self._pipe, wanted, list_seeds(wanted), conditions=conditions)
        options = [job.request.options for job in jobs]
        each = [base for base, one in zip(bases, options, strict=True) for _ in list_seeds(one)]
        return build_batch_call(self._pipe, each, wanted, [seed for one in options for seed in list_seeds(one)])

    def _summarize_cache(self) -> list[dict[str, Any]]:
        if self._setup.cache.build_cache_arguments()["cache_config"] is None:
            return []
        return summarize_cache_reports([summary(self._runner, logging=False)])

    def _collect_trace(self) -> dict[str, bytes]:
        """The Chrome trace of the last call, on rank 0; all ranks call it."""
        with tempfile.TemporaryDirectory(prefix="ditile-") as folder:
            path = Path(folder, "trace.json")
            self._runner.write_trace(path)
            return {"trace.json": path.read_bytes()} if self._answers else {}

    def _encode_job(
        self, job: BatchJob, base: dict[str, Any], pictures: Sequence[Any]
    ) -> tuple[Drawn, dict[str, bytes]]:
        """What is said of a job, and its files, as `ditile generate` writes them."""
        request, report = job.request, self._runner.report
        assert report is not None
        wanted = replace(request.options, model=self._setup.model)
        texts = build_png_texts(wanted, self._setup.plan, self._setup.cache, base, _decode_conditions(job))
        if request.loras:
            texts["loras"] = json.dumps(request.loras)
        fps, files, seeds = choose_fps(self._pipe, wanted, base), {}, list_seeds(wanted)
        names = [f"{k}.{request.output_format}" for k in range(len(pictures))]
        for name, seed, picture in zip(names, seeds, pictures, strict=True):
            own_texts = add_picture_texts(texts, self._pipe, base, wanted.prompt, seed, picture)
            format, quality = request.output_format, request.output_compression
            files[name], poster = encode_drawn(picture, format, quality, fps, own_texts)
            if poster is not None and POSTER not in files:
                files |= {POSTER: poster, SPRITESHEET: encode_spritesheet(picture)}
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

    def _answer(self, message: dict[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        if self._answers and self._drawing is not None:
            self._link.send_message({"batch": self._drawing} | message, files)


class LoraShelf:
    """The LoRAs that requests name, of which some stay loaded.

    Args:
        runner: into whose pipeline they are loaded; adapters that it has already are used in every call.
        folder: of the files; None without.
        most: how many stay loaded.
    """

    def __init__(self, runner: Runner, folder: str | None, most: int) -> None:
        self._runner, self._folder, self._most = runner, folder, most
        self._always = dict.fromkeys(list_loaded_loras(runner.pipe), 1.0)
        self._used: list[str] = []
        """Those that are loaded, the one that was used last at the end."""

    def use_loras(self, scales: Mapping[str, float]) -> None:
        """Uses these LoRAs in the next call, and no others of requests. All ranks call it.

        Raises:
            ModelError: on all ranks, if one of them cannot load one.
        """
        for name in scales:
            if name not in self._used:
                self._load_lora(name, keep=scales.keys())
            self._used.remove(name)
            self._used.append(name)
        if scales or self._used:
            adapters = {_name_adapter(name): scale for name, scale in scales.items()}
            select_loras(self._runner, {**self._always, **adapters})

    def _load_lora(self, name: str, keep: Collection[str]) -> None:
        assert self._folder is not None, "the server has refused the name"
        others = [each for each in self._used if each not in keep]
        if len(self._used) >= self._most and others:
            forget_loras(self._runner, [_name_adapter(others[0])])
            self._used.remove(others[0])
        complaint, path = None, str(Path(self._folder, f"{name}.safetensors"))
        try:
            load_lora_weights(self._runner.pipe, path, _name_adapter(name))
        except ModelError as error:
            # Clients are told no paths.
            complaint = str(error).replace(path, name)
        # A rank has a part of the model, and it alone may find that a LoRA does not fit.
        complaints = gather_json(complaint, self._runner.mesh.everyone)
        if any(complaints):
            if (adapter := _name_adapter(name)) in list_loaded_loras(self._runner.pipe):
                forget_loras(self._runner, [adapter])
            raise ModelError(next(filter(None, complaints)))
        self._used.append(name)


def _name_adapter(name: str) -> str:
    """The name of a LoRA's adapter; those of modules, which peft makes of it, have no points."""
    return f"lora_{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def find_latent_channels(pipe: Any) -> int | None:
    """The channels of the latents of a pipeline's VAE, if its config says so."""
    config = getattr(getattr(pipe, "vae", None), "config", None)
    found = next((getattr(config, name) for name in ("z_dim", "latent_channels") if hasattr(config, name)), None)
    return found if isinstance(found, int) else None


def find_call_size(facts: ModelFacts, base: Mapping[str, Any]) -> tuple[int, int] | None:
    """Width and height of the pictures of a call in pixels; None if nothing says them."""
    if not facts.size and not {"width", "height"} <= base.keys():
        return None
    width, height = facts.size or (0, 0)
    return base.get("width") or width, base.get("height") or height


def count_steps(call: CallFacts, facts: ModelFacts, base: Mapping[str, Any]) -> int:
    """How many steps a call of a class makes: fewer than it is told, if it starts from a picture."""
    steps = base.get("num_inference_steps") or call.defaults.get("num_inference_steps")
    steps = steps or facts.find_default("num_inference_steps") or 0
    strength = base.get("strength", call.defaults.get("strength"))
    return steps if strength is None else min(steps, int(steps * strength))


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


def _decode_conditions(job: BatchJob) -> dict[str, Any]:
    """What a job starts from: condition -> a picture, of `image` all pictures."""
    wanted, conditions = job.request.options, dict[str, Any]()
    pictures = {name: _decode_input(content) for name, content in job.inputs.items()}
    if wanted.image is not None:
        conditions["image"] = [pictures[name] for name in wanted.image]
    if wanted.mask is not None:
        conditions["mask"] = pictures[wanted.mask]
    return conditions


def _decode_input(content: bytes) -> Image.Image:
    """A picture that came with a job, in RGB. The server has checked and encoded it anew."""
    with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
        converted: Image.Image = picture.convert("RGB")
        return converted
