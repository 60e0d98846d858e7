"""Cuts of arguments by the kinds of their dimensions: a block's arguments to a rank's tokens, a call's to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.plan.anatomy import ROWS, TOKENS, Kinds, select_word

Runs = Mapping[str, Sequence[range]]
"""Letter of a kind -> the places of the tokens to keep among all of that kind."""


def is_cut(kinds: Kinds) -> bool:
    """Return whether some part of an argument is cut with the tokens."""
    return not set(TOKENS).isdisjoint("".join(kinds))


def cut_argument(value: Any, kinds: Kinds, runs: Runs) -> Any:
    """Cut the leaves of an argument. A dimension of length 1 stays unchanged: it serves every token.

    Args:
        value: a tensor, a number, or tuples, lists and dicts of them.
        kinds: the kinds of its leaves, see `plan/anatomy.py`.
        runs: the runs to keep of `N`, `T` and `J`.
    """
    if isinstance(value, Tensor):
        return cut_tensor(value, kinds[0], runs)
    leaves, structure = pytree.tree_flatten(value)
    parts: list[Any] = []
    for leaf, kind in zip(leaves, kinds, strict=True):
        if kind.startswith("#"):
            # The leaf is a number of tokens, which differs for a patch.
            leaf = sum(map(len, runs[kind[1]]))
        elif isinstance(leaf, Tensor):
            leaf = cut_tensor(leaf, kind, runs)
        parts.append(leaf)
    return pytree.tree_unflatten(parts, structure)


def cut_tensor(x: Tensor, kinds: str, runs: Runs) -> Tensor:
    """Cut a tensor along each dimension that counts tokens; two dummies may stand for a text of a single token."""
    for dim, kind in enumerate(select_word(kinds, x.ndim) or ""):
        if kind not in TOKENS:
            continue
        if x.shape[dim] > 1 or runs[kind][-1].stop <= 1:
            x = take_runs(x, runs[kind], dim)
    return x


def take_runs(x: Tensor, runs: Sequence[range], dim: int) -> Tensor:
    """Return runs along a dimension: a view if there is only one."""
    parts: list[Tensor] = []
    for frames in group_runs(tuple(runs)):
        if frames.number == 1:
            parts.append(x.narrow(dim, frames.first.start, len(frames.first)))
        else:
            parts.append(view_frames(x, frames, dim).flatten(dim, dim + 1))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim)


def write_runs(whole: Tensor, values: Tensor, runs: Sequence[range], dim: int) -> None:
    """Write values to their runs along a dimension of the whole; the values follow each other in the order of the
    runs."""
    start = 0
    for frames in group_runs(tuple(runs)):
        length = len(frames.first)
        part = values.narrow(dim, start, frames.number * length)
        view_frames(whole, frames, dim).copy_(part.unflatten(dim, (frames.number, length)))
        start += part.shape[dim]


class Frames(NamedTuple):
    """A run that repeats at the same place in each of several frames.

    Attributes:
        first: the run of the first frame.
        step: the distance from one frame to the next.
    """

    first: range
    number: int
    step: int


@lru_cache(maxsize=4096)
def group_runs(runs: tuple[range, ...]) -> tuple[Frames, ...]:
    """Group runs of one length at equal distances, so that one copy moves a whole group."""
    groups: list[Frames] = []
    for run in runs:
        if run and groups and len(groups[-1].first) == len(run):
            first, number, step = groups[-1]
            distance = run.start - first.start - (number - 1) * step
            # The second run of a group sets the distance between its runs.
            if distance == step or (number == 1 and distance >= len(first)):
                groups[-1] = Frames(first, number + 1, distance)
                continue
        groups.append(Frames(run, 1, len(run)))
    return tuple(groups)


def view_frames(x: Tensor, frames: Frames, dim: int) -> Tensor:
    """Return a view `[.., count, length, ..]` of the runs."""
    length = len(frames.first)
    span = x.narrow(dim, frames.first.start, (frames.number - 1) * frames.step + length)
    if frames.number == 1:
        return span.unsqueeze(dim)
    return span.unfold(dim, length, frames.step).movedim(-1, dim + 1)


def find_misfit(value: Any, kinds: Kinds, lengths: Mapping[str, int]) -> str | None:
    """Explain what part of an argument does not match its kinds; None if all match.

    Args:
        kinds: the kinds of its leaves; empty if the argument was never seen.
        lengths: the number of tokens of `N`, `T` and `J`.
    """
    leaves = pytree.tree_leaves(value)
    if kinds == (ROWS,):
        return None
    if len(leaves) != len(kinds):
        return f"{len(leaves)} values where {len(kinds)} were seen"
    for leaf, word in zip(leaves, kinds, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        shape = tuple(leaf.shape)
        dims = select_word(word, leaf.ndim)
        if dims is None:
            return f"the shape {shape}, and its dimensions are known as {word or 'no tensor'}"
        for size, kind in zip(shape, dims, strict=True):
            if kind != "1" and kind not in TOKENS:
                continue
            # A dimension of length 1 serves all tokens.
            if size not in (1, lengths.get(kind)):
                return f"the shape {shape}, and its dimensions are known as {word}"
    return None


def find_unknown_rows(arguments: Mapping[str, Any], kinds: Mapping[str, Kinds], noisy: str, rows: int) -> str | None:
    """Return the first batch-sized argument for which the kinds do not say whether it has rows.

    Args:
        noisy: the argument with the latents.
    """
    for name, value in arguments.items():
        own_kinds = kinds.get(name, ())
        is_list_of_rows = isinstance(value, list) and len(value) == rows
        if own_kinds == (ROWS,) and (value is None or is_list_of_rows):
            continue
        leaves = pytree.tree_leaves(value)
        # The argument has another number of leaves than when its kinds were found.
        if own_kinds and len(own_kinds) != len(leaves) and value is not None:
            return name
        for place, leaf in enumerate(leaves):
            word = None
            if own_kinds and isinstance(leaf, Tensor):
                word = select_word(own_kinds[place], leaf.ndim)
            if name == noisy and (not word or "B" not in word):
                return name
            is_long = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
            if is_long and (not word or (word[0] in ".1" and "B" not in word)):
                return name
    return None


def slice_rows(
    arguments: Mapping[str, Any], kinds: Mapping[str, Kinds], select: Callable[[Any], Any]
) -> dict[str, Any]:
    """Cut the arguments of a call down to some rows of its batch; `select` indexes along the rows."""
    sliced = dict(arguments)
    for name, value in arguments.items():
        own_kinds = kinds.get(name, ())
        if value is None:
            continue
        if own_kinds == (ROWS,):
            sliced[name] = select(value)
        elif "B" in "".join(own_kinds):
            leaves, structure = pytree.tree_flatten(value)
            for place, (leaf, words) in enumerate(zip(leaves, own_kinds, strict=True)):
                word = ""
                if isinstance(leaf, Tensor):
                    word = select_word(words, leaf.ndim) or ""
                dim = word.find("B")
                if dim >= 0 and leaf.shape[dim] > 1:
                    leaves[place] = select(leaf.movedim(dim, 0)).movedim(0, dim)
            sliced[name] = pytree.tree_unflatten(leaves, structure)
    return sliced
