"""CFG parallel: each half of the ranks of an image computes some of the branches of guidance (arXiv 2207.12598).

Branches that share a batch are split by rows, and every half gets the others' rows after each call. Branches that are
calls of their own go to the halves in turn: what a half does not compute is NaN until the last call of the step
returns, and filled in place then. The number of calls is learnt in step 0, which every half computes whole. Only what
is fresh travels: in an asynchronous micro-step of PipeFusion one patch of the prediction, and on the last stage alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_gather
from ditile.parallel.batch.split import BatchSlice
from ditile.plan.layout import pick_even_chunk

KIND = "cfg"

Span = tuple[int, slice]
"""A dimension, and the part of it that is fresh."""


class CfgExchange:
    """The exchange between the halves.

    Args:
        axis: the ranks that compute one branch each.
        traffic: counts bytes.
    """

    def __init__(self, axis: Axis, traffic: Traffic) -> None:
        self._axis, self._traffic = axis, traffic
        self.size = axis.num_ranks

    def restrict_to_half(self, batch_slice: BatchSlice, half: int | None = None) -> BatchSlice:
        """Of the rows of a batched call, those that this half computes, or another one."""
        if batch_slice.num_branches < self.size:  # nothing to share out: every half computes it
            return batch_slice
        mine = pick_even_chunk(batch_slice.branches, self.size, self._axis.index if half is None else half)
        return replace(batch_slice, branches=mine)

    def is_own_call(self, call: int) -> bool:
        """Whether a call of a step is this half's."""
        return call % self.size == self._axis.index

    def exchange_branches(self, prediction: Tensor, batch_slice: BatchSlice, span: Span | None) -> None:
        """Fills in the rows of the other halves of a full-size prediction, whose own are there."""
        if self._axis.group is None or batch_slice.num_branches < self.size:
            return
        of_half = [self.restrict_to_half(batch_slice, half) for half in range(self.size)]
        fresh = narrow_to_span(prediction, span)
        own = self.restrict_to_half(batch_slice).select_batch(fresh)
        shapes = [(theirs.slice_size, *own.shape[1:]) for theirs in of_half]
        received = start_gather(own, shapes, self._axis.group, self._traffic, KIND).wait_for_tensors()
        for half, (theirs, part) in enumerate(zip(of_half, received, strict=True)):
            if half != self._axis.index:
                _write_span(prediction, theirs, part, span)

    def exchange_calls(self, predictions: Sequence[Tensor], batch_slice: BatchSlice, span: Span | None) -> None:
        """Fills in the full-size predictions of the calls of the other halves; all those of a step at once."""
        assert self._axis.group is not None
        calls = range(len(predictions))
        of_half = [calls[half :: self.size] for half in range(self.size)]
        fresh = [batch_slice.select_batch(narrow_to_span(prediction, span)) for prediction in predictions]
        own = torch.cat([fresh[call] for call in of_half[self._axis.index]])
        shapes = [(len(theirs) * batch_slice.slice_size, *own.shape[1:]) for theirs in of_half]
        received = start_gather(own, shapes, self._axis.group, self._traffic, KIND).wait_for_tensors()
        for half, (theirs, parts) in enumerate(zip(of_half, received, strict=True)):
            if half != self._axis.index:
                for call, part in zip(theirs, parts.split(batch_slice.slice_size), strict=True):
                    _write_span(predictions[call], batch_slice, part, span)


def narrow_to_span(x: Tensor, span: Span | None) -> Tensor:
    """The part of a tensor within a span."""
    return x if span is None else x.narrow(span[0], span[1].start, span[1].stop - span[1].start)


def _write_span(prediction: Tensor, batch_slice: BatchSlice, part: Tensor, span: Span | None) -> None:
    """Writes some rows of what is fresh."""
    into = batch_slice.view_as_grid(prediction)
    if span is not None:
        into = narrow_to_span(into, (span[0] + 1, span[1]))  # rows are two dimensions here
    into.copy_(part.unflatten(0, into.shape[:2]))
