"""How blocks pass tokens on, read off the source: of a block's forward, and of the transformer that calls the blocks.

Nothing is guessed: what the source does not say is None, and the caller asks the user for a pattern.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ditile.model.hooks.overrides import find_first_input
from ditile.plan.spec import Flow

IMAGE_PARAMETER = "hidden_states"
TEXT_PARAMETERS = ("encoder_hidden_states", "context", "text_embed", "text", "txt")
"""Parameters that take text in blocks that do not return it."""
NONE = "None"
"""The name of what a block returns in place of a stream that it does not have."""


@dataclass(frozen=True, slots=True)
class BlockCall:
    """How a transformer calls the blocks of a list.

    Attributes:
        results: the names that the result is assigned to; empty if they are not known.
        positional: each positional argument: a name, "None", or "" for what is neither.
        named: the same for keyword arguments.
        alone: whether no other list is called in turns with it.
    """

    results: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True

    def bind_arguments(self, parameters: Sequence[str]) -> dict[str, str]:
        """Parameter of the block -> its argument."""
        return {**dict(zip(parameters, self.positional, strict=False)), **self.named}


def list_pipeline_parts(pipe: Any) -> dict[str, Any]:
    """What a pipeline consists of, by name, with what its class can make itself and `components` leaves out."""
    return {**(getattr(pipe, "components", None) or {}), **getattr(pipe, "__dict__", {})}


def unwrap_module(module: nn.Module) -> nn.Module:
    """The module that torch.compile or peft wrapped."""
    for _ in range(4):
        unwrap = getattr(module, "get_base_model", None)
        module = unwrap() if callable(unwrap) else getattr(module, "_orig_mod", module)
    return module


def list_forward_parameters(block: nn.Module) -> list[str]:
    """The named parameters of a block's forward."""
    every = list(inspect.signature(type(unwrap_module(block)).forward).parameters.values())[1:]
    return [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def find_token_parameters(parameters: Sequence[str]) -> tuple[str, str | None]:
    """The parameters that take the image tokens ("" if there is no parameter) and the text (None if there is none)."""
    image = find_first_input(parameters) if parameters else ""
    if IMAGE_PARAMETER in parameters:
        image = IMAGE_PARAMETER
    return image, next((name for name in TEXT_PARAMETERS if name in parameters and name != image), None)


def infer_block_flow(block: nn.Module, call: BlockCall | None = None) -> Flow | None:
    """How a block passes tokens on; None if the sources do not say.

    Args:
        block: the block.
        call: how its transformer calls it, if known: it decides what the block's own source leaves open.
    """
    parameters = list_forward_parameters(block)
    image, text = find_token_parameters(parameters)
    arguments = call.bind_arguments(parameters) if call else {}
    flow = _infer_from_returns(_read_returned_names(block), parameters, image)
    if flow is None and call and call.results:
        flow = _infer_from_results(call.results, arguments, image)
    if flow is None or "text" in flow.returns:
        return flow
    is_unused = bool(arguments) and arguments.get(text or "", "None") == "None"
    return Flow(flow.returns, image, None if is_unused else text)


def _read_returned_names(block: nn.Module) -> list[tuple[str, ...]]:
    """The names that each return statement of a block's forward returns; "" for what has no name."""
    function = _parse_function(inspect.unwrap(type(unwrap_module(block)).forward))
    nodes = [] if function is None else [node for node in _walk_own_nodes(function) if isinstance(node, ast.Return)]
    return sorted({_name_returned_values(node.value) for node in nodes if node.value is not None})


def read_block_calls(transformer: nn.Module) -> dict[str, BlockCall]:
    """List -> how the transformer calls its blocks, in the order of its source; empty if that cannot be read."""
    block_calls: dict[str, BlockCall] = {}
    overridden = {"__init__"}
    lists = {name for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)}
    for cls in type(transformer).__mro__[: type(transformer).__mro__.index(nn.Module)]:
        functions = [function for function in _parse_methods(cls, lists) if function.name not in overridden]
        overridden |= {function.name for function in functions}
        for name, call in (each for function in functions for each in _find_block_loops(function)):
            if name not in block_calls or not block_calls[name].results:
                block_calls[name] = call
    return block_calls


