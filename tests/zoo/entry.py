"""What the collection holds: a pipeline, how it is made, and the calls that tell dimensions of its tensors apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from tests.families import EVERY
from tests.tiny import quiet, randomise

Call = Callable[[], dict[str, Any]]
VARIANTS = ("larger", "other_prompt", "two_images", "padded_prompt")

# Text lengths, which no number of image tokens, heads or channels here is equal to.
TEXT, OTHER_TEXT, NEGATIVE_TEXT, SHORT_TEXT = 11, 13, 9, 6


@dataclass(frozen=True)
class Entry:
    """A pipeline of diffusers with tiny random weights, and the arguments of small calls of it.

    `call` is a call of a few steps that returns latents where the pipeline can. The others differ from it in one thing:
    `larger` in the number of image tokens, `other_prompt` in the length of the text, `two_images` in the number of
    pictures (or videos, or sounds), `padded_prompt` has two prompts of unlike length. One that the pipeline itself
    cannot do is None. Each call makes its arguments anew, with a new generator.
    """

    name: str
    use_rank: int
    make: Callable[[], Any]
    call: Call
    larger: Call | None
    other_prompt: Call | None
    two_images: Call | None
    padded_prompt: Call | None
    transformers: tuple[str, ...] = ("transformer",)


def entry(
    name: str,
    use_rank: int,
    make: Callable[[], Any],
    base: Call,
    *,
    transformers: tuple[str, ...] = ("transformer",),
    **variants: dict[str, Any] | Call | str,
) -> Entry:
    """An entry whose variants are changes of the arguments of `base`, or the reason why there is none."""
    calls = {each: None if isinstance(change, str) else _call(base, change) for each, change in variants.items()}
    return Entry(name, use_rank, _seeded(make), _call(base, {}), transformers=transformers, **calls)


def _call(base: Call, changes: dict[str, Any] | Call) -> Call:
    def arguments() -> dict[str, Any]:
        common = {"num_inference_steps": 3, "output_type": "latent", "generator": torch.Generator().manual_seed(7)}
        call = common | base() | (changes() if callable(changes) else changes)
        return {name: value for name, value in call.items() if value is not REMOVED}

    return arguments


REMOVED = object()  # as a change of an argument: the call does not have it


def _seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = make()
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                component.eval()
        return quiet(pipe)

    return made


def transformer(name: str, seed: int = 0, **changes: Any) -> Any:
    """The transformer of a family's table, tiny and random, with other values in its config where they are given."""
    family = EVERY[name]
    model = family._replace(config=family.config | changes).make()
    return randomise(model, seed=seed, gain=1.0) if seed else model


def embeds(length: int = TEXT, width: int = 16, rows: int = 1, seed: int = 1) -> Tensor:
    """Text embeddings: [rows, length, width]."""
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed + length))


def guided(length: int = TEXT, negative: int = NEGATIVE_TEXT, width: int = 16, rows: int = 1) -> dict[str, Any]:
    """Embeddings of a prompt and of a negative one."""
    return {
        "prompt_embeds": embeds(length, width, rows), "negative_prompt_embeds": embeds(negative, width, rows, seed=2)
    }  # fmt: skip


def masked_text(length: int = TEXT, width: int = 16, rows: int = 1, *, mask: str = "prompt_attention_mask") -> Any:
    """The same of one length, both with a mask, whose name for the prompt is given."""
    ones = torch.ones(rows, length, dtype=torch.bool)
    return guided(length, length, width, rows) | {mask: ones, f"negative_{mask}": ones}


def padded_text(width: int = 16, *, mask: str = "prompt_attention_mask") -> dict[str, Any]:
    """The same of two prompts of unlike length, and of two negative ones."""
    text, of_text = padded_embeds(width)
    call: dict[str, Any] = masked_text(width=width, rows=2, mask=mask)
    return call | {"prompt_embeds": text, mask: of_text}


def padded_embeds(width: int = 16, length: int = TEXT, short: int = SHORT_TEXT) -> tuple[Tensor, Tensor]:
    """Embeddings of two prompts, the second of which is padded with zeros behind, and the boolean mask of its text."""
    made, mask = embeds(length, width, rows=2), torch.ones(2, length, dtype=torch.bool)
    mask[1, short:] = False
    return made * mask[..., None], mask


def to_long(call: dict[str, Any]) -> dict[str, Any]:
    """The same text, its masks of integers."""
    return {name: value.long() if "mask" in name else value for name, value in call.items()}


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def film(frames: int, height: int, width: int, seed: int = 0) -> list[Image.Image]:
    """A video of noise."""
    return [picture(height, width, seed + frame) for frame in range(frames)]
