"""Derives how tensor parallelism cuts the Linears of blocks, from how numbers flow between them in one call.

A Linear whose input was made by other Linears of the block alone (by attention, an activation, a gate) and by nothing
of the streams of tokens is cut by its inputs ("rowwise"), and those Linears by their outputs ("colwise"): between them
every rank has a share of the heads or hidden features, and behind it ranks are summed.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.errors import DitileError
from ditile.hooks.overrides import list_parameter_names, override_attribute
from ditile.hooks.pieces import list_predictions
from ditile.models.record import Call, ChainBlock, list_chain
from ditile.parallel.tensor.cuts import HEAD_COUNTS
from ditile.parallel.tensor.tensor import shard_weights
from ditile.plan.anatomy import TOKENS, Anatomy, ListAnatomy, select_word

STREAM = "stream"
"""What is made of the tokens that a block is given."""


class Use(NamedTuple):
    """A call of a Linear: what its input was made of, and the parts that were joined to it in its last dimension."""

    sources: frozenset[str]
    parts: tuple[int, ...]


def derive_tensor_cuts(transformer: nn.Module, anatomy: Anatomy, call: Call) -> Anatomy:
    """The same anatomy with how tensor parallelism cuts the model; nothing where two ranks do not make the same of it.

    Args:
        transformer: with all its blocks; a small twin of the class will do.
        anatomy: which arguments of its blocks are streams of tokens.
        call: the arguments of a call.
    """
    flow = _FlowWatch()
    with ExitStack() as stack:
        for block in list_chain(transformer):
            flow.watch_block(stack, block, anatomy.lists[block.list_name])
        stack.enter_context(torch.no_grad())
        stack.enter_context(flow)
        transformer(**call)
    table: dict[str, list[Any]] = {}
    for path, style in flow.list_styles().items():
        table.setdefault(_find_pattern(transformer, path), style)
    return replace(anatomy, tensor=table) if _is_proven(transformer, table, call) else anatomy


def _find_pattern(transformer: nn.Module, path: str) -> str:
    """A path in which `*` stands for each place in a list whose modules are of one class: blocks, experts."""
    path, colon, argument = path.partition(":")
    names = path.split(".")
    places = [at for at, name in enumerate(names) if at and name.isdecimal()]
    for at in places:
        siblings = transformer.get_submodule(".".join(path.split(".")[:at]))
        if isinstance(siblings, nn.ModuleList) and len({type(each) for each in siblings}) == 1 < len(siblings):
            names[at] = "*"
    return ".".join(names) + colon + argument


TOLERANCE = 1e-4
"""Of the largest value of a prediction, in float32: what is cut wrongly differs by 1e-2 or ends in an error."""


def _is_proven(transformer: nn.Module, table: Mapping[str, Any], call: Call) -> bool:
    """Whether two ranks, in threads, make of a call what one makes."""
    if not table:
        return False
    with torch.no_grad():
        want = list_predictions(transformer(**call))
    ranks, results = _ThreadSum(), dict[int, list[Tensor]]()

    def run(rank: int) -> None:
        try:
            mine = copy.deepcopy(transformer)
            sums = functools.partial(ranks.sum_over_ranks, rank)
            shard_weights(mine, table, Axis("tensor", (0, 1), rank), Traffic(), sum_over_ranks=sums)
            with torch.no_grad():
                results[rank] = list_predictions(mine(**call))
        except (DitileError, RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            LOG.info("tensor=2 of %s: %s", type(transformer).__name__, error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(results) == 2 and all(
        bool((one - two).abs().max() <= TOLERANCE * two.abs().max())
        for got in results.values()
        for one, two in zip(got, want, strict=True)
    )


class _ThreadSum:
    """Sums over two threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60.0)
        self._given: dict[int, Tensor] = {}

    def sum_over_ranks(self, rank: int, x: Tensor) -> Tensor:
        """The sum of what both give."""
        self._given[rank] = x
        self.barrier.wait()
        total = self._given[0] + self._given[1]
        self.barrier.wait()
        return total


LOG = logging.getLogger("ditile")
_ARGUMENT = "@"
"""In front of what names an argument of a block, beside its streams."""


