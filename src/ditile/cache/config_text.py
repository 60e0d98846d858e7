"""Reads and writes a cache as text: a config file, or one line.

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

A line has the settings of cache and calibrator. `--caches` takes lines, and tables of measurements show them.

    F=1 W=4 R=0.12 MC=3 taylor=1         short names, as in what `strify` returns
    F=0 W=2 R=1 MC=4 taylor=1 reach=0.5  no block runs to decide; forecasts go half a gap beyond the last computed step
    F=1 mask=fast policy=static dmd=6    a preset of steps, and another calibrator
    steps=10                             a fitted schedule: 10 steps call the model; schedule=FILE names another one
    sea=0.3 MC=1                         another method, by its own word
    none                                 no cache

docs/caching.md explains all words, `CACHE_WORDS` lists them. Fields of `DBCacheConfig` work by their own names too;
after `prune` the line stands for a `DBPruneConfig`, and its fields work too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
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
from ditile.cache.step_mask import parse_step_mask
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
        words: each names it in a line. Without one of them the method of a line is DBCache.
        flag_help: what `--help` says of the flag with the name of the first word; "" where there is no flag.
        compared: what a comparison of methods calls it -> the settings there, each a cache in one line.
    """

    name: str
    config: type[CacheConfig]
    words: tuple[str, ...] = ()
    flag_help: str = ""
    compared: Mapping[str, tuple[str, ...]] = MappingProxyType({})


CACHE_METHODS = (
    CacheMethod("schedule", FittedScheduleConfig, ("steps", "schedule")),
    CacheMethod(
        "dbcache",
        DBCacheConfig,
        compared={
            "step mask": ("F=0 W=3 R=1 MC=1 taylor=1 reach=0.5", "F=0 W=3 R=1 MC=2 taylor=1 reach=0.5"),
            "DBCache": ("F=1 W=4 R=0.12 taylor=1", "F=1 W=4 R=0.25 taylor=1"),
        },
    ),
    CacheMethod("dbprune", DBPruneConfig),
    CacheMethod("magcache", MagCacheConfig, ("mag",), "leave out steps by a table of ratios (MagCache), to this error"),
    CacheMethod(
        "seacache",
        SeaCacheConfig,
        ("sea",),
        "leave out steps while the filtered latents change less than this (SeaCache)",
        {"SeaCache": ("sea=0.2", "sea=0.3", "sea=0.5")},
    ),
    CacheMethod(
        "spectrum",
        SpectrumConfig,
        ("spectrum",),
        "forecast steps in windows that grow by this at each computed one (Spectrum)",
        {"Spectrum": ("spectrum=0.75", "spectrum=3")},
    ),
    CacheMethod(
        "easycache",
        EasyCacheConfig,
        ("easy",),
        "leave out calls of the model while they should change less than this (EasyCache)",
        {"EasyCache": ("easy=0.02", "easy=0.05", "easy=0.1")},
    ),
    CacheMethod(
        "gate",
        GuidanceGateConfig,
        ("gate",),
        "after this share of the steps run only the guidance branch with the prompt",
        {"gating": ("gate=0.8", "gate=0.6", "gate=0.5")},
    ),
)
"""All methods; a new one is a row here."""
METHOD_CONFIGS: dict[str, type[CacheConfig]] = {}
for _method in CACHE_METHODS:
    METHOD_CONFIGS |= dict.fromkeys(_method.words, _method.config)
"""A word by which a line names a method -> its config."""
MAX_VALUES = 100_000
MAX_DEPTH = 32
MAX_BITS = 1024
"""The most values, levels and bits of a number in a file of settings, its aliases expanded: more than settings need."""
NO_CACHE = "none"
"""The line that stands for no cache."""

_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
_CACHE_CONFIGS = {method.name: method.config for method in CACHE_METHODS}
_UNUSED = ("force_reduce_calibrator_vram",)
"""Entries of cache_config that cache-dit has, and that change nothing here."""
_PRUNE_FIELDS = set(DBPruneConfig.__dataclass_fields__) - set(DBCacheConfig.__dataclass_fields__)
_FORECASTS = ("taylor", "dmd", "foca")
_WITHOUT_VALUE = ("resets", "prune", *_FORECASTS)
"""The words that need no value."""


ConfigSource = str | PathLike[str] | Mapping[str, Any]
"""A `.json` file, or one in YAML; or its content."""


