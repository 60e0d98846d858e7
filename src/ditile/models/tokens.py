"""What several families share: the grid of an image, cutting and projecting tokens, and saying no to IP-adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ditile.hooks.protocols import Make
from ditile.plan.layout import DUMMY_TEXT, Grid
from ditile.plan.spec import View

TEXT_STREAM = (
    "norm1_context", "norm2_context", "ff_context", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
    "attn.to_add_out",
)  # fmt: skip
"""What sees the text alone in the blocks with two streams (MM-DiT)."""


def image_grid(transformer: nn.Module, inputs: Mapping[str, Any]) -> Grid:
    """The grid of `[B, C, H, W]` latents that the transformer cuts into square patches."""
    size: int = transformer.config.patch_size  # type: ignore[assignment, union-attr]
    height, width = inputs["hidden_states"].shape[-2:]
    return Grid(height // size, width // size, size)


def latents(config: Mapping[str, Any], grid: Grid) -> Tensor:
    """Latents `[1, C, H, W]` of a grid, of which only the shape says anything."""
    side = int(config["patch_size"])
    return torch.empty(1, config["in_channels"], grid.rows * side, grid.tokens_per_row * side)


def joint_rows(table: Tensor, view: View) -> Tensor:
    """The rows of a per-token table `[text + image, ...]` (text first) that a view needs; dummy text reads any rows."""
    layout, part = view
    text = table[part.text.start : part.text.stop] if part.text else table[:DUMMY_TEXT]
    return torch.cat([text, *(table[layout.text + run.start : layout.text + run.stop] for run in part.image)])


def rotary(tables: tuple[Tensor, Tensor], view: View) -> tuple[Tensor, Tensor]:
    """Rotary tables (cos, sin) of a joint sequence with the text first."""
    return joint_rows(tables[0], view), joint_rows(tables[1], view)


def projections(x: Tensor, linears: Sequence[Any], norms: Sequence[Any], heads: tuple[int, int]) -> list[Make]:
    """What computes q, k and v of `[B, S, C]`, each when it is called for.

    Args:
        linears: of q, k and v.
        norms: of each; None for none.
        heads: (number, -1) or (-1, size).
    """

    def make(linear: Any, norm: Any) -> Tensor:
        made: Tensor = linear(x).unflatten(-1, heads)
        return made if norm is None else norm(made)

    return [partial(make, *pair) for pair in zip(linears, norms, strict=True)]


def behind(first: Sequence[Make], second: Sequence[Make]) -> list[Make]:
    """The same for two streams, the tokens of the second behind those of the first."""
    return [partial(_behind, *pair) for pair in zip(first, second, strict=True)]


def _behind(first: Make, second: Make) -> Tensor:
    return torch.cat([first(), second()], dim=1)


def refuse_ip_adapters(call: Mapping[str, Any]) -> str | None:
    """They attend to image prompts in the processors that PipeFusion stands for."""
    images = ("ip_adapter_image", "ip_adapter_image_embeds")
    given = [name for name in (*images, *(f"negative_{name}" for name in images)) if call.get(name) is not None]
    return f"IP-adapter images are not supported by PipeFusion; leave {given[0]} out" if given else None
