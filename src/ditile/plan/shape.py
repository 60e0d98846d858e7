"""Shape: the numbers of one job, from a model's config and the arguments of a call. No weights, no torch.

The table of a runner and a dry run are computed from a shape: tokens, messages, memory of keys, parameters.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ditile.plan.errors import ModelError
from ditile.plan.layout import Grid, Joint, Layout, count_most_in_rows, pick_even_chunk
from ditile.plan.option_classes import CallArguments, JsonObject, Pixels, check_value
from ditile.plan.plan import Facts, Plan

FRAME_COUNTS = ("num_frames", "frames", "video_length")
"""The names of a call's argument for the number of frames; a class has at most one of them."""
_PER_PROMPT = re.compile("num_[a-z]+_per_prompt")
_ONE_FOR_EACH = re.compile("label|class|embed|cond|text|caption|prompt|^[cyz]$")
"""Words in the names of arguments that say what a user's own pipeline generates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The parts of a transformer, counted.

    Attributes:
        blocks: parameters of each block.
        shared: parameters that every rank holds (embeddings, head).
        layers: for each block and each of its attention layers, whether the layer sees the text of joint attention.
        out: how many numbers the output module computes for a token.
        exchanges: for each block, its exchanges in tensor parallelism: ("sum" | "gather" | "norm", stream). Sums are
            of row-parallel Linears, gathers of split_scheme=sequence, norms the squares of norms over heads.
        tensors: for each block, the numbers in each of its parameters and buffers.
        tensor_units: how many equal parts are shared out over the ranks of tensor, if their shares differ.
    """

    blocks: tuple[int, ...]
    shared: int
    layers: tuple[tuple[bool, ...], ...]
    out: int
    exchanges: tuple[tuple[tuple[str, str], ...], ...] = ()
    tensors: tuple[tuple[int, ...], ...] = ()
    tensor_units: int = 1


