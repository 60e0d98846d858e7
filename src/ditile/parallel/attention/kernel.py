"""Kernels: `(q, k, v) -> out` in `[B, S, N, H]`, also with log-sum-exp; the kernel does not depend on the split.

A backend of diffusers that calls the core of a layer is registered in addition to the stock ones. Only processors that
have an `AttentionCore` name it, so nothing process-wide changes: text encoders, VAE and other pipelines never reach it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
    _maybe_download_kernel_for_backend,
    dispatch_attention_fn,
)
from torch import Tensor
from torch.nn import functional

from ditile.distributed.heartbeat import is_out_of_memory
from ditile.model.hooks.attention_hooks import refuse_causal_and_dropout
from ditile.model.hooks.protocols import AttentionKernel
from ditile.plan.errors import ModelError

ATEN_KERNELS = {
    AttentionBackendName.NATIVE: "",
    AttentionBackendName._NATIVE_FLASH: "flash",
    AttentionBackendName._NATIVE_EFFICIENT: "efficient",
    AttentionBackendName._NATIVE_CUDNN: "cudnn",
}
"""Backends -> the kernel of torch that gives their log-sum-exp; for an empty name `run_fused_kernel` chooses one."""

LSE_ARGUMENTS = {
    AttentionBackendName.FLASH: ("return_lse", True),
    AttentionBackendName.FLASH_HUB: ("return_lse", True),
    AttentionBackendName._FLASH_3: ("return_lse", False),
    AttentionBackendName._FLASH_3_HUB: ("return_attn_probs", True),
    AttentionBackendName.AITER_FA2_HUB: ("return_lse", True),
    AttentionBackendName.SAGE: ("return_lse", True),
    AttentionBackendName.SAGE_HUB: ("return_lse", True),
}
"""Backends with a log-sum-exp of their own -> the argument that asks for it, and whether it comes as `[B, N, S]`.

Otherwise it is `[B, S, N]`: diffusers passes on what most of the packages return, and transposes the result of
`_flash_3` itself.
"""

AMPERE = (8, 0)
"""The lowest compute capability that torch's flash kernel is built for."""


class DiffusersKernel:
    """A kernel that diffusers offers, called through its own dispatch.

    Args:
        backend: its name; None is the process's active backend.
    """

    def __init__(self, backend: AttentionBackendName | None) -> None:
        self.backend = backend

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Return the attention output for q, k and v, all `[B, S, N, H]`."""
        # Only what is needed is passed: some backends do not know masks or grouped heads.
        options: dict[str, Any] = {}
        if mask is not None:
            options["attn_mask"] = mask
            # Few kernels take a mask with grouped heads, and the kernel of torch that does keeps all scores in memory.
            k, v = _repeat_grouped_heads(q, k, v)
        if k.shape[2] != q.shape[2]:
            options["enable_gqa"] = True
        out: Tensor = dispatch_attention_fn(q, k, v, scale=scale, backend=self.backend, **options)
        return out

    def attend_with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp `[B, S, N]`.

        Raises:
            ModelError: if the backend cannot give the log-sum-exp, or gives it in an unexpected shape.
        """
        name = self.backend or AttentionBackendName(_AttentionBackendRegistry.get_active_backend()[0])
        if name in ATEN_KERNELS:
            return run_fused_kernel(ATEN_KERNELS[name], q, k, v, mask, scale)
        if name not in LSE_ARGUMENTS:
            known = ", ".join(backend.value for backend in (*ATEN_KERNELS, *LSE_ARGUMENTS))
            raise ModelError(f"the attention kernel {name.value} gives no log-sum-exp, which ring needs; try {known}")
        if mask is not None:
            raise ModelError(f"the attention kernel {name.value} takes no mask, which this model has; try native")
        k, v = _repeat_grouped_heads(q, k, v)
        argument, has_heads_first = LSE_ARGUMENTS[name]
        out, lse = _AttentionBackendRegistry._backends[name](query=q, key=k, value=v, scale=scale, **{argument: True})
        if has_heads_first:
            lse = lse.transpose(1, 2)
        if lse.shape != q.shape[:3]:
            raise ModelError(
                f"the attention kernel {name.value} gives a log-sum-exp of {list(lse.shape)} for queries of "
                f"{list(q.shape)}, and ring needs {list(q.shape[:3])}; try native"
            )
        return out, lse.float()