@checked()
def load_configs(path_or_dict: ConfigSource, return_dict: bool = True, *, reset: bool = False) -> Any:
    """Load the keyword arguments of `enable_cache` from a file, or from its content.

    Args:
        path_or_dict: a `.json` file, or one in YAML; or its content. A file without sections is a cache_config.
        return_dict: False returns only the values, in the order below.
        reset: accepted and not used: a config knows the fields that it was given.

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
        configs |= _parse_cache_section(_read_section(content, "cache_config"))
        if configs["calibrator_config"] is not None and "calibrator_config" in content:
            raise ModelError("cache_config and calibrator_config name a calibrator each; leave one of them out")
    if "calibrator_config" in content:
        configs["calibrator_config"] = _parse_calibrator_section(_read_section(content, "calibrator_config"))
    if "parallelism_config" in content:
        configs["parallelism_config"] = _parse_parallelism_section(_read_section(content, "parallelism_config"))
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
        _check_amount(content)
    except RecursionError:
        raise LoadError(f"the config {str(path)!r} is not {language}: it is nested too deep") from None
    # PyYAML raises the last three for a value that does not fit its tag, such as `!!bool x`.
    except (ValueError, yaml.YAMLError, LookupError, AttributeError, TypeError) as error:
        raise LoadError(f"the config {str(path)!r} is not {language}: {join_error_lines(error)}") from error
    if not isinstance(content, Mapping):
        raise LoadError(f"the config {str(path)!r} has no sections; try some of {', '.join(_SECTIONS)}")
    return content


def _check_amount(content: Any) -> None:
    """Raise `ValueError` for more or deeper values than settings have. Aliases of YAML may stand for billions."""
    level = [content]
    count = 0
    # Level by level: each value of an alias is counted as often as it is used, without following it to its end.
    for _ in range(MAX_DEPTH):
        inner = []
        for value in level:
            # No message could show it: Python refuses to write out a number of thousands of digits.
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


def _parse_cache_section(values: JsonObject) -> CallArguments:
    """Parse the cache_config. Returns the calibrator_config too, where the section names a calibrator."""
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
    # It may be a member of cache-dit's enum, as CacheType.DBCache.
    cache_type = str(fields.pop("cache_type", "")).rpartition(".")[2].lower()
    if cache_type:
        check_known(f"cache_type={cache_type!r}", cache_type, _CACHE_CONFIGS)
    elif _PRUNE_FIELDS.isdisjoint(fields):
        cache_type = "dbcache"
    else:
        cache_type = "dbprune"
    configs: CallArguments = {"cache_config": _make_cache_config(fields, _CACHE_CONFIGS[cache_type])}
    for name in enabled:
        configs["calibrator_config"] = CALIBRATOR_CONFIGS[name](**calibrator_fields)
    return configs


def _list_calibrator_entries() -> dict[str, tuple[str, str]]:
    """Map each entry of cache_config that a calibrator has to (calibrator, its field). A switch has "" for a field."""
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


def _make_cache_config(fields: JsonObject, config: type[CacheConfig]) -> CacheConfig:
    """Make the config. Its mask may be text, such as `6,1,1/1,2`."""
    mask = fields.get("steps_computation_mask")
    if isinstance(mask, str):
        fields = fields | {"steps_computation_mask": parse_step_mask(mask)}
    made: CacheConfig = config(**fields)
    return made


def _parse_calibrator_section(values: JsonObject) -> Calibration:
    """Return the config of the named type, or of the type with these fields."""
    calibrator = values.get("calibrator_type")
    if not calibrator:
        calibrator = "taylorseer"
        for field in values:
            prefix = field.partition("_")[0]
            if prefix in CALIBRATOR_CONFIGS:
                calibrator = prefix
                break
    check_known(f"calibrator_type={calibrator!r}", calibrator, CALIBRATOR_CONFIGS)
    return CALIBRATOR_CONFIGS[calibrator](**values)


def _parse_parallelism_section(values: JsonObject) -> RankDivision:
    for name in AXES:
        # A file may say ulysses for ulysses_size.
        short_name = name.removesuffix("_size")
        if short_name in values:
            values[name] = values.pop(short_name)
    return plan_division(**values)


_SECTIONS = ("cache_config", "calibrator_config", "parallelism_config", "attention_backend", "quantize_config")
_FLAT_ENTRIES = {"cache_type", *_UNUSED, *_CALIBRATOR_ENTRIES}
for _config in _CACHE_CONFIGS.values():
    _FLAT_ENTRIES |= set(_config.__dataclass_fields__)
"""The entries of a config file without sections, which is one cache_config."""


def parse_cache_line(line: str) -> CallArguments:
    """Parse a line into keyword arguments of `enable_cache`. For `none` the cache_config is None.

    Raises:
        ModelError: if the line is empty, a word or value is not known, a word is there twice, there are two
            methods or calibrators, or `reach` is there without `taylor`.
    """
    if line.strip() == NO_CACHE:
        return {"cache_config": None}
    if not line.strip():
        raise ModelError(
            f"a cache in one line is such as 'F=1 W=4 R=0.12 taylor=1', or {NO_CACHE!r}; this line is empty"
        )
    method = _find_method(line)
    words = _split_cache_line(line, method)
    names = [name for name in _FORECASTS if name in words]
    if len(names) > 1:
        raise ModelError(f"{line!r} has {len(names)} calibrators; name one")
    if "reach" in words and names != ["taylor"]:
        raise ModelError(
            f"reach={words['reach']} is how far the forecast of taylor goes; add taylor=1, or leave it out"
        )
    if words.pop("prune", False):
        method = DBPruneConfig
    fields = {}
    for word, value in words.items():
        # The word that names a method may stand without its value.
        if word not in (*_FORECASTS, "reach") and not (word in METHOD_CONFIGS and value is True):
            fields[_get_field(word, method)] = value
    configs: CallArguments = {"cache_config": _make_cache_config(fields, method)}
    for name in names:
        row = CACHE_WORDS[name]
        value = words[name]
        if row.field is None and value is not True:
            raise ModelError(f"'{name}={value}': {name} takes no value; write {name}")
        calibrator_fields = {}
        # A calibrator without a value has its defaults.
        if value is not True:
            calibrator_fields[str(row.field)] = value
        if "reach" in words:
            calibrator_fields["taylorseer_reach"] = words["reach"]
        configs["calibrator_config"] = row.config(**calibrator_fields)
        check_one_forecast(configs["cache_config"], configs["calibrator_config"])
    return configs


def _find_method(line: str) -> type[CacheConfig]:
    """Return the config class for the method in a line. Without a method's word it is DBCache."""
    for word in line.split():
        name, _, _ = word.partition("=")
        if name in METHOD_CONFIGS:
            return METHOD_CONFIGS[name]
    return DBCacheConfig


