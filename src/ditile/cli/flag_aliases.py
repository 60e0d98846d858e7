"""Flags of xDiT and cache-dit, with the same meaning and checks as there.

Each stands for a field of ditile's options. `--split_scheme`, `--ulysses` and `--ring` of xDiT, and `--steps`,
`--height`, `--width`, `--negative-prompt` and `--uaa` of cache-dit need no alias: ditile has the same names, and `-`
and `_` are the same in a flag.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ditile.plan.errors import ModelError, PlanError
from ditile.plan.flag_parser import format_flag, make_text_reader
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions


class FlagAlias(NamedTuple):
    """A flag that stands for a field of a set of options.

    Attributes:
        name: the flag in the other tool.
        cls: the class of options that has the field.
        value: the value that a switch sets; None for a flag with a value.
    """

    name: str
    cls: type
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
_MULTI_VALUE_HELP = ", with spaces: 7 7 8; what is not a flag, such as a prompt, stands before it"


ALIASES = (
    (Plan, "plan, with the flags of xDiT", XDIT_ALIASES),
    (CacheOptions, "image, plan and run, with the flags of cache-dit", CACHE_DIT_ALIASES),
)
"""A class of options of a command that has the aliases -> their title in `--help`, and they."""


def list_aliases(classes: Sequence[type]) -> list[FlagAlias]:
    """Return the aliases of a command with these classes of options.

    An alias of another class would be parsed without any effect.
    """
    known = []
    for cls, _, aliases in ALIASES:
        for alias in aliases:
            if cls in classes and alias.cls in classes:
                known.append(alias)
    return known


def add_alias_arguments(parser: argparse.ArgumentParser, classes: Sequence[type]) -> None:
    """Add the aliases for classes of options, in groups of their own. An unused alias leaves no attribute."""
    known = list_aliases(classes)
    for cls, title, aliases in ALIASES:
        if cls not in classes:
            continue
        group = parser.add_argument_group(title)
        for alias in aliases:
            if alias not in known:
                continue
            doc = f"as {_name_field(alias)}"
            settings: dict[str, Any] = {"action": "store_true"}
            if alias.value is None:
                metavar = "N" if alias.cls is Plan else alias.field.upper()
                settings = {"type": make_text_reader(alias.cls, alias.field), "metavar": metavar}
            elif alias.value is not True:
                doc += f" {alias.value}"
            if alias.name == _MULTI_VALUE_FLAG:
                settings["nargs"] = "+"
                doc += _MULTI_VALUE_HELP
            spellings = dict.fromkeys((format_flag(alias.name), "--" + alias.name))
            group.add_argument(*spellings, dest=_PREFIX + alias.name, default=argparse.SUPPRESS, help=doc, **settings)


def merge_alias_values(arguments: argparse.Namespace, cls: type, flag_values: dict[str, Any]) -> dict[str, Any]:
    """Merge the values of a class of options from its own flags and from aliases.

    Raises:
        ModelError: if a flag and its alias say different things; for a `Plan` it is a `PlanError`.
        PlanError: also for patches without a pipeline, which xDiT would ignore.
    """
    values = dict(flag_values)
    for alias in (*XDIT_ALIASES, *CACHE_DIT_ALIASES):
        if alias.cls is not cls or not hasattr(arguments, _PREFIX + alias.name):
            continue
        value = alias.value
        if value is None:
            value = getattr(arguments, _PREFIX + alias.name)
        if alias.name == _MULTI_VALUE_FLAG:
            # Each word of the flag is parsed as a tuple, since it may contain commas too.
            value = tuple(itertools.chain.from_iterable(value))
        own_value = flag_values.get(alias.field, value)
        if own_value != value:
            error = PlanError if cls is Plan else ModelError
            raise error(
                f"--{alias.name} says {alias.field}={value} and {_name_field(alias)} says {alias.field}={own_value}; "
                "give one of them"
            )
        values[alias.field] = value
    patches = getattr(arguments, _PREFIX + "num_pipeline_patch", 1)
    if cls is Plan and patches > 1 and values.get("pipefusion", 1) == 1:
        raise PlanError(
            f"--num_pipeline_patch {patches} needs a pipeline; use it with --pipefusion_parallel_degree 2 or more, or "
            "leave it out"
        )
    return values


def _name_field(alias: FlagAlias) -> str:
    """Return how the command line names an alias's field. If both names are equal it is an argument without a flag."""
    if alias.name == alias.field:
        return alias.field.upper()
    return format_flag(alias.field)
