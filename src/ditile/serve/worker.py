"""A rank of the server: it loads and splits the model once, and then generates one batch after another.

Every rank gets every message of the server in the same order, so that no rank waits in a collective while there is
nothing to do. Only rank 0 answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import queue
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ditile.cache.report import summarize_cache_reports
from ditile.distributed import env
from ditile.distributed.transport import gather_json
from ditile.model.pipeline_calls import describe_cut_prompts, find_call_owner
from ditile.plan.errors import DitileError, ModelError, StoppedError
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.runner.caching import summary
from ditile.runner.callbacks import StepWatch
from ditile.runner.lora import forget_loras, list_loaded_loras, load_lora, select_loras
from ditile.runner.model_files import defaults
from ditile.runner.requests.arguments import (
    build_batch_call,
    build_call_arguments,
    build_object_arguments,
)
from ditile.runner.requests.facts import collect_call_facts, collect_facts
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pictures import describe_weight_files, encode_png
from ditile.runner.requests.pipeline_choice import choose_pipeline_class
from ditile.runner.requests.pipelines import convert_value_errors
from ditile.runner.requests.preflight import check_cache_steps
from ditile.runner.requests.prepare import choose_warm_steps, prepare_runner
from ditile.runner.requests.results import (
    add_picture_texts,
    build_png_texts,
    choose_fps,
    describe_settings,
    encode_drawn,
    list_outputs,
)
from ditile.runner.requests.videos import check_encoder, encode_spritesheet
from ditile.runner.runner import Runner
from ditile.runner.sounds import Sound
from ditile.serve.cache_switch import CacheSwitch
from ditile.serve.jobs import POSTER, SPRITESHEET, Files, JobResult, Request, shorten_line
from ditile.serve.link import Batch, BatchJob, Message, MessageLink, WorkerSetup
from ditile.serve.options import FOR_SECOND
from ditile.serve.previews import CallPreviews, PreviewDecoder

LOG = logging.getLogger("ditile")
# The warm-up makes at most this many calls. Work done once per image is first met, then recorded, and then replayed.
MAX_WARM_CALLS = 3
# The warm-up job has the empty id.
WARM_UP = ""
# Seconds between signs of life of an idle rank, well below the limit for a hanging rank.
IDLE_SECONDS = 5.0


class RankWorker:
    """A rank with its runner."""

    def __init__(self, setup: WorkerSetup, link: MessageLink) -> None:
        options = setup.options
        self._setup = setup
        self._link = link
        self._pipe, self._runner = prepare_runner(
            options.model, options, setup.plan, setup.cache, components=options.components
        )
        self._pipe.set_progress_bar_config(disable=True)
        self._cache_switch = CacheSwitch(self._runner, setup)
        # The class of the loaded pipeline, or a modular pipeline. Requests with conditions switch to related classes.
        self._class = find_call_owner(self._pipe)
        self._config = dict(getattr(self._pipe, "config", {}))
        self._loras = LoraCache(self._runner, setup)
        self._facts = collect_facts(self._pipe, options.model, setup.plan)
        self._facts = replace(self._facts, components=describe_weight_files(options.components))
        config = getattr(getattr(self._pipe, "vae", None), "config", {})
        channels = config.get("z_dim", config.get("latent_channels"))
        self._decoder = PreviewDecoder(channels)
        self._is_first = self._runner.mesh.rank == 0
        self._running_id: str | None = None

    def serve(self) -> None:
        """Generate batches until the server dismisses this rank.

        Raises `StateError` if the ranks cannot go on, because messages of a call are still in flight.
        """
        inbox = Inbox(self._link, reports=self._is_first, stop=self._stop_batch)
        self._warm_up()
        if self._is_first:
            self._link.send_message({"kind": "ready", "facts": self._facts.to_json()})
        while (message := inbox.wait()) is not None:
            batch = Batch.from_message(*message)
            self._running_id = batch.id
            with contextlib.suppress(StoppedError):
                self._generate_batch(batch.jobs)
            self._answer("ended")
            self._running_id = None

    def _stop_batch(self, batch_id: str) -> None:
        # The server repeats this until the batch has ended, because its call may not have begun yet.
        if batch_id == self._running_id:
            self._runner.stop()

    def _generate_batch(self, jobs: Sequence[BatchJob]) -> None:
        """Generate the jobs of a batch. Raises `StoppedError` if it was stopped."""
        try:
            self._generate_jobs(jobs)
        except StoppedError:
            raise
        except DitileError as error:
            if self._runner.is_broken:
                raise
            if len(jobs) == 1:
                self._refuse_job(jobs[0], error)
                return
            # Each job is run alone, so that only the job at fault is refused.
            for job in jobs:
                self._generate_batch([job])

    def _refuse_job(self, job: BatchJob, error: Exception) -> None:
        code = "refused"
        message = shorten_line(error)
        num_computed = job.request.computed_steps
        # Errors not about a value of the request are only for the log.
        if not isinstance(error, ValueError):
            LOG.error("job %s: %s", job.id, error)
            code = "internal"
            message = "the ranks could not do this; the server's log says why"
        # A cache calls this value `steps`, which the API would rename to num_inference_steps.
        elif num_computed is not None:
            message = re.sub(rf"^steps={num_computed}\b", f"computed_steps={num_computed}", message)
        self._answer("failed", job_id=job.id, failure={"code": code, "message": message})

    def _generate_jobs(self, jobs: Sequence[BatchJob]) -> None:
        first_request = jobs[0].request
        pipeline_class = choose_pipeline_class(self._class, [*first_request.options.conditions], self._config)
        if isinstance(pipeline_class, type):
            self._pipe = self._runner.switch_pipeline(pipeline_class)
        self._loras.use_loras(first_request.loras)
        promise = self._cache_switch.install_for_job(jobs[0])
        own_values = defaults(self._setup.options.model)
        calls = []
        for job in jobs:
            options = job.request.options
            calls.append(build_call_arguments(self._pipe, options, own_values))
            if self._facts.is_video:
                check_encoder(Path(f"video.{job.request.output_format}"), options.fps)
        if not self._cache_switch.is_replaced:
            check_cache_steps(self._setup.cache, calls[0])
        previews = self._plan_previews(jobs, calls[0])
        watch = StepWatch(on_step=lambda step, count: self._answer("step", step=step + 1, num_steps=count))
        if previews is not None:
            watch = replace(watch, on_latents=previews.take_latents, latents_at=previews.latents_at)
        with convert_value_errors(self._pipe):
            result = self._runner(**self._build_call(jobs, calls), output_on="first", watch=watch)
        left_out: list[JsonObject] = []
        if self._cache_switch.has_cache:
            left_out = summarize_cache_reports([summary(self._runner, logging=False)])
        # Gathered before the other ranks return, since every rank must take part.
        facts = {
            "reports": self._runner.reports(),
            "left_out": left_out,
            "batch": len(jobs),
            "promise": promise,
        }
        if not self._is_first:
            return
        outputs = list_outputs(self._pipe, result)
        if previews is not None:
            self._fit_previews(previews, outputs[0][0])
        remaining = iter(outputs)
        for job, call in zip(jobs, calls, strict=True):
            seeds = list_request_seeds(job.request.options)
            own_outputs = [next(remaining) for _ in seeds]
            try:
                job_result, files = self._encode_job(job, call, own_outputs, facts)
            except (ValueError, OSError) as error:
                # For instance a WebP has more pixels than the format allows.
                self._refuse_job(job, error)
            else:
                self._answer("done", files, job_id=job.id, result=asdict(job_result))

    def _plan_previews(self, jobs: Sequence[BatchJob], call: CallArguments) -> CallPreviews | None:
        """Return the previews for the call of one job, at the same steps on every rank; None without previews."""
        job = jobs[0]
        num_previews = job.request.num_previews
        # The warm-up call shows no previews, but its image is the first that the preview decoder is fitted to.
        if len(jobs) > 1 or not (num_previews or job.id == WARM_UP):
            return None
        own_values = collect_call_facts(find_call_owner(self._pipe)).defaults
        steps = call.get("num_inference_steps") or own_values.get("num_inference_steps")
        steps = steps or self._facts.find_default("num_inference_steps") or 0
        # A call that starts from an image leaves out the first steps.
        strength = call.get("strength", own_values.get("strength"))
        if strength is not None:
            steps = min(steps, int(steps * strength))
        own_width, own_height = self._facts.size or (None, None)
        width = call.get("width") or own_width
        height = call.get("height") or own_height
        if width is None or height is None or steps == 0:
            return None
        # The previews divide the steps (counted from 0) evenly, and the last one comes before the last step.
        num_parts = num_previews + 1
        preview_steps = [round(number * steps / num_parts) - 1 for number in range(1, num_parts)]

        def send_preview(step: int, image: Image.Image) -> None:
            if step in preview_steps:
                png = encode_png(image, {})
                self._answer("preview", {"preview": png}, job_id=job.id, step=preview_steps.index(step))

        # The decoder is fitted to the image and the last latents. With few steps `preview_steps` may contain -1.
        observed_steps = {*preview_steps, steps - 1} - {-1}
        return CallPreviews(self._decoder, self._pipe.scheduler, observed_steps, (width, height), send_preview)

    def _fit_previews(self, previews: CallPreviews, output: Any) -> None:
        report = self._runner.report
        # The map is fitted only to final latents, since only these belong to the image.
        if previews.last_latents is None or report is None or previews.last_step != report.steps - 1:
            return
        if not isinstance(output, Image.Image):
            output = [Image.fromarray(frame) for frame in output]
        # Latents of an unknown layout have no previews.
        with contextlib.suppress(ModelError):
            self._decoder.fit(previews.last_latents[:1], output)

    def _warm_up(self) -> None:
        """Generate a first image, to trigger loading, allocation and compilation, and to fit the preview decoder."""
        num_preparing_steps = self._runner.num_preparing_steps
        is_cached = self._cache_switch.has_cache
        steps = choose_warm_steps(self._setup.plan, is_cached=is_cached, num_preparing_steps=num_preparing_steps)
        prompt = self._facts.example or "a photo of a mountain lake in the morning"
        options = GenerateOptions(model=self._setup.options.model, prompt=prompt, steps=steps, seed=0)
        try:
            for _ in range(MAX_WARM_CALLS):
                self._generate_jobs([BatchJob(WARM_UP, Request(options=options))])
                # Calls that occur once in an image, as in its last step, are recorded only in a later image.
                num_recorded = 0
                for report in self._runner.reports():
                    num_recorded += (report["recorded"] or {}).get("recorded", 0)
                if not num_recorded:
                    return
        except DitileError as error:
            if self._runner.is_broken:
                raise
            LOG.info("no warm-up image: %s", error)

    def _build_call(self, jobs: Sequence[BatchJob], calls: Sequence[CallArguments]) -> CallArguments:
        """Build the arguments of one call for all jobs."""
        options = jobs[0].request.options
        if len(jobs) == 1:
            conditions = _decode_conditions(jobs[0])
            seeds = list_request_seeds(options)
            # A call of one job may start from images; a call of several jobs may not.
            return calls[0] | build_object_arguments(self._pipe, options, seeds, conditions=conditions)
        # A row for each image of each job.
        rows = []
        seeds = []
        for job, call in zip(jobs, calls, strict=True):
            for seed in list_request_seeds(job.request.options):
                rows.append(call)
                seeds.append(seed)
        return build_batch_call(self._pipe, rows, options, seeds)

    def _encode_job(
        self,
        job: BatchJob,
        call: CallArguments,
        outputs: Sequence[tuple[Any, Sound | None]],
        facts: JsonObject,
    ) -> tuple[JobResult, Files]:
        """Return the job's result, which holds `facts`, and its files as `ditile generate` writes them."""
        request = job.request
        report = self._runner.report
        assert report is not None, "a call has ended"
        options = replace(request.options, model=self._setup.options.model)
        conditions = _decode_conditions(job)
        texts = build_png_texts(options, self._setup.plan, self._setup.cache, call, conditions, facts["promise"])
        if self._facts.components:
            texts["components"] = json.dumps(self._facts.components)
        if request.loras:
            texts["loras"] = json.dumps(request.loras)
        settings = describe_settings(self._pipe, call, texts)
        fps = choose_fps(self._pipe, options, call)
        seeds = list_request_seeds(options)
        names = [f"{index}.{request.output_format}" for index in range(len(outputs))]
        files = {}
        for name, seed, (output, sound) in zip(names, seeds, outputs, strict=True):
            own_texts = add_picture_texts(texts, settings, options.prompt, seed, output)
            quality = request.output_compression
            content, poster = encode_drawn(output, request.output_format, quality, fps, own_texts, sound)
            files[name] = content
            if poster is not None and POSTER not in files:
                files[POSTER] = poster
                files[SPRITESHEET] = encode_spritesheet(output)
        if POSTER in files:
            # A video is an array [frames, height, width, 3].
            frames, height, width = outputs[0][0].shape[:3]
        else:
            width, height = outputs[0][0].size
            frames = 0
            fps = 0.0
        cut = describe_cut_prompts(self._pipe, call)
        result = JobResult(
            files=names,
            seeds=seeds,
            size=(int(width), int(height)),
            seconds=dict(report.seconds),
            num_steps=report.steps,
            frames=frames,
            fps=fps,
            facts=facts,
            warnings=[] if cut is None else [cut],
        )
        return result, files

    def _answer(self, kind: str, files: Files | None = None, **values: Any) -> None:
        """Send the server an event of the running batch. `values` are its fields as JSON types."""
        # Nobody waits for the warm-up image, which belongs to no batch.
        if self._is_first and self._running_id is not None:
            self._link.send_message({"kind": kind, "batch_id": self._running_id, **values}, files)


