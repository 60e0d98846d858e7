"""The "sequence" scheme of tensor parallelism: between the Linears of a block each rank has a share of the tokens.

A table (`Anatomy.token_streams`) says what is gathered: module pattern -> {argument, or "return" for the result:
stream}. An argument is gathered before the module runs. A result (the first one of several) is gathered after it, or,
for a row-parallel Linear, summed and scattered. A stream is "image", "text" or, where a block has put both into one
sequence, "text+image": a rank has its share of the text and then its share of the image. The gathered sequence is all
text and then all of the image, so that the rotary tables of the undivided call fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from ditile.distributed.mesh import Axis
from ditile.model.hooks.compile import exclude_from_compile
from ditile.model.hooks.overrides import list_parameter_names, match_modules
from ditile.model.hooks.protocols import TokenStreams
from ditile.parallel.tensor.collectives import TensorCollectives
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.plan.errors import ModelError, StateError
from ditile.plan.layout import pick_even_chunk

RETURN = "return"
TokenFunction = Callable[[Tensor], Tensor]
"""Gathers the tokens of one argument or result, or sums and scatters them."""


class SharedStreams(TokenStreams):
    """Streams of tokens of which every rank has a share.

    Args:
        axis: the ranks that share the tokens.
        collectives: gather the shares.

    Attributes:
        image, text: the whole lengths of the streams in the current call, the same on all ranks.
    """

    def __init__(self, axis: Axis, collectives: TensorCollectives) -> None:
        self._axis = axis
        self._collectives = collectives
        self.image = 0
        self.text = 0

    def set_stream_lengths(self, image: int, text: int) -> None:
        """Keep the lengths for the gathers inside the blocks."""
        self.image = image
        self.text = text

    def locate_own_share(self, length: int) -> slice:
        """Return this rank's share of a stream."""
        mine = pick_even_chunk(range(length), self._axis.num_ranks, self._axis.index)
        return slice(mine.start, mine.stop)

    def gather_stream(self, x: Tensor, length: int) -> Tensor:
        """Gather `[B, own, C]` to `[B, length, C]`."""
        return self._collectives.gather_streams(x, [length])

    def gather_tokens(self, path: str, stream: str, x: Tensor) -> Tensor:
        """Gather the whole argument or result of a module from the shares of all ranks.

        Raises:
            StateError: if `x` is not this rank's share.
        """
        lengths = self._list_lengths(stream)
        own = self._collectives.count_own_tokens(lengths)
        if x.shape[1] != own:
            raise StateError(
                f"{path} was given {x.shape[1]} tokens of {stream}, and this rank's share of {sum(lengths)} is {own}; "
                "call it once, with the whole share"
            )
        return self._collectives.gather_streams(x, lengths)

    def scatter_tokens(self, stream: str, x: Tensor) -> Tensor:
        """Sum the output of a row-parallel Linear over the ranks and keep this rank's share."""
        return self._collectives.sum_and_scatter(x, self._list_lengths(stream))

    def _list_lengths(self, stream: str) -> list[int]:
        """Return the lengths of a stream's parts, in order."""
        lengths = {"text": self.text, "image": self.image}
        return [lengths[name] for name in stream.split("+")]


def install_token_gathers(
    stack: ExitStack,
    transformer: nn.Module,
    cuts: TensorCuts,
    table: Mapping[str, Mapping[str, str]],
    streams: SharedStreams,
) -> dict[str, TokenFunction]:
    """Hook the gathers into a model.

    Returns:
        The path of each row-parallel Linear -> the function that sums and scatters its output.

    Raises:
        ModelError: if a row-parallel Linear is not in the table.
    """
    scatters: dict[str, TokenFunction] = {}
    for pattern, names_of_streams in table.items():
        for path, module in match_modules(transformer, pattern):
            if path in cuts.styles:
                # A row-parallel Linear sums, so its scatter takes the place of its sum.
                scatters[path] = partial(streams.scatter_tokens, names_of_streams[RETURN])
                continue
            gather: dict[str, TokenFunction] = {}
            for argument, stream in names_of_streams.items():
                gather[argument] = exclude_from_compile(partial(streams.gather_tokens, path, stream))
            # The result is gathered after the module; all others are arguments and are gathered before it.
            after = gather.pop(RETURN, None)
            if after is not None:
                stack.callback(module.register_forward_hook(partial(_gather_result, after)).remove)
            if gather:
                names = list_parameter_names(module)
                hook = partial(_gather_arguments, names, gather)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    for path, style in cuts.styles.items():
        if style.kind == "rowwise" and path not in scatters:
            raise ModelError(f"the token table does not say what stream {path} returns, for split_scheme=sequence")
    return scatters


def _gather_arguments(
    names: Sequence[str],
    gather: Mapping[str, TokenFunction],
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    whole_args = list(args)
    whole_kwargs = dict(kwargs)
    for place, (name, value) in enumerate(zip(names, args, strict=False)):
        if name in gather and value is not None:
            whole_args[place] = gather[name](value)
    for name, value in kwargs.items():
        if name in gather and value is not None:
            whole_kwargs[name] = gather[name](value)
    return tuple(whole_args), whole_kwargs


def _gather_result(gather: TokenFunction, _: nn.Module, __: Any, result: Any) -> Any:
    if isinstance(result, tuple):
        return (gather(result[0]), *result[1:])
    return gather(result)
