"""What several families share: the grid of an image, cutting and projecting tokens, and saying no to IP-adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ditile.hooks.protocols import DeferredTensor
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


def make_empty_latents(config: Mapping[str, Any], grid: Grid) -> Tensor:
    """Latents `[1, C, H, W]` of a grid, of which only the shape says anything."""
    side = int(config["patch_size"])
    return torch.empty(1, config["in_channels"], grid.rows * side, grid.tokens_per_row * side)


def slice_joint_table(table: Tensor, view: View) -> Tensor:
    """The rows of a per-token table `[text + image, ...]` (text first) that a view needs; dummy text reads any rows."""
    layout, part = view
    text = table[part.text.start : part.text.stop] if part.text else table[:DUMMY_TEXT]
    return torch.cat([text, *(table[layout.text + run.start : layout.text + run.stop] for run in part.image)])


def slice_rotary_tables(tables: tuple[Tensor, Tensor], view: View) -> tuple[Tensor, Tensor]:
    """Rotary tables (cos, sin) of a joint sequence with the text first."""
    return slice_joint_table(tables[0], view), slice_joint_table(tables[1], view)


def defer_projections(
    x: Tensor, linears: Sequence[Any], norms: Sequence[Any], heads: tuple[int, int]
) -> list[DeferredTensor]:
    """What computes q, k and v of `[B, S, C]`, each when it is called for.

    Args:
        linears: of q, k and v.
        norms: of each; None for none.
        heads: (number, -1) or (-1, size).
    """

    def project_heads(linear: Any, norm: Any) -> Tensor:
        projection: Tensor = linear(x).unflatten(-1, heads)
        return projection if norm is None else norm(projection)

    return [partial(project_heads, *pair) for pair in zip(linears, norms, strict=True)]


def defer_concatenation(first: Sequence[DeferredTensor], second: Sequence[DeferredTensor]) -> list[DeferredTensor]:
    """The same for two streams, the tokens of the second behind those of the first."""
    return [partial(_concatenate_tokens, *pair) for pair in zip(first, second, strict=True)]


def _concatenate_tokens(first: DeferredTensor, second: DeferredTensor) -> Tensor:
    return torch.cat([first(), second()], dim=1)


def explain_ip_adapter_refusal(call: Mapping[str, Any]) -> str | None:
    """They attend to image prompts in the processors that PipeFusion stands for."""
    images = ("ip_adapter_image", "ip_adapter_image_embeds")
    image_arguments = [
        name for name in (*images, *(f"negative_{name}" for name in images)) if call.get(name) is not None
    ]
    return (
        f"IP-adapter images are not supported by PipeFusion; leave {image_arguments[0]} out"
        if image_arguments
        else None
    )
