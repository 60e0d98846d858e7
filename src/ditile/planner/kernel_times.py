"""What a transformer computes, counted: its forward runs once without numbers, and every kernel is noted.

The forward is the family's own, on the meta device, at a size whose token counts are told apart: an operation on 703
rows belongs to the image, one on 59 to the text, one on 762 to both. A kernel so says how it grows with the tokens of a
rank, and `Work` is what a block, or the rest of the model, has of each. Blocks that are built alike are run once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.errors import ModelError
from ditile.hooks.block_hooks import Seats
from ditile.hooks.overrides import matching, override
from ditile.plan.layout import Grid
from ditile.plan.spec import ModelSpec
from ditile.planner.footprint import Footprint, Held, Watch

Kind = Literal["matmul", "attention", "pointwise", "norm", "gelu", "interleave"]
Stream = Literal["image", "text", "both", "once"]
"""Whose tokens a kernel works on; `once`: of none, the same for any picture."""

GRID, TEXT = Grid(19, 37, 37), 59  # 703 tokens and 59: of no width of a model, nor of each other
MATMULS = {"aten.mm.default": (0, 1), "aten.addmm.default": (1, 2)}
"""The places of the two factors."""
HEAVY: dict[str, Kind] = {"aten.native_layer_norm.default": "norm", "aten.gelu.default": "gelu"}
JOINING = {"aten.cat.default", "aten.stack.default"}
FREE = {
    "aten::detach", "aten::alias", "aten::_unsafe_view", "aten::empty.memory_format", "aten::empty_like",
    "aten::lift_fresh",
}  # fmt: skip
"""What moves no number."""


class Kernel(NamedTuple):
    """One operation, for one row of the batch and one token.

    Attributes:
        kind: "matmul" of a token with a matrix; "attention" of a token to another; the others go over numbers once,
            "norm" and "gelu" with more to compute for each, "interleave" one by one (rotary embeddings).
        stream: whose tokens.
        size: (k, n) of the matrix; (channels of all heads, those of one); (numbers read and written of a token, 0).
        keys: whose keys a token attends to.
    """

    kind: Kind
    stream: Stream
    size: tuple[float, int]
    keys: Stream = "once"


Work = Mapping[Kernel, int]
"""How often each kernel runs."""


class Mix(NamedTuple):
    """The work of some blocks, alike ones together, and how often each is done: in every call, once in a step, once in
    a generation."""

    blocks: Sequence[tuple[Work, float]]
    steps: Sequence[tuple[Work, float]]
    once: Sequence[tuple[Work, float]]


@dataclass(frozen=True, slots=True)
class Counted:
    """A transformer's work in one call with one row.

    Attributes:
        blocks: of each block.
        block_steps: of each block, once in a step.
        block_once: of each block, once in a generation.
        first: before them, on the first stage: the embedding of the latents.
        last: behind them: the head.
        every: of every rank, in every call.
        step: of every rank, once in a step.
        once: once in a generation.
        footprint: what it holds meanwhile.
        before: of each block, what it does up to its first attention.
    """

    blocks: tuple[Work, ...]
    block_steps: tuple[Work, ...]
    block_once: tuple[Work, ...]
    first: Work
    last: Work
    every: Work
    step: Work
    once: Work
    footprint: Footprint
    before: tuple[Work, ...] = ()

    def mix(self, blocks: range, runs: Sequence[float]) -> Mix:
        """The work of some blocks, of whose calls each runs in such a share."""
        ones = [1.0] * len(blocks)
        found = [
            _summed([work[block] for block in blocks], times)
            for work, times in ((self.blocks, runs), (self.block_steps, ones), (self.block_once, ones))
        ]
        return Mix(*found)


def _summed(works: Sequence[Work], times: Sequence[float]) -> list[tuple[Work, float]]:
    """Each piece of work once, with the sum of its times."""
    found: dict[int, tuple[Work, float]] = {}
    for work, count in zip(works, times, strict=True):
        found[id(work)] = work, count + found.get(id(work), (work, 0.0))[1]
    return list(found.values())


def counted(transformer: nn.Module, spec: ModelSpec) -> Counted:
    """Counts a transformer, whose weights are not read.

    Args:
        transformer: on the meta device.
        spec: its family.

    Raises:
        ModelError: if the family's table does not say how to call its forward.
    """
    if spec.example is None:
        raise ModelError(f"the ModelSpec of {spec.name} has no `example`, by which its forward is counted; give it one")
    seats = Seats(transformer, spec)
    config: Any = transformer.config
    watch = Watch(_held)
    note = _Note(watch.attend)
    kinds: dict[tuple[Any, ...], int] = {}
    with ExitStack() as stack:
        for seat in seats.chain:
            kind = (type(seat.block), *((name, tuple(p.shape)) for name, p in seat.block.named_parameters()))
            if kind in kinds:
                override(stack, seat.block, "forward", _passing(seat.io.returns))
            first = kinds.setdefault(kind, seat.index)
            note.alike[seat.index] = first
            for name in ("block step", "block once"):
                note.work.setdefault((name, first), Counter())
            stack.enter_context(note.within(seat.block, ("block", first)))
        for place, paths in (("first", (spec.image_tokens,)), ("last", (spec.out,)), ("step", spec.per_step),
                             ("once", spec.constant)):  # fmt: skip
            for path in paths:
                for _, module in matching(transformer, path):
                    stack.enter_context(note.within(module, (place, 0)))
        for place, patterns in (("block step", spec.per_step), ("block once", spec.constant)):
            for path, module in (found for pattern in patterns for found in matching(transformer, pattern)):
                for seat in seats.chain:
                    if path.startswith(f"{seat.name}."):
                        stack.enter_context(note.within(module, (place, note.alike[seat.index])))
        with torch.device("meta"), torch.no_grad(), note, note.attention, watch:
            transformer(**spec.example(config, GRID, TEXT), return_dict=False)
    kinds_in_order = [first for _, first in sorted(note.alike.items())]

    def of(name: str) -> tuple[Work, ...]:
        return tuple(note.work[name, k] for k in kinds_in_order)

    return Counted(
        blocks=of("block"), block_steps=of("block step"), block_once=of("block once"), first=note.work["first", 0],
        last=note.work["last", 0], every=note.work["every", 0], step=note.work["step", 0], once=note.work["once", 0],
        footprint=watch.footprint([note.kept.get(k, Held()) for k in kinds_in_order]),
        before=tuple(note.before.get(k, Counter()) for k in kinds_in_order),
    )  # fmt: skip


class _Note(TorchDispatchMode):
    """Notes kernels under the innermost of the modules that were named; `attend` is told of attention."""

    def __init__(self, attend: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: dict[tuple[str, int], Counter[Kernel]] = {
            (name, 0): Counter() for name in ("first", "last", "every", "step", "once")
        }
        self.alike: dict[int, int] = {}
        self.kept: dict[int, Held] = {}
        self.before: dict[int, Counter[Kernel]] = {}
        self.attention = _Attention(self._attended, attend)
        self._at: list[tuple[str, int]] = [("every", 0)]

    @contextmanager
    def within(self, module: nn.Module, place: tuple[str, int]) -> Iterator[None]:
        """What a module does is noted at a place."""
        self.work.setdefault(place, Counter())
        before = module.register_forward_pre_hook(lambda *_: self._at.append(place))
        after = module.register_forward_hook(lambda _, __, out: self._leave(out))
        yield
        before.remove()
        after.remove()

    def _leave(self, out: Any) -> None:
        place, block = self._at.pop()
        if place == "block once":
            self.kept[block] = sum(map(_held, _tensors(out)), self.kept.get(block, Held()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.name() not in FREE:
            self._add(_kernel(str(func), args, out))
        return out

    def _add(self, kernel: Kernel) -> None:
        self.work[self._at[-1]][kernel] += 1

    def _attended(self, kernel: Kernel) -> None:
        place, block = self._at[-1]
        if place == "block":
            self.before.setdefault(block, Counter(self.work[place, block]))
        self._add(kernel)


class _Attention(TorchFunctionMode):
    """Attention as one kernel, before it is taken apart."""

    def __init__(self, add: Callable[[Kernel], None], attend: Callable[[], None]) -> None:
        super().__init__()
        self._add, self._attend = add, attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key = (args[k] if len(args) > k else kwargs[name] for k, name in enumerate(("query", "key")))
        channels = query.shape[1] * query.shape[3]
        kernel = Kernel("attention", _stream(query.shape[2]), (channels, query.shape[3]), _stream(key.shape[2]))
        self._add(kernel)
        out = torch.empty_like(query)
        self._attend()
        return out


def _kernel(name: str, args: Any, out: Any) -> Kernel:
    if name in MATMULS:
        left, right = (args[k] for k in MATMULS[name])
        return Kernel("matmul", _stream(left.shape[0]), (int(right.shape[0]), int(right.shape[1])))
    if name == "aten.convolution.default":
        width = int(out.shape[1])
        return Kernel("matmul", _stream(out.numel() // width), (args[1].numel() // width, width))
    tensors = [*_tensors(args), *_tensors(out)]
    stream = _stream_of(tensors)
    numbers = sum(tensor.numel() for tensor in tensors) / _tokens(stream)
    kind: Kind = "interleave" if name in JOINING and _interleaves(args) else HEAVY.get(name, "pointwise")
    return Kernel(kind, stream, (numbers, 0))


def _interleaves(args: Any) -> bool:
    """Whether tensors are joined number by number: along a last dimension of 1, or a new one."""
    first, dim = args[0][0], args[1] if len(args) > 1 else 0
    return bool(dim % (first.dim() + 1) == first.dim() or (first.shape[-1] == 1 and dim in (-1, first.dim() - 1)))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _stream_of(tensors: list[Tensor]) -> Stream:
    found = {_stream(size) for tensor in tensors for size in tensor.shape}
    return next((stream for stream in ("both", "image", "text") if stream in found), "once")


def _held(tensor: Tensor) -> Held:
    numbers, stream = tensor.untyped_storage().nbytes() / tensor.element_size(), _stream_of([tensor])
    if stream == "once" and numbers >= (image := _tokens("image")) and numbers % image == 0:
        stream = "image"  # as rows and columns
    return Held(**{stream: numbers / _tokens(stream)})


def _stream(size: int) -> Stream:
    image = GRID.rows * GRID.tokens_per_row
    sizes: dict[int, Stream] = {image: "image", TEXT: "text", image + TEXT: "both"}
    return sizes.get(size, "once")


def _tokens(stream: Stream) -> int:
    image = GRID.rows * GRID.tokens_per_row
    return {"image": image, "text": TEXT, "both": image + TEXT, "once": 1}[stream]


def _passing(returns: tuple[str, ...]) -> Callable[..., Any]:
    """The forward of a block that is built like one before it."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        text = kwargs.get("encoder_hidden_states", args[0] if args else None)
        out = tuple(text if stream == "text" else hidden_states for stream in returns)
        return out if len(out) > 1 else out[0]

    return forward
