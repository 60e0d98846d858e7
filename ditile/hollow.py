"""Hollow modules: still in their place, without weights and children. Nothing of them is saved, moved or counted."""

from __future__ import annotations

from typing import Any

from torch import nn

Parts = tuple[dict[str, Any], ...]
"""What a module held: children, parameters, buffers."""


def hollow(module: nn.Module) -> Parts:
    """Takes everything out of a module, and returns it."""
    held = _parts(module)
    kept = tuple(dict(part) for part in held)
    for part in held:
        part.clear()
    return kept


def refill(module: nn.Module, kept: Parts) -> None:
    """Puts back what `hollow` took out."""
    for part, held in zip(_parts(module), kept, strict=True):
        part.clear()
        part.update(held)


def is_hollow(module: nn.Module) -> bool:
    """Whether a module has neither children nor parameters, as an activation function has none either."""
    return not module._modules and not module._parameters


def _parts(module: nn.Module) -> Parts:
    return (module._modules, module._parameters, module._buffers)