class Conditioning(NamedTuple):
    """The text, batch and calls that a pipeline's call needs for one image.

    Attributes:
        text: tokens of text in the sequence of joint attention.
        rows: rows of the batch for each image.
        calls: transformer calls per step.
    """

    text: int = 0
    rows: int = 1
    calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFamily:
    """A family of transformers.

    Attributes:
        name: the family's common name.
        pipelines: the diffusers pipelines that call a transformer of this family.
        joint: where the text lies in the sequence of joint attention.
        is_packed: whether latents are tokens already, `[B, tokens, C]`.
        latent_per_token: transformer's config -> side of a token in latent pixels of the VAE.
        conditioning: call arguments -> text, batch and calls.
        example: (config, grid, text tokens) -> arguments of the forward with one row; only their shapes matter. None if
            a call must be recorded.
        image_tokens: the path of the module that embeds the latents.
    """

    name: str
    latent_per_token: Callable[[Mapping[str, Any]], int] = lambda config: 1
    conditioning: Callable[[Mapping[str, Any]], Conditioning] = lambda call: Conditioning()
    is_packed: bool = False
    joint: Joint = "none"
    example: Callable[[Mapping[str, Any], Grid, int], CallArguments] | None = None
    pipelines: tuple[str, ...] = ()
    image_tokens: str = "pos_embed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The numbers of one job.

    Attributes:
        height, width: pixels.
        steps: denoising steps.
        grid: token rows of the image.
        text: text tokens in the sequence of joint attention.
        batch: rows of a transformer call.
        images: images made at once.
        calls: transformer calls per step.
        heads, head_dim: of attention; their product is the width of a token in the blocks, unless `channels` gives it.
        latent_elements: elements of one image's latents.
        element_size: bytes of an activation.
        frames: latent frames of a video.
        channels: the width of a token in the blocks; 0 if it is `heads` times `head_dim`.
        key_heads: the number of key heads divided by the number of query heads.
        references: tokens of reference images, the last ones of the image; None if it is not known how many.
        call_rows: the rows of an image in each call of a step, if calls differ. `calls` then counts each row as a call.
    """

    height: int
    width: int
    steps: int
    grid: Grid
    text: int
    batch: int
    images: int
    calls: int
    heads: int
    head_dim: int
    latent_elements: int
    element_size: int
    frames: int = 1
    channels: int = 0
    key_heads: float = 1.0
    references: int | None = None
    call_rows: tuple[int, ...] = ()

    @classmethod
    def from_call(
        cls, family: CallFamily, config: JsonObject, vae_scale: int, element_size: int, call: CallArguments
    ) -> Shape:
        """Compute the shape of a call of a pipeline.

        Args:
            family: the family of its transformer.
            config: the transformer's config.
            vae_scale: pixels along the side of a latent pixel.
            element_size: bytes of an activation.
            call: the call's arguments, `height` and `width` among them.
        """
        latents_per_token = family.latent_per_token(config)
        height = int(call["height"])
        width = int(call["width"])
        unit = vae_scale * latents_per_token
        rows = height // unit
        columns = width // unit
        conditioning = family.conditioning(call)
        text = 0 if family.joint == "none" else conditioning.text
        images = count_images(call)
        # Packed latents have the numbers of a token as channels.
        numbers_per_token = int(config["in_channels"])
        if not family.is_packed:
            numbers_per_token *= latents_per_token**2
        return cls(
            height=height,
            width=width,
            steps=int(call["num_inference_steps"]),
            grid=Grid(rows, columns),
            text=text,
            batch=images * conditioning.rows,
            images=images,
            calls=conditioning.calls,
            heads=int(config["num_attention_heads"]),
            head_dim=int(config["attention_head_dim"]),
            latent_elements=rows * columns * numbers_per_token,
            element_size=element_size,
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in a sequence, text included."""
        return self.grid.num_tokens + self.text

    def build_layout(self, plan: Plan, joint: Joint) -> Layout:
        """Build the cuts of the image. Raises `PlanError` if it has fewer token rows than the plan has patches."""
        plan.check(Facts(rows=self.grid.rows))
        if plan.references is None or not self.references:
            return _look_up_layout(self.grid, plan.num_patches, self.text, joint)
        rows = range(self.latent_rows, self.grid.rows)
        patches = plan.num_patches
        # Under DistriFusion the references are one more patch, which all ranks split like the image.
        if plan.distrifusion > 1:
            patches += 1
        return _look_up_reference_layout(self.grid, patches, self.text, joint, rows, even=plan.references == 1)

    @property
    def latent_rows(self) -> int:
        """Return the number of token rows made of latents. The rows of reference images follow them."""
        tokens = self.grid.num_tokens - (self.references or 0)
        return -(-tokens // (self.grid.tokens_per_row * self.grid.frames))

    @property
    def branches_per_call(self) -> int:
        """Return the number of branches of guidance that share a call."""
        return self.batch // self.images

    def divide_batch(self, plan: Plan, replica: int = 0) -> Shape:
        """Return the shape of one replica's calls in one group of guidance. (In step 0 each group makes all calls.)"""
        return _look_up_replica_shape(self, plan.data, plan.cfg, replica, plan.keeps_calls)

    @property
    def token_channels(self) -> int:
        """Return the width of a token in the blocks."""
        return self.channels or self.heads * self.head_dim

    @property
    def latent_bytes(self) -> int:
        """Return the bytes of the latents of all images."""
        return self.images * self.latent_elements * self.element_size

    def collect_facts(self, model: str = "this model", blocks: int | None = None) -> Facts:
        """Collect the facts that a plan is checked against."""
        return Facts(
            model=model,
            blocks=blocks,
            heads=self.heads,
            rows=self.grid.rows,
            tokens_per_row=self.grid.tokens_per_row * self.grid.frames,
            text=self.text,
            branches=self.branches_per_call * self.calls,
            call_rows=self.call_rows,
        )


_look_up_layout = lru_cache(maxsize=1024)(Layout.cut_into_patches)
_look_up_reference_layout = lru_cache(maxsize=1024)(Layout.cut_around_references)


@lru_cache(maxsize=1024)
def _look_up_replica_shape(shape: Shape, data: int, cfg: int, replica: int, keeps_calls: bool) -> Shape:
    # A replica without images of its own computes the first one.
    images = len(pick_even_chunk(range(shape.images), data, replica)) or 1
    branches = shape.branches_per_call
    calls = shape.calls
    # The groups of guidance split the calls of a step, or the rows of a call.
    if shape.call_rows and keeps_calls:
        calls = count_most_in_rows(shape.call_rows, cfg)
    elif branches == 1:
        calls = math.ceil(calls / cfg)
    else:
        branches = math.ceil(branches / min(cfg, branches))
    return replace(shape, images=images, batch=images * branches, calls=calls)


def count_images(call: CallArguments) -> int:
    """Count the images, videos or sounds that the arguments of a pipeline's call ask for.

    There is one for each entry of the first list or tensor that says what to generate: prompts, embeddings, classes,
    images to begin with. Pipelines that generate from nothing have `batch_size`, which in others counts no images.
    """
    per_prompt = 1
    for name, value in call.items():
        if _PER_PROMPT.fullmatch(name) and value:
            per_prompt *= int(value)
    if call.get("prompt") is None and "image" not in call and isinstance(call.get("batch_size"), int):
        return int(call["batch_size"])
    # Embeddings of each layer of a text encoder have the layer as their first dimension, so others are preferred.
    embeds = sorted(name for name in call if name.startswith("prompt_embeds"))
    embeds.sort(key=lambda name: _count_dims(call[name]) > 3)
    for name in ("prompt", *embeds, "class_labels", "image_embeds", "image"):
        value = call.get(name)
        if value is None:
            continue
        # A tensor of one image has three dimensions, so its length is not a count.
        least_dims = 3 if name == "image" else 0
        if isinstance(value, list | tuple) or _count_dims(value) > least_dims:
            return len(value) * per_prompt
        return per_prompt
    if call.get("latents") is not None:
        return len(call["latents"])
    for name, value in call.items():
        # A tuple is a size, and a list of fractions has a scale for each condition.
        is_list = isinstance(value, list) and not any(isinstance(item, float) for item in value)
        is_batch = is_list or _count_dims(value) > 0
        if is_batch and _ONE_FOR_EACH.search(name) and not name.startswith("negative"):
            return len(value) * per_prompt
    return per_prompt


def _count_dims(value: Any) -> int:
    """Return the number of dimensions of a tensor. Anything else has 0."""
    return getattr(value, "ndim", 0)


def check_image_size(call: Mapping[str, Any], unit: int) -> None:
    """Raise `ModelError` unless height and width, where the call has them, are whole numbers of tokens.

    Args:
        call: its arguments.
        unit: pixels of a token's side.
    """
    for name in ("height", "width"):
        value = call.get(name)
        check_value(Pixels | None, value, name, example=unit)
        if value is not None and value % unit:
            below = value - value % unit
            near = str(below + unit)
            if below and 2 * (value % unit) == unit:
                near = f"{below} or {near}"
            elif below and 2 * (value % unit) < unit:
                near = str(below)
            raise ModelError(f"{name}={value} is not a multiple of {unit}, a token of this model; try {name}={near}")


def fill_call_defaults(
    parameters: Mapping[str, inspect.Parameter], config: JsonObject, vae_scale: int, call: CallArguments
) -> CallArguments:
    """Complete call arguments by the pipeline's own defaults and its default size.

    Args:
        vae_scale: pixels along the side of a latent pixel.
    """
    side = int(config.get("sample_size") or 128) * vae_scale
    complete = {"height": side, "width": side}
    for name, parameter in parameters.items():
        if parameter.default not in (inspect.Parameter.empty, None):
            complete[name] = parameter.default
    for name, value in call.items():
        if value is not None:
            complete[name] = value
    return complete
