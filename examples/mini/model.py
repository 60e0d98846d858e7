"""A FLUX transformer cut before and after its blocks, so that a method can call any blocks for any tokens.

diffusers' blocks are called as they are. diffusers lets a processor replace the attention of a layer. Ours projects the
tokens at hand to q, k and v, calls `Attend` with them, and projects the output. docs/design.md: "Attend".

Letters: B batch, S tokens, T text tokens, N heads, H size of a head, D = N * H width of the blocks, C channels of the
latents, E width of T5's tokens, P width of CLIP's pooled output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(number of the layer, q, k, v) -> output of the queries; all `[B, S, N, H]`, text tokens before image tokens."""


class Prompt(NamedTuple):
    """An encoded prompt: T5's tokens `[B, T, E]`, CLIP's pooled output `[B, P]`, and the tokens' positions `[T, 3]`."""

    tokens: Tensor
    pooled: Tensor
    ids: Tensor


class Part(NamedTuple):
    """The tokens that one call computes: runs of the text and of the image, each counted from 0."""

    text: slice
    image: slice


class Tokens(NamedTuple):
    """The hidden state between two blocks, `[B, S, D]` each."""

    text: Tensor
    image: Tensor


class Context(NamedTuple):
    """What all blocks of a call are given besides the tokens: the embedded time, and tables of positions."""

    time: Tensor
    positions: tuple[Tensor, Tensor]


class Processor:
    """The attention of one layer.

    Args:
        layer: its number among all layers.
        attend: what happens between the projections.
    """

    def __init__(self, layer: int, attend: Attend) -> None:
        self.layer = layer
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output for the tokens; for image and text apart where the block gives them apart."""
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, (-1, attn.head_dim)))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, (-1, attn.head_dim)))
        value = attn.to_v(hidden_states).unflatten(-1, (-1, attn.head_dim))
        if encoder_hidden_states is not None:
            text = [
                project(encoder_hidden_states).unflatten(-1, (-1, attn.head_dim))
                for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            ]
            query = torch.cat([attn.norm_added_q(text[0]), query], dim=1)
            key = torch.cat([attn.norm_added_k(text[1]), key], dim=1)
            value = torch.cat([text[2], value], dim=1)
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        out = self.attend(self.layer, query, key, value).flatten(2, 3)
        if encoder_hidden_states is None:
            return out
        out_text, out_image = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        out_image = attn.to_out[1](attn.to_out[0](out_image.contiguous()))
        return out_image, attn.to_add_out(out_text.contiguous())


def attend_to_all(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend as one device does: all tokens are here."""
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


class Model:
    """A FLUX transformer of diffusers.

    Args:
        transformer: an instance of `FluxTransformer2DModel`, whose attention processors are replaced.
        attend: the attention of every layer.
    """

    def __init__(self, transformer: Any, attend: Attend = attend_to_all) -> None:
        if transformer.config.guidance_embeds:
            raise ValueError("guidance_embeds=True (FLUX.1-dev): this example gives the model no guidance")
        self._transformer = transformer
        self.blocks: list[nn.Module] = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
        for layer, block in enumerate(self.blocks):
            block.attn.set_processor(Processor(layer, attend))

    def embed_tokens(self, latents: Tensor, prompt: Prompt, part: Part) -> Tokens:
        """Return the tokens of a part before the first block. Latents are `[B, image tokens, C]`."""
        text = self._transformer.context_embedder(prompt.tokens[:, part.text])
        return Tokens(text, self._transformer.x_embedder(latents[:, part.image]))

    def embed_context(self, timestep: Tensor, prompt: Prompt, image_ids: Tensor, part: Part) -> Context:
        """Return what all blocks are given for a part. `timestep` is `[B]`, from 0 to 1000."""
        time = self._transformer.time_text_embed(timestep.to(prompt.pooled.dtype), prompt.pooled)
        ids = torch.cat([prompt.ids[part.text], image_ids[part.image]])
        return Context(time, self._transformer.pos_embed(ids))

    def run_blocks(self, numbers: Sequence[int], tokens: Tokens, context: Context) -> Tokens:
        """Return the tokens after some neighbouring blocks."""
        text, image = tokens
        for number in numbers:
            text, image = self.blocks[number](
                hidden_states=image,
                encoder_hidden_states=text,
                temb=context.time,
                image_rotary_emb=context.positions,
            )
        return Tokens(text, image)

    def predict(self, tokens: Tokens, context: Context) -> Tensor:
        """Return the prediction of the image tokens after the last block."""
        return self._transformer.proj_out(self._transformer.norm_out(tokens.image, context.time))
