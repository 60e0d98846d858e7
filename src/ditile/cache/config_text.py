"""One YAML or JSON file for all that `enable_cache` takes.

    cache_config:
      Fn_compute_blocks: 1
      residual_diff_threshold: 0.12
      steps_computation_mask: fast
    calibrator_config:
      calibrator_type: taylorseer
      taylorseer_order: 1
    parallelism_config:
      ulysses_size: auto
      parallel_kwargs:
        attention_backend: native
    quantize_config:
      quant_type: float8_weight_only
    attention_backend: native

A calibrator may also be named in cache_config, as cache-dit documents it: `enable_taylorseer: true`, and its fields.

A cache in one line of text, as tables of measurements and `--caches` name it.

    F=1 W=4 R=0.12 MC=3 taylor=1         short names, as in what `strify` prints
    F=0 W=2 R=1 MC=4 taylor=1 reach=0.5  no look at all, and forecasts that end half a gap on
    F=1 mask=fast policy=static dmd=6    a preset of steps, and another calibrator
    none                                 no cache

All words are in docs/caching.md. Fields of `DBCacheConfig` work by their own names too; `prune` makes it a
`DBPruneConfig`, whose fields then do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ditile.cache.cache_dit import ParallelismConfig
from ditile.cache.config import (
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
    check_known,
)
from ditile.cache.step_mask import parse_step_mask
from ditile.errors import LoadError, ModelError

# type: ignore[import-untyped]


CALIBRATOR_CONFIGS: dict[str, type[Calibration]] = {
    "taylorseer": TaylorSeerCalibratorConfig,
    "foca": FoCaCalibratorConfig,
    "dmd": DMDCalibratorConfig,
}
QUANTIZE_ARGUMENTS = ("quant_type", "exclude_layers", "per_row", "group_size")
"""What quantize_config may say: the arguments of `quantize`."""

_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
_CACHE_CONFIGS = {"dbcache": DBCacheConfig, "dbprune": DBPruneConfig}


def load_configs(path_or_dict: str | PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `enable_cache` that a file, or what it would hold, stands for.

    Args:
        path_or_dict: a `.json` file, or one in YAML; or its content.

    Returns:
        What it names of calibrator_config, parallelism_config, attention_backend and quantize_config (the arguments of
        `quantize`, as a dict); and always cache_config, None where the file has none and nothing is to be cached. A
        section that is null is not there.

    Raises:
        LoadError: if the file is missing, unreadable, or no YAML or JSON.
        ModelError: if a name is not known, with the nearest one, or a value is out of its range.
    """
    content = path_or_dict if isinstance(path_or_dict, Mapping) else _read_config_file(Path(path_or_dict))
    for name in content:
        check_known(f"the config {name!r}", name, _SECTIONS)
    content = {name: value for name, value in content.items() if value is not None}
    configs: dict[str, Any] = {"cache_config": None}
    if "cache_config" in content:
        configs["cache_config"], calibrator = _parse_cache_section(_read_section(content, "cache_config"))
        if calibrator is not None:
            if "calibrator_config" in content:
                raise ModelError("cache_config and calibrator_config name a calibrator each; leave one of them out")
            configs["calibrator_config"] = calibrator
    for name, make in _SECTIONS.items():
        if name in content and name != "cache_config":
            configs[name] = make(content[name] if name == "attention_backend" else _read_section(content, name))
    return configs


def _read_config_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"the config {str(path)!r} cannot be read: {error}") from error
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise LoadError(
            f"the config {str(path)!r} is no {'JSON' if path.suffix == '.json' else 'YAML'}: {reason}"
        ) from error
    if not isinstance(content, Mapping):
        raise LoadError(f"the config {str(path)!r} has no sections; try some of {', '.join(_SECTIONS)}")
    return content


def _read_section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    values = content[name]
    if not isinstance(values, Mapping):
        raise ModelError(f"{name}={values!r} is no section; give names and values")
    return {str(key): _parse_exponent(value) for key, value in values.items()}


