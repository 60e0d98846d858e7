"""The page: what it shows, and what its buttons do. All of it runs in the server's event loop, by the service."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import html
import json
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from ditile.plan.errors import DitileError
from ditile.plan.plan import Plan
from ditile.plan.shape import FRAME_COUNTS
from ditile.serve.api.answers import cancel_job_of_gone_client, check_done, convert_error, find_served_name
from ditile.serve.api.fields import ImageFields, Order, VideoFields, list_own_values, parse_fields, read_order
from ditile.serve.api.uploads import Body
from ditile.serve.jobs import INPUT_IMAGE, Job, JobEvent, Kind
from ditile.serve.page.guard import PageBlocks
from ditile.serve.page.insight import TRACE, render_insight
from ditile.serve.page.mount import OWNER_MARK
from ditile.serve.service import Service

MOST_SHOWN = 24
MOST_PREVIEWS = 8
UPLOAD_SECONDS = 60.0
"""How long a file that is uploaded is kept at least."""
NO_LORA = "none"
DEFAULT_STRENGTH = 0.6
"""Of a class that has no strength of its own."""
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
Update = dict[Any, Any]
"""Component -> its new value, or `gr.update(...)`."""


def build_theme() -> gr.themes.Base:
    """Gradio's own colours with the fonts of the machine, as other fonts would come from other servers."""
    sans = ("system-ui", "sans-serif")
    mono = ("ui-monospace", "monospace")
    return gr.themes.Default(font=sans, font_mono=mono)


