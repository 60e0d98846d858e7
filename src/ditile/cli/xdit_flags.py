"""The long flags of xDiT, with the meaning and the checks that they have there: each is a field of `Plan`.

`--split_scheme` and `--ulysses`, `--ring` need no alias: `-` and `_` are the same in a flag, and those are our names.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from ditile.errors import PlanError
from ditile.plan.flags import flag, readers
from ditile.plan.plan import Plan


class Alias(NamedTuple):
    """A flag that stands for a field of `Plan`.

    Attributes:
        name: as in xDiT.
        field: of `Plan`.
        value: what a switch sets; None for a flag that takes a value.
    """

    name: str
    field: str
    value: Any = None


ALIASES = (
    Alias("data_parallel_degree", "data"),
    Alias("use_cfg_parallel", "cfg", 2),
    Alias("pipefusion_parallel_degree", "pipefusion"),
    Alias("num_pipeline_patch", "patches"),
    Alias("attn_layer_num_for_pp", "stage_blocks"),
    Alias("warmup_steps", "warmup"),
    Alias("ulysses_degree", "ulysses"),
    Alias("ring_degree", "ring"),
    Alias("tensor_parallel_degree", "tensor"),
    Alias("use_parallel_vae", "vae", "rows"),
)

_SEVERAL = "attn_layer_num_for_pp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, in a group of their own."""
    group = parser.add_argument_group("plan, with the flags of xDiT")
    read = {field.name: reader for field, reader in readers(Plan)}
    for name, field, value in ALIASES:
        spelt = "--" + name
        doc = f"as {flag(field)}" + ("" if value is None else f" {value}")
        if value is not None:
            group.add_argument(flag(name), spelt, action="store_true", default=argparse.SUPPRESS, help=doc)
        elif name == _SEVERAL:
            group.add_argument(
                flag(name), spelt, type=read[field], nargs="+", default=argparse.SUPPRESS, metavar="N",
                help=f"{doc}, with spaces: 7 7 8; what is no flag, such as a prompt, stands before it",
            )  # fmt: skip
        else:
            group.add_argument(flag(name), spelt, type=read[field], default=argparse.SUPPRESS, metavar="N", help=doc)


def names() -> list[str]:
    """The flags as `argparse` knows them."""
    return [flag(alias.name) for alias in ALIASES]


def merged(arguments: argparse.Namespace, own: dict[str, Any]) -> dict[str, Any]:
    """The plan's values: its own flags and these.

    Raises:
        PlanError: if a flag and its alias say different things, or what xDiT would overrule.
    """
    found = dict(own)
    for name, field, value in ALIASES:
        if not hasattr(arguments, name):
            continue
        given = getattr(arguments, name) if value is None else value
        if name == _SEVERAL:
            given = tuple(number for part in given for number in part)
        if field in own and own[field] != given:
            raise PlanError(
                f"--{name} says {field}={_text(given)} and {flag(field)} says {field}={_text(own[field])}; "
                "give one of them"
            )
        found[field] = given
    if hasattr(arguments, "num_pipeline_patch") and found["patches"] > 1 and found.get("pipefusion", 1) == 1:
        raise PlanError(
            f"--num_pipeline_patch {found['patches']} needs a pipeline; use it with --pipefusion_parallel_degree 2 or "
            "more, or leave it out"
        )
    return found


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
