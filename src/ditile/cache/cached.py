"""A transformer whose blocks may be left out: hooks around its blocks, chains of them, and where the pipeline is.

The cache stays in place between calls of the pipeline, and under a runner. The runner's hooks lie around those of the
cache. For the length of a call the runner gives the cache its clock and its agreement with other ranks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from ditile.cache.build import CacheContext, Chain, explain_idle_steps
from ditile.cache.config import Calibration, DBCacheConfig, ParamsModifier
from ditile.cache.hooks import CacheHook
from ditile.cache.judge import CacheCall, split_into_units
from ditile.cache.report import ContextReport, build_context_report
from ditile.errors import ModelError, StateError
from ditile.hooks.compile import CompileFunction, exclude_from_compile
from ditile.hooks.overrides import find_forward_attribute, locate_override, override_attribute
from ditile.hooks.protocols import CallPosition, PipelineClock, SkipAgreement
from ditile.plan.spec import BlockList

LAYER_SKIP_ARGUMENTS = ("skip_layers",)
"""Arguments with which a transformer leaves out blocks itself: the cache does nothing in such a call."""

_CACHE_ATTRIBUTE = "_cached_by_ditile"
"""The attribute of a transformer that holds its `TransformerCache`."""


class IdleCacheWarning(UserWarning):
    """A cache was asked for that can never leave anything out."""


class CacheClock(PipelineClock, Protocol):
    """A clock that the caches of a pipeline have where no runner gives them one."""

    def start_watching(self) -> None: ...

    def stop_watching(self) -> None: ...

    def restart_clock(self, steps: int | None, *, separate_cfg: bool | None = None) -> None: ...

    def end_generation(self) -> None: ...


class SingleRankAgreement:
    """One rank decides by itself."""

    owned: Collection[nn.Module] | None = None

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """The sums as they are: this rank has all tokens."""
        return sums

    def send_skip_decision(self, skips: Sequence[bool]) -> None:
        """Does nothing: there is no other rank."""

    def receive_skip_decision(self, count: int) -> Sequence[bool]:
        """Raises `StateError`: there is no stage in front."""
        raise StateError("a cache waits for a decision that nobody takes")

    def send_probe_input(self, tokens: Tensor, to: nn.Module) -> None:
        """Does nothing: this rank has the whole probe."""

    def receive_probe_input(self, like: Tensor, of: nn.Module) -> Tensor:
        """Raises `StateError`: this rank has the whole probe."""
        raise StateError("a cache waits for tokens that nobody gives")

    def mark_blocks_skipped(self, blocks: Sequence[nn.Module], moment: CallPosition) -> None:
        """Does nothing: one rank keeps no stale keys."""


class TransformerCache:
    """The cache of one transformer.

    Args:
        transformer: the model.
        hooks: around all its blocks of all contexts.
        contexts: (settings) -> the contexts, each of which decides by itself.
        config: the settings.

    Attributes:
        contexts: the contexts.
        reports: of the last generation, one for each context.
        kept_bytes: bytes that were remembered when it ended.
        label: what the pipeline calls its call of the transformer, if it names it.
    """

    def __init__(
        self,
        transformer: nn.Module,
        hooks: Sequence[CacheHook],
        contexts: Callable[[DBCacheConfig], list[CacheContext]],
        config: DBCacheConfig,
    ) -> None:
        self.transformer, self._hooks, self._make, self._config = transformer, hooks, contexts, config
        self.contexts = contexts(config)
        self.reports: list[ContextReport] = []
        self.kept_bytes = 0
        self._clock: PipelineClock | None = None
        self._agreement: SkipAgreement = SingleRankAgreement()
        self._chains: list[tuple[CacheContext, Chain]] = []
        self._loop_step, self._step = -1, -1
        self.label: str | None = None
        self._labels = ExitStack()

    def install_hooks(self, clock: CacheClock, compiler: Callable[[], CompileFunction | None] = lambda: None) -> None:
        """Installs the hooks around the blocks.

        Args:
            clock: says where the pipeline is.
            compiler: what the user compiled the whole model with, which then compiles its blocks.
        """
        self._clock = self._own_clock = clock
        self._compiler = compiler
        for hook in self._hooks:
            hook.install_hook()
        name = find_forward_attribute(self.transformer)
        forward = getattr(self.transformer, name)
        self._before, self._stock = vars(self.transformer).get(name), forward

        @exclude_from_compile
        def call_with_cache(*args: Any, **kwargs: Any) -> Any:
            return self._call_forward(forward, *args, **kwargs)

        self._mine = vars(self.transformer)[name] = functools.update_wrapper(call_with_cache, forward)
        stock: Any = getattr(self.transformer, "cache_context", None)
        if stock is not None:
            override_attribute(
                self._labels, self.transformer, "cache_context", functools.partial(self._track_label, stock)
            )
        vars(self.transformer)[_CACHE_ATTRIBUTE] = self

    def remove_hooks(self) -> None:
        """Removes the hooks. A hook that something else lies around by now stays, and does nothing."""
        self._own_clock.stop_watching()
        self._labels.close()
        self.end_generation()
        self._clock = None
        for hook in self._hooks:
            hook.remove_hook()
        name = locate_override(self.transformer, self._mine)
        if name == "forward" and self._before is None:
            del vars(self.transformer)["forward"]
        elif name is not None:
            vars(self.transformer)[name] = self._stock
        vars(self.transformer).pop(_CACHE_ATTRIBUTE, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        name = type(self.transformer).__name__
        raise StateError(f"a copy of a cached {name} would run the blocks of the first; call disable_cache before")

    def refresh_settings(self, steps: int | None, config: DBCacheConfig | None, changes: dict[str, Any]) -> None:
        """Prepares for a new picture, of so many steps if they are given, and with other settings if some are given.

        Raises:
            ModelError: if a field is not known, or a value is out of its range.
        """
        self._config = (config or self._config).reset(**changes)
        self.contexts = self._make(self._config)
        self._own_clock.restart_clock(steps, separate_cfg=self._config.enable_separate_cfg)

    def update_compilation(self) -> None:
        """Looks for blocks that were compiled since the hooks were installed. This comes first in a generation."""
        compile_ = self._compiler()
        for hook in self._hooks:
            hook.update_compilation(compile_)

    @contextmanager
    def use_clock_and_agreement(self, clock: PipelineClock, agreement: SkipAgreement) -> Iterator[None]:
        """Takes the clock and the agreement of a runner, for the length of a call."""
        own_agreement = self._agreement
        self._own_clock.stop_watching()
        # A replica without an image begins no generation, and must not report that of an earlier call.
        self.reports, self.kept_bytes = [], 0
        self._clock, self._agreement = clock, agreement
        try:
            yield
        finally:
            # After an error the chains of this call are still there, and the own clock must not find them.
            self.end_generation()
            self._clock, self._agreement = self._own_clock, own_agreement
            self._own_clock.start_watching()

    def begin_generation(self, steps: int) -> None:
        """Begins a generation of so many steps, in which nothing is remembered yet."""
        self.end_generation()
        if self._clock is self._own_clock:
            self.update_compilation()
        self.reports, self.kept_bytes = [], 0
        self._loop_step, self._step = -1, -1
        # `enable_cache` has warned of the other contexts.
        could = [context for context in self.contexts if context.idle is None]
        for reason in filter(None, dict.fromkeys(explain_idle_steps(context.config, steps) for context in could)):
            warnings.warn(reason, IdleCacheWarning, stacklevel=2)
        pairs = ((context, context.build_chain(steps, self._agreement)) for context in self.contexts)
        self._chains = [(context, chain) for context, chain in pairs if chain is not None]
        for _, chain in self._chains:
            chain.restrict_to_blocks(self._agreement.owned)

    def end_generation(self) -> None:
        """Ends the generation, and drops all that was remembered except the numbers that `summary` shows."""
        if self._chains:
            self.kept_bytes = self.memory_bytes
            self.reports = [
                build_context_report(context, chain, self._step + 1, self.kept_bytes) for context, chain in self._chains
            ]
        for _, chain in self._chains:
            chain.bypass_cache()
        self._chains = []

    @property
    def memory_bytes(self) -> int:
        """Bytes that are remembered now."""
        return sum(chain.memory_bytes for _, chain in self._chains)

    @contextmanager
    def _track_label(
        self, stock: Callable[..., AbstractContextManager[None]], name: str, **where: Any
    ) -> Iterator[None]:
        """diffusers' `cache_context`, whose label is kept for the clock."""
        before, self.label = self.label, name
        try:
            with stock(name, **where):
                yield
        finally:
            self.label = before

    def _call_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        clock = self._clock
        if clock is None:
            return forward(*args, **kwargs)
        moment = clock.begin_model_call(self)
        if self._chains:
            if moment is None or any(kwargs.get(name) for name in LAYER_SKIP_ARGUMENTS):
                self._bypass_chains()
            else:
                self._begin_chains(moment, args, kwargs)
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            # The loop that the error leaves makes no further step, so memory must not wait for one.
            self._own_clock.end_generation()
            raise
        clock.end_model_call(self)
        return result

    def _begin_chains(self, moment: CallPosition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if moment.step != self._loop_step:
            self._loop_step = moment.step
            self._step += 1
        batch_size, kind = _get_batch_size(args, kwargs), _get_input_signature(args, kwargs)
        for context, chain in self._chains:
            units = split_into_units(batch_size, moment.images, context.config.couple)
            chain.begin_forward(CacheCall(moment, self._step, units, batch_size, kind), self._agreement)

    def _bypass_chains(self) -> None:
        for _, chain in self._chains:
            chain.bypass_cache()


def build_transformer_cache(
    transformer: nn.Module,
    lists: Sequence[BlockList],
    config: DBCacheConfig,
    calibrator: Calibration | None = None,
    modifiers: Sequence[ParamsModifier] = (),
    *,
    has_rows: bool = True,
) -> TransformerCache:
    """A transformer with hooks around the blocks of some lists, not installed yet.

    Args:
        transformer: the model.
        lists: its lists of blocks, in the order of execution.
        config: the settings for all of them.
        calibrator: forecasts what is left out; None uses what was computed last.
        modifiers: one for each list, and each list then decides by itself; one for all lists, or none, and all lists
            then decide together.
        has_rows: whether the tensors that blocks get have the rows of the batch; if not, the whole batch decides at
            once.

    Raises:
        ModelError: if there are no blocks, or the number of modifiers is not 0, 1 or that of the lists.
    """
    if not lists or not any(len(block_list.blocks) for block_list in lists):
        raise ModelError(f"{type(transformer).__name__} has no blocks that could be left out")
    if len(modifiers) not in (0, 1, len(lists)):
        raise ModelError(
            f"{len(modifiers)} params_modifiers were given for {len(lists)} lists of blocks; give one each"
        )
    hooks: list[CacheHook] = []
    hooks_by_list: dict[str, list[CacheHook]] = {}
    for block_list in lists:
        start = len(hooks)
        new_hooks = [CacheHook(start + k, block, block_list.flow) for k, block in enumerate(block_list.blocks)]
        hooks_by_list[block_list.name] = hooks_by_list.get(block_list.name, []) + new_hooks
        hooks += new_hooks

    def build_context(
        name: str, context_hooks: Sequence[CacheHook], config: DBCacheConfig, calibrator: Calibration | None
    ) -> CacheContext:
        return CacheContext(name, context_hooks, config if has_rows else config.reset(couple="batch"), calibrator)

    def build_contexts(changed: DBCacheConfig) -> list[CacheContext]:
        if len(modifiers) < 2:
            whole = modifiers[0].over(changed, calibrator) if modifiers else (changed, calibrator)
            return [build_context("+".join(hooks_by_list), hooks, *whole)]
        pairs = zip(hooks_by_list.items(), modifiers, strict=True)
        return [
            build_context(name, context_hooks, *modifier.over(changed, calibrator))
            for (name, context_hooks), modifier in pairs
        ]

    return TransformerCache(transformer, hooks, build_contexts, config)


def find_transformer_cache(transformer: nn.Module) -> TransformerCache | None:
    """The cache that `enable_cache` installed on a transformer; None if there is none."""
    return vars(transformer).get(_CACHE_ATTRIBUTE)


def _get_batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the batch: those of the noisy input, which is the first argument (of some models a list)."""
    sample: Any = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), ()))
    return int(sample.shape[0]) if isinstance(sample, Tensor) else len(sample)


def _get_input_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The shapes of all tensors of a call, and its strings, which name modes; calls that differ share no memory."""
    inputs = (*args, *kwargs.values())
    return tuple(
        value.shape if isinstance(value, Tensor) else value for value in inputs if isinstance(value, Tensor | str)
    )
