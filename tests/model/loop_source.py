"""Reads the source of a pipeline's denoising loop: where it cuts latents, and which conditions depend on the step.

What ditile knows of diffusers' pipelines is a table, which is compared with the source of the installed ones.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ditile_lab.study.flows import parse_function, read_name, read_own_attribute

_NUMBER_FUNCTIONS = ("float", "int", "bool", "min", "max", "abs", "round")
"""Functions of plain numbers, whose result depends on the step if an argument does."""
_ROW_FUNCTIONS = ("repeat", "cat", "concat", "stack", "tile", "repeat_interleave")
"""Functions that repeat or join tensors, as pipelines do to make rows for the branches of guidance."""


@functools.cache
def find_latent_cuts(pipeline_call: Callable[..., Any]) -> Mapping[str, frozenset[str]]:
    """The lines of a pipeline's loop that replace the latents by a part of them, such as `latents = latents[:, 1:]`.

    Returns:
        Each line -> the names that must all be true for the line to run.
    """
    cuts = dict[str, frozenset[str]]()
    for loop in _list_loops(pipeline_call):
        stepped = set[str]()
        for step in _list_step_calls(loop):
            # The third argument of `step` is the latents.
            stepped |= set(map(read_name, step.args[2:3])) - {""}
        for node, names in _walk_guarded(loop.body, frozenset()):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Subscript):
                continue
            # The line assigns a part of the latents to the name of the latents.
            sides = set(map(read_name, (node.value.value, *node.targets)))
            if len(sides) == 1 and sides <= stepped:
                cuts[ast.unparse(node)] = names
    return cuts


@functools.cache
def find_timed_guidance(pipeline_call: Callable[..., Any]) -> frozenset[str]:
    """The names that decide in which steps a pipeline's loop calls its model, or on how many rows.

    Returns:
        The names in conditions that depend on the step; empty if every step calls the model in the same way.
    """
    deciding = set[str]()
    for loop in _list_loops(pipeline_call):
        if _list_step_calls(loop):
            deciding |= _TimedConditions(loop).deciding
    return frozenset(deciding)


def _list_loops(pipeline_call: Callable[..., Any]) -> list[ast.For]:
    function = parse_function(pipeline_call)
    if function is None:
        return []
    return [node for node in ast.walk(function) if isinstance(node, ast.For)]


def _list_step_calls(loop: ast.For) -> list[ast.Call]:
    """The calls of a scheduler's `step` in a loop."""
    steps = []
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "step":
            steps.append(node)
    return steps


class _TimedConditions(ast.NodeVisitor):
    """Finds the conditions in a loop over timesteps that depend on the step, starting from the loop's own variables.

    A name is called timed if its value depends on the step.

    Attributes:
        deciding: the names in timed conditions that guard a call of the model, or an assignment to its arguments.
    """

    def __init__(self, loop: ast.For) -> None:
        self.deciding = set[str]()
        self._timed = _list_names(loop.target)
        self._conditions: list[set[str]] = []
        # Name -> the names that its value is computed from.
        self._sources: dict[str, set[str]] = {}
        self._model_arguments = set[str]()
        for node in ast.walk(loop):
            if isinstance(node, ast.Call) and _is_model_call(node):
                for argument in (*node.args, *(word.value for word in node.keywords)):
                    self._model_arguments |= _list_names(argument)
        for statement in loop.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        """A name becomes timed if it is computed from a timed name, or assigned under a timed condition."""
        self.generic_visit(node)
        names = set[str]().union(*map(_list_names, node.targets))
        if self._conditions and names & self._model_arguments and _may_change_rows(node.value):
            self._note_conditions()
        read = _list_scalar_names(node.value)
        if read & self._timed or self._conditions:
            self._timed |= names
            sources = self._trace_sources(read).union(*self._conditions)
            for name in names:
                self._sources[name] = self._sources.get(name, set()) | sources

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A timed condition decides whether the model is called."""
        self.generic_visit(node)
        if self._conditions and _is_model_call(node):
            self._note_conditions()

    def visit_If(self, node: ast.If) -> None:  # noqa: N802
        """The condition guards both branches."""
        self._visit_condition(node, (*node.body, *node.orelse))

    def visit_IfExp(self, node: ast.IfExp) -> None:  # noqa: N802
        """The condition guards both values of a conditional expression."""
        self._visit_condition(node, (node.body, node.orelse))

    def _visit_condition(self, node: ast.If | ast.IfExp, branches: Sequence[ast.AST]) -> None:
        self.visit(node.test)
        names = _list_scalar_names(node.test)
        is_timed = bool(names & self._timed)
        if is_timed:
            self._conditions.append(self._trace_sources(names))
        for branch in branches:
            self.visit(branch)
        if is_timed:
            self._conditions.pop()

    def _trace_sources(self, names: set[str]) -> set[str]:
        """These names, and the names that their values are computed from."""
        return names.union(*(self._sources.get(name, set()) for name in names))

    def _note_conditions(self) -> None:
        self.deciding = self.deciding.union(*self._conditions)


def _is_model_call(node: ast.Call) -> bool:
    """Whether a pipeline calls its transformer or U-Net."""
    return read_own_attribute(node.func).startswith(("transformer", "unet"))


def _may_change_rows(value: ast.AST) -> bool:
    return any(getattr(node, "attr", None) in _ROW_FUNCTIONS for node in ast.walk(value))


def _list_names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _list_scalar_names(node: ast.AST) -> set[str]:
    """The names in an expression, attributes of `self` included; arguments only of `_NUMBER_FUNCTIONS`."""
    attribute = read_own_attribute(node)
    if attribute:
        return {attribute.lstrip("_")}
    if isinstance(node, ast.Name):
        return {node.id}
    parts: Sequence[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        parts = node.args if read_name(node.func) in _NUMBER_FUNCTIONS else [node.func]
    return set[str]().union(*map(_list_scalar_names, parts))


def _walk_guarded(body: Sequence[ast.stmt], names: frozenset[str]) -> Iterator[tuple[ast.stmt, frozenset[str]]]:
    """Each statement with the names that must be true for it to run: those tested by `if name` or `if a and b`."""
    for node in body:
        yield node, names
        if isinstance(node, ast.If):
            yield from _walk_guarded(node.body, names | _list_required_names(node.test))
            yield from _walk_guarded(node.orelse, names)
        elif isinstance(node, ast.For | ast.While | ast.With):
            yield from _walk_guarded(node.body, names)


def _list_required_names(test: ast.expr) -> set[str]:
    """The names that must be true for a condition to hold."""
    tested = [test]
    if isinstance(test, ast.BoolOp):
        tested = test.values
        # None of several alternatives has to be true.
        if not isinstance(test.op, ast.And):
            return set()
    return set(map(read_name, tested)) - {""}
