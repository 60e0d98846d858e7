"""Reaches the attention of families that go through diffusers' `dispatch_attention_fn`, without a processor of our own.

diffusers passes `processor._parallel_config` verbatim to the backend named by `processor._attention_backend`. Ours is
registered beside the stock ones and is named by no processor but those that hold an `AttentionCore`, so nothing
process-wide changes: text encoders, VAE and other pipelines never reach it.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor


def _member() -> AttentionBackendName:
    """A name that is an instance of the closed enum without being one of its members."""
    name = str.__new__(AttentionBackendName, "ditile")
    name._name_, name._value_ = "DITILE", "ditile"
    return name


BACKEND = _member()


def attend(query: Tensor, key: Tensor, value: Tensor, _parallel_config: Any = None) -> Tensor:
    """Hands q, k and v `[B, S, N, H]` to the `AttentionCore` of the layer."""
    out: Tensor = _parallel_config(query, key, value)
    return out


def install() -> None:
    """Makes the backend known to diffusers."""
    if BACKEND not in _AttentionBackendRegistry._backends:
        _AttentionBackendRegistry.register(BACKEND)(attend)
