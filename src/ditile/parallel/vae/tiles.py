"""Tiles of an autoencoder that cannot be divided by rows: each rank codes some of them, and receives the others.

diffusers calls a coder on one tile after the other, and blends them at the end. Here the coder returns another rank's
tile at once, with a tensor that is yet to arrive, and the first operation that reads it waits. So all ranks code their
own tiles at the same time, and the result equals the tiled call on one rank. A tile goes to the rank that would finish
it first, by the weights of the ranks. If an autoencoder blends each tile before it codes the next, ranks wait for each
other in turn: the result is correct, but no faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ditile.distributed.recording.segments import list_tensors
from ditile.model.hooks.overrides import override_attribute
from ditile.model.hooks.placeholders import build_meta_model
from ditile.parallel.vae.halo import PendingRows, RowLinks
from ditile.plan.errors import ModelError

CALLS = ("encode", "decode")


class SharedCoder(TorchFunctionMode):
    """An encoder or a decoder that every rank calls on the same tiles in the same order.

    While one of its autoencoder's calls runs, it is a mode in which operations wait for the tiles that they read.

    Args:
        coder: the coder, the same on every rank.
        meta: the same coder without weights.
        links: the links to the other ranks.
        weights: the share of each rank, in any unit.
    """

    def __init__(self, coder: nn.Module, meta: nn.Module, links: RowLinks, weights: tuple[float, ...]) -> None:
        super().__init__()
        self._forward = coder.forward
        self._meta = meta
        self._links = links
        self._weights = weights
        self._name = type(coder).__name__
        self._shapes: dict[Any, torch.Size] = {}
        self._assigned_numbers = [0] * links.num_ranks
        # By id, the tiles that other ranks code, and the messages that bring them.
        self._arriving: dict[int, tuple[Tensor, PendingRows]] = {}
        self._sent: list[PendingRows] = []

    def run_call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the autoencoder; all tiles have arrived when it returns."""
        self._assigned_numbers = [0] * self._links.num_ranks
        with self:
            result = call(*args, **kwargs)
        # The caller may read tiles that no operation has read.
        for key in list(self._arriving):
            self._receive(key)
        for message in self._sent:
            message.wait_for_tensors()
        self._sent.clear()
        return result

    def _receive(self, key: int) -> None:
        tile, message = self._arriving.pop(key)
        (content,) = message.wait_for_tensors()
        tile.copy_(content)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Receive the tiles among the operation's arguments, then run it."""
        if self._arriving:
            for tensor in list_tensors((args, kwargs)):
                if id(tensor) in self._arriving:
                    self._receive(id(tensor))
        return func(*args, **(kwargs or {}))

    def code_tile(self, sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of a tile, or a tensor that is yet to arrive."""
        if torch.is_grad_enabled() and sample.requires_grad:
            raise ModelError("a divided autoencoder makes no gradients, and its input requires them; detach() it")
        links = self._links
        owner = self._choose_owner(sample.numel())
        with torch.no_grad():
            if owner != links.index:
                key = (sample.shape, len(args), tuple(kwargs))
                if key not in self._shapes:
                    # `_meta` may have another dtype than the coder, which may have been cast since.
                    dtype = next(self._meta.parameters()).dtype
                    meta_call = pytree.tree_map_only(Tensor, lambda x: x.to("meta", dtype), (sample, args, kwargs))
                    meta_sample, meta_args, meta_kwargs = meta_call
                    self._shapes[key] = self._meta(meta_sample, *meta_args, **meta_kwargs).shape
                shape = self._shapes[key]
                message = links.start_exchange([], [(owner, shape)], sample)
                # The message has its own buffer, which is copied into the tile when an operation first reads it.
                tile = sample.new_empty(shape)
                self._arriving[id(tile)] = (tile, message)
                return tile
            result = self._forward(sample, *args, **kwargs)
            if not isinstance(result, Tensor) or result.dtype != sample.dtype:
                raise ModelError(f"{self._name} does not make one tensor of the type of a tile; use vae=whole")
            # A copy is sent, because tiles are blended in place while the message is under way.
            sent = result.clone(memory_format=torch.contiguous_format)
            others = [(peer, sent) for peer in range(links.num_ranks) if peer != owner]
            self._sent.append(links.start_exchange(others, [], sent))
            return result

    def _choose_owner(self, numbers: int) -> int:
        """Return the rank that would finish a tile of `numbers` first, after its earlier tiles."""
        ends = []
        for assigned, weight in zip(self._assigned_numbers, self._weights, strict=True):
            ends.append((assigned + numbers) / weight)
        owner = ends.index(min(ends))
        # Every rank counts the same tiles in the same order, so that all agree on the owner of each.
        self._assigned_numbers[owner] += numbers
        return owner


def install_tile_forwards(stack: ExitStack, vae: Any, links: RowLinks, weights: tuple[float, ...]) -> None:
    """Distribute the tiles of an autoencoder's calls, on the instance, until the stack is closed.

    Args:
        weights: the share of each rank, in any unit; a rank that is too slow for any tile gets none.
    """
    meta = build_meta_model(vae)
    for call, name in zip(CALLS, ("encoder", "decoder"), strict=True):
        coder = getattr(vae, name, None)
        if coder is None:
            continue
        shared = SharedCoder(coder, meta.get_submodule(name), links, weights)
        override_attribute(stack, coder, "forward", shared.code_tile)
        stock = getattr(vae, call)
        override_attribute(stack, vae, call, functools.update_wrapper(functools.partial(shared.run_call, stock), stock))
