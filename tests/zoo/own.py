"""Two transformers that are not in diffusers, as a user may write them, each with a small pipeline.

`TextFirstTransformer` has two lists: blocks of two streams, text first among the keys, then blocks of one sequence; its
prompts are padded, and a mask says where. `FrameTransformer` has video tokens, attends to the text across, and adds a
row of a table of frames to the tokens of each frame.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional

from tests import tiny
from tests.zoo.entry import Entry, entry

WIDTH, HEADS, CHANNELS, TEXT_WIDTH = 32, 4, 4, 16


class SelfAttention(nn.Module):
    """Attention of tokens to each other, and to others where they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = functional.layer_norm(x, (WIDTH,))
        keys = x if keys is None else keys
        heads = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q(x), self.k(keys), self.v(keys))
        )
        out = functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


class Mlp(nn.Sequential):
    """A norm and two Linears."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class TwoStreamBlock(nn.Module):
    """Text and image attend to both, text first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.text_mlp, self.image_mlp = SelfAttention(), Mlp(), Mlp()

    def forward(self, image: Tensor, text: Tensor, table: Tensor, temb: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        joint = torch.cat([text, image], dim=1) + table
        out = self.attention(joint * (1 + temb[:, None]), mask=mask)
        text, image = text + out[:, : text.shape[1]], image + out[:, text.shape[1] :]
        return text + self.text_mlp(text), image + self.image_mlp(image)


class OneStreamBlock(nn.Module):
    """Tokens of both in one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(), Mlp()

    def forward(self, x: Tensor, table: Tensor, temb: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention((x + table) * (1 + temb[:, None]), mask=mask)
        return x + self.mlp(x)


class TextFirstTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Blocks of two streams, then of one sequence, text first."""

    @register_to_config
    def __init__(self, num_layers: int = 2, num_single_layers: int = 2) -> None:
        super().__init__()
        self.embed, self.embed_text = nn.Linear(CHANNELS, WIDTH), nn.Linear(TEXT_WIDTH, WIDTH)
        self.embed_time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(TwoStreamBlock() for _ in range(num_layers))
        self.single_blocks = nn.ModuleList(OneStreamBlock() for _ in range(num_single_layers))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, text_mask: Tensor
    ) -> tuple[Tensor]:
        height = hidden_states.shape[2]
        image, text = self.embed(hidden_states.flatten(2).mT), self.embed_text(encoder_hidden_states)
        temb, table = self.embed_time(timestep[:, None]), sinusoid(text.shape[1] + image.shape[1])[None]
        everywhere = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
        mask = torch.cat([text_mask, everywhere], dim=1)[:, None, None]
        for block in self.blocks:
            text, image = block(image, text, table, temb, mask)
        joint = torch.cat([text, image], dim=1)
        for block in self.single_blocks:
            joint = block(joint, table, temb, mask)
        return (self.head(functional.layer_norm(joint[:, text.shape[1] :], (WIDTH,))).mT.unflatten(2, (height, -1)),)


class FrameBlock(nn.Module):
    """Tokens of all frames attend to each other, and to the text."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross_attention, self.mlp = SelfAttention(), SelfAttention(), Mlp()

    def forward(self, x: Tensor, text: Tensor, frames: Tensor, temb: Tensor, shift: Tensor | None = None) -> Tensor:
        x = x if shift is None else x + shift
        x = x + self.attention((x + frames) * (1 + temb[:, None]))
        x = x + self.cross_attention(x, text)
        return x + self.mlp(x)


class FrameTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Video tokens, with a row of a table for the tokens of each frame."""

    @register_to_config
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed, self.embed_text = nn.Linear(CHANNELS, WIDTH), nn.Linear(TEXT_WIDTH, WIDTH)
        self.embed_time = nn.Linear(1, WIDTH)
        self.frame_blocks = nn.ModuleList(FrameBlock() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, shift: Tensor | None = None
    ) -> tuple[Tensor]:
        frames, *size = hidden_states.shape[2:]
        x, text = self.embed(hidden_states.flatten(2).mT), self.embed_text(encoder_hidden_states)
        table = sinusoid(frames).repeat_interleave(size[0] * size[1], dim=0)[None]
        temb = self.embed_time(timestep[:, None])
        for block in self.frame_blocks:
            x = block(x, text, table, temb, shift)
        return (self.head(functional.layer_norm(x, (WIDTH,))).mT.unflatten(2, (frames, *size)),)


