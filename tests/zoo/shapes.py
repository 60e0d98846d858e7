"""Pipelines without a text encoder, around transformers of many shapes, as users write them.

What they draw comes from embeddings, labels or a picture, so ditile cannot make up their arguments: transformers are
derived from an example, or from the arguments of the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional

import ditile
from ditile import Plan
from ditile.model.pipeline_calls import find_denoisers
from ditile.plan.errors import StateError
from ditile_lab.study.prove import forget_anatomy
from tests import tiny
from tests.families import noise
from tests.zoo.own import CHANNELS, TEXT_WIDTH, WIDTH, Denoising, Mlp, SelfAttention, sinusoid
from tests.zoo.rows import compare_drawings

HEIGHT, ROW = 5, 8
"""Of the latents: as many tokens as `LabelTransformer` has positions."""
NO_LABEL = 10


class CrossBlock(nn.Module):
    """Attends to the image, then to the text."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross_attention, self.mlp = SelfAttention(), SelfAttention(), Mlp()

    def forward(self, x: Tensor, text: Tensor, temb: Tensor, mask: Tensor | None = None) -> Any:
        x = x + self.attention(x * (1 + temb[:, None]))
        x = x + self.cross_attention(x, text, mask)
        return x + self.mlp(x)


class NothingBesideBlock(CrossBlock):
    """Returns its tokens and None, as blocks do that could return weights of attention."""

    def forward(self, text: Tensor, x: Tensor, temb: Tensor) -> Any:
        x = super().forward(x, text, temb)
        return x, None


class PackedAttention(nn.Module):
    """Queries, keys and values of one projection, and norms across heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_q, self.norm_k = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(functional.layer_norm(x, (WIDTH,))).chunk(3, dim=-1)
        heads = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.norm_q(q), self.norm_k(k), v)
        )
        return self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class ImageBlock(nn.Module):
    """Attends to the image alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = PackedAttention(), Mlp()

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        x = x + self.attention(x * (1 + temb[:, None]))
        return x + self.mlp(x)


class PositionBlock(ImageBlock):
    """Has a table of positions of its own, of which it takes as many rows as it is given tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(1, HEIGHT * ROW, WIDTH))

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        x = x + self.attention((x + self.positions[:, : x.shape[1]]) * (1 + temb[:, None]))
        return x + self.mlp(x)


class MultiheadBlock(CrossBlock):
    """Attends by torch's module, which computes weights that nobody uses unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross_attention = (nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor, temb: Tensor, mask: Tensor | None = None) -> Any:
        modulated = functional.layer_norm(x, (WIDTH,)) * (1 + temb[:, None])
        x = x + self.attention(modulated, modulated, modulated)[0]
        x = x + self.cross_attention(x, text, text, need_weights=False)[0]
        return x + self.mlp(x)


