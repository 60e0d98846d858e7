"""The anatomies that ship with ditile: a generated table, a row for each class of diffusers.

A row belongs to the sources of the forwards that it was derived from. Where diffusers has other ones now, the row does
not count, and the class is derived anew.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from ditile.model.block_lists import get_module_list
from ditile.model.block_table import AnatomyRow, read_anatomy_rows
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import ADAPTER_PROCESSORS
from ditile.plan.anatomy import Anatomy, Kinds, ListAnatomy
from ditile.plan.errors import ModelError
from ditile.plan.spec import ModelSpec

_DERIVED: dict[type[nn.Module], list[AnatomyRow]] = {}
"""Rows of classes that were derived in this process."""


def find_anatomy(transformer: nn.Module) -> Anatomy | None:
    """The anatomy of a transformer, by its class or the nearest of its bases; None if it was never derived."""
    for row in _DERIVED.get(type(transformer), ()):
        if row["source"] == compute_source_hash(transformer, row["lists"]) and _list_settings(transformer) <= row["of"]:
            return read_row(row)
    for cls in type(transformer).__mro__:
        for row in read_anatomy_rows().get(cls.__name__, ()):
            if row["source"] == compute_source_hash(transformer, row["lists"]):
                return read_row(row)
    return None


def find_derived_cuts(transformer: nn.Module) -> Mapping[str, Any]:
    """How tensor parallelism cuts a transformer, as it was derived; empty where that is not known."""
    anatomy = find_anatomy(transformer)
    return {} if anatomy is None else anatomy.tensor


def remember_anatomy(transformer: nn.Module, anatomy: Anatomy) -> None:
    """Keeps the anatomy of a class for this process, in place of one that is kept."""
    row = {**write_row(transformer, anatomy), "of": _list_settings(transformer)}
    known = row["source"], row["of"]
    others = [each for each in _DERIVED.get(type(transformer), ()) if (each["source"], each["of"]) != known]
    _DERIVED[type(transformer)] = [row, *others]


def _list_settings(transformer: nn.Module) -> frozenset[tuple[Any, ...]]:
    """What the modules of a model are told by plain attributes: a twin of few blocks has some of these."""
    return frozenset(
        (
            type(module).__qualname__,
            *((name, value) for name, value in sorted(vars(module).items()) if _is_setting(name, value)),
        )
        for module in transformer.modules()
    )


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, str | int | float) and name != "training" and not name.startswith("_")


def forget_anatomy(transformer: nn.Module) -> None:
    """Forgets what was derived for a class."""
    _DERIVED.pop(type(transformer), None)


def compute_source_hash(transformer: nn.Module, lists: Iterable[str]) -> str:
    """The hash of the forwards of a transformer and the blocks of its lists; empty where a source cannot be read.

    What a config may bring into a block and what says how tokens depend on each other counts too: modules that choose
    among tokens, as experts do, and attention processors that are not those of the class.
    """
    blocks = [block for name in lists for block in get_module_list(transformer, name)]
    classes = [type(transformer), *sorted({type(block) for block in blocks}, key=lambda cls: cls.__qualname__)]
    inside = {type(module) for block in blocks for module in block.modules()} - set(classes)
    processors = {
        type(module.processor).__call__
        for block in blocks
        for module in block.modules()
        if type(getattr(module, "processor", None)) is not getattr(module, "_default_processor_cls", None)
        and hasattr(module, "_default_processor_cls")
        # It does what the class's own does, and attends to its pictures besides.
        and not isinstance(module.processor, ADAPTER_PROCESSORS)
    }
    try:
        text = "".join(inspect.getsource(inspect.unwrap(cls.forward)) for cls in classes)
        others = [inspect.getsource(inspect.unwrap(cls.forward)) for cls in inside]
        text += "".join(sorted(source for source in others if ".topk(" in source))
        text += "".join(sorted(inspect.getsource(call) for call in processors))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_row(transformer: nn.Module, anatomy: Anatomy) -> dict[str, Any]:
    """The row of a transformer's class."""
    row = {"source": compute_source_hash(transformer, anatomy.lists), **asdict(anatomy)}
    return {name: value for name, value in row.items() if value or name not in ("modes", "outside", "tensor")}


def read_row(row: AnatomyRow) -> Anatomy:
    """The anatomy of a row."""
    lists = {
        name: ListAnatomy(
            **{
                **each,
                "returns": tuple(each["returns"]),
                "arguments": _freeze_kinds(each["arguments"]),
                "attention": _freeze_kinds(each["attention"]),
            }
        )
        for name, each in row["lists"].items()
    }
    modes = row.get("modes", {})
    outside = tuple(row.get("outside", ()))
    return Anatomy(lists, row["joint"], _freeze_kinds(row["inputs"]), modes, outside, row.get("tensor", {}))


def _freeze_kinds(kinds: Mapping[str, list[str]]) -> dict[str, Kinds]:
    return {name: tuple(each) for name, each in kinds.items()}


def make_unknown_error(transformer: nn.Module, advice: str) -> ModelError:
    """The error for a transformer that is not in the table; `advice` is what would work."""
    return ModelError(
        f"{type(transformer).__name__} is not in the table of known anatomies, so it cannot be cut; data and cfg work "
        f"without one; {advice}"
    )


def refuse_wrapper(transformer: nn.Module) -> None:
    """Raises `ModelError` for a model around a transformer that is in the table."""
    for module in transformer.modules():
        if module is not transformer and (inside := type(module).__name__) in read_anatomy_rows():
            raise ModelError(
                f"{type(transformer).__name__} wraps a {inside}, which alone can be cut into stages; set "
                "pipe.transformer to what is inside (peft: get_base_model(), which keeps its LoRAs)"
            )


def build_block_hooks(
    transformer: nn.Module, spec: ModelSpec, other: TransformerHooks | None = None, label: str = ""
) -> TransformerHooks:
    """Hooks for the blocks of a transformer, not installed; raises `ModelError` if its anatomy is not known."""
    anatomy = spec.anatomy or find_anatomy(transformer)
    if anatomy is None:
        refuse_wrapper(transformer)
        raise make_unknown_error(transformer, "give its pipeline to parallelize, which derives it")
    return TransformerHooks(transformer, spec, anatomy, other, label)
