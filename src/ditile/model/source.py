"""Reads from source how blocks pass tokens on: from a block's forward, and from the transformer that calls it.

Nothing is guessed: what the source does not say is None, and the caller asks the user for a pattern.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ditile.model.hooks.overrides import find_first_input
from ditile.plan.model_spec import Flow

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
    components = getattr(pipe, "components", None) or {}
    return {**components, **getattr(pipe, "__dict__", {})}


def unwrap_module(module: nn.Module) -> nn.Module:
    """The module that torch.compile or peft wrapped."""
    # Each may wrap what the other wrapped; four is more than anybody nests.
    for _ in range(4):
        unwrap = getattr(module, "get_base_model", None)
        module = unwrap() if callable(unwrap) else getattr(module, "_orig_mod", module)
    return module


def list_forward_parameters(block: nn.Module) -> list[str]:
    """The named parameters of a block's forward."""
    parameters = list(inspect.signature(type(unwrap_module(block)).forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def find_token_parameters(parameters: Sequence[str]) -> tuple[str, str | None]:
    """The parameters that take the image tokens ("" if there is no parameter) and the text (None if there is none)."""
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


def infer_block_flow(block: nn.Module, call: BlockCall | None) -> Flow | None:
    """How a block passes tokens on; None if the sources do not say.

    Args:
        call: how its transformer calls it, if known: it decides what the block's own source leaves open.
    """
    parameters = list_forward_parameters(block)
    image, text = find_token_parameters(parameters)
    arguments = {} if call is None else call.bind_arguments(parameters)
    flow = _infer_from_returns(_read_returned_names(block), parameters, image)
    if flow is None and call and call.results:
        flow = _infer_from_results(call.results, arguments, image)
    if flow is None or "text" in flow.returns:
        return flow
    # A parameter for text that the transformer gives nothing, or None, is no stream.
    if arguments and arguments.get(text or "", NONE) == NONE:
        text = None
    return Flow(flow.returns, image, text)


def _read_returned_names(block: nn.Module) -> set[tuple[str, ...]]:
    """The names that each return statement of a block's forward returns; "" for what has no name."""
    function = parse_function(inspect.unwrap(type(unwrap_module(block)).forward))
    if function is None:
        return set()
    names = set()
    for node in _walk_own_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            names.add(_name_returned_values(node.value))
    return names


def read_block_calls(transformer: nn.Module) -> dict[str, BlockCall]:
    """List -> how the transformer calls its blocks, in the order of its source; empty if that cannot be read."""
    block_calls: dict[str, BlockCall] = {}
    overridden = {"__init__"}
    lists = {name for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)}
    bases = type(transformer).__mro__
    for cls in bases[: bases.index(nn.Module)]:
        functions = [function for function in _parse_methods(cls, lists) if function.name not in overridden]
        # A class may define a name twice, as a property and its setter; only what a subclass redefines is hidden.
        overridden |= {function.name for function in functions}
        for function in functions:
            for name, call in _find_block_loops(function):
                if name not in block_calls or not block_calls[name].results:
                    block_calls[name] = call
    return block_calls


def _infer_from_returns(returns: set[tuple[str, ...]], parameters: Sequence[str], image: str) -> Flow | None:
    """The flow by the names in the return statements; None if these differ or do not say it."""
    if len(returns) != 1:
        return None
    (names,) = returns
    if "*" in names or len(names) not in (1, 2):
        return None
    if len(names) == 1:
        return Flow(("image",), image, None)
    first, second = names
    # None stands for a stream that the block does not have.
    if second == NONE:
        return Flow(("image", "text"), image, None)
    if first == NONE:
        return Flow(("text", "image"), image, None)
    if first == image and second in parameters:
        return Flow(("image", "text"), image, second)
    if second == image and first in parameters:
        return Flow(("text", "image"), image, first)
    return None


def _infer_from_results(results: tuple[str, ...], arguments: Mapping[str, str], image: str) -> Flow | None:
    """The flow by the names that the result is assigned to: a stream is what the next block is given."""
    parameter_of = {value: parameter for parameter, value in arguments.items() if value not in ("", NONE)}
    streams = [parameter_of.get(name) for name in results]
    if image not in streams or None in streams or len(streams) > 2:
        return None
    if len(streams) == 1:
        return Flow(("image",), image, None)
    first, second = streams
    if second == image:
        return Flow(("text", "image"), image, first)
    return Flow(("image", "text"), image, second)


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
        # A method of a tensor; one of a module, as `self.norm(x)`, may return anything.
        if isinstance(root, ast.BinOp) or read_name(root) not in ("", "self"):
            return ("",)
    return ("*",)


def _name_item(item: ast.expr) -> str:
    """The name of what is returned in a tuple."""
    if isinstance(item, ast.Constant) and item.value is None:
        return NONE
    return read_name(item) or "*"


def _parse_methods(cls: type, lists: set[str]) -> Iterator[ast.FunctionDef]:
    """The methods of a class that name one of its lists; none if there is no source."""
    for member in vars(cls).values():
        if not inspect.isfunction(member):
            continue
        function: Any = inspect.unwrap(member)
        if lists & set(function.__code__.co_names):
            parsed = parse_function(function)
            if parsed is not None:
                yield parsed


def parse_function(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The syntax tree of a function; None if it has no source, or is a lambda in the middle of an expression."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return body if isinstance(body, ast.FunctionDef) else None


def _walk_own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function in the order of its source, without the nodes of nested functions."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            # Before what follows, so that the order is that of the source.
            queue[:0] = list(ast.iter_child_nodes(node))


def _find_block_loops(function: ast.FunctionDef) -> Iterator[tuple[str, BlockCall]]:
    """The lists over which a function loops."""
    aliases: dict[str, str] = {}
    for node in _walk_own_nodes(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            attribute = read_own_attribute(node.value)
            if attribute:
                aliases[node.targets[0].id] = attribute
        if not isinstance(node, ast.For):
            continue
        lists = _find_loop_lists(node.iter, aliases)
        is_zipped = any(read_name(part) == "zip" for part in ast.walk(node.iter))
        names = [part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)]
        for index, name in enumerate(lists):
            block = ""
            # The last variables of the loop are the blocks; one before them may count.
            if len(names) >= len(lists):
                block = names[index - len(lists)]
            yield name, _read_loop_call(node, block, alone=not (is_zipped and len(lists) > 1))


def _find_loop_lists(iterated: ast.expr, aliases: Mapping[str, str]) -> list[str]:
    """The attributes of `self` that a loop runs over, in order; not those that only say how far."""
    if isinstance(iterated, ast.Subscript):
        return _find_loop_lists(iterated.value, aliases)
    if isinstance(iterated, ast.Call):
        # Such as `enumerate(self.blocks)`, or `zip` of two lists.
        lists = []
        for argument in iterated.args:
            lists += _find_loop_lists(argument, aliases)
        return lists
    name = aliases.get(read_name(iterated)) or read_own_attribute(iterated)
    return [name] if name else []


def read_own_attribute(node: ast.AST) -> str:
    """`x` of `self.x`; empty if a node is something else."""
    if isinstance(node, ast.Attribute) and read_name(node.value) == "self":
        return node.attr
    return ""


def read_name(node: ast.AST) -> str:
    """The name that a node is; empty if it is something else."""
    return node.id if isinstance(node, ast.Name) else ""


def _read_loop_call(loop: ast.For, block: str, *, alone: bool) -> BlockCall:
    """The call of a block in the body of a loop, with the names that its result is assigned to."""
    # The loops of diffusers' U-ViT call `layer_`, which is the layer or its checkpoint.
    callees = (block, f"{block}_")
    for node in ast.walk(loop):
        if not isinstance(node, ast.Assign):
            continue
        for part in ast.walk(node.value):
            if not isinstance(part, ast.Call) or read_name(part.func) not in callees:
                continue
            named = {word.arg: _name_call_argument(word.value) for word in part.keywords if word.arg}
            # What a starred argument holds is not known, so neither is what comes after it.
            if any(isinstance(argument, ast.Starred) for argument in part.args):
                return BlockCall(named=named, alone=alone)
            positional = tuple(map(_name_call_argument, part.args))
            return BlockCall(_name_call_results(node, part), positional, named, alone)
    return BlockCall(alone=alone)


def _name_call_results(assigned: ast.Assign, call: ast.Call) -> tuple[str, ...]:
    """The names that the result of a call is assigned to; "" if it is changed on the way."""
    value = assigned.value
    target = assigned.targets[0]
    if isinstance(value, ast.Subscript) and value.value is call:
        return ()
    is_a_branch = isinstance(value, ast.IfExp) and call in (value.body, value.orelse)
    if value is not call and not is_a_branch:
        return ("",)
    if isinstance(target, ast.Tuple):
        return tuple(map(read_name, target.elts))
    return (read_name(target),)


def _name_call_argument(value: ast.expr) -> str:
    if isinstance(value, ast.Constant) and value.value is None:
        return NONE
    return read_name(value)