def _parse_exponent(value: Any) -> Any:
    """YAML 1.1 reads 1e-8, without a point, as text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _parse_cache_section(values: dict[str, Any]) -> tuple[DBCacheConfig, Calibration | None]:
    """The config of the cache, and that of the calibrator which is named in it."""
    calibrator, fields = _split_calibrator_fields(values)
    name = str(fields.pop("cache_type", "")).rpartition(".")[2].lower()
    if name:
        check_known(f"cache_type={name!r}", name, _CACHE_CONFIGS)
    prunes = name == "dbprune" or (not name and set(fields) & _PRUNE_FIELDS)
    mask = fields.get("steps_computation_mask")
    if isinstance(mask, str) and "/" in mask:
        fields["steps_computation_mask"] = parse_step_mask(mask)
    return (DBPruneConfig if prunes else DBCacheConfig)(**fields), calibrator


def _split_calibrator_fields(values: dict[str, Any]) -> tuple[Calibration | None, dict[str, Any]]:
    """The calibrator that a section of the cache names, and the other entries."""
    enabled = [kind for kind in CALIBRATOR_CONFIGS if values.get(f"enable_{kind}")]
    if len(enabled) > 1:
        raise ModelError(
            f"{' and '.join(f'enable_{kind}' for kind in enabled)}: there is one calibrator; leave one out"
        )
    cache_fields, calibrator_fields = {}, {}
    for name, value in values.items():
        kind, field = _find_calibrator_field(name)
        if kind is None:
            cache_fields[name] = value
        elif field is not None and kind in ("any", *enabled):
            calibrator_fields[field] = value
    if not enabled:
        return None, cache_fields
    return CALIBRATOR_CONFIGS[enabled[0]](**calibrator_fields), cache_fields


def _find_calibrator_field(name: str) -> tuple[str | None, str | None]:
    """Which calibrator an entry of the cache is for, and its field; none for its switch."""
    if name in ("calibrator_cache_type", "enable_encoder_calibrator"):
        return "any", name
    for kind, config in CALIBRATOR_CONFIGS.items():
        if name == f"enable_{kind}":
            return kind, None
        if name == f"enable_encoder_{kind}":
            return kind, "enable_encoder_calibrator"
        if name == f"{kind}_cache_type":
            return kind, "calibrator_cache_type"
        if name.startswith(f"{kind}_") and name in config.__dataclass_fields__:
            return kind, name
    return None, None


def _parse_calibrator_section(values: dict[str, Any]) -> Calibration:
    """By its type; by its fields where that is left out."""
    kind = values.get("calibrator_type")
    if kind is None:
        kind = next(
            (one for one in CALIBRATOR_CONFIGS if any(name.startswith(f"{one}_") for name in values)), "taylorseer"
        )
    check_known(f"calibrator_type={kind!r}", kind, CALIBRATOR_CONFIGS)
    return CALIBRATOR_CONFIGS[kind](**values)


def _check_quantize_section(values: dict[str, Any]) -> dict[str, Any]:
    for name in values:
        check_known(f"quantize_config has {name!r}, which", name, QUANTIZE_ARGUMENTS)
    return values


def _check_attention_backend(value: Any) -> str:
    if not isinstance(value, str):
        raise ModelError(f"attention_backend={value!r} is no name; try native")
    return value


_PRUNE_FIELDS = set(DBPruneConfig.__dataclass_fields__) - set(DBCacheConfig.__dataclass_fields__)
_SECTIONS: dict[str, Callable[[Any], Any]] = {
    "cache_config": _parse_cache_section,
    "calibrator_config": _parse_calibrator_section,
    "parallelism_config": lambda values: ParallelismConfig(**values),
    "quantize_config": _check_quantize_section,
    "attention_backend": _check_attention_backend,
}


NO_CACHE = "none"

FIELD_BY_WORD = {
    "F": "Fn_compute_blocks",
    "B": "Bn_compute_blocks",
    "R": "residual_diff_threshold",
    "W": "max_warmup_steps",
    "I": "warmup_interval",
    "M": "max_cached_steps",
    "MC": "max_continuous_cached_steps",
    "budget": "max_accumulated_residual_diff_threshold",
    "resets": "accumulated_resets",
    "mask": "steps_computation_mask",
    "policy": "steps_computation_policy",
}
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