def _infer_from_returns(returns: list[tuple[str, ...]], parameters: Sequence[str], image: str) -> Flow | None:
    """The flow by the names in the return statements."""
    if len(returns) != 1 or not returns[0] or "*" in returns[0]:
        return None
    names = returns[0]
    if len(names) == 1:
        return Flow(("image",), image, None)
    # A stream that the block does not have.
    if len(names) == 2 and NONE in names:
        return Flow(("image", "text") if names[1] == NONE else ("text", "image"), image, None)
    if len(names) == 2 and image in names:
        other = names[1 - names.index(image)]
        if other in parameters:
            return Flow(("image", "text") if names[0] == image else ("text", "image"), image, other)
    return None


def _infer_from_results(results: tuple[str, ...], arguments: Mapping[str, str], image: str) -> Flow | None:
    """The flow by the names that the result is assigned to: a stream is what the next block is given."""
    back = {value: parameter for parameter, value in arguments.items() if value not in ("", "None")}
    streams = [back.get(name) for name in results]
    if image not in streams or None in streams or len(streams) > 2:
        return None
    returns = tuple("image" if stream == image else "text" for stream in streams)
    return Flow(returns, image, next((stream for stream in streams if stream != image), None))


def _name_returned_values(value: ast.expr) -> tuple[str, ...]:
    """The names in a returned expression; "" is a tensor without a name, "*" may be anything."""
    if isinstance(value, ast.Tuple):
        return tuple(_name_item(item) for item in value.elts)
    if isinstance(value, ast.Name):
        return (value.id,)
    if isinstance(value, ast.BinOp):
        return ("",)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        root = value.func.value
        # A method of a tensor.
        if isinstance(root, ast.BinOp) or (isinstance(root, ast.Name) and root.id != "self"):
            return ("",)
    return ("*",)


def _name_item(item: ast.expr) -> str:
    """The name of what is returned in a tuple."""
    if isinstance(item, ast.Constant) and item.value is None:
        return NONE
    return item.id if isinstance(item, ast.Name) else "*"


def _parse_methods(cls: type, lists: set[str]) -> Iterator[ast.FunctionDef]:
    """The methods of a class that name one of its lists; none if there is no source."""
    for member in vars(cls).values():
        function: Any = inspect.unwrap(member) if inspect.isfunction(member) else None
        if function is not None and lists & set(function.__code__.co_names):
            yield from filter(None, [_parse_function(function)])


def _parse_function(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The syntax tree of a function; None if it has no source, or is a lambda in the middle of an expression."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return body if isinstance(body, ast.FunctionDef) else None


@functools.cache
def find_latent_cuts(pipeline_call: Callable[..., Any]) -> Mapping[str, frozenset[str]]:
    """The lines of a pipeline's loop in which it goes on with a part of the latents that it steps.

    Returns:
        Each line -> the names of which none may be false for it to be run.
    """
    function, cuts = _parse_function(pipeline_call), dict[str, frozenset[str]]()
    loops = [] if function is None else [node for node in ast.walk(function) if isinstance(node, ast.For)]
    for loop in loops:
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        steps = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "step"]
        stepped = {arg.id for step in steps for arg in step.args[2:3] if isinstance(arg, ast.Name)}
        for node, names in _walk_guarded(loop.body, frozenset()):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
                ends = {getattr(each, "id", None) for each in (node.value.value, *node.targets)}
                if len(ends) == 1 and ends <= stepped:
                    cuts[ast.unparse(node)] = names
    return cuts


