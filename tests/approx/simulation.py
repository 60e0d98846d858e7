"""A second opinion: PipeFusion's stale schedule in one process, by hand, without a line of ditile.

The picture is a list of patches from the first step to the last. Each block is diffusers' own and is run on the tokens
of one patch; its attention is replaced by one that keeps keys and values in segments (the text, patch 0, patch 1, ...)
and concatenates them. What arXiv 2405.14430 says, and nothing more:

- The first `warmup` steps run on the whole picture, and leave their keys and values behind.
- In each later step the patches come one after the other. A patch attends to its own fresh keys, to the fresh ones of
  patches before it, and to those that the patches behind it had in the step before (zeros if there was none).
- Text that shares attention with the picture comes with patch 0. The other patches have no text at all: they attend to
  the keys that it left in this step.

The cut. A patch is a run of token rows. The text counts as `text / columns` rows of work. Every patch should have
`share = (rows + text rows) / patches` of it, so patch 0 has `round(share - text rows)` rows, at least one, and no more
than leaves one to each other patch. The others divide the rest evenly; those in front get the rows left over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from tests.approx.solvers import SOLVERS

Keys = Literal["stale", "own", "frozen"]
"""stale: as above. Two are wrong on purpose: own: a patch sees nothing of the others; frozen: only what warmup left."""


def cut(rows: int, patches: int, text_rows: Fraction) -> list[int]:
    """The rows of each patch."""
    if patches == 1:
        return [rows]
    fair = round((rows + text_rows) / patches - text_rows)
    first = max(1, min(fair, rows - (patches - 1)))
    each, left_over = divmod(rows - first, patches - 1)
    return [first] + [each + 1] * left_over + [each] * (patches - 1 - left_over)


@dataclass
class Place:
    """Where the simulation is. The attention of every layer looks here."""

    spans: list[slice]
    text: int
    keys: Keys
    patch: int | None = None
    branch: int = 0

    @property
    def span(self) -> slice:
        """The image tokens at hand."""
        return slice(None) if self.patch is None else self.spans[self.patch]

    @property
    def text_here(self) -> int:
        """The text tokens at hand."""
        return self.text if self.patch in (None, 0) else 0


@dataclass
class Attention:
    """Keys and values of one layer, by (branch, segment); `None` is the text."""

    place: Place
    joint: Literal["none", "text_first", "image_first"]
    kept: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v of the tokens at hand, `[B, S, N, H]`."""
        place = self.place
        fresh = self.segments(k, v)
        thaw = place.keys != "frozen" or place.patch is None
        self.kept.update({name: pair for name, pair in fresh.items() if thaw or name[1] is None})
        seen = {**self.kept, **fresh}
        wanted: list[int | None] = [*range(len(place.spans))]
        if place.keys == "own" and place.patch is not None:
            wanted = [place.patch]
        if self.joint != "none":
            wanted = [None, *wanted]
        pairs = [seen.get((place.branch, name)) or self.zeros(k, name) for name in wanted]
        return softmax_attention(q, torch.cat([k for k, _ in pairs], 1), torch.cat([v for _, v in pairs], 1))

    def segments(self, k: Tensor, v: Tensor) -> dict[tuple[int, int | None], tuple[Tensor, Tensor]]:
        """The tokens at hand, cut into the text and patches."""
        place = self.place
        text = place.text_here if self.joint != "none" else 0
        image = k.shape[1] - text
        sizes = [text, image] if self.joint == "text_first" else [image, text]
        parts = list(zip(k.split(sizes, 1), v.split(sizes, 1), strict=True))
        words, (image_k, image_v) = parts if self.joint == "text_first" else reversed(parts)
        found: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}
        if text:
            found[place.branch, None] = words
        if place.patch is not None:
            found[place.branch, place.patch] = image_k, image_v
        else:
            for patch, span in enumerate(place.spans):
                found[place.branch, patch] = image_k[:, span], image_v[:, span]
        return found

    def zeros(self, k: Tensor, patch: int | None) -> tuple[Tensor, Tensor]:
        """Without warmup, the patches behind have left nothing yet in the first step."""
        assert patch is not None, "the text comes first"
        span = self.place.spans[patch]
        none = k.new_zeros(k.shape[0], span.stop - span.start, *k.shape[2:])
        return none, none


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as in the formula, in float64."""
    scores = torch.einsum("bqnh,bknh->bnqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v.double()).to(q.dtype)


def heads(attn: Any, x: Tensor, names: str, norms: tuple[str, str]) -> list[Tensor]:
    """Queries, keys and values of some tokens, normalised where the layer has norms."""
    q, k, v = (getattr(attn, name)(x).unflatten(-1, (attn.heads, -1)) for name in names.split())
    for at, norm in zip((0, 1), (getattr(attn, name, None) for name in norms), strict=True):
        if norm is not None:
            q, k = (norm(q), k) if at == 0 else (q, norm(k))
    return [q, k, v]


class ImageAttention(Attention):
    """Attention of image tokens alone."""

    def __call__(self, attn: Any, hidden_states: Tensor, *unused: Any, **also: Any) -> Tensor:
        q, k, v = heads(attn, hidden_states, "to_q to_k to_v", ("norm_q", "norm_k"))
        return attn.to_out[0](self.attend(q, k, v).flatten(2))


class JointAttention(Attention):
    """Attention of two streams (double blocks), or of one that holds both (FLUX's single blocks)."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        here, words = heads(attn, hidden_states, "to_q to_k to_v", ("norm_q", "norm_k")), encoder_hidden_states
        if words is not None:
            names = "add_q_proj add_k_proj add_v_proj"
            text = heads(attn, words, names, ("norm_added_q", "norm_added_k"))
            first, second = (text, here) if self.joint == "text_first" else (here, text)
            here = [torch.cat(pair, 1) for pair in zip(first, second, strict=True)]
        q, k, v = here
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        out = self.attend(q, k, v).flatten(2)
        if words is None:
            return out
        image, text_at = hidden_states.shape[1], words.shape[1]
        sizes = [text_at, image] if self.joint == "text_first" else [image, text_at]
        out, text_out = out.split(sizes, 1)[:: -1 if self.joint == "text_first" else 1]
        return attn.to_out[0](out), text_out if getattr(attn, "context_pre_only", None) else attn.to_add_out(text_out)


class Family:
    """A transformer run by hand on one patch. `predict` returns its part of the prediction, guidance included."""

    joint: Literal["none", "text_first", "image_first"] = "none"
    dim = 2
    unit = 2

    def __init__(self, pipe: Any, call: dict[str, Any]) -> None:
        self.pipe, self.call, self.transformer = pipe, call, pipe.transformer
        self.text = 0
        side = pipe.vae_scale_factor * 2
        self.rows, self.columns = call["height"] // side, call["width"] // side

    def layers(self) -> Iterator[tuple[Any, type[Attention], str]]:
        """(attention, its replacement, how text shares it)."""
        raise NotImplementedError

    def predict(self, x: list[Tensor], t: Tensor, place: Place) -> Tensor:
        raise NotImplementedError

    def guide(self, without: Tensor, with_prompt: Tensor) -> Tensor:
        scale = self.call.get("true_cfg_scale", self.call["guidance_scale"])
        return without + scale * (with_prompt - without)

    def unpatch(self, tokens: Tensor, channels: int) -> Tensor:
        """`[B, rows * columns, 2 * 2 * C]` to `[B, C, 2 * rows, 2 * columns]`."""
        squares = tokens.unflatten(1, (-1, self.columns)).unflatten(-1, (2, 2, channels))
        return squares.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


class PixArt(Family):
    def __init__(self, pipe: Any, call: dict[str, Any]) -> None:
        super().__init__(pipe, call)
        found = pipe.encode_prompt(call["prompt"], True, max_sequence_length=call["max_sequence_length"])
        words, mask, negative, negative_mask = found
        self.words = self.transformer.caption_projection(torch.cat([negative, words]))
        self.bias = (1 - torch.cat([negative_mask, mask]).to(words.dtype))[:, None] * -10000.0

    def layers(self) -> Iterator[tuple[Any, type[Attention], str]]:
        for block in self.transformer.transformer_blocks:
            yield block.attn1, ImageAttention, "none"

    def predict(self, x: list[Tensor], t: Tensor, place: Place) -> Tensor:
        model, latents = self.transformer, torch.cat(x, self.dim)
        tokens = model.pos_embed(torch.cat([latents, latents]))[:, place.span]
        batch = tokens.shape[0]
        nothing = {"resolution": None, "aspect_ratio": None}
        modulation, time = model.adaln_single(t.expand(batch), nothing, batch_size=batch, hidden_dtype=tokens.dtype)
        for block in model.transformer_blocks:
            tokens = block(
                tokens, encoder_hidden_states=self.words, encoder_attention_mask=self.bias, timestep=modulation
            )
        shift, scale = (model.scale_shift_table[None] + time[:, None]).chunk(2, 1)
        out = self.unpatch(model.proj_out(model.norm_out(tokens) * (1 + scale) + shift), model.out_channels)
        return self.guide(*out[:, : latents.shape[1]].chunk(2))


class SD3(Family):
    joint = "image_first"

    def __init__(self, pipe: Any, call: dict[str, Any]) -> None:
        super().__init__(pipe, call)
        prompt, length = call["prompt"], call["max_sequence_length"]
        found = pipe.encode_prompt(prompt, None, None, max_sequence_length=length)
        words, negative, self.pooled = found[0], found[1], torch.cat([found[3], found[2]])
        self.words = self.transformer.context_embedder(torch.cat([negative, words]))
        self.text = words.shape[1]

    def layers(self) -> Iterator[tuple[Any, type[Attention], str]]:
        for block in self.transformer.transformer_blocks:
            yield block.attn, JointAttention, "image_first"
            if block.attn2 is not None:
                yield block.attn2, ImageAttention, "none"

    def predict(self, x: list[Tensor], t: Tensor, place: Place) -> Tensor:
        model, latents = self.transformer, torch.cat(x, self.dim)
        tokens = model.pos_embed(torch.cat([latents, latents]))[:, place.span]
        time = model.time_text_embed(t.expand(tokens.shape[0]), self.pooled)
        words = self.words[:, : place.text_here]
        for block in model.transformer_blocks:
            words, tokens = block(hidden_states=tokens, encoder_hidden_states=words, temb=time)
        return self.guide(*self.unpatch(model.proj_out(model.norm_out(tokens, time)), model.out_channels).chunk(2))


class Flux(Family):
    joint = "text_first"
    dim = 1

    def __init__(self, pipe: Any, call: dict[str, Any]) -> None:
        super().__init__(pipe, call)
        self.unit = self.columns  # the latents are tokens already
        prompts = [call["prompt"]] + ([call["negative_prompt"]] if "true_cfg_scale" in call else [])
        self.prompts = [
            pipe.encode_prompt(prompt, None, max_sequence_length=call["max_sequence_length"]) for prompt in prompts
        ]
        self.text = self.prompts[0][0].shape[1]
        down, across = torch.arange(self.rows).repeat_interleave(self.columns), torch.arange(self.columns)
        image_ids = torch.stack([torch.zeros_like(down), down, across.repeat(self.rows)], 1)
        ids = torch.cat([torch.zeros(self.text, 3), image_ids.float()])
        self.angles = self.transformer.pos_embed(ids)

    def layers(self) -> Iterator[tuple[Any, type[Attention], str]]:
        for block in (*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks):
            yield block.attn, JointAttention, "text_first"

    def predict(self, x: list[Tensor], t: Tensor, place: Place) -> Tensor:
        found = []
        for place.branch, (words, pooled, _) in enumerate(self.prompts):
            found.append(self.call_transformer(torch.cat(x, 1), t, place, words, pooled))
        return found[0] if len(found) == 1 else self.guide(found[1], found[0])

    def call_transformer(self, x: Tensor, t: Tensor, place: Place, words: Tensor, pooled: Tensor) -> Tensor:
        model = self.transformer
        tokens = model.x_embedder(x[:, place.span])
        words = model.context_embedder(words)[:, : place.text_here]
        time = (t.to(x.dtype) / 1000 * 1000).expand(x.shape[0])
        if model.config.guidance_embeds:
            strength = torch.full_like(time, self.call["guidance_scale"]) * 1000
            embedded = model.time_text_embed(time, strength, pooled)
        else:
            embedded = model.time_text_embed(time, pooled)
        angles = tuple(torch.cat([table[: place.text_here], table[self.text :][place.span]]) for table in self.angles)
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            words, tokens = block(
                hidden_states=tokens, encoder_hidden_states=words, temb=embedded, image_rotary_emb=angles
            )
        return model.proj_out(model.norm_out(tokens, embedded))


FAMILIES: dict[str, type[Family]] = {"flux": Flux, "pixart": PixArt, "sd3": SD3}


@torch.no_grad()
def simulate(family: str, pipe: Any, call: dict[str, Any], patches: int, warmup: int, keys: Keys = "stale") -> Tensor:
    """The latents that `pipe(**call)` should end with; `call` has the first ones."""
    model = FAMILIES[family](pipe, call)
    rows = cut(model.rows, patches, Fraction(model.text, model.columns))
    spans = [slice(sum(rows[:i]) * model.columns, sum(rows[: i + 1]) * model.columns) for i in range(patches)]
    place = Place(spans, model.text, keys)
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    steps = call["num_inference_steps"]
    sigmas = {"sigmas": [1 - i / steps for i in range(steps)]} if family == "flux" else {"num_inference_steps": steps}
    scheduler.set_timesteps(**sigmas)
    solver = SOLVERS[type(scheduler)](scheduler)
    sizes = [size * model.unit for size in rows]
    x = list(call["latents"].split(sizes, model.dim))
    with hand_attention(model, place):
        for step, t in enumerate(scheduler.timesteps):
            if step < warmup:
                place.patch = None
                whole = model.predict(x, t, place).split(sizes, model.dim)
                x = [solver.step(p, step, whole[p], x[p]) for p in range(patches)]
                continue
            for p in range(patches):
                place.patch = p
                x[p] = solver.step(p, step, model.predict(x, t, place), x[p])
    return torch.cat(x, model.dim)


@contextlib.contextmanager
def hand_attention(model: Family, place: Place) -> Iterator[None]:
    """Puts the attention above into the blocks, and takes it out again."""
    stock = [(attn, attn.processor) for attn, _, _ in model.layers()]
    for attn, cls, joint in model.layers():
        attn.processor = cls(place, joint)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for attn, processor in stock:
            attn.processor = processor
