"""Caches by hand, without ditile: PyTorch's own hooks on a plain transformer, which runs every block.

Where a step is to be cached, what the blocks returned is replaced by what they were given plus what they added when
they were last computed. Only how blocks pass tokens on is taken from the table of lists, which has tests of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ditile.cache.forecast import Reuse
from ditile.model.block_lists import find_block_lists
from ditile.model.block_table import BlockList
from ditile.model.hooks.overrides import override_attribute
from ditile.plan.anatomy import Flow

Streams = dict[str, Any]
"""The tokens at a place, by stream."""


class Block:
    """A block, and the streams that it takes and gives."""

    def __init__(self, module: nn.Module, flow: Flow) -> None:
        self.module, self.flow = module, flow
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def taken(self, args: Any, kwargs: dict[str, Any]) -> Streams:
        call = dict(zip(self._names, args, strict=False)) | kwargs
        found = {"image": call[self.flow.image]}
        if "text" in self.flow.returns:
            found["text"] = None if self.flow.text is None else call[self.flow.text]
        return {name: None if x is None else x.clone() for name, x in found.items()}

    def given(self, out: Any) -> Streams:
        return dict(zip(self.flow.returns, out if isinstance(out, tuple | list) else (out,), strict=False))

    def replaced(self, out: Any, streams: Streams) -> Any:
        if not isinstance(out, tuple | list):
            return streams["image"]
        return tuple(streams[name] for name in self.flow.returns)


def mean(before: Tensor, now: Tensor) -> float:
    """The mean absolute difference, over the mean absolute value."""
    return float((now - before).abs().mean() / before.abs().mean())


@dataclass
class Hand:
    """DBCache by hand, for one picture: call it in the place of the transformer, once per step.

    Attributes:
        lists: the blocks.
        first, last: blocks of the probe and of the tail; without any, the probe is what comes into the first block.
        threshold: a step that changed by less is cached.
        spare: steps that are computed anyhow.
        memory: makes what continues a sequence of tensors.
        hidden: whether what the blocks returned is kept, and not what they added.
        tokens: whether the probe is what its blocks returned, and not what they added.
        measure: the difference of two probes.
        differences: every one that was looked at.
        skipped: the steps that were cached.
    """

    model: Callable[..., Any]
    lists: Sequence[BlockList]
    first: int = 1
    last: int = 0
    threshold: float = 0.0
    spare: int = 0
    memory: Callable[[], Any] = Reuse
    hidden: bool = False
    tokens: bool = False
    measure: Callable[[Tensor, Tensor], float] = mean
    step: int = -1
    differences: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    is_inside_skip: bool = False

    def __post_init__(self) -> None:
        self.chain = [Block(module, each.flow) for each in self.lists for module in each.blocks]
        middle = self.chain[self.first : len(self.chain) - self.last]
        self.segments = [list(run) for _, run in groupby(middle, lambda block: "text" in block.flow.returns)]
        self.kept: dict[Any, Any] = {}
        self.probe: Tensor | None = None

    def __call__(self, **inputs: Any) -> Any:
        self.step += 1
        with self.hooked():
            return self.model(**inputs)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [self.before(self.chain[0], self._start)]
        if self.first:
            handles.append(self.behind(self.chain[self.first - 1], self._decide))
        for index, segment in enumerate(self.segments):
            handles += self.replacing(index, segment)
        yield
        for handle in handles:
            handle.remove()

    def replacing(self, index: int, segment: list[Block]) -> list[Any]:
        """Hooks around a segment: it begins with its own tokens and ends with what is remembered, or the other way."""
        start: Streams = {}

        def entered(streams: Streams) -> None:
            start.clear()
            start.update(streams)
            self.is_inside_skip = self.is_cached(index)

        def left(streams: Streams) -> Streams:
            self.is_inside_skip = False
            if self.is_cached(index):
                return {name: self.recalled((index, name), start[name]) for name in streams}
            for name, x in streams.items():
                if x is not None:
                    added = x if self.hidden or start[name] is None else x - start[name]
                    self.remember((index, name), added.clone())
            return streams

        return [self.before(segment[0], entered), self.behind(segment[-1], left)]

    def remember(self, key: Any, added: Tensor) -> None:
        self.kept.setdefault(key, self.memory()).add_computed_step(self.step, added)

    def recalled(self, key: Any, start: Tensor | None) -> Tensor | None:
        if key not in self.kept:
            return None
        found = self.kept[key].forecast_value(self.step)
        return found.clone() if self.hidden or start is None else start + found

    def is_cached(self, index: int) -> bool:
        return self.step in self.skipped

    def before(self, block: Block, look: Callable[[Streams], None]) -> Any:
        return block.module.register_forward_pre_hook(
            lambda _, args, kwargs: look(block.taken(args, kwargs)), with_kwargs=True
        )

    def behind(self, block: Block, change: Callable[[Streams], Streams]) -> Any:
        return block.module.register_forward_hook(lambda _, args, out: block.replaced(out, change(block.given(out))))

    def _start(self, streams: Streams) -> None:
        self.began = streams["image"]
        if not self.first:
            self._decide(streams)

    def _decide(self, streams: Streams) -> Streams:
        probe = streams["image"] - (0 if self.tokens or not self.first else self.began)
        if self.is_small(self.probe, probe):
            self.skipped.append(self.step)
        else:
            self.probe = probe.clone()
        return streams

    def is_small(self, before: Tensor | None, now: Tensor) -> bool:
        if before is None or self.step < self.spare:
            return False
        self.differences.append(self.measure(before, now))
        return self.differences[-1] < self.threshold


@dataclass
class HandPrune(Hand):
    """DBPrune by hand: each block of the middle by itself, by what it is given."""

    cached: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        places = range(self.first, len(self.chain) - self.last)
        self.segments = [[self.chain[k]] for k in places]
        self.inputs: dict[int, Tensor] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [handle for index, segment in enumerate(self.segments) for handle in self.replacing(index, segment)]
        handles += [
            self.before(segment[0], lambda streams, index=index: self._look(index, streams))
            for index, segment in enumerate(self.segments)
        ]
        yield
        for handle in handles:
            handle.remove()

    def is_cached(self, index: int) -> bool:
        return self.step in self.cached.get(index, [])

    def _look(self, index: int, streams: Streams) -> None:
        if self.is_small(self.inputs.get(index), streams["image"]):
            self.cached.setdefault(index, []).append(self.step)
        else:
            self.inputs[index] = streams["image"]


class PatchHand(Hand):
    """DBCache by hand in a simulation of stale keys, patch by patch.

    DistriFusion, whose patches are made at the same time, decides on the image; so do synchronous steps, of which the
    last is computed: its keys are read next.

    Attributes:
        place: the simulation.
        left_out: the steps that were left out, by patch.
        looks: whether only probes are wanted: DistriFusion's patches wait for each other's.
    """

    def __init__(self, transformer: Any, place: Any, **how: Any) -> None:
        super().__init__(transformer.forward, find_block_lists(transformer), **how)
        self.place, self.looks, self.skips = place, False, False
        self.left_out: dict[int, list[int]] = {patch: [] for patch in range(place.patches)}
        self.seen: dict[int, Tensor] = {}

    def end_look(self) -> None:
        self.looks = False
        self.skips = self.is_small(self.probe, torch.cat([self.seen[patch] for patch in self.left_out], 1))

    def is_cached(self, index: int) -> bool:
        return self.skips

    def remember(self, key: Any, added: Tensor) -> None:
        if key[1] == "image":
            self.kept.setdefault(key, added)[:, self.place.span] = added[:, self.place.span]
        elif self.place.has_text:
            self.kept[key] = added

    def recalled(self, key: Any, start: Tensor | None) -> Tensor | None:
        return start + self.kept[key] if start is not None and key in self.kept else None

    def _decide(self, streams: Streams) -> Streams:
        place = self.place
        probe = streams["image"] - (self.began if self.first else 0)
        if self.looks:
            self.seen[place.patch] = probe[:, place.span]
            return streams
        if place.patch is None and self.step == place.warmup - 1 < place.call["num_inference_steps"] - 1:
            self.skips = False
        elif place.patch is None or not place.apart:
            before = None if self.probe is None else self.probe[:, place.span]
            self.skips = self.is_small(before, probe[:, place.span])
        if self.skips:
            for patch in self.left_out if place.patch is None else (place.patch,):
                self.left_out[patch].append(self.step)
        else:
            self.probe = probe.clone() if self.probe is None else self.probe
            self.probe[:, place.span] = probe[:, place.span]
        return streams


@contextmanager
def by_hand(pipe: Any, branches: int = 1, **how: Any) -> Iterator[list[Hand]]:
    """The pipeline with a cache by hand in place of its transformer's forward, one for each call of a step."""
    forward, calls = pipe.transformer.forward, [0]
    names = list(inspect.signature(forward).parameters)
    hands = [Hand(forward, find_block_lists(pipe.transformer), **how) for _ in range(branches)]

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return hands[(calls[0] - 1) % branches](**dict(zip(names, args, strict=False)), **kwargs)

    with ExitStack() as stack:
        override_attribute(stack, pipe.transformer, "forward", called)
        yield hands
