"""The rows of the batch that a rank computes: those of some guidance branches (cfg) and of some images (data).

Diffusers puts the branches of guidance one after the other in the batch: all images of branch 0, then all of branch 1.

**cfg** (arXiv 2207.12598): branches in one batch are split by rows, and every group gets the other groups' rows after
each call. Branches in several calls are spread over the groups as evenly as possible: a prediction that a group does
not compute is NaN until the last call of the step returns, and is filled in place then; `deferred.py` repeats what was
computed with it before. The number of calls is learnt in step 0, which every group computes whole. Only fresh pieces
are sent: in an asynchronous micro-step of PipeFusion one patch of the prediction, and only on the last stage.

**data**: each replica computes the model's rows of its own images, and all hold all images at the end. Every replica
runs the pipeline on the latents of the whole batch, which is cheap. Noise is made for the whole batch, by one
generator or a list, at the start and in the steps of a stochastic scheduler. So image k does not depend on `data`. In
other replicas' rows a prediction is zero and latents are not read; they arrive after the last step. Each replica
decodes its own images. With fewer images than replicas, those that have none compute the first image as well, and send
none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_exchange, start_gather
from ditile.model.hooks.batch_rows import slice_batch_arguments
from ditile.model.hooks.overrides import list_replaced_methods, override_attribute
from ditile.model.hooks.pieces import Piece, list_predictions
from ditile.plan.errors import ModelError
from ditile.plan.layout import count_most_in_rows, pick_even_chunk, spread_branches

# Traffic is counted in bytes under these kinds.
CFG = "cfg"
LATENTS = "data"
PICTURES = "pictures"
Receivers = Literal["all", "first", "none"]


class BatchSlice(NamedTuple):
    """Some rows of a batch: those of some branches and some images.

    Attributes:
        num_branches, num_images: the numbers of branches and of images in the whole batch.
    """

    branches: range
    images: range
    num_branches: int
    num_images: int

    @classmethod
    def from_batch_size(cls, total: int, images: int) -> BatchSlice:
        """Return all rows of a batch of `total`, with one row for each of `images` in every branch."""
        branches, rest = divmod(total, images)
        if rest or not branches:
            raise ModelError(
                f"a call of the model has {total} row(s) for {images} image(s), so it is not known whose they are; "
                "use a plan with data=1 and cfg=1"
            )
        return cls(range(branches), range(images), branches, images)

    @property
    def batch_size(self) -> int:
        """Return the number of rows in the batch."""
        return self.num_branches * self.num_images

    @property
    def slice_size(self) -> int:
        """Return the number of chosen rows."""
        return len(self.branches) * len(self.images)

    def select_batch(self, batch: Tensor) -> Tensor:
        """Return the chosen rows of `[batch_size, ...]`, contiguous because models take views of their arguments."""
        if self.slice_size == self.batch_size:
            return batch
        return self.view_as_grid(batch).flatten(0, 1).contiguous()

    def view_as_grid(self, batch: Tensor) -> Tensor:
        """Return a view `[branches, images, ...]` of the chosen rows."""
        grid: Tensor = batch.unflatten(0, (self.num_branches, self.num_images))
        return grid[self.branches.start : self.branches.stop, self.images.start : self.images.stop]

    def write_slice(self, batch: Tensor, values: Tensor) -> None:
        """Write `values` `[slice_size, ...]` into the chosen rows of a contiguous tensor `[batch_size, ...]`."""
        self.view_as_grid(batch).copy_(values.unflatten(0, (len(self.branches), len(self.images))))


def extract_predictions(result: Any, rows: int) -> list[Tensor]:
    """Return the tensors in a model's result, such as the predictions of a video and its sound.

    Each must have one entry for each of `rows`.
    """
    predictions = list_predictions(result)
    if not predictions:
        raise ModelError(
            f"a model returned a {type(result).__name__}, in which no tensor is found; let it return a "
            "tensor or a tuple, or use a plan with data=1 and cfg=1"
        )
    for prediction in predictions:
        if not prediction.ndim or prediction.shape[0] != rows:
            raise ModelError(
                f"a model returned {len(predictions)} tensors, one of shape {tuple(prediction.shape)}, and was given "
                f"{rows} row(s), so it is not known whose rows these are; use a plan with data=1 and cfg=1"
            )
    return predictions


def replace_predictions(result: Any, predictions: Iterable[Tensor]) -> Any:
    """Replace the tensors in a model's result."""
    replacements = iter(predictions)
    return pytree.tree_map_only(Tensor, lambda _: next(replacements), result)


