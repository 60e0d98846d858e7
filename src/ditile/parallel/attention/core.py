"""AttentionCore: what becomes of q, k and v of one layer: exchanged, kept, attended to, and exchanged back.

    tokens to heads (ulysses) -> keys that are kept, or a ring -> kernel -> heads to tokens

It gets them after projections, qk-norm and rope. Each part has a null object, so that the core has no cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ditile.hooks.generation import Generation, Tokens
from ditile.hooks.key_padding import Extra, KeyMask, refuse_masks
from ditile.hooks.kv_store import AgeChecks
from ditile.hooks.opaque import Hidden
from ditile.hooks.protocols import Exchange, Gather, Kernel, Keys, Make, Masks
from ditile.plan.layout import joined


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
        self, current: Callable[[], Generation], exchange: Exchange, keys: Keys, masks: Masks, *, joint: bool,
        turn: Tensor,
    ) -> None:  # fmt: skip
        self._current, self._exchange, self._keys, self._masks = current, exchange, keys, masks
        self._joint, self._hidden = joint, Hidden(self._made, turn)
        self.overlaps = exchange.overlaps

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attends. `[B, S, N, H]`, where S counts the tokens of the micro-step at hand; dummies come back as zeros."""
        return self.of(lambda: q, lambda: k, lambda: v, mask=mask, scale=scale)

    def of(self, q: Make, k: Make, v: Make, *, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        """The same for tensors yet to be made, so that each can travel while the next is computed.

        In a compiled block they are made before any travels.
        """
        if torch.compiler.is_compiling():
            return self._hidden(q(), k(), v(), mask, scale=scale)
        return self.over(self._current().tokens(joint=self._joint), (q, k, v), mask=mask, scale=scale)

    def over(
        self, tokens: Tokens, makes: Sequence[Make], *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """The same over tokens that are named.

        Raises:
            ModelError: if the mask is not one of keys alone.
        """
        heads = 0

        def real(make: Make) -> Make:
            def made() -> Tensor:
                nonlocal heads
                x = make()
                heads = max(heads, x.shape[2])
                return x[:, tokens.real] if tokens.dummies else x

            return made

        query, key, value = self._exchange.to_heads([real(make) for make in makes], tokens)
        known = None if mask is None else self._masks.gather(mask, query.shape[0], tokens, heads)
        has_heads = query.shape[2] > 0  # there may be more ranks than heads
        out = self._keys.attend(query, key, value, tokens, Extra(known, scale)) if has_heads else query
        out = self._exchange.to_tokens(out, tokens, heads)
        if not tokens.dummies:
            return out
        dummies = out.new_zeros((out.shape[0], tokens.dummies, *out.shape[2:]))
        return torch.cat([dummies, out] if tokens.dummies_first else [out, dummies], dim=1)

    def _made(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None) -> Tensor:
        tokens = self._current().tokens(joint=self._joint)
        return self.over(tokens, (lambda: q, lambda: k, lambda: v), mask=mask, scale=scale)


class NoExchange:
    """Every rank has all heads of its tokens."""

    overlaps = False

    def to_heads(self, makes: Sequence[Make], tokens: Tokens) -> Sequence[Tensor]:
        """Makes them."""
        return [make() for make in makes]

    def to_tokens(self, out: Tensor, tokens: Tokens, heads: int) -> Tensor:
        """Nothing."""
        return out


class OwnMasks:
    """This rank has all keys and queries: a mask may tell these apart."""

    def gather(self, mask: Tensor, batch: int, tokens: Tokens, heads: int | None) -> KeyMask:
        """Nothing."""
        is_flat = mask.ndim == 2 and mask.shape[0] in (1, batch)
        return KeyMask(((mask[:, None, None] if is_flat else mask)[..., tokens.real],))


class FreshKeys:
    """The keys that came: nothing is stale, nobody else has any."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, extra: Extra) -> Tensor:
        """Attends."""
        return self._kernel(q, k, v, mask=extra.mask.rows[0] if extra.mask else None, scale=extra.scale)


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
        self, current: Callable[[], Generation], layer: str, kernel: Kernel, fresh: Keys, gather: Gather, *,
        check: AgeChecks | None,
    ) -> None:  # fmt: skip
        self._current, self._layer, self._kernel, self._fresh = current, layer, kernel, fresh
        self._gather, self._check = gather, check

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, extra: Extra) -> Tensor:
        """Attends."""
        now = self._current()
        step, patch = now.micro
        refuse_masks(extra, self._layer)
        if patch is None and not now.keeps_keys(step):
            return self._fresh.attend(q, k, v, tokens, extra)
        store = now.memory.store(now.branch, self._layer, tokens.length, now.layout.patches)
        k, v = self._gather(k, v, tokens)
        whole = store.write(k, v, joined(run for runs in tokens.runs for run in runs), now.rows, now.batch)
        store.stamp(step, patch)
        if patch is None:
            # in the order in which they came: bit-identical to one process
            return self._kernel(q, k, v, scale=extra.scale)
        if self._check is not None:
            where = f"{self._layer} at {now.micro} branch {now.branch}"
            self._check.expect(store, step, now.ages(now.micro), where)
        return self._kernel(q, *whole, scale=extra.scale)


def alone(k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Nobody shares out the patch along ring."""
    return k, v
