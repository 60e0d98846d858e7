"""Transformers by hand for the simulation: diffusers' own modules, called one after the other on some of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.parallel.pipefusion.attention import Attention, ImageAttention, Joint, JointAttention, Place

Run = Callable[[Any, Any, Tensor], tuple[Any, Tensor]]
"""Runs one block: (block, text tokens, image tokens) -> both."""


def run_all(blocks: Sequence[Any], run: Run, words: Any, tokens: Tensor) -> tuple[Any, Tensor]:
    """The chain of blocks."""
    for block in blocks:
        words, tokens = run(block, words, tokens)
    return words, tokens


class Family:
    """A transformer run by hand on one patch. `predict` returns its part of the prediction, guidance included.

    Attributes:
        chain: runs its blocks; a cache by hand takes its place.
    """

    joint: Joint = "none"
    dim = 2
    unit = 2

    def __init__(self, pipe: Any, call: dict[str, Any]) -> None:
        self.pipe, self.call, self.transformer = pipe, call, pipe.transformer
        self.text, self.chain = 0, run_all
        side = pipe.vae_scale_factor * 2
        self.rows, self.columns = call["height"] // side, call["width"] // side

    def layers(self) -> Iterator[tuple[Any, type[Attention], Joint]]:
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
        results = pipe.encode_prompt(call["prompt"], True, max_sequence_length=call["max_sequence_length"])
        words, mask, negative, negative_mask = results
        self.words = self.transformer.caption_projection(torch.cat([negative, words]))
        self.bias = (1 - torch.cat([negative_mask, mask]).to(words.dtype))[:, None] * -10000.0

    def layers(self) -> Iterator[tuple[Any, type[Attention], Joint]]:
        for block in self.transformer.transformer_blocks:
            yield block.attn1, ImageAttention, "none"

    def predict(self, x: list[Tensor], t: Tensor, place: Place) -> Tensor:
        model, latents = self.transformer, torch.cat(x, self.dim)
        tokens = model.pos_embed(torch.cat([latents, latents]))[:, place.span]
        batch = tokens.shape[0]
        nothing = {"resolution": None, "aspect_ratio": None}
        modulation, time = model.adaln_single(t.expand(batch), nothing, batch_size=batch, hidden_dtype=tokens.dtype)

        def run(block: Any, words: None, tokens: Tensor) -> tuple[None, Tensor]:
            return None, block(
                tokens, encoder_hidden_states=self.words, encoder_attention_mask=self.bias, timestep=modulation
            )

        _, tokens = self.chain(model.transformer_blocks, run, None, tokens)
        shift, scale = (model.scale_shift_table[None] + time[:, None]).chunk(2, 1)
        out = self.unpatch(model.proj_out(model.norm_out(tokens) * (1 + scale) + shift), model.out_channels)
        return self.guide(*out[:, : latents.shape[1]].chunk(2))


class SD3(Family):
    joint = "image_first"

    def __init__(self, pipe: Any, call: dict[str, Any]) -> None:
        super().__init__(pipe, call)
        prompt, length = call["prompt"], call["max_sequence_length"]
        results = pipe.encode_prompt(prompt, None, None, max_sequence_length=length)
        words, negative, self.pooled = results[0], results[1], torch.cat([results[3], results[2]])
        self.words = self.transformer.context_embedder(torch.cat([negative, words]))
        self.text = words.shape[1]

    def layers(self) -> Iterator[tuple[Any, type[Attention], Joint]]:
        for block in self.transformer.transformer_blocks:
            yield block.attn, JointAttention, "image_first"
            if block.attn2 is not None:
                yield block.attn2, ImageAttention, "none"

    def predict(self, x: list[Tensor], t: Tensor, place: Place) -> Tensor:
        model, latents = self.transformer, torch.cat(x, self.dim)
        tokens = model.pos_embed(torch.cat([latents, latents]))[:, place.span]
        time = model.time_text_embed(t.expand(tokens.shape[0]), self.pooled)
        words = self.words[:, : place.text_here]

        def run(block: Any, words: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return block(hidden_states=tokens, encoder_hidden_states=words, temb=time)

        words, tokens = self.chain(model.transformer_blocks, run, words, tokens)
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

    def layers(self) -> Iterator[tuple[Any, type[Attention], Joint]]:
        for block in (*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks):
            yield block.attn, JointAttention, "text_first"

    def predict(self, x: list[Tensor], t: Tensor, place: Place) -> Tensor:
        results = []
        for place.branch, (words, pooled, _) in enumerate(self.prompts):
            results.append(self.call_transformer(torch.cat(x, 1), t, place, words, pooled))
        return results[0] if len(results) == 1 else self.guide(results[1], results[0])

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

        def run(block: Any, words: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return block(hidden_states=tokens, encoder_hidden_states=words, temb=embedded, image_rotary_emb=angles)

        blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
        words, tokens = self.chain(blocks, run, words, tokens)
        return model.proj_out(model.norm_out(tokens, embedded))


FAMILIES: dict[str, type[Family]] = {"flux": Flux, "pixart": PixArt, "sd3": SD3}
