"""Seats: where strategies meet the blocks of a model, on the instance the user handed in, for the length of one call.

A seat overrides `forward` on one block instance while the pipeline runs; between calls the model is what it was, so
that LoRAs are loaded, switched, fused and unloaded as ever. Blocks of other stages are hollow: the module stays in its
list, its weights and children are gone, and its seat passes the tokens through.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ditile.errors import StateError
from ditile.hooks.attention_processors import answer_at_once, seat_cross
from ditile.hooks.batch_rows import join_rows, take_rows
from ditile.hooks.compile import Compile, compiler_of, seat_around, seat_block, set_aside
from ditile.hooks.embedding import embed_patches
from ditile.hooks.generation import Generation
from ditile.hooks.memoize import Memo
from ditile.hooks.overrides import matching, override
from ditile.hooks.placeholders import Parts, StandIn, hollow, is_hollow, refill
from ditile.plan.layout import Grid
from ditile.plan.shape import Weights
from ditile.plan.spec import BlockIO, ModelSpec, View

LOADED = "_loaded_by_ditile"
"""The attribute of a transformer that says what was read of it."""


class Core(Protocol):
    """The attention of a layer, such as `AttentionCore`.

    Attributes:
        overlaps: whether it gains by q, k and v that are made one after the other.
    """

    overlaps: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor: ...


class State(NamedTuple):
    """The tokens on their way through the blocks: image `[B, n, C]`; text `[B, t, C]`, where it is a stream too."""

    image: Tensor
    text: Tensor | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was read of a transformer whose other blocks are hollow from the start.

    Attributes:
        owned: the blocks that were read.
        weights: the parameters of the whole.
        bytes_read: what was asked of the files.
        shard: (index, ranks) of the part that was read of each tensor.
    """

    owned: range
    weights: Weights
    bytes_read: int
    shard: tuple[int, int] = (0, 1)


