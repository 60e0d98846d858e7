"""Rotary embeddings of diffusers' attention processors in fewer kernels, with the same bits.

For q and for k of each layer `apply_rotary_emb` makes 15 calls of torch: it splits pairs of channels, negates, stacks,
brings both to fp32, multiplies, adds and rounds. Here one kernel swaps the pairs, the negation is folded into the table
of sines, and half precision times an fp32 table is fp32 without a cast: 6 calls, with the same numbers in the same
order. A subclass runs the unchanged code of a processor, with `apply_rotary_emb` replaced among its globals.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.model.hooks.overrides import override_attribute

_NAME = apply_rotary_emb.__name__
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _RotaryTable:
    """Cosines and sines, shaped and signed for the multiplication.

    Attributes:
        source: the ids of the original sines and cosines, the dimension of tokens, and the version of the sines.
        cos, sin: for `[B, S, N, H]` or `[B, N, S, H]`; the first sine of each pair is negated.
    """

    source: tuple[int, int, int, int]
    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Rotary embeddings. Each table is prepared once, and dropped when the tensor of its sines is freed."""

    def __init__(self) -> None:
        # The keys are weak references to the tensors of sines.
        self._tables: Any = WeakIdKeyDictionary()
        # All layers share one table, so the last one is tried before the lookup, which is many Python calls.
        self._latest: Callable[[], _RotaryTable | None] = lambda: None
        self._classes: dict[type, type] = {}

    @contextmanager
    def hide_tables(self) -> Iterator[None]:
        """Prepare tables anew within the context.

        Otherwise a recording would read a table that another recording owns.
        """
        tables = self._tables
        latest = self._latest
        self._tables = WeakIdKeyDictionary()
        self._latest = lambda: None
        try:
            yield
        finally:
            self._tables = tables
            self._latest = latest

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
        table = self._latest()
        # `_version` rises with each write in place: a pipeline may fill the same tensor again.
        source = (id(sin), id(cos), sequence_dim, sin._version)
        if table is None or table.source != source:
            table = self._find_table(source, cos, sin, x.device)
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return torch.add(x * table.cos, swapped * table.sin, out=swapped)

    def _find_table(
        self,
        source: tuple[int, int, int, int],
        cos: Tensor,
        sin: Tensor,
        device: torch.device,
    ) -> _RotaryTable:
        table: _RotaryTable | None = self._tables.get(sin)
        if table is None or table.source != source:
            evens, odds = sin.unflatten(-1, (-1, 2)).unbind(-1)
            signed = torch.stack((-evens, odds), -1).flatten(-2)
            # Adds the dimensions of batch and heads; heads stand before or after the tokens.
            heads_dim = 2 if source[2] == 1 else 1
            cos = cos[None].unsqueeze(heads_dim)
            signed = signed[None].unsqueeze(heads_dim)
            table = _RotaryTable(source, cos.to(device), signed.to(device))
            self._tables[sin] = table
        self._latest = weakref.ref(table)
        return table

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
        """Copy such a processor, so that it applies rotary embeddings by this object."""
        stock = type(processor)
        if stock not in self._classes:
            self._classes[stock] = _make_processor_class(stock, self.rotate_pairs)
        twin = copy.copy(processor)
        twin.__class__ = self._classes[stock]
        return twin


def _make_processor_class(stock: type, rotate: Any) -> type:
    """Build a subclass that runs the same `__call__`, with `rotate` in place of `apply_rotary_emb`."""
    call: Any = stock.__call__
    names = {**call.__globals__, _NAME: rotate}
    twin_call = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    # FunctionType does not take the defaults of arguments that are given by name only.
    twin_call.__kwdefaults__ = call.__kwdefaults__
    contents = {"__call__": functools.update_wrapper(twin_call, call), "__module__": stock.__module__}
    return type(stock.__name__, (stock,), contents)
