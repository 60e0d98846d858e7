"""The page: what it shows, what its buttons do, and its place in the server's app.

All of it runs in the server's event loop, by the service. Gradio reads environment variables when it is imported, so
that this module is imported after `env.set_page_variables`.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import html
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.routing import Match, Mount
from starlette.types import Scope

from ditile.plan.errors import DitileError
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import Plan
from ditile.plan.shape import FRAME_COUNTS
from ditile.serve.api.answers import (
    cancel_job_of_gone_client,
    check_done,
    convert_error,
    find_owner,
    find_served_name,
)
from ditile.serve.api.fields import ImageFields, VideoFields, list_own_values, parse_fields, read_request
from ditile.serve.api.uploads import Body
from ditile.serve.jobs import INPUT_IMAGE, TRACE, Files, Job, JobEvent, JobResult, Kind, Request
from ditile.serve.page import login
from ditile.serve.page.guard import PageBlocks, PageGuard
from ditile.serve.page.insight import render_insight
from ditile.serve.service import Service

# Before the name of an owner, as Gradio takes an empty name for none.
OWNER_MARK = "owner:"
MOST_SHOWN = 24
MOST_PREVIEWS = 8
# How long an uploaded file is kept at least.
UPLOAD_SECONDS = 60.0
NO_LORA = "none"
# Of a class that has no strength of its own.
DEFAULT_STRENGTH = 0.6
# Gradio gives rules of `CSS` the page's content as their scope, and the wide margins of a phone are outside of it.
HEAD = """<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">
<style>@media (max-width: 640px) {.gradio-container .main.app {padding: .5rem !important;}}</style>"""
CSS = """
.gradio-container {max-width: 1280px !important; margin: 0 auto;}
#now {min-height: 2.5rem;}
#now .bar {height: .5rem; border-radius: .25rem; background: var(--border-color-primary); overflow: hidden;}
#now .bar div {height: 100%; background: var(--color-accent);}
#now img {width: min(100%, 24rem); image-rendering: auto; border-radius: .5rem; margin-top: .5rem; display: block;}
#now .wrong {color: var(--error-text-color, #d33);}
#insight h3 {margin: 1rem 0 .25rem;}
#insight table {border-collapse: collapse; font-variant-numeric: tabular-nums;}
#insight table, #insight tr, #insight td, #insight th {border: none !important; background: none;}
#insight td, #insight th {text-align: left; padding: .15rem .75rem .15rem 0; vertical-align: top; font-weight: normal;}
#insight th, #insight p {opacity: .8; color: inherit;}
#insight {overflow-wrap: anywhere;}
#insight th {overflow-wrap: normal;}
#insight .scroll {overflow-x: auto; contain: inline-size;}
#insight svg {display: block;}
#insight svg text {fill: var(--body-text-color); font: 11px system-ui, sans-serif;}
#insight p {margin: .25rem 0;}
.gradio-container .prose, .gradio-container .prose code {overflow-wrap: anywhere; white-space: normal;}
#gallery .caption-label {max-width: 100%; overflow: hidden; text-overflow: ellipsis;}
#gallery .grid-wrap {max-height: 32rem;}
#gallery .grid-container > :only-child {width: 100%; max-width: 30rem; justify-self: center;}
@media (max-width: 640px) {.gradio-container {padding: .5rem !important;}}
"""
# Component -> its new value, or `gr.update(...)`.
Update = dict[Any, Any]
# Values of a hidden state: [job id, index of the image in the job, path of its file] of each image in the gallery.
Shown = list[list[Any]]


class PageMount(Mount):
    """The page, for the paths that it needs; the server's routes answer all others."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether a request is for the page."""
        if scope["type"] != "http" or not login.is_page_path(scope["path"]):
            return Match.NONE, {}
        return super().matches(scope)


def mount_page(app: FastAPI, service: Service, folder: Path) -> None:
    """Adds the page to an app, whose lifespan runs the page's queue; `folder` is for the files that it shows."""
    app.include_router(login.router, include_in_schema=False)
    blocks = Page(service, folder).build_blocks()
    # Fonts of the machine, as Gradio's own would come from other servers.
    theme = gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
    gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        auth_dependency=_name_user,
        max_file_size=service.options.max_body,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        show_error=False,
        theme=theme,
        css=CSS,
        head=HEAD,
        app_kwargs={"docs_url": None, "redoc_url": None},
    )
    # Gradio has mounted itself at the end of the routes.
    mounted = app.router.routes.pop()
    assert isinstance(mounted, Mount)
    app.router.routes.append(PageMount("", app=PageGuard(mounted.app, blocks)))


