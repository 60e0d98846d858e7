"""Flags of xDiT and cache-dit, with the meaning and the checks that they have there.

Each stands for a field of ditile's options. `--split_scheme`, `--ulysses` and `--ring` of xDiT, and `--steps`,
`--height`, `--width`, `--negative-prompt` and `--uaa` of cache-dit need no alias: ditile has the same names, and `-`
and `_` are the same in a flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from ditile.plan.errors import ModelError, PlanError
from ditile.plan.flags import format_flag, iter_field_readers
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.command_options import RunOptions
from ditile.runner.requests.options import GenerateOptions


class FlagAlias(NamedTuple):
    """A flag that stands for a field of a set of options.

    Attributes:
        name: the flag in the other tool.
        kind: the class of options that has the field.
        field: the name of the field.
        value: what a switch sets; None for a flag that takes a value.
    """

    name: str
    kind: type
    field: str
    value: Any = None


XDIT_ALIASES = (
    FlagAlias("data_parallel_degree", Plan, "data"),
    FlagAlias("use_cfg_parallel", Plan, "cfg", 2),
    FlagAlias("pipefusion_parallel_degree", Plan, "pipefusion"),
    FlagAlias("num_pipeline_patch", Plan, "patches"),
    FlagAlias("attn_layer_num_for_pp", Plan, "stage_blocks"),
    FlagAlias("warmup_steps", Plan, "warmup"),
    FlagAlias("ulysses_degree", Plan, "ulysses"),
    FlagAlias("ring_degree", Plan, "ring"),
    FlagAlias("tensor_parallel_degree", Plan, "tensor"),
    FlagAlias("use_parallel_vae", Plan, "vae", "rows"),
)
CACHE_DIT_ALIASES = (
    FlagAlias("prompt", GenerateOptions, "prompt"),
    FlagAlias("model_path", GenerateOptions, "model"),
    FlagAlias("attn", RunOptions, "attention"),
    FlagAlias("ulysses_anything", Plan, "uaa", True),
)

_PREFIX = "alias_"
_MULTI_VALUE_FLAG = "attn_layer_num_for_pp"
_MULTI_VALUE_HELP = ", with spaces: 7 7 8; what is no flag, such as a prompt, stands before it"


def add_alias_arguments(parser: argparse.ArgumentParser, kinds: Sequence[type]) -> None:
    """Adds the aliases for sets of options, in groups of their own; an alias that is not given leaves no attribute.

    Those of other options would be read, and have no effect.
    """
    if Plan in kinds:
        _add_alias_group(parser, kinds, XDIT_ALIASES, "plan, with the flags of xDiT")
    if CacheOptions in kinds:
        _add_alias_group(parser, kinds, CACHE_DIT_ALIASES, "picture, plan and run, with the flags of cache-dit")


def _add_alias_group(
    parser: argparse.ArgumentParser, kinds: Sequence[type], aliases: Sequence[FlagAlias], title: str
) -> None:
    group = parser.add_argument_group(title)
    for name, kind, field, value in aliases:
        if kind not in kinds:
            continue
        doc = f"as {_name_field(name, field)}" + ("" if value in (None, True) else f" {value}")
        how: dict[str, Any] = {"action": "store_true"}
        if value is None:
            reader = next(read for one, read in iter_field_readers(kind) if one.name == field)
            how = {"type": reader, "metavar": "N" if kind is Plan else field.upper()}
        if name == _MULTI_VALUE_FLAG:
            how["nargs"], doc = "+", doc + _MULTI_VALUE_HELP
        spellings = dict.fromkeys((format_flag(name), "--" + name))
        group.add_argument(*spellings, dest=_PREFIX + name, default=argparse.SUPPRESS, help=doc, **how)


def merge_alias_values(arguments: argparse.Namespace, kind: type, flag_values: dict[str, Any]) -> dict[str, Any]:
    """The values of a set of options, from its own flags and from aliases.

    Raises:
        ModelError: if a flag and its alias say different things; for a `Plan` it is a `PlanError`.
        PlanError: also for patches without a pipeline, which xDiT would ignore.
    """
    values = dict(flag_values)
    given = [alias for alias in (*XDIT_ALIASES, *CACHE_DIT_ALIASES) if hasattr(arguments, _PREFIX + alias.name)]
    for name, options, field, value in given:
        if options is not kind:
            continue
        alias_value = getattr(arguments, _PREFIX + name) if value is None else value
        if name == _MULTI_VALUE_FLAG:
            alias_value = tuple(number for part in alias_value for number in part)
        if field in flag_values and flag_values[field] != alias_value:
            raise (PlanError if kind is Plan else ModelError)(
                f"--{name} says {field}={_format_value(alias_value)} and {_name_field(name, field)} says "
                f"{field}={_format_value(flag_values[field])}; give one of them"
            )
        values[field] = alias_value
    patches = values["patches"] if any(alias.name == "num_pipeline_patch" for alias in given) and kind is Plan else 1
    if patches > 1 and values.get("pipefusion", 1) == 1:
        raise PlanError(
            f"--num_pipeline_patch {patches} needs a pipeline; use it with --pipefusion_parallel_degree 2 or more, or "
            "leave it out"
        )
    return values


def _name_field(name: str, field: str) -> str:
    """The name of an alias's field on the command line; it is an argument without a flag if both names are equal."""
    return field.upper() if name == field else format_flag(field)


def _format_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
