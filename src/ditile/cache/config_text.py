"""Parses cache settings from a config file or a one-line form.

A YAML or JSON file has all the settings that `enable_cache` takes.

    cache_config:
      Fn_compute_blocks: 1
      residual_diff_threshold: 0.12
      steps_computation_mask: fast
    calibrator_config:
      calibrator_type: taylorseer
      taylorseer_order: 1
    parallelism_config:
      ulysses_size: auto
      attention_backend: native
    quantize_config:
      quant_type: float8_weight_only
    attention_backend: native

A calibrator may also be named in cache_config, as cache-dit documents it: `enable_taylorseer: true`, and its fields.

A line has the settings of the cache and the calibrator. `--caches` takes such lines, and benchmark tables show them.

    F=1 W=4 R=0.12 MC=3 taylor=1         short names, as in what `strify` returns
    F=0 W=2 R=1 MC=4 taylor=1 reach=0.5  no block runs to decide; forecasts go half a gap beyond the last computed step
    F=1 mask=fast policy=static dmd=6    a preset of steps, and another calibrator
    steps=10                             a fitted schedule: 10 steps call the model; schedule=FILE names another one
    sea=0.3 MC=1                         another method, by its own word
    none                                 no cache

docs/caching.md explains all words, and `CACHE_WORDS` lists them. Fields of `DBCacheConfig` are accepted by their own
names; a line that contains `prune` builds a `DBPruneConfig` and also accepts its fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from ditile.cache.cache_dit import AXES, QuantizeConfig, RankDivision, plan_division
from ditile.cache.config import (
    CACHE_WORDS,
    CacheConfig,
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FittedScheduleConfig,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
    check_known,
    check_one_forecast,
)
from ditile.cache.methods.easycache import EasyCacheConfig
from ditile.cache.methods.gating import GuidanceGateConfig
from ditile.cache.methods.magcache import MagCacheConfig
from ditile.cache.methods.seacache import SeaCacheConfig
from ditile.cache.methods.spectrum import SpectrumConfig
from ditile.distributed import files
from ditile.plan.errors import LoadError, ModelError, join_error_lines, quote_value
from ditile.plan.option_classes import CallArguments, JsonObject, check_value, checked, drop_missing

CALIBRATOR_CONFIGS: dict[str, type[Calibration]] = {
    "taylorseer": TaylorSeerCalibratorConfig,
    "foca": FoCaCalibratorConfig,
    "dmd": DMDCalibratorConfig,
}


class CacheMethod(NamedTuple):
    """A method that leaves out work.

    Attributes:
        name: its `cache_type` in a config file.
        words: any of these words in a line selects this method; a line with none uses DBCache.
    """

    name: str
    config: type[CacheConfig]
    words: tuple[str, ...] = ()


CACHE_METHODS = (
    CacheMethod("schedule", FittedScheduleConfig, ("steps", "schedule")),
    CacheMethod("dbcache", DBCacheConfig),
    CacheMethod("dbprune", DBPruneConfig),
    CacheMethod("magcache", MagCacheConfig, ("mag",)),
    CacheMethod("seacache", SeaCacheConfig, ("sea",)),
    CacheMethod("spectrum", SpectrumConfig, ("spectrum",)),
    CacheMethod("easycache", EasyCacheConfig, ("easy",)),
    CacheMethod("gate", GuidanceGateConfig, ("gate",)),
)
"""All methods; a new one is a row here."""
MAX_VALUES = 100_000
MAX_DEPTH = 32
MAX_BITS = 1024
"""Limits of a settings file with its aliases expanded: values, levels, and bits of a number. No settings reach them."""
METHODS_BY_NAME = {method.name: method for method in CACHE_METHODS}
METHODS_BY_WORD = {"prune": METHODS_BY_NAME["dbprune"]}
"""A word by which a line names a method -> the method."""
for _method in CACHE_METHODS:
    METHODS_BY_WORD |= dict.fromkeys(_method.words, _method)
NO_CACHE = "none"
"""The line that stands for no cache."""

_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
_UNUSED = ("force_reduce_calibrator_vram",)
"""Entries of cache-dit's cache_config that have no effect here."""
_PRUNE_FIELDS = set(DBPruneConfig.__dataclass_fields__) - set(DBCacheConfig.__dataclass_fields__)
_FORECASTS = {"taylor": "taylorseer", "dmd": "dmd", "foca": "foca"}
"""Word of a line -> the calibrator that it names."""
_WITHOUT_VALUE = ("resets", "prune", *_FORECASTS)
"""The words that need no value."""


