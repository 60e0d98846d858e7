"""DistriFusion: a rank owns one patch and all blocks; other ranks' keys are one step old (arXiv 2402.19481).

The exchange of a layer starts as soon as its keys exist and is waited for at the same layer of the next step, so it
overlaps with the whole step. Text is computed by every rank and never exchanged. Each rank sends 2 (n - 1) / n of a
layer's image tokens and keeps the whole image's keys of all layers; PipeFusion's stages divide the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.recording.tape import exchange_tensors, note_action
from ditile.distributed.transport import PendingMessages, Traffic, start_exchange
from ditile.model.hooks.generation import Generation, LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions
from ditile.model.hooks.kv_store import AgeChecks, KeyStore
from ditile.model.hooks.protocols import AttentionKernel
from ditile.model.hooks.token_arguments import take_runs
from ditile.parallel.sequence.ring import collect_rank_runs
from ditile.plan.layout import merge_ranges

KIND = "distrifusion"


@dataclass(frozen=True, slots=True)
class DistriFusionKeys:
    """The keys of one layer on one rank.

    Attributes:
        now: the generation under way.
        layer: the layer's name in the model.
        axis: the ranks that own a patch each.
        traffic: counts bytes.
        check: asserts that the ages of the keys are those of the schedule, if given.
    """

    now: Generation
    layer: str
    axis: Axis
    kernel: AttentionKernel
    traffic: Traffic
    check: AgeChecks | None

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Return the output of the queries, `[B, S, N, H]`."""
        now = self.now
        own = self.axis.index
        # Every rank has all of the text, so there is no exchange.
        if not tokens.image:
            mask = extra.mask.ring_masks[own] if extra.mask else None
            return self.kernel(q, k, v, mask=mask, scale=extra.scale)
        step = now.micro_step.step
        ranks = self.axis.num_ranks
        runs = collect_rank_runs(tokens, ranks)
        store = now.memory.get_key_store(now.branch, self.layer, tokens.length, ranks * tokens.patches)
        sends_keys = not now.is_stale or now.keeps_keys
        # The messages of the last step write older keys, so they must be in the store before this step's are.
        if store.incoming is not None:
            self._receive_patch_keys(store, tokens, 1, expects_more=sends_keys)
        # A synchronous step writes all keys, and may have fewer rows: guidance may have ended.
        if not now.is_stale and store.buffers is not None:
            rows_before = store.buffers[0].shape[0]
            if k.shape[0] != rows_before:
                store.drop_keys()
        keys, values = store.write_keys(k, v, runs[own])
        self._mark_written(store, step, own)
        if sends_keys:
            image_runs = []
            for rank_runs in runs:
                image_runs.append(tuple([run for run in rank_runs if run.start in tokens.image]))
            pending = self._send_patch_keys(k, v, runs[own], image_runs)
            note_action(partial(self._expect_messages, tokens, pending, image_runs))
        # A synchronous step attends to the fresh keys of all ranks; a stale one leaves them to the next step.
        if not now.is_stale:
            self._receive_patch_keys(store, tokens, 0, expects_more=False)
        if self.check is not None:
            note_action(partial(self._check_ages, self.check, tokens), captures=False)
        mask = None
        if extra.mask is not None:
            for part, rank_runs in zip(extra.mask.ring_masks, runs, strict=True):
                store.write_mask(part, rank_runs)
            mask = store.mask
        return extra.attend(self.kernel, q, keys, values, mask)

    # A recorded action outlives the store of the generation in which it was recorded, so it looks the store up.

    def _find_store(self, tokens: LayerTokens) -> KeyStore:
        now = self.now
        return now.memory.get_key_store(now.branch, self.layer, tokens.length, self.axis.num_ranks * tokens.patches)

    def _expect_messages(
        self, tokens: LayerTokens, pending: PendingMessages, image_runs: list[tuple[range, ...]]
    ) -> None:
        """Store the messages under way and the runs that they fill."""
        store = self._find_store(tokens)
        store.incoming = pending
        store.incoming_runs = image_runs

    def _forget_messages(self, tokens: LayerTokens) -> None:
        self._find_store(tokens).incoming = None

    def _wait_for_messages(self, tokens: LayerTokens, *_: Tensor) -> None:
        incoming = self._find_store(tokens).incoming
        assert incoming is not None
        incoming.wait_for_works()

    def _check_ages(self, check: AgeChecks, tokens: LayerTokens) -> None:
        """Assert that in a stale step all keys but this rank's are one step old."""
        store = self._find_store(tokens)
        schedule = self.now.schedule
        step = self.now.micro_step.step
        ages = [int(self.now.is_stale)] * self.axis.num_ranks
        ages[self.axis.index] = 0
        # Two patches: the segments of the reference images come first, then those of the image.
        if tokens.patches > 1:
            ages = [schedule.compute_reference_age(step, age) for age in ages] + ages
        check.expect_ages(store, step, ages, f"{self.layer} in step {step}")

    def _mark_written(self, store: KeyStore, step: int, rank: int) -> None:
        """Record the step in which a rank's part of the image was written.

        The image's segments are the last ones; the references' count as written too if the rank computed them.
        """
        ranks = self.axis.num_ranks
        num_segments = len(store.written)
        store.mark_written(step, rank + num_segments - ranks)
        if num_segments > ranks and self.now.schedule.computes_references(step):
            store.mark_written(step, rank)

    def _send_patch_keys(
        self, k: Tensor, v: Tensor, own_runs: tuple[range, ...], image_runs: list[tuple[range, ...]]
    ) -> PendingMessages:
        """Start to send the keys of this rank's image tokens to the other ranks."""
        own = self.axis.index
        # Text is not sent: its runs are left out before anything is copied.
        if image_runs[own] != own_runs:
            places = _locate_runs(own_runs, image_runs[own])
            k = take_runs(k, places, 1)
            v = take_runs(v, places, 1)
        fresh = torch.stack([k, v])
        sends = []
        receives = []
        for rank, runs in enumerate(image_runs):
            if rank == own:
                continue
            num_tokens = sum(map(len, runs))
            sends.append((rank, fresh))
            receives.append((rank, (*fresh.shape[:2], num_tokens, *fresh.shape[3:])))
        keep = None
        # The next step waits for these messages; a recorded step finds them only in memory that stays in place.
        if self.now.memory.keeps_buffers:
            keep = partial(self._keep_message, self.now.branch)
        bases = self.now.find_bases(self.layer, tuple(image_runs), fresh.shape)
        return start_exchange(sends, receives, fresh, self.axis.group, self.traffic, KIND, keep, bases)

    def _keep_message(self, branch: int, index: int, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.now.memory.keep_message((self.layer, branch, "message", index), shape, like)

    def _receive_patch_keys(self, store: KeyStore, tokens: LayerTokens, age: int, *, expects_more: bool) -> None:
        """Wait for the other ranks' keys from `age` steps ago and write them into the store.

        With `expects_more` this step's messages replace these in the store; without it these are forgotten.
        """
        incoming = store.incoming
        assert incoming is not None
        exchange_tensors(partial(self._wait_for_messages, tokens), [], incoming.received)
        received = iter(incoming.list_received())
        # Messages are in the order of the ranks, without this one.
        for rank, runs in enumerate(store.incoming_runs):
            if rank != self.axis.index:
                k, v = next(received)
                store.write_keys(k, v, runs)
                self._mark_written(store, self.now.micro_step.step - age, rank)
        if not expects_more:
            note_action(partial(self._forget_messages, tokens))


@lru_cache(maxsize=4096)
def _locate_runs(all_runs: tuple[range, ...], runs: tuple[range, ...]) -> tuple[range, ...]:
    """Return the positions of some runs in the concatenation of all runs."""
    places: list[range] = []
    start = 0
    for run in all_runs:
        if run in runs:
            places.append(range(start, start + len(run)))
        start += len(run)
    return merge_ranges(places)
