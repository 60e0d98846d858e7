"""Reaches the attention of models whose processors stay as they are.

Processors that go through diffusers' `dispatch_attention_fn`: diffusers passes `processor._parallel_config` verbatim to
the backend named by `processor._attention_backend`. Ours is registered beside the stock ones and is named by no
processor but those that hold an `AttentionCore`, so nothing process-wide changes: text encoders, VAE and other
pipelines never reach it.

Processors of the `Attention` class, which call torch's scaled dot-product attention themselves: calls of that function
go to the core while the model's forward runs. A layer that computes attention in another way is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ditile.errors import ModelError
from ditile.hooks.attention_processors import find_attention_processors, uses_dispatch
from ditile.hooks.block_policy import LayerAttention
from ditile.hooks.overrides import override_attribute
from ditile.hooks.protocols import AttentionKernel
from ditile.parallel.attention.kernel import DiffusersKernel


class AttentionRedirect(TorchFunctionMode):
    """While it is entered, scaled dot-product attention goes to a core.

    Args:
        core: attends.
        busy: whether a core attends: what its kernel calls is not redirected.

    Attributes:
        calls: how many calls it has redirected.
    """

    def __init__(self, core: LayerAttention, busy: Callable[[], bool]) -> None:
        super().__init__()
        self._core, self._busy = core, busy
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention or self._busy():
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend_with_core(*args, **(kwargs or {}))

    def _attend_with_core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        refuse_causal_and_dropout(dropout_p, is_causal)
        # Rows and heads are one dimension: they are passed on as the heads of one row.
        if query.ndim == 3:
            mask = attn_mask[None] if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
            return self._attend_with_core(query[None], key[None], value[None], mask, scale=scale)[0]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self._core.attend(q, k, v, mask=attn_mask, scale=scale).transpose(1, 2)


def install_redirect(stack: ExitStack, transformer: nn.Module, core: LayerAttention, busy: Callable[[], bool]) -> None:
    """Redirects attention in a model's forward until the stack is closed, and checks that every module was reached."""
    redirect = AttentionRedirect(core, busy)
    for name, module, processor in find_attention_processors(transformer):
        if not uses_dispatch(processor):
            checked = functools.partial(_forward_and_check, name, module, redirect, module.forward)
            override_attribute(stack, module, "forward", checked)
    forward = transformer.forward

    def forward_with_redirect(*args: Any, **kwargs: Any) -> Any:
        with redirect:
            return forward(*args, **kwargs)

    override_attribute(stack, transformer, "forward", forward_with_redirect)


def _forward_and_check(
    name: str, module: nn.Module, redirect: AttentionRedirect, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    before = redirect.calls
    out = forward(*args, **kwargs)
    if redirect.calls == before:
        raise ModelError(
            f"{name} ({type(module).__name__} with {type(getattr(module, 'processor', None)).__name__}) computes "
            "attention without scaled_dot_product_attention, so its tokens cannot be shared out; run it with ulysses=1 "
            "and ring=1"
        )
    return out


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


def refuse_causal_and_dropout(dropout_p: float, is_causal: bool) -> None:
    """Raises `ModelError` if attention is causal or drops out."""
    if dropout_p:
        raise ModelError(f"attention drops out with dropout_p={dropout_p}; call eval() on the transformer")
    if is_causal:
        raise ModelError("causal attention cannot be shared out over ranks; run this model with ulysses=1 and ring=1")