NATIVE = DiffusersKernel(AttentionBackendName.NATIVE)
"""torch's scaled dot-product attention, which the stock processors of `Attention` call."""


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, *, lse: bool) -> DiffusersKernel:
    """Return a kernel after trying it once on a few numbers.

    Args:
        name: diffusers' name of the kernel: native, _native_cudnn, flash, sage and so on.
        device, dtype: of q, k and v.
        lse: whether the log-sum-exp will be needed.

    Raises:
        ModelError: if the kernel is unknown, or cannot run on the device.
    """
    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise ModelError(f"attention={name!r} is not known; try one of {', '.join(known)}")
    backend = AttentionBackendName(name)
    kernel = DiffusersKernel(backend)
    x = torch.zeros(1, 32, 2, 64, device=device, dtype=dtype)
    try:
        _check_attention_backend_requirements(backend)
        _maybe_download_kernel_for_backend(backend)
        kernel(x, x, x)
        if lse:
            kernel.attend_with_lse(x, x, x)
    except ModelError:
        raise
    except (RuntimeError, ValueError, TypeError, ImportError, OSError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"attention={name} cannot run on {device} in {str(dtype).removeprefix('torch.')} ({reason}); try native"
        ) from error
    return kernel


def run_fused_kernel(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp `[B, S, N]` for q, k and v `[B, S, N, H]`.

    If the name is empty, a kernel that suits the call runs. On a CPU there is only one.

    Raises:
        ModelError: if there is a mask and the named kernel takes none.
    """
    size = q.shape[3]
    length = q.shape[1]
    if scale is None:
        scale = size**-0.5
    k, v = _repeat_grouped_heads(q, k, v)
    is_on_cpu = q.device.type == "cpu"
    # On a GPU the kernels need head sizes that 8 divides; torch's public function pads before it calls them.
    if not is_on_cpu and size % 8:
        missing = -size % 8
        q, k, v = (functional.pad(x, (0, missing)) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = None if mask is None else _make_additive_mask(mask, q, k)
    if not name:
        # Flash does not take a mask, so a call with one uses another kernel.
        name = choose_fused_kernel(q.device, q.dtype, size) if bias is None else "efficient"
    if is_on_cpu:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    elif name == "flash":
        if bias is not None:
            raise ModelError("the attention kernel _native_flash takes no mask, which this model has; try native")
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    elif name == "cudnn":
        # cuDNN's kernel gives wrong results for tensors that are not contiguous.
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, scale=scale)[:2]
        if lse.ndim == 4:
            lse = lse.squeeze(-1)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)[:2]
    # Some kernels pad the log-sum-exp to more queries.
    return out[..., :size].transpose(1, 2), lse[..., :length].transpose(1, 2)


def choose_fused_kernel(device: torch.device, dtype: torch.dtype, size: int) -> str:
    """Return the name of torch's kernel for a call without a mask.

    Flash needs half precision, at most 256 channels in a head, and a GPU that supports it.

    Args:
        device, dtype: of q, k and v.
        size: the channels of a head.
    """
    if dtype not in (torch.float16, torch.bfloat16) or size > 256 or device.type != "cuda":
        return "efficient"
    if torch.cuda.get_device_capability(device) >= AMPERE:
        return "flash"
    return "efficient"


def _make_additive_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return an additive mask `[B, N, queries, keys]` in rows of aligned length.

    Its values are finite, so that no query gives NaN.
    """
    # The least number itself plus a negative score would become infinite.
    least = torch.finfo(q.dtype).min / 4
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, least)
    else:
        bias = mask.to(q.dtype).clamp(min=least)
    # The kernels need rows that begin at multiples of 8 numbers.
    length = bias.shape[-1]
    bias = functional.pad(bias, (0, -length % 8))[..., :length]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _repeat_grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the keys and values of grouped-query heads; the queries have at least one head."""
    repeat = q.shape[2] // k.shape[2]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)


@functools.cache
def register_backend(kernel: AttentionBackendName | None) -> AttentionBackendName:
    """Register a backend that calls the core of a layer, and return its name.

    Where a layer has no core it calls `kernel`.
    """
    # diffusers takes only instances of its enum, to which no member can be added: this is an instance, not a member.
    value = "ditile" if kernel is None else f"ditile {kernel.value}"
    name = str.__new__(AttentionBackendName, value)
    name._name_ = value.upper()
    name._value_ = value
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
    """Pass q, k and v `[B, S, N, H]` to the layer's core (`_parallel_config`), or to the kernel if there is none.

    Raises:
        ModelError: if attention is causal or has dropout.
    """
    if dropout_p or is_causal:
        refuse_causal_and_dropout(dropout_p, is_causal)
    attend = kernel if _parallel_config is None else _parallel_config.attend
    out: Tensor = attend(query, key, value, mask=attn_mask, scale=scale)
    return out
