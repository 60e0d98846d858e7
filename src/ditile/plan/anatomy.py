"""Anatomy: what ditile must know about the tokens of a transformer, as a value. `ditile_lab/study/derive.py` derives
it.

The kind of each dimension of a tensor is a letter, so that a tensor's kinds are a word such as `BN.`:

- `B` rows of the batch; `N` image tokens; `T` text tokens; `J` tokens of both, in one sequence
- `K` tokens as keys: left whole, because queries of every rank look at them
- `C` another length that changes from call to call, left whole; `1` exactly one; `.` always the same length

An argument that some calls give with another number of dimensions has a word for each, as in `B|BN`.
Two streams may both come out of a model, such as a video and its sound: the second one is what `T` counts.

`#N`, `#T` and `#J` are whole numbers that count tokens, `*` is a list with an item for each row of the batch, and the
empty word is anything else. Where no list of blocks returns a text stream, a model has one sequence, and all of it
counts as the image: a patch is a run of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ditile.plan.layout import Joint

TOKENS = "NTJ"
"""The kinds that are cut with the tokens."""

ROWS = "*"
"""The kind of a list with an item for each row of the batch."""

LOCAL = "-"
"""The kind of an attention call whose keys every rank has: those of a text that does not go through the blocks."""

FURTHER = "+"
"""A marker in the kind of an attention call for extra keys among its own, which every rank has whole.

In `+N` and `N+` they are before or after the image; in `+J` and `J+`, before or after image and text; in `T+N` and
`N+T`, between these two. Some calls may have no extra keys.
"""

REAL_PAIRS = "&"
"""A marker after the kind of an attention call: its mask allows a pair if query and key are both real, not padding."""

Kinds = tuple[str, ...]
"""A word for each leaf of an argument."""


@functools.lru_cache(maxsize=4096)
def select_word(words: str, num_dims: int) -> str | None:
    """Return the word for a tensor with this number of dimensions. None if no word is known."""
    for word in words.split("|"):
        if len(word) == num_dims and not word.startswith("#"):
            return word
    return None


def drop_further_keys(kind: str) -> str:
    """Return the kind of an attention call without its extra keys."""
    if FURTHER not in kind:
        return kind
    return "J" if sees_text(kind) else "N"


def sees_text(kind: str) -> bool:
    """Return whether an attention call of this kind has image and text tokens in one sequence."""
    return kind.strip(FURTHER)[0] == "J" or (FURTHER in kind and "T" in kind)


@dataclass(frozen=True, slots=True)
class Flow:
    """The way the blocks of a list pass tokens on.

    Attributes:
        returns: the streams in the order that a block returns them: "image", "text".
        image: the parameter with the image tokens, or with one sequence of both.
        text: the parameter with the text tokens; None if there is none. It is a stream if the block returns it too.
    """

    returns: tuple[str, ...] = ("image",)
    image: str = "hidden_states"
    text: str | None = "encoder_hidden_states"


@dataclass(frozen=True, slots=True)
class ListAnatomy(Flow):
    """The blocks of one list.

    Attributes:
        is_tuple: whether it returns a tuple.
        tokens: the dimension of both streams that counts tokens.
        has_no_batch: whether streams are `[tokens, C]`.
        joint: where the text is within the parameter `image`.
        arguments: each other parameter -> the kinds of its leaves.
        attention: path of a module within a block -> the kind of each of its calls: the letter of its tokens, such as
            `N` or `J`; two letters, such as `NT`, if queries and keys are of different tokens; or `-`. See `FURTHER`
            and `REAL_PAIRS`.
    """

    is_tuple: bool = False
    tokens: int = 1
    has_no_batch: bool = False
    joint: Joint = "none"
    arguments: Mapping[str, Kinds] = field(default_factory=dict)
    attention: Mapping[str, Kinds] = field(default_factory=dict)


def describe_mode(inputs: Mapping[str, Any]) -> str:
    """Return the mode of a call: the words among its arguments, as in `kv_cache_mode=cached`."""
    words = [f"{name}={value}" for name, value in inputs.items() if isinstance(value, str)]
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A transformer.

    Attributes:
        lists: path of a list of blocks -> its blocks.
        joint: where the text is among the keys of attention that sees both.
        inputs: each parameter of the transformer -> the kinds of its leaves, in which only `B` and `*` matter.
        modes: mode of a call (`describe_mode`), if there are several -> whether a call is computed whole, because later
            calls read what it keeps.
        outside: paths of modules within blocks that the model's forward also uses outside of the blocks.
        tensor: module pattern -> how tensor parallelism cuts it, see `derive_tensor_cuts`.
        grid: the argument that shows which image tokens are one row, if patches must not cut rows: positions
            `[N, ..]` of tokens, or latents `[B, C, H, W]`.
        constant: patterns of modules with the same output for a whole generation; `*` stands for one name.
        per_step: patterns of modules with the same output for a whole step.
        embeds: patterns of modules ahead of the blocks whose output is made of the latents.
        head: patterns of modules that follow the blocks.
        text_modules: patterns of sub-modules of blocks that see only the text.
        token_streams: module pattern -> argument, or "return" -> stream ("image", "text", "text+image"): where
            split_scheme=sequence gathers and scatters tokens.
    """

    lists: Mapping[str, ListAnatomy]
    joint: Joint
    inputs: Mapping[str, Kinds] = field(default_factory=dict)
    modes: Mapping[str, bool] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    tensor: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    grid: str = ""
    constant: tuple[str, ...] = ()
    per_step: tuple[str, ...] = ()
    embeds: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    text_modules: tuple[str, ...] = ()
    token_streams: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def is_one_sequence(self) -> bool:
        """Return whether no block has text of its own. All of the sequence then counts as the image."""
        return all((blocks.text, blocks.joint) == (None, "none") for blocks in self.lists.values())
