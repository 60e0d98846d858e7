"""What `ditile generate` takes about doing less: the flags that cache-dit's examples document, with their defaults."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ditile.cache.config import (
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    Fields,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
    merge_configs,
)
from ditile.cache.config_text import load_configs, parse_cache_line
from ditile.cache.step_mask import parse_step_mask
from ditile.cli.options import GenerateOptions, RunOptions
from ditile.distributed import env
from ditile.errors import ModelError, PlanError
from ditile.plan.flags import define_option, format_flag, iter_field_readers
from ditile.plan.plan import AXES, Plan

QUANTIZE_TYPES = (
    "float8",
    "float8_weight_only",
    "int8",
    "int8_weight_only",
    "int4",
    "int4_weight_only",
    "int4_w4a4",
    "bitsandbytes_4bit",
    "fp8_w8a8_dq",
    "fp8_w8a16_wo",
    "int8_w8a8_dq",
    "int8_w8a16_wo",
    "int4_w4a8_dq",
    "int4_w4a16_wo",
    "int4_w4a4_dq",
)
"""What --quantize-type takes; whether it runs here is known when weights are there."""

CACHE_CONFIG_FIELDS = {
    "Fn": "Fn_compute_blocks",
    "Bn": "Bn_compute_blocks",
    "rdt": "residual_diff_threshold",
    "max_warmup_steps": "max_warmup_steps",
    "warmup_interval": "warmup_interval",
    "max_cached_steps": "max_cached_steps",
    "max_continuous_cached_steps": "max_continuous_cached_steps",
    "steps_mask": "steps_computation_mask",
    "steps_policy": "steps_computation_policy",
}
"""Fields of `Cache` that are fields of `DBCacheConfig`."""

DEGREE_BY_PARALLEL_TYPE = {"tp": "tensor", "ulysses": "ulysses", "ring": "ring"}
"""What --parallel-type names -> the degree of `Plan`."""

_CALIBRATOR_FLAGS: dict[str, type[Calibration]] = {
    "taylorseer": TaylorSeerCalibratorConfig,
    "foca": FoCaCalibratorConfig,
    "dmd": DMDCalibratorConfig,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions(Fields):
    """What to leave out, and how few bits to compute it in. A flag wins over what --config says.

    Raises:
        ModelError: if a value is out of its range, or belongs to something that is not asked for.
    """

    cache: bool = define_option(False, "leave out blocks whose work hardly changes (DBCache)")
    prune: bool = define_option(False, "cache each block by itself (DBPrune); implies --cache")
    Fn: int = define_option(8, "first blocks, which always compute", metavar="N")
    Bn: int = define_option(0, "last blocks, which always compute", metavar="N")
    rdt: float = define_option(0.08, "leave out where the first blocks' work changes less than this", metavar="X")
    max_warmup_steps: int = define_option(8, "first steps, which compute", metavar="N", aliases=("--w",))
    warmup_interval: int = define_option(1, "compute every N-th of the warmup steps", metavar="N", aliases=("--wi",))
    max_cached_steps: int = define_option(-1, "cached steps at most; -1 is no limit", metavar="N", aliases=("--mc",))
    max_continuous_cached_steps: int = define_option(
        -1, "cached steps in a row at most; -1 is no limit", metavar="N", aliases=("--mcc",)
    )
    taylorseer: bool = define_option(False, "forecast what is left out by a polynomial (TaylorSeer)")
    taylorseer_order: int = define_option(1, "its degree", metavar="N", aliases=("-order",))
    foca: bool = define_option(False, "forecast it by slopes, corrected (FoCa)")
    dmd: bool = define_option(False, "forecast it by exponentials (dynamic mode decomposition)")
    steps_mask: str | None = define_option(
        None, "steps that compute: slow, medium, fast, ultra, or bins such as 6,1,1,1,1/1,2,5,5,5", metavar="MASK"
    )
    steps_policy: Literal["dynamic", "static"] = define_option(
        "dynamic",
        "steps that the mask lets go are left out where little changes, or always",
        choices=("dynamic", "static"),
    )
    cache_line: str | None = define_option(
        None,
        "the cache in one line, such as 'F=1 W=4 R=0.12 taylor=1', or none; its words are in docs/caching.md",
        metavar="LINE",
    )
    quantize: bool = define_option(False, "keep weights in 8 or 4 bits", aliases=("-q",))
    quantize_type: str = define_option("float8_weight_only", f"how: {', '.join(QUANTIZE_TYPES)}", metavar="TYPE")
    parallel_type: Literal["tp", "ulysses", "ring"] | None = define_option(
        None, "divide over all ranks that torchrun started", choices=("tp", "ulysses", "ring"), aliases=("--parallel",)
    )
    disable_compute_comm_overlap: bool = define_option(
        False, "do not let a compiled model compute while it exchanges", aliases=("--dcco",)
    )
    lora: str | None = define_option(None, "LoRA weights: a file, a folder or a hub id", metavar="FILE")
    fuse_lora: bool = define_option(False, "add the LoRA to the weights")
    track_memory: bool = define_option(False, "report too what stale keys and caches held")
    perf: bool = define_option(False, "draw each picture 1 + 3 times, and report the medians of the 3")
    config: str | None = define_option(
        None, "a YAML or JSON file of cache, parallelism and quantization settings (docs/caching.md)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        if self.cache_line is not None:
            self._check_cache_line(self.cache_line)
        named = [name for name in _CALIBRATOR_FLAGS if getattr(self, name)]
        if len(named) > 1:
            raise ModelError(f"{' and '.join(map(format_flag, named))}: there is one forecast; give one of them")
        if not (self.cache or self.prune or self.config):
            for name in (*CACHE_CONFIG_FIELDS, *_CALIBRATOR_FLAGS, "taylorseer_order"):
                if name in self.given:
                    raise ModelError(f"{format_flag(name)} says how to cache, and nothing is cached; add --cache")
        if "taylorseer_order" in self.given and not (self.taylorseer or self.config):
            raise ModelError(f"--taylorseer-order {self.taylorseer_order} is for --taylorseer; add it")
        if self.quantize_type not in QUANTIZE_TYPES:
            raise ModelError(
                f"quantize_type={self.quantize_type!r} is not known; try one of {', '.join(QUANTIZE_TYPES)}"
            )
        if "quantize_type" in self.given and not self.quantize:
            raise ModelError(f"--quantize-type {self.quantize_type} is for --quantize; add it")
        if self.fuse_lora and self.lora is None:
            raise ModelError("--fuse-lora needs something to fuse; add --lora FILE")
        self.build_cache_arguments()

    def build_cache_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `enable_cache`, from --config and the flags.

        Returns:
            cache_config, None where nothing is to be cached; and calibrator_config, quantize_config and
            attention_backend where something says so. How ranks divide the work is in the plan: see `plan_values`.

        Raises:
            LoadError, ModelError: if the file, or a value, will not do.
        """
        arguments = self._load_config_file()
        arguments.pop("parallelism_config", None)
        if self.cache_line is not None:
            arguments.pop("calibrator_config", None)
            arguments |= parse_cache_line(self.cache_line)
        in_file = arguments.get("cache_config")
        if self.cache or self.prune or in_file is not None:
            arguments["cache_config"] = merge_configs(in_file, self._build_cache_config())
        if (calibrator := self._build_calibrator_config(arguments.get("calibrator_config"))) is not None:
            arguments["calibrator_config"] = calibrator
        if self.quantize:
            arguments["quantize_config"] = arguments.get("quantize_config", {}) | {"quant_type": self.quantize_type}
        return arguments

    def describe_settings(self) -> dict[str, Any]:
        """What of this changes a picture, as JSON types; empty if nothing does."""
        arguments, settings = self.build_cache_arguments(), {}
        for name in ("cache_config", "calibrator_config"):
            if (config := arguments.get(name)) is not None:
                settings[name] = {"kind": type(config).__name__} | config.values()
        if "quantize_config" in arguments:
            settings["quantize_config"] = dict(arguments["quantize_config"])
        if self.lora is not None:
            settings |= {"lora": self.lora, "fuse_lora": self.fuse_lora}
        return settings

    def choose_attention_backend(self, flag_value: str | None) -> str | None:
        """The attention kernel: its own flag's, else that of --config."""
        file_arguments = self._load_config_file()
        config = file_arguments.get("parallelism_config")
        in_file: str | None = file_arguments.get("attention_backend") or (config and config.attention_backend)
        return flag_value or in_file

    @property
    def cp_plan(self) -> Mapping[str, Any] | None:
        """What --config says is split over tokens."""
        config = self._load_config_file().get("parallelism_config")
        return None if config is None else config.cp_plan

    def collect_plan_values(self, flag_values: dict[str, Any]) -> dict[str, Any]:
        """The values of a `Plan`: those of its own flags, of --parallel-type, and of --config.

        Raises:
            PlanError: if --parallel-type names a degree and nothing says how many ranks there are.
        """
        place = env.read_torchrun_place()
        config = self._load_config_file().get("parallelism_config")
        values: dict[str, Any] = {}
        if config is not None:
            plan = config.to_plan()
            values = {name: value for name, value in plan.to_dict().items() if value != getattr(Plan(), name)}
        values |= flag_values
        if self.parallel_type is None or (degree := DEGREE_BY_PARALLEL_TYPE[self.parallel_type]) in values:
            return values
        if place is None:
            raise PlanError(
                f"--parallel-type {self.parallel_type} divides over the ranks that torchrun started, and there are "
                f"none; start it with torchrun, or say how many: {format_flag(degree)} 2"
            )
        others = math.prod(values.get(other, 1) for other in AXES)
        if place.world % others:
            raise PlanError(
                f"--parallel-type {self.parallel_type}: {others} of the other degrees do not divide "
                f"{place.world} rank(s); start a multiple of {others}"
            )
        return values | {degree: place.world // others}

    def _load_config_file(self) -> dict[str, Any]:
        return {"cache_config": None} if self.config is None else load_configs(self.config)

    def _check_cache_line(self, line: str) -> None:
        """Raises `ModelError` where something else says how to cache too, or the line cannot be read."""
        others = [
            name
            for name in ("cache", "prune", *CACHE_CONFIG_FIELDS, *_CALIBRATOR_FLAGS, "taylorseer_order")
            if name in self.given
        ]
        if others or self._load_config_file()["cache_config"] is not None:
            other = format_flag(others[0]) if others else f"--config {self.config}"
            raise ModelError(f"--cache-line {line!r} says how to cache, and {other} too; give one of them")
        parse_cache_line(line)

    def _build_cache_config(self) -> DBCacheConfig:
        """What the flags say of the cache."""
        values = {name: getattr(self, ours) for ours, name in CACHE_CONFIG_FIELDS.items() if ours in self.given}
        if self.steps_mask is not None:
            values["steps_computation_mask"] = parse_step_mask(self.steps_mask)
        return DBPruneConfig(**values) if self.prune else DBCacheConfig(**values)

    def _build_calibrator_config(self, in_file: Calibration | None) -> Calibration | None:
        order: dict[str, Any] = {"taylorseer_order": self.taylorseer_order} if "taylorseer_order" in self.given else {}
        for name, kind in _CALIBRATOR_FLAGS.items():
            if getattr(self, name):
                return merge_configs(in_file, kind(**order))
        if order and not isinstance(in_file, TaylorSeerCalibratorConfig):
            raise ModelError(f"--taylorseer-order {self.taylorseer_order} is for --taylorseer; add it")
        return None if in_file is None else in_file.reset(**order)


class CacheDitAlias(NamedTuple):
    """A flag that stands for a field of another set of options.

    Attributes:
        name: as in cache-dit.
        kind: whose field it is.
        field: its name.
        value: what a switch sets; None for a flag that takes a value.
    """

    name: str
    kind: type
    field: str
    value: Any = None


CACHE_DIT_ALIASES = (
    CacheDitAlias("prompt", GenerateOptions, "prompt"),
    CacheDitAlias("model_path", GenerateOptions, "model"),
    CacheDitAlias("attn", RunOptions, "attention"),
    CacheDitAlias("ulysses_anything", Plan, "uaa", True),
)
"""What else cache-dit documents; --steps, --height, --width, --negative-prompt and --uaa are our own names."""

_ALIAS_PREFIX = "cache_dit_"


def add_cache_dit_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the aliases, in a group of their own."""
    group = parser.add_argument_group("picture, plan and run, with the flags of cache-dit")
    for name, kind, field, value in CACHE_DIT_ALIASES:
        reader = next(read for one, read in iter_field_readers(kind) if one.name == field)
        ours = field.upper() if name == field else format_flag(field)
        add = functools.partial(
            group.add_argument, format_flag(name), dest=_ALIAS_PREFIX + name, default=argparse.SUPPRESS
        )
        if value is None:
            add(type=reader, metavar=field.upper(), help=f"as {ours}")
        else:
            add(action="store_true", help=f"as {ours}")


def list_cache_dit_flags() -> list[str]:
    """The aliases as `argparse` knows them."""
    return [format_flag(alias.name) for alias in CACHE_DIT_ALIASES]


def merge_alias_values(arguments: argparse.Namespace, kind: type, flag_values: dict[str, Any]) -> dict[str, Any]:
    """The values of a set of options: its own flags and the aliases.

    Raises:
        ModelError: if a flag and its alias say different things.
    """
    values = dict(flag_values)
    for name, options, field, value in CACHE_DIT_ALIASES:
        if options is not kind or not hasattr(arguments, _ALIAS_PREFIX + name):
            continue
        alias_value = getattr(arguments, _ALIAS_PREFIX + name) if value is None else value
        if field in flag_values and flag_values[field] != alias_value:
            raise ModelError(
                f"{format_flag(name)} says {field}={alias_value!r} and {field}={flag_values[field]!r} is said too; give one of them"
            )
        values[field] = alias_value
    return values
