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
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
    merged,
)
from ditile.cache.config_text import load_configs
from ditile.cache.fields import Fields
from ditile.cache.line import configs_of
from ditile.cache.step_mask import read
from ditile.cli.options import Generate, Run
from ditile.distributed import env
from ditile.errors import ModelError, PlanError
from ditile.plan.flags import flag, option, readers
from ditile.plan.plan import AXES, Plan

QUANTIZE_TYPES = (
    "float8", "float8_weight_only", "int8", "int8_weight_only", "int4", "int4_weight_only", "int4_w4a4",
    "bitsandbytes_4bit", "fp8_w8a8_dq", "fp8_w8a16_wo", "int8_w8a8_dq", "int8_w8a16_wo", "int4_w4a8_dq",
    "int4_w4a16_wo", "int4_w4a4_dq",
)  # fmt: skip
"""What --quantize-type takes; whether it runs here is known when weights are there."""

OF_CACHE = {
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

DEGREE_OF = {"tp": "tensor", "ulysses": "ulysses", "ring": "ring"}
"""What --parallel-type names -> the degree of `Plan`."""

_CALIBRATORS: dict[str, type[Calibration]] = {
    "taylorseer": TaylorSeerCalibratorConfig,
    "foca": FoCaCalibratorConfig,
    "dmd": DMDCalibratorConfig,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache(Fields):
    """What to leave out, and how few bits to compute it in. A flag wins over what --config says.

    Raises:
        ModelError: if a value is out of its range, or belongs to something that is not asked for.
    """

    cache: bool = option(False, "leave out blocks whose work hardly changes (DBCache)")
    prune: bool = option(False, "cache each block by itself (DBPrune); implies --cache")
    Fn: int = option(8, "first blocks, which always compute", metavar="N")
    Bn: int = option(0, "last blocks, which always compute", metavar="N")
    rdt: float = option(0.08, "leave out where the first blocks' work changes less than this", metavar="X")
    max_warmup_steps: int = option(8, "first steps, which compute", metavar="N", aliases=("--w",))
    warmup_interval: int = option(1, "compute every N-th of the warmup steps", metavar="N", aliases=("--wi",))
    max_cached_steps: int = option(-1, "cached steps at most; -1 is no limit", metavar="N", aliases=("--mc",))
    max_continuous_cached_steps: int = option(
        -1, "cached steps in a row at most; -1 is no limit", metavar="N", aliases=("--mcc",)
    )
    taylorseer: bool = option(False, "forecast what is left out by a polynomial (TaylorSeer)")
    taylorseer_order: int = option(1, "its degree", metavar="N", aliases=("-order",))
    foca: bool = option(False, "forecast it by slopes, corrected (FoCa)")
    dmd: bool = option(False, "forecast it by exponentials (dynamic mode decomposition)")
    steps_mask: str | None = option(
        None, "steps that compute: slow, medium, fast, ultra, or bins such as 6,1,1,1,1/1,2,5,5,5", metavar="MASK"
    )
    steps_policy: Literal["dynamic", "static"] = option(
        "dynamic", "steps that the mask lets go are left out where little changes, or always",
        choices=("dynamic", "static"),
    )  # fmt: skip
    cache_line: str | None = option(
        None, "the cache in one line, such as 'F=1 W=4 R=0.12 taylor=1', or none; its words are in docs/caching.md",
        metavar="LINE",
    )  # fmt: skip
    quantize: bool = option(False, "keep weights in 8 or 4 bits", aliases=("-q",))
    quantize_type: str = option(
        "float8_weight_only", f"how: {', '.join(QUANTIZE_TYPES)}", metavar="TYPE"
    )  # fmt: skip
    parallel_type: Literal["tp", "ulysses", "ring"] | None = option(
        None, "divide over all ranks that torchrun started", choices=("tp", "ulysses", "ring"), aliases=("--parallel",)
    )
    disable_compute_comm_overlap: bool = option(
        False, "do not let a compiled model compute while it exchanges", aliases=("--dcco",)
    )
    lora: str | None = option(None, "LoRA weights: a file, a folder or a hub id", metavar="FILE")
    fuse_lora: bool = option(False, "add the LoRA to the weights")
    track_memory: bool = option(False, "report too what stale keys and caches held")
    perf: bool = option(False, "draw each picture 1 + 3 times, and report the medians of the 3")
    config: str | None = option(
        None, "a YAML or JSON file of cache, parallelism and quantization settings (docs/caching.md)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        if self.cache_line is not None:
            self._check_line(self.cache_line)
        named = [name for name in _CALIBRATORS if getattr(self, name)]
        if len(named) > 1:
            raise ModelError(f"{' and '.join(map(flag, named))}: there is one forecast; give one of them")
        if not (self.cache or self.prune or self.config):
            for name in (*OF_CACHE, *_CALIBRATORS, "taylorseer_order"):
                if name in self.given:
                    raise ModelError(f"{flag(name)} says how to cache, and nothing is cached; add --cache")
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
        self.configs()

    def configs(self) -> dict[str, Any]:
        """The keyword arguments of `enable_cache`, from --config and the flags.

        Returns:
            cache_config, None where nothing is to be cached; and calibrator_config, quantize_config and
            attention_backend where something says so. How ranks divide the work is in the plan: see `plan_values`.

        Raises:
            LoadError, ModelError: if the file, or a value, will not do.
        """
        found = self._file()
        found.pop("parallelism_config", None)
        if self.cache_line is not None:
            found.pop("calibrator_config", None)
            found |= configs_of(self.cache_line)
        in_file = found.get("cache_config")
        if self.cache or self.prune or in_file is not None:
            found["cache_config"] = merged(in_file, self._cache())
        if (calibrator := self._calibrator(found.get("calibrator_config"))) is not None:
            found["calibrator_config"] = calibrator
        if self.quantize:
            found["quantize_config"] = found.get("quantize_config", {}) | {"quant_type": self.quantize_type}
        return found

    def settings(self) -> dict[str, Any]:
        """What of this changes a picture, as JSON types; empty if nothing does."""
        found, said = self.configs(), {}
        for name in ("cache_config", "calibrator_config"):
            if (config := found.get(name)) is not None:
                said[name] = {"kind": type(config).__name__} | config.values()
        if "quantize_config" in found:
            said["quantize_config"] = dict(found["quantize_config"])
        if self.lora is not None:
            said |= {"lora": self.lora, "fuse_lora": self.fuse_lora}
        return said

    def attention(self, own: str | None) -> str | None:
        """The attention kernel: its own flag's, else that of --config."""
        found = self._file()
        config = found.get("parallelism_config")
        in_file: str | None = found.get("attention_backend") or (config and config.attention_backend)
        return own or in_file

    @property
    def cp_plan(self) -> Mapping[str, Any] | None:
        """What --config says is split over tokens."""
        config = self._file().get("parallelism_config")
        return None if config is None else config.cp_plan

    def plan_values(self, own: dict[str, Any]) -> dict[str, Any]:
        """The values of a `Plan`: those of its own flags, of --parallel-type, and of --config.

        Raises:
            PlanError: if --parallel-type names a degree and nothing says how many ranks there are.
        """
        place = env.torchrun()
        config = self._file().get("parallelism_config")
        values: dict[str, Any] = {}
        if config is not None:
            plan = config.to_plan()
            values = {name: value for name, value in plan.to_dict().items() if value != getattr(Plan(), name)}
        values |= own
        if self.parallel_type is None or (degree := DEGREE_OF[self.parallel_type]) in values:
            return values
        if place is None:
            raise PlanError(
                f"--parallel-type {self.parallel_type} divides over the ranks that torchrun started, and there are "
                f"none; start it with torchrun, or say how many: {flag(degree)} 2"
            )
        others = math.prod(values.get(other, 1) for other in AXES)
        if place.world % others:
            raise PlanError(f"--parallel-type {self.parallel_type}: {others} of the other degrees do not divide "
                            f"{place.world} rank(s); start a multiple of {others}")  # fmt: skip
        return values | {degree: place.world // others}

    def _file(self) -> dict[str, Any]:
        return {"cache_config": None} if self.config is None else load_configs(self.config)

    def _check_line(self, line: str) -> None:
        """Raises `ModelError` where something else says how to cache too, or the line cannot be read."""
        others = [
            name for name in ("cache", "prune", *OF_CACHE, *_CALIBRATORS, "taylorseer_order") if name in self.given
        ]
        if others or self._file()["cache_config"] is not None:
            other = flag(others[0]) if others else f"--config {self.config}"
            raise ModelError(f"--cache-line {line!r} says how to cache, and {other} too; give one of them")
        configs_of(line)

    def _cache(self) -> DBCacheConfig:
        """What the flags say of the cache."""
        values = {name: getattr(self, ours) for ours, name in OF_CACHE.items() if ours in self.given}
        if self.steps_mask is not None:
            values["steps_computation_mask"] = read(self.steps_mask)
        return DBPruneConfig(**values) if self.prune else DBCacheConfig(**values)

    def _calibrator(self, in_file: Calibration | None) -> Calibration | None:
        order: dict[str, Any] = {"taylorseer_order": self.taylorseer_order} if "taylorseer_order" in self.given else {}
        for name, kind in _CALIBRATORS.items():
            if getattr(self, name):
                return merged(in_file, kind(**order))
        if order and not isinstance(in_file, TaylorSeerCalibratorConfig):
            raise ModelError(f"--taylorseer-order {self.taylorseer_order} is for --taylorseer; add it")
        return None if in_file is None else in_file.reset(**order)


class Alias(NamedTuple):
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


ALIASES = (
    Alias("prompt", Generate, "prompt"),
    Alias("model_path", Generate, "model"),
    Alias("attn", Run, "attention"),
    Alias("ulysses_anything", Plan, "uaa", True),
)
"""What else cache-dit documents; --steps, --height, --width, --negative-prompt and --uaa are our own names."""

_PREFIX = "cache_dit_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the aliases, in a group of their own."""
    group = parser.add_argument_group("picture, plan and run, with the flags of cache-dit")
    for name, kind, field, value in ALIASES:
        reader = next(read for one, read in readers(kind) if one.name == field)
        ours = field.upper() if name == field else flag(field)
        add = functools.partial(group.add_argument, flag(name), dest=_PREFIX + name, default=argparse.SUPPRESS)
        if value is None:
            add(type=reader, metavar=field.upper(), help=f"as {ours}")
        else:
            add(action="store_true", help=f"as {ours}")


def names() -> list[str]:
    """The aliases as `argparse` knows them."""
    return [flag(alias.name) for alias in ALIASES]


def with_aliases(arguments: argparse.Namespace, kind: type, own: dict[str, Any]) -> dict[str, Any]:
    """The values of a set of options: its own flags and the aliases.

    Raises:
        ModelError: if a flag and its alias say different things.
    """
    found = dict(own)
    for name, of, field, value in ALIASES:
        if of is not kind or not hasattr(arguments, _PREFIX + name):
            continue
        given = getattr(arguments, _PREFIX + name) if value is None else value
        if field in own and own[field] != given:
            raise ModelError(
                f"{flag(name)} says {field}={given!r} and {field}={own[field]!r} is said too; give one of them"
            )
        found[field] = given
    return found