ConfigSource = str | PathLike[str] | Mapping[str, Any]
"""The path of a JSON file (`.json`) or a YAML file (any other), or the content of such a file."""


@checked()
def load_configs(path_or_dict: ConfigSource, return_dict: bool = True, *, reset: bool = False) -> Any:
    """Load the keyword arguments of `enable_cache` from a file, or from its content.

    Args:
        path_or_dict: the path of a `.json` file or a YAML file, or its content. Without sections it is a cache_config.
        return_dict: False returns only the values, in the order below.
        reset: ignored; accepted for cache-dit compatibility, because a config already records which fields were set.

    Returns:
        cache_config, calibrator_config, parallelism_config, attention_backend and quantize_config (the fields of a
        `QuantizeConfig`, as a dict); None where a section is absent or null.

    Raises:
        LoadError: if the file is missing, unreadable, or neither YAML nor JSON.
        ModelError: if a name is not known, with the nearest one, or a value is out of its range.
    """
    content: Any = path_or_dict
    if not isinstance(content, Mapping):
        content = _read_config_file(Path(content))
    # A file without sections is a cache_config.
    if content and set(content) <= _FLAT_ENTRIES:
        content = {"cache_config": content}
    for name in content:
        check_known(f"the config {name!r}", name, _SECTIONS)
    content = drop_missing(content)
    configs: CallArguments = dict.fromkeys(_SECTIONS)
    if "cache_config" in content:
        configs |= parse_cache_section(_read_section(content, "cache_config"))
        if configs["calibrator_config"] is not None and "calibrator_config" in content:
            raise ModelError("cache_config and calibrator_config name a calibrator each; leave one of them out")
    if "calibrator_config" in content:
        values = _read_section(content, "calibrator_config")
        # Without a name, the fields tell which calibrator it is.
        prefixes = [field.partition("_")[0] for field in values]
        calibrator = values.get("calibrator_type") or next(
            filter(CALIBRATOR_CONFIGS.__contains__, prefixes), "taylorseer"
        )
        check_known(f"calibrator_type={calibrator!r}", calibrator, CALIBRATOR_CONFIGS)
        configs["calibrator_config"] = CALIBRATOR_CONFIGS[calibrator](**values)
    if "parallelism_config" in content:
        division = _read_section(content, "parallelism_config")
        # A file may say ulysses for ulysses_size.
        for name in AXES:
            short_name = name.removesuffix("_size")
            if short_name in division:
                division[name] = division.pop(short_name)
        configs["parallelism_config"] = plan_division(**division)
    if "quantize_config" in content:
        configs["quantize_config"] = _read_section(content, "quantize_config")
        # The section is only checked here: it is merged with flags later.
        QuantizeConfig(**configs["quantize_config"])
    kernel = content.get("attention_backend")
    check_value(str | None, kernel, "attention_backend", example="native")
    configs["attention_backend"] = kernel
    if return_dict:
        return configs
    return tuple(configs.values())


@checked()
def load_cache_config(source: ConfigSource) -> tuple[CacheConfig | None, Calibration | None]:
    """Load the cache_config and the calibrator_config of `load_configs`."""
    configs = load_configs(source)
    return configs["cache_config"], configs["calibrator_config"]


@checked()
def load_parallelism_config(source: ConfigSource) -> RankDivision | None:
    """Load the parallelism_config of `load_configs`."""
    division: RankDivision | None = load_configs(source)["parallelism_config"]
    return division


