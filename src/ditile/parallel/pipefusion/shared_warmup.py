"""The warmup group: the first stages, which compute a synchronous step together instead of one after the other.

Each has a share of the tokens and computes all blocks on it, gathering keys and values layer by layer. With
warmup_mode=sequence all stages are members, and weights are streamed (weight_streaming.py); with warmup_mode=separate
a few stages are, and hold all blocks. Predictions go to the last stage, which steps the scheduler; keys and values go
to the stages that own their layers, so that an asynchronous step finds what a serial step would have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import PeerChannel, start_exchange, start_gather
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import BlockHook, TokenState
from ditile.model.hooks.generation import Generation, LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions, KeyPaddingMask
from ditile.model.hooks.protocols import AttentionKernel, KeySource
from ditile.model.hooks.token_arguments import take_runs, write_runs
from ditile.parallel.attention.core import merge_rank_runs
from ditile.parallel.pipefusion.weight_streaming import WeightStream
from ditile.plan.anatomy import LOCAL, REAL_PAIRS, drop_further_keys
from ditile.plan.errors import ModelError
from ditile.plan.schedule import Op, OpKind

KEYS = "keys"
PREDICTION = "prediction"
LATENTS = "latents"
SHAPES = "control"
MASKS = "masks"


ChannelName = tuple[int, int, str]
"""The sending stage, the receiving one, and the kind of messages."""


class WarmupGroup:
    """One stage's part in the steps that the warmup group computes.

    Args:
        size: stages 0 to `size` - 1 are the members.
        weight_stream: brings the weights of other stages; None if each member holds all.
        may_rest: whether calls for which it cannot work run stage after stage, as with warmup_mode=auto.
    """

    def __init__(
        self,
        mesh: Mesh,
        hooks: TransformerHooks,
        stages: Sequence[range],
        size: int,
        weight_stream: WeightStream | None,
        *,
        may_rest: bool = False,
    ) -> None:
        self.size = size
        self.stage = mesh.stage_index
        self.last = len(stages) - 1
        self.weight_stream = weight_stream
        self.may_rest = may_rest
        self.is_member = self.stage < size
        self._mesh = mesh
        self._axis = mesh["pipefusion"]
        self._traffic = mesh.traffic
        self._chain = hooks.chain
        self._owned = stages[mesh.stage_index]
        self._owners: dict[str, int] = {}
        self._blocks: dict[str, BlockHook] = {}
        for owner, blocks in enumerate(stages):
            for hook in hooks.chain[blocks.start : blocks.stop]:
                self._owners[hook.name] = owner
                self._blocks[hook.name] = hook
        # (sender, receiver, kind) of every channel, in the order in which all stages open them.
        self._order: list[ChannelName] = []
        for member in range(size):
            if member != self.last:
                self._order.append((member, self.last, PREDICTION))
        for member in range(1, min(size, self.last)):
            self._order.append((self.last, member, LATENTS))
        for owner in range(size, len(stages)):
            self._order.append((0, owner, SHAPES))
            self._order.append((0, owner, KEYS))
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

    def end_generation(self, *, clean: bool) -> None:
        """End a generation, and wait for sent messages unless it ended with an error."""
        if clean:
            for channel in self._channels.values():
                channel.flush_sends()
        if self.weight_stream is not None:
            self.weight_stream.free_buffers()

    def settle_channels(self) -> None:
        """Release arrived tensors, which were sent before the last step began."""
        for channel in self._channels.values():
            channel.release_old_sends()

    # The last stage sends latents to the members before a step.

    def send_whole_latents(self, latents: Tensor, op: Op) -> None:
        """Send the whole latents from the last stage to a member."""
        assert op.peer is not None
        # A copy is sent, because the next denoised patch is written into the latents, whether or not they have left.
        self._channels[self.stage, op.peer, LATENTS].send_tensor(latents.clone())

    def receive_whole_latents(self, latents: Tensor) -> Tensor:
        """Receive the whole latents on a member; `latents` are this stage's, of the same shape."""
        return self._receive_tensor((self.last, self.stage, LATENTS), latents.shape, latents)

    # The methods below make one call of the transformer.

    def enter_blocks(self, state: TokenState, now: Generation, dummies: Tensor | None) -> TokenState:
        """Return a member's share of the tokens, at the first block."""
        if not self.is_member:
            return state
        if self.weight_stream is not None:
            self.weight_stream.start_streaming(state.image.device)
        if now.has_all_image_tokens:
            return state
        part = now.tokens.get_own_part(None)
        runs = [state.image[:, run.start : run.stop] for run in part.image]
        image = torch.cat(runs, dim=1)
        if state.text is None:
            return TokenState(image, None)
        text = state.text[:, part.text.start : part.text.stop] if part.text else dummies
        return TokenState(image, text)

    def run_block(
        self, index: int, block: Callable[[TokenState], TokenState], state: TokenState, now: Generation
    ) -> TokenState:
        """Compute a block on a member; elsewhere receive the keys of own blocks."""
        if self.is_member:
            if self.weight_stream is not None:
                self.weight_stream.receive_block(index)
            return block(state)
        if index in self._owned and now.keeps_keys:
            self._receive_keys(index, state, now)
        return state

    def gather_image_tokens(self, own: Tensor, now: Generation, ops: Iterator[Op]) -> Tensor:
        """Gather the image tokens `[B, N, C]` after the last block on the last stage.

        The result of other stages must not be read.
        """
        if self.weight_stream is not None:
            self.weight_stream.release_weights()
        is_last = self.stage == self.last
        # A single member that steps the scheduler too has all tokens.
        if is_last and self.is_member and self.size == 1:
            return own
        parts = now.tokens.list_rank_parts(None)
        rows, _, width = own.shape
        whole = own
        if is_last:
            shape = (rows, now.tokens.layout.image_tokens, width)
            whole = now.memory.get_persistent_buffer(("image", now.branch), shape, own)
            if self.is_member:
                write_runs(whole, own, parts[self.stage].image, 1)
        for op in ops:
            if op.kind is OpKind.SEND_PREDICTION:
                self._channels[self.stage, self.last, PREDICTION].send_tensor(own)
            elif op.kind is OpKind.RECEIVE_PREDICTION:
                assert op.peer is not None
                part = parts[op.peer]
                shape = (rows, part.image_tokens, width)
                received = self._receive_tensor((op.peer, self.last, PREDICTION), shape, own)
                write_runs(whole, received, part.image, 1)
        return whole

    # Members gather keys and values in each layer, and send them to the owners.

    def gather_keys(self, k: Tensor, v: Tensor, tokens: LayerTokens) -> tuple[Tensor, Tensor]:
        """Gather keys and values of all members, in their order, from `[B, own tokens, N, H]`."""
        if self.size == 1:
            return k, v
        own = torch.stack([k, v])
        shapes = [(*own.shape[:2], length, *own.shape[3:]) for length in tokens.rank_lengths]
        if self.size == self.last + 1:
            parts = start_gather(own, shapes, self._axis.group, self._traffic, KEYS).wait_for_tensors()
        else:
            # A collective needs all stages of the group, and only the first ones are members.
            peers = [member for member in range(self.size) if member != self.stage]
            sends = [(member, own) for member in peers]
            receives = [(member, shapes[member]) for member in peers]
            parts = start_exchange(sends, receives, own, self._axis.group, self._traffic, KEYS).wait_for_tensors()
            parts.insert(self.stage, own)
        k, v = torch.cat(parts, dim=2)
        return k, v

    def gather_mask(self, mask: KeyPaddingMask, layer: str, tokens: LayerTokens) -> Tensor:
        """Gather the mask of all members' keys `[B or 1, N or 1, 1, keys]`, in their order."""
        own = mask.join_ring_masks()
        if self.size == 1:
            return own
        if mask.covers_sequence:
            return take_runs(own, merge_rank_runs(tokens), 3)
        if self.size <= self.last:
            raise ModelError(
                f"{layer} masks keys, which warmup_mode=separate does not gather along a group of {self.size}; use "
                "warmup_ranks=1 or another warmup_mode"
            )
        # Some backends cannot send booleans, so they are sent as bytes.
        flat = own.to(torch.uint8) if own.dtype == torch.bool else own
        shapes = [(*own.shape[:3], length) for length in tokens.rank_lengths]
        parts = start_gather(flat, shapes, self._axis.group, self._traffic, MASKS).wait_for_tensors()
        return torch.cat(parts, dim=3).to(own.dtype)

    def store_or_send_keys(
        self, layer: str, k: Tensor, v: Tensor, mask: Tensor | None, tokens: LayerTokens, now: Generation
    ) -> None:
        """Write keys of the whole image into this stage's store, or send them to the layer's owner."""
        block = self._find_block(layer)
        owner = self._owners[block.name]
        if owner == self.stage:
            _write_keys(layer, k, v, tokens, now, mask)
            return
        # One member sends them to the stages that compute nothing in this step; members have their own.
        if owner < self.size or self.stage != 0:
            return
        # A mask of pairs comes again with every call, so it is not kept.
        if mask is not None and mask.shape[2] > 1:
            mask = None
        mask_numbers = (0, 0, 0)
        if mask is not None:
            mask_numbers = (*mask.shape[:2], int(mask.dtype == torch.bool))
        # The owner has the modules, but only a call shows the shapes of their outputs. Its host must know these before
        # it can receive, so these numbers go from host to host, without either device.
        place = list(_find_kinds(block)).index(layer)
        numbers = torch.tensor((place, *k.shape[2:], *mask_numbers))
        self._channels[0, owner, SHAPES].send_tensor(numbers)
        self._channels[0, owner, KEYS].send_tensor(torch.stack([k, v]))
        if mask is not None:
            self._channels[0, owner, SHAPES].send_tensor(mask.to(k.dtype))

    def _find_block(self, layer: str) -> BlockHook:
        """Find the block of a layer by its name: a block that was never loaded here has no modules to search."""
        while layer not in self._blocks:
            layer, _, _ = layer.rpartition(".")
        return self._blocks[layer]

    def _receive_keys(self, index: int, state: TokenState, now: Generation) -> None:
        """Receive the keys of this stage's block from the first stage, layer after layer."""
        kinds = _find_kinds(self._chain[index])
        layers = list(kinds)
        shapes = (0, self.stage, SHAPES)
        rows = state.image.shape[0]
        for _ in layers:
            # Layers come in the order in which the model calls them.
            numbers = self._receive_tensor(shapes, (6,), torch.empty(0, dtype=torch.int64))
            place, heads, head_size, mask_rows, mask_heads, is_boolean = numbers.tolist()
            layer = layers[place]
            kind = drop_further_keys(kinds[layer].removesuffix(REAL_PAIRS))[-1]
            tokens = now.tokens.get_layer_tokens(now.token_patch, kind)
            shape = (2, rows, tokens.length, heads, head_size)
            k, v = self._receive_tensor((0, self.stage, KEYS), shape, state.image)
            mask = None
            if mask_rows:
                mask = self._receive_tensor(shapes, (mask_rows, mask_heads, 1, tokens.length), state.image)
                if is_boolean:
                    mask = mask.bool()
            _write_keys(layer, k, v, tokens, now, mask)

    def _receive_tensor(self, name: ChannelName, shape: Sequence[int], like: Tensor) -> Tensor:
        channel = self._channels[name]
        channel.post_receive(name, shape, like)
        return channel.receive_message(name)


