"""A transformer whose blocks may be left out: slots around its blocks, chains of them, and where the pipeline is.

It stays in place between calls of the pipeline, and under a runner: the runner's seats lie around the slots, and lend
them its own clock and its agreement with other ranks for the length of a call.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ditile.cache.config import DBCacheConfig
from ditile.cache.hooks import Slot
from ditile.cache.judge import Call, units_of
from ditile.cache.rules import Record
from ditile.errors import StateError
from ditile.hooks.compile import Compile
from ditile.hooks.opaque import opaque
from ditile.hooks.overrides import forward_at, found_at, override
from ditile.hooks.protocols import Agreement, Clock, Moment

PARTIAL = ("skip_layers",)
"""Arguments of a transformer that leave blocks out themselves: such a call is computed as it is, and not remembered."""

_CACHED = "_cached_by_ditile"
"""The attribute of a transformer that holds its `Cached`."""


class IdleCacheWarning(UserWarning):
    """A cache was asked for that can never leave anything out."""


class Chain(Protocol):
    """A method on some of a transformer's blocks: `DBCache` or `DBPrune`."""

    @property
    def middle(self) -> Sequence[int]: ...

    @property
    def bytes(self) -> int: ...

    def own(self, owned: Collection[nn.Module] | None) -> None: ...

    def begin(self, call: Call, agreement: Agreement) -> None: ...

    def rest(self) -> None: ...

    def records(self) -> Iterator[tuple[int, int, int, Record]]: ...


class Watch(Clock, Protocol):
    """A clock of the caches' own, which watches a pipeline."""

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def refresh(self, steps: int | None, *, separate_cfg: bool | None = None) -> None: ...

    def drop(self) -> None: ...


class Context(NamedTuple):
    """Blocks that are decided on together, and how.

    Attributes:
        name: what to call it.
        blocks: how many there are.
        make: (steps, agreement) -> the method for one generation; None if nothing is ever left out.
        couple: what is decided apart, "row", "image" or "batch".
        text: the settings in one word.
        idle: why nothing can ever be left out, in one line; None if something can.
        idle_in: (steps) -> the same of a generation of so many.
        said: all settings.
    """

    name: str
    blocks: int
    make: Callable[[int, Agreement], Chain | None]
    couple: str
    text: str
    idle: str | None = None
    idle_in: Callable[[int], str | None] = lambda steps: None
    said: str = ""


class Alone:
    """One rank decides by itself."""

    owned: Collection[nn.Module] | None = None

    def add(self, sums: Tensor) -> Tensor:
        """They are all there are."""
        return sums

    def tell(self, skips: Sequence[bool]) -> None:
        """To nobody."""

    def hear(self, count: int) -> Sequence[bool]:
        """There is no stage in front."""
        raise StateError("a cache waits for a decision that nobody takes")

    def give_start(self, tokens: Tensor, to: nn.Module) -> None:
        """The probe is here."""

    def take_start(self, like: Tensor, of: nn.Module) -> Tensor:
        """The probe is here."""
        raise StateError("a cache waits for tokens that nobody gives")

    def left_out(self, blocks: Sequence[nn.Module], moment: Moment) -> None:
        """Nobody remembers anything of them."""


class Trace(NamedTuple):
    """What one generation left of a context, for `summary`.

    Attributes:
        name, blocks, text: of the context.
        middle: blocks that could be left out.
        steps: in which its blocks were called.
        records: (branch, patch, unit, record).
    """

    name: str
    blocks: int
    text: str
    middle: int
    steps: int
    records: list[tuple[int, int, int, Record]]


