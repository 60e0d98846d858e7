"""Cuts arguments by the kinds of their dimensions: those of a block to the tokens at hand, those of a call to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.plan.anatomy import ROWS, TOKENS, Kinds, select_word

Runs = Mapping[str, Sequence[range]]
"""Letter of a kind -> where the tokens to keep are, among all of that kind."""


def is_cut(kinds: Kinds) -> bool:
    """Whether something of an argument is cut with the tokens."""
    return any(letter in TOKENS for word in kinds for letter in word)


def cut_argument(value: Any, kinds: Kinds, runs: Runs) -> Any:
    """The leaves of an argument, cut. A dimension of length 1 is left alone: it serves every token.

    Args:
        value: a tensor, a number, or tuples, lists and dicts of them.
        kinds: of its leaves, see `plan/anatomy.py`.
        runs: of `N`, `T` and `J`.
    """
    if isinstance(value, Tensor):
        return cut_tensor(value, kinds[0], runs)
    leaves, structure = pytree.tree_flatten(value)
    return pytree.tree_unflatten([_cut_leaf(*pair, runs) for pair in zip(leaves, kinds, strict=True)], structure)


def cut_tensor(x: Tensor, kinds: str, runs: Runs) -> Tensor:
    """A tensor, cut along each dimension that counts tokens; two dummies may stand for a text of a single one."""
    for dim, kind in enumerate(select_word(kinds, x.ndim) or ""):
        if kind in TOKENS and (x.shape[dim] > 1 or runs[kind][-1].stop <= 1):
            x = take_runs(x, runs[kind], dim)
    return x


def take_runs(x: Tensor, runs: Sequence[range], dim: int) -> Tensor:
    """Runs along a dimension: a view where there is one."""
    parts = [
        x.narrow(dim, frames.first.start, len(frames.first))
        if frames.number == 1
        else view_frames(x, frames, dim).flatten(dim, dim + 1)
        for frames in group_runs(tuple(runs))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def write_runs(whole: Tensor, values: Tensor, runs: Sequence[range], dim: int) -> None:
    """Writes values, which are runs along a dimension of the whole, one after the other, to their places."""
    at = 0
    for frames in group_runs(tuple(runs)):
        part = values.narrow(dim, at, frames.number * len(frames.first))
        view_frames(whole, frames, dim).copy_(part.unflatten(dim, (frames.number, len(frames.first))))
        at += part.shape[dim]


class Frames(NamedTuple):
    """The same run in each of some frames.

    Attributes:
        first: that of the first frame.
        number: of frames.
        step: from a frame to the next.
    """

    first: range
    number: int
    step: int


@lru_cache(maxsize=4096)
def group_runs(runs: tuple[range, ...]) -> tuple[Frames, ...]:
    """Runs of one length at equal distances belong together, so that they are one copy."""
    groups: list[Frames] = []
    for run in runs:
        if run and groups and len(groups[-1].first) == len(run):
            first, number, step = groups[-1]
            distance = run.start - first.start - (number - 1) * step
            if distance == step or (number == 1 and distance >= len(first)):
                groups[-1] = Frames(first, number + 1, distance)
                continue
        groups.append(Frames(run, 1, len(run)))
    return tuple(groups)


def view_frames(x: Tensor, frames: Frames, dim: int) -> Tensor:
    """The runs `[.., count, length, ..]`: a view."""
    length = len(frames.first)
    span = x.narrow(dim, frames.first.start, (frames.number - 1) * frames.step + length)
    return span.unsqueeze(dim) if frames.number == 1 else span.unfold(dim, length, frames.step).movedim(-1, dim + 1)


def find_misfit(value: Any, kinds: Kinds, lengths: Mapping[str, int]) -> str | None:
    """What of an argument is not as its kinds say, in words; None if it fits.

    Args:
        value: the argument.
        kinds: of its leaves; empty where it was never seen.
        lengths: of `N`, `T` and `J`.
    """
    leaves = pytree.tree_leaves(value)
    if kinds == (ROWS,):
        return None
    if len(leaves) != len(kinds):
        return f"{len(leaves)} values where {len(kinds)} were seen"
    for leaf, word in zip(leaves, kinds, strict=True):
        if isinstance(leaf, Tensor):
            selected = select_word(word, leaf.ndim)
            if selected is None:
                return f"the shape {tuple(leaf.shape)}, and its dimensions are known as {word or 'no tensor'}"
            for size, kind in zip(leaf.shape, selected, strict=True):
                if (kind in TOKENS and size not in (1, lengths.get(kind))) or (kind == "1" and size != 1):
                    return f"the shape {tuple(leaf.shape)}, and its dimensions are known as {word}"
    return None


def find_unknown_rows(arguments: Mapping[str, Any], kinds: Mapping[str, Kinds], noisy: str, rows: int) -> str | None:
    """The first argument of a call with something as long as its batch of which kinds do not say whether it has rows.

    Args:
        arguments: of the call, by name.
        kinds: of its arguments.
        noisy: the argument with the latents.
        rows: of the batch.
    """
    for name, value in arguments.items():
        known = kinds.get(name, ())
        if known == (ROWS,) and (value is None or (isinstance(value, list) and len(value) == rows)):
            continue
        leaves = pytree.tree_leaves(value)
        if known and len(known) != len(leaves) and value is not None:
            return name
        for k, leaf in enumerate(leaves):
            word = select_word(known[k], leaf.ndim) if known and isinstance(leaf, Tensor) else None
            is_long = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
            if (is_long and (not word or word[0] in ".1")) or (name == noisy and (not word or "B" not in word)):
                return name
    return None


def slice_rows(
    arguments: Mapping[str, Any], kinds: Mapping[str, Kinds], select: Callable[[Any], Any]
) -> dict[str, Any]:
    """The arguments of a call, cut down to some rows of its batch; `select` indexes along the rows."""
    return {name: _slice_argument(value, kinds.get(name, ()), select) for name, value in arguments.items()}


def _slice_argument(value: Any, kinds: Kinds, select: Callable[[Any], Any]) -> Any:
    if value is None or not any("B" in word or word == ROWS for word in kinds):
        return value
    if kinds == (ROWS,):
        return select(value)
    leaves, structure = pytree.tree_flatten(value)
    parts = [_slice_leaf(leaf, word, select) for leaf, word in zip(leaves, kinds, strict=True)]
    return pytree.tree_unflatten(parts, structure)


def _slice_leaf(leaf: Any, kinds: str, select: Callable[[Any], Any]) -> Any:
    word = select_word(kinds, leaf.ndim) if isinstance(leaf, Tensor) else None
    dim = -1 if word is None else word.find("B")
    return leaf if dim < 0 or leaf.shape[dim] == 1 else select(leaf.movedim(dim, 0)).movedim(0, dim)


def _cut_leaf(leaf: Any, kinds: str, runs: Runs) -> Any:
    if kinds.startswith("#"):
        return sum(map(len, runs[kinds[1]]))
    return cut_tensor(leaf, kinds, runs) if isinstance(leaf, Tensor) else leaf
