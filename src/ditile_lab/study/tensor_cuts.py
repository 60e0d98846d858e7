"""Derives the tensor parallel cuts of blocks' Linears, from the flow of numbers between them in one call.

A Linear is cut by its inputs ("rowwise") if its input was made only by other Linears of the block, through attention,
an activation or a gate, and not directly from the token streams. Those other Linears are cut by their outputs
("colwise"). Between them every rank has a share of the heads or hidden features; after the rowwise Linear the ranks are
summed. A Linear that gets one row per image, such as a modulation, is cut by its outputs, and every rank gets all of
them ("gathered").
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ditile.distributed.mesh import Axis
from ditile.distributed.recording.segments import list_tensors
from ditile.distributed.transport import Traffic
from ditile.model.hooks.overrides import list_parameter_names, override_attribute
from ditile.model.hooks.pieces import list_predictions
from ditile.parallel.tensor.cuts import TensorCuts, read_head_counts
from ditile.parallel.tensor.sharding import shard_weights
from ditile.plan.anatomy import TOKENS, Anatomy, ListAnatomy, select_word
from ditile.plan.errors import DitileError, ModelError, PlanError
from ditile_lab.study.capture import Call
from ditile_lab.study.record import ChainBlock, list_chain
from ditile_lab.study.thread_ranks import ThreadRank, run_thread_ranks

LOG = logging.getLogger("ditile")
STREAM = "stream"
"""The source of tensors made from the input tokens of a block."""
_ARGUMENT = "@"
"""The prefix of the source of tensors made from another argument of a block."""
TOLERANCE = 1e-4
"""The largest error relative to a prediction's largest value, in float32: wrong cuts differ by 1e-2 or raise an
error."""
_PROVEN_DEGREES = (2, 3, 5, 7)
"""The numbers of ranks that a proof tries, fewest first; a tiny model may have three heads."""


class Part(NamedTuple):
    """Features that were joined with others in the last dimension: their number, and their sources."""

    width: int
    sources: frozenset[str]


class Use(NamedTuple):
    """A call of a Linear: the sources of its input, and the parts that were joined in it."""

    sources: frozenset[str]
    parts: tuple[Part, ...]


def derive_tensor_cuts(transformer: nn.Module, anatomy: Anatomy, call: Call) -> Anatomy:
    """Return the anatomy with the model's tensor parallel cuts; unchanged if divided ranks compute something else.

    Args:
        transformer: the transformer with all its blocks; a small twin of the class is enough.
        anatomy: tells which arguments of its blocks are streams of tokens.
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
        row = [_find_pattern(transformer, word) for word in style]
        # Blocks of one list share a row; the first one that ran decides.
        table.setdefault(str(_find_pattern(transformer, path)), row)
    if not prove_tensor_cuts(transformer, table, call):
        return anatomy
    return replace(anatomy, tensor=table)


def _find_pattern(transformer: nn.Module, path: str | int) -> str | int:
    """Return a path with `*` for each place in a list of modules of one class; a number stays."""
    if isinstance(path, int):
        return path
    # The part after ":" or "/" names an argument of the module, or a part of its features.
    end = re.search("[:/]|$", path)
    assert end is not None
    names = path[: end.start()].split(".")
    pattern = list(names)
    for place, name in enumerate(names):
        if place == 0 or not name.isdecimal():
            continue
        siblings = transformer.get_submodule(".".join(names[:place]))
        if not isinstance(siblings, nn.ModuleList):
            continue
        # A list with one module does not show whether others would be alike.
        if len(siblings) > 1 and len(set(map(type, siblings))) == 1:
            pattern[place] = "*"
    return ".".join(pattern) + path[end.start() :]