def _name_user(http: HttpRequest) -> str:
    return OWNER_MARK + find_owner(http)


class Page:
    """The page of a service.

    Args:
        service: that generates.
        folder: for the files that the page shows, one folder for each job.
    """

    def __init__(self, service: Service, folder: Path) -> None:
        self._service = service
        self._folder = folder

    def build_blocks(self) -> gr.Blocks:
        """The page as Gradio mounts it."""
        age = max(60, int(self._service.options.keep_results))
        blocks: PageBlocks
        with PageBlocks(title="ditile", analytics_enabled=False, delete_cache=(60, age)) as blocks:
            self._title = gr.Markdown("# ditile")
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    self._build_form()
                with gr.Column(scale=3, min_width=320):
                    self._build_results()
            with gr.Accordion("What ditile did", open=False):
                self._insight = gr.HTML("Generate something first.", elem_id="insight")
            self._wire_events(blocks)
        blocks.queue(default_concurrency_limit=None, api_open=False)
        return blocks

    def _build_form(self) -> None:
        # No limits here: the checks of the routes say what is wrong.
        self._prompt = gr.Textbox(label="Prompt", lines=3, autofocus=True)
        self._negative = gr.Textbox(label="Negative prompt", visible=False)
        with gr.Row():
            self._generate = gr.Button("Generate", variant="primary", min_width=120)
            self._cancel = gr.Button("Cancel", variant="stop", interactive=False, min_width=120)
        with gr.Accordion("Settings", open=True):
            with gr.Row():
                self._width = _build_number("Width")
                self._height = _build_number("Height")
            with gr.Row():
                self._steps = _build_number("Steps")
                self._count = _build_number("Images", value=1)
            with gr.Row():
                self._guidance = _build_number("Guidance", precision=None, visible=False)
                self._true_cfg = _build_number("True CFG", precision=None, visible=False)
            with gr.Row():
                self._frames = _build_number("Frames", visible=False)
                self._fps = _build_number("Frames a second", precision=None, visible=False)
            with gr.Row():
                self._seed = _build_number("Seed", value=0)
                self._random = gr.Checkbox(label="Random seed", value=True, min_width=100)
            with gr.Row():
                self._lora = gr.Dropdown([NO_LORA], value=NO_LORA, label="LoRA", visible=False, min_width=120)
                self._lora_scale = _build_number("LoRA's scale", value=1.0, precision=None, visible=False)
        with gr.Accordion("Start from an image", open=False, visible=False) as self._start:
            # With an image mode, Gradio would decode the file before the server has checked its size.
            self._image = gr.Image(
                label="Image", type="filepath", image_mode=None, sources=["upload", "clipboard"], height=240
            )
            self._strength = gr.Slider(0.05, 1, value=DEFAULT_STRENGTH, step=0.05, label="Strength", visible=False)
        # Field of a request -> its component.
        self._fields: dict[str, Any] = {
            "prompt": self._prompt,
            "negative_prompt": self._negative,
            "width": self._width,
            "height": self._height,
            "num_inference_steps": self._steps,
            "guidance_scale": self._guidance,
            "true_cfg_scale": self._true_cfg,
            "seed": self._seed,
            "n": self._count,
            "num_frames": self._frames,
            "fps": self._fps,
            "strength": self._strength,
        }

    def _build_results(self) -> None:
        self._now = gr.HTML("", elem_id="now")
        self._gallery = gr.Gallery(
            label="Gallery", columns=3, object_fit="contain", elem_id="gallery", buttons=["download", "fullscreen"]
        )
        self._chosen_text = gr.Markdown("")
        with gr.Row():
            self._again = gr.Button("Generate again", interactive=False, min_width=120)
            self._put_back = gr.Button("Put settings back", interactive=False, min_width=120)
            self._download = gr.DownloadButton("Download", interactive=False, min_width=120)
        # Per browser tab: the id of the running job, the gallery's images, and the index of the chosen one.
        self._running = gr.State("")
        self._shown = gr.State([])
        self._chosen = gr.State(-1)

    def _wire_events(self, blocks: gr.Blocks) -> None:
        form = {*self._fields.values(), self._random, self._lora, self._lora_scale, self._image}
        chosen = [self._shown, self._chosen]
        choice = [
            self._chosen,
            self._chosen_text,
            self._insight,
            self._again,
            self._put_back,
            self._download,
        ]
        progress = [self._now, self._running, self._generate, self._cancel]
        outputs = [*progress, self._gallery, self._shown, *choice]
        private: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        blocks.load(self._fill_page, None, [self._title, self._start, *form, *outputs], **private)
        gr.on(
            [self._generate.click, self._prompt.submit],
            self._generate_form,
            form,
            [*outputs, self._seed],
            trigger_mode="once",
            **private,
        )
        self._cancel.click(self._cancel_job, [self._running], [self._now], **private)
        self._gallery.select(self._choose_image, [self._shown], choice, **private)
        restored = [*form, self._start]
        self._put_back.click(self._restore_settings, chosen, restored, **private)
        self._again.click(self._restore_settings, chosen, restored, **private).then(
            self._generate_form, form, [*outputs, self._seed], **private
        )

    async def _fill_page(self, request: gr.Request) -> AsyncIterator[Update]:
        """When the page is opened: what the model takes, with its own values, and the images of this key."""
        if self._service.describe_health()["status"] != "ok":
            yield {self._now: "The ranks load the model ..", self._generate: gr.update(interactive=False)}
            try:
                await self._service.wait_until_ready()
            except DitileError as error:
                yield {self._now: _render_failure(error)}
                return
        facts = self._service.facts
        width, height = facts.size or (None, None)
        plan = "one rank" if Plan.parse(facts.plan) == Plan() else facts.plan
        guidance = facts.find_default("guidance_scale")
        true_cfg = None
        has_true_cfg = "true_cfg_scale" in facts.call.defaults
        # Where true CFG is the model's own way of guidance, one field is enough.
        if "true_cfg_scale" in facts.base:
            guidance = facts.find_default("true_cfg_scale")
            has_true_cfg = False
        if has_true_cfg:
            true_cfg = facts.find_default("true_cfg_scale")
        negative = facts.find_default("negative_prompt") or ""
        loras = await asyncio.to_thread(self._service.options.list_lora_names, facts)
        yield {
            self._title: f"# ditile\n{find_served_name(facts.name)} · {plan}",
            self._now: "",
            self._generate: gr.update(interactive=True),
            self._prompt: gr.update(value=facts.example),
            self._negative: gr.update(visible=facts.takes("negative_prompt"), placeholder=negative),
            self._width: gr.update(value=width, step=facts.size_multiple),
            self._height: gr.update(value=height, step=facts.size_multiple),
            self._steps: facts.find_default("num_inference_steps"),
            self._count: gr.update(visible=not facts.is_video),
            self._guidance: gr.update(value=guidance, visible=guidance is not None),
            self._true_cfg: gr.update(value=true_cfg, visible=has_true_cfg),
            self._frames: gr.update(value=facts.find_default(*FRAME_COUNTS), visible=facts.is_video),
            self._fps: gr.update(value=facts.fps, visible=facts.is_video),
            self._lora: gr.update(choices=[NO_LORA, *loras], visible=bool(loras)),
            self._lora_scale: gr.update(visible=bool(loras)),
            self._start: gr.update(visible=facts.edit is not None, open=facts.needs_picture),
            self._strength: gr.update(value=self._own_strength, visible=facts.takes("strength")),
            **await self._show_gallery(find_page_owner(request)),
        }

    @property
    def _own_strength(self) -> float:
        """Of the model's class that starts from an image."""
        return float(list_own_values(self._service.facts).get("strength", DEFAULT_STRENGTH))

    async def _generate_form(self, values: Update, request: gr.Request) -> AsyncIterator[Update]:
        """Generates what the form says; a page that is closed meanwhile ends it."""
        owner = find_page_owner(request)
        service = self._service
        idle = {
            self._running: "",
            self._generate: gr.update(interactive=True),
            self._cancel: gr.update(interactive=False),
        }
        kind: Kind = "video" if service.facts.is_video else "image"
        try:
            job_request, inputs = await self._read_form(values)
            job = await service.submit(kind, owner, job_request, inputs)
        except DitileError as error:
            yield {**idle, self._now: _render_failure(error)}
            return
        yield {
            self._running: job.id,
            self._seed: job_request.options.seed,
            self._generate: gr.update(interactive=False),
            self._cancel: gr.update(interactive=True),
            self._now: render_progress(JobEvent(job=job), ""),
        }
        preview = ""
        try:
            async for event in service.watch(job.id):
                job = event.job
                if event.preview is not None:
                    preview = base64.b64encode(event.preview).decode("ascii")
                if not job.has_ended:
                    yield {self._now: render_progress(event, preview)}
        finally:
            if not job.has_ended:
                await cancel_job_of_gone_client(service, job)
        if job.state == "cancelled":
            yield {**idle, self._now: '<p role="status">Cancelled.</p>'}
            return
        try:
            result = check_done(job)
        except DitileError as error:
            yield {**idle, self._now: _render_failure(error)}
            return
        warnings = html.escape(" ".join(job.request.client["warnings"]))
        seconds = result.seconds.get("total", 0.0)
        done = f'<p role="status">Generated in {seconds:.2f} s. {warnings}</p>'
        yield {**idle, self._now: done, **await self._show_gallery(owner)}

    async def _read_form(self, values: Update) -> tuple[Request, Files]:
        """The request of the form, and its input files. Raises `DitileError` if it cannot be generated."""
        facts = self._service.facts
        body = Body()
        for name, component in self._fields.items():
            body.values[name] = values[component]
        if values[self._image]:
            body.images.append(await asyncio.to_thread(Path(values[self._image]).read_bytes))
        # Hidden fields still have their values.
        hidden = ["n"] if facts.is_video else ["num_frames", "fps"]
        if not body.images or not facts.takes("strength"):
            hidden.append("strength")
        if values[self._random]:
            hidden.append("seed")
        for name in hidden:
            del body.values[name]
        if values[self._lora] != NO_LORA:
            scale = values[self._lora_scale]
            # The field is empty where the user has cleared it.
            if scale is None:
                scale = 1.0
            body.values["lora"] = {values[self._lora]: scale}
        fields_class: type[VideoFields] | type[ImageFields] = VideoFields if facts.is_video else ImageFields
        fields = parse_fields(fields_class, body.values, facts)
        request, inputs = await read_request(self._service, fields, body)
        steps = request.options.steps or facts.find_default("num_inference_steps") or 0
        num_previews = min(MOST_PREVIEWS, max(0, steps - 1))
        request.client["trace"] = True
        return dataclasses.replace(request, num_previews=num_previews), inputs

    async def _cancel_job(self, job_id: str, request: gr.Request) -> Update:
        """Cancels the job that runs; the handler that watches it updates the page."""
        if job_id:
            try:
                await self._service.cancel(job_id, find_page_owner(request))
            except DitileError as error:
                return {self._now: _render_failure(error)}
        return {self._now: gr.skip()}

    async def _choose_image(self, shown: Shown, event: gr.SelectData, request: gr.Request) -> Update:
        """Shows the settings of an image of the gallery, and what was done for it."""
        return await self._describe_choice(shown, int(event.index), find_page_owner(request))

    async def _describe_choice(self, shown: Shown, index: int, owner: str) -> Update:
        off = gr.update(interactive=False)
        on = gr.update(interactive=True)
        nothing = {self._chosen: -1, self._chosen_text: "", self._again: off, self._put_back: off}
        if not 0 <= index < len(shown):
            return nothing | {self._download: off}
        job_id, number, path = shown[index]
        try:
            job = self._service.find_job(job_id, owner)
            trace: JsonObject = {}
            if job.request.client.get("trace"):
                trace = json.loads(await asyncio.to_thread(self._service.read_output, job, TRACE))
        except DitileError as error:
            return nothing | {self._chosen_text: f"This image is not kept any more: {convert_error(error).message}"}
        return {
            self._chosen: index,
            self._chosen_text: _describe_settings(job, check_done(job), number),
            self._again: on,
            self._put_back: on,
            self._download: gr.update(value=path, interactive=True),
            self._insight: render_insight(job, self._service.describe_plan(), trace),
        }

    async def _restore_settings(self, shown: Shown, index: int, request: gr.Request) -> Update:
        """Puts the settings of the chosen image into the form."""
        try:
            job_id, number, _ = shown[index]
            job = self._service.find_job(job_id, find_page_owner(request))
        except (DitileError, IndexError):
            return {self._prompt: gr.skip()}
        options = job.request.options
        result = check_done(job)
        width, height = result.size
        image = None
        if options.image is not None:
            image = await self._save_file(job, INPUT_IMAGE, "image.png")
        strength = options.strength
        if strength is None:
            strength = self._own_strength
        # The form has room for one.
        lora, scale = next(iter(job.request.loras.items()), (NO_LORA, 1.0))
        return {
            self._prompt: options.prompt,
            self._negative: options.negative_prompt or "",
            self._width: width,
            self._height: height,
            self._steps: options.steps,
            self._guidance: options.guidance,
            self._true_cfg: options.true_cfg,
            self._seed: result.seeds[number],
            self._random: False,
            self._count: 1,
            self._frames: options.frames,
            self._fps: options.fps,
            self._strength: strength,
            self._lora: lora,
            self._lora_scale: scale,
            self._image: image,
            self._start: gr.update(open=image is not None),
        }

    async def _show_gallery(self, owner: str) -> Update:
        """The gallery of an owner, the newest first and chosen."""
        facts = self._service.facts
        await asyncio.to_thread(self._remove_expired)
        items: list[tuple[str, str]] = []
        shown: Shown = []
        model = find_served_name(facts.name).replace("/", "-")
        kind: Kind = "video" if facts.is_video else "image"
        for job in self._service.list_jobs(owner, kind, limit=4 * MOST_SHOWN):
            if job.result is None:
                continue
            width, height = job.result.size
            for number, (name, seed) in enumerate(zip(job.result.files, job.result.seeds, strict=True)):
                if len(items) == MOST_SHOWN:
                    break
                title = f"{model}-{seed}{Path(name).suffix}"
                path = await self._save_file(job, name, title)
                if path is not None:
                    items.append((path, f"seed {seed} · {width}x{height}"))
                    shown.append([job.id, number, path])
        newest = await self._describe_choice(shown, 0, owner)
        return {self._gallery: gr.update(value=items, selected_index=None), self._shown: shown, **newest}

    async def _save_file(self, job: Job, name: str, title: str) -> str | None:
        """Path of a job's file in the folder of the page; None if it is not kept any more.

        The id of a job cannot be guessed, and so not the path either, by which a browser gets the file.
        """
        path = self._folder / job.id / title
        if not path.exists():
            try:
                content = await asyncio.to_thread(self._service.read_output, job, name)
            except DitileError:
                return None
            path.parent.mkdir(exist_ok=True)
            await asyncio.to_thread(path.write_bytes, content)
        return str(path)

    def _remove_expired(self) -> None:
        """Removes the files of jobs that are not kept any more, and aborted uploads, which Gradio leaves."""
        for folder in self._folder.glob("*_*"):
            try:
                self._service.find_job(folder.name, None)
            except DitileError:
                shutil.rmtree(folder, ignore_errors=True)
        oldest = time.time() - max(UPLOAD_SECONDS, self._service.options.keep_results)
        for path in self._folder.glob("tmp*"):
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def find_page_owner(request: gr.Request) -> str:
    """The owner of the key with which the page was opened."""
    name = request.username or ""
    assert name.startswith(OWNER_MARK), "every request passes the gate"
    return name.removeprefix(OWNER_MARK)


