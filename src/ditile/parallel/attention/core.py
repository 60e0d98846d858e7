"""AttentionCore: what becomes of q, k and v of one layer: exchanged, kept, attended to, and exchanged back.

    tokens to heads (ulysses) -> keys that are kept, or a ring -> kernel -> heads to tokens

It gets them after projections, qk-norm and rope. Each part has a null object, so that the core has no cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ditile.hooks.compile import CustomOp
from ditile.hooks.generation import Generation, LayerTokens
from ditile.hooks.key_padding import AttentionOptions, KeyPaddingMask, refuse_key_masks
from ditile.hooks.kv_store import AgeChecks
from ditile.hooks.protocols import AttentionKernel, DeferredTensor, HeadExchange, KeyGather, KeyMaskSource, KeySource
from ditile.plan.layout import merge_ranges


class AttentionCore:
    """One attention layer.

    Args:
        current: the generation under way.
        exchange, keys, masks: see there.
        joint: whether the layer sees the text too.
        turn: shared by layers whose order is to be kept, where they are compiled.

    Attributes:
        overlaps: whether it gains by q, k and v that are made one after the other.
    """

    def __init__(
        self,
        current: Callable[[], Generation],
        exchange: HeadExchange,
        keys: KeySource,
        masks: KeyMaskSource,
        *,
        joint: bool,
        turn: Tensor,
    ) -> None:
        self._current, self._exchange, self._keys, self._masks = current, exchange, keys, masks
        self._joint, self._custom_op = joint, CustomOp(self._attend_in_custom_op, turn)
        self.overlaps = exchange.overlaps

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attends. `[B, S, N, H]`, where S counts the tokens of the micro-step at hand; dummies come back as zeros."""
        return self.project_and_attend(lambda: q, lambda: k, lambda: v, mask=mask, scale=scale)

    def project_and_attend(
        self,
        q: DeferredTensor,
        k: DeferredTensor,
        v: DeferredTensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """The same for tensors yet to be made, so that each can travel while the next is computed.

        In a compiled block they are made before any travels.
        """
        if torch.compiler.is_compiling():
            return self._custom_op(q(), k(), v(), mask, scale=scale)
        return self.attend_over_tokens(
            self._current().get_layer_tokens(joint=self._joint), (q, k, v), mask=mask, scale=scale
        )

    def attend_over_tokens(
        self,
        tokens: LayerTokens,
        makes: Sequence[DeferredTensor],
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """The same over tokens that are named.

        Raises:
            ModelError: if the mask is not one of keys alone.
        """
        heads = 0

        def drop_dummies(make: DeferredTensor) -> DeferredTensor:
            def make_without_dummies() -> Tensor:
                nonlocal heads
                x = make()
                heads = max(heads, x.shape[2])
                return x[:, tokens.real_tokens] if tokens.dummies else x

            return make_without_dummies

        query, key, value = self._exchange.exchange_tokens_for_heads([drop_dummies(make) for make in makes], tokens)
        key_padding_mask = None if mask is None else self._masks.gather_key_mask(mask, query.shape[0], tokens, heads)
        has_heads = query.shape[2] > 0  # there may be more ranks than heads
        out = (
            self._keys.attend_to_keys(query, key, value, tokens, AttentionOptions(key_padding_mask, scale))
            if has_heads
            else query
        )
        out = self._exchange.exchange_heads_for_tokens(out, tokens, heads)
        if not tokens.dummies:
            return out
        dummies = out.new_zeros((out.shape[0], tokens.dummies, *out.shape[2:]))
        return torch.cat([dummies, out] if tokens.dummies_first else [out, dummies], dim=1)

    def _attend_in_custom_op(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None
    ) -> Tensor:
        tokens = self._current().get_layer_tokens(joint=self._joint)
        return self.attend_over_tokens(tokens, (lambda: q, lambda: k, lambda: v), mask=mask, scale=scale)


class NoExchange:
    """Every rank has all heads of its tokens."""

    overlaps = False

    def exchange_tokens_for_heads(self, makes: Sequence[DeferredTensor], tokens: LayerTokens) -> Sequence[Tensor]:
        """Makes them."""
        return [make() for make in makes]

    def exchange_heads_for_tokens(self, out: Tensor, tokens: LayerTokens, heads: int) -> Tensor:
        """Nothing."""
        return out


class LocalKeyMaskSource:
    """This rank has all keys and queries: a mask may tell these apart."""

    def gather_key_mask(self, mask: Tensor, batch: int, tokens: LayerTokens, heads: int | None) -> KeyPaddingMask:
        """Nothing."""
        is_flat = mask.ndim == 2 and mask.shape[0] in (1, batch)
        return KeyPaddingMask(((mask[:, None, None] if is_flat else mask)[..., tokens.real_tokens],))


class FreshKeys:
    """The keys that came: nothing is stale, nobody else has any."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Attends."""
        return self._kernel(q, k, v, mask=extra.mask.ring_masks[0] if extra.mask else None, scale=extra.scale)


class StaleKeys:
    """PipeFusion: keys of a patch go over their stale selves in the layer's store; the patch attends to the whole.

    In a synchronous step nothing is stale; if the next step is asynchronous, its keys are kept (arXiv 2405.14430,
    section 3.4). Ranks that share out the patch along ring gather its fresh keys once, so that all hold the same.

    Args:
        current: the generation under way.
        layer: the layer's name in the model.
        kernel: attends.
        fresh: attends where nothing is stale or kept.
        gather: the fresh keys of all ring ranks.
        check: asserts that the ages of the keys are what the schedule says, if given.
    """

    def __init__(
        self,
        current: Callable[[], Generation],
        layer: str,
        kernel: AttentionKernel,
        fresh: KeySource,
        gather: KeyGather,
        *,
        check: AgeChecks | None,
    ) -> None:
        self._current, self._layer, self._kernel, self._fresh = current, layer, kernel, fresh
        self._gather, self._check = gather, check

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Attends."""
        now = self._current()
        step, patch = now.micro_step
        refuse_key_masks(extra, self._layer)
        if patch is None and not now.keeps_keys(step):
            return self._fresh.attend_to_keys(q, k, v, tokens, extra)
        store = now.memory.get_key_store(now.branch, self._layer, tokens.length, now.branch_layout.num_patches)
        k, v = self._gather(k, v, tokens)
        whole = store.write_keys(
            k, v, merge_ranges(run for runs in tokens.runs for run in runs), now.batch_range, now.batch
        )
        store.mark_written(step, patch)
        if patch is None:
            # in the order in which they came: bit-identical to one process
            return self._kernel(q, k, v, scale=extra.scale)
        if self._check is not None:
            where = f"{self._layer} at {now.micro_step} branch {now.branch}"
            self._check.expect_ages(store, step, now.ages(now.micro_step), where)
        return self._kernel(q, *whole, scale=extra.scale)


def skip_ring_gather(k: Tensor, v: Tensor, tokens: LayerTokens) -> tuple[Tensor, Tensor]:
    """Nobody shares out the patch along ring."""
    return k, v
