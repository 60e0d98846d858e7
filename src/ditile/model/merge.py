"""Merges what two calls say of one list of blocks: two of its blocks, or two pipelines that call it differently."""

from __future__ import annotations

from dataclasses import replace

from ditile.plan.anatomy import LOCAL, REAL_PAIRS, Kinds, ListAnatomy, drop_further_keys
from ditile.plan.errors import ModelError


def merge_lists(where: str, one: ListAnatomy, other: ListAnatomy) -> ListAnatomy:
    """The anatomy of two blocks of a list, which may differ only in what one of them does not have."""
    for name in ("image", "tokens", "has_no_batch", "is_tuple", "joint"):
        if getattr(one, name) != getattr(other, name):
            raise ModelError(f"{where} has {name}={getattr(one, name)!r} and {getattr(other, name)!r}")
    attention = {**one.attention, **other.attention}
    for path in one.attention.keys() & other.attention.keys():
        attention[path] = _merge_attention(f"{where}.{path}", one.attention[path], other.attention[path])
    arguments = {}
    for name in {**one.arguments, **other.arguments}:
        arguments[name] = merge_kinds(f"{where}.{name}", one.arguments.get(name), other.arguments.get(name))
    richer = one if len(one.returns) >= len(other.returns) else other
    return replace(
        one,
        text=one.text or other.text,
        returns=richer.returns,
        arguments=arguments,
        attention=attention,
    )


def merge_kinds(where: str, one: Kinds | None, other: Kinds | None) -> Kinds:
    """The kinds of an argument's leaves; a call without the argument says nothing."""
    if not one or not other or one == other:
        return one or other or ()
    if len(one) != len(other):
        raise ModelError(f"{where} has {len(one)} values and {len(other)}")
    return tuple(_merge_words(where, *words) for words in zip(one, other, strict=True))


def _merge_attention(where: str, one: Kinds, other: Kinds) -> Kinds:
    """The kinds of a module's attention calls, which have further keys in one pipeline and may have none in another."""
    # Nothing is done in local calls, however many a config makes.
    if {*one, *other} == {LOCAL}:
        return min(one, other, key=len)
    if _has_real_pairs(one) != _has_real_pairs(other):
        # A mask of pairs that says more than which keys are real: it is whole in every pipeline then.
        one = tuple(kind.removesuffix(REAL_PAIRS) for kind in one)
        other = tuple(kind.removesuffix(REAL_PAIRS) for kind in other)
    error = ModelError(f"{where} attends to {one} and to {other}")
    if len(one) != len(other):
        raise error
    merged = []
    for kind, other_kind in zip(one, other, strict=True):
        if kind == other_kind or other_kind == drop_further_keys(kind):
            merged.append(kind)
        elif kind == drop_further_keys(other_kind):
            merged.append(other_kind)
        else:
            raise error
    return tuple(merged)


def _has_real_pairs(kinds: Kinds) -> bool:
    return any(kind.endswith(REAL_PAIRS) for kind in kinds)


def _merge_words(where: str, one: str, other: str) -> str:
    if not one or not other:
        return one or other
    if "|" not in one + other and len(one) == len(other):
        where = f"{where} ({one}, {other})"
        return "".join(_merge_letters(where, *letters) for letters in zip(one, other, strict=True))
    # An argument that calls give with another number of dimensions has a word for each number.
    words = {len(word): word for word in one.split("|")}
    for word in other.split("|"):
        if len(word) in words:
            word = _merge_words(where, words[len(word)], word)
        words[len(word)] = word
    return "|".join(words[length] for length in sorted(words))


def _merge_letters(where: str, one: str, other: str) -> str:
    # A length that did not change in the calls of one pipeline may do so in those of another.
    for weak in ("1", ".", "C"):
        if one == weak:
            return other
        if other == weak:
            return one
    # Whole for a mask of pairs, from which attention picks.
    if "K" in (one, other):
        return "K"
    if one != other:
        raise ModelError(f"{where} has kinds that contradict each other")
    return one
