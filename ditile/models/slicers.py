"""What several families share: the grid of an image, cutting per-token tables, and saying no to IP-adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ditile.layout import DUMMY_TEXT, Grid
from ditile.spec import View


def image_grid(transformer: nn.Module, inputs: Mapping[str, Any]) -> Grid:
    """The grid of `[B, C, H, W]` latents that the transformer cuts into square patches."""
    size: int = transformer.config.patch_size  # type: ignore[assignment, union-attr]
    height, width = inputs["hidden_states"].shape[-2:]
    return Grid(height // size, width // size, size)


def joint_rows(table: Tensor, view: View) -> Tensor:
    """The rows of a per-token table `[text + image, ...]` (text first) that a view needs; dummy text reads any rows."""
    layout, part = view
    text = table[part.text.start : part.text.stop] if part.text else table[:DUMMY_TEXT]
    return torch.cat([text, *(table[layout.text + run.start : layout.text + run.stop] for run in part.image)])


def rotary(tables: tuple[Tensor, Tensor], view: View) -> tuple[Tensor, Tensor]:
    """Rotary tables (cos, sin) of a joint sequence with the text first."""
    return joint_rows(tables[0], view), joint_rows(tables[1], view)


def refuse_ip_adapters(call: Mapping[str, Any]) -> str | None:
    """They attend to image prompts in the processors that PipeFusion stands for."""
    images = ("ip_adapter_image", "ip_adapter_image_embeds")
    given = [name for name in (*images, *(f"negative_{name}" for name in images)) if call.get(name) is not None]
    return f"IP-adapter images are not supported by PipeFusion; leave {given[0]} out" if given else None
