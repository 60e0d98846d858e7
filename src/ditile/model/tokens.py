"""What several families share: the grid of an image, and how its tokens are embedded, cut and projected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ditile.model.hooks.protocols import DeferredTensor
from ditile.plan.layout import Grid

TEXT_STREAM = (
    "norm1_context",
    "norm2_context",
    "ff_context",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""What sees the text alone in the blocks with two streams (MM-DiT)."""

JOINT_TENSOR_TOKENS = {
    "transformer_blocks.*.attn": {"hidden_states": "image", "encoder_hidden_states": "text"},
    "transformer_blocks.*.attn.to_out.0": {"return": "image"},
    "transformer_blocks.*.attn.to_add_out": {"return": "text"},
    "transformer_blocks.*.ff": {"hidden_states": "image"},
    "transformer_blocks.*.ff.net.2": {"return": "image"},
    "transformer_blocks.*.ff_context": {"hidden_states": "text"},
    "transformer_blocks.*.ff_context.net.2": {"return": "text"},
}
"""Their token streams under tensor parallelism, as `ModelSpec.tensor_tokens` has them."""

Forward = Callable[..., Tensor]


def build_tensor_plan(columns: Sequence[str], rows: Sequence[str]) -> dict[str, str]:
    """A table of tensor parallelism in the format of `_tp_plan`, for Linears of every transformer block."""
    styles = dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
    return {f"transformer_blocks.*.{name}": style for name, style in styles.items()}


def image_grid(transformer: nn.Module, inputs: Mapping[str, Any]) -> Grid:
    """The grid of `[B, C, H, W]` latents that the transformer cuts into square patches."""
    size: int = transformer.config.patch_size  # type: ignore[assignment, union-attr]
    height, width = inputs["hidden_states"].shape[-2:]
    return Grid(height // size, width // size)


def make_empty_latents(config: Mapping[str, Any], grid: Grid) -> Tensor:
    """Latents `[1, C, H, W]` of a grid, for their shape alone."""
    side = int(config["patch_size"])
    return torch.empty(1, config["in_channels"], grid.rows * side, grid.tokens_per_row * side)


def defer_projections(
    x: Tensor, linears: Sequence[Any], norms: Sequence[Any], heads: tuple[int, int]
) -> list[DeferredTensor]:
    """What computes q, k and v of `[B, S, C]`, each when it is called.

    Args:
        linears: of q, k and v.
        norms: of each; None for none.
        heads: (number, -1) or (-1, size).
    """

    def project_heads(linear: Any, norm: Any) -> Tensor:
        projection: Tensor = linear(x).unflatten(-1, heads)
        return projection if norm is None else norm(projection)

    return [partial(project_heads, *pair) for pair in zip(linears, norms, strict=True)]


def defer_joint_projections(
    attn: Any, image: Tensor, text: Tensor | None, heads: tuple[int, int], joint: Literal["text_first", "image_first"]
) -> list[DeferredTensor]:
    """The same for the joint attention of diffusers' MM-DiT blocks, over image `[B, S, C]` and text `[B, T, C]`."""
    linears = (attn.to_q, attn.to_k, attn.to_v)
    norms = (attn.norm_q, attn.norm_k, None)
    makes = defer_projections(image, linears, norms, heads)
    if text is None:
        return makes
    linears = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    norms = (attn.norm_added_q, attn.norm_added_k, None)
    of_text = defer_projections(text, linears, norms, heads)
    pairs = zip(*((of_text, makes) if joint == "text_first" else (makes, of_text)), strict=True)
    return [partial(_concatenate_tokens, *pair) for pair in pairs]


def _concatenate_tokens(first: DeferredTensor, second: DeferredTensor) -> Tensor:
    return torch.cat([first(), second()], dim=1)


def attend_to_projections(core: Any, makers: Sequence[DeferredTensor]) -> Tensor:
    """Attends to q, k and v: to all at once, or, if the core overlaps, each is sent while the next is computed."""
    out: Tensor = core.attend_overlapped(makers) if core.overlaps else core.attend(*(make() for make in makers))
    return out


def explain_ip_adapter_refusal(call: Mapping[str, Any]) -> str | None:
    """Why a call with image prompts is refused, or None: PipeFusion replaces the processors that attend to them."""
    for name in ("ip_adapter_image", "ip_adapter_image_embeds"):
        for argument in (name, f"negative_{name}"):
            if call.get(argument) is not None:
                return f"there is no IP-adapter here that can be divided; leave {argument} out"
    return None
