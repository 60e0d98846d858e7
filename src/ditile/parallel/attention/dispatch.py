"""Reaches the attention of families that go through diffusers' `dispatch_attention_fn`, without a processor of our own.

diffusers passes `processor._parallel_config` verbatim to the backend named by `processor._attention_backend`. Ours is
registered beside the stock ones and is named by no processor but those that hold an `AttentionCore`, so nothing
process-wide changes: text encoders, VAE and other pipelines never reach it.
"""

from __future__ import annotations

import functools
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from ditile.errors import ModelError
from ditile.hooks.protocols import AttentionKernel
from ditile.parallel.attention.kernel import DiffusersKernel


@functools.cache
def register_backend(kernel: AttentionBackendName | None) -> AttentionBackendName:
    """The name under which processors hand over to their core; attention that has none goes to `kernel`.

    It is an instance of the closed enum without being one of its members.
    """
    value = "ditile" if kernel is None else f"ditile {kernel.value}"
    name = str.__new__(AttentionBackendName, value)
    name._name_, name._value_ = value.upper(), value
    _AttentionBackendRegistry.register(name)(functools.partial(dispatch_to_core, DiffusersKernel(kernel)))
    return name


def dispatch_to_core(
    kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, _parallel_config: Any = None,
) -> Tensor:  # fmt: skip
    """Hands q, k and v `[B, S, N, H]` to the core of the layer; where there is none, to the kernel.

    Raises:
        ModelError: if attention is causal or drops out.
    """
    refuse_causal_and_dropout(dropout_p, is_causal)
    out: Tensor = (_parallel_config or kernel)(query, key, value, mask=attn_mask, scale=scale)
    return out


def refuse_causal_and_dropout(dropout_p: float, is_causal: bool) -> None:
    """Raises `ModelError` if attention is causal or drops out."""
    if dropout_p:
        raise ModelError(f"attention drops out with dropout_p={dropout_p}; call eval() on the transformer")
    if is_causal:
        raise ModelError("causal attention cannot be shared out over ranks; run this model with ulysses=1 and ring=1")
