"""A cache in one line of text, as tables of measurements and `--caches` name it.

    F=1 W=4 R=0.12 MC=3 taylor=1         short names, as in what `strify` prints
    F=0 W=2 R=1 MC=4 taylor=1 reach=0.5  no look at all, and forecasts that end half a gap on
    F=1 mask=fast policy=static dmd=6    a preset of steps, and another calibrator
    none                                 no cache

All words are in docs/caching.md. Fields of `DBCacheConfig` work by their own names too; `prune` makes it a
`DBPruneConfig`, whose fields then do.
"""

from __future__ import annotations

from typing import Any

from ditile.cache.config import (
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
)
from ditile.cache.step_mask import parse_step_mask
from ditile.errors import ModelError

NO_CACHE = "none"

FIELD_BY_WORD = {
    "F": "Fn_compute_blocks", "B": "Bn_compute_blocks", "R": "residual_diff_threshold", "W": "max_warmup_steps",
    "I": "warmup_interval", "M": "max_cached_steps", "MC": "max_continuous_cached_steps",
    "budget": "max_accumulated_residual_diff_threshold", "resets": "accumulated_resets",
    "mask": "steps_computation_mask", "policy": "steps_computation_policy",
}  # fmt: skip
CALIBRATOR_WORDS: dict[str, tuple[type[Calibration], str | None]] = {
    "taylor": (TaylorSeerCalibratorConfig, "taylorseer_order"),
    "dmd": (DMDCalibratorConfig, "dmd_history"),
    "foca": (FoCaCalibratorConfig, None),
}
PRUNE, REACH = "prune", "reach"
LINE_WORDS = (*FIELD_BY_WORD, PRUNE, *CALIBRATOR_WORDS, REACH)
WORDS_WITHOUT_VALUE = ("resets", PRUNE, *CALIBRATOR_WORDS)
"""The words that need no value."""


def parse_cache_config(line: str) -> DBCacheConfig:
    """The config of a line that is not `none`.

    Raises:
        ModelError: if a word or value is not known, or a word is there twice.
    """
    apart = {*CALIBRATOR_WORDS, REACH}
    fields = {
        FIELD_BY_WORD.get(name, name): value for name, value in _split_cache_line(line).items() if name not in apart
    }
    cls = DBPruneConfig if fields.pop(PRUNE, False) else DBCacheConfig
    if isinstance(mask := fields.get("steps_computation_mask"), str):
        fields["steps_computation_mask"] = parse_step_mask(mask)
    return cls(**fields)


def parse_calibrator_config(line: str) -> Calibration | None:
    """The calibrator; None if there is none.

    Raises:
        ModelError: if there are two, a word or value is not known, or `reach` is there without `taylor`.
    """
    words = _split_cache_line(line)
    names = [name for name in CALIBRATOR_WORDS if name in words]
    if len(names) > 1:
        raise ModelError(f"{line!r} has {len(names)} calibrators; name one")
    if REACH in words and names != ["taylor"]:
        raise ModelError(
            f"{REACH}={words[REACH]} is how far the forecast of taylor goes; add taylor=1, or leave it out"
        )
    for name in names:
        cls, field = CALIBRATOR_WORDS[name]
        if field is None and words[name] is not True:
            raise ModelError(f"'{name}={words[name]}': {name} takes no value; write {name}")
        fields = {} if field is None or words[name] is True else {field: words[name]}
        return cls(**fields | ({"taylorseer_reach": words[REACH]} if REACH in words else {}))
    return None


def parse_cache_line(line: str) -> dict[str, Any]:
    """The keyword arguments of `enable_cache`; those of `none` have no cache.

    Raises:
        ModelError: as `cache_of` and `calibrator_of`, or if the line is empty.
    """
    if line.strip() == NO_CACHE:
        return {"cache_config": None}
    if not line.strip():
        raise ModelError(
            f"a cache in one line is such as 'F=1 W=4 R=0.12 taylor=1', or {NO_CACHE!r}; this one is empty"
        )
    calibrator = parse_calibrator_config(line)
    return {"cache_config": parse_cache_config(line)} | (
        {} if calibrator is None else {"calibrator_config": calibrator}
    )


def _split_cache_line(line: str) -> dict[str, Any]:
    """`F=1 foca` as `{"F": 1, "foca": True}`.

    Raises:
        ModelError: if a word is not known, lacks its value, or is there twice, by whichever name.
    """
    values: dict[str, Any] = {}
    fields = DBPruneConfig.__dataclass_fields__
    for word in line.split():
        name, _, value = word.partition("=")
        if name not in LINE_WORDS and name not in fields:
            raise ModelError(
                f"{word!r} is no word of a cache in one line; known are {', '.join(LINE_WORDS)}, and the fields of "
                f"DBCacheConfig by their names"
            )
        if not value and name in LINE_WORDS and name not in WORDS_WITHOUT_VALUE:
            raise ModelError(f"{word!r} has no value; write it without blanks, as in F=1 W=4 R=0.12")
        if any(FIELD_BY_WORD.get(name, name) == FIELD_BY_WORD.get(other, other) for other in values):
            raise ModelError(f"{word!r} says {name} a second time in {line!r}; say it once")
        values[name] = _parse_word_value(value)
    return values


def _parse_word_value(text: str) -> Any:
    """The number or truth that a text is, or the text."""
    if text in ("", "true", "false"):
        return text != "false"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
