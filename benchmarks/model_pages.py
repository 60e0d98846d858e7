"""Makes a page for each published model, and their index: which plan for which cards, and what the model can do.

    python -m benchmarks.model_pages                       # all of docs/models, and the table of docs/recipes.md
    python -m benchmarks.model_pages --only z-image-turbo  # some pages; others stay

Figures are the planner's. Which methods hold is what the tests of the model's family have shown (support.json).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap
from typing import Any, NamedTuple

from diffusers import ModularPipeline
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from benchmarks.page import DOCS, fill_page_blocks
from ditile.distributed import files
from ditile.model.known import ASSETS, KnownModel, find_known_model, list_published_models
from ditile.plan.errors import PlanError
from ditile.plan.numbers import format_number
from ditile.plan.plan import FEW_STEPS, Plan
from ditile.planner.hardware import load_profile
from ditile.planner.memory import count_host_memory
from ditile.planner.question import PlanQuestion
from ditile.planner.search import PlanSearch, SearchRequest
from ditile.planner.subject import PlanSubject
from ditile.runner.model_files import find_model_source

PAGES, INDEX = DOCS / "models", DOCS / "recipes.md"


class Card(NamedTuple):
    """A card, as `ditile plan --hardware` and the pages call it, and its memory in GB."""

    hardware: str
    name: str
    memory: int


CARDS = (
    Card("rtx-4090", "RTX 4090", 24),
    Card("rtx-5090", "RTX 5090", 32),
    Card("l40-pcie", "L40", 48),
    Card("h100-nvlink", "H100", 80),
)
DEVICES = (1, 2, 4, 8)
COLUMNS = {
    "pipefusion": "PipeFusion",
    "distrifusion": "DistriFusion",
    "ulysses": "Ulysses",
    "ring": "ring attention",
    "tensor": "tensor parallelism",
    "cfg": "CFG parallelism",
    "data": "data parallelism",
    "cache, pipefusion": "a cache together with PipeFusion",
    "cache, ulysses": "a cache together with Ulysses",
}
"""Columns of support.json, and their names on the pages."""
STALE = ("pipefusion", "distrifusion")
"""Axes whose images are close, and not the same."""
PROMPTS = {"": "a lighthouse at dawn", "photo.png": "make it a snowy night", "boat.png": "the boat sails away"}
"""File that a call starts from -> a prompt."""
IMAGE_SIZES = {"": "", "photo.png": "1024x1024", "boat.png": "1280x720"}
"""File that a call starts from -> the size that is priced, as `ditile plan --image` takes it."""
COMPARED = ("2 x RTX 4090", "1 x L40", "4 x L40", "1 x H100", "8 x H100")
"""Rows of the pages that the index has."""
MARK = "Made by `python -m benchmarks.model_pages`; a test fails if it is not up to date."
WIDTH = 120


@dataclass(frozen=True, slots=True)
class Name:
    """How people call a model, and what its command needs besides the plan.

    Attributes:
        name: as people search for it.
        image: a file that the call starts from.
        file: a name under which its transformer is published in one file; "" if none is well known.
        second_file: the same, of the second transformer.
        note: what the figures of its page leave out.
    """

    name: str
    image: str = ""
    file: str = ""
    second_file: str = ""
    note: str = ""


NAMES = {
    "cogvideox-5b": Name("CogVideoX 5B"),
    "flux.1-dev": Name("FLUX.1-dev", file="flux1-dev-Q8_0.gguf"),
    "flux.1-kontext-dev": Name("FLUX.1 Kontext", "photo.png", "flux1-kontext-dev-Q8_0.gguf"),
    "flux.1-schnell": Name("FLUX.1-schnell", file="flux1-schnell-Q8_0.gguf"),
    "flux.2-dev": Name("FLUX.2-dev", file="flux2-dev-Q4_K_M.gguf"),
    "flux.2-klein-4b": Name("FLUX.2 klein 4B", file="flux-2-klein-4b.safetensors"),
    "flux.2-klein-9b": Name("FLUX.2 klein 9B", file="flux-2-klein-9b.safetensors"),
    "flux.3-klein": Name(
        "FLUX.3 klein", file="flux3_image_klein_int8_convrot.safetensors",
        note="The model that rewrites prompts is not counted.",
    ),
    "flux.3-klein-base": Name("FLUX.3 klein base", note="The model that rewrites prompts is not counted."),
    "hunyuanvideo": Name("HunyuanVideo", file="hunyuan-video-t2v-720p-Q8_0.gguf"),
    "hunyuanvideo-1.5": Name("HunyuanVideo 1.5"),
    "krea-2": Name("Krea 2 Raw"),
    "krea-2-turbo": Name("Krea 2 Turbo"),
    "ltx-2": Name("LTX-2"),
    "ltx-2.5": Name(
        "LTX-2.5", note="Figures are those of the distilled transformer with the VAE's decoder; the decoder that is a "
        "diffusion model is not counted. Its own steps are given in Python (`sigmas=`).",
    ),
    "ltx-video": Name("LTX-Video"),
    "minimax-h3": Name(
        "MiniMax-H3", file="minimax_h3_fl2va_int8_convrot.safetensors",
        note="Its second transformer, `transformer_ref` for references, is as large as the first and is not counted. "
        '`ditile generate` with a prompt alone and `ditile.load(.., workflow="t2va")` leave it out; `ditile serve` and '
        "other calls read both.",
    ),
    "pixart-alpha": Name("PixArt-alpha"),
    "pixart-sigma": Name("PixArt-Sigma"),
    "qwen-image": Name("Qwen-Image", file="qwen-image-Q8_0.gguf"),
    "qwen-image-2.1": Name("Qwen-Image-2.1"),
    "qwen-image-edit": Name("Qwen-Image-Edit", "photo.png", "Qwen_Image_Edit-Q8_0.gguf"),
    "qwen-image-edit-2509": Name("Qwen-Image-Edit-2509", "photo.png", "Qwen-Image-Edit-2509-Q8_0.gguf"),
    "qwen-image-edit-2511": Name("Qwen-Image-Edit-2511", "photo.png", "qwen-image-edit-2511-Q8_0.gguf"),
    "sd3-medium": Name("Stable Diffusion 3 Medium"),
    "sd3.5-large": Name("Stable Diffusion 3.5 Large", file="sd3.5_large-Q8_0.gguf"),
    "sd3.5-medium": Name("Stable Diffusion 3.5 Medium", file="sd3.5_medium-Q8_0.gguf"),
    "wan2.1-t2v-1.3b": Name("Wan 2.1 1.3B", file="wan2.1_t2v_1.3B_bf16.safetensors"),
    "wan2.1-t2v-14b": Name("Wan 2.1 14B", file="wan2.1-t2v-14b-Q8_0.gguf"),
    "wan2.2-i2v-14b": Name(
        "Wan 2.2 14B image to video", "boat.png",
        "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors",
    ),
    "wan2.2-t2v-14b": Name(
        "Wan 2.2 14B text to video", "",
        "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
    ),
    "wan2.2-ti2v-5b": Name("Wan 2.2 5B", file="wan2.2_ti2v_5B_fp16.safetensors"),
    "z-image-turbo": Name("Z-Image Turbo", file="z_image_turbo_bf16.safetensors"),
}  # fmt: skip


class PlannedRow(NamedTuple):
    """The best plan for some cards: its texts, or why there is none."""

    place: str
    card: Card
    plan: Plan | None
    seconds: str = ""
    memory: str = ""
    refusal: str = ""

    @property
    def sameness(self) -> str:
        """Return whether the image is that of one card."""
        if self.plan is None:
            return ""
        return "close" if any(getattr(self.plan, axis) > 1 for axis in STALE) else "yes"

    def format_markdown(self) -> str:
        """Return the row of a table."""
        if self.plan is None:
            return f"| {self.place} | | | | {self.refusal} |"
        plan = f"`{self.plan}`" if self.plan != Plan() else "no plan needed"
        return f"| {self.place} | {self.seconds} | {self.memory} | {self.sameness} | {plan} |"


@dataclass(frozen=True)
class ModelPage:
    """The page of a published model."""

    model: KnownModel
    name: Name
    subject: PlanSubject
    call: dict[str, Any]

    @classmethod
    def from_name(cls, model: str) -> ModelPage:
        """Read the configs of a model."""
        known = find_known_model(model)
        assert known is not None
        name = NAMES[model]
        question = PlanQuestion(model=model)
        if name.image:
            question = PlanQuestion(model=model, image=(IMAGE_SIZES[name.image],))
        conditions = ["image"] if name.image else []
        subject = PlanSubject.from_configs(model, find_model_source(model, weights=False), conditions)
        call = question.fill_call_arguments() | subject.bind_pictures(question.read_pictures())
        return cls(known, name, subject, call)

    def write_text(self) -> str:
        """Return the page."""
        parts = [
            f"# {self._write_title()}",
            _fill(self._write_summary()),
            *self._write_commands(),
            *self._write_plans(),
            *self._write_memory(),
            *self._write_methods(),
            *self._write_caches(),
            *self._write_files(),
            *self._write_loras(),
            *self._write_limits(),
            MARK,
        ]
        return "\n\n".join(parts) + "\n"

    @cached_property
    def rows(self) -> tuple[PlannedRow, ...]:
        """Search the best plan for each number of each card."""
        return tuple(self._plan_cards(card, devices) for card in CARDS for devices in DEVICES)

    @cached_property
    def families(self) -> list[dict[str, Any]]:
        """Return what was proved of the calls of its class of pipelines."""
        proven = json.loads((ASSETS / "support.json").read_text("utf-8"))["families"]
        of_pipeline = [family for family in proven if family["pipeline"] == self.subject.pipeline.__name__]
        # A distilled model may have a class of pipelines of its own, which calls the same transformer.
        return of_pipeline or [family for family in proven if family["transformer"] == self.model.transformer]

    @cached_property
    def steps(self) -> int:
        """Return the steps of the call."""
        return self.subject.make_call_shape(self.call, 2).steps

    def holds(self, column: str) -> bool:
        """Return whether one of its calls holds a column."""
        return any(column not in family["holes"] for family in self.families)

    def _plan_cards(self, card: Card, devices: int) -> PlannedRow:
        place = f"{devices} x {card.name}"
        profile = load_profile(card.hardware)
        request = SearchRequest(devices=devices, all_devices=True)
        try:
            best = PlanSearch(self.subject, self.call, profile, request).find_fastest_plans().prices[0]
        except PlanError as error:
            reason = str(error).partition(";")[0].replace("no plan", f"no plan of {devices}", 1)
            return PlannedRow(place, card, None, refusal=reason)
        memory = f"{best.memory_bytes / 1e9:.0f} GB"
        if best.plan.offload == "blocks":
            shape = self.subject.make_call_shape(self.call, profile.element_size)
            host = count_host_memory(self.subject, self.subject.make_plan_job(best.plan, shape))
            memory += f", host {host.kept / 1e9:.0f} GB"
        return PlannedRow(place, card, best.plan, format_number(best.call_s), memory)

    def _write_title(self) -> str:
        where = "on several GPUs"
        pair = next(row for row in self.rows if row.place == "2 x RTX 4090")
        if pair.plan is not None:
            where = "on two RTX 4090s and up to 8 GPUs"
        methods = [COLUMNS[column] for column in ("pipefusion", "ulysses", "ring", "tensor") if self.holds(column)]
        return f"{self.name.name} {where}: {', '.join(methods)}"

    def _write_summary(self) -> str:
        subject = self.subject
        size = f"{_count_transformer(subject) / 1e9:.1f} billion parameters"
        transformer = f"Its transformer has {size} in {self.model.blocks} blocks."
        if subject.models > 1:
            transformer = f"Its two transformers have {size} each, in {self.model.blocks} blocks."
        shape = subject.make_call_shape(self.call, 2)
        guidance = "with guidance"
        if shape.branches_per_call * shape.calls == 1:
            guidance = "without a second branch of guidance, so that `cfg=2` has nothing to divide"
        return (
            f"`{self.model.name}` is [{self.model.hub_id}](https://huggingface.co/{self.model.hub_id}) "
            f"({subject.pipeline.__name__}). {transformer} Figures on this page are for "
            f"{describe_planned_call(subject, self.call).rstrip('.').partition(';')[0]}{self._describe_image()}, "
            f"{guidance}. "
            "**They are predictions of the planner; none was measured.**"
        )

    def _describe_image(self) -> str:
        if not self.name.image:
            return ""
        return f", from an image of {IMAGE_SIZES[self.name.image].replace('x', ' x ')} px"

    def _write_command(self, plan: Plan | None) -> str:
        words = [f'ditile generate "{PROMPTS[self.name.image]}"', f"--model {self.model.name}"]
        if self.name.image:
            words.append(f"--image {self.name.image}")
        if plan is not None and plan != Plan():
            words.append(f'--plan "{plan}"')
        return " ".join(words)

    def _write_commands(self) -> Iterator[str]:
        """Yield a command for two cards of each kind, or the fewest that fit, and for the largest machine."""
        yield "## Commands"
        chosen = []
        for card in CARDS:
            fitting = [row for row in self.rows if row.card == card and row.plan is not None]
            pair = [row for row in fitting if row.place.startswith("2 x")]
            chosen += pair or fitting[:1]
        if self.rows[-1].plan is not None and self.rows[-1] not in chosen:
            chosen.append(self.rows[-1])
        lines = []
        for row in chosen:
            lines += [f"    # {row.place}", f"    {self._write_command(row.plan)}"]
        yield "\n".join(lines)
        plan = next((row.plan for row in reversed(self.rows) if row.plan is not None), Plan())
        assigned = ", ".join(f"{key}={value!r}" for key, value in _list_plan_fields(plan))
        image = f', image=load_image("{self.name.image}")' if self.name.image else ""
        output = "frames[0]" if self.subject.makes_videos else "images[0]"
        prompt = PROMPTS[self.name.image]
        call = f'runner("{prompt}"{image}, **arguments).{output}'
        # A modular pipeline takes arguments by name, and returns the output that is named.
        if issubclass(self.subject.pipeline, ModularPipeline):
            output = "videos" if self.subject.makes_videos else "images"
            call = f'runner(prompt="{prompt}"{image}, **arguments, output="{output}")[0]'
        yield f"In Python, under `torchrun --nproc_per_node={plan.world}`:"
        imported = ["    from diffusers.utils import load_image"] if self.name.image else []
        yield "\n".join(
            [
                "    import ditile",
                *imported,
                f"    plan = ditile.Plan({assigned})",
                f'    pipe = ditile.load("{self.model.hub_id}", plan=plan)    # each rank reads its own weights',
                f"    runner = ditile.parallelize(pipe, plan)    # called like {self.subject.pipeline.__name__}",
                f'    arguments = ditile.defaults("{self.model.name}")',
                f"    result = {call}",
            ]
        )

    def _write_plans(self) -> Iterator[str]:
        yield "## Which plan"
        size = f" --image {IMAGE_SIZES[self.name.image]}" if self.name.image else ""
        yield _fill(
            "Each row has the fastest plan that uses all of the cards and fits into them. Seconds are those of "
            + ("the whole call" if self.steps <= FEW_STEPS else "the denoising loop")
            + "; memory is that of the card that needs most, and `host` what waits in the host's memory. Same image: "
            "`yes` is the image of one card, up to rounding; `close` has keys and values of other patches from the "
            "step before ([what that costs](../../README.md#what-can-be-divided)). If more cards are no faster, take "
            f"fewer. `ditile plan --model {self.model.name}{size} --hardware {CARDS[0].hardware} --devices 2` prints "
            "the next best plans, and [Recipes](../recipes.md) says what all figures assume."
        )
        for card in CARDS:
            yield f"### {self.name.name} on {card.memory} GB GPUs ({card.name})"
            header = ["| GPUs | seconds | memory | same image | plan |", "|:--|--:|--:|:--|:--|"]
            rows = [row.format_markdown() for row in self.rows if row.card == card]
            yield "\n".join([*header, *rows])

    def _write_memory(self) -> Iterator[str]:
        yield "## Memory"
        subject = self.subject
        transformer = _count_transformer(subject) * subject.models
        parts = {"transformer": transformer, "text encoders": subject.text, "VAE": subject.vae}
        if subject.models > 1:
            parts = {f"{subject.models} transformers": parts.pop("transformer"), **parts}
        lines = ["| part | parameters | in bfloat16 |", "|:--|--:|--:|"]
        lines += [f"| {part} | {count / 1e9:.2f} billion | {count * 2 / 1e9:.1f} GB |" for part, count in parts.items()]
        yield "\n".join(lines)
        yield _fill(
            "`-q --quantize-type float8_weight_only` stores the transformer's weights in 8 bits, about "
            f"{transformer / 1e9:.1f} GB ([quantization](../quantization.md)); the plans above are for bfloat16. "
            "`offload=blocks` keeps the blocks in the host's memory and sends each one to the card before it computes "
            "([loading](../loading.md#weights-in-the-hosts-memory))."
        )

    def _write_methods(self) -> Iterator[str]:
        yield "## What is exact"
        lines = ["| method | works | same image as one card |", "|:--|:-:|:--|"]
        for column, method in COLUMNS.items():
            works = "yes" if self.holds(column) else "no"
            lines.append(f"| {method} | {works} | {_describe_sameness(column) if works == 'yes' else ''} |")
        rows = "yes" if self.subject.divides_decode else "not tested"
        lines.append(f"| parallel VAE, `vae=rows` | {rows} | {'yes, up to rounding' if rows == 'yes' else ''} |")
        yield "\n".join(lines)
        yield _fill(
            f"Shown by tests of a tiny {self.subject.pipeline.__name__} on two and more processes "
            "([matrix](../matrix.md#every-family-under-every-axis)), not with these weights. "
            f"`ditile verify --model {self.model.hub_id} --ulysses 2` checks a plan on your machine "
            "([verify](../verify.md))."
        )

    def _write_caches(self) -> Iterator[str]:
        yield "## Caches"
        computed, remark = choose_computed_steps(self.steps)
        made_of = "" if not self.name.image else f" --image {self.name.image}"
        if self.subject.makes_videos:
            made_of = " --captions captions.txt --num-captions 4" + made_of
        yield "\n".join(
            [
                f"    {self._write_command(None)} --cache-line steps={computed}",
                f"    ditile fit --model {self.model.hub_id} --steps {self.steps}{made_of} --out fitted.json",
                f"    {self._write_command(None)} --steps {self.steps} --schedule fitted.json",
            ]
        )
        yield _fill(
            f"The first command calls the model in {computed} of {self.steps} steps, spread evenly{remark}. The second "
            "fits a schedule to this model, once; the third uses it and loses less. "
            + ("Caches that decide as they run, such as DBCache, work too. " if self.holds("cache, ulysses") else "")
            + "[Caching](../caching.md) has their settings and what they lose on the bundled models; nothing was "
            f"measured on {self.name.name}."
        )

    def _write_files(self) -> Iterator[str]:
        yield "## Single files: GGUF, fp8, ComfyUI"
        kind = type(self.subject.transformer).__name__
        if kind not in SINGLE_FILE_LOADABLE_CLASSES:
            yield _fill(
                f"`--transformer FILE` takes the transformer from a file. diffusers has no conversion of the authors' "
                f"files for {kind}, so the tensors must have diffusers' names "
                "([loading](../loading.md#components-in-files))."
            )
            return
        base = f'ditile generate "{PROMPTS[self.name.image]}" --model {self.model.hub_id}'
        if self.name.image:
            base += f" --image {self.name.image}"
        flags = f"--transformer {self.name.file or 'FILE'}"
        if self.subject.models > 1:
            flags = f"--component transformer={self.name.file} --component transformer_2={self.name.second_file}"
        yield f"    {base} {flags}"
        yield _fill(
            "Tensors may have the names of diffusers, of the authors or of ComfyUI, and may be in 16 bits, in fp8 with "
            "or without scales, in ComfyUI's int8 or int4 (ConvRot), or in GGUF. Each rank reads its own share. The "
            "name of the file does not matter: `ditile models FILE` says what is in it "
            "([loading](../loading.md#components-in-files))."
        )

    def _write_loras(self) -> Iterator[str]:
        yield "## LoRAs"
        if not hasattr(self.subject.pipeline, "load_lora_weights"):
            yield f"{self.subject.pipeline.__name__} has no loader of LoRAs; load them with peft before `parallelize`."
            return
        lines = [f"    {self._write_command(None)} --lora style.safetensors:0.8"]
        if self.subject.models > 1:
            lines.append(
                f"    {self._write_command(None)} --lora high.safetensors --lora transformer_2=low.safetensors"
            )
        yield "\n".join(lines)
        yield _fill(
            "LoRAs work under every plan. Under `tensor` and `pipefusion` each rank keeps its own share "
            "([names and limits](../loading.md#loras))."
        )

    def _write_limits(self) -> Iterator[str]:
        yield "## Known limits"
        yield "\n".join(_fill(f"- {limit}", indent="  ") for limit in self._list_limits())

    def _list_limits(self) -> Iterator[str]:
        subject = self.subject
        for family in self.families:
            for column, reason in family["holes"].items():
                yield f"`{column}`: the call `{family['name']}` {reason}."
        if "split" not in dict(subject.memory_saving_options).values():
            yield (
                f"Its text encoders ({subject.text * 2 / 1e9:.1f} GB) are whole on every card, or on the first alone "
                "(`text=first`)."
            )
        if not subject.divides_decode:
            yield f"`vae=rows` is not tested with its {subject.coder.__name__}."
        if subject.makes_videos:
            yield (
                "Memory includes a decode of all frames without tiling. In Python, `pipe.vae.enable_tiling()` before "
                "`parallelize` needs less, and changes the video slightly."
            )
        if subject.models > 1:
            yield "Its two transformers take turns, but both stay on the card."
        if self.name.note:
            yield self.name.note
        if all(row.plan is None for row in self.rows if row.card == CARDS[0]):
            yield f"No plan fits {CARDS[0].memory} GB cards in bfloat16: quantize it, or take a smaller file."
        yield "The figures are for bfloat16 without quantization, caches and LoRAs."


def describe_planned_call(subject: PlanSubject, call: dict[str, Any]) -> str:
    """Return the size and the steps that are priced."""
    shape = subject.make_call_shape(call, 2)
    frames = f", {call['num_frames']} frames" if call.get("num_frames", 1) > 1 else ""
    seconds = "; seconds are those of the whole call" if shape.steps <= FEW_STEPS else ""
    return f"{shape.width} x {shape.height} px{frames}, {shape.steps} steps{seconds}."


def choose_computed_steps(steps: int) -> tuple[int, str]:
    """Return how many steps compute by docs/caching.md, and what to say of it."""
    if steps <= 4:
        return steps - 1, ", because a step of so few is too large to forecast well"
    if steps < 16:
        return steps * 3 // 4, ""
    return steps // 2, ""


def write_index(pages: Sequence[str]) -> str:
    """Return the table of the index, from the rows of the pages."""
    lines = [f"| model | {' | '.join(COMPARED)} |", f"|:--|{'--:|' * len(COMPARED)}"]
    for model in pages:
        text = (PAGES / f"{model}.md").read_text("utf-8")
        cells = [_read_seconds(text, place) for place in COMPARED]
        lines.append(f"| [{NAMES[model].name}](models/{model}.md) | {' | '.join(cells)} |")
    return "\n".join(["", *lines, ""])


def _read_seconds(text: str, place: str) -> str:
    [(seconds, plan)] = re.findall(rf"^\| {place} \|([^|]*)\|.*\|([^|]*)\|$", text, re.MULTILINE)
    if not seconds.strip():
        return "-"
    return f"{seconds.strip()} *" if "offload" in plan else seconds.strip()


def _count_transformer(subject: PlanSubject) -> int:
    weights = subject.parameter_counts
    return weights.shared + sum(weights.blocks)


def _list_plan_fields(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a plan that its text has."""
    for word in str(plan).split():
        name = word.partition("=")[0]
        yield name, getattr(plan, name)


def _describe_sameness(column: str) -> str:
    if column in STALE:
        return "close; the same with nothing stale"
    if column.startswith("cache"):
        return "by the threshold; the same at 0"
    return "yes, up to rounding"


def _fill(text: str, indent: str = "") -> str:
    """Return a text in lines. Commands and links stay whole."""
    glued = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", lambda part: part[0].replace(" ", "\0"), text)
    lines = wrap(glued, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def main() -> None:
    """Writes the pages and their index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="MODELS", help="with , between them")
    asked = parser.parse_args()
    published = list_published_models()
    for model in published if asked.only is None else asked.only.split(","):
        files.write_atomically(PAGES / f"{model}.md", ModelPage.from_name(model).write_text())
        print(PAGES / f"{model}.md", flush=True)
    written = [model for model in published if (PAGES / f"{model}.md").exists()]
    files.write_atomically(INDEX, fill_page_blocks(INDEX.read_text("utf-8"), {"models": write_index(written)}))


if __name__ == "__main__":
    main()
