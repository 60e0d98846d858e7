"""Hollow modules: still in their place, without weights and children. Nothing of them is saved, moved or counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from diffusers.models.modeling_utils import no_init_weights
from torch import nn

Parts = tuple[dict[str, Any], ...]
"""What a module held: children, parameters, buffers."""


class StandIn(Protocol):
    """Computes a block whose own module is hollow."""

    block: nn.Module

    def __call__(self, **call: Any) -> Any:
        """The block's forward."""


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


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Models made within are on the meta device: structure and shapes alone, and no time goes into first values."""
    with no_init_weights(), torch.device("meta"):
        yield


def twin(transformer: nn.Module) -> nn.Module:
    """The structure of a transformer as its config has it, whole and without weights."""
    model: Any = transformer
    with weightless():
        made: nn.Module = type(model).from_config(model.config)
    return made


def _parts(module: nn.Module) -> Parts:
    return (module._modules, module._parameters, module._buffers)
