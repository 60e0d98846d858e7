"""How blocks pass tokens on, read off the source: of a block's forward, and of the transformer that calls the blocks.

Nothing is guessed: what cannot be told is None, and its caller asks for a pattern.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ditile.plan.spec import Flow

IMAGE = "hidden_states"
TEXTS = ("encoder_hidden_states", "context", "text_embed", "text", "txt")
"""Parameters that take text in blocks that do not return it."""


@dataclass(frozen=True, slots=True)
class Call:
    """How a transformer calls the blocks of a list.

    Attributes:
        results: the names that the result is given to; empty if they cannot be told.
        positional: what each positional argument is: a name, "None", or "" for what is neither.
        named: the same of the others.
        alone: whether no other list is called in turns with it.
    """

    results: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True

    def arguments(self, parameters: Sequence[str]) -> dict[str, str]:
        """Parameter of the block -> what is given for it."""
        return {**dict(zip(parameters, self.positional, strict=False)), **self.named}


def inner(module: nn.Module) -> nn.Module:
    """What torch.compile or peft wrapped."""
    for _ in range(4):
        unwrap = getattr(module, "get_base_model", None)
        module = unwrap() if callable(unwrap) else getattr(module, "_orig_mod", module)
    return module


def parameters_of(block: nn.Module) -> list[str]:
    """The named parameters of a block's forward."""
    every = list(inspect.signature(type(inner(block)).forward).parameters.values())[1:]
    return [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def image_of(parameters: Sequence[str]) -> str:
    """The parameter that takes the image tokens; empty if there is no parameter."""
    return IMAGE if IMAGE in parameters else next(iter(parameters), "")


def flow_of(block: nn.Module, call: Call | None = None) -> Flow | None:
    """How a block passes tokens on; None if that cannot be told.

    Args:
        block: the block.
        call: how its transformer calls it, where that is known: it settles what the block's own source leaves open.
    """
    parameters = parameters_of(block)
    image = image_of(parameters)
    given = call.arguments(parameters) if call else {}
    flow = _of_returns(returns_of(block), parameters, image)
    if flow is None and call and call.results:
        flow = _of_results(call.results, given, image)
    if flow is None or "text" in flow.returns:
        return flow
    known = bool(given)
    text = next((name for name in TEXTS if name in parameters and name != image), None)
    unused = known and given.get(text or "", "None") == "None"
    return Flow(flow.returns, image, None if unused else text)


def returns_of(block: nn.Module) -> list[tuple[str, ...]]:
    """The names that each return statement of a block's forward gives back; "" for what has no name."""
    forward = inspect.unwrap(type(inner(block)).forward)
    function = _parsed(forward)
    if function is None:
        return []
    found = [node.value for node in _own(function) if isinstance(node, ast.Return) and node.value is not None]
    return sorted({_names(value) for value in found})


def calls_of(transformer: nn.Module) -> dict[str, Call]:
    """List -> how the transformer calls its blocks, in the order of its source; empty if that cannot be read."""
    found: dict[str, Call] = {}
    overridden = {"__init__"}
    lists = {name for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)}
    for cls in type(transformer).__mro__[: type(transformer).__mro__.index(nn.Module)]:
        functions = [function for function in _methods(cls, lists) if function.name not in overridden]
        overridden |= {function.name for function in functions}
        for name, call in (each for function in functions for each in _loops(function)):
            if name not in found or not found[name].results:
                found[name] = call
    return found


def _of_returns(returns: list[tuple[str, ...]], parameters: Sequence[str], image: str) -> Flow | None:
    """What the names of the return statements say."""
    if len(returns) != 1 or not returns[0] or "*" in returns[0]:
        return None
    names = returns[0]
    if len(names) == 1:
        return Flow(("image",), image, None)
    if len(names) == 2 and image in names:
        other = names[1 - names.index(image)]
        if other in parameters:
            return Flow(("image", "text") if names[0] == image else ("text", "image"), image, other)
    return None


def _of_results(results: tuple[str, ...], given: Mapping[str, str], image: str) -> Flow | None:
    """What the names say that the result is given to: a stream is what is given back to the next block."""
    back = {value: parameter for parameter, value in given.items() if value not in ("", "None")}
    streams = [back.get(name) for name in results]
    if image not in streams or None in streams or len(streams) > 2:
        return None
    returns = tuple("image" if stream == image else "text" for stream in streams)
    return Flow(returns, image, next((stream for stream in streams if stream != image), None))


