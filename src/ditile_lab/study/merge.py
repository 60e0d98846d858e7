"""Merges the anatomies that two calls show for one list: of two of its blocks, or of two pipelines that use it."""

from __future__ import annotations

from dataclasses import replace

from ditile.plan.anatomy import LOCAL, REAL_PAIRS, Kinds, ListAnatomy, drop_further_keys
from ditile.plan.errors import ModelError


def merge_lists(where: str, first: ListAnatomy, second: ListAnatomy) -> ListAnatomy:
    """Merge the anatomies of two blocks of a list; each may lack parts of the other."""
    for name in ("image", "tokens", "has_no_batch", "is_tuple", "joint"):
        if getattr(first, name) != getattr(second, name):
            raise ModelError(f"{where} has {name}={getattr(first, name)!r} and {getattr(second, name)!r}")
    attention = {**first.attention, **second.attention}
    for path in first.attention.keys() & second.attention.keys():
        attention[path] = _merge_attention(f"{where}.{path}", first.attention[path], second.attention[path])
    arguments = {}
    for name in {**first.arguments, **second.arguments}:
        kinds = first.arguments.get(name)
        arguments[name] = merge_kinds(f"{where}.{name}", kinds, second.arguments.get(name))
    richer = first if len(first.returns) >= len(second.returns) else second
    return replace(
        first,
        text=first.text or second.text,
        returns=richer.returns,
        arguments=arguments,
        attention=attention,
    )


def merge_kinds(where: str, first: Kinds | None, second: Kinds | None) -> Kinds:
    """Merge the kinds of an argument's leaves; a call without the argument has no say."""
    if not first or not second or first == second:
        return first or second or ()
    if len(first) != len(second):
        raise ModelError(f"{where} has {len(first)} values and {len(second)}")
    return tuple(_merge_words(where, *words) for words in zip(first, second, strict=True))


def _merge_attention(where: str, first: Kinds, second: Kinds) -> Kinds:
    """Merge the kinds of a module's attention calls, which may lack further keys in one pipeline."""
    # Local calls need no division, however many a config makes.
    if {*first, *second} == {LOCAL}:
        return min(first, second, key=len)
    if _has_real_pairs(first) != _has_real_pairs(second):
        # A mask over pairs that says more than which keys are real stays whole in every pipeline.
        first = tuple(kind.removesuffix(REAL_PAIRS) for kind in first)
        second = tuple(kind.removesuffix(REAL_PAIRS) for kind in second)
    error = ModelError(f"{where} attends to {first} and to {second}")
    if len(first) != len(second):
        raise error
    merged = []
    for kind, second_kind in zip(first, second, strict=True):
        if kind == second_kind or second_kind == drop_further_keys(kind):
            merged.append(kind)
        elif kind == drop_further_keys(second_kind):
            merged.append(second_kind)
        else:
            raise error
    return tuple(merged)


def _has_real_pairs(kinds: Kinds) -> bool:
    return any(kind.endswith(REAL_PAIRS) for kind in kinds)


def _merge_words(where: str, first: str, second: str) -> str:
    if not first or not second:
        return first or second
    has_one_word = "|" not in first + second
    if has_one_word and len(first) == len(second):
        where = f"{where} ({first}, {second})"
        return "".join(_merge_letters(where, *letters) for letters in zip(first, second, strict=True))
    # An argument with different numbers of dimensions in calls has a word for each number.
    words = {len(word): word for word in first.split("|")}
    for word in second.split("|"):
        if len(word) in words:
            word = _merge_words(where, words[len(word)], word)
        words[len(word)] = word
    return "|".join(words[length] for length in sorted(words))


def _merge_letters(where: str, first: str, second: str) -> str:
    # A length that is constant in the calls of one pipeline may change in those of another.
    for weak in ("1", ".", "C"):
        if first == weak:
            return second
        if second == weak:
            return first
    # An argument stays whole for a mask over pairs, from which attention selects.
    if "K" in (first, second):
        return "K"
    if first != second:
        raise ModelError(f"{where} has kinds that contradict each other")
    return first