class PlainTransformer(nn.Module):
    """A module of torch alone: it knows neither its device nor its dtype."""

    block: type[nn.Module] = CrossBlock

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_text = nn.Linear(CHANNELS, WIDTH), nn.Linear(TEXT_WIDTH, WIDTH)
        self.embed_time, self.head = nn.Linear(1, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def embed_latents(self, x: Tensor, t: Any) -> tuple[Tensor, Tensor]:
        """The tokens of latents of any number of dimensions, and the embedding of the time."""
        t = torch.as_tensor(t, dtype=x.dtype).reshape(-1).expand(len(x))
        tokens = self.embed(x.flatten(2).mT)
        return tokens + sinusoid(tokens.shape[1])[None], self.embed_time(t[:, None])

    def unembed(self, tokens: Tensor, x: Tensor) -> Tensor:
        return self.head(functional.layer_norm(tokens, (WIDTH,))).mT.unflatten(2, x.shape[2:])

    def forward(self, x: Tensor, t: Any, text: Tensor, mask: Tensor | None = None) -> Any:
        (tokens, temb), text = self.embed_latents(x, t), self.embed_text(text)
        mask = None if mask is None else mask[:, None, None]
        for block in self.blocks:
            tokens = block(tokens, text, temb, mask)
        return self.unembed(tokens, x)


class Transformer(PlainTransformer, ModelMixin, ConfigMixin):  # type: ignore[misc]
    """One list of blocks."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()


class TimeFirstTransformer(Transformer):
    """Time and text come before the latents, in the model and in its blocks."""

    block = NothingBesideBlock

    def forward(self, t: Tensor, text: Tensor, x: Tensor) -> Any:
        (tokens, temb), text = self.embed_latents(x, t), self.embed_text(text)
        for block in self.blocks:
            tokens, _ = block(text, tokens, temb)
        return self.unembed(tokens, x)


class MultiheadTransformer(Transformer):
    """Attention by torch's module."""

    block = MultiheadBlock


class LabelTransformer(Transformer):
    """Draws a class; a learned table of positions makes its size the only one."""

    block = ImageBlock

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.labels = nn.Embedding(NO_LABEL + 1, WIDTH)
        self.positions = nn.Parameter(torch.empty(1, HEIGHT * ROW, WIDTH))

    def forward(self, x: Tensor, t: Any, y: Tensor) -> Any:
        tokens, temb = self.embed_latents(x, t)
        tokens, temb = tokens + self.positions, temb + self.labels(y)
        for block in self.blocks:
            tokens = block(tokens, temb)
        return self.unembed(tokens, x)


class PositionTransformer(LabelTransformer):
    """Positions within blocks."""

    block = PositionBlock


class PictureTransformer(Transformer):
    """A picture beside the latents, as tokens of the same sequence."""

    block = ImageBlock

    def forward(self, x: Tensor, t: Any, picture: Tensor) -> Any:
        tokens, temb = self.embed_latents(x, t)
        joint = torch.cat([tokens, self.embed_latents(picture, t)[0]], dim=1)
        for block in self.blocks:
            joint = block(joint, temb)
        return self.unembed(joint[:, : tokens.shape[1]], x)


class EmbedsPipeline(Denoising):
    """Text comes as embeddings."""

    @torch.no_grad()
    def __call__(
        self,
        prompt_embeds: Tensor,
        negative_prompt_embeds: Tensor | None = None,
        mask: Tensor | None = None,
        size: tuple[int, ...] = (HEIGHT, ROW),
        num_inference_steps: int = 3,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor]:
        rows = len(prompt_embeds)
        latents = torch.randn(rows, CHANNELS, *size, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            prediction = self.predict(latents, timestep / 1000, prompt_embeds, negative_prompt_embeds, mask)
            latents = self.scheduler.step(prediction, timestep, latents, return_dict=False)[0]
        return (latents,)

    def predict(self, latents: Tensor, t: Tensor, text: Tensor, negative: Tensor | None, mask: Tensor | None) -> Tensor:
        """Guidance in two calls, all arguments by position."""
        positive = self.call_model(latents, t, text)
        if negative is None:
            return positive
        other = self.call_model(latents, t, negative)
        return other + 3.0 * (positive - other)

    def call_model(self, latents: Tensor, t: Tensor, text: Tensor) -> Tensor:
        return self.transformer(latents, t, text)


class MaskedPipeline(EmbedsPipeline):
    """Guidance in one call, of texts with a mask."""

    def predict(self, latents: Tensor, t: Tensor, text: Tensor, negative: Tensor | None, mask: Tensor | None) -> Tensor:
        assert negative is not None and mask is not None
        both = self.transformer(torch.cat([latents] * 2), t, torch.cat([text, negative]), torch.cat([mask] * 2))
        positive, other = both.chunk(2)
        return other + 3.0 * (positive - other)


class TimeFirstPipeline(EmbedsPipeline):
    """The latents come last."""

    def call_model(self, latents: Tensor, t: Tensor, text: Tensor) -> Tensor:
        return self.transformer(t, text, latents)


class DenoiserPipeline(EmbedsPipeline):
    """Its model has another name."""

    def __init__(self, denoiser: Any, scheduler: Any) -> None:
        DiffusionPipeline.__init__(self)
        self.register_modules(denoiser=denoiser, scheduler=scheduler)

    def call_model(self, latents: Tensor, t: Tensor, text: Tensor) -> Tensor:
        return self.denoiser(latents, t, text)


class LabelPipeline(EmbedsPipeline):
    """Draws classes."""

    @torch.no_grad()
    def __call__(
        self, labels: list[int], num_inference_steps: int = 3, generator: torch.Generator | None = None
    ) -> tuple[Tensor]:
        y = torch.tensor([*labels, *[NO_LABEL] * len(labels)])
        latents = torch.randn(len(labels), CHANNELS, HEIGHT, ROW, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            positive, other = self.transformer(torch.cat([latents] * 2), timestep / 1000, y).chunk(2)
            prediction = other + 3.0 * (positive - other)
            latents = self.scheduler.step(prediction, timestep, latents, return_dict=False)[0]
        return (latents,)


class PicturePipeline(EmbedsPipeline):
    """Draws what a picture says, in its size."""

    @torch.no_grad()
    def __call__(
        self,
        image: Tensor,
        num_inference_steps: int = 3,
        generator: torch.Generator | None = None,
        callback_on_step_end: Callable[..., Any] | None = None,
    ) -> tuple[Tensor]:
        latents = torch.randn(image.shape, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for step, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            prediction = self.transformer(latents, timestep / 1000, image)
            latents = self.scheduler.step(prediction, timestep, latents, return_dict=False)[0]
            if callback_on_step_end is not None:
                latents = callback_on_step_end(self, step, timestep, {"latents": latents}).get("latents", latents)
        return (latents,)


def make_pipe(pipeline: type[Any], transformer: type[Any]) -> Any:
    pipe = pipeline(tiny.randomise(transformer(), gain=1.0), FlowMatchEulerDiscreteScheduler(shift=1.5))
    return tiny.quiet(pipe)


def give_embeds(rows: int) -> dict[str, Any]:
    return {"prompt_embeds": noise(rows, 6, TEXT_WIDTH), "negative_prompt_embeds": noise(rows, 6, TEXT_WIDTH, seed=1)}


def give_masked_embeds(rows: int) -> dict[str, Any]:
    mask = torch.ones(rows, 6, dtype=torch.bool)
    mask[:, 4:] = False
    return {**give_embeds(rows), "mask": mask}


SHAPES: Mapping[str, tuple[type[Any], type[Any], Callable[[int], dict[str, Any]]]] = {
    "two calls, by position": (EmbedsPipeline, Transformer, give_embeds),
    "one call, masks": (MaskedPipeline, Transformer, give_masked_embeds),
    "torch's attention module": (EmbedsPipeline, MultiheadTransformer, give_embeds),
    "latents last": (TimeFirstPipeline, TimeFirstTransformer, give_embeds),
    "plain module of another name": (DenoiserPipeline, PlainTransformer, give_embeds),
    "labels, one size": (LabelPipeline, LabelTransformer, lambda rows: {"labels": [3, 7][:rows]}),
    "a picture": (PicturePipeline, PictureTransformer, lambda rows: {"image": noise(rows, CHANNELS, HEIGHT, ROW)}),
}
"""Name -> the pipeline, the transformer, and the arguments for so many rows."""

PLANS = {
    "pipefusion": {"pipefusion": 2, "patches": 3, "warmup": 99},
    "ulysses": {"ulysses": 2},
    "ring": {"ring": 2},
    "tensor": {"tensor": 2},
    "distrifusion": {"distrifusion": 2, "warmup": 99},
    "cfg": {"cfg": 2},
    "data": {"data": 2},
    "a replica without rows": {"data": 2},
}


def draw(pipe: Any, name: str, rows: int) -> torch.Tensor:
    drawn: torch.Tensor = pipe(**SHAPES[name][2](rows), generator=torch.Generator().manual_seed(7))[0]
    return drawn


def draw_plans(name: str) -> dict[str, str]:
    """On each of two ranks: what is wrong with each plan; every second one is given an example."""
    pipeline, transformer, give = SHAPES[name]
    wrong = {}
    for number, (axis, degrees) in enumerate(PLANS.items()):
        if axis == "cfg" and name == "a picture":
            continue
        rows = 2 if axis == "data" else 1
        want = draw(make_pipe(pipeline, transformer), name, rows)
        pipe = make_pipe(pipeline, transformer)
        forget_anatomy(next(iter(find_denoisers(pipe).values())))
        example = give(1) if number % 2 else None
        runner = ditile.parallelize(pipe, Plan(**degrees), keep_weights=True, example=example)
        wrong[axis] = compare_drawings([draw(runner, name, rows)], [want], 1e-5)
        runner.restore()
        wrong[axis] = wrong[axis] or compare_drawings([draw(pipe, name, rows)], [want], 0.0)
    return {axis: problem for axis, problem in wrong.items() if problem}


def call_ranks_unlike() -> str:
    """On each of two ranks: what a first call says that differs between the ranks."""
    pipe = make_pipe(EmbedsPipeline, Transformer)
    forget_anatomy(pipe.transformer)
    runner = ditile.parallelize(pipe, Plan(ulysses=2))
    embeds = give_embeds(1)
    if runner.mesh.rank:
        embeds["prompt_embeds"] = embeds["prompt_embeds"] + 1
    try:
        runner(**embeds)
    except StateError as error:
        return str(error)
    return ""
