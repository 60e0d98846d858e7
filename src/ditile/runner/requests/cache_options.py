"""The options of `ditile generate` for caches, quantization and LoRAs: the flags that cache-dit's examples document."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from ditile.cache.cache_dit import QuantType, parse_quantize_config
from ditile.cache.config import (
    CACHE_WORDS,
    CacheConfig,
    DBCacheConfig,
    Fields,
    FittedScheduleConfig,
    TaylorSeerCalibratorConfig,
    merge_configs,
)
from ditile.cache.config_text import (
    CALIBRATOR_CONFIGS,
    load_configs,
    parse_cache_line,
    parse_cache_section,
)
from ditile.cache.fitted.schedule import Schedule
from ditile.distributed import env
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.extras import require_extra, require_quantizer
from ditile.plan.flag_parser import format_flag
from ditile.plan.option_classes import CallArguments, JsonObject, define_option
from ditile.plan.plan import AXES, Plan
from ditile.runner.model_files import DENOISERS, TRANSFORMER

CACHE_FLAGS = {row.flag: row for row in CACHE_WORDS.values() if row.flag}
"""Field of `CacheOptions` -> the field of a config that it sets."""

DEGREE_BY_PARALLEL_TYPE = {"tp": "tensor", "ulysses": "ulysses", "ring": "ring"}
"""Value of --parallel-type -> the degree of `Plan`."""

_CACHE_SETTINGS = (*CACHE_FLAGS, *CALIBRATOR_CONFIGS)
"""The flags that are settings of a cache."""

_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_CACHE_SETTINGS, ("cache", "prune", "config")),
    "taylorseer_order": ("taylorseer", "config"),
    "quantize_type": ("quantize",),
    "fuse_lora": ("lora",),
}
"""A flag -> the flags of which at least one must be given too; without them the flag would have no effect."""


class LoraChoice(NamedTuple):
    """A LoRA in the form of an option, `FILE:0.8` or `transformer_2=FILE:0.8`.

    Attributes:
        source: a file, a folder or a hub id.
        scale: the factor of what the LoRA adds.
        component: the transformer that it is loaded into.
    """

    source: str
    scale: float
    component: str = TRANSFORMER

    @classmethod
    def parse(cls, text: str, known: Collection[str] | None = None) -> LoraChoice:
        """Parse the text of an option. A text without a scale has the scale 1.

        Args:
            text: the text of the option.
            known: the names that the LoRA may have; by default the text has a file, a folder or a hub id.

        Raises:
            ModelError: if the text after the last colon is not a finite number, or the text before a = is not a
                transformer, and no LoRA has the whole name.
        """
        is_source: Callable[[str], bool] = os.path.exists
        if known is not None:
            is_source = known.__contains__
        component, equals, rest = text.partition("=")
        # The name of a file may have this sign too.
        if equals and component.isidentifier() and not is_source(text.rpartition(":")[0] or text):
            if component not in DENOISERS:
                raise ModelError(
                    f"lora={text!r}: a LoRA is loaded into {' or '.join(DENOISERS)}, and into the text encoders with "
                    f"the first one; try {TRANSFORMER}={rest}"
                )
            return cls.parse(rest, known)._replace(component=component)
        if known is None:
            # The shell does not expand ~ after the = of a flag.
            text = os.path.expanduser(text)
        source, colon, scale_text = text.rpartition(":")
        # The name of a file may have a colon, and a path with the letter of a drive has one.
        if not colon or is_source(text) or re.search(r"[/\\]", scale_text):
            return cls(text, 1.0)
        try:
            scale = float(scale_text)
        except ValueError:
            scale = math.nan
        if not source or not math.isfinite(scale):
            raise ModelError(f"lora={text!r}: {scale_text!r} is not a scale; try {source or 'FILE'}:0.8")
        return cls(source, scale)

    def describe(self, name_source: Callable[[str], str] = str) -> str:
        """Return the option's text for this LoRA, with the name that `name_source` gives to its source."""
        name = name_source(self.source)
        if self.component != TRANSFORMER:
            name = f"{self.component}={name}"
        if self.scale == 1:
            return name
        return f"{name}:{self.scale!r}"


