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
from ditile.hooks.batch_rows import take_rows
from ditile.hooks.overrides import override
from ditile.parallel.batch.split import prediction_of, with_prediction
from ditile.plan.layout import share

LATENTS, PICTURES = "data", "pictures"
Receivers = Literal["all", "first", "none"]


class Data:
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
        self.size = axis.size
        self.images = share(range(images), axis.size, axis.index)

    @property
    def idle(self) -> bool:
        """Whether this replica has no images."""
        return not self.images

    @property
    def some_idle(self) -> bool:
        """Whether some replica has none."""
        return self._all < self.size

    def own(self, batch: Tensor) -> Tensor:
        """A view of this replica's rows of `[images, ...]`."""
        return batch if self.size == 1 else batch[self.images.start : self.images.stop]

    def gathered(self, latents: Tensor) -> Tensor:
        """All latents on every replica; of the given ones only its own are right."""
        return latents if self.size == 1 else self._gather(self.own(latents), LATENTS, "all")

    def seat_decode(self, stack: ExitStack, vae: Any, to: Receivers, over: Callable[[], bool]) -> None:
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

        def seated(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not over() or z.shape[0] != self._all:
                return decode(z, *args, **kwargs)
            own = take_rows({"args": (z, *args), "kwargs": kwargs}, self._all, self._some)
            result = decode(*own["args"], **own["kwargs"])
            pictures = prediction_of(result)[: len(self.images)]
            return with_prediction(result, self._gather(pictures, PICTURES, to))

        override(stack, vae, "decode", functools.update_wrapper(seated, decode))

    def _some(self, batch: Tensor) -> Tensor:
        """Its own rows; an idle replica takes one, for the size of a picture."""
        return batch[:1] if self.idle else self.own(batch)

    def _gather(self, own: Tensor, kind: str, to: Receivers) -> Tensor:
        """`own` of every replica, in order; zeros where it was not given to."""
        index, group = self._axis.index, self._axis.group
        if to == "all":
            shapes = [(count, *own.shape[1:]) for count in self._counts]
            return torch.cat(start_gather(own, shapes, group, self._traffic, kind).wait())
        if index == 0 and to == "first":
            others = [(replica, (count, *own.shape[1:])) for replica, count in enumerate(self._counts) if replica]
            return torch.cat([own, *start_exchange([], others, own, group, self._traffic, kind).wait()])
        if to == "first" and not self.idle:
            start_exchange([(0, own)], [], own, group, self._traffic, kind).wait()
        return own.new_zeros((self._all, *own.shape[1:]))

    @property
    def _counts(self) -> list[int]:
        """Images of every replica."""
        return [len(share(range(self._all), self.size, replica)) for replica in range(self.size)]