class Page:
    """The page of a service.

    Args:
        service: that draws.
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
                self._insight = gr.HTML("Draw something first.", elem_id="insight")
            self._wire_events(blocks)
        blocks.queue(default_concurrency_limit=None, api_open=False)
        return blocks

    def _build_form(self) -> None:
        # Without limits of their own: what is wrong is said by the checks that the routes have too.
        self._prompt = gr.Textbox(label="Prompt", lines=3, autofocus=True)
        self._negative = gr.Textbox(label="Negative prompt", visible=False)
        with gr.Row():
            self._draw = gr.Button("Draw", variant="primary", min_width=120)
            self._cancel = gr.Button("Cancel", variant="stop", interactive=False, min_width=120)
        with gr.Accordion("Settings", open=True):
            with gr.Row():
                self._width = _build_number("Width")
                self._height = _build_number("Height")
            with gr.Row():
                self._steps = _build_number("Steps")
                self._count = _build_number("Pictures", value=1)
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
                names = [NO_LORA, *sorted(self._service.options.find_lora_files())]
                shown = len(names) > 1
                self._lora = gr.Dropdown(names, value=NO_LORA, label="LoRA", visible=shown, min_width=120)
                self._lora_scale = _build_number("LoRA's scale", value=1.0, precision=None, visible=shown)
        with gr.Accordion("Start from a picture", open=False, visible=False) as self._start:
            # Without a mode it is not decoded before the server has looked at its size.
            self._image = gr.Image(
                label="Picture", type="filepath", image_mode=None, sources=["upload", "clipboard"], height=240
            )
            self._strength = gr.Slider(0.05, 1, value=DEFAULT_STRENGTH, step=0.05, label="Strength", visible=False)

    def _build_results(self) -> None:
        self._now = gr.HTML("", elem_id="now")
        self._gallery = gr.Gallery(
            label="Gallery", columns=3, object_fit="contain", elem_id="gallery", buttons=["download", "fullscreen"]
        )
        self._chosen_text = gr.Markdown("")
        with gr.Row():
            self._again = gr.Button("Draw again", interactive=False, min_width=120)
            self._put_back = gr.Button("Put settings back", interactive=False, min_width=120)
            self._download = gr.DownloadButton("Download", interactive=False, min_width=120)
        self._running = gr.State("")
        self._shown = gr.State([])
        self._chosen = gr.State(-1)

    @property
    def _form(self) -> dict[str, Any]:
        """Field of a request -> its component."""
        return {
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

    def _wire_events(self, blocks: gr.Blocks) -> None:
        form = {*self._form.values(), self._random, self._lora, self._lora_scale, self._image}
        results = [self._gallery, self._shown, self._chosen, self._chosen_text, self._insight]
        choice = [self._chosen, self._chosen_text, self._insight, self._again, self._put_back, self._download]
        now = [self._now, self._running, self._draw, self._cancel]
        every: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        blocks.load(self._fill_page, None, [self._title, self._start, *form, *now, *results, *choice[3:]], **every)
        drawing = [now[0], *now[1:], *results, *choice[3:], self._seed]
        gr.on([self._draw.click, self._prompt.submit], self._draw_form, form, drawing, trigger_mode="once", **every)
        self._cancel.click(self._cancel_job, [self._running], [self._now], **every)
        self._gallery.select(self._choose_picture, [self._shown], choice, **every)
        restored = [*form, self._start]
        self._put_back.click(self._restore_settings, [self._shown, self._chosen], restored, **every)
        self._again.click(self._restore_settings, [self._shown, self._chosen], restored, **every).then(
            self._draw_form, form, drawing, **every
        )

    async def _fill_page(self, request: gr.Request) -> AsyncIterator[Update]:
        """When the page is opened: what the model takes, with its own values, and what this key has drawn."""
        if self._service.describe_health()["status"] != "ok":
            yield {self._now: "The ranks load the model ..", self._draw: gr.update(interactive=False)}
            try:
                await self._service.wait_until_ready()
            except DitileError as error:
                yield {self._now: _render_failure(error)}
                return
        facts = self._service.facts
        size: list[Any] = [*facts.size] or [None, None]
        takes_picture = facts.edit is not None
        plan = "one rank" if Plan.parse(facts.plan) == Plan() else facts.plan
        guidance = facts.find_default("true_cfg_scale" if "true_cfg_scale" in facts.base else "guidance_scale")
        true_cfg = "true_cfg_scale" in facts.call.defaults and "true_cfg_scale" not in facts.base
        yield {
            self._title: f"# ditile\n{find_served_name(facts.name)} · {plan}",
            self._now: "",
            self._draw: gr.update(interactive=True),
            self._prompt: gr.update(value=facts.example),
            self._negative: gr.update(
                visible=facts.takes("negative_prompt"), placeholder=facts.find_default("negative_prompt") or ""
            ),
            self._width: gr.update(value=size[0], step=facts.size_multiple),
            self._height: gr.update(value=size[1], step=facts.size_multiple),
            self._steps: facts.find_default("num_inference_steps"),
            self._count: gr.update(visible=not facts.is_video),
            self._guidance: gr.update(value=guidance, visible=guidance is not None),
            self._true_cfg: gr.update(
                value=facts.find_default("true_cfg_scale") if true_cfg else None, visible=true_cfg
            ),
            self._frames: gr.update(value=facts.find_default(*FRAME_COUNTS), visible=facts.is_video),
            self._fps: gr.update(value=facts.fps, visible=facts.is_video),
            self._start: gr.update(visible=takes_picture, open=facts.needs_picture),
            self._strength: gr.update(value=self._own_strength, visible=facts.takes("strength")),
            **await self._show_pictures(find_page_owner(request)),
        }

    @property
    def _own_strength(self) -> float:
        """Of the model's class that starts from a picture."""
        return float(list_own_values(self._service.facts).get("strength", DEFAULT_STRENGTH))

    async def _draw_form(self, values: Update, request: gr.Request) -> AsyncIterator[Update]:
        """Draws what the form says; a page that is closed meanwhile ends it."""
        owner = find_page_owner(request)
        service = self._service
        idle = {self._running: "", self._draw: gr.update(interactive=True), self._cancel: gr.update(interactive=False)}
        try:
            kind, order = await self._read_form(values)
            job = await service.submit(kind, owner, order.request, order.inputs)
        except DitileError as error:
            yield {**idle, self._now: _render_failure(error)}
            return
        seed = order.request.options.seed
        yield {
            self._running: job.id,
            self._seed: seed,
            self._draw: gr.update(interactive=False),
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
            check_done(job)
        except DitileError as error:
            yield {**idle, self._now: _render_failure(error)}
            return
        assert job.drawn is not None
        warnings = " ".join(html.escape(text) for text in order.warnings)
        done = f'<p role="status">Drawn in {job.drawn.seconds.get("total", 0.0):.2f} s. {warnings}</p>'
        yield {**idle, self._now: done, **await self._show_pictures(owner)}

    async def _read_form(self, values: Update) -> tuple[Kind, Order]:
        """What the form asks for. Raises `DitileError` if it cannot be drawn."""
        facts = self._service.facts
        content = values[self._image] and await asyncio.to_thread(Path(values[self._image]).read_bytes)
        given = {name: values[component] for name, component in self._form.items()}
        left_out = {"n"} if facts.is_video else {"num_frames", "fps"}
        left_out |= set() if content and facts.takes("strength") else {"strength"}
        given = {name: value for name, value in given.items() if name not in left_out}
        if values[self._random]:
            given["seed"] = None
        if values[self._lora] != NO_LORA:
            given["lora"] = {values[self._lora]: 1.0 if values[self._lora_scale] is None else values[self._lora_scale]}
        kind: type[VideoFields] | type[ImageFields] = VideoFields if facts.is_video else ImageFields
        fields = parse_fields(kind, given, facts)
        body = Body(values={}, pictures=[content] if content else [])
        order = await read_order(self._service, fields, body)
        request = order.request
        steps = request.options.steps or facts.find_default("num_inference_steps") or 0
        request = dataclasses.replace(
            request, num_previews=min(MOST_PREVIEWS, max(0, steps - 1)), client=request.client | {"trace": True}
        )
        return "video" if facts.is_video else "image", dataclasses.replace(order, request=request)

    async def _cancel_job(self, job_id: str, request: gr.Request) -> Update:
        """Cancels the job that runs; the handler that watches it says the rest."""
        if job_id:
            try:
                await self._service.cancel(job_id, find_page_owner(request))
            except DitileError as error:
                return {self._now: _render_failure(error)}
        return {self._now: gr.skip()}

    async def _choose_picture(self, shown: list[list[Any]], event: gr.SelectData, request: gr.Request) -> Update:
        """Shows the settings of a picture of the gallery, and what was done for it."""
        return await self._describe_choice(shown, int(event.index), find_page_owner(request))

    async def _describe_choice(self, shown: list[list[Any]], index: int, owner: str) -> Update:
        off = gr.update(interactive=False)
        if not 0 <= index < len(shown):
            return {self._chosen: -1, self._chosen_text: "", self._again: off, self._put_back: off, self._download: off}
        job_id, picture, path = shown[index]
        on = gr.update(interactive=True)
        try:
            job = self._service.find_job(job_id, owner)
            trace = await self._read_trace(job)
        except DitileError as error:
            text = f"This picture is not kept any more: {convert_error(error).message}"
            return {self._chosen: -1, self._chosen_text: text, self._again: off, self._put_back: off}
        return {
            self._chosen: index,
            self._chosen_text: _describe_settings(job, picture),
            self._again: on,
            self._put_back: on,
            self._download: gr.update(value=path, interactive=True),
            self._insight: render_insight(job, self._service.describe_plan(), trace),
        }

    async def _restore_settings(self, shown: list[list[Any]], index: int, request: gr.Request) -> Update:
        """Puts the settings of the chosen picture into the form."""
        try:
            job_id, picture, _ = shown[index]
            job = self._service.find_job(job_id, find_page_owner(request))
        except (DitileError, IndexError):
            return {self._prompt: gr.skip()}
        options = job.request.options
        drawn = job.drawn
        assert drawn is not None and options.seed is not None
        image = None if options.image is None else await self._save_file(job, INPUT_IMAGE, "picture.png")
        lora, scale = next(iter(job.request.loras.items()), (NO_LORA, 1.0))
        return {
            self._prompt: options.prompt,
            self._negative: options.negative_prompt or "",
            self._width: drawn.size[0],
            self._height: drawn.size[1],
            self._steps: options.steps,
            self._guidance: options.guidance,
            self._true_cfg: options.true_cfg,
            self._seed: drawn.seeds[picture],
            self._random: False,
            self._count: 1,
            self._frames: options.frames,
            self._fps: options.fps,
            self._strength: self._own_strength if options.strength is None else options.strength,
            self._lora: lora,
            self._lora_scale: scale,
            self._image: image,
            self._start: gr.update(open=image is not None),
        }

    async def _show_pictures(self, owner: str) -> Update:
        """The gallery of an owner, the newest first and chosen."""
        kind: Kind = "video" if self._service.facts.is_video else "image"
        jobs = [job for job in self._service.list_jobs(owner, kind, limit=4 * MOST_SHOWN) if job.state == "done"]
        await asyncio.to_thread(self._forget_expired)
        items: list[tuple[str, str]] = []
        shown: list[list[Any]] = []
        for job in jobs:
            assert job.drawn is not None
            for index, (name, seed) in enumerate(zip(job.drawn.files, job.drawn.seeds, strict=True)):
                if len(items) < MOST_SHOWN:
                    model = find_served_name(self._service.facts.name).replace("/", "-")
                    path = await self._save_file(job, name, f"{model}-{seed}{Path(name).suffix}")
                    if path is not None:
                        items.append((path, f"seed {seed} · {job.drawn.size[0]}x{job.drawn.size[1]}"))
                        shown.append([job.id, index, path])
        first = await self._describe_choice(shown, 0, owner)
        return {self._gallery: gr.update(value=items, selected_index=None), self._shown: shown, **first}

    async def _save_file(self, job: Job, name: str, title: str) -> str | None:
        """Path of a file of a job in the folder of the page; None if it is not kept any more.

        The name of a job cannot be guessed, and so not the path either, by which a browser gets the file.
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

    def _forget_expired(self) -> None:
        """Removes the files of jobs that are not kept any more, and uploads that were cut off, which Gradio leaves."""
        for folder in self._folder.glob("*_*"):
            try:
                self._service.find_job(folder.name, None)
            except DitileError:
                shutil.rmtree(folder, ignore_errors=True)
        oldest = time.time() - max(UPLOAD_SECONDS, self._service.options.keep_results)
        for path in self._folder.glob("tmp*"):
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)

    async def _read_trace(self, job: Job) -> Mapping[str, Any]:
        """The Chrome trace of a job; empty if it has none."""
        if not job.request.client.get("trace"):
            return {}
        content = await asyncio.to_thread(self._service.read_output, job, TRACE)
        return dict(json.loads(content))


def find_page_owner(request: gr.Request) -> str:
    """The owner of the key with which the page was opened."""
    name = request.username or ""
    assert name.startswith(OWNER_MARK), "every request passes the gate"
    return name.removeprefix(OWNER_MARK)


def render_progress(event: JobEvent, preview: str) -> str:
    """How far a job is, with its last preview as base64 of a PNG."""
    done = event.step / event.num_steps if event.num_steps else event.job.progress / 100
    if event.job.state == "queued":
        text = "Waits for its turn .."
    else:
        text = f"Step {event.step} of {event.num_steps}" if event.num_steps else "Begins .."
    image = f'<img alt="preview" src="data:image/png;base64,{preview}">' if preview else ""
    bar = f'<div class="bar"><div style="width:{100 * done:.0f}%"></div></div>'
    return f'<p role="status">{text}</p>{bar}{image}'


def _render_failure(error: DitileError) -> str:
    return f'<p class="wrong" role="alert">{html.escape(convert_error(error).message)}</p>'


def _describe_settings(job: Job, picture: int) -> str:
    options = job.request.options
    drawn = job.drawn
    assert drawn is not None
    facts: dict[str, Any] = {
        "seed": drawn.seeds[picture],
        "size": "{}x{}".format(*drawn.size),
        "steps": drawn.num_steps,
        "guidance": options.guidance,
        "true CFG": options.true_cfg,
        "strength": options.strength,
        "frames": drawn.frames or None,
        "LoRA": ", ".join(f"{name} {scale:g}" for name, scale in job.request.loras.items()) or None,
        "seconds": f"{drawn.seconds.get('total', 0.0):.2f}",
    }
    # As code, so that nothing of a prompt is markup.
    text = " · ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    prompt = " ".join((options.prompt or "").replace("`", "'").split())
    return f"`{prompt[:300]}`\n\n{text}"


def _build_number(label: str, precision: int | None = 0, value: float | None = None, **options: Any) -> gr.Number:
    return gr.Number(label=label, value=value, precision=precision, min_width=100, **options)
