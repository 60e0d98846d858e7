"""AttentionCore: the attention of one layer. q, k and v are exchanged, stored, attended to, and exchanged back.

    tokens to heads (ulysses) -> stored keys or a ring -> kernel -> heads to tokens

It gets q, k and v after projections, qk-norm and rope. Each part has a null object, so that the core has no special
cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from ditile.distributed.recording.tape import note_action
from ditile.model.hooks.compile import CustomOp
from ditile.model.hooks.generation import Generation, LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions, FurtherKeys, KeyPaddingMask, expand_mask, make_pairs_error
from ditile.model.hooks.kv_store import AgeChecks
from ditile.model.hooks.protocols import (
    AttentionKernel,
    DeferredTensor,
    HeadExchange,
    KeyGather,
    KeyMaskSource,
    KeySource,
)
from ditile.model.hooks.token_arguments import take_runs
from ditile.plan.anatomy import FURTHER, drop_further_keys
from ditile.plan.errors import ModelError
from ditile.plan.layout import merge_ranges


class AttentionCore:
    """One attention layer.

    Args:
        now: the generation under way.
        exchange: trades tokens for heads, and back.
        keys: attends to the keys as they come, to stored ones, or in a ring.
        masks: gathers the masks of the keys.
        kind: the kind of its tokens, as in `ListAnatomy.attention`: one letter, or one for queries and one for keys,
            with the marker `FURTHER` if there are further keys, of which every rank has all.
        turn: an integer tensor. Layers that share it stay in order where they are compiled (`CustomOp`).

    Attributes:
        attend: `(q, k, v, *, mask, scale)`, `[B, S, N, H]` to the same, where S counts the tokens of the current
            micro-step; the output for dummies is never read.
        overlaps: whether `attend_overlapped` gains anything.
    """

    def __init__(
        self,
        now: Generation,
        exchange: HeadExchange,
        keys: KeySource,
        masks: KeyMaskSource,
        *,
        kind: str = "N",
        turn: Tensor,
    ) -> None:
        self._now = now
        self._exchange = exchange
        self._keys = keys
        self._masks = masks
        self._further = kind if FURTHER in kind else ""
        self._kind = drop_further_keys(kind)
        self.attend = CustomOp(self.attend_to_tokens, turn)
        self.overlaps = exchange.overlaps

    def attend_overlapped(self, makers: Sequence[DeferredTensor], *, mask: Tensor | None = None) -> Tensor:
        """Attend to q, k and v that are yet to be computed, sending each while the next is computed."""
        if torch.compiler.is_compiling():
            # A compiled block computes all of them before any is sent.
            q, k, v = (make() for make in makers)
            return self.attend(q, k, v, mask=mask)
        tokens = self._now.tokens.get_layer_tokens(self._now.token_patch, self._kind)
        heads = 0

        def make_without_dummies(make: DeferredTensor) -> Tensor:
            nonlocal heads
            x = make()
            # Keys and values may have fewer heads than queries.
            heads = max(heads, x.shape[2])
            return x[:, tokens.real_tokens] if tokens.dummies else x

        makers = [partial(make_without_dummies, make) for make in makers]
        q, k, v = self._exchange.exchange_overlapped(makers, tokens)
        return self._attend_to_heads(tokens, tokens, q, k, v, heads, mask, None)

    def attend_to_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        scale: float | None,
        tokens: LayerTokens | None = None,
    ) -> Tensor:
        """Attend to the given tokens, or to the tokens of the current micro-step.

        Raises:
            ModelError: if the mask differs between queries and cannot be cut, or has an unexpected number of keys.
        """
        if tokens is None:
            tokens = self._now.tokens.get_layer_tokens(self._now.token_patch, self._kind[0])
        keys = tokens
        if len(self._kind) > 1:
            keys = self._now.tokens.get_layer_tokens(self._now.token_patch, self._kind[1])
        heads = q.shape[2]
        further = None
        if self._further and k.shape[1] > q.shape[1]:
            k, v, mask, further = self._take_further_keys(q, k, v, mask, tokens)
        # Queries of dummies are computed too where nothing forbids it. That costs less than to leave them out and then
        # to pad the output.
        if tokens.dummies and (tokens.are_none or mask is not None or not self._exchange.takes_dummies):
            q = q[:, tokens.real_tokens]
        if keys.dummies:
            k = k[:, keys.real_tokens]
            v = v[:, keys.real_tokens]
        # A mask of pairs is cut as if queries and keys were the same tokens, and here they are not.
        if keys is not tokens and mask is not None and mask.ndim > 2 and mask.shape[-2] > 1:
            raise make_pairs_error(mask)
        q, k, v = self._exchange.exchange_tokens_for_heads(q, k, v, tokens, keys)
        return self._attend_to_heads(tokens, keys, q, k, v, heads, mask, scale, further)

    def _take_further_keys(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        tokens: LayerTokens,
    ) -> tuple[Tensor, Tensor, Tensor | None, FurtherKeys]:
        """Split the further keys from the keys of tokens.

        The result is the tokens' keys, values and mask, and the further keys with theirs.

        Raises:
            ModelError: if a mask differs between queries, or has an unexpected number of keys.
        """
        num_own = q.shape[1]
        num_further = k.shape[1] - num_own
        heads = q.shape[2]
        place = tokens.locate_further_keys(self._further, num_own)
        k, further_k = _take_apart(k, place, num_further, 1)
        v, further_v = _take_apart(v, place, num_further, 1)
        further_mask = None
        if mask is not None:
            # The mask is split into one of the tokens' keys and one of the further keys.
            is_whole = mask.shape[-1] == tokens.length + num_further
            if not is_whole and mask.shape[-1] != num_own + num_further:
                raise ModelError(
                    f"an attention mask of {mask.shape[-1]} keys came with {num_own} keys of tokens and {num_further} "
                    "others; use a plan of data or cfg"
                )
            # A whole mask covers the keys of the sequence, any other covers the keys of this rank's tokens.
            length = None if is_whole else num_own
            mask, further_mask = _take_apart(
                mask, tokens.locate_further_keys(self._further, length), num_further, mask.ndim - 1
            )
            further_mask = expand_mask(further_mask, q.shape[0])
            if further_mask.shape[2] > 1:
                raise make_pairs_error(further_mask)
            if further_mask.shape[1] > 1:
                further_mask = self._exchange.select_own_heads(further_mask.transpose(1, 2), heads).transpose(1, 2)
        further_k = self._exchange.select_own_heads(further_k, heads)
        further_v = self._exchange.select_own_heads(further_v, heads)
        # This is the place of the further keys once the dummies are left out.
        if tokens.dummies_first:
            place -= min(place, tokens.dummies)
        place = min(place, num_own - tokens.dummies)
        return k, v, mask, FurtherKeys(further_k, further_v, further_mask, place)

    def _attend_to_heads(
        self,
        tokens: LayerTokens,
        keys: LayerTokens,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None,
        scale: float | None,
        further: FurtherKeys | None = None,
    ) -> Tensor:
        """Attend to this rank's share of `heads` heads, and exchange the output for its tokens."""
        key_padding_mask = None
        if mask is not None and not keys.are_none:
            key_padding_mask = self._masks.gather_key_mask(mask, q.shape[0], keys, heads)
        out = q
        if q.shape[2]:  # there may be more ranks than heads
            out = self._keys.attend_to_keys(q, k, v, keys, AttentionOptions(key_padding_mask, scale, further))
        out = self._exchange.exchange_heads_for_tokens(out, tokens, heads)
        # The output already has its dummies, or there are none.
        if out.shape[1] > tokens.rank_lengths[tokens.index] or not tokens.dummies:
            return out
        # The block expects as many tokens as it gave.
        dummies = out.new_zeros((out.shape[0], tokens.dummies, *out.shape[2:]))
        parts = [dummies, out] if tokens.dummies_first else [out, dummies]
        return torch.cat(parts, dim=1)


