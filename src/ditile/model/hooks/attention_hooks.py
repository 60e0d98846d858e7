"""Routes the attention of a block's layers to the cores of a plan, however the block calls attention.

If a layer goes through diffusers' `dispatch_attention_fn`, its core is `processor._parallel_config`, which diffusers
passes verbatim to the backend that `processor._attention_backend` names. If a layer calls torch's scaled dot-product
attention itself, calls of that function go to the core while the layer's forward runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ditile.model.hooks.attention_processors import count_key_repeats
from ditile.model.hooks.block_policy import BlockHook, LayerAttention, list_adapter_calls
from ditile.model.hooks.compile import exclude_from_compile
from ditile.model.hooks.key_padding import make_pairs_error
from ditile.model.hooks.overrides import override_attribute, replace_globals
from ditile.plan.anatomy import FURTHER, LOCAL, REAL_PAIRS
from ditile.plan.errors import ModelError, StateError

BuildAttention = Callable[..., LayerAttention]


def install_attention(
    stack: ExitStack,
    hook: BlockHook,
    overlapped: Mapping[type, Callable[[Any], Any]],
    build: BuildAttention,
    choose_backend: Callable[[Any], Any],
    is_whole: Callable[[], bool] | None,
) -> None:
    """Install cores in the layers of a block until the stack is closed.

    Args:
        overlapped: stock class -> what makes the processor that sends each of q, k and v while the next is computed.
        build: (layer, backend, kind, through_dispatch) -> the attention of a layer.
        choose_backend: (the backend that a processor names) -> the backend that calls a core.
        is_whole: whether the current call does without cores; None if all calls have them.
    """
    for path, module in hook.list_attentions():
        layer = f"{hook.name}.{path}".rstrip(".")
        calls = hook.list_calls(path)
        stock: Any = getattr(module, "processor", None)
        # Whether it goes through diffusers' `dispatch_attention_fn`.
        through_dispatch = hasattr(stock, "_attention_backend") and hasattr(stock, "_parallel_config")
        backend = stock._attention_backend if through_dispatch else None
        cores: list[LayerAttention | None] = []
        for name, kind in calls:
            core = None
            if kind != LOCAL:
                core = build(name, backend, kind=kind.removesuffix(REAL_PAIRS), through_dispatch=through_dispatch)
            if core is not None and kind.endswith(REAL_PAIRS):
                core = MaskOfRealPairs(core)
            if core is not None and count_key_repeats(module) > 1:
                core = UnrepeatedKeys(core, count_key_repeats(module))
            cores.append(core)
        attention = cores[0]
        if len(cores) > 1:
            attention = turns = CallsInTurn(layer, cores, len(cores) - len(list_adapter_calls(stock)))
            stack.callback(hook.block.register_forward_hook(exclude_from_compile(turns.end_block)).remove)
        assert attention is not None
        has_further_keys = any(FURTHER in kind for _, kind in calls)
        if attention.overlaps and type(stock) in overlapped:
            override_attribute(stack, module, "processor", overlapped[type(stock)](attention))
        # Layers with further keys do not give `_parallel_config` to each call, so torch's function is redirected.
        elif through_dispatch and is_whole is None and not has_further_keys:
            processor = copy.copy(stock)
            processor._parallel_config = attention
            processor._attention_backend = choose_backend(backend)
            override_attribute(stack, module, "processor", processor)
        else:
            if backend is not None:
                # Only the native backend calls the function that is redirected.
                processor = copy.copy(stock)
                processor._attention_backend = AttentionBackendName.NATIVE
                override_attribute(stack, module, "processor", processor)
            redirect = AttentionRedirect(attention)
            # A block that attends by itself is not checked: if a cache leaves it out, it attends to nothing.
            checked_layer = layer if path else None
            redirected = RedirectedForward(redirect, checked_layer, is_whole, module.forward)
            override_attribute(stack, module, "forward", redirected.run)


class MaskOfRealPairs:
    """Attention with a mask of pairs that says no more than a mask of keys does.

    The mask allows a pair if query and key are both real, and nobody reads the results of padded queries.
    """

    overlaps = False

    def __init__(self, core: LayerAttention) -> None:
        self._core = core

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attend, `[B, S, N, H]` to the same shape.

        Raises:
            ModelError: if the mask is not of booleans: padded keys then count a little.
        """
        if mask is not None and mask.dtype != torch.bool:
            raise make_pairs_error(mask)
        if mask is not None:
            mask = mask.any(dim=-2, keepdim=True)
        return self._core.attend(q, k, v, mask=mask, scale=scale)