@dataclass(frozen=True, slots=True)
class WarmupGroupKeys:
    """The keys that a layer attends to: of all members in a step of the warmup group, otherwise those of `others`.

    Attributes:
        now: the generation under way.
        layer: the layer's name in the model.
        warmup_group: gathers the keys and keeps them.
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
        k, v = self.warmup_group.gather_keys(k, v, tokens)
        mask = None
        kept_mask = None
        if extra.mask is not None:
            mask = self.warmup_group.gather_mask(extra.mask, self.layer, tokens)
            # A mask of pairs comes whole with every call, so it is not stored.
            if not extra.mask.covers_sequence:
                kept_mask = mask
        if now.keeps_keys:
            self.warmup_group.store_or_send_keys(self.layer, k, v, kept_mask, tokens, now)
        if extra.further is not None:
            k, v, mask = extra.further.join_keys(k, v, mask)
        return self.kernel(q, k, v, mask=mask, scale=extra.scale)


def _find_kinds(hook: BlockHook) -> dict[str, str]:
    """Return the kind of each attention call with kept keys in a block, by its name."""
    kinds = {}
    for path, _ in hook.list_attentions():
        for name, kind in hook.list_calls(path):
            if kind != LOCAL:
                kinds[name] = kind
    return kinds


def _write_keys(layer: str, k: Tensor, v: Tensor, tokens: LayerTokens, now: Generation, mask: Tensor | None) -> None:
    store = now.memory.get_key_store(now.branch, layer, tokens.length, tokens.patches)
    store.write_keys(k, v, merge_rank_runs(tokens))
    if mask is not None:
        store.write_mask(mask, merge_rank_runs(tokens))
    store.mark_written(now.micro_step.step)
