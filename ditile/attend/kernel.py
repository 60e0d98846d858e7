"""Kernels: `(q, k, v) -> out` in `[B, S, N, H]`, chosen apart from any split; and the same with log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import Tensor
from torch.nn import functional

from ditile.errors import ModelError


class Native:
    """torch's scaled dot-product attention, which the stock processors of `Attention` call."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attends."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        return out.transpose(1, 2)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attends by one of torch's own fused kernels, which all know the log-sum-exp."""
        repeat = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
        out, lse = _fused(q, k, v, mask, scale)
        return out.transpose(1, 2), lse.transpose(1, 2)


class Dispatched:
    """The kernel that the user chose with `set_attention_backend`, by way of diffusers' own dispatch.

    Args:
        backend: its name; None is the one that is active in the process.
    """

    def __init__(self, backend: AttentionBackendName | None) -> None:
        self._backend = backend

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attends."""
        also: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
        also |= {} if k.shape[2] == q.shape[2] else {"enable_gqa": True}
        out: Tensor = dispatch_attention_fn(q, k, v, scale=scale, backend=self._backend, **also)
        return out

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attends; `native` knows no log-sum-exp, and torch's fused kernels stand for it.

        Raises:
            ModelError: if the backend cannot give the log-sum-exp.
        """
        name = self._backend or _AttentionBackendRegistry.get_active_backend()[0]
        if name == AttentionBackendName.NATIVE:
            return NATIVE.with_lse(q, k, v, mask=mask, scale=scale)
        if "return_lse" not in _AttentionBackendRegistry._supported_arg_names[name]:
            raise ModelError(f"the attention backend {name.value} gives no log-sum-exp, which ring needs; try native")
        attend = _AttentionBackendRegistry._backends[name]
        also: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
        out, lse = attend(query=q, key=k, value=v, scale=scale, return_lse=True, **also)
        return out, lse


NATIVE = Native()


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """`[B, N, S, H]` to the output and the log-sum-exp `[B, N, S]`."""
    if mask is not None:
        mask = (
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        )
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).to(q.dtype)
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    elif mask is None and q.dtype in (torch.float16, torch.bfloat16):
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, scale=scale)
    out, lse = found[0], found[1]
    return out, lse[..., : q.shape[2]]  # some kernels pad the rows
