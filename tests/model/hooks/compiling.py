"""A backend that runs graphs as they are and counts them by the class of the block that they are of."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Counting:
    """Compiles nothing: what dynamo captured runs op by op, bit for bit as before.

    Attributes:
        graphs: how many were captured, by class of block.
    """

    def __init__(self) -> None:
        self.graphs: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs[_block(graph)] += 1
        return graph.forward

    def take(self) -> Counter[str]:
        """What was counted since the last time."""
        actual, self.graphs = self.graphs, Counter()
        return actual


def _block(graph: torch.fx.GraphModule) -> str:
    """The class whose forward is the outermost frame of what was captured."""
    for node in graph.graph.nodes:
        actual = re.search(r'File "([^"]+)", line (\d+), in forward', node.meta.get("stack_trace") or "")
        if actual and node.op != "placeholder":
            return _class_at(actual.group(1), int(actual.group(2)))
    return "elsewhere"


@functools.cache
def _class_at(path: str, line: int) -> str:
    tree = ast.parse(Path(path).read_text("utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return next((node.name for node in classes if node.lineno <= line <= (node.end_lineno or 0)), "elsewhere")


def whole(pipe: Any, **options: Any) -> None:
    """As users do it: the module is another one afterwards."""
    pipe.transformer = torch.compile(pipe.transformer, **options)


def in_place(pipe: Any, **options: Any) -> None:
    pipe.transformer.compile(**options)


def repeated(pipe: Any, **options: Any) -> None:
    """diffusers' way; not all of its models have it."""
    if getattr(pipe.transformer, "_repeated_blocks", None):
        pipe.transformer.compile_repeated_blocks(**options)
        return
    for name in ("transformer_blocks", "single_transformer_blocks"):
        for block in getattr(pipe.transformer, name, nn.ModuleList()):
            block.compile(**options)


WAYS: dict[str, Callable[..., None]] = {"whole": whole, "in place": in_place, "blocks": repeated}