class Policy(Protocol):
    """What happens at the seats of a model."""

    def begin_call(self, grid: Grid, rows: int) -> Sequence[range]:
        """The transformer is called on `rows` rows; returns the runs of rows that are computed one after the other."""

    def begin_piece(self, piece: int) -> None:
        """One of several such runs is next."""

    def run(self, index: int, block: Callable[[State], State], state: State) -> State:
        """The chain has come to a block."""

    def output(self, head: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
        """The chain has come to the output module, which makes `width` channels of each token."""

    def end_call(self) -> None:
        """The transformer returns."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A block in the chain."""

    index: int
    name: str
    block: nn.Module
    io: BlockIO

    def attentions(self) -> list[tuple[str, Any]]:
        """The attention modules that the block has, by attribute."""
        found = ((name, getattr(self.block, name, None)) for name in (*self.io.attn, *self.io.image_attn))
        return [(name, attention) for name, attention in found if attention is not None]


Fuse = Callable[[ExitStack, Seat], None]
"""Makes fewer and larger kernels of what a block computes, until the stack is closed."""


class Seats:
    """The chain of seats of one transformer.

    Attributes:
        stand_ins: for hollow blocks that are computed here all the same, with weights from elsewhere.
    """

    def __init__(self, transformer: nn.Module, spec: ModelSpec) -> None:
        self.transformer, self.spec = transformer, spec
        blocks = [
            (f"{name}.{i}", block, io)
            for name, io in spec.blocks.items()
            for i, block in enumerate(transformer.get_submodule(name).children())
        ]
        self.chain = [Seat(index, *found) for index, found in enumerate(blocks)]
        self.stand_ins: Mapping[int, StandIn] = {}
        self._hollow: dict[int, Parts] = {}

    def weights(self) -> Weights:
        """The parameters of each block, and of the rest; the attention layers of each block; the width of the head."""
        blocks = tuple(sum(p.numel() for p in seat.block.parameters()) for seat in self.chain)
        shared = sum(p.numel() for p in self.transformer.parameters()) - sum(blocks)
        layers = tuple(tuple(name in seat.io.attn for name, _ in seat.attentions()) for seat in self.chain)
        head = self.transformer.get_submodule(self.spec.out) if self.chain else None
        out = int(getattr(head, "out_features", 0))
        found = list(self._exchanges())
        exchanges = tuple(
            tuple(exchange for path, exchange in found if path.startswith(f"{seat.name}.")) for seat in self.chain
        )
        tensors = tuple(tuple(x.numel() for x in (*s.block.parameters(), *s.block.buffers())) for s in self.chain)
        return Weights(blocks=blocks, shared=shared, layers=layers, out=out, exchanges=exchanges, tensors=tensors)

    def _exchanges(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Where tensor parallelism exchanges what, as the family's table of token streams has it."""
        for pattern, streams in self.spec.tensor_tokens.items():
            for path, module in matching(self.transformer, pattern):
                kind = "sum" if hasattr(module, "out_features") else "gather"
                yield from ((path, (kind, stream)) for stream in streams.values())

    @property
    def loaded(self) -> Loaded | None:
        """What was read of the transformer; None if it was read whole, or is a runner's already."""
        return vars(self.transformer).get(LOADED)

    @loaded.setter
    def loaded(self, loaded: Loaded) -> None:
        vars(self.transformer)[LOADED] = loaded

    def is_cut(self) -> bool:
        """Whether some block is hollow."""
        return any(is_hollow(seat.block) for seat in self.chain)

    def take(self, owned: range, *, keep: bool, shard: tuple[int, int] = (0, 1)) -> Weights:
        """Leaves a runner these blocks of a transformer that is whole, or of which no others were read.

        Returns:
            The parameters of the whole.

        Raises:
            StateError: if a runner has it, other blocks were read, or others are to be kept and were not read.
        """
        loaded, name = self.loaded, type(self.transformer).__name__
        if loaded is None:
            if self.is_cut():
                raise StateError(f"this {name} is cut into stages already; restore() its runner, or reload it")
            weights = self.weights()
            self.hollow(owned, keep=keep)
            return weights
        if keep:
            raise StateError(
                f"keep_weights=True, and of this {name} only blocks {_span(loaded.owned)} were loaded; load it without "
                "a plan, or leave keep_weights out"
            )
        if (loaded.owned, loaded.shard) != (owned, shard):
            raise StateError(
                f"of this {name} blocks {_span(loaded.owned)}, shard {loaded.shard[0]} of {loaded.shard[1]}, were "
                f"loaded, and here the plan needs {_span(owned)}, shard {shard[0]} of {shard[1]}; load it for this plan"
            )
        del vars(self.transformer)[LOADED]
        return loaded.weights

    def refuse(self, blocks: range) -> str | None:
        """Why the attention of some of these blocks cannot be handed to a core, or None: somebody else's processor."""
        for seat in self.chain[blocks.start : blocks.stop]:
            for name, attention in seat.attentions():
                if not self._knows(found := attention.processor):
                    known = ", ".join(cls.__name__ for cls in self.spec.stock) or "those of dispatch_attention_fn"
                    return (
                        f"{seat.name}.{name} has the attention processor {type(found).__name__}, and known to work "
                        f"under PipeFusion: {known}; set it back, or unload the IP-adapter that brought it"
                    )
        return None

    def _knows(self, processor: Any) -> bool:
        if self.spec.stock:
            return type(processor) in self.spec.stock
        return hasattr(processor, "_attention_backend") and not isinstance(processor, nn.Module)

    def hollow(self, owned: range, *, keep: bool) -> None:
        """Takes the weights out of all blocks but the owned ones; keeps them aside only if `keep`."""
        for seat in self.chain:
            if seat.index not in owned:
                parts = hollow(seat.block)
                if keep:
                    self._hollow[seat.index] = parts

    def refill(self) -> None:
        """Puts the weights back that `hollow` kept."""
        for index, parts in self._hollow.items():
            refill(self.chain[index].block, parts)
        self._hollow.clear()

    @contextmanager
    def installed(
        self, policy: Policy, owned: range, current: Callable[[], Generation], core: Callable[..., Core],
        dispatch: Callable[[Any], Any], *, fuse: Fuse, pipe: Any = None, compile_: Compile | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Seats the policy for the length of a call.

        Args:
            policy: decides at each seat.
            owned: the blocks that run here.
            current: the generation under way.
            core: (layer, backend, joint) -> the attention of a layer.
            dispatch: the name of the attention backend that hands over to a core, given the one that was named.
            fuse: is done to the blocks that run here uncompiled.
            pipe: whose model this is; it may have compiled it.
            compile_: compiles the forward of each block, where the user did not.
        """
        memo = Memo(self.spec, current)
        compile_ = compiler_of(pipe, self.transformer) or compile_
        with ExitStack() as stack:
            set_aside(stack, pipe, self.transformer)
            self._seat_forward(stack, policy, current)
            compiled = []
            for seat in self.chain:
                varying = functools.partial(_varying, seat.io, current)
                wrap = functools.partial(self._seat_block, seat, policy, current)
                own = seat.index in owned
                if seat_block(stack, seat.block, compile_ if own else None, wrap, varying):
                    compiled.append(seat.name)
                if own or seat.index in self.stand_ins:
                    mine = seat if own else replace(seat, block=self.stand_ins[seat.index].block)
                    self._seat_attention(stack, mine, core, dispatch)
                    seat_cross(stack, self.spec, mine.block, current)
                if own and seat.name not in compiled:
                    answer_at_once(stack, seat.block)
                    fuse(stack, seat)
            self._seat_output(stack, policy)
            first = 0 in owned or bool(self.stand_ins)
            if first:
                embed_patches(stack, self.spec, self.transformer, current)
            memo.install(stack, self.transformer, first=first, compiled=compiled)
            yield

    def _seat_forward(self, stack: ExitStack, policy: Policy, current: Callable[[], Generation]) -> None:
        forward = self.transformer.forward
        names = _parameters(self.transformer)

        def called(*args: Any, **kwargs: Any) -> Any:
            now, inputs = current(), dict(zip(names, args, strict=False)) | kwargs
            grid = now.constant("grid", lambda: self.spec.grid(self.transformer, inputs))
            rows = int(inputs["hidden_states"].shape[0])
            pieces = policy.begin_call(grid, rows)
            if len(pieces) == 1:
                result = forward(*args, **kwargs)
            else:
                results = []
                for piece, part in enumerate(pieces):
                    policy.begin_piece(piece)
                    take = operator.itemgetter(slice(part.start, part.stop))
                    results.append(forward(**take_rows(inputs, rows, take, self.spec.batch)))
                result = join_rows(results)
            policy.end_call()
            return result

        override(stack, self.transformer, "forward", called)

    def _seat_block(
        self, seat: Seat, policy: Policy, current: Callable[[], Generation], own: Callable[..., Any]
    ) -> Callable[..., Any]:
        forward: Callable[..., Any] = self.stand_ins.get(seat.index) or own
        io, names, streams = seat.io, _parameters(seat.block), "text" in seat.io.returns

        def seated(*args: Any, **kwargs: Any) -> Any:
            call = dict(zip(names, args, strict=False)) | kwargs

            def block(state: State) -> State:
                call["hidden_states"] = state.image
                if streams:
                    call["encoder_hidden_states"] = state.text
                _cut_arguments(call, io, current())
                out = forward(**call)
                named = dict(zip(io.returns, out if isinstance(out, tuple) else (out,), strict=True))
                return State(named["image"], named.get("text"))

            state = State(call["hidden_states"], call["encoder_hidden_states"] if streams else None)
            state = policy.run(seat.index, block, state)
            if not streams:
                return state.image
            return tuple(state.text if name == "text" else state.image for name in io.returns)

        return seated

    def _seat_attention(self, stack: ExitStack, seat: Seat, core: Callable[..., Core], dispatch: Any) -> None:
        for name, attention in seat.attentions():
            layer, joint = f"{seat.name}.{name}", name in seat.io.attn
            mine = self._processor(attention.processor, layer, joint, core, dispatch)
            override(stack, attention, "processor", mine)

    def _processor(self, stock: Any, layer: str, joint: bool, core: Callable[..., Core], dispatch: Any) -> Any:
        if self.spec.processor is not None:
            return self.spec.processor(core(layer, None, joint=joint, through_dispatch=False))
        attend = core(layer, stock._attention_backend, joint=joint, through_dispatch=True)
        if self.spec.overlapped is not None and attend.overlaps:
            return self.spec.overlapped(attend)
        mine = copy.copy(stock)
        mine._parallel_config = attend
        mine._attention_backend = dispatch(stock._attention_backend)
        return mine

    def _seat_output(self, stack: ExitStack, policy: Policy) -> None:
        head = self.transformer.get_submodule(self.spec.out)
        forward, width = head.forward, int(head.out_features)  # type: ignore[arg-type]
        override(stack, head, "forward", lambda x: policy.output(forward, x, width))


class OneSeat(Seats):
    """A model whose blocks need not be known: its calls are counted, and run as they are."""

    def refuse(self, blocks: range) -> str | None:
        """Nothing: attention is the model's own."""
        return None

    @contextmanager
    def installed(
        self, policy: Policy, owned: range, current: Callable[[], Generation], core: Callable[..., Core], dispatch: Any,
        *, fuse: Fuse, pipe: Any = None, compile_: Compile | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Seats nothing but the count; what the family declares constant is remembered."""

        def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                now = current()
                result = forward(*args, **kwargs)
                now.end_call()
                return result

            return functools.update_wrapper(called, forward)

        compiled = []
        with ExitStack() as stack:
            whole = compiler_of(pipe, self.transformer) is not None
            if compile_ is not None and not whole:
                for seat in self.chain:
                    if seat_block(stack, seat.block, compile_, lambda forward: forward):
                        compiled.append(seat.name)
            if not whole:
                for seat in self.chain:
                    seat_cross(stack, self.spec, seat.block, current)
                Memo(self.spec, current).install(stack, self.transformer, first=True, compiled=compiled)
            seat_around(stack, pipe, self.transformer, counted)
            yield


def _cut_arguments(call: dict[str, Any], io: BlockIO, now: Generation) -> None:
    if now.is_whole:
        return
    patch = now.micro.patch
    for name, cut in io.tokens.items():
        if (value := call.get(name)) is not None:
            make = functools.partial(cut, value, View(now.layout, now.part(patch)))
            call[name] = now.memory.sliced((name, now.branch, patch), value, make)


def _varying(io: BlockIO, current: Callable[[], Generation]) -> Sequence[str]:
    """The arguments of a block that have another number of tokens from patch to patch."""
    return ("hidden_states", "encoder_hidden_states", *io.tokens) if current().layout.patches > 1 else ()


def _span(blocks: range) -> str:
    return f"{blocks.start} to {blocks.stop - 1}"


def _parameters(module: nn.Module) -> list[str]:
    return [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
