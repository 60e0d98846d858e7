"""Derives how tensor parallelism cuts the Linears of blocks, from how numbers flow between them in one call.

A Linear whose input was made by other Linears of the block alone (by attention, an activation, a gate) and by nothing
of the streams of tokens is cut by its inputs ("rowwise"), and those Linears by their outputs ("colwise"): between them
every rank has a share of the heads or hidden features, and behind it ranks are summed. A Linear that is given one row
for each image, as a modulation is, is cut by its outputs, and every rank gets all of these ("gathered").
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import threading
from collections.abc import Mapping, Sequence
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
from ditile.model.hooks.overrides import list_parameter_names, override_attribute
from ditile.model.hooks.pieces import list_predictions
from ditile.model.record import Call, ChainBlock, list_chain
from ditile.parallel.tensor.cuts import TensorCuts, read_head_counts
from ditile.parallel.tensor.tensor import shard_weights
from ditile.plan.anatomy import TOKENS, Anatomy, ListAnatomy, select_word
from ditile.plan.errors import DitileError, ModelError, PlanError

STREAM = "stream"
"""What is made of the tokens that a block is given."""


class Part(NamedTuple):
    """Features that were joined with others in the last dimension: how many, and what they were made of."""

    width: int
    sources: frozenset[str]


class Use(NamedTuple):
    """A call of a Linear: what its input was made of, and the parts that it was joined of."""

    sources: frozenset[str]
    parts: tuple[Part, ...]


def derive_tensor_cuts(transformer: nn.Module, anatomy: Anatomy, call: Call) -> Anatomy:
    """The same anatomy with how tensor parallelism cuts the model; nothing where ranks do not make the same of it.

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
    for path, (kind, *details) in flow.list_styles().items():
        named = [_find_pattern(transformer, each) if isinstance(each, str) else each for each in details]
        table.setdefault(_find_pattern(transformer, path), [kind, *named])
    return replace(anatomy, tensor=table) if prove_tensor_cuts(transformer, table, call) else anatomy


def _find_pattern(transformer: nn.Module, path: str) -> str:
    """A path in which `*` stands for each place in a list whose modules are of one class: blocks, experts."""
    path, mark, rest = next((path.partition(mark) for mark in ":/" if mark in path), (path, "", ""))
    names = path.split(".")
    places = [at for at, name in enumerate(names) if at and name.isdecimal()]
    for at in places:
        siblings = transformer.get_submodule(".".join(path.split(".")[:at]))
        if isinstance(siblings, nn.ModuleList) and len({type(each) for each in siblings}) == 1 < len(siblings):
            names[at] = "*"
    return ".".join(names) + mark + rest


TOLERANCE = 1e-4
"""Of the largest value of a prediction, in float32: what is cut wrongly differs by 1e-2 or ends in an error."""


