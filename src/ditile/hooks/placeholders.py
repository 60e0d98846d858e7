"""Hollow modules: still in their place, without weights and children. Nothing of them is saved, moved or counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from diffusers.models.modeling_utils import no_init_weights
from torch import nn

ModuleContents = tuple[dict[str, Any], ...]
"""What a module held: children, parameters, buffers."""


class ReplacementBlock(Protocol):
    """Computes a block whose own module is hollow."""

    block: nn.Module

    def __call__(self, **call: Any) -> Any:
        """The block's forward."""


def turn_into_placeholder(module: nn.Module) -> ModuleContents:
    """Takes everything out of a module, and returns it."""
    containers = _list_contents(module)
    contents = tuple(dict(container) for container in containers)
    for container in containers:
        container.clear()
    return contents


def restore_contents(module: nn.Module, contents: ModuleContents) -> None:
    """Puts back what `hollow` took out."""
    for container, content in zip(_list_contents(module), contents, strict=True):
        container.clear()
        container.update(content)


def is_placeholder(module: nn.Module) -> bool:
    """Whether a module has neither children nor parameters, as an activation function has none either."""
    return not module._modules and not module._parameters


@contextlib.contextmanager
def init_on_meta_device() -> Iterator[None]:
    """Models made within are on the meta device: structure and shapes alone, and no time goes into first values."""
    with no_init_weights(), torch.device("meta"):
        yield


def build_meta_model(transformer: nn.Module) -> nn.Module:
    """The structure of a transformer as its config has it, whole and without weights."""
    model: Any = transformer
    with init_on_meta_device():
        meta_model: nn.Module = type(model).from_config(model.config)
    return meta_model


def _list_contents(module: nn.Module) -> ModuleContents:
    return (module._modules, module._parameters, module._buffers)
