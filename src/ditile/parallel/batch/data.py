"""Data parallel: each replica computes the model's rows of its own images, and all hold all images at the end.

Every replica runs the pipeline on the latents of the whole batch, which is cheap: so noise is drawn once for the batch,
by one generator or a list, also in the middle by a stochastic scheduler, and image k does not depend on the degree. In
other replicas' rows a prediction is zero and latents are not looked at; they arrive after the last step. Pictures are
decoded where they were made. A replica without images calls no model, and stays in step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_exchange, start_gather
from ditile.hooks.batch_rows import slice_batch_arguments
from ditile.hooks.overrides import override_attribute
from ditile.parallel.batch.split import extract_prediction, replace_prediction
from ditile.plan.layout import pick_even_chunk

LATENTS, PICTURES = "data", "pictures"
Receivers = Literal["all", "first", "none"]


class ReplicaImages:
    """The images of a replica.

    Args:
        axis: this rank's likes in all replicas.
        images: how many there are in all.
        traffic: counts bytes.

    Attributes:
        images: those of this replica; the first replicas have one more.
    """

    def __init__(self, axis: Axis, images: int, traffic: Traffic) -> None:
        self._axis, self._traffic, self._all = axis, traffic, images
        self.size = axis.num_ranks
        self.images = pick_even_chunk(range(images), axis.num_ranks, axis.index)

    @property
    def has_no_images(self) -> bool:
        """Whether this replica has no images."""
        return not self.images

    @property
    def has_idle_replica(self) -> bool:
        """Whether some replica has none."""
        return self._all < self.size

    def view_own_images(self, batch: Tensor) -> Tensor:
        """A view of this replica's rows of `[images, ...]`."""
        return batch if self.size == 1 else batch[self.images.start : self.images.stop]

    def gather_latents(self, latents: Tensor) -> Tensor:
        """All latents on every replica; of the given ones only its own are right."""
        return latents if self.size == 1 else self._gather_images(self.view_own_images(latents), LATENTS, "all")

    def install_decoder(self, stack: ExitStack, vae: Any, to: Receivers, over: Callable[[], bool]) -> None:
        """Each replica decodes its own images, until the stack is closed; the pictures come in order.

        Args:
            stack: undoes it.
            vae: decodes latents `[images, ...]`.
            to: which replicas get the pictures along this axis: the others get zeros.
            over: whether the loop is over; what is decoded before is decoded whole.
        """
        if self.size == 1 or not hasattr(vae, "decode"):
            return
        decode = vae.decode

        def decode_own_images(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not over() or z.shape[0] != self._all:
                return decode(z, *args, **kwargs)
            own = slice_batch_arguments({"args": (z, *args), "kwargs": kwargs}, self._all, self._select_decode_inputs)
            result = decode(*own["args"], **own["kwargs"])
            pictures = extract_prediction(result)[: len(self.images)]
            return replace_prediction(result, self._gather_images(pictures, PICTURES, to))

        override_attribute(stack, vae, "decode", functools.update_wrapper(decode_own_images, decode))

    def _select_decode_inputs(self, batch: Tensor) -> Tensor:
        """Its own rows; an idle replica takes one, for the size of a picture."""
        return batch[:1] if self.has_no_images else self.view_own_images(batch)

    def _gather_images(self, own: Tensor, kind: str, to: Receivers) -> Tensor:
        """`own` of every replica, in order; zeros where it was not given to."""
        index, group = self._axis.index, self._axis.group
        if to == "all":
            shapes = [(count, *own.shape[1:]) for count in self._images_per_replica]
            return torch.cat(start_gather(own, shapes, group, self._traffic, kind).wait_for_tensors())
        if index == 0 and to == "first":
            others = [
                (replica, (count, *own.shape[1:])) for replica, count in enumerate(self._images_per_replica) if replica
            ]
            return torch.cat([own, *start_exchange([], others, own, group, self._traffic, kind).wait_for_tensors()])
        if to == "first" and not self.has_no_images:
            start_exchange([(0, own)], [], own, group, self._traffic, kind).wait_for_tensors()
        return own.new_zeros((self._all, *own.shape[1:]))

    @property
    def _images_per_replica(self) -> list[int]:
        """Images of every replica."""
        return [len(pick_even_chunk(range(self._all), self.size, replica)) for replica in range(self.size)]
