"""Reads the lists of a transformer's blocks and their flow from source, for caches of a class that is in no table.

The sources are those of a block's forward, and of the transformer that calls it. Nothing is guessed: if they do not
show the flow, a `BlockAdapter` with a `forward_pattern` has to say it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ditile.model.block_table import BlockList, find_token_parameters, list_forward_parameters, unwrap_module
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError

NONE = "None"
"""The name that stands for a missing stream in the result of a block."""


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The call of a list's blocks in a transformer.

    Attributes:
        results: the names that the result is assigned to; empty if they are not known.
        positional: each positional argument: a name, "None", or "" for anything else.
        named: each keyword argument, in the same form.
        alone: whether no other list is called in turns with it.
    """

    results: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True

    def bind_arguments(self, parameters: Sequence[str]) -> dict[str, str]:
        """Map the parameters of the block to the arguments."""
        return {**dict(zip(parameters, self.positional, strict=False)), **self.named}


_PREPARES = re.compile(r"refiner|(^|_)(text|txt|context|caption|prompt)(_|$)")
"""Names of lists that prepare tokens once, ahead of the chain."""


def discover_block_lists(transformer: nn.Module) -> list[BlockList]:
    """Discover the lists of blocks of a transformer from its source.

    Raises:
        ModelError: if there is none, two are called in turns, or no flow of their blocks is known.
    """
    model = unwrap_module(transformer)
    block_lists = []
    for candidate in find_candidate_lists(model):
        block_lists.append(_build_discovered_list(model, *candidate))
    if not block_lists:
        raise ModelError(
            f"{type(model).__name__} has no ModuleList that its forward runs its tokens through; name one with "
            "BlockAdapter(transformer=..., blocks=..., forward_pattern=...)"
        )
    return block_lists


def find_candidate_lists(transformer: nn.Module) -> Iterator[tuple[str, nn.ModuleList, BlockCall | None]]:
    """Yield the lists that may form a transformer's chain, in order of execution, with their calls."""
    calls = read_block_calls(transformer)
    lists: dict[str, nn.ModuleList] = {}
    for name, child in transformer.named_children():
        if isinstance(child, nn.ModuleList) and _has_custom_blocks(child):
            lists[name] = child
    called = [name for name in calls if name in lists]
    # If no call can be read, the order of the attributes is used.
    for name in called or lists:
        if not _only_prepares_tokens(name, lists[name], calls.get(name)):
            yield name, lists[name], calls.get(name)


def read_list_flow(model: nn.Module, name: str, blocks: Iterable[nn.Module]) -> Flow | None:
    """Read the flow of a list's blocks; None if they differ, or their source does not show it."""
    return _infer_common_flow(blocks, read_block_calls(model).get(name))


def _infer_common_flow(blocks: Iterable[nn.Module], call: BlockCall | None) -> Flow | None:
    """Infer the common flow of a list's blocks from their sources; None if they differ."""
    classes = {type(unwrap_module(block)): block for block in blocks}
    flows = set()
    for block in classes.values():
        flows.add(infer_block_flow(block, call))
    if len(flows) != 1:
        return None
    return flows.pop()


def _build_discovered_list(model: nn.Module, name: str, blocks: nn.ModuleList, call: BlockCall | None) -> BlockList:
    """Build a list with the common flow of its blocks."""
    if call is not None and not call.alone:
        raise ModelError(
            f"{type(model).__name__} calls the blocks of {name} and of another list in turns, so none can be left out; "
            "run it without a cache"
        )
    flow = _infer_common_flow(blocks, call)
    if flow is None:
        classes = ", ".join(sorted({type(unwrap_module(block)).__name__ for block in blocks}))
        raise ModelError(
            f"{type(model).__name__}.{name}: the source of {classes} does not say in which order its blocks return "
            "image and text; say it with BlockAdapter(transformer=..., blocks=..., forward_pattern=ForwardPattern....)"
        )
    return BlockList(name, tuple(blocks), flow)


def _has_custom_blocks(modules: nn.ModuleList) -> bool:
    """Return whether the modules of a list are more than PyTorch's own layers."""
    classes = {type(unwrap_module(module)): module for module in modules}
    for cls, module in classes.items():
        if cls.__module__.startswith("torch.") or cls.forward is nn.Module.forward:
            return False
        if not list_forward_parameters(module):
            return False
    return bool(classes)


def _only_prepares_tokens(name: str, blocks: nn.ModuleList, call: BlockCall | None) -> bool:
    """Return whether a list only prepares tokens for the lists after it, or does not pass on its own tokens."""
    if _PREPARES.search(name):
        return True
    if call is None or not call.results:
        return False
    parameters = list_forward_parameters(blocks[0])
    image, _ = find_token_parameters(parameters)
    tokens = call.bind_arguments(parameters).get(image, "")
    return tokens == "encoder_hidden_states" or _PREPARES.search(tokens) is not None or tokens not in call.results


def infer_block_flow(block: nn.Module, call: BlockCall | None) -> Flow | None:
    """Infer how a block passes tokens on; None if the sources do not show it.

    Args:
        call: the call in its transformer, if known: it decides when the block's own source does not.
    """
    parameters = list_forward_parameters(block)
    image, text = find_token_parameters(parameters)
    arguments = {} if call is None else call.bind_arguments(parameters)
    flow = _infer_from_returns(_read_returned_names(block), parameters, image)
    if flow is None and call and call.results:
        flow = _infer_from_results(call.results, arguments, image)
    if flow is None or "text" in flow.returns:
        return flow
    # A text parameter for which the transformer passes nothing, or None, is not a stream.
    if arguments and arguments.get(text or "", NONE) == NONE:
        text = None
    return Flow(flow.returns, image, text)


