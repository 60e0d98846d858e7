"""Kernels: `(q, k, v) -> out` in `[B, S, N, H]`, chosen apart from any split."""

from __future__ import annotations

from typing import Protocol

from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor
from torch.nn import functional


class Kernel(Protocol):
    """Attention over `[B, S, N, H]` tensors; the keys may be longer than the queries."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's scaled dot-product attention, which the stock processors of `Attention` call."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=False).transpose(1, 2)


def dispatched(backend: AttentionBackendName | None) -> Kernel:
    """The kernel that the user chose with `set_attention_backend`, by way of diffusers' own dispatch."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = dispatch_attention_fn(q, k, v, backend=backend)
        return out

    return kernel
