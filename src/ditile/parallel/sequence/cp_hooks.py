"""The hooks of models that have a table of splits in place of a `ModelSpec`: their blocks run as they are.

In attention, the number of tokens of q and k says which tokens they are, and so whether they are shared out.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditile.errors import ModelError
from ditile.hooks.attention_processors import find_attention_processors, uses_dispatch
from ditile.hooks.block_hooks import FuseBlock, TransformerHooks, count_model_calls
from ditile.hooks.block_policy import BlockPolicy, LayerAttention
from ditile.hooks.compile import CompileFunction, bypass_all_compiled
from ditile.hooks.generation import Generation
from ditile.hooks.overrides import override_attribute
from ditile.hooks.protocols import AttentionKernel
from ditile.models.registry import UNKNOWN_MODEL
from ditile.parallel.sequence import cp_plan
from ditile.parallel.sequence.cp_plan import ContextParallelSplits, ModuleEntries, Table
from ditile.parallel.sequence.masks import GatheredKeyMaskSource
from ditile.plan.anatomy import Anatomy

LOG = logging.getLogger("ditile")
CP_PLAN_SPEC = replace(UNKNOWN_MODEL, name="a model with a table of splits")
"""What is known of a model beside its table; no latents are cut."""


RedirectInstaller = Callable[[ExitStack, nn.Module, LayerAttention, Callable[[], bool]], None]
"""Sends a model's own scaled dot-product attention to a core, until the stack is closed; see `install_redirect`."""


class ContextParallelModel(NamedTuple):
    """A transformer and its table, looked up."""

    name: str
    transformer: nn.Module
    entries: list[ModuleEntries]


class ContextParallelHooks(TransformerHooks):
    """The transformers of one pipeline: Wan 2.2 has two.

    Args:
        transformers: by the names that the pipeline has for them.
        tables: of each.
        splits: what is split in the call at hand; None where one rank has all tokens.
        redirect: reaches attention that does not go through diffusers' dispatch.

    Raises:
        PlanError: if a table does not fit its transformer.
        ModelError: if a transformer has no attention that could be reached.
    """

    def __init__(
        self,
        transformers: dict[str, nn.Module],
        tables: Sequence[Table],
        splits: ContextParallelSplits | None,
        redirect: RedirectInstaller,
    ) -> None:
        super().__init__(next(iter(transformers.values())), CP_PLAN_SPEC, Anatomy({}, "none"))
        self.splits, self._redirect = splits, redirect
        self._all = [
            ContextParallelModel(name, transformer, cp_plan.resolve_table(transformer, table))
            for (name, transformer), table in zip(transformers.items(), tables, strict=True)
        ]
        for name, transformer, _ in self._all:
            if not any(True for _ in find_attention_processors(transformer)):
                raise ModelError(
                    f"{name} ({type(transformer).__name__}) has no attention processors, so its attention cannot be "
                    "reached; run it with ulysses=1 and ring=1"
                )

    @property
    def head_counts(self) -> list[int]:
        """The numbers of heads of the attention layers, as far as these have one."""
        layer_heads = (
            getattr(module, "heads", None)
            for _, model, _ in self._all
            for _, module, _ in find_attention_processors(model)
        )
        return sorted({heads for heads in layer_heads if isinstance(heads, int)})

    def explain_refusal(self, blocks: range) -> str | None:
        """Why some attention cannot be reached, or None."""
        for name, transformer, _ in self._all:
            config: Any = transformer.config
            if config.get("is_amplify_history"):
                return f"{name} has is_amplify_history=True, which counts tokens of the whole history; use ulysses=1"
        return None

    @contextmanager
    def install_hooks(
        self,
        policy: BlockPolicy,
        owned: range,
        current: Callable[[], Generation],
        core: Callable[..., LayerAttention],
        dispatch: Callable[[Any], Any],
        *,
        fuse: FuseBlock,
        pipe: Any = None,
        compile_: CompileFunction | None = None,
    ) -> Iterator[None]:
        """Installs splits, gathers and attention. Nothing is compiled meanwhile."""
        with ExitStack() as stack:
            for name, transformer, entries in self._all:
                if bypass_all_compiled(stack, pipe, transformer):
                    LOG.warning("%s runs uncompiled: its tokens are split in the midst of it", name)
                if self.splits is not None:
                    self._install_attention(stack, name, transformer, core, dispatch)
                    cp_plan.install_split_hooks(stack, transformer, entries, self.splits)
                override_attribute(stack, transformer, "forward", count_model_calls(current, transformer.forward))
            yield

    def _install_attention(
        self,
        stack: ExitStack,
        name: str,
        transformer: nn.Module,
        core: Callable[..., LayerAttention],
        dispatch: Callable[[Any], Any],
    ) -> None:
        assert self.splits is not None
        plain = False
        for path, module, stock in find_attention_processors(transformer):
            if not uses_dispatch(stock):
                plain = True
                continue
            mine = copy.copy(stock)
            mine._parallel_config = core(f"{name}.{path}", stock._attention_backend, kind="N", through_dispatch=True)
            mine._attention_backend = dispatch(stock._attention_backend)
            override_attribute(stack, module, "processor", mine)
        if plain:
            attend = core(name, None, kind="N", through_dispatch=False)
            self._redirect(stack, transformer, attend, lambda: self.splits is not None and self.splits.attending)