class CfgExchange:
    """The exchange of predictions between the groups of guidance.

    Args:
        axis: a rank of each group; most often there are two groups.
        traffic: counts bytes.
        keeps_calls: whether the branches of a call stay together where a step has several calls.

    Attributes:
        size: the number of groups.
        index: the number of this rank's group.
    """

    def __init__(self, axis: Axis, traffic: Traffic, keeps_calls: bool) -> None:
        self._axis = axis
        self._traffic = traffic
        self.keeps_calls = keeps_calls
        self.size = axis.num_ranks
        self.index = axis.index

    def restrict_to_group(self, batch_slice: BatchSlice, group: int | None = None) -> BatchSlice:
        """Return the rows of a batched call that a group computes; by default this rank's group."""
        # If there are too few branches to split, every group computes them all.
        if batch_slice.num_branches < self.size:
            return batch_slice
        if group is None:
            group = self.index
        return batch_slice._replace(branches=pick_even_chunk(batch_slice.branches, self.size, group))

    def spread_calls(self, branch_counts: Sequence[int]) -> list[list[range]]:
        """Return each group's branches in each call of a step, by the number of branches in each call."""
        return spread_branches(branch_counts, self.size, keeps_calls=self.keeps_calls)

    def gains_from_calls(self, branch_counts: Sequence[int]) -> bool:
        """Return whether a step is over earlier if its calls are spread than if each is split by rows."""
        if self.keeps_calls:
            return False
        return -(-sum(branch_counts) // self.size) < count_most_in_rows(branch_counts, self.size)

    def exchange_branches(self, prediction: Tensor, batch_slice: BatchSlice, piece: Piece | None) -> None:
        """Fill in the other groups' rows of a full-size prediction that has this group's rows."""
        if self.size == 1 or batch_slice.num_branches < self.size:
            return
        groups = [self.restrict_to_group(batch_slice, group) for group in range(self.size)]
        self.exchange_calls([prediction], [groups], piece)

    def exchange_calls(
        self, predictions: Sequence[Tensor], slices: Sequence[Sequence[BatchSlice]], piece: Piece | None
    ) -> None:
        """Fill in the other groups' rows of the full-size predictions of some calls.

        One message carries the rows of all these calls.

        Args:
            predictions: the prediction of each call.
            slices: the rows of each group in each call.
            piece: the fresh part of the predictions; None is all.
        """
        own = []
        for prediction, groups in zip(predictions, slices, strict=True):
            own.append(groups[self.index].select_batch(prediction if piece is None else piece.take(prediction)))
        # A group may have no rows: when guidance has ended, there may be fewer calls than groups.
        counts = [sum(call[group].slice_size for call in slices) for group in range(self.size)]
        message = torch.cat(own)
        shapes = [(count, *message.shape[1:]) for count in counts]
        parts = start_gather(message, shapes, self._axis.group, self._traffic, CFG).wait_for_tensors()
        for group, part in enumerate(parts):
            if group == self.index:
                continue
            sizes = [call[group].slice_size for call in slices]
            for prediction, groups, rows in zip(predictions, slices, part.split(sizes), strict=True):
                if not len(rows):
                    continue
                written = rows
                # Only the fresh part has arrived: it goes into a copy of the rows, which is then written back.
                if piece is not None:
                    written = groups[group].select_batch(prediction).clone(memory_format=torch.contiguous_format)
                    piece.put(written, rows)
                groups[group].write_slice(prediction, written)


def fill_piece(x: Tensor, piece: Piece | None, value: float) -> None:
    """Fill a piece of some rows of a contiguous tensor with a number."""
    if piece is None:
        x.fill_(value)
    else:
        piece.put(x, torch.full_like(piece.take(x), value))


class ReplicaImages:
    """The images of a replica.

    Args:
        axis: the ranks with the same place in each replica.
        num_images: the total number of images.
        traffic: counts bytes.

    Attributes:
        images: the images that this replica computes; the first replicas may have one more.
    """

    def __init__(self, axis: Axis, num_images: int, traffic: Traffic) -> None:
        self._axis = axis
        self._traffic = traffic
        self._num_images = num_images
        self.size = axis.num_ranks
        chunks = [pick_even_chunk(range(num_images), axis.num_ranks, rank) for rank in range(axis.num_ranks)]
        self._counts = [len(chunk) for chunk in chunks]
        # Without an image of its own it computes the first one, so that all replicas make the same calls and messages.
        self.images = chunks[axis.index] or range(1)

    def view_own_images(self, batch: Tensor) -> Tensor:
        """Return this replica's rows of `[copies * images, ...]`, with one or more copies; a view of one copy."""
        if self.size == 1:
            return batch
        # DiT's pipeline steps a copy of the latents for each branch of guidance.
        own: Tensor = batch.unflatten(0, (-1, self._num_images))[:, self.images.start : self.images.stop]
        return own.flatten(0, 1)

    def gather_latents(self, latents: Tensor) -> Tensor:
        """Gather all latents on every replica, each image's from the replica that computed it."""
        if self.size == 1:
            return latents
        copies = [self.view_own_images(copy) for copy in latents.split(self._num_images)]
        return torch.cat([self._gather_images(own, LATENTS, "all") for own in copies])

    def install_decoder(self, stack: ExitStack, vae: Any, to: Receivers, is_over: Callable[[], bool]) -> None:
        """Let each replica decode only its own images until the stack is closed.

        The decoded images come in order.

        Args:
            vae: decodes latents `[images, ...]`.
            to: the replicas that get the decoded images along this axis; the others get zeros.
            is_over: returns whether the loop is over; before that, all images are decoded.
        """
        # If the user replaced `decode`, it may compute with all images, so every replica calls it on all.
        if self.size == 1 or not hasattr(vae, "decode") or "decode" in list_replaced_methods(vae):
            return
        decode = vae.decode

        def decode_own_images(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not is_over() or z.shape[0] != self._num_images:
                return decode(z, *args, **kwargs)
            arguments = {"args": (z, *args), "kwargs": kwargs}
            own = slice_batch_arguments(arguments, self._num_images, self.view_own_images)
            result = decode(*own["args"], **own["kwargs"])
            gathered = []
            for decoded in extract_predictions(result, len(self.images)):
                gathered.append(self._gather_images(decoded, PICTURES, to))
            return replace_predictions(result, gathered)

        override_attribute(stack, vae, "decode", functools.update_wrapper(decode_own_images, decode))

    def _gather_images(self, own: Tensor, kind: str, to: Receivers) -> Tensor:
        """Gather `own` of every replica in order; replicas that do not get it return zeros."""
        group = self._axis.group
        own = own[: self._counts[self._axis.index]]  # without the stand-in of a replica that has no images
        shapes = [(count, *own.shape[1:]) for count in self._counts]
        if to == "all":
            return torch.cat(start_gather(own, shapes, group, self._traffic, kind).wait_for_tensors())
        if to == "first" and self._axis.index == 0:
            # All but this replica send. Empty messages are never sent, so a replica without images sends none.
            receives = list(enumerate(shapes))[1:]
            parts = start_exchange([], receives, own, group, self._traffic, kind).wait_for_tensors()
            return torch.cat([own, *parts])
        if to == "first" and own.numel():
            start_exchange([(0, own)], [], own, group, self._traffic, kind).wait_for_tensors()
        return own.new_zeros((self._num_images, *own.shape[1:]))