class UnrepeatedKeys:
    """Attention to keys that a layer has repeated for grouped-query heads: each is exchanged and stored once."""

    overlaps = False

    def __init__(self, core: LayerAttention, repeats: int) -> None:
        self._core = core
        self._repeats = repeats

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attend, `[B, S, N, H]` to the same shape."""
        k = k[:, :, :: self._repeats]
        v = v[:, :, :: self._repeats]
        return self._core.attend(q, k, v, mask=mask, scale=scale)


class CallsInTurn:
    """The attention of a layer that attends several times in each call; its turn tells which core attends.

    Args:
        layer: its name in the model.
        min_turns: the smallest number of turns; a call without images for IP-adapters has no turns for them.
    """

    overlaps = False

    def __init__(self, layer: str, cores: Sequence[LayerAttention | None], min_turns: int) -> None:
        self._layer = layer
        self._cores = cores
        self._turn = 0
        self._expected = range(min_turns, len(cores) + 1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attend with the core whose turn it is, `[B, S, N, H]` to the same shape.

        In a turn without a core this rank has all keys, and torch attends.
        """
        core = self._cores[self._turn % len(self._cores)]
        self._turn += 1
        if core is not None:
            return core.attend(q, k, v, mask=mask, scale=scale)
        # torch has heads before tokens.
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)

    def end_block(self, *_: Any) -> None:
        """Go back to the first turn when the block of the layer returns.

        Raises:
            StateError: if there were more turns or fewer; a pass in which the block is left out has none.
        """
        turns = self._turn
        self._turn = 0
        if turns and turns not in self._expected:
            raise StateError(
                f"{self._layer} attended {turns} times in a call and {self._expected[-1]} times when its class was "
                "studied, so which keys each call takes is not known; use a plan of data or cfg"
            )
        if turns and len(self._expected) > 1:
            self._expected = range(turns, turns + 1)


def copy_multi_head_attention(attend: Callable[..., Tensor]) -> Callable[..., Any]:
    """Copy the function of torch's `nn.MultiheadAttention`, with `attend` in place of scaled dot-product attention.

    The copy returns no attention weights, which are returned by default and hardly ever used.
    """
    function = replace_globals(functional.multi_head_attention_forward, {"scaled_dot_product_attention": attend})

    @functools.wraps(function)
    def attend_without_weights(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, "need_weights": False})

    return attend_without_weights


@dataclass(frozen=True, eq=False, slots=True)
class RedirectedForward:
    """The forward of a layer whose attention goes to a core.

    Attributes:
        redirect: sends attention to the core.
        layer: its name in the model; None for a block that computes attention itself, which a cache may leave out.
        is_whole: whether the current call attends as the layer itself does.
        forward: the layer's own forward.
    """

    redirect: AttentionRedirect
    layer: str | None
    is_whole: Callable[[], bool] | None
    forward: Callable[..., Any]

    # A method, and no closure: a compiled block guards what it calls by identity, and layers share this function.
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward.

        Raises:
            ModelError: if nothing went to the core: each rank would attend only to its own keys.
        """
        if self.is_whole is not None and self.is_whole():
            return self.forward(*args, **kwargs)
        self.redirect.is_used = False
        with self.redirect:
            out = self.forward(*args, **kwargs)
        if not self.redirect.is_used and self.layer is not None:
            raise ModelError(
                f"{self.layer} computes attention otherwise than when its class was studied; use a plan of data or cfg"
            )
        return out


class AttentionMode(TorchFunctionMode):
    """A mode in which `attend` takes the place of scaled dot-product attention, with its arguments."""

    attend: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        # Inside torch's `multi_head_attention_forward` this mode is off, so a copy of that function calls `attend`.
        self._multi_head = copy_multi_head_attention(self.attend)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            func = self.attend
        elif func is functional.multi_head_attention_forward:
            func = self._multi_head
        return func(*args, **(kwargs or {}))


class AttentionRedirect(AttentionMode):
    """A mode in which scaled dot-product attention goes to a core.

    Attributes:
        is_used: whether it redirected a call since this was last set to False. A number would be guarded by dynamo.
    """

    def __init__(self, core: LayerAttention) -> None:
        super().__init__()
        self._core = core
        self.is_used = False

    def attend(
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
        """Attend with the core, with the arguments of torch's function."""
        self.is_used = True
        refuse_causal_and_dropout(dropout_p, is_causal)
        # [rows * heads, tokens, size] is taken for one row with as many heads.
        if query.ndim == 3:
            if attn_mask is not None and attn_mask.ndim == 3:
                attn_mask = attn_mask[None]
            return self.attend(query[None], key[None], value[None], attn_mask, scale=scale)[0]
        # torch has heads before tokens, and cores tokens before heads.
        q = query.transpose(1, 2)
        k = repeat_heads(key.transpose(1, 2), q.shape[2])
        v = repeat_heads(value.transpose(1, 2), q.shape[2])
        return self._core.attend(q, k, v, mask=attn_mask, scale=scale).transpose(1, 2)


NoteAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor | None]
"""(query, key, value, mask, whether it is causal) -> the result of a call in place of attention; None for attention."""


class AttentionWatch(AttentionMode):
    """A mode that shows every call of scaled dot-product attention to a function, which may replace it."""

    def __init__(self, note: NoteAttention) -> None:
        super().__init__()
        self._note = note

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        """Show a call to the function, and attend unless it has a result."""
        replacement = self._note(query, key, value, attn_mask, is_causal)
        if replacement is not None:
            return replacement
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **others)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values `[B, S, N, H]` that several heads share, once for each head."""
    if x.shape[2] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def refuse_causal_and_dropout(dropout_p: float, is_causal: bool) -> None:
    """Raise `ModelError` if attention is causal or uses dropout."""
    if dropout_p:
        raise ModelError(f"attention drops out with dropout_p={dropout_p}; call eval() on the transformer")
    if is_causal:
        raise ModelError("causal attention cannot be split over ranks; run this model with ulysses=1 and ring=1")