@checked()
def load_quantize_config(source: ConfigSource) -> QuantizeConfig | None:
    """Load the quantize_config of `load_configs` as a config."""
    values = load_configs(source)["quantize_config"]
    if values is None:
        return None
    return QuantizeConfig(**values)


@checked()
def load_attn_backend_config(source: ConfigSource) -> str | None:
    """Load the attention_backend of `load_configs`."""
    name: str | None = load_configs(source)["attention_backend"]
    return name


def _read_config_file(path: Path) -> Mapping[str, Any]:
    language = "YAML"
    if path.suffix == ".json":
        language = "JSON"
    try:
        text = files.read_text(path)
    except (OSError, ValueError) as error:
        raise LoadError(f"the config {str(path)!r} cannot be read: {error}") from error
    try:
        content = files.parse_json(text) if language == "JSON" else yaml.safe_load(text)
        # Aliases of YAML may stand for billions of values.
        level = [content]
        count = 0
        # Values are counted level by level, as often as aliases use them, until a limit: no alias is followed further.
        for _ in range(MAX_DEPTH):
            inner = []
            for value in level:
                # No message could show such a number: Python refuses to write out thousands of digits.
                if isinstance(value, int) and value.bit_length() > MAX_BITS:
                    raise ValueError(f"it has a number of more than {MAX_BITS} bits")
                if isinstance(value, Mapping):
                    inner += [*value, *value.values()]
                elif isinstance(value, list | tuple | set):
                    inner += value
                if count + len(inner) > MAX_VALUES:
                    raise ValueError(f"it stands for more than {MAX_VALUES} values")
            count += len(inner)
            level = inner
        if level:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    except RecursionError:
        raise LoadError(f"the config {str(path)!r} is not {language}: it is nested too deep") from None
    # PyYAML raises the last three for a value that does not fit its tag, such as `!!bool x`.
    except (ValueError, yaml.YAMLError, LookupError, AttributeError, TypeError) as error:
        raise LoadError(f"the config {str(path)!r} is not {language}: {join_error_lines(error)}") from error
    if not isinstance(content, Mapping):
        raise LoadError(f"the config {str(path)!r} has no sections; try some of {', '.join(_SECTIONS)}")
    return content


def _read_section(content: JsonObject, name: str) -> JsonObject:
    values = content[name]
    if not isinstance(values, Mapping):
        raise ModelError(f"{name}={quote_value(values)} is not a section; give names and values")
    section = {str(key): value for key, value in values.items()}
    for key, value in section.items():
        # YAML 1.1 reads a number such as 1e-8, without a point, as text.
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            section[key] = float(value)
    return section


def parse_cache_section(values: JsonObject) -> CallArguments:
    """Parse the cache_config, and the calibrator_config if the section names a calibrator."""
    enabled = [name for name in CALIBRATOR_CONFIGS if values.get(f"enable_{name}")]
    if len(enabled) > 1:
        names = " and ".join(f"enable_{name}" for name in enabled)
        raise ModelError(f"{names}: there is one calibrator; leave one out")
    fields: JsonObject = {}
    calibrator_fields: JsonObject = {}
    for name, value in values.items():
        if name in _CALIBRATOR_ENTRIES:
            calibrator, field = _CALIBRATOR_ENTRIES[name]
            if field and calibrator in ("any", *enabled):
                calibrator_fields[field] = value
        elif name not in _UNUSED:
            fields[name] = value
    # The value may be a member of cache-dit's enum, such as CacheType.DBCache.
    cache_type = str(fields.pop("cache_type", "")).rpartition(".")[2].lower()
    if cache_type:
        check_known(f"cache_type={cache_type!r}", cache_type, METHODS_BY_NAME)
    elif _PRUNE_FIELDS.isdisjoint(fields):
        cache_type = "dbcache"
    else:
        cache_type = "dbprune"
    configs: CallArguments = {"cache_config": METHODS_BY_NAME[cache_type].config(**fields)}
    for name in enabled:
        configs["calibrator_config"] = CALIBRATOR_CONFIGS[name](**calibrator_fields)
        check_one_forecast(configs["cache_config"], configs["calibrator_config"])
    return configs