class LocalKeyMaskSource:
    """The key masks of a rank that has all tokens of the current patch; a mask may also differ between queries."""

    def gather_key_mask(self, mask: Tensor, batch: int, tokens: LayerTokens, heads: int | None) -> KeyPaddingMask:
        """Return the mask without dummies.

        It covers the keys of the patch, or all keys if it differs between queries.

        Raises:
            ModelError: if it differs between queries and does not cover all keys.
        """
        mask = expand_mask(mask, batch)
        num_own = tokens.rank_lengths[tokens.index]
        runs = tokens.runs[tokens.index]
        is_partial = num_own != tokens.length
        if is_partial and mask.shape[2] == tokens.length:
            mask = take_runs(mask, runs, 2)
        elif mask.shape[2] == num_own + tokens.dummies:
            mask = mask[:, :, tokens.real_tokens]
        covers_sequence = is_partial and mask.shape[3] == tokens.length
        if mask.shape[2] > 1:
            if is_partial and not covers_sequence:
                raise make_pairs_error(mask)
            return KeyPaddingMask((mask,), covers_sequence)
        if covers_sequence:
            return KeyPaddingMask((take_runs(mask, runs, 3),))
        return KeyPaddingMask((mask[..., tokens.real_tokens],))


class FreshKeys:
    """The keys of this call only: none is stale.

    Args:
        gather: gathers the keys of all ranks; None if no other rank has keys.
    """

    def __init__(self, kernel: AttentionKernel, gather: KeyGather | None = None) -> None:
        self._kernel = kernel
        self._gather = gather

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Return the output of the queries, `[B, S, N, H]`."""
        if self._gather is not None:
            k, v = self._gather(k, v, tokens)
        mask = extra.mask.join_ring_masks() if extra.mask else None
        # This is `extra.attend` inline, to save a Python call for every attention layer.
        if extra.further is not None:
            k, v, mask = extra.further.join_keys(k, v, mask)
        return self._kernel(q, k, v, mask=mask, scale=extra.scale)


@dataclass(frozen=True, slots=True)
class StaleKeys:
    """PipeFusion: a patch's fresh keys replace stale ones in the layer's store, and the patch attends to all of it.

    In a synchronous step nothing is stale; its keys are kept if the next step is asynchronous (arXiv 2405.14430,
    section 3.4). Ranks that split a patch by ring or gather exchange its fresh keys once, so that their stores agree.

    Attributes:
        now: the generation under way.
        layer: the layer's name in the model.
        gather: gathers the fresh keys of the ranks that split a patch by ring or gather; None if none do.
        check: asserts that the ages of the keys are those of the schedule, if given.
    """

    now: Generation
    layer: str
    kernel: AttentionKernel
    fresh: KeySource
    gather: KeyGather | None
    check: AgeChecks | None

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Return the output of the queries, `[B, S, N, H]`."""
        now = self.now
        step, patch = now.micro_step
        if patch is None and not now.keeps_keys:
            return self.fresh.attend_to_keys(q, k, v, tokens, extra)
        store = now.memory.get_key_store(now.branch, self.layer, tokens.length, tokens.patches)
        mask = store.mask
        # The text is computed with the first patch of a step, and its keys are written with that patch.
        if not tokens.are_none:
            if self.gather is not None:
                k, v = self.gather(k, v, tokens)
            store.write_keys(k, v, merge_rank_runs(tokens), now.batch_range, now.batch)
            mask = None
            if extra.mask is not None:
                mask = extra.mask.join_ring_masks()
                if not extra.mask.covers_sequence:
                    kept_mask = store.write_mask(mask, merge_rank_runs(tokens), now.batch_range, now.batch)
                    # A patch attends to all keys, and so needs the mask of all.
                    if patch is not None:
                        mask = kept_mask
            # The keys of a text are all written at once.
            written_patch = patch if tokens.image else None
            store.mark_written(step, written_patch)
        # A text that is not computed with this patch has no queries.
        if not q.shape[1]:
            return q
        # A patch attends to the stored keys of the whole sequence. A whole step attends to its keys as they came, and
        # not to the store, so that its result has the bits of one process.
        if patch is not None:
            assert store.buffers is not None
            if self.check is not None:
                note_action(partial(self._check_ages, self.check, tokens), captures=False)
            k, v = store.buffers
        # This is `extra.attend` inline, to save a Python call for every attention layer.
        if extra.further is not None:
            k, v, mask = extra.further.join_keys(k, v, mask)
        return self.kernel(q, k, v, mask=mask, scale=extra.scale)

    def _check_ages(self, check: AgeChecks, tokens: LayerTokens) -> None:
        """Assert that the keys of each patch have their scheduled ages."""
        now = self.now
        step, patch = now.micro_step
        assert patch is not None
        # A recorded check outlives the store of the generation in which it was recorded.
        store = now.memory.get_key_store(now.branch, self.layer, tokens.length, tokens.patches)
        ages = now.schedule.compute_key_ages(now.micro_step)
        if not tokens.image:
            # The text is computed with the first patch of the image. Patches of references come earlier, and attend to
            # the text of the step before.
            ages = (int(patch < now.schedule.num_references),) * len(ages)
        check.expect_ages(store, step, ages, f"{self.layer} at {now.micro_step} branch {now.branch}")


def _take_apart(x: Tensor, at: int, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """Split a dimension of a tensor into `count` places from `at` on and the rest; return the rest first."""
    rest = x.shape[dim] - at - count
    before, taken, after = x.split([at, count, rest], dim)
    # If the rest is on one side, a view of it is enough.
    if not at:
        return after, taken
    if not after.shape[dim]:
        return before, taken
    return torch.cat([before, after], dim), taken


@lru_cache(maxsize=4096)
def merge_rank_runs(tokens: LayerTokens) -> tuple[range, ...]:
    """Return the positions of all ranks' tokens in the sequence, in rank order."""
    return merge_ranges(run for runs in tokens.runs for run in runs)
