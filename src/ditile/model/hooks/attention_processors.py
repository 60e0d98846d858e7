"""The attention processors of diffusers' models: where they are, and how their calls are made faster."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from diffusers.models.attention import AttentionModuleMixin
from torch import nn

from ditile.model.hooks.overrides import override_attribute

UNFUSE = "call pipe.transformer.unfuse_qkv_projections()"
"""Advice that undoes diffusers' `fuse_qkv_projections`; few pipelines have a method of that name."""
REPEATING = ("Krea2AttnProcessor",)
"""diffusers' processors that repeat each key for the queries that share it, before they attend."""


def has_fused_projections(attention: Any) -> bool:
    """Return whether q, k and v come from diffusers' `fuse_qkv_projections`.

    Newer layers say so themselves. Older ones have a special processor; their flag stays set after they are unfused.
    """
    if isinstance(attention, AttentionModuleMixin):
        return bool(attention.fused_projections)
    return type(getattr(attention, "processor", None)).__name__.startswith("Fused")


def count_key_repeats(attention: Any) -> int:
    """Return how often a layer repeats each key: once for each head of queries that shares it."""
    processor = type(getattr(attention, "processor", None))
    if processor.__name__ in REPEATING and processor.__module__.startswith("diffusers."):
        return int(attention.num_heads // attention.num_kv_heads)
    return 1


def find_attention_processors(transformer: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield (name, module, processor) of every module with an attention processor."""
    for name, module in transformer.named_modules():
        processor = getattr(module, "processor", None)
        if processor is not None:
            yield name, module, processor


@contextmanager
def restore_processors_on_error(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the models' processors after an error, because pipelines that replace them only do so at their end."""
    before: list[tuple[str, Any, Any]] = []
    for model in models:
        before += find_attention_processors(model)
    try:
        yield
    except BaseException:
        for _, module, processor in before:
            if module.processor is not processor:
                module.set_processor(processor)
        raise


def cache_signatures(stack: ExitStack, block: nn.Module) -> None:
    """Cache each processor's signature until the stack is closed; diffusers computes it in every call (0.1 ms)."""
    for _, module, processor in find_attention_processors(block):
        # A copy of a module would hold its weights.
        if isinstance(processor, nn.Module):
            continue
        ready = copy.copy(processor)
        signed_call = functools.partial(type(processor).__call__, processor)
        signed_call.__signature__ = inspect.signature(processor.__call__)  # type: ignore[attr-defined]
        ready.__call__ = signed_call
        override_attribute(stack, module, "processor", ready)