def _names(value: ast.expr) -> tuple[str, ...]:
    """The names in a returned expression; "" is a tensor without one, "*" what may be anything."""
    if isinstance(value, ast.Tuple):
        return tuple(item.id if isinstance(item, ast.Name) else "*" for item in value.elts)
    if isinstance(value, ast.Name):
        return (value.id,)
    if isinstance(value, ast.BinOp):
        return ("",)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        root = value.func.value
        if isinstance(root, ast.BinOp) or (isinstance(root, ast.Name) and root.id != "self"):
            return ("",)  # a method of a tensor
    return ("*",)


def _methods(cls: type, lists: set[str]) -> Iterator[ast.FunctionDef]:
    """The methods of a class that name one of its lists; none if there is no source."""
    for member in vars(cls).values():
        function: Any = inspect.unwrap(member) if inspect.isfunction(member) else None
        if function is not None and lists & set(function.__code__.co_names):
            yield from filter(None, [_parsed(function)])


def _parsed(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """A function as its source has it; None if there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None
    try:
        body = ast.parse(source).body[0]
    except SyntaxError:  # a lambda in the middle of something
        return None
    return body if isinstance(body, ast.FunctionDef) else None


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, in the order of its source, without those of functions inside it."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            queue[:0] = list(ast.iter_child_nodes(node))


def _loops(function: ast.FunctionDef) -> Iterator[tuple[str, Call]]:
    """The lists over which a function loops."""
    aliases: dict[str, str] = {}
    for node in _own(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _attribute(node.value):
            aliases[node.targets[0].id] = _attribute(node.value)
        if isinstance(node, ast.For):
            lists = _lists(node.iter, aliases)
            together = any(_attribute(part, "id") == "zip" for part in ast.walk(node.iter)) and len(lists) > 1
            names = [part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)]
            for index, name in enumerate(lists):
                block = names[index - len(lists)] if len(names) >= len(lists) else ""
                yield name, _call(node, block, alone=not together)


def _lists(iterated: ast.expr, aliases: Mapping[str, str]) -> list[str]:
    """The attributes of `self` that a loop runs over, in order; not those that only say how far."""
    if isinstance(iterated, ast.Subscript):
        return _lists(iterated.value, aliases)
    if isinstance(iterated, ast.Call):
        return [name for argument in iterated.args for name in _lists(argument, aliases)]
    if isinstance(iterated, ast.Name) and iterated.id in aliases:
        return [aliases[iterated.id]]
    return [name] if (name := _attribute(iterated)) else []


def _attribute(node: ast.AST, kind: str = "self") -> str:
    """`x` of `self.x`, or the name itself for kind "id"; empty if it is neither."""
    if kind == "id":
        return node.id if isinstance(node, ast.Name) else ""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if own else ""  # type: ignore[attr-defined]


def _call(loop: ast.For, block: str, *, alone: bool) -> Call:
    """The call of a block in the body of a loop, with what its result is given to."""
    for node in ast.walk(loop):
        if not isinstance(node, ast.Assign):
            continue
        for part in ast.walk(node.value):
            if isinstance(part, ast.Call) and _attribute(part.func, "id") in (block, f"{block}_"):
                starred = any(isinstance(argument, ast.Starred) for argument in part.args)
                return Call(
                    results=() if starred else _results(node, part),
                    positional=() if starred else tuple(_argument(argument) for argument in part.args),
                    named={word.arg: _argument(word.value) for word in part.keywords if word.arg},
                    alone=alone,
                )
    return Call(alone=alone)


def _results(assigned: ast.Assign, call: ast.Call) -> tuple[str, ...]:
    """The names that the result of a call is given to; "" if it is changed on the way."""
    value, target = assigned.value, assigned.targets[0]
    if isinstance(value, ast.Subscript) and value.value is call:
        return ()
    if value is call or (isinstance(value, ast.IfExp) and call in (value.body, value.orelse)):
        return tuple(_attribute(name, "id") for name in (target.elts if isinstance(target, ast.Tuple) else [target]))
    return ("",)


def _argument(value: ast.expr) -> str:
    if isinstance(value, ast.Constant) and value.value is None:
        return "None"
    return _attribute(value, "id")
