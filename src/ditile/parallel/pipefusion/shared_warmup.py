"""The warmup group: all stages compute a synchronous step together instead of one after the other.

Each stage computes all blocks on its share of the tokens, gathering keys and values layer by layer; weights are
streamed (weight_streaming.py). Predictions go to the last stage, which steps the scheduler. Each stage keeps the keys
and values of its own layers, so that an asynchronous step finds what a serial step would have left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import PeerChannel, start_gather
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.generation import Generation, LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions
from ditile.model.hooks.protocols import AttentionKernel, KeySource
from ditile.model.hooks.token_arguments import take_runs, write_runs
from ditile.parallel.attention.core import merge_rank_runs
from ditile.parallel.pipefusion.weight_streaming import WeightStream
from ditile.plan.schedule import Op, OpKind

PREDICTION = "prediction"
LATENTS = "latents"


ChannelName = tuple[int, int, str]
"""The sending stage, the receiving one, and the kind of messages."""


class WarmupGroup:
    """One stage's part in the steps that all stages compute together.

    Args:
        owned: the blocks of this stage.
        weight_stream: brings the weights of other stages.
        may_rest: whether calls that the group cannot compute run stage after stage, as with warmup_mode=auto.

    Attributes:
        owned_prefixes: beginnings of the names of layers in these blocks.
    """

    def __init__(
        self, mesh: Mesh, hooks: TransformerHooks, owned: range, weight_stream: WeightStream, *, may_rest: bool
    ) -> None:
        self.size = mesh.num_stages
        self.stage = mesh.stage_index
        self.last = mesh.num_stages - 1
        self.weight_stream = weight_stream
        self.may_rest = may_rest
        self._mesh = mesh
        self._axis = mesh["pipefusion"]
        self._traffic = mesh.traffic
        self.owned_prefixes = tuple(f"{hooks.chain[index].name}." for index in owned)
        # (sender, receiver, kind) of every channel, in the order in which all stages open them.
        self._order: list[ChannelName] = []
        for member in range(self.last):
            self._order.append((member, self.last, PREDICTION))
        for member in range(1, self.last):
            self._order.append((self.last, member, LATENTS))
        self._channels: dict[ChannelName, PeerChannel] = {}

    def open_channels(self) -> None:
        """Open the channels, in the mesh's present groups."""
        mesh = self._mesh
        assert mesh.latents is not None
        self._channels = {}
        for name in self._order:
            sender, receiver, kind = name
            if self.stage not in (sender, receiver):
                continue
            # Messages from the last stage have a separate group, see `Mesh.latents`.
            group = mesh.latents if kind == LATENTS else mesh.select_downstream_group(sender)
            peer = receiver if sender == self.stage else sender
            self._channels[name] = PeerChannel(group, peer, kind, mesh.traffic)

    def connect_channels(self, device: torch.device) -> None:
        """Use every channel once, in one order for all stages: otherwise two of them would wait for each other."""
        for name, channel in self._channels.items():
            channel.open_connection(device, sends=name[0] == self.stage)

    @property
    def channels(self) -> Iterable[PeerChannel]:
        """Return the channels of this stage."""
        return self._channels.values()

    def exchange_whole_latents(self, ops: Iterable[Op], latents: Sequence[Tensor], *, writes: bool) -> None:
        """Send the whole latents from the last stage to others before a step; these write them only if `writes`."""
        for op in ops:
            for own in latents:
                if op.kind is OpKind.SEND_WHOLE_LATENTS:
                    assert op.peer is not None
                    # A copy is sent, because the next denoised patch is written into the latents, whether or not they
                    # have left.
                    self._channels[self.stage, op.peer, LATENTS].send_tensor(own.clone())
                elif op.kind is OpKind.RECEIVE_WHOLE_LATENTS:
                    whole = self._receive_tensor((self.last, self.stage, LATENTS), own.shape, own)
                    if writes:
                        own.copy_(whole)

    def gather_image_tokens(self, own: Tensor, now: Generation, ops: Iterator[Op]) -> Tensor:
        """Gather the image tokens `[B, N, C]` after the last block on the last stage.

        The result of other stages must not be read.
        """
        self.weight_stream.release_weights()
        parts = now.tokens.list_rank_parts(None)
        rows, _, width = own.shape
        gathered = own
        if self.stage == self.last:
            shape = (rows, now.tokens.layout.image_tokens, width)
            gathered = now.memory.get_persistent_buffer(("image", now.branch), shape, own)
            write_runs(gathered, own, parts[self.stage].image, 1)
        for op in ops:
            if op.kind is OpKind.SEND_PREDICTION:
                self._channels[self.stage, self.last, PREDICTION].send_tensor(own)
            elif op.kind is OpKind.RECEIVE_PREDICTION:
                assert op.peer is not None
                part = parts[op.peer]
                shape = (rows, part.image_tokens, width)
                received = self._receive_tensor((op.peer, self.last, PREDICTION), shape, own)
                write_runs(gathered, received, part.image, 1)
        return gathered

    def gather_tokens(self, own: Tensor, dim: int, tokens: LayerTokens, kind: str) -> Tensor:
        """Gather the tokens of all stages along a dimension, in their order."""
        shapes = [(*own.shape[:dim], length, *own.shape[dim + 1 :]) for length in tokens.rank_lengths]
        parts = start_gather(own, shapes, self._axis.group, self._traffic, kind).wait_for_tensors()
        return torch.cat(parts, dim=dim)

    def _receive_tensor(self, name: ChannelName, shape: Sequence[int], like: Tensor) -> Tensor:
        channel = self._channels[name]
        channel.post_receive(name, shape, like)
        return channel.receive_message(name)


@dataclass(frozen=True, slots=True)
class WarmupGroupKeys:
    """The keys that a layer attends to: in a step of the warmup group those of all stages, otherwise those of `others`.

    Attributes:
        now: the generation under way.
        layer: the layer's name in the model.
        warmup_group: gathers the keys.
        others: the source of keys in all other steps.
    """

    now: Generation
    layer: str
    warmup_group: WarmupGroup
    kernel: AttentionKernel
    others: KeySource

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Return the output of the queries, `[B, S, N, H]`."""
        now = self.now
        if now.micro_step.patch is not None or now.shares.warmup_split is None:
            return self.others.attend_to_keys(q, k, v, tokens, extra)
        k, v = self.warmup_group.gather_tokens(torch.stack([k, v]), 2, tokens, "keys")
        runs = merge_rank_runs(tokens)
        mask = None
        kept_mask = None
        if extra.mask is not None:
            mask = extra.mask.join_ring_masks()
            # A mask of pairs comes whole with every call, so it is not stored.
            if extra.mask.covers_sequence:
                mask = take_runs(mask, runs, 3)
            else:
                # Some backends cannot send booleans, so they are sent as bytes.
                flat = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
                mask = kept_mask = self.warmup_group.gather_tokens(flat, 3, tokens, "masks").to(mask.dtype)
        # Later steps read only the keys of this stage's own blocks.
        if now.keeps_keys and f"{self.layer}.".startswith(self.warmup_group.owned_prefixes):
            store = now.memory.get_key_store(now.branch, self.layer, tokens.length, tokens.patches)
            store.write_keys(k, v, runs)
            if kept_mask is not None:
                store.write_mask(kept_mask, runs)
            store.mark_written(now.micro_step.step)
        return extra.attend(self.kernel, q, k, v, mask)