def define_cache_flag(name: str, metavar: str | None = "N") -> Any:
    """Define an option with the default of a config's field."""
    row = CACHE_FLAGS[name]
    default = row.config.__dataclass_fields__[str(row.field)].default
    return define_option(default, row.help, aliases=row.aliases, metavar=metavar)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions(Fields):
    """The options for cache, quantization and LoRA. A flag wins over what --config says.

    Raises:
        ModelError: if a value is out of its range, or a flag needs another one that is not given.
        LoadError: if the file of --config cannot be read.
    """

    cache: bool = define_option(False, "leave out blocks whose work hardly changes (DBCache)")
    prune: bool = define_option(False, "cache each block by itself (DBPrune); implies --cache")
    Fn: int = define_cache_flag("Fn")
    Bn: int = define_cache_flag("Bn")
    rdt: float = define_cache_flag("rdt", "X")
    max_warmup_steps: int = define_cache_flag("max_warmup_steps")
    warmup_interval: int = define_cache_flag("warmup_interval")
    max_cached_steps: int = define_cache_flag("max_cached_steps")
    max_continuous_cached_steps: int = define_cache_flag("max_continuous_cached_steps")
    taylorseer: bool = define_option(False, "forecast what is left out by a polynomial (TaylorSeer)")
    taylorseer_order: int = define_cache_flag("taylorseer_order")
    foca: bool = define_option(False, "forecast it by slopes, corrected (FoCa)")
    dmd: bool = define_option(False, "forecast it by exponentials (dynamic mode decomposition)")
    steps_mask: str | None = define_cache_flag("steps_mask", "MASK")
    steps_policy: Literal["dynamic", "static"] = define_cache_flag("steps_policy", None)
    cache_line: str | None = define_option(
        None,
        "the cache in one line, such as steps=10 or 'F=1 W=4 R=0.12 taylor=1', or none; see docs/caching.md",
    )
    schedule: str | None = define_option(
        None,
        "a file of ditile fit: steps that call the model; half of them, or as many as --cache-line steps=N says",
        reads=True,
    )
    quantize: bool = define_option(False, "keep weights in 8 or 4 bits", aliases=("-q",))
    quantize_type: QuantType = define_option(
        "float8_weight_only", f"how: {', '.join(get_args(QuantType))}", metavar="TYPE"
    )
    parallel_type: Literal["tp", "ulysses", "ring"] | None = define_option(
        None, "divide over all ranks that torchrun started", aliases=("--parallel",)
    )
    disable_compute_comm_overlap: bool = define_option(
        False, "do not let a compiled model compute while it exchanges", aliases=("--dcco",)
    )
    lora: tuple[str, ...] | None = define_option(
        None,
        "a LoRA: a file, a folder or a hub id; transformer_2=FILE for the second of two transformers; once more for "
        "each further one",
        metavar="[NAME=]FILE[:SCALE]",
        reads=lambda text: LoraChoice.parse(text).source,
        repeats=True,
    )
    fuse_lora: bool = define_option(False, "add the LoRAs to the weights")
    track_memory: bool = define_option(False, "report too what stale keys and caches held")
    perf: bool = define_option(False, "generate each image 1 + 3 times, and report the medians of the 3")
    config: str | None = define_option(
        None,
        "a YAML or JSON file of cache, parallelism and quantization settings (docs/caching.md)",
        reads=True,
    )

    def __post_init__(self) -> None:
        Fields.__post_init__(self)
        for name, needed in _NEEDS.items():
            if name in self.given and self.given.isdisjoint(needed):
                flags = " or ".join(map(format_flag, needed))
                raise ModelError(f"{format_flag(name)} {getattr(self, name)} is for {flags}, which is not given")
        for choice in self.loras.values():
            require_extra("lora", f"lora={choice.source!r}")
        # A wrong file of --config, or a missing package, is refused before ranks start.
        arguments = self.build_cache_arguments()
        if "quantize_config" not in arguments:
            return
        config = parse_quantize_config(arguments["quantize_config"])
        for part in (config, *config.by_component().values()):
            for quant_type in (part.quant_type, *part.precision_plan.values()):
                require_quantizer(quant_type)

    def build_cache_arguments(self) -> CallArguments:
        """Build the keyword arguments of `enable_cache`, from --config and the flags.

        Returns:
            cache_config, None without a cache; and calibrator_config, quantize_config and attention_backend if they
            are given. For the division over ranks see `collect_plan_values`.

        Raises:
            LoadError: if the file cannot be read.
            ModelError: if a value is not known or out of its range.
        """
        arguments = self._load_config_file()
        # This entry belongs to `collect_plan_values`.
        arguments.pop("parallelism_config", None)
        # --schedule goes with a line that says how many steps compute.
        line = self.cache_line
        if line is not None:
            others = self.given.intersection(("cache", "prune", *_CACHE_SETTINGS))
            if others:
                raise ModelError(
                    f"--cache-line {line!r} says how to cache, and {format_flag(min(others))} too; give one of them"
                )
            arguments.pop("calibrator_config", None)
            arguments |= parse_cache_line(line)
        if self.schedule is not None:
            config = arguments["cache_config"]
            is_other = config is not None and not isinstance(config, FittedScheduleConfig)
            if is_other or self.cache or self.prune:
                raise ModelError(
                    f"--schedule {self.schedule} is a cache, and another one is given too; give one of them"
                )
            # A file that is not a schedule is refused before ranks start.
            Schedule.read(self.schedule)
        section = self._collect_section(arguments)
        if section:
            configs = parse_cache_section(section)
            if self._keeps_method(arguments["cache_config"]):
                configs.pop("cache_config")
            for name, config in configs.items():
                arguments[name] = merge_configs(arguments.get(name), config)
        if self.quantize:
            arguments["quantize_config"] = arguments.get("quantize_config", {}) | {"quant_type": self.quantize_type}
        return arguments

    def _keeps_method(self, method: CacheConfig | None) -> bool:
        """Return whether the flags keep the method of the config file, and change only its forecast.

        Raises:
            ModelError: if a flag is for another method.
        """
        if method is None or isinstance(method, DBCacheConfig) or self.cache or self.prune or self.schedule:
            return False
        for name, row in CACHE_FLAGS.items():
            if name in self.given and row.config is DBCacheConfig:
                raise ModelError(
                    f"{format_flag(name)} {getattr(self, name)} is for DBCache, and {self.config} has "
                    f"{type(method).__name__}; leave it out, or add --cache"
                )
        return True

    def _collect_section(self, configs: CallArguments) -> JsonObject:
        """Collect the flags of a cache, as the cache_config of a file.

        Args:
            configs: the configs of the file, which the flags change.

        Raises:
            ModelError: if a flag is for another method, or another forecast, than the file's.
        """
        section: JsonObject = {}
        for name in CALIBRATOR_CONFIGS:
            if getattr(self, name):
                section[f"enable_{name}"] = True
        for name, row in CACHE_FLAGS.items():
            if name in self.given:
                section[str(row.field)] = getattr(self, name)
        if "taylorseer_order" in section and not self.taylorseer:
            if not isinstance(configs.get("calibrator_config"), TaylorSeerCalibratorConfig):
                raise ModelError(f"--taylorseer-order {self.taylorseer_order} is for --taylorseer; add it")
            section["enable_taylorseer"] = True
        if self.schedule is not None:
            section |= {"cache_type": "schedule", "schedule": self.schedule}
        elif self.prune:
            section["cache_type"] = "dbprune"
        elif section or self.cache:
            section["cache_type"] = "dbcache"
        return section

    @property
    def loras(self) -> dict[str, LoraChoice]:
        """Return the LoRAs of every call, by the names of their adapters. Raises `ModelError` if a scale is not a
        number."""
        return {f"lora_{number}": LoraChoice.parse(text) for number, text in enumerate(self.lora or (), 1)}

    @property
    def lora_scales(self) -> dict[str, float]:
        """Return the scales of the LoRAs of every call, by the names of their adapters."""
        return {name: choice.scale for name, choice in self.loras.items()}

    def describe_settings(self, name_source: Callable[[str], str] = str) -> JsonObject:
        """Describe the settings with an effect on the image, in JSON types. Empty if there are none.

        Args:
            name_source: returns a name that others may see for a LoRA's file, folder or hub id.
        """
        arguments = self.build_cache_arguments()
        settings = {}
        for name in ("cache_config", "calibrator_config"):
            config = arguments.get(name)
            if config is not None:
                settings[name] = {"kind": type(config).__name__} | config.values()
        if "quantize_config" in arguments:
            settings["quantize_config"] = dict(arguments["quantize_config"])
        if self.lora is not None:
            settings["lora"] = ", ".join(choice.describe(name_source) for choice in self.loras.values())
            settings["fuse_lora"] = self.fuse_lora
        return settings

    def choose_attention_backend(self, flag_value: str | None) -> str | None:
        """Choose the attention kernel by its own flag, otherwise by --config."""
        arguments = self._load_config_file()
        parallelism = arguments.get("parallelism_config")
        name = flag_value or arguments.get("attention_backend")
        if name is None and parallelism is not None:
            name = parallelism.attention_backend
        return name

    def collect_plan_values(self, flag_values: JsonObject) -> JsonObject:
        """Collect the values of a `Plan` from its own flags, from --parallel-type, and from --config.

        Raises:
            PlanError: if --parallel-type is given without torchrun, or the other degrees do not divide its ranks.
        """
        parallelism = self._load_config_file().get("parallelism_config")
        values: JsonObject = {}
        if parallelism is not None:
            defaults = Plan().to_dict()
            for name, value in parallelism.to_plan().to_dict().items():
                if value != defaults[name]:
                    values[name] = value
        # A flag wins over the file.
        values |= flag_values
        degree = DEGREE_BY_PARALLEL_TYPE.get(self.parallel_type or "", "")
        if not degree or degree in values:
            return values
        place = env.read_torchrun_place()
        if place is None:
            raise PlanError(
                f"--parallel-type {self.parallel_type} divides over the ranks that torchrun started, and there are "
                f"none; start it with torchrun, or say how many: {format_flag(degree)} 2"
            )
        other_ranks: int = math.prod(values.get(axis, 1) for axis in AXES)
        if place.world % other_ranks:
            raise PlanError(
                f"--parallel-type {self.parallel_type}: {other_ranks} of the other degrees do not divide "
                f"{place.world} rank(s); start a multiple of {other_ranks}"
            )
        return values | {degree: place.world // other_ranks}

    def _load_config_file(self) -> CallArguments:
        arguments = {"cache_config": None}
        if self.config is not None:
            for name, config in load_configs(self.config).items():
                if config is not None:
                    arguments[name] = config
        return arguments
