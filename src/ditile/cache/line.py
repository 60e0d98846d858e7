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
from ditile.cache.step_mask import read
from ditile.errors import ModelError

NONE = "none"

SHORT = {
    "F": "Fn_compute_blocks", "B": "Bn_compute_blocks", "R": "residual_diff_threshold", "W": "max_warmup_steps",
    "I": "warmup_interval", "M": "max_cached_steps", "MC": "max_continuous_cached_steps",
    "budget": "max_accumulated_residual_diff_threshold", "resets": "accumulated_resets",
    "mask": "steps_computation_mask", "policy": "steps_computation_policy",
}  # fmt: skip
CALIBRATORS: dict[str, tuple[type[Calibration], str | None]] = {
    "taylor": (TaylorSeerCalibratorConfig, "taylorseer_order"),
    "dmd": (DMDCalibratorConfig, "dmd_history"),
    "foca": (FoCaCalibratorConfig, None),
}
PRUNE, REACH = "prune", "reach"
WORDS = (*SHORT, PRUNE, *CALIBRATORS, REACH)
ALONE = ("resets", PRUNE, *CALIBRATORS)
"""The words that need no value."""


def cache_of(line: str) -> DBCacheConfig:
    """The config of a line that is not `none`.

    Raises:
        ModelError: if a word or value is not known, or a word is there twice.
    """
    apart = {*CALIBRATORS, REACH}
    fields = {SHORT.get(name, name): value for name, value in _words(line).items() if name not in apart}
    cls = DBPruneConfig if fields.pop(PRUNE, False) else DBCacheConfig
    if isinstance(mask := fields.get("steps_computation_mask"), str):
        fields["steps_computation_mask"] = read(mask)
    return cls(**fields)


def calibrator_of(line: str) -> Calibration | None:
    """The calibrator; None if there is none.

    Raises:
        ModelError: if there are two, a word or value is not known, or `reach` is there without `taylor`.
    """
    words = _words(line)
    found = [name for name in CALIBRATORS if name in words]
    if len(found) > 1:
        raise ModelError(f"{line!r} has {len(found)} calibrators; name one")
    if REACH in words and found != ["taylor"]:
        raise ModelError(
            f"{REACH}={words[REACH]} is how far the forecast of taylor goes; add taylor=1, or leave it out"
        )
    for name in found:
        cls, field = CALIBRATORS[name]
        if field is None and words[name] is not True:
            raise ModelError(f"'{name}={words[name]}': {name} takes no value; write {name}")
        given = {} if field is None or words[name] is True else {field: words[name]}
        return cls(**given | ({"taylorseer_reach": words[REACH]} if REACH in words else {}))
    return None


def configs_of(line: str) -> dict[str, Any]:
    """The keyword arguments of `enable_cache`; those of `none` have no cache.

    Raises:
        ModelError: as `cache_of` and `calibrator_of`, or if the line is empty.
    """
    if line.strip() == NONE:
        return {"cache_config": None}
    if not line.strip():
        raise ModelError(f"a cache in one line is such as 'F=1 W=4 R=0.12 taylor=1', or {NONE!r}; this one is empty")
    calibrator = calibrator_of(line)
    return {"cache_config": cache_of(line)} | ({} if calibrator is None else {"calibrator_config": calibrator})


def _words(line: str) -> dict[str, Any]:
    """`F=1 foca` as `{"F": 1, "foca": True}`.

    Raises:
        ModelError: if a word is not known, lacks its value, or is there twice, by whichever name.
    """
    made: dict[str, Any] = {}
    fields = DBPruneConfig.__dataclass_fields__
    for word in line.split():
        name, _, value = word.partition("=")
        if name not in WORDS and name not in fields:
            raise ModelError(
                f"{word!r} is no word of a cache in one line; known are {', '.join(WORDS)}, and the fields of "
                f"DBCacheConfig by their names"
            )
        if not value and name in WORDS and name not in ALONE:
            raise ModelError(f"{word!r} has no value; write it without blanks, as in F=1 W=4 R=0.12")
        if any(SHORT.get(name, name) == SHORT.get(other, other) for other in made):
            raise ModelError(f"{word!r} says {name} a second time in {line!r}; say it once")
        made[name] = _value(value)
    return made


def _value(text: str) -> Any:
    """The number or truth that a text is, or the text."""
    if text in ("", "true", "false"):
        return text != "false"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