def render_progress(event: JobEvent, preview: str) -> str:
    """How far a job is, with its last preview as base64 of a PNG."""
    percent = event.job.progress
    text = "Begins .."
    if event.num_steps:
        percent = 100 * event.step // event.num_steps
        text = f"Step {event.step} of {event.num_steps}"
    elif event.job.state == "queued":
        text = "Waits for its turn .."
    image = ""
    if preview:
        image = f'<img alt="preview" src="data:image/png;base64,{preview}">'
    return f'<p role="status">{text}</p><div class="bar"><div style="width:{percent}%"></div></div>{image}'


def _render_failure(error: DitileError) -> str:
    return f'<p class="wrong" role="alert">{html.escape(convert_error(error).message)}</p>'


def _describe_settings(job: Job, result: JobResult, number: int) -> str:
    options = job.request.options
    loras = [f"{name} {scale:g}" for name, scale in job.request.loras.items()]
    settings = {
        "seed": result.seeds[number],
        "size": "{}x{}".format(*result.size),
        "steps": result.num_steps,
        "guidance": options.guidance,
        "true CFG": options.true_cfg,
        "strength": options.strength,
        "frames": result.frames or None,
        "LoRA": ", ".join(loras) or None,
        "seconds": f"{result.seconds.get('total', 0.0):.2f}",
    }
    parts = [f"{name} {value}" for name, value in settings.items() if value is not None]
    text = " · ".join(parts)
    # As code, so that nothing of a prompt is markup.
    prompt = " ".join((options.prompt or "").replace("`", "'").split())
    return f"`{prompt[:300]}`\n\n{text}"


def _build_number(label: str, precision: int | None = 0, value: float | None = None, **options: Any) -> gr.Number:
    return gr.Number(label=label, value=value, precision=precision, min_width=100, **options)