def _get_field(word: str, method: type[CacheConfig]) -> str:
    """Return the field for a word of a line. Fields work by their own names too."""
    if word in method.WORDS:
        return method.WORDS[word]
    if word not in CACHE_WORDS:
        return word
    return CACHE_WORDS[word].field or word


def _split_cache_line(line: str, method: type[CacheConfig]) -> JsonObject:
    """Split `F=1 foca` into `{"F": 1, "foca": True}`.

    Raises:
        ModelError: if a word is not known, lacks its value, or is there twice, by whichever name.
    """
    # A word of one method is unknown to the others.
    known = list(CACHE_WORDS)
    fields = DBPruneConfig.__dataclass_fields__
    if method is not DBCacheConfig:
        known = [*method.WORDS, *_FORECASTS, "reach"]
        fields = method.__dataclass_fields__
    values: JsonObject = {}
    for word in line.split():
        name, _, value = word.partition("=")
        if name not in known and name not in fields:
            raise ModelError(
                f"{word!r} is not a word of a cache in one line; known are {', '.join(known)}, and the fields of "
                f"{method.__name__} by their names"
            )
        if not value and name in CACHE_WORDS and name not in _WITHOUT_VALUE:
            raise ModelError(f"{word!r} has no value; write it without blanks, as in F=1 W=4 R=0.12")
        if _get_field(name, method) in [_get_field(earlier, method) for earlier in values]:
            raise ModelError(f"{word!r} says {name} a second time in {line!r}; say it once")
        values[name] = _parse_word_value(value)
    return values


def _parse_word_value(text: str) -> Any:
    """Parse a number or a truth value. Other text is returned unchanged."""
    if text in ("", "true", "false"):
        return text != "false"
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text
