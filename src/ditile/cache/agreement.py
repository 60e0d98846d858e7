"""How caches run under a runner: its generation is their clock, and the ranks of an image decide as one.

Ranks of a stage add up what they measured. Under PipeFusion the stage that has the last block of the probe decides,
on each patch by itself, and the decision travels from stage to stage, a few bytes ahead of the activations, on a CPU
group. What is left out is passed on like all else: a message is the same whatever was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ditile.distributed.mesh import Mesh, line
from ditile.distributed.transport import Wire, gather_numbers, meet
from ditile.hooks.generation import Generation
from ditile.hooks.protocols import Moment
from ditile.plan.plan import Plan

KIND = "decisions"


class LoopClock:
    """Where a runner's loop is.

    Args:
        current: the generation under way.
        steps: of the loop.
        plan: its patches.
        images: that this rank's replica makes, once that is known; None where stale keys belong to the whole batch.
        begin: called when the first call of a generation comes, with the steps.
        end: called after its last step: the decoder has the memory then.
    """

    def __init__(
        self, current: Callable[[], Generation], steps: Callable[[], int], plan: Plan,
        images: Callable[[], int | None], begin: Callable[[int], None], end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._current, self._steps, self._images, self._begin, self._end = current, steps, images, begin, end
        self._patches = plan.num_patches if plan.distrifusion == 1 else 1
        self._shares_streams = plan.tensor > 1 and plan.split_scheme == "sequence"
        self._seen: Generation | None = None

    def begin_call(self, model: object) -> Moment | None:
        """Nothing is left out where a crew computes a step, a batch comes in pieces, or patches lie interleaved."""
        now = self._current()
        if now is not self._seen:
            self._seen = now
            self._begin(self._steps())
        step, patch = now.micro
        whole = patch is None
        interleaved = self._shares_streams and self._patches > 1
        if now.rows is not None or (whole and (now.crew is not None or interleaved)):
            return None
        patches = range(self._patches) if patch is None else (patch,)
        return Moment(
            step, now.branch, patches, lambda: [now.part(k).image_tokens for k in patches], lambda: _has_text(now),
            self._images(), whole and now.keeps_keys(step) and not now.is_stale(step),
        )  # fmt: skip

    def end_call(self, model: object) -> None:
        """The runner counts the calls."""

    def over(self) -> None:
        """The loop is over."""
        self._seen = None
        self._end()


def _has_text(now: Generation) -> bool:
    """Whether the text at hand is real; a layout is there where tokens are divided."""
    return now.branch not in now.layouts or bool(now.part(now.micro.patch).text)


@dataclass(frozen=True, slots=True)
class Groups:
    """CPU groups of the ranks that decide together.

    Attributes:
        by_rows: ranks of a stage, where branches of guidance share a batch.
        by_calls: those of them that compute the same calls.
        stages: along pipefusion.
        starts: the same for activations, for probes longer than a stage.
    """

    by_rows: dist.ProcessGroup | None
    by_calls: dist.ProcessGroup | None
    stages: dist.ProcessGroup | None
    starts: dist.ProcessGroup | None

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, device: torch.device) -> Groups:
        """Makes them; all ranks must call it, each with the device of its activations."""
        within = ("ring", "distrifusion", "ulysses", "tensor")
        lines = {"rows": ("cfg", *within), "calls": within, "decisions": ("pipefusion",)}
        rows, calls, stages = (line(name, axes, plan, mesh, backend="gloo") for name, axes in lines.items())
        starts = line("starts", ("pipefusion",), plan, mesh)
        if starts is not None:
            meet(starts, device, pairs=True)
        return cls(rows, calls, stages, starts)


class StageAgreement:
    """One rank's part in the decisions of a call of the runner.

    Args:
        groups: who decides together.
        mesh: this rank's place.
        current: the generation under way.
        by_calls: whether the halves of guidance compute calls of their own.
        names: of all blocks that are known.
        stages: the stage of each of them.
    """

    def __init__(
        self, groups: Groups, mesh: Mesh, current: Callable[[], Generation], by_calls: Callable[[], bool],
        names: Mapping[nn.Module, str], stages: Mapping[nn.Module, int],
    ) -> None:  # fmt: skip
        self._groups, self._mesh, self._current, self._by_calls = groups, mesh, current, by_calls
        self._names, self._stages = names, stages
        self.owned: Collection[nn.Module] | None = None
        if mesh.stages > 1:
            self.owned = {block for block, stage in stages.items() if stage == mesh.stage}
        self._starts: dict[int, Wire] = {}
        self._step = -1
        self._front = self._behind = None
        if groups.stages is not None:
            if mesh.stage > 0:
                self._front = Wire(groups.stages, mesh.stage - 1, KIND, mesh.traffic)
            if mesh.stage + 1 < mesh.stages:
                self._behind = Wire(groups.stages, mesh.stage + 1, KIND, mesh.traffic)

    def add(self, sums: Tensor) -> Tensor:
        """Every rank adds the same numbers up in the same order."""
        group = self._groups.by_calls if self._by_calls() else self._groups.by_rows
        return gather_numbers(sums.double(), group, self._mesh.traffic, KIND).sum(dim=0)

    def tell(self, skips: Sequence[bool]) -> None:
        """To the next stage."""
        if self._behind is not None:
            self._behind.send(torch.tensor(list(skips), dtype=torch.uint8))

    def hear(self, count: int) -> Sequence[bool]:
        """From the stage before."""
        assert self._front is not None
        self._front.post(None, (count,), torch.empty(0, dtype=torch.uint8))
        return [bool(skip) for skip in self._front.take(None)]

    def give_start(self, tokens: Tensor, to: nn.Module) -> None:
        """To the stage that decides."""
        step = self._current().micro.step
        if step != self._step:
            self._step = step
            for wire in self._starts.values():
                wire.settle()
        self._start(self._stages[to]).send(tokens)

    def take_start(self, like: Tensor, of: nn.Module) -> Tensor:
        """From the stage that has the first block."""
        wire = self._start(self._stages[of])
        wire.post(None, like.shape, like)
        return wire.take(None)

    def _start(self, peer: int) -> Wire:
        if peer not in self._starts:
            assert self._groups.starts is not None
            self._starts[peer] = Wire(self._groups.starts, peer, "activations", self._mesh.traffic, shared=True)
        return self._starts[peer]

    def left_out(self, blocks: Sequence[nn.Module], moment: Moment) -> None:
        """Keys of an earlier step stand for this one, in every attention of these blocks."""
        names = [f"{self._names[block]}." for block in blocks if block in self._names]
        patches = [None] if self._mesh["distrifusion"].size > 1 else moment.patches  # one image, kept by rank
        self._current().memory.stand_in(moment.branch, names, moment.step, patches)

    def close(self, *, clean: bool) -> None:
        """The call is over."""
        wires = [wire for wire in (self._behind, self._front, *self._starts.values()) if wire is not None]
        for wire in wires:
            if clean:
                wire.flush()
            else:
                wire.abandon()