class Inbox:
    """The server's messages to a rank, which a thread receives while the rank computes.

    Args:
        reports: whether the rank reports progress while it waits. Only rank 0 does, since reports of the others would
            hide that rank 0 hangs.
        stop: called in the thread with the id of a batch that the server stops.
    """

    def __init__(self, link: MessageLink, *, reports: bool, stop: Callable[[str], None] | None = None) -> None:
        self._link = link
        self._reports = reports
        self._stop = stop
        self._messages: queue.SimpleQueue[tuple[Message, Files] | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive_messages, daemon=True).start()

    def wait(self) -> tuple[Message, Files] | None:
        """Return the next message and its files; None if the server dismisses the rank or has gone."""
        while True:
            try:
                return self._messages.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if self._reports:
                    env.report_progress()

    def _receive_messages(self) -> None:
        with contextlib.ExitStack() as stack:
            # Whatever ends this thread, the rank leaves, since it would receive no more messages.
            stack.callback(self._messages.put, None)
            stack.enter_context(contextlib.suppress(EOFError, OSError))
            while True:
                message, files = self._link.receive_message()
                if "leave" in message:
                    return
                if "stop" in message:
                    assert self._stop is not None
                    self._stop(message["stop"])
                else:
                    self._messages.put((message, files))


class LoraCache:
    """The LoRAs of requests, some of which stay loaded in the pipeline of a runner."""

    def __init__(self, runner: Runner, setup: WorkerSetup) -> None:
        self._runner = runner
        self._folder = setup.options.lora_dir
        self._max_loras = setup.options.max_loras
        # LoRAs that are fused are part of the weights.
        self._permanent = {} if setup.cache.fuse_lora else setup.cache.lora_scales
        # Names of the loaded LoRAs, the most recently used one last.
        self._loaded: list[str] = []

    def use_loras(self, scales: Mapping[str, float]) -> None:
        """Use these LoRAs in the next call. Raises `ModelError` on all ranks if one rank cannot load a LoRA."""
        for name in scales:
            if name not in self._loaded:
                self._load_lora(name, scales.keys())
            # Moved to the end, as the most recently used one.
            self._loaded.remove(name)
            self._loaded.append(name)
        adapters = {_name_adapter(name): scale for name, scale in scales.items()}
        # Needed even without any LoRA, since a LoRA that was refused may have changed the active ones.
        select_loras(self._runner, {**self._permanent, **adapters})

    def _load_lora(self, name: str, requested: Collection[str]) -> None:
        assert self._folder is not None, "the server has refused the name"
        removable = [loaded for loaded in self._loaded if loaded not in requested]
        if len(self._loaded) >= self._max_loras and removable:
            forget_loras(self._runner, [_name_adapter(removable[0])])
            self._loaded.remove(removable[0])
        path = str(Path(self._folder, f"{name.removeprefix(FOR_SECOND)}.safetensors"))
        adapter = _name_adapter(name)
        # If no LoRA is for the second transformer, None makes the log say that it gets none.
        into_second = None
        if any(lora.startswith(FOR_SECOND) for lora in requested):
            into_second = name.startswith(FOR_SECOND)
        complaint = None
        try:
            load_lora(self._runner.pipe, path, adapter_name=adapter, load_into_transformer_2=into_second)
        except ModelError as error:
            # Clients must not learn local paths.
            complaint = str(error).replace(path, name)
        # Each rank has a part of the model, so a single rank may find that a LoRA does not fit.
        complaints = [text for text in gather_json(complaint, self._runner.mesh.everyone) if text]
        if complaints:
            if adapter in list_loaded_loras(self._runner.pipe):
                forget_loras(self._runner, [adapter])
            raise ModelError(complaints[0])
        self._loaded.append(name)


def _name_adapter(name: str) -> str:
    # peft builds names of modules from the adapter's name, and these must not contain dots.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"lora_{digest[:16]}"


def list_request_seeds(options: GenerateOptions) -> list[int]:
    """Return the seeds of a request's images."""
    assert options.seed is not None, "the server has chosen one"
    return list(range(options.seed, options.seed + options.num_images))


def _decode_conditions(job: BatchJob) -> dict[str, Any]:
    """Decode the inputs of a job: condition -> an image, or a list of images for `image`."""
    images = {}
    for name, content in job.inputs.items():
        # The server has checked the upload, and encoded it again as PNG.
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            images[name] = image.convert("RGB")
    options = job.request.options
    conditions: dict[str, Any] = {}
    if options.image is not None:
        conditions["image"] = [images[name] for name in options.image]
    if options.mask is not None:
        conditions["mask"] = images[options.mask]
    return conditions