class Cached:
    """One transformer.

    Args:
        transformer: whose blocks they are.
        slots: around all blocks of all contexts.
        contexts: (settings) -> what is decided apart.
        config: the settings.

    Attributes:
        contexts: what is decided apart.
        traces: of the last generation, one for each context.
        kept_bytes: what was remembered when it ended.
        label: what the pipeline calls its call of the transformer, if it names it.
    """

    def __init__(
        self, transformer: nn.Module, slots: Sequence[Slot], contexts: Callable[[DBCacheConfig], list[Context]],
        config: DBCacheConfig,
    ) -> None:  # fmt: skip
        self.transformer, self._slots, self._make, self._config = transformer, slots, contexts, config
        self.contexts = contexts(config)
        self.traces: list[Trace] = []
        self.kept_bytes = 0
        self._clock: Clock | None = None
        self._agreement: Agreement = Alone()
        self._chains: list[tuple[Context, Chain]] = []
        self._loop_step, self._step = -1, -1
        self.label: str | None = None
        self._labels = ExitStack()

    def install(self, clock: Watch, compiler: Callable[[], Compile | None] = lambda: None) -> None:
        """Lays the slots around the blocks.

        Args:
            clock: says where the pipeline is.
            compiler: what the user compiled the whole model with, which then compiles its blocks.
        """
        self._clock = self._own_clock = clock
        self._compiler = compiler
        for slot in self._slots:
            slot.install()
        name = forward_at(self.transformer)
        forward = getattr(self.transformer, name)
        self._before, self._stock = vars(self.transformer).get(name), forward

        @opaque
        def called(*args: Any, **kwargs: Any) -> Any:
            return self._called(forward, *args, **kwargs)

        self._mine = vars(self.transformer)[name] = functools.update_wrapper(called, forward)
        stock: Any = getattr(self.transformer, "cache_context", None)
        if stock is not None:
            override(self._labels, self.transformer, "cache_context", functools.partial(self._named, stock))
        vars(self.transformer)[_CACHED] = self

    def remove(self) -> None:
        """Takes them away again; what was laid around them since stays, and they do nothing in it."""
        self._own_clock.remove()
        self._labels.close()
        self.end()
        self._clock = None
        for slot in self._slots:
            slot.remove()
        name = found_at(self.transformer, self._mine)
        if name == "forward" and self._before is None:
            del vars(self.transformer)["forward"]
        elif name is not None:
            vars(self.transformer)[name] = self._stock
        vars(self.transformer).pop(_CACHED, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        name = type(self.transformer).__name__
        raise StateError(f"a copy of a cached {name} would run the blocks of the first; call disable_cache before")

    def refresh(self, steps: int | None, config: DBCacheConfig | None, changes: dict[str, Any]) -> None:
        """A new picture follows: of so many steps if they are given, and with other settings if some are."""
        self._config = (config or self._config).reset(**changes)
        self.contexts = self._make(self._config)
        self._own_clock.refresh(steps, separate_cfg=self._config.enable_separate_cfg)

    def refit(self) -> None:
        """Blocks may have been compiled since the slots were laid around them; before anything else is."""
        compile_ = self._compiler()
        for slot in self._slots:
            slot.refit(compile_)

    @contextmanager
    def lent(self, clock: Clock, agreement: Agreement) -> Iterator[None]:
        """Somebody else says where the pipeline is, and which ranks decide."""
        alone = self._agreement
        self._own_clock.remove()
        self.traces, self.kept_bytes = [], 0  # a replica without an image has nothing to say
        self._clock, self._agreement = clock, agreement
        try:
            yield
        finally:
            self.end()
            self._clock, self._agreement = self._own_clock, alone
            self._own_clock.install()

    def begin(self, steps: int) -> None:
        """A generation of so many steps begins: nothing is remembered yet."""
        self.end()
        if self._clock is self._own_clock:
            self.refit()
        self.traces, self.kept_bytes = [], 0
        self._loop_step, self._step = -1, -1
        could = [context for context in self.contexts if context.idle is None]  # of others enable_cache has warned
        for reason in filter(None, dict.fromkeys(context.idle_in(steps) for context in could)):
            warnings.warn(reason, IdleCacheWarning, stacklevel=2)
        made = ((context, context.make(steps, self._agreement)) for context in self.contexts)
        self._chains = [(context, chain) for context, chain in made if chain is not None]
        for _, chain in self._chains:
            chain.own(self._agreement.owned)

    def end(self) -> None:
        """The generation is over: all that was remembered is dropped, but for what `summary` shows."""
        if self._chains:
            self.kept_bytes = self.bytes
            self.traces = [
                Trace(c.name, c.blocks, c.text, len(chain.middle), self._step + 1, list(chain.records()))
                for c, chain in self._chains
            ]
        for _, chain in self._chains:
            chain.rest()
        self._chains = []

    @property
    def bytes(self) -> int:
        """Bytes that are remembered now."""
        return sum(chain.bytes for _, chain in self._chains)

    @contextmanager
    def _named(self, stock: Callable[..., AbstractContextManager[None]], name: str, **where: Any) -> Iterator[None]:
        """diffusers' `cache_context`, with somebody listening."""
        before, self.label = self.label, name
        try:
            with stock(name, **where):
                yield
        finally:
            self.label = before

    def _called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        clock = self._clock
        if clock is None:
            return forward(*args, **kwargs)
        moment = clock.begin_call(self)
        if self._chains:
            if moment is None or any(kwargs.get(name) for name in PARTIAL):
                self._rest()
            else:
                self._begin_call(moment, args, kwargs)
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            self._own_clock.drop()  # there is no more of this picture
            raise
        clock.end_call(self)
        return result

    def _begin_call(self, moment: Moment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if moment.step != self._loop_step:
            self._loop_step = moment.step
            self._step += 1
        rows, kind = _rows(args, kwargs), _kind(args, kwargs)
        for context, chain in self._chains:
            units = units_of(rows, moment.images, context.couple)
            chain.begin(Call(moment, self._step, units, rows, kind), self._agreement)

    def _rest(self) -> None:
        for _, chain in self._chains:
            chain.rest()


def cached(transformer: nn.Module) -> Cached | None:
    """What `enable_cache` put on a transformer; None if nothing."""
    return vars(transformer).get(_CACHED)


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the batch: those of the noisy input, which is the first argument (of some models a list)."""
    found: Any = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), ()))
    return int(found.shape[0]) if isinstance(found, Tensor) else len(found)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The shapes of all tensors that a call brings, and its words, which name modes; each kind remembers for itself."""
    given = (*args, *kwargs.values())
    return tuple(
        value.shape if isinstance(value, Tensor) else value for value in given if isinstance(value, Tensor | str)
    )
