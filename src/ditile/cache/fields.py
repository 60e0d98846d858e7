"""What the configs of the cache have in common: their fields are checked, and they know which of them were given."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, ClassVar, TypeVar

from ditile.errors import ModelError

C = TypeVar("C", bound="Fields")


class Fields:
    """A frozen dataclass that refuses unknown fields, and remembers which were given.

    Two configs are equal where their values are, whether given or left at the default.
    """

    __slots__ = ("_given",)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    _given: frozenset[str]

    def __new__(cls, **values: Any) -> Any:
        """Raises `ModelError`, with the nearest known one, for a field that there is not."""
        for name in values:
            check_known(f"{cls.__name__}({name}=..)", name, cls.__dataclass_fields__)
        new = object.__new__(cls)
        object.__setattr__(new, "_given", frozenset(values))
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_config, (type(self), {name: getattr(self, name) for name in self._given}, self._given)

    @property
    def given(self) -> frozenset[str]:
        """The fields that were named when this was made, or in a `reset` since."""
        return self._given

    def values(self) -> dict[str, Any]:
        """All fields and their values, as they are."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def reset(self: C, **changes: Any) -> C:
        """A copy with some fields changed; this one stays as it is.

        Raises:
            ModelError: if a field is not known, or a value is out of its range.
        """
        for name in changes:
            check_known(f"{type(self).__name__}.reset({name}=..)", name, self.__dataclass_fields__)
        return _rebuild_config(type(self), self.values() | changes, self._given | set(changes))


def merge_configs(base: C | None, modifier: C | None) -> C | None:
    """The config of one list of blocks: that of the pipeline, with what its modifier says.

    A field that was given to the modifier, when it was made or by `reset`, wins, even where it names the default
    (`dataclasses.replace` gives all of them). All others are the base's. The result is of the narrower of the two
    kinds, such as `DBPruneConfig`; where neither is a kind of the other (two different calibrators) the modifier is the
    result. None gives way to the other.
    """
    if base is None or modifier is None:
        return modifier if base is None else base
    narrow = type(modifier) if isinstance(modifier, type(base)) else type(base)
    if not (isinstance(modifier, type(base)) or isinstance(base, type(modifier))):
        return modifier
    changes = {name: getattr(modifier, name) for name in modifier.given}
    return _rebuild_config(narrow, base.values() | changes, base.given | modifier.given)


def check_known(what: str, name: str, known: Any) -> None:
    """Raises `ModelError` about `what` unless `name` is one of `known`; says which is nearest."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ModelError(f"{what} is not known; " + (f"did you mean {near[0]}?" if near else _format_choices(known)))


def check_whole_number(config: Any, name: str, least: int, *, none: bool = False) -> None:
    """Raises `ModelError` unless a field is a whole number of at least `least`, or None where that is allowed."""
    value = getattr(config, name)
    if none and value is None:
        return
    if not is_whole_number(value) or value < least:
        raise ModelError(f"{name}={value!r} is not a whole number of at least {least}; try {name}={max(least, 1)}")


def check_finite_number(config: Any, name: str, least: float, example: float, *, none: bool = False) -> None:
    """Raises `ModelError` unless a field is a finite number of at least `least`, or None where that is allowed."""
    value = getattr(config, name)
    if none and value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value < math.inf:
        raise ModelError(f"{name}={value!r} is not a number of at least {least:g}; try {name}={example}")


def check_one_of(config: Any, name: str, *known: Any) -> None:
    """Raises `ModelError` unless a field has one of the known values."""
    value = getattr(config, name)
    if not any(value is word or (isinstance(word, str) and value == word) for word in known):
        raise ModelError(f"{name}={value!r} is not known; {_format_choices(known)}")


def is_whole_number(value: Any) -> bool:
    """Whether it is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _format_choices(known: Any) -> str:
    return f"try one of {', '.join(map(str, known))}"


def _rebuild_config(kind: type[C], values: dict[str, Any], given: frozenset[str]) -> C:
    new = kind(**values)
    object.__setattr__(new, "_given", frozenset(given))
    return new
