"""diffusers' transformers by name: the lists of their blocks, in order of execution, and how these pass tokens on.

The table of anatomies covers most classes. The rest is in `columns.json`: classes that were never derived, notes, and
blocks that must not be skipped. Lists that prepare tokens once (refiners of text or noise, control branches) run ahead
of the chain and are not in it. Where a joint sequence of both streams goes through a block, that sequence counts as the
image, and there is no text.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import diffusers
from diffusers.models import transformers
from torch import nn

from ditile.model.hooks.overrides import find_first_input
from ditile.model.known import ASSETS
from ditile.plan.anatomy import Flow

IMAGE_PARAMETER = "hidden_states"
TEXT_PARAMETERS = ("encoder_hidden_states", "context", "text_embed", "text", "txt")
"""Names of block parameters that may take the text."""

AnatomyRow = Mapping[str, Any]
"""An anatomy as JSON, see `anatomies.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerEntry:
    """A class of transformers.

    Attributes:
        lists: path of a `ModuleList` -> the flow of its blocks.
        apart: path of a list -> the attribute of the transformer with the number of its last blocks that are called on
            another stream, and so are not in the chain.
        mirrored: whether the last blocks read the results of the first ones, in reverse order: the last block reads the
            result of the first.
        has_rows: whether the first dimension of the tokens, and of all that goes with them, is the batch.
        tables: arguments of the transformer without a batch dimension, even if their first one is as long as the batch.
        note: other facts that a cache must know.
        refusal: why no block may be skipped; empty if blocks may be.
    """

    lists: Mapping[str, Flow] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    mirrored: bool = False
    has_rows: bool = True
    tables: Sequence[str] = ()
    note: str = ""
    refusal: str = ""


class BlockList(NamedTuple):
    """A `ModuleList` whose blocks are called one after the other in a transformer's forward.

    Attributes:
        flow: how the blocks pass tokens on.
    """

    name: str
    blocks: Sequence[nn.Module]
    flow: Flow


@functools.cache
def read_columns() -> Mapping[str, Any]:
    """Read `columns.json`: class name -> the columns of its row that no study finds."""
    columns: Mapping[str, Any] = json.loads((ASSETS / "columns.json").read_text("utf-8"))
    return columns


@functools.cache
def read_anatomy_rows() -> Mapping[str, list[AnatomyRow]]:
    """Read `anatomies.json`: class name -> a row for each set of block classes in its configs."""
    text = (ASSETS / "anatomies.json").read_text("utf-8")
    rows: Mapping[str, list[AnatomyRow]] = json.loads(text)
    return rows


@functools.cache
def read_transformer_table() -> Mapping[str, TransformerEntry]:
    """Read the table: class name -> its blocks."""
    table = {}
    anatomies = read_anatomy_rows()
    for name in {**read_columns(), **anatomies}:
        entry = dict(read_columns().get(name, {}).get("blocks", {}))
        lists = {
            path: Flow(**flow | {"returns": tuple(flow["returns"])}) for path, flow in entry.pop("lists", {}).items()
        }
        # A class that is derived later has lists in both tables; its anatomy counts.
        if name in anatomies:
            # Rows of a class differ in the classes of its blocks, and not in its lists.
            lists = {}
            for path, blocks in anatomies[name][0]["lists"].items():
                # Blocks that do not return the text have it among their arguments.
                text_arguments = [text for text in (*TEXT_PARAMETERS, "cond") if text in blocks["arguments"]]
                text = blocks["text"] or next(iter(text_arguments), None)
                lists[path] = Flow(tuple(blocks["returns"]), blocks["image"], text)
        table[name] = TransformerEntry(lists=lists, **entry)
    return table


def find_diffusers_class(name: str) -> type[nn.Module] | None:
    """Return the class with this name in the installed diffusers; None if there is none."""
    # Some transformers are not exported at the top level.
    attribute = getattr(diffusers, name, None) or getattr(transformers, name, None)
    if isinstance(attribute, type) and issubclass(attribute, nn.Module):
        return attribute
    return None


def find_table_entry(transformer: type[nn.Module]) -> TransformerEntry | None:
    """Return the row of a class, or of its nearest base that is diffusers' own class."""
    table = read_transformer_table()
    for cls in transformer.__mro__:
        # A class from elsewhere may have the name of one of diffusers' classes.
        if cls.__name__ in table and find_diffusers_class(cls.__name__) is cls:
            return table[cls.__name__]
    return None


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch.compile or peft."""
    # Either may wrap the other; four is more than anybody nests.
    for _ in range(4):
        unwrap = getattr(module, "get_base_model", None)
        module = unwrap() if callable(unwrap) else getattr(module, "_orig_mod", module)
    return module


def list_forward_parameters(block: nn.Module) -> list[str]:
    """Return the named parameters of a block's forward."""
    parameters = list(inspect.signature(type(unwrap_module(block)).forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def find_token_parameters(parameters: Sequence[str]) -> tuple[str, str | None]:
    """Return the parameters for the image tokens ("" if there is no parameter) and the text (None if there is none)."""
    if IMAGE_PARAMETER in parameters:
        image = IMAGE_PARAMETER
    elif parameters:
        image = find_first_input(parameters)
    else:
        image = ""
    for name in TEXT_PARAMETERS:
        if name in parameters and name != image:
            return image, name
    return image, None