class _FlowWatch(TorchFunctionMode):
    """Notes of every tensor which Linears and which streams it was made of since."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, frozenset[str]] = {}
        self._parts: dict[int, tuple[int, ...]] = {}
        self._kept: list[Tensor] = []  # so that no address is given twice
        self._linears: dict[int, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._uses: dict[str, Use] = {}
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._norms: dict[str, frozenset[str]] = {}
        self._arguments: dict[str, tuple[torch.Size, str]] = {}  # shape, and kinds of the dimensions
        self._by_heads: dict[str, tuple[int, frozenset[str]]] = {}  # the dimension of heads, and whose they are

    def watch_block(self, stack: ExitStack, block: ChainBlock, of_list: ListAnatomy) -> None:
        """Marks the streams that a block is given, and knows its Linears and norms."""
        streams = {name for name in (of_list.image, of_list.text) if name is not None}
        for path, module in block.block.named_modules():
            name = f"{block.name}.{path}"
            self._modules[name] = module
            if type(module) is nn.Linear:
                self._linears[id(module.weight)] = name
            elif "norm" in type(module).__name__.lower():
                stack.callback(module.register_forward_pre_hook(functools.partial(self._note_norm, name)).remove)
        forward, names = block.block.forward, list_parameter_names(block.block)

        @functools.wraps(forward)
        def forward_and_mark(*args: Any, **kwargs: Any) -> Any:
            # Positional arguments are streams first in every block, and what else is in front counts as one too.
            named = {name: value for name, value in kwargs.items() if name in streams}
            for leaf in pytree.tree_leaves([args[: len(streams) or 1], named]):
                if isinstance(leaf, Tensor):
                    self._mark(leaf, frozenset({STREAM}))
            call = dict(zip(names, args, strict=False)) | kwargs
            for name, kinds in of_list.arguments.items():
                for index, leaf in enumerate(pytree.tree_leaves(call.get(name))):
                    if isinstance(leaf, Tensor) and name not in streams and index < len(kinds):
                        source = f"{_ARGUMENT}{block.name}:{name}.{index}"
                        self._arguments[source] = leaf.shape, select_word(kinds[index], leaf.ndim) or ""
                        self._mark(leaf, frozenset({source}))
            return forward(*args, **kwargs)

        override_attribute(stack, block.block, "forward", forward_and_mark)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [x for x in pytree.tree_leaves([args, kwargs]) if isinstance(x, Tensor)]
        if func is functional.linear and (path := self._linears.get(id(args[1] if len(args) > 1 else None))):
            self._note_linear(path, args[0])
            self._mark(result, frozenset({path}))
            return result
        sources = frozenset().union(*(self._sources.get(id(x), frozenset()) for x in given))
        parts = self._find_parts(func, args, kwargs, given)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and (sources or parts):
                self._mark(leaf, sources)
                if parts and leaf.shape[-1:] == (sum(parts),):
                    self._parts[id(leaf)] = parts
        self._note_split(func, args, result)
        if getattr(func, "__name__", "") in ("mul", "__mul__", "multiply") and len(given) == 2:
            self._note_product(*given)
            self._note_product(*reversed(given))
        return result

    def _note_product(self, x: Tensor, table: Tensor) -> None:
        """An argument that is multiplied with what a Linear made has a dimension of heads, or of all their features."""
        made, given = (self._sources.get(id(each), frozenset()) for each in (x, table))
        linears = {name for name in made if not name.startswith(_ARGUMENT)}
        if STREAM in linears or not linears or not given or not all(name.startswith(_ARGUMENT) for name in given):
            return
        features = {self._modules[name].out_features for name in linears}
        heads = {count for name in linears for count in self._find_head_counts(name)}
        for source in given:
            shape, word = self._arguments[source]
            last = len(shape) - 1
            counted = [dim for dim in (last, 1, 2) if dim <= last and word[dim : dim + 1] not in {*TOKENS, "B"}]
            dims = [dim for dim in counted if shape[dim] in (features if dim == last else heads)]
            if dims and shape[dims[0]] > 1:
                self._by_heads[source] = dims[0], frozenset(linears)

    def _find_head_counts(self, path: str) -> list[int]:
        owner = self._modules.get(path.rpartition(".")[0])
        return (
            [] if owner is None else [count for name in HEAD_COUNTS if isinstance(count := vars(owner).get(name), int)]
        )

    def _mark(self, x: Tensor, sources: frozenset[str]) -> None:
        self._sources[id(x)] = sources
        self._kept.append(x)

    def _find_parts(self, func: Any, args: Any, kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> tuple[int, ...]:
        """The widths that were joined in the last dimension of what a function makes."""
        name = getattr(func, "__name__", "")
        if name in ("cat", "concat", "concatenate"):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            if given and given[0].ndim and dim in (-1, given[0].ndim - 1):
                return tuple(x.shape[-1] for x in given)
        return next((self._parts[id(x)] for x in given if id(x) in self._parts), ())

    def _note_linear(self, path: str, x: Tensor) -> None:
        sources, parts = self._sources.get(id(x), frozenset()), self._parts.get(id(x), ())
        parts = parts if sum(parts) == x.shape[-1] else ()
        before = self._uses.get(path)
        if before is not None:
            sources |= before.sources
        self._uses[path] = Use(sources, parts)

    def _note_split(self, func: Any, args: Any, result: Any) -> None:
        """What a Linear made side by side is taken apart along the last dimension."""
        name = getattr(func, "__name__", "")
        if name in ("reshape", "view", "unflatten"):
            self._note_packed_heads(args[0], result)
        if name not in ("chunk", "split", "tensor_split", "unbind") or not args:
            return
        sources = self._sources.get(id(args[0]), frozenset())
        if not isinstance(result, tuple | list) or not all(isinstance(x, Tensor) and x.ndim for x in result):
            return
        widths = tuple(x.shape[-1] for x in result)
        if len(sources) == 1 and sum(widths) == args[0].shape[-1]:
            (path,) = sources
            module = self._modules.get(path)
            if isinstance(module, nn.Linear) and module.out_features == sum(widths):
                self._blocks[path] = widths

    def _note_packed_heads(self, x: Tensor, result: Tensor) -> None:
        """Queries, keys and values lie side by side in what a Linear made: `[..., 3, heads, features of a head]`."""
        sources = self._sources.get(id(x), frozenset())
        if len(sources) == 1 and result.ndim == x.ndim + 2 and result.shape[-3] in (2, 3):
            (path,) = sources
            module = self._modules.get(path)
            if isinstance(module, nn.Linear) and math.prod(result.shape[-3:]) == module.out_features == x.shape[-1]:
                self._blocks[path] = (module.out_features // result.shape[-3],) * result.shape[-3]

    def _note_norm(self, path: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            x = args[0]
            sources = self._sources.get(id(x), frozenset())
            linears = {name for name in sources if isinstance(self._modules.get(name), nn.Linear)}
            if len(sources) == 1 and linears and x.shape[-1] == self._modules[min(linears)].out_features:
                self._norms[path] = sources

    def list_styles(self) -> dict[str, list[Any]]:
        """Path of a module -> how it is cut."""
        uses = {
            path: use._replace(sources=frozenset(name for name in use.sources if not name.startswith(_ARGUMENT)))
            for path, use in self._uses.items()
        }
        rows = {path: use for path, use in uses.items() if use.sources and STREAM not in use.sources}
        columns: dict[str, str] = {}
        styles: dict[str, list[Any]] = {}
        for path, use in rows.items():
            if path in columns or any(name in styles for name in use.sources if styles.get(name, [""])[0] == "rowwise"):
                continue
            for name in sorted(use.sources):
                columns[name] = path
                styles[name] = _describe("colwise", self._blocks.get(name, ()))
            styles[path] = _describe("rowwise", use.parts)
        for source, (dim, linears) in self._by_heads.items():
            if linears <= columns.keys():
                # Its parts are alike, as the cosines and sines of a rotation.
                argument, shape = source.rpartition(".")[0], self._arguments[source][0]
                for other, (size, _) in self._arguments.items():
                    if other.rpartition(".")[0] == argument and size == shape:
                        styles[other.removeprefix(_ARGUMENT)] = ["heads", dim]
        for path, sources in self._norms.items():
            if sources <= columns.keys():
                styles[path] = ["rms_norm"]
        return styles


def _describe(kind: str, parts: Iterable[int]) -> list[Any]:
    sizes = list(parts)
    if len(sizes) < 2:
        return [kind]
    common = math.gcd(*sizes)
    return [kind, *(size // common for size in sizes)]