def prove_tensor_cuts(transformer: nn.Module, table: Mapping[str, Any], call: Call) -> bool:
    """Whether ranks, in threads, make of a call what one makes: as few ranks as the heads and features allow."""
    size = next((size for size in _PROVEN_DEGREES if _is_divisible(transformer, table, size)), None)
    if size is None:
        return False
    with torch.no_grad():
        want = list_predictions(transformer(**call))
    ranks, results = _ThreadSum(size), dict[int, list[Tensor]]()

    def run(rank: int) -> None:
        try:
            mine = copy.deepcopy(transformer)
            sums = functools.partial(ranks.sum_over_ranks, rank)
            shard_weights(mine, table, Axis("tensor", tuple(range(size)), rank), Traffic(), sum_over_ranks=sums)
            with torch.no_grad():
                results[rank] = list_predictions(mine(**call))
        except (DitileError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            LOG.info("tensor=%d of %s: %s", size, type(transformer).__name__, error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(results) == size and all(
        bool((one - two).abs().max() <= TOLERANCE * two.abs().max())
        for got in results.values()
        for one, two in zip(got, want, strict=True)
    )


_PROVEN_DEGREES = (2, 3, 5, 7)


def _is_divisible(transformer: nn.Module, table: Mapping[str, Any], size: int) -> bool:
    try:
        TensorCuts.match_tensor_table(transformer, table, 0, size)
    except (ModelError, PlanError) as error:
        LOG.info("tensor=%d of %s: %s", size, type(transformer).__name__, error)
        return False
    return True


class _ThreadSum:
    """Sums over threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60.0)
        self._given: list[Tensor] = [torch.empty(0)] * ranks

    def sum_over_ranks(self, rank: int, x: Tensor) -> Tensor:
        """The sum of what all give."""
        self._given[rank] = x
        self.barrier.wait()
        total = functools.reduce(torch.add, self._given)
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
        self._parts: dict[int, tuple[Part, ...]] = {}
        self._kept: list[Tensor] = []  # so that no address is given twice
        self._linears: dict[int, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._uses: dict[str, Use] = {}
        self._spans: dict[int, tuple[str, int]] = {}  # which Linear made it, and its first feature
        self._ends: dict[str, set[int]] = {}  # of what lies side by side in what a Linear makes
        self._norms: dict[str, Part] = {}
        self._modulations: list[str] = []  # Linears that are given one row for each image: of a time or a size
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
        sources = frozenset().union(*(self._find_sources(x) for x in given))
        parts = self._find_parts(func, args, kwargs, given)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and (sources or parts):
                self._mark(leaf, sources)
                if parts and leaf.shape[-1:] == (sum(part.width for part in parts),):
                    self._parts[id(leaf)] = parts
        self._note_split(func, args, result)
        if getattr(func, "__name__", "") in ("mul", "__mul__", "multiply") and len(given) == 2:
            self._note_product(*given)
            self._note_product(*reversed(given))
        return result

    def _note_product(self, x: Tensor, table: Tensor) -> None:
        """An argument that is multiplied with what a Linear made has a dimension of heads, or of all their features."""
        made, given = (self._find_sources(each) for each in (x, table))
        linears = {name for name in made if not name.startswith(_ARGUMENT)}
        if STREAM in linears or not linears or not given or not all(name.startswith(_ARGUMENT) for name in given):
            return
        features = {self._modules[name].out_features for name in linears}
        owners = [owner for name in linears if (owner := self._modules.get(name.rpartition(".")[0])) is not None]
        heads = {count for owner in owners for count in read_head_counts(owner)}
        for source in given:
            shape, word = self._arguments[source]
            last = len(shape) - 1
            counted = [dim for dim in (last, 1, 2) if dim <= last and word[dim : dim + 1] not in {*TOKENS, "B"}]
            dims = [dim for dim in counted if shape[dim] in (features if dim == last else heads)]
            if dims and shape[dims[0]] > 1:
                self._by_heads[source] = dims[0], frozenset(linears)

    def _mark(self, x: Tensor, sources: frozenset[str]) -> None:
        self._sources[id(x)] = sources
        self._kept.append(x)

    def _find_parts(self, func: Any, args: Any, kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> tuple[Part, ...]:
        """What was joined in the last dimension of what a function makes."""
        name = getattr(func, "__name__", "")
        if name in ("cat", "concat", "concatenate"):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            if given and given[0].ndim and dim in (-1, given[0].ndim - 1):
                return tuple(Part(x.shape[-1], self._find_sources(x)) for x in given)
        return next((self._parts[id(x)] for x in given if id(x) in self._parts), ())

    def _find_sources(self, x: Tensor) -> frozenset[str]:
        return self._sources.get(id(x), frozenset())

    def _note_linear(self, path: str, x: Tensor) -> None:
        sources, parts = self._find_sources(x), self._parts.get(id(x), ())
        if sum(part.width for part in parts) != x.shape[-1]:
            parts = (Part(x.shape[-1], sources),)
        if STREAM not in sources and x.numel() == x.shape[0] * x.shape[-1]:
            self._modulations.append(path)
        before = self._uses.get(path)
        self._uses[path] = Use(sources if before is None else sources | before.sources, parts)

    def _note_split(self, func: Any, args: Any, result: Any) -> None:
        """What a Linear made side by side is taken apart along the last dimension, in one step or several."""
        name, x = getattr(func, "__name__", ""), args[0] if args else None
        if not isinstance(x, Tensor) or not x.ndim or (span := self._find_span(x)) is None:
            return
        path, start = span
        if name in ("chunk", "split", "tensor_split") and {part.shape[:-1] for part in result} == {x.shape[:-1]}:
            for part in result:
                self._note_span(part, path, start)
                start += part.shape[-1]
        elif name == "__getitem__" and isinstance(result, Tensor) and result.shape[:-1] == x.shape[:-1]:
            at = args[1][-1] if isinstance(args[1], tuple) else None
            if isinstance(at, slice) and at.step in (None, 1):
                self._note_span(result, path, start + at.indices(x.shape[-1])[0])
        elif name in ("reshape", "view", "unflatten") and result.ndim == x.ndim + 2 and result.shape[-3] in (2, 3):
            # Queries, keys and values: [..., 3, heads, features of a head].
            width = math.prod(result.shape[-2:])
            if width * result.shape[-3] == x.shape[-1]:
                self._ends.setdefault(path, set()).update(range(start + width, start + x.shape[-1] + 1, width))

    def _find_span(self, x: Tensor) -> tuple[str, int] | None:
        """The Linear that made a tensor, and at which of its features the tensor begins."""
        if id(x) in self._spans:
            return self._spans[id(x)]
        sources = self._find_sources(x)
        module = self._modules.get(min(sources)) if len(sources) == 1 else None
        return (min(sources), 0) if isinstance(module, nn.Linear) and module.out_features == x.shape[-1] else None

    def _note_span(self, part: Tensor, path: str, start: int) -> None:
        self._spans[id(part)] = path, start
        self._kept.append(part)
        self._ends.setdefault(path, set()).update({start, start + part.shape[-1]} - {0})

    def _list_blocks(self, path: str) -> list[int]:
        """The sizes of what a Linear makes side by side."""
        ends = sorted({*self._ends.get(path, ()), self._modules[path].out_features})
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _note_norm(self, path: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            x = args[0]
            sources = self._find_sources(x)
            linears = {name for name in sources if isinstance(self._modules.get(name), nn.Linear)}
            if len(sources) == 1 and linears:
                width = x.shape[-1]
                # One of each head has another width.
                if width in self._list_blocks(min(linears)):
                    self._norms[path] = Part(width, sources)

    def list_styles(self) -> dict[str, list[Any]]:
        """Path of a module -> how it is cut."""
        uses = {
            path: use._replace(sources=frozenset(name for name in use.sources if not name.startswith(_ARGUMENT)))
            for path, use in self._uses.items()
        }
        rows = {path: use for path, use in uses.items() if use.sources and STREAM not in use.sources}
        columns: set[str] = set()
        styles: dict[str, list[Any]] = {}
        for path, use in rows.items():
            if path in columns or any(styles.get(name, [""])[0] == "rowwise" for name in use.sources):
                continue
            columns |= use.sources
            for name in sorted(use.sources):
                styles[name] = ["colwise", *self._describe_columns(name)]
            styles[path] = ["rowwise", *(self._describe_part(part) for part in use.parts)]
            if isinstance(styles[path][1], int) and len(use.parts) == 1:
                del styles[path][1]
        for source, (dim, linears) in self._by_heads.items():
            if linears <= columns:
                # Its parts are alike, as the cosines and sines of a rotation.
                argument, shape = source.rpartition(".")[0], self._arguments[source][0]
                for other, (size, _) in self._arguments.items():
                    if other.rpartition(".")[0] == argument and size == shape:
                        styles[other.removeprefix(_ARGUMENT)] = ["heads", dim, min(linears)]
        styles |= {path: ["gathered"] for path in self._modulations if path not in styles}
        for path, part in self._norms.items():
            if part.sources <= columns:
                styles[path] = ["rms_norm", self._describe_part(part)]
        return styles

    def _describe_columns(self, path: str) -> list[Any]:
        """What a Linear makes side by side: proportions, or where parts differ, what its owner calls their sizes."""
        blocks = self._list_blocks(path)
        if len(blocks) == 1:
            return []
        common = math.gcd(*blocks)
        proportions = [block // common for block in blocks]
        owner = self._modules.get(path.rpartition(".")[0])
        if owner is None or len(set(blocks)) == 1:
            return proportions
        # A config may change the proportions of parts that are not alike.
        sizes = {value: name for name, value in reversed(vars(owner).items()) if type(value) is int}
        return [sizes[block] for block in blocks] if sizes.keys() >= set(blocks) else proportions

    def _describe_part(self, part: Part) -> str | int:
        """The Linear that makes as many features, or that and which of its blocks; the number where none does."""
        for name in (name for name in self._uses if name in part.sources):  # in the order of calls: queries first
            blocks = self._list_blocks(name)
            if part.width in blocks:
                return name if len(blocks) == 1 else f"{name}/{blocks.index(part.width)}"
        return part.width
