"""The long flags of xDiT, with the meaning and the checks that they have there: each is a field of `Plan`.

`--split_scheme` and `--ulysses`, `--ring` need no alias: `-` and `_` are the same in a flag, and those are our names.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from ditile.errors import PlanError
from ditile.plan.flags import format_flag, iter_field_readers
from ditile.plan.plan import Plan


class XditAlias(NamedTuple):
    """A flag that stands for a field of `Plan`.

    Attributes:
        name: as in xDiT.
        field: of `Plan`.
        value: what a switch sets; None for a flag that takes a value.
    """

    name: str
    field: str
    value: Any = None


XDIT_ALIASES = (
    XditAlias("data_parallel_degree", "data"),
    XditAlias("use_cfg_parallel", "cfg", 2),
    XditAlias("pipefusion_parallel_degree", "pipefusion"),
    XditAlias("num_pipeline_patch", "patches"),
    XditAlias("attn_layer_num_for_pp", "stage_blocks"),
    XditAlias("warmup_steps", "warmup"),
    XditAlias("ulysses_degree", "ulysses"),
    XditAlias("ring_degree", "ring"),
    XditAlias("tensor_parallel_degree", "tensor"),
    XditAlias("use_parallel_vae", "vae", "rows"),
)

_MULTI_VALUE_FLAG = "attn_layer_num_for_pp"


def add_xdit_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, in a group of their own."""
    group = parser.add_argument_group("plan, with the flags of xDiT")
    read = {field.name: reader for field, reader in iter_field_readers(Plan)}
    for name, field, value in XDIT_ALIASES:
        spelt = "--" + name
        doc = f"as {format_flag(field)}" + ("" if value is None else f" {value}")
        if value is not None:
            group.add_argument(format_flag(name), spelt, action="store_true", default=argparse.SUPPRESS, help=doc)
        elif name == _MULTI_VALUE_FLAG:
            group.add_argument(
                format_flag(name),
                spelt,
                type=read[field],
                nargs="+",
                default=argparse.SUPPRESS,
                metavar="N",
                help=f"{doc}, with spaces: 7 7 8; what is no flag, such as a prompt, stands before it",
            )
        else:
            group.add_argument(
                format_flag(name), spelt, type=read[field], default=argparse.SUPPRESS, metavar="N", help=doc
            )


def list_xdit_flags() -> list[str]:
    """The flags as `argparse` knows them."""
    return [format_flag(alias.name) for alias in XDIT_ALIASES]


def merge_xdit_flags(arguments: argparse.Namespace, plan_flags: dict[str, Any]) -> dict[str, Any]:
    """The plan's values: its own flags and these.

    Raises:
        PlanError: if a flag and its alias say different things, or what xDiT would overrule.
    """
    plan_values = dict(plan_flags)
    for name, field, value in XDIT_ALIASES:
        if not hasattr(arguments, name):
            continue
        given = getattr(arguments, name) if value is None else value
        if name == _MULTI_VALUE_FLAG:
            given = tuple(number for part in given for number in part)
        if field in plan_flags and plan_flags[field] != given:
            raise PlanError(
                f"--{name} says {field}={_format_value(given)} and {format_flag(field)} says {field}={_format_value(plan_flags[field])}; "
                "give one of them"
            )
        plan_values[field] = given
    if (
        hasattr(arguments, "num_pipeline_patch")
        and plan_values["patches"] > 1
        and plan_values.get("pipefusion", 1) == 1
    ):
        raise PlanError(
            f"--num_pipeline_patch {plan_values['patches']} needs a pipeline; use it with --pipefusion_parallel_degree 2 or "
            "more, or leave it out"
        )
    return plan_values


def _format_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