def _read_returned_names(block: nn.Module) -> set[tuple[str, ...]]:
    """Return the names in each return statement of a block's forward; "" for a value without a name."""
    function = parse_function(inspect.unwrap(type(unwrap_module(block)).forward))
    if function is None:
        return set()
    names = set()
    for node in _walk_own_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            names.add(_name_returned_values(node.value))
    return names


def read_block_calls(transformer: nn.Module) -> dict[str, BlockCall]:
    """Read the calls of blocks in a transformer: list -> call, in the order of its source; empty if it cannot be
    read."""
    block_calls: dict[str, BlockCall] = {}
    overridden = {"__init__"}
    lists = {name for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)}
    bases = type(transformer).__mro__
    for cls in bases[: bases.index(nn.Module)]:
        functions = [function for function in _parse_methods(cls, lists) if function.name not in overridden]
        # A class may define a name twice, as a property and its setter; only names redefined by a subclass are hidden.
        overridden |= {function.name for function in functions}
        for function in functions:
            for name, call in _find_block_loops(function):
                if name not in block_calls or not block_calls[name].results:
                    block_calls[name] = call
    return block_calls


def _infer_from_returns(returns: set[tuple[str, ...]], parameters: Sequence[str], image: str) -> Flow | None:
    """Infer the flow from the names in the return statements; None if these differ or do not show it."""
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
    """Infer the flow from the names to which the result is assigned: a stream is an argument of the next block."""
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
    """Return the names in a returned expression; "" is a tensor without a name, "*" may be anything."""
    if isinstance(value, ast.Tuple):
        return tuple(_name_item(item) for item in value.elts)
    if isinstance(value, ast.Name):
        return (value.id,)
    if isinstance(value, ast.BinOp):
        return ("",)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        root = value.func.value
        # A method of a tensor returns a tensor; one of a module, such as `self.norm(x)`, may return anything.
        if isinstance(root, ast.BinOp) or read_name(root) not in ("", "self"):
            return ("",)
    return ("*",)


def _name_item(item: ast.expr) -> str:
    """Return the name of an item in a returned tuple."""
    if isinstance(item, ast.Constant) and item.value is None:
        return NONE
    return read_name(item) or "*"


def _parse_methods(cls: type, lists: set[str]) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a class with one of its lists in their code; none if there is no source."""
    for member in vars(cls).values():
        if not inspect.isfunction(member):
            continue
        function: Any = inspect.unwrap(member)
        if lists & set(function.__code__.co_names):
            parsed = parse_function(function)
            if parsed is not None:
                yield parsed


def parse_function(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Return the syntax tree of a function; None if it has no source, or is a lambda inside an expression."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return body if isinstance(body, ast.FunctionDef) else None


def _walk_own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function in the order of its source, without the nodes of nested functions."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            # The children go before the rest of the queue, to keep the order of the source.
            queue[:0] = list(ast.iter_child_nodes(node))


def _find_block_loops(function: ast.FunctionDef) -> Iterator[tuple[str, BlockCall]]:
    """Yield each list in a loop of a function, with the call of its block."""
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
    """Return the attributes of `self` in a loop's iterable, in order, except those that only set its length."""
    if isinstance(iterated, ast.Subscript):
        return _find_loop_lists(iterated.value, aliases)
    if isinstance(iterated, ast.Call):
        # The call is, for example, `enumerate(self.blocks)`, or `zip` of two lists.
        lists = []
        for argument in iterated.args:
            lists += _find_loop_lists(argument, aliases)
        return lists
    name = aliases.get(read_name(iterated)) or read_own_attribute(iterated)
    return [name] if name else []


def read_own_attribute(node: ast.AST) -> str:
    """Return `x` for a node `self.x`; empty for any other node."""
    if isinstance(node, ast.Attribute) and read_name(node.value) == "self":
        return node.attr
    return ""


def read_name(node: ast.AST) -> str:
    """Return the name of a name node; empty for any other node."""
    return node.id if isinstance(node, ast.Name) else ""


def _read_loop_call(loop: ast.For, block: str, *, alone: bool) -> BlockCall:
    """Read the call of a block in the body of a loop, with the names to which its result is assigned."""
    # The loops of diffusers' U-ViT call `layer_`, which is the layer or its checkpoint.
    callees = (block, f"{block}_")
    for node in ast.walk(loop):
        if not isinstance(node, ast.Assign):
            continue
        for part in ast.walk(node.value):
            if not isinstance(part, ast.Call) or read_name(part.func) not in callees:
                continue
            named = {word.arg: _name_call_argument(word.value) for word in part.keywords if word.arg}
            # The contents of a starred argument are unknown, so the arguments after it are too.
            if any(isinstance(argument, ast.Starred) for argument in part.args):
                return BlockCall(named=named, alone=alone)
            positional = tuple(map(_name_call_argument, part.args))
            return BlockCall(_name_call_results(node, part), positional, named, alone)
    return BlockCall(alone=alone)


def _name_call_results(assigned: ast.Assign, call: ast.Call) -> tuple[str, ...]:
    """Return the names to which the result of a call is assigned; "" if it is changed on the way."""
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
