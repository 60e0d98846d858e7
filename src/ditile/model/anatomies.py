"""The anatomies that ship with ditile: a generated table with a row for each class of diffusers.

A row belongs to the sources of the forwards from which it was derived. If diffusers has other sources now, the row does
not count, and the class is derived again.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ditile.model.block_lists import get_module_list
from ditile.model.block_table import AnatomyRow, read_anatomy_rows, read_columns
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import ADAPTER_PROCESSORS
from ditile.plan.anatomy import Anatomy, Kinds, ListAnatomy
from ditile.plan.errors import ModelError

DERIVED: dict[type[nn.Module], list[AnatomyRow]] = {}
"""Rows of classes that the lab has derived in this process, the newest first."""


def find_anatomy(transformer: nn.Module) -> Anatomy | None:
    """Return the anatomy of a transformer, by its class or the nearest base class; None if no row has its sources."""
    for row in DERIVED.get(type(transformer), ()):
        if list_settings(transformer) <= row["of"] and _has_source_of(transformer, row):
            return _add_columns(transformer, read_row(row))
    # A subclass that keeps the forwards is divided like its base.
    for cls in type(transformer).__mro__:
        for row in read_anatomy_rows().get(cls.__name__, ()):
            if _has_source_of(transformer, row):
                return _add_columns(transformer, read_row(row))
    return None


def _add_columns(transformer: nn.Module, anatomy: Anatomy) -> Anatomy:
    """Add the columns written by hand for the class, or for its nearest base class."""
    for cls in type(transformer).__mro__:
        if cls.__name__ in read_columns():
            columns: dict[str, Any] = {}
            for name, value in read_columns()[cls.__name__].items():
                if name == "arguments":
                    # Blocks receive these arguments only in later calls of a step.
                    lists = dict(anatomy.lists)
                    for path, more in value.items():
                        arguments = {**lists[path].arguments, **_freeze_kinds(more)}
                        lists[path] = replace(lists[path], arguments=arguments)
                    columns["lists"] = lists
                elif name != "blocks":
                    # Cached functions are called with these values, so they must be hashable.
                    columns[name] = tuple(value) if isinstance(value, list) else value
            return replace(anatomy, **columns)
    return anatomy


def _has_source_of(transformer: nn.Module, row: AnatomyRow) -> bool:
    """Return whether the forwards are those from which a row was derived."""
    source: str = row["source"]
    return source == compute_source_hash(transformer, row["lists"])


def find_derived_cuts(transformer: nn.Module) -> Mapping[str, Any]:
    """Return the derived tensor parallel cuts of a transformer; empty if unknown."""
    anatomy = find_anatomy(transformer)
    return {} if anatomy is None else anatomy.tensor


def list_settings(transformer: nn.Module) -> frozenset[tuple[Any, ...]]:
    """Return the plain attributes that configure a model's modules; a copy with fewer blocks has a subset of them."""
    settings = set()
    for module in transformer.modules():
        values = []
        for name in sorted(vars(module)):
            value = vars(module)[name]
            is_setting = isinstance(value, str | int | float) and name != "training" and not name.startswith("_")
            if is_setting:
                values.append((name, value))
        settings.add((type(module).__qualname__, *values))
    return frozenset(settings)


def compute_source_hash(transformer: nn.Module, lists: Iterable[str]) -> str:
    """Hash the forwards of a transformer and its blocks; empty if a source cannot be read.

    A config may add parts to a block that decide how tokens depend on each other. They count too: modules that choose
    among tokens, such as experts, and attention processors other than the class's own.
    """
    inside: set[type[nn.Module]] = set()
    processors: set[Any] = set()
    block_classes: set[type[nn.Module]] = set()
    for name in lists:
        for block in get_module_list(transformer, name):
            block_classes.add(type(block))
            for module in block.modules():
                inside.add(type(module))
                if not hasattr(module, "processor") or not hasattr(module, "_default_processor_cls"):
                    continue
                processor: Any = type(module.processor)
                # An IP-adapter's processor does the same as the standard one, and also attends to the adapter's images.
                if processor is not module._default_processor_cls and not issubclass(processor, ADAPTER_PROCESSORS):
                    processors.add(processor.__call__)
    # They are sorted because the order of a set differs from process to process.
    classes = [type(transformer), *sorted(block_classes, key=lambda cls: cls.__qualname__)]
    try:
        text = "".join(map(_read_forward_source, classes))
        inside_sources = map(_read_forward_source, inside.difference(classes))
        # A module that chooses among tokens decides how these depend on each other.
        text += "".join(sorted(source for source in inside_sources if ".topk(" in source))
        text += "".join(sorted(map(inspect.getsource, processors)))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_forward_source(cls: type[nn.Module]) -> str:
    return inspect.getsource(inspect.unwrap(cls.forward))


def read_row(row: AnatomyRow) -> Anatomy:
    """Build the anatomy from a row."""
    lists = {}
    for name, values in row["lists"].items():
        frozen = {
            "returns": tuple(values["returns"]),
            "arguments": _freeze_kinds(values["arguments"]),
            "attention": _freeze_kinds(values["attention"]),
        }
        lists[name] = ListAnatomy(**{**values, **frozen})
    return Anatomy(
        lists,
        joint=row["joint"],
        inputs=_freeze_kinds(row["inputs"]),
        modes=row.get("modes", {}),
        outside=tuple(row.get("outside", ())),
        tensor=row.get("tensor", {}),
    )


def _freeze_kinds(kinds: Mapping[str, list[str]]) -> dict[str, Kinds]:
    return {name: tuple(words) for name, words in kinds.items()}


def make_unknown_error(transformer: nn.Module, advice: str) -> ModelError:
    """Make the error for a transformer outside the table; `advice` names a remedy."""
    return ModelError(
        f"{type(transformer).__name__} is not in the table of known anatomies, so it cannot be cut; data and cfg work "
        f"without one; {advice}"
    )


def refuse_wrapper(transformer: nn.Module) -> None:
    """Raise `ModelError` for a model around a transformer from the table."""
    for module in transformer.modules():
        inside = type(module).__name__
        if module is not transformer and inside in read_anatomy_rows():
            raise ModelError(
                f"{type(transformer).__name__} wraps a {inside}, which alone can be cut into stages; set "
                "pipe.transformer to what is inside (peft: get_base_model(), which keeps its LoRAs)"
            )


def build_block_hooks(
    transformer: nn.Module, other: TransformerHooks | None = None, label: str = ""
) -> TransformerHooks:
    """Build hooks for a transformer's blocks without installing them; raise `ModelError` if its anatomy is unknown."""
    anatomy = find_anatomy(transformer)
    if anatomy is None:
        refuse_wrapper(transformer)
        raise make_unknown_error(transformer, "give its pipeline to parallelize, which derives it")
    return TransformerHooks(transformer, anatomy, other, label)