@functools.cache
def find_timed_guidance(pipeline_call: Callable[..., Any]) -> frozenset[str]:
    """What decides, step by step, how a pipeline's loop calls its model; empty if all steps call it alike.

    Returns:
        The names in conditions that depend on the step, and decide whether the model is called, or on how many rows.
    """
    function = _parse_function(pipeline_call)
    loops = [] if function is None else [node for node in ast.walk(function) if isinstance(node, ast.For)]
    deciding = set[str]()
    for loop in loops:
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Attribute) and call.func.attr == "step" for call in calls):
            deciding |= _TimedConditions(loop).deciding
    return frozenset(deciding)


class _TimedConditions(ast.NodeVisitor):
    """The conditions in a loop over timesteps that depend on the step, followed from the loop's own variables.

    Attributes:
        deciding: the names in those around calls of the model, or around what these are given.
    """

    def __init__(self, loop: ast.For) -> None:
        self.deciding = set[str]()
        self._timed = _list_names(loop.target)
        self._conditions: list[set[str]] = []
        self._sources: dict[str, set[str]] = {}
        self._given = set[str]()
        for node in ast.walk(loop):
            if isinstance(node, ast.Call) and _is_model_call(node):
                for argument in (*node.args, *(word.value for word in node.keywords)):
                    self._given |= _list_names(argument)
        for statement in loop.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        """A name that is made of a timed one, or under a timed condition, is timed too."""
        self.generic_visit(node)
        names = set[str]().union(*map(_list_names, node.targets))
        if self._conditions and names & self._given and _may_change_rows(node.value):
            self.deciding |= set[str]().union(*self._conditions)
        read = _list_scalar_names(node.value)
        if read & self._timed or self._conditions:
            self._timed |= names
            sources = read.union(*self._conditions, *(self._sources.get(name, set()) for name in read))
            for name in names:
                self._sources[name] = self._sources.get(name, set()) | sources

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A call of the model under a timed condition."""
        self.generic_visit(node)
        if self._conditions and _is_model_call(node):
            self.deciding |= set[str]().union(*self._conditions)

    def visit_If(self, node: ast.If) -> None:  # noqa: N802
        """Both branches depend on the condition."""
        self._visit_condition(node, (*node.body, *node.orelse))

    def visit_IfExp(self, node: ast.IfExp) -> None:  # noqa: N802
        """So do both values of a conditional expression."""
        self._visit_condition(node, (node.body, node.orelse))

    def _visit_condition(self, node: ast.If | ast.IfExp, branches: Sequence[ast.AST]) -> None:
        self.visit(node.test)
        names = _list_scalar_names(node.test)
        is_timed = bool(names & self._timed)
        if is_timed:
            self._conditions.append(names.union(*(self._sources.get(name, set()) for name in names)))
        for branch in branches:
            self.visit(branch)
        if is_timed:
            self._conditions.pop()


def _is_model_call(node: ast.Call) -> bool:
    """Whether a pipeline calls its transformer or U-Net."""
    return _read_attribute_name(node.func).startswith(("transformer", "unet"))


def _may_change_rows(value: ast.AST) -> bool:
    """Whether an expression repeats or joins tensors, as for the branches of guidance."""
    names = {getattr(node, "attr", None) for node in ast.walk(value)}
    return not names.isdisjoint(("repeat", "cat", "concat", "stack", "tile", "repeat_interleave"))


def _list_names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _list_scalar_names(node: ast.AST) -> set[str]:
    """The names in an expression, and attributes of `self`, without those that are arguments of a call in it."""
    if isinstance(node, ast.Call):
        is_number = _read_attribute_name(node.func, "id") in ("float", "int", "bool", "min", "max", "abs", "round")
        parts: Sequence[ast.AST] = node.args if is_number else (node.func,)
    elif isinstance(node, ast.Name):
        return {node.id}
    elif own := _read_attribute_name(node):
        return {own.lstrip("_")}
    else:
        parts = list(ast.iter_child_nodes(node))
    return set[str]().union(*map(_list_scalar_names, parts))


def _walk_guarded(body: Sequence[ast.stmt], names: frozenset[str]) -> Iterator[tuple[ast.stmt, frozenset[str]]]:
    """Statements, each with the names that are true where it is run; what a plain `if` asks for, and `and`."""
    for node in body:
        yield node, names
        if isinstance(node, ast.If):
            every = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
            is_and = not isinstance(node.test, ast.BoolOp) or isinstance(node.test.op, ast.And)
            asked = {each.id for each in every if isinstance(each, ast.Name) and is_and}
            yield from _walk_guarded(node.body, names | asked)
            yield from _walk_guarded(node.orelse, names)
        elif isinstance(node, ast.For | ast.While | ast.With):
            yield from _walk_guarded(node.body, names)


def _walk_own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, in the order of its source, without those of functions inside it."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            queue[:0] = list(ast.iter_child_nodes(node))


def _find_block_loops(function: ast.FunctionDef) -> Iterator[tuple[str, BlockCall]]:
    """The lists over which a function loops."""
    aliases: dict[str, str] = {}
    for node in _walk_own_nodes(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _read_attribute_name(node.value):
            aliases[node.targets[0].id] = _read_attribute_name(node.value)
        if isinstance(node, ast.For):
            lists = _find_loop_lists(node.iter, aliases)
            together = any(_read_attribute_name(part, "id") == "zip" for part in ast.walk(node.iter)) and len(lists) > 1
            names = [part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)]
            for index, name in enumerate(lists):
                block = names[index - len(lists)] if len(names) >= len(lists) else ""
                yield name, _read_loop_call(node, block, alone=not together)


def _find_loop_lists(iterated: ast.expr, aliases: Mapping[str, str]) -> list[str]:
    """The attributes of `self` that a loop runs over, in order; not those that only say how far."""
    if isinstance(iterated, ast.Subscript):
        return _find_loop_lists(iterated.value, aliases)
    if isinstance(iterated, ast.Call):
        return [name for argument in iterated.args for name in _find_loop_lists(argument, aliases)]
    if isinstance(iterated, ast.Name) and iterated.id in aliases:
        return [aliases[iterated.id]]
    return [name] if (name := _read_attribute_name(iterated)) else []


def _read_attribute_name(node: ast.AST, kind: str = "self") -> str:
    """`x` of `self.x`, or the name itself for kind "id"; empty if it is neither."""
    if kind == "id":
        return node.id if isinstance(node, ast.Name) else ""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if own else ""  # type: ignore[attr-defined]


def _read_loop_call(loop: ast.For, block: str, *, alone: bool) -> BlockCall:
    """The call of a block in the body of a loop, with the names that its result is assigned to."""
    for node in ast.walk(loop):
        if not isinstance(node, ast.Assign):
            continue
        for part in ast.walk(node.value):
            if isinstance(part, ast.Call) and _read_attribute_name(part.func, "id") in (block, f"{block}_"):
                starred = any(isinstance(argument, ast.Starred) for argument in part.args)
                return BlockCall(
                    results=() if starred else _name_call_results(node, part),
                    positional=() if starred else tuple(_name_call_argument(argument) for argument in part.args),
                    named={word.arg: _name_call_argument(word.value) for word in part.keywords if word.arg},
                    alone=alone,
                )
    return BlockCall(alone=alone)


def _name_call_results(assigned: ast.Assign, call: ast.Call) -> tuple[str, ...]:
    """The names that the result of a call is assigned to; "" if it is changed on the way."""
    value, target = assigned.value, assigned.targets[0]
    if isinstance(value, ast.Subscript) and value.value is call:
        return ()
    if value is call or (isinstance(value, ast.IfExp) and call in (value.body, value.orelse)):
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        return tuple(_read_attribute_name(name, "id") for name in targets)
    return ("",)


def _name_call_argument(value: ast.expr) -> str:
    if isinstance(value, ast.Constant) and value.value is None:
        return "None"
    return _read_attribute_name(value, "id")
