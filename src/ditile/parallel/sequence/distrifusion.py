"""DistriFusion: a rank owns one patch and all blocks; its keys are fresh, the others' one step old (arXiv 2402.19481).

The exchange of a layer starts as soon as its keys are there and is waited for at the same layer of the next step, so it
hides under the whole step. Text is computed by every rank and never exchanged. Each rank sends 2 (n - 1) / n of a
layer's image tokens and keeps the keys of the whole image for every layer, which PipeFusion's stages divide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import PendingMessages, Traffic, start_exchange
from ditile.model.hooks.generation import Generation, LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions, KeyPaddingMask
from ditile.model.hooks.kv_store import AgeChecks, KeyStore
from ditile.model.hooks.protocols import AttentionKernel
from ditile.parallel.sequence.ring import collect_rank_runs

KIND = "distrifusion"


def compute_patch_ages(own: int, ranks: int, stale: bool) -> tuple[int, ...]:
    """The age in steps of each patch's keys on the rank that owns one of them. The fresh area is 1/N at every step."""
    return tuple(int(stale and patch != own) for patch in range(ranks))


@dataclass(frozen=True, slots=True)
class DistriFusionKeys:
    """The keys of one layer on one rank.

    Attributes:
        now: the generation under way.
        layer: the layer's name in the model.
        axis: the ranks that own a patch each.
        kernel: attends.
        traffic: counts bytes.
        check: asserts that the ages of the keys are what the schedule says, if given.
    """

    now: Generation
    layer: str
    axis: Axis
    kernel: AttentionKernel
    traffic: Traffic
    check: AgeChecks | None

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """The output of the queries, `[B, S, N, H]`."""
        now, own = self.now, self.axis.index
        if not tokens.image:  # every rank has all of the text
            return self.kernel(q, k, v, mask=extra.mask.ring_masks[own] if extra.mask else None, scale=extra.scale)
        step, stale = now.micro_step.step, now.is_stale
        ranks, of_rank = self.axis.num_ranks, collect_rank_runs(tokens, self.axis.num_ranks)
        store = now.memory.get_key_store(now.branch, self.layer, tokens.length, ranks * tokens.patches)
        if store.incoming is not None:
            self._receive_patch_keys(store, step - 1)
        # All keys are about to be written, and guidance may have ended.
        if not stale and store.buffers is not None and store.buffers[0].shape[0] != k.shape[0]:
            store.drop_keys()
        whole = store.write_keys(k, v, of_rank[own])
        self._mark_written(store, step, own)
        if not stale or now.keeps_keys:
            store.incoming = self._send_patch_keys(k, v, tokens)
            store.incoming_runs = [_select_image_runs(runs, tokens) for runs in of_rank]
        if not stale:
            self._receive_patch_keys(store, step)
        if self.check is not None:
            ages = compute_patch_ages(own, ranks, stale)
            if tokens.patches > 1:  # those of the references are in front
                schedule = now.schedule
                ages = (*(schedule.compute_reference_age(step, age) for age in ages), *ages)
            self.check.expect_ages(store, step, ages, f"{self.layer} in step {step}")
        mask = None if extra.mask is None else self._join_masks(extra.mask, tokens, store)
        k, v = whole
        if extra.further is not None:
            k, v, mask = extra.further.join_keys(k, v, mask)
        return self.kernel(q, k, v, mask=mask, scale=extra.scale)

    def _mark_written(self, store: KeyStore, step: int, rank: int) -> None:
        """Notes that a rank's part of the image was written in a step, and of the references if it computed them."""
        ranks = self.axis.num_ranks
        of_references = self.now.schedule.computes_references(step) and len(store.written) > ranks
        for segment in (rank, rank + ranks) if of_references else (rank + len(store.written) - ranks,):
            store.mark_written(step, segment)

    def _join_masks(self, mask: KeyPaddingMask, tokens: LayerTokens, store: KeyStore) -> Tensor:
        """The mask of all keys in the order of the sequence, from those of every rank; of references as it was."""
        for part, runs in zip(mask.ring_masks, collect_rank_runs(tokens, self.axis.num_ranks), strict=True):
            store.write_mask(part, runs)
        assert store.mask is not None
        return store.mask

    def _send_patch_keys(self, k: Tensor, v: Tensor, tokens: LayerTokens) -> PendingMessages:
        """Starts to send this patch's keys to the others. Messages of all layers take as much memory as their keys."""
        of_rank, fresh, own = collect_rank_runs(tokens, self.axis.num_ranks), torch.stack([k, v]), self.axis.index
        own_image = _select_image_runs(of_rank[own], tokens)
        if own_image != of_rank[own]:
            parts = zip(of_rank[own], fresh.split([len(run) for run in of_rank[own]], dim=2), strict=True)
            fresh = torch.cat([part for run, part in parts if run in own_image], dim=2)
        images = [sum(map(len, _select_image_runs(runs, tokens))) for runs in of_rank]
        others = [(rank, (*fresh.shape[:2], n, *fresh.shape[3:])) for rank, n in enumerate(images) if rank != own]
        sends = [(rank, fresh) for rank, _ in others]
        return start_exchange(sends, others, fresh, self.axis.group, self.traffic, KIND)

    def _receive_patch_keys(self, store: KeyStore, step: int) -> None:
        """Waits for the other patches, which are of `step`, and keeps them."""
        assert store.incoming is not None
        received = iter(store.incoming.wait_for_tensors())
        for rank, runs in enumerate(store.incoming_runs):
            if rank != self.axis.index:
                k, v = next(received)
                store.write_keys(k, v, runs)
                self._mark_written(store, step, rank)
        store.incoming = None


def _select_image_runs(runs: tuple[range, ...], tokens: LayerTokens) -> tuple[range, ...]:
    return tuple(run for run in runs if run.start in tokens.image)
