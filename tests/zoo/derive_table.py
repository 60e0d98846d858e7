"""Derives the anatomies that ship with ditile, from the calls of all tiny pipelines:

python -m tests.zoo.derive_table              # the table anew
python -m tests.zoo.derive_table flux sana    # the rows of the classes of these entries
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ditile.model.known import ASSETS
from ditile.plan.anatomy import Anatomy
from ditile.plan.errors import DitileError, ModelError
from ditile.runner.runner import build_single_runner
from ditile_lab.study.capture import capture_call
from ditile_lab.study.derive import derive_anatomy
from ditile_lab.study.merge import merge_kinds, merge_lists
from ditile_lab.study.prove import TOLERANCE, forget_anatomy, list_proofs, prove_anatomy, remember_anatomy, write_row
from ditile_lab.study.tensor_cuts import derive_tensor_cuts
from tests import tiny
from tests.zoo import VARIANTS, ZOO
from tests.zoo.entry import Entry, entry

TABLE = ASSETS / "anatomies.json"
WIDTH = 120
OTHERWISE = "when its class was studied"
"""What an error says of a model that does something else than what it was derived from."""


def of_tiny(name: str, make: Any) -> Entry:
    """A family of tests/tiny.py, of which the collection has no entry."""
    family = name.split()[0]
    return entry(
        name, 0, make, lambda: tiny.arguments(family), larger={"height": 48},
        other_prompt={"max_sequence_length": 9}, two_images={"num_images_per_prompt": 2}, padded_prompt="",
    )  # fmt: skip


OTHERS = {
    one.name: one
    for one in (
        of_tiny("flux with guidance", lambda: tiny.flux(guidance=True)),
        of_tiny("sd3 without dual attention", lambda: tiny.sd3(dual=())),
        of_tiny("sd3 with dual attention", tiny.sd3),
    )
}
"""What is derived beside the collection."""


class Derived(NamedTuple):
    """The anatomy of a transformer as an entry calls it, and the calls that it was derived from."""

    name: str
    transformer: nn.Module
    calls: Mapping[str, dict[str, Any]]
    anatomy: Anatomy


def record_calls(pipe: Any, one: Entry) -> tuple[nn.Module, dict[str, dict[str, Any]]]:
    """The first transformer of an entry, and the arguments of its first call in each variant."""
    transformer = getattr(pipe, one.transformers[0])
    makers = {"call": one.call} | {variant: make for variant in VARIANTS if (make := getattr(one, variant))}
    return transformer, {variant: capture_call(pipe, transformer, make()) for variant, make in makers.items()}


def derive_entry(one: Entry) -> Derived:
    """The anatomy of an entry's transformer.

    Raises:
        ModelError: if it cannot be divided.
    """
    transformer, calls = record_calls(one.make(), one)
    anatomy = derive_anatomy(transformer, list(calls.values()))
    return Derived(one.name, transformer, calls, derive_tensor_cuts(transformer, anatomy, calls["call"]))


def merge_anatomies(one: Anatomy, other: Anatomy) -> Anatomy:
    """The anatomy of a class from those of two pipelines that call it with other arguments.

    Raises:
        ModelError: if they say different things of the same argument or module.
    """
    if one.lists.keys() != other.lists.keys():
        raise ModelError(f"blocks are in {list(one.lists)} and in {list(other.lists)}")
    if "none" not in (one.joint, other.joint) and one.joint != other.joint:
        raise ModelError(f"keys are {one.joint} and {other.joint}")
    inputs = {}
    for name in {**one.inputs, **other.inputs}:
        inputs[name] = merge_kinds(name, one.inputs.get(name), other.inputs.get(name))
    return Anatomy(
        lists={name: merge_lists(name, blocks, other.lists[name]) for name, blocks in one.lists.items()},
        joint=other.joint if one.joint == "none" else one.joint,
        inputs=inputs,
        modes={**one.modes, **other.modes},
        outside=tuple(dict.fromkeys((*one.outside, *other.outside))),
        tensor={**one.tensor, **other.tensor},
    )


def derive_rows(derived: Iterable[Derived]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the table: class -> a row for each set of sources, merged of all that call it."""
    merged: dict[tuple[str, str], Derived] = {}
    for each in derived:
        key = (type(each.transformer).__name__, write_row(each.transformer, each.anatomy)["source"])
        if key in merged:
            each = each._replace(anatomy=merge_anatomies(merged[key].anatomy, each.anatomy))
        merged[key] = each
    rows: dict[str, list[dict[str, Any]]] = {}
    for (name, _), each in sorted(merged.items(), key=lambda item: item[0]):
        rows.setdefault(name, []).append(write_row(each.transformer, each.anatomy))
    return rows


def format_table(value: Any, indent: int = 0, before: int = 0) -> str:
    """JSON in which what fits on a line is on one."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or not value or indent + before + len(line) < WIDTH:
        return line
    if isinstance(value, dict):
        parts = []
        for key, each in value.items():
            name = f"{json.dumps(key)}: "
            parts.append(name + format_table(each, indent + 1, len(name)))
    else:
        parts = [format_table(each, indent + 1) for each in value]
    pad = "\n" + " " * (indent + 1)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + pad + f",{pad}".join(parts) + "\n" + " " * indent + closing


def prove_rows(derived: Iterable[Derived]) -> Iterator[Derived]:
    """Those that no proof finds wrong; what the engine itself refuses to compute in patches is not wrong."""
    for each in derived:
        remember_anatomy(each.transformer, each.anatomy)
        try:
            difference = prove_calls(each.transformer, each.calls)
        except DitileError as error:
            if OTHERWISE in str(error):
                print(f"{each.name}: {error}", file=sys.stderr)
                continue
            difference = 0.0
        except Exception as error:  # what a wrong anatomy runs into
            print(f"{each.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
            continue
        finally:
            forget_anatomy(each.transformer)
        if difference <= TOLERANCE:
            yield each
        else:
            print(f"{each.name}: differs by {difference:.1e}", file=sys.stderr)


def prove_calls(transformer: nn.Module, calls: Mapping[str, dict[str, Any]], patches: int = 3) -> float:
    """The largest difference that the proof finds: of each variant, and of two prompts as branches of guidance."""
    order = ("call", "other_prompt", "two_images", "padded_prompt")
    proofs = list_proofs(transformer, [calls[variant] for variant in order if variant in calls])
    return max(prove_anatomy(transformer, proof, build_single_runner, patches=patches) for proof in proofs)


def derive_all(entries: Mapping[str, Entry]) -> Iterator[Derived]:
    """Those that can be derived; says why of the others. What adapters add is known of their processors."""
    for name, one in entries.items():
        if name.endswith("ip-adapter"):
            continue
        try:
            yield derive_entry(one)
        except Exception as error:  # what a pipeline or forward runs into
            kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
            print(f"{name}: {kind}{' '.join(str(error).split())[:200]}", file=sys.stderr)


def main(names: Sequence[str]) -> None:
    """Writes the table, or the rows of the classes of some entries."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    entries = {**ZOO, **OTHERS}
    if names:
        classes = {name: type(getattr(one.make(), one.transformers[0])) for name, one in entries.items()}
        wanted = {classes[name] for name in names}
        entries = {name: one for name, one in entries.items() if classes[name] in wanted}
    rows = derive_rows(prove_rows(derive_all(entries)))
    table = (json.loads(TABLE.read_text("utf-8")) if names else {}) | rows
    TABLE.write_text(format_table(dict(sorted(table.items()))) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