def sinusoid(length: int) -> Tensor:
    """A table of positions: [length, WIDTH]."""
    angles = torch.arange(length)[:, None] / 10 ** torch.linspace(0, 3, WIDTH // 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Denoising(DiffusionPipeline):  # type: ignore[misc]
    """What has a loop of its own.

    Args:
        transformer, scheduler: what it calls there.
    """

    transformer: Any

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)


class OwnPipeline(Denoising):
    """Guidance of two calls, with texts of unlike length; latents of a picture, or of a video if frames are given."""

    vae_scale_factor = 8

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] = "",
        height: int = 40,
        width: int = 56,
        num_frames: int = 0,
        num_inference_steps: int = 3,
        num_images_per_prompt: int = 1,
        guidance_scale: float = 3.0,
        generator: torch.Generator | None = None,
        output_type: str = "latent",
        shift: Tensor | None = None,
    ) -> tuple[Tensor]:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        prompts = [each for each in prompts for _ in range(num_images_per_prompt)]
        size = [*([(num_frames + 3) // 4] if num_frames else []), height // 8, width // 8]
        latents = torch.randn(len(prompts), CHANNELS, *size, generator=generator)
        branches = [encode(prompts), *([encode(["of no kind"] * len(prompts))] if guidance_scale > 1 else [])]
        self.scheduler.set_timesteps(num_inference_steps)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            predictions = []
            for text, mask in branches:
                call = {"text_mask": mask} if isinstance(self.transformer, TextFirstTransformer) else {"shift": shift}
                predictions.append(
                    self.transformer(
                        hidden_states=latents, timestep=timestep.expand(len(latents)) / 1000,
                        encoder_hidden_states=text, **call,
                    )[0]
                )  # fmt: skip
            prediction = predictions[0]
            if len(predictions) > 1:
                prediction = predictions[1] + guidance_scale * (predictions[0] - predictions[1])
            latents = self.scheduler.step(prediction, timestep, latents, return_dict=False)[0]
        return (latents,)


def encode(prompts: list[str]) -> tuple[Tensor, Tensor]:
    """A vector for each word, padded to the longest prompt, and the mask of the words: [B, T, C], [B, T]."""
    words = [prompt.split() for prompt in prompts]
    length = max(map(len, words))
    text, mask = torch.zeros(len(words), length, TEXT_WIDTH), torch.zeros(len(words), length, dtype=torch.bool)
    for row, of_row in enumerate(words):
        for k, word in enumerate(of_row):
            text[row, k] = torch.randn(TEXT_WIDTH, generator=torch.Generator().manual_seed(sum(word.encode())))
        mask[row, : len(of_row)] = True
    return text, mask


def own(transformer: Any) -> Any:
    return OwnPipeline(tiny.randomise(transformer, gain=1.0), FlowMatchEulerDiscreteScheduler(shift=1.5))


PROMPT, LONG_PROMPT = "a red ring of eleven words", "a red ring on the left of a large blue square"


def of_own(name: str, make: Any, **changes: Any) -> Entry:
    return entry(
        name, 99, lambda: own(make()), lambda: {"prompt": PROMPT, "height": 40, "width": 56, **changes},
        larger={"height": 56}, other_prompt={"prompt": LONG_PROMPT}, two_images={"num_images_per_prompt": 2},
        padded_prompt={"prompt": [PROMPT, LONG_PROMPT]},
    )  # fmt: skip


OWN = {
    one.name: one
    for one in (of_own("own-text-first", TextFirstTransformer), of_own("own-frames", FrameTransformer, num_frames=9))
}
"""Entries of transformers that no table knows: they are derived when they are loaded."""