def prove_tensor_cuts(transformer: nn.Module, table: Mapping[str, Any], call: Call) -> bool:
    """Return whether the fewest ranks that divide heads and features, in threads, predict the same as one rank."""
    size = _find_smallest_degree(transformer, table)
    if size is None:
        return False
    with torch.no_grad():
        expected = list_predictions(transformer(**call))

    def run(rank: ThreadRank) -> list[Tensor]:
        divided = copy.deepcopy(transformer)
        axis = Axis("tensor", tuple(range(size)), rank.index)
        shard_weights(divided, table, axis, Traffic(), sum_over_ranks=rank.sum_over_ranks)
        with torch.no_grad():
            return list_predictions(divided(**call))

    try:
        results = run_thread_ranks(size, run)
    except (DitileError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        LOG.info("tensor=%d of %s: %s", size, type(transformer).__name__, error)
        return False
    for predictions in results:
        for result, whole in zip(predictions, expected, strict=True):
            # The comparison is written so that it fails for NaN.
            if not (result - whole).abs().max() <= TOLERANCE * whole.abs().max():
                return False
    return True


def _find_smallest_degree(transformer: nn.Module, table: Mapping[str, Any]) -> int | None:
    """Return the fewest ranks that can share the model by a table; None if none of the tried numbers can."""
    for size in _PROVEN_DEGREES:
        try:
            TensorCuts.match_tensor_table(transformer, table, 0, size)
        except (ModelError, PlanError) as error:
            LOG.info("tensor=%d of %s: %s", size, type(transformer).__name__, error)
        else:
            return size
    return None


class _FlowWatch(TorchFunctionMode):
    """Records from which Linears, streams and arguments every tensor was made."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, frozenset[str]] = {}
        self._parts: dict[int, tuple[Part, ...]] = {}
        # Tensors are known by their addresses, so they are kept alive to keep an address from being reused.
        self._kept: list[Tensor] = []
        self._linears: dict[int, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._uses: dict[str, Use] = {}
        # Address of a tensor -> the Linear that made it, and its first feature.
        self._spans: dict[int, tuple[str, int]] = {}
        # These are the ends of the parts that lie side by side in the output of a Linear.
        self._ends: dict[str, set[int]] = {}
        self._norms: dict[str, Part] = {}
        # These Linears receive one row for each image: of a time or a size.
        self._modulations: list[str] = []
        # Source of an argument -> its shape, and a letter for each dimension.
        self._arguments: dict[str, tuple[torch.Size, str]] = {}
        # Source of an argument -> its dimension of heads, and the Linears whose heads these are.
        self._by_heads: dict[str, tuple[int, frozenset[str]]] = {}

    def watch_block(self, stack: ExitStack, block: ChainBlock, of_list: ListAnatomy) -> None:
        """Mark the arguments that a block receives, and register its Linears and norms."""
        for path, module in block.block.named_modules():
            name = f"{block.name}.{path}"
            self._modules[name] = module
            if type(module) is nn.Linear:
                self._linears[id(module.weight)] = name
            elif "norm" in type(module).__name__.lower():
                stack.callback(module.register_forward_pre_hook(functools.partial(self._note_norm, name)).remove)
        forward = block.block.forward
        names = list_parameter_names(block.block)

        @functools.wraps(forward)
        def forward_and_mark(*args: Any, **kwargs: Any) -> Any:
            self._mark_arguments(block.name, of_list, names, args, kwargs)
            return forward(*args, **kwargs)

        override_attribute(stack, block.block, "forward", forward_and_mark)

    def _mark_arguments(
        self,
        block: str,
        of_list: ListAnatomy,
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        streams = {of_list.image, of_list.text} - {None}
        # In every block the first positional arguments are streams.
        given_streams = list(args[: max(len(streams), 1)])
        given_streams += [value for name, value in kwargs.items() if name in streams]
        for leaf in list_tensors(given_streams):
            self._mark(leaf, frozenset({STREAM}))
        call = dict(zip(names, args, strict=False)) | kwargs
        for name, kinds in of_list.arguments.items():
            if name in streams:
                continue
            leaves = pytree.tree_leaves(call.get(name))
            for index, (leaf, kind) in enumerate(zip(leaves, kinds, strict=False)):
                if isinstance(leaf, Tensor):
                    source = f"{_ARGUMENT}{block}:{name}.{index}"
                    word = select_word(kind, leaf.ndim) or ""
                    self._arguments[source] = (leaf.shape, word)
                    self._mark(leaf, frozenset({source}))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is functional.linear and len(args) > 1 and id(args[1]) in self._linears:
            path = self._linears[id(args[1])]
            self._note_linear(path, args[0])
            self._mark(result, frozenset({path}))
            return result
        name = getattr(func, "__name__", "")
        inputs = list_tensors([args, kwargs])
        sources = frozenset[str]().union(*map(self._find_sources, inputs))
        parts = self._find_parts(name, args, kwargs, inputs)
        if sources or parts:
            width = sum(part.width for part in parts)
            for leaf in list_tensors(result):
                self._mark(leaf, sources)
                if parts and leaf.shape[-1:] == (width,):
                    self._parts[id(leaf)] = parts
        if args and isinstance(args[0], Tensor):
            self._note_split(name, args, result)
        if name in ("mul", "__mul__", "multiply") and len(inputs) == 2:
            self._note_product(inputs[0], inputs[1])
            self._note_product(inputs[1], inputs[0])
        return result

    def _note_product(self, x: Tensor, table: Tensor) -> None:
        """Note an argument multiplied with the output of Linears: it has a dimension of heads, or of all features."""
        linears = frozenset(name for name in self._find_sources(x) if not name.startswith(_ARGUMENT))
        if STREAM in linears or not linears:
            return
        arguments = self._find_sources(table)
        if not all(name.startswith(_ARGUMENT) for name in arguments):
            return
        features = set()
        heads = set()
        for name in linears:
            features.add(self._modules[name].out_features)
            owner = self._modules.get(name.rpartition(".")[0])
            if owner is not None:
                heads.update(read_head_counts(owner))
        for source in arguments:
            dim = self._find_head_dim(source, features, heads)
            if dim is not None:
                self._by_heads[source] = dim, linears

    def _find_head_dim(self, source: str, features: Collection[Any], heads: Collection[int]) -> int | None:
        """Return the dimension of an argument that counts features (the last one) or heads; None if there is none."""
        shape, word = self._arguments[source]
        last = len(shape) - 1
        for dim in (last, 1, 2):
            # Dimensions that are known to count tokens or images are excluded.
            if dim > last or word[dim : dim + 1] in {*TOKENS, "B"}:
                continue
            counts = features if dim == last else heads
            if shape[dim] in counts:
                return dim if shape[dim] > 1 else None
        return None

    def _mark(self, x: Tensor, sources: frozenset[str]) -> None:
        self._sources[id(x)] = sources
        self._kept.append(x)

    def _find_parts(
        self,
        name: str,
        args: Any,
        kwargs: Mapping[str, Any],
        inputs: Sequence[Tensor],
    ) -> tuple[Part, ...]:
        """Return the parts that were joined in the last dimension of a function's result."""
        if name in ("cat", "concat", "concatenate"):
            dim = kwargs.get("dim", 0)
            if len(args) > 1:
                dim = args[1]
            if inputs and inputs[0].ndim and dim in (-1, inputs[0].ndim - 1):
                return tuple(Part(x.shape[-1], self._find_sources(x)) for x in inputs)
        for x in inputs:
            if id(x) in self._parts:
                return self._parts[id(x)]
        return ()

    def _find_sources(self, x: Tensor) -> frozenset[str]:
        return self._sources.get(id(x), frozenset())

    def _note_linear(self, path: str, x: Tensor) -> None:
        sources = self._find_sources(x)
        parts = self._parts.get(id(x), ())
        if sum(part.width for part in parts) != x.shape[-1]:
            parts = (Part(x.shape[-1], sources),)
        has_one_token = x.numel() == x.shape[0] * x.shape[-1]
        if has_one_token and STREAM not in sources:
            self._modulations.append(path)
        if path in self._uses:
            sources |= self._uses[path].sources
        self._uses[path] = Use(sources, parts)

    def _note_split(self, name: str, args: Any, result: Any) -> None:
        """Note that a Linear's output is split along the last dimension, in one step or several."""
        x = args[0]
        span = self._find_span(x)
        if span is None:
            return
        path, start = span
        width = x.shape[-1]
        if name in ("chunk", "split", "tensor_split"):
            # A split along another dimension is ignored.
            if any(part.shape[:-1] != x.shape[:-1] for part in result):
                return
            for part in result:
                self._note_span(part, path, start)
                start += part.shape[-1]
        elif name == "__getitem__" and isinstance(result, Tensor) and isinstance(args[1], tuple):
            last_index = args[1][-1]
            if result.shape[:-1] != x.shape[:-1] or not isinstance(last_index, slice):
                return
            if last_index.step in (None, 1):
                self._note_span(result, path, start + last_index.indices(width)[0])
        elif name in ("reshape", "view", "unflatten") and result.ndim == x.ndim + 2:
            # The shape is that of queries, keys and values, or two of them: [..., 3, heads, features of a head].
            num_parts = result.shape[-3]
            part_width = math.prod(result.shape[-2:])
            if num_parts in (2, 3) and num_parts * part_width == width:
                ends = range(start + part_width, start + width + 1, part_width)
                self._ends.setdefault(path, set()).update(ends)

    def _find_span(self, x: Tensor) -> tuple[str, int] | None:
        """Return the Linear that made a tensor, and the tensor's first feature in its output."""
        if id(x) in self._spans:
            return self._spans[id(x)]
        sources = self._find_sources(x)
        if len(sources) != 1 or not x.ndim:
            return None
        (source,) = sources
        module = self._modules.get(source)
        if isinstance(module, nn.Linear) and module.out_features == x.shape[-1]:
            return source, 0
        return None

    def _note_span(self, part: Tensor, path: str, start: int) -> None:
        self._spans[id(part)] = path, start
        self._kept.append(part)
        ends = self._ends.setdefault(path, set())
        ends.add(start + part.shape[-1])
        # The start of this part is the end of the part before, if there is one.
        if start:
            ends.add(start)

    def _list_blocks(self, path: str) -> list[int]:
        """List the sizes of the parts in a Linear's output."""
        ends = sorted({*self._ends.get(path, ()), self._modules[path].out_features})
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _note_norm(self, path: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        sources = self._find_sources(args[0])
        if len(sources) != 1:
            return
        (source,) = sources
        width = args[0].shape[-1]
        if not isinstance(self._modules.get(source), nn.Linear):
            return
        # A norm within each head has another width, and is not noted.
        if width in self._list_blocks(source):
            self._norms[path] = Part(width, sources)

    def list_styles(self) -> dict[str, list[Any]]:
        """Return the cut of each module and each argument of a block, by path."""
        styles: dict[str, list[Any]] = {}
        columns: set[str] = set()
        for path, use in self._uses.items():
            sources = {source for source in use.sources if not source.startswith(_ARGUMENT)}
            if not sources or STREAM in sources or path in columns:
                continue
            # After a rowwise Linear the ranks are summed, so every rank has all of its output.
            if any(styles.get(source, [""])[0] == "rowwise" for source in sources):
                continue
            columns |= sources
            for source in sorted(sources):
                styles[source] = ["colwise", *self._describe_columns(source)]
            inputs = [self._describe_part(part) for part in use.parts]
            # A single part that is a plain number adds nothing to the Linear.
            if len(inputs) == 1 and isinstance(inputs[0], int):
                inputs = []
            styles[path] = ["rowwise", *inputs]
        self._add_argument_styles(styles, columns)
        for path in self._modulations:
            styles.setdefault(path, ["gathered"])
        for path, part in self._norms.items():
            if part.sources <= columns:
                styles[path] = ["rms_norm", self._describe_part(part)]
        return styles

    def _add_argument_styles(self, styles: dict[str, list[Any]], columns: Collection[str]) -> None:
        for source, (dim, linears) in self._by_heads.items():
            if not linears.issubset(columns):
                continue
            # Tensors of one argument with the same shape are alike, such as the cosines and sines of a rotation.
            argument = source.rpartition(".")[0]
            shape = self._arguments[source][0]
            for sibling, (sibling_shape, _) in self._arguments.items():
                if sibling.rpartition(".")[0] == argument and sibling_shape == shape:
                    styles[sibling.removeprefix(_ARGUMENT)] = ["heads", dim, min(linears)]

    def _describe_columns(self, path: str) -> list[Any]:
        """Describe the parts of a Linear's output: proportions, or if parts differ, its owner's names of their
        sizes."""
        blocks = self._list_blocks(path)
        if len(blocks) == 1:
            return []
        common = math.gcd(*blocks)
        proportions = [block // common for block in blocks]
        owner = self._modules.get(path.rpartition(".")[0])
        if owner is None or len(set(blocks)) == 1:
            return proportions
        # Another config may have other proportions of parts that differ. If several attributes have the same value, the
        # first counts.
        names: dict[int, str] = {}
        for name, value in vars(owner).items():
            if type(value) is int:
                names.setdefault(value, name)
        if names.keys() >= set(blocks):
            return [names[block] for block in blocks]
        return proportions

    def _describe_part(self, part: Part) -> str | int:
        """Return the Linear with as many output features, or it and the index of the block; a number if there is
        none."""
        # The order is that of the calls, so that queries come first.
        for name in self._uses:
            if name not in part.sources:
                continue
            blocks = self._list_blocks(name)
            if blocks == [part.width]:
                return name
            if part.width in blocks:
                return f"{name}/{blocks.index(part.width)}"
        return part.width