def _list_calibrator_entries() -> dict[str, tuple[str, str]]:
    """Map each calibrator entry of cache_config -> (calibrator, field). For an on/off switch the field is ""."""
    switch = "enable_encoder_calibrator"
    stored = "calibrator_cache_type"
    entries = {switch: ("any", switch), stored: ("any", stored)}
    for name, config in CALIBRATOR_CONFIGS.items():
        entries[f"enable_{name}"] = (name, "")
        entries[f"enable_encoder_{name}"] = (name, switch)
        entries[f"{name}_cache_type"] = (name, stored)
        for field in config.__dataclass_fields__:
            if field.startswith(f"{name}_"):
                entries[field] = (name, field)
    return entries


_CALIBRATOR_ENTRIES = _list_calibrator_entries()


_SECTIONS = ("cache_config", "calibrator_config", "parallelism_config", "attention_backend", "quantize_config")
_FLAT_ENTRIES = {"cache_type", *_UNUSED, *_CALIBRATOR_ENTRIES}
"""The entries of a config file without sections, which is one cache_config."""
for _method in CACHE_METHODS:
    _FLAT_ENTRIES |= set(_method.config.__dataclass_fields__)


def parse_cache_line(line: str) -> CallArguments:
    """Parse a line into keyword arguments of `enable_cache`. For `none` the cache_config is None.

    Raises:
        ModelError: if the line is empty, a word or value is not known, a field is given twice, two methods or
            calibrators are named, or `reach` is given without `taylor`.
    """
    if line.strip() == NO_CACHE:
        return {"cache_config": None}
    words = [word.partition("=") for word in line.split()]
    if not words:
        raise ModelError(
            f"a cache in one line is such as 'F=1 W=4 R=0.12 taylor=1', or {NO_CACHE!r}; this line is empty"
        )
    method = METHODS_BY_NAME["dbcache"]
    for word, _, _ in words:
        method = METHODS_BY_WORD.get(word, method)
    entries: dict[str, str | None] = {word: row.field for word, row in CACHE_WORDS.items()}
    if not issubclass(method.config, DBCacheConfig):
        # A word of one method is unknown to the others.
        own_entries: dict[str, str | None] = {**method.config.WORDS}
        for word in (*_FORECASTS, "reach"):
            own_entries[word] = entries[word]
        entries = own_entries
    # Fields work by their own names too.
    for field in method.config.__dataclass_fields__:
        entries[field] = field
    # A line stands for a cache_config of a file.
    section: JsonObject = {"cache_type": method.name}
    for word, sign, text in words:
        if word not in entries:
            known = [name for name in dict.fromkeys((*method.config.WORDS, *CACHE_WORDS)) if name in entries]
            raise ModelError(
                f"'{word}{sign}{text}' is not a word of a cache in one line; known are {', '.join(known)}, and the "
                f"fields of {method.config.__name__} by their names"
            )
        if word in _FORECASTS:
            section[f"enable_{_FORECASTS[word]}"] = True
        entry = entries[word]
        # A word that names a method or a calibrator may have no value.
        if not text and (word in METHODS_BY_WORD or word in _FORECASTS):
            continue
        if not text and word in CACHE_WORDS and word not in _WITHOUT_VALUE:
            raise ModelError(f"'{word}=' has no value; write it without blanks, as in F=1 W=4 R=0.12")
        if entry is None:
            raise ModelError(f"'{word}={text}': {word} takes no value; write {word}")
        if entry in section:
            raise ModelError(f"'{word}={text}' says {entry} a second time in {line!r}; say it once")
        section[entry] = _parse_word_value(text)
    if "taylorseer_reach" in section and "enable_taylorseer" not in section:
        raise ModelError(
            f"reach={section['taylorseer_reach']} is how far the forecast of taylor goes; add taylor=1, or leave it out"
        )
    return parse_cache_section(section)


def _parse_word_value(text: str) -> Any:
    """Parse a number or a truth value; "" is true. Return other text unchanged."""
    if text in ("", "true", "false"):
        return text != "false"
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text
