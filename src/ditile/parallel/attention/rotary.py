"""Rotary embeddings of diffusers' attention processors in fewer kernels, with the same bits.

For q and for k of each layer `apply_rotary_emb` makes 15 calls of torch: it splits pairs of channels, negates, stacks,
brings both to fp32, multiplies, adds and rounds. Here one kernel swaps the pairs, the negation is folded into the table
of sines, and half precision times an fp32 table is fp32 without a cast: 6 calls, with the same numbers in the same
order. A subclass runs the unchanged code of a processor, with `apply_rotary_emb` replaced among its globals.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.model.hooks.overrides import override_attribute

_NAME = apply_rotary_emb.__name__
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TABLE = "_ditile_rotary"
"""The attribute of a tensor of sines that stores the table made from it."""


class _RotaryTable(NamedTuple):
    """Cosines and sines, shaped and signed for the multiplication.

    Attributes:
        scope: marks where it was made: a recording does not read a table that was made outside of it.
        source: the original cosines.
        version: the version of the original sines. Each write raises it: a pipeline may fill the same tensor again.
        sequence_dim: the dimension of tokens.
        cos, sin: for `[B, S, N, H]` or `[B, N, S, H]`; the first sine of each pair is negated.
    """

    scope: object
    source: Tensor
    version: int
    sequence_dim: int
    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Rotary embeddings. Each table is prepared once, for all layers, and dropped with the tensor of its sines."""

    def __init__(self) -> None:
        self._scope = object()
        self._classes: dict[type, type] = {}

    @contextmanager
    def hide_tables(self) -> Iterator[None]:
        """Prepare tables anew within the context.

        Otherwise a recording would read a table that another recording owns.
        """
        scope = self._scope
        self._scope = object()
        try:
            yield
        finally:
            self._scope = scope

    def rotate_pairs(
        self,
        x: Tensor,
        freqs_cis: Any,
        use_real: bool = True,
        use_real_unbind_dim: int = -1,
        sequence_dim: int = 2,
    ) -> Any:
        """Return the result of `apply_rotary_emb`.

        The function itself is called for other formats of tables and other dtypes.
        """
        if (
            not use_real
            or use_real_unbind_dim != -1
            or x.dtype not in _DTYPES
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or freqs_cis[0].dtype != torch.float32
            or freqs_cis[1].dtype != torch.float32
            or freqs_cis[1].is_inference()
        ):
            return apply_rotary_emb(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
        cos, sin = freqs_cis
        table: _RotaryTable | None = getattr(sin, _TABLE, None)
        if (
            table is None
            or table.source is not cos
            or table.version != sin._version
            or table.sequence_dim != sequence_dim
            or table.scope is not self._scope
        ):
            evens, odds = sin.unflatten(-1, (-1, 2)).unbind(-1)
            signed = torch.stack((-evens, odds), -1).flatten(-2)
            # The tables get dimensions for batch and heads; the heads come before or after the tokens.
            heads_dim = 2 if sequence_dim == 1 else 1
            wide_cos = cos[None].unsqueeze(heads_dim).to(x.device)
            wide_sin = signed[None].unsqueeze(heads_dim).to(x.device)
            table = _RotaryTable(self._scope, cos, sin._version, sequence_dim, wide_cos, wide_sin)
            setattr(sin, _TABLE, table)
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return torch.add(x * table.cos, swapped * table.sin, out=swapped)

    def replace_processors(self, stack: ExitStack, block: nn.Module) -> None:
        """Replace a block's processors that call `apply_rotary_emb` until the stack is closed."""
        for _, module, processor in find_attention_processors(block):
            if self.is_applied_by(processor):
                override_attribute(stack, module, "processor", self.copy_processor(processor))

    def is_applied_by(self, processor: Any) -> bool:
        """Return whether an attention processor calls `apply_rotary_emb` itself."""
        call = type(processor).__call__
        if isinstance(processor, nn.Module) or not isinstance(call, FunctionType):
            return False
        return call.__globals__.get(_NAME) is apply_rotary_emb and _NAME in call.__code__.co_names

    def copy_processor(self, processor: Any) -> Any:
        """Copy a processor for which `is_applied_by` holds; the copy applies rotary embeddings with this object."""
        stock = type(processor)
        if stock not in self._classes:
            # A subclass that runs the same `__call__`, with another function under the name of `apply_rotary_emb`.
            call: Any = stock.__call__
            twin_globals = {**call.__globals__, _NAME: self.rotate_pairs}
            twin_call = FunctionType(call.__code__, twin_globals, call.__name__, call.__defaults__, call.__closure__)
            # FunctionType does not take the defaults of keyword-only arguments.
            twin_call.__kwdefaults__ = call.__kwdefaults__
            contents = {"__call__": functools.update_wrapper(twin_call, call), "__module__": stock.__module__}
            self._classes[stock] = type(stock.__name__, (stock,), contents)
        twin = copy.copy(processor)
        twin.__class__ = self._classes[stock]
        return twin
