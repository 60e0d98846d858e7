"""An attention backend of diffusers that calls the core of a layer.

It is registered beside the stock ones and is named by no processor but those that hold an `AttentionCore`, so nothing
process-wide changes: text encoders, VAE and other pipelines never reach it.
"""

from __future__ import annotations

import functools
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from ditile.hooks.attention_hooks import refuse_causal_and_dropout
from ditile.hooks.protocols import AttentionKernel
from ditile.parallel.attention.kernel import DiffusersKernel


@functools.cache
def register_backend(kernel: AttentionBackendName | None) -> AttentionBackendName:
    """Registers a backend that calls the core of a layer, or `kernel` where there is none; returns its name.

    It is an instance of the closed enum without being one of its members.
    """
    value = "ditile" if kernel is None else f"ditile {kernel.value}"
    name = str.__new__(AttentionBackendName, value)
    name._name_, name._value_ = value.upper(), value
    _AttentionBackendRegistry.register(name)(functools.partial(dispatch_to_core, DiffusersKernel(kernel)))
    return name


def dispatch_to_core(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Passes q, k and v `[B, S, N, H]` to the core of the layer; where there is none, to the kernel.

    Raises:
        ModelError: if attention is causal or drops out.
    """
    refuse_causal_and_dropout(dropout_p, is_causal)
    attend = kernel if _parallel_config is None else _parallel_config.attend
    out: Tensor = attend(query, key, value, mask=attn_mask, scale=scale)
    return out