class MaskOrigins:
    """Says what the masks of one layer follow from: those that the transformer was given, and the turn within a call.

    Processors make their masks anew in every layer, from masks that the pipeline makes once. A cache leaves layers and
    rows out, so that turns do not say which mask it is: then nothing is known.
    """

    def __init__(self, splits: ContextParallelSplits, *, cached: bool) -> None:
        self._splits, self._cached, self._call, self._turn = splits, cached, 0, 0

    def advance_turn(self) -> None:
        """The layer attends."""
        self._turn = self._turn + 1 if self._call == self._splits.calls else 0
        self._call = self._splits.calls

    def __call__(self, mask: Tensor) -> tuple[object, ...] | None:
        return (self._turn, *self._splits.masks) if self._splits.masks and not self._cached else None


@dataclass(slots=True)
class ContextParallelAttention:
    """One attention layer: shared out where queries and keys are of the same split tokens, local where keys are whole.

    Where they are of different ones (cross attention to a split text), keys and values are gathered: 2 (n - 1) / n of
    the text's tokens, which is less than the queries would cost.

    Attributes:
        splits: what is split.
        attend_to_tokens: an `AttentionCore`'s.
        kernel: attends to keys that are here.
        masks: gathers masks.
        source: says what masks follow from.
        overlaps: whether q, k and v travel one by one.
    """

    splits: ContextParallelSplits
    attend_to_tokens: Callable[..., Tensor]
    kernel: AttentionKernel
    masks: GatheredKeyMaskSource
    source: MaskOrigins
    overlaps: bool = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """The output of the queries, `[B, S, N, H]`. Raises `ModelError` if a mask has keys in an unknown order."""
        self.splits.attending = True
        try:
            return self._route_attention(q, k, v, mask, scale)
        finally:
            self.splits.attending = False

    def _route_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        of_q, of_k = self.splits.find_tokens(q.shape[1]), self.splits.find_tokens(k.shape[1])
        if of_k is None:
            if of_q is None:
                self.splits.refuse_partial_split(k.shape[1])
            return self.kernel(q, k, v, mask=mask, scale=scale)
        self.source.advance_turn()
        if mask is not None and mask.shape[-1] == of_k.length and len(of_k.runs[0]) > 1:
            raise ModelError(
                f"an attention mask of all {of_k.length} keys of a joint sequence, and cp_plan does not say in which "
                "order they are; split what it is made of, or run this model with ulysses=1 and ring=1"
            )
        if of_q is of_k:
            return self.attend_to_tokens(of_k, q, k, v, mask=mask, scale=scale)
        if mask is not None:
            mask = self.masks.gather_key_mask(mask, q.shape[0], of_k, None).join_ring_masks()
        k, v = torch.cat(self.splits.gather_shares(torch.stack([k, v]), of_k, 2), dim=2)
        return self.kernel(q, k, v, mask=mask, scale=scale)
