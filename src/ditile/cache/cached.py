"""Caches of models: an override of the forward, hooks around the blocks, and chains of hooks.

A runner installs them on the model for one call, inside its own hooks, and gives the cache a clock and an agreement
with other ranks. Without a runner a `CallClock` counts the calls of the model.
"""

from __future__ import annotations

import abc
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.cache.build import CacheContext, Chain
from ditile.cache.clock import CallClock
from ditile.cache.config import (
    BlockCacheConfig,
    CacheConfig,
    Calibration,
    ParamsModifier,
    check_one_forecast,
    merge_configs,
)
from ditile.cache.hooks import CacheHook
from ditile.cache.report import ContextReport, Decisions
from ditile.cache.segment import KeepMemory, Residuals
from ditile.cache.unit_decision import CacheCall, split_into_units
from ditile.model.block_table import BlockList
from ditile.model.fingerprint import fingerprint
from ditile.model.hooks.compile import CompileFunction, exclude_from_compile, find_compiler
from ditile.model.hooks.kv_store import KeptBuffers
from ditile.model.hooks.overrides import WatchedMethod, find_innermost_forward, override_attribute
from ditile.model.hooks.protocols import CallPosition, PipelineClock, SkipAgreement
from ditile.plan.errors import ModelError

LOG = logging.getLogger("ditile")
LAYER_SKIP_ARGUMENTS = ("skip_layers",)
"""Arguments that make a transformer itself skip blocks: the cache does nothing in such a call."""

_CACHE_ATTRIBUTE = "_cached_by_ditile"
"""The attribute of a model that holds its `ModelCache`."""


class IdleCacheWarning(UserWarning):
    """A cache can skip nothing, or nothing in a call outside of its pipeline."""


class ModelCache(abc.ABC):
    """The cache of one model that a pipeline calls.

    Attributes:
        reports: the reports of the last generation, one for each context.
        kept_bytes: bytes that were remembered when that generation ended.
        label: the pipeline's name for the call under way; None without a name.
        is_in_call: whether a call of a runner is under way.
    """

    def __init__(self, transformer: nn.Module, config: CacheConfig) -> None:
        self.transformer = transformer
        self._config = config
        self.reports: list[ContextReport] = []
        self.kept_bytes = 0
        self.label: str | None = None
        self.is_in_call = False
        self._clock: PipelineClock | None = None
        self._own_clock: CallClock | None = None
        self._idle_watch = ExitStack()
        self._warn_idle_call = exclude_from_compile(self._warn_of_idle_call)
        self._is_prepared = False
        self._num_steps = 0
        self._has_warned = False
        self._has_warned_of_idle_call = False

    @property
    @abc.abstractmethod
    def contexts(self) -> Sequence[Any]:
        """Return the contexts. A context decides on all of its work together.

        It has its settings in short (`text`) and in full (`settings`), and the reason if it can skip nothing (`idle`).
        """

    @property
    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """Return the number of remembered bytes."""

    @abc.abstractmethod
    def begin_generation(self, steps: int) -> None:
        """Begin a generation of `steps` steps, with an empty cache."""

    def end_generation(self) -> None:
        """End the generation, and drop everything remembered except the numbers that `summary` shows."""
        self.update_reports()
        self._drop_memory()
        all_ran = all(report.steps == self._num_steps and not report.saved for report in self.reports)
        # All ranks decide alike, so only one warns.
        if self._has_warned or not self.reports or not all_ran or (dist.is_initialized() and dist.get_rank() > 0):
            return
        self._has_warned = True
        differences = [report.differences[0] for report in self.reports if report.differences]
        smallest = ""
        if differences:
            smallest = f": the smallest difference was {min(differences):.3g}"
        LOG.warning("%s left out nothing%s", self.reports[0].settings, smallest)

    @abc.abstractmethod
    def _drop_memory(self) -> None:
        """Drop everything remembered."""

    @abc.abstractmethod
    def update_reports(self) -> None:
        """Report the generation under way, if there is one."""

    def refresh_settings(
        self, steps: int | None, config: CacheConfig | None, calibrator: Calibration | None, changes: dict[str, Any]
    ) -> None:
        """Prepare for a new image; the number of steps and other settings change only if they are given.

        Args:
            config: changes the fields that were given to it; a config of another class replaces all settings.
            changes: further fields of the settings to change.

        Raises:
            ModelError: if a field is not known, or a value is out of its range.
        """
        if config is not None and type(config) is type(self._config):
            config = merge_configs(self._config, config)
        changed = (config or self._config).reset(**changes)
        self._change_settings(changed, calibrator)
        self._config = changed
        if self._own_clock is not None:
            self._own_clock.restart_clock(steps, separate_cfg=changed.enable_separate_cfg)

    @abc.abstractmethod
    def _change_settings(self, config: CacheConfig, calibrator: Calibration | None) -> None:
        """Change the settings. Raises `ModelError` for settings of another kind of cache."""

    @abc.abstractmethod
    def _run_call(self, moment: CallPosition | None, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of the model. `moment` is None if everything must be computed, or the call is prepared already."""

    def install_cache(self, stack: ExitStack, pipe: Any, clock: CallClock | None) -> None:
        """Put the cache on its model until the stack is closed.

        Args:
            pipe: the pipeline, or the model itself.
            clock: counts the calls of the model if no runner drives its loop.
        """
        self._pipe = pipe
        # A runner, and a second `enable_cache`, find the cache on the model.
        override_attribute(stack, self.transformer, _CACHE_ATTRIBUTE, self)
        stack.callback(self._leave_model)
        if clock is None:
            self._watch_idle_calls()
            return
        self._clock = self._own_clock = clock
        # This override is innermost, so that no other hook takes it along. If it is wrapped, it stays without effect.
        owner, name = find_innermost_forward(self.transformer)
        watched = WatchedMethod(exclude_from_compile(self._call_forward), getattr(owner, name))
        override_attribute(stack, owner, name, watched, yields_to_newer=True)
        stock = getattr(self.transformer, "cache_context", None)
        if stock is not None:
            watched = WatchedMethod(self._track_label, stock)
            override_attribute(stack, self.transformer, "cache_context", watched)

    def _watch_idle_calls(self) -> None:
        """Watch for calls of the model in which nothing can be left out, until the first of them."""
        if self._own_clock is None and not self._has_warned_of_idle_call:
            handle = self.transformer.register_forward_pre_hook(self._warn_idle_call)
            self._idle_watch.callback(handle.remove)

    def _warn_of_idle_call(self, model: nn.Module, _: Any) -> None:
        # A copy of the model has the hook too.
        if model is not self.transformer:
            return
        self._has_warned_of_idle_call = True
        self._idle_watch.close()
        warnings.warn(
            f"the {type(model).__name__} was called outside of the pipeline that was cached, and such calls leave out "
            "nothing; call ditile.enable_cache on the pipeline that calls it",
            IdleCacheWarning,
            stacklevel=2,
        )

    @contextmanager
    def expect_calls(self) -> Iterator[None]:
        """Stop the watch for idle calls during a runner's call, which finds the model without hooks."""
        self._idle_watch.close()
        try:
            yield
        finally:
            self._watch_idle_calls()

    def _leave_model(self) -> None:
        self._idle_watch.close()
        self.end_generation()
        self._clock = self._own_clock = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:  # noqa: B027 - it returns None
        """Return None: a copy of the model has no cache."""

    @contextmanager
    def use_clock(self, clock: PipelineClock | None) -> Iterator[None]:
        """Use the clock of a runner for the length of a call. With None, the cache does nothing in it."""
        self.end_generation()
        # A replica without an image begins no generation, and must not report one of an earlier call.
        self._forget_reports()
        self._clock = clock
        self.is_in_call = True
        try:
            yield
        finally:
            # After an error, drop the memory, so that the cache's own clock does not find it.
            self.end_generation()
            self._clock = self._own_clock
            self.is_in_call = False

    def _forget_reports(self) -> None:
        # A new list: `summary` has returned the last one.
        self.reports = []
        self.kept_bytes = 0

    @contextmanager
    def _track_label(
        self, stock: Callable[..., AbstractContextManager[None]], name: str, **where: Any
    ) -> Iterator[None]:
        """Keep the label of diffusers' `cache_context` for the clock."""
        before = self.label
        self.label = name
        try:
            with stock(name, **where):
                yield
        finally:
            self.label = before

    def _call_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        clock = self._clock
        if clock is None:
            return forward(*args, **kwargs)
        moment = None
        # `prepare_call` has already begun the call.
        if not self._is_prepared:
            moment = clock.begin_model_call(self)
        try:
            result = self._run_call(moment, forward, args, kwargs)
        except BaseException:
            # The error ends the loop, so no later step would free the memory.
            if self._own_clock is not None:
                self._own_clock.end_generation()
            raise
        clock.end_model_call(self)
        return result


class TransformerCache(ModelCache):
    """The cache of the blocks of one transformer.

    Args:
        hooks: the hooks around its blocks, of all contexts.
        contexts: (settings, calibrator) -> the contexts, each of which decides by itself.
    """

    def __init__(
        self,
        transformer: nn.Module,
        hooks: Sequence[CacheHook],
        contexts: Callable[[BlockCacheConfig, Calibration | None], list[CacheContext]],
        config: BlockCacheConfig,
        calibrator: Calibration | None,
    ) -> None:
        super().__init__(transformer, config)
        self._hooks = hooks
        # The hooks that are installed for a generation of the cache's own clock.
        self._own_hooks = ExitStack()
        self._make_contexts = contexts
        self._calibrator = calibrator
        self._contexts = contexts(config, calibrator)
        self._agreement: SkipAgreement = SkipAgreement()
        self._chains: list[tuple[CacheContext, Chain]] = []
        self._loop_step = -1
        self._step = -1  # counted from the first step in which the transformer was called
        self._keep: KeepMemory | None = None
        # What the blocks of the prepared call may read and store; empty if all blocks run.
        self._described: list[Residuals] = []

    @property
    def contexts(self) -> list[CacheContext]:
        """Return the contexts: the blocks that are decided on together."""
        return self._contexts

    def _change_settings(self, config: CacheConfig, calibrator: Calibration | None) -> None:
        if not isinstance(config, BlockCacheConfig):
            raise ModelError(f"a {type(config).__name__} leaves out no blocks; call enable_cache with it")
        calibrator = merge_configs(self._calibrator, calibrator)
        self._contexts = self._make_contexts(config, calibrator)
        self._calibrator = calibrator

    def _install_hooks(self, stack: ExitStack, compile_: CompileFunction | None) -> None:
        # If the user compiled the whole model, its blocks are compiled in the same way.
        compile_ = find_compiler(self._pipe, self.transformer) or compile_
        for hook in self._hooks:
            hook.install_hook(stack, compile_)

    @contextmanager
    def join_call(
        self,
        clock: PipelineClock,
        agreement: SkipAgreement,
        kept_buffers: KeptBuffers | None,
        compile_: CompileFunction | None,
    ) -> Iterator[None]:
        """Put hooks on the blocks for a runner's call, with its clock and agreement, and its memory if it records."""
        own_agreement = self._agreement
        self._agreement = agreement
        if kept_buffers is not None:

            def keep_in_buffers(*purpose_and_like: Any) -> Tensor:
                *purpose, like = purpose_and_like
                return kept_buffers.get_memory(("cache", id(self.transformer), *purpose), like.shape, like)

            self._keep = keep_in_buffers
        try:
            with self.use_clock(clock), ExitStack() as stack:
                self._install_hooks(stack, compile_)
                if self._own_clock is None:
                    forward = self.transformer.forward
                    call = exclude_from_compile(functools.partial(self._call_forward, forward))
                    override_attribute(stack, self.transformer, "forward", functools.update_wrapper(call, forward))
                yield
        finally:
            self._agreement = own_agreement
            self._keep = None

    def begin_generation(self, steps: int) -> None:
        """Begin a generation of `steps` steps, with an empty cache."""
        self.end_generation()
        if not self.is_in_call:
            self._install_hooks(self._own_hooks, None)
        self._forget_reports()
        self._loop_step = -1
        self._step = -1
        self._num_steps = steps
        for context in self.contexts:
            chain = context.build_chain(steps, self._agreement, self._keep)
            if chain is not None:
                chain.restrict_to_blocks(self._agreement.owned)
                self._chains.append((context, chain))

    def _drop_memory(self) -> None:
        self._bypass_chains()
        self._own_hooks.close()
        self._chains = []
        self._described = []
        self._is_prepared = False

    def update_reports(self) -> None:
        """Report the generation under way, if there is one."""
        if not self._chains:
            return
        self._forget_reports()
        self.kept_bytes = self.memory_bytes
        for context, chain in self._chains:
            decisions = []
            for branch, patch, unit, record in chain.iterate_records():
                differences = sorted(record.differences.items())
                decisions.append(Decisions(branch, patch, unit, list(record.skipped), differences))
            report = ContextReport(
                name=context.name,
                settings=context.text,
                blocks=len(context.hooks),
                middle=len(chain.middle),
                steps=self._step + 1,
                kept_bytes=self.kept_bytes,
                decisions=decisions,
                # Only the chain that measures ratios for MagCache has them.
                mag_ratios=getattr(chain, "ratios", []),
            )
            self.reports.append(report)

    @property
    def memory_bytes(self) -> int:
        """Return the number of remembered bytes."""
        return sum(chain.memory_bytes for _, chain in self._chains)

    def _run_call(self, moment: CallPosition | None, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._is_prepared:
            self._decide_before(moment, args, kwargs)
        self._is_prepared = False
        return forward(*args, **kwargs)

    def _decide_before(self, moment: CallPosition | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Decide on the next call before it is made, and return whether blocks may be skipped."""
        # A call that leaves out layers itself, or does not count, runs every block.
        leaves_out_layers = any(map(kwargs.get, LAYER_SKIP_ARGUMENTS))
        if moment is None or leaves_out_layers:
            self._bypass_chains()
            return False
        if self._chains:
            # A second transformer is not called in every step of the loop.
            if moment.step != self._loop_step:
                self._loop_step = moment.step
                self._step += 1
            # The noisy input is the first argument; some models take a list.
            sample = next(iter((*args, *kwargs.values())), ())
            if not args:
                sample = kwargs.get("hidden_states", sample)
            batch_size = len(sample)
            kind = fingerprint((*args, *kwargs.values()), "shape")
            control = None
            # Control is measured only on demand, because the measurement reads all arguments.
            if any(chain.needs_control for _, chain in self._chains):
                control = _measure_control(batch_size, [*enumerate(args), *kwargs.items()], sample)
            # Users may replace the scheduler at any time.
            scheduler = getattr(self._pipe, "scheduler", None)
            for context, chain in self._chains:
                units = split_into_units(batch_size, moment.images, context.config.couple)
                call = CacheCall(
                    moment, self._step, units, batch_size, kind, control, self.transformer, sample, kwargs, scheduler
                )
                chain.begin_forward(call, self._agreement)
        return bool(self._chains)

    # The next methods are called where calls are recorded and played.

    def prepare_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """Decide on a call before it is made, and describe what its blocks do besides using their inputs.

        Returns:
            Equal values for calls that differ only in the values of tensors; None if such values decide, or something
            is remembered for the first time.
        """
        if self._clock is None:
            return ()
        may_skip = self._decide_before(self._clock.begin_model_call(self), args, kwargs)
        self._is_prepared = True
        self._described = []
        if not may_skip:
            return ()
        decision: list[Hashable] = []
        for context, chain in self._chains:
            description = chain.describe_call()
            if description is None:
                return None
            self._described += chain.iterate_residuals()
            # Settings are included, because another cache may have replaced this one since.
            decision.append((context.name, context.settings, description))
        return tuple(decision)

    def list_stored_keys(self) -> list[Any] | None:
        """Return the keys under which blocks stored values in the recorded call; None if some key is new."""
        if any(residuals.has_new_keys for residuals in self._described):
            return None
        return [list(residuals.stored) for residuals in self._described]

    @contextmanager
    def repeat_call(self) -> Iterator[None]:
        """Let the caller repeat the last call within this context, from the state before it, without noting it."""
        with ExitStack() as stack:
            for residuals in self._described:
                stack.enter_context(residuals.go_back())
            self._is_prepared = True
            stack.callback(setattr, self, "_is_prepared", False)
            yield

    def end_played_call(self, stored: Sequence[Any]) -> None:
        """Note that a tape made the call, and stored values under `stored`, the result of `list_stored_keys`."""
        self._is_prepared = False
        for residuals, keys in zip(self._described, stored, strict=True):
            residuals.note_played_call(keys, self._step)
        if self._clock is not None:
            self._clock.end_model_call(self)

    def _bypass_chains(self) -> None:
        for _, chain in self._chains:
            chain.bypass_cache()


def build_transformer_cache(
    transformer: nn.Module,
    lists: Sequence[BlockList],
    config: BlockCacheConfig,
    calibrator: Calibration | None = None,
    modifiers: Sequence[ParamsModifier] = (),
    *,
    has_rows: bool = True,
) -> TransformerCache:
    """Build a cache with hooks around the blocks of some lists, not installed yet.

    Args:
        lists: its lists of blocks, in the order of execution.
        config: the settings for all of them.
        calibrator: forecasts skipped outputs; None reuses the last computed ones.
        modifiers: a modifier for each list, which then decides by itself; or at most one for all lists, which then
            decide together.
        has_rows: whether the inputs of blocks have the rows of the batch; otherwise the whole batch is one unit.

    Raises:
        ModelError: if there are no blocks, or the number of modifiers is not 0, 1 or the number of lists.
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
        new_hooks = [CacheHook(place, block, block_list.flow) for place, block in enumerate(block_list.blocks, start)]
        hooks_by_list[block_list.name] = hooks_by_list.get(block_list.name, []) + new_hooks
        hooks += new_hooks

    def build_contexts(changed: BlockCacheConfig, calibrator: Calibration | None) -> list[CacheContext]:
        hooks_by_context = hooks_by_list
        if len(modifiers) < 2:
            # With at most one modifier all lists decide together, in one context.
            hooks_by_context = {"+".join(hooks_by_list): hooks}
        contexts: list[CacheContext] = []
        for (name, context_hooks), modifier in itertools.zip_longest(hooks_by_context.items(), modifiers):
            settings = changed, calibrator
            if modifier is not None:
                settings = modifier.over(changed, calibrator)
            check_one_forecast(*settings)
            own_config, own_calibrator = settings
            if not has_rows:
                # Without rows the whole batch is one unit, whatever a modifier says.
                own_config = own_config.reset(couple="batch")
            contexts.append(CacheContext(name, context_hooks, own_config, own_calibrator))
        return contexts

    return TransformerCache(transformer, hooks, build_contexts, config, calibrator)


def find_model_cache(transformer: nn.Module) -> ModelCache | None:
    """Return the cache that `enable_cache` installed on a transformer. None if there is none."""
    return vars(transformer).get(_CACHE_ATTRIBUTE)


def _measure_control(batch_size: int, inputs: Iterable[tuple[Any, Any]], sample: Any) -> Tensor | None:
    """Measure the inputs that may enter between blocks (lists of tensors, and control), `[rows, arguments]`.

    Other arguments enter before the first block, or are the same in all steps.
    """
    sizes = []
    for name, value in inputs:
        if value is sample or (isinstance(value, Tensor) and "control" not in str(name)):
            continue
        tensors = []
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                tensors.append(leaf)
        if not tensors:
            continue
        norms = []
        for tensor in tensors:
            # If a tensor does not have these rows, each row gets the norm of the whole tensor.
            num_rows = batch_size if tensor.ndim and len(tensor) == batch_size else 1
            flat = tensor.detach().reshape(num_rows, -1)
            dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(flat, ord=1, dim=1, dtype=dtype)
            # A ControlNet may be on another device than the model.
            norms.append(norm.expand(batch_size).to(tensors[0].device))
        sizes.append(torch.stack(norms).sum(dim=0))
    if not sizes:
        return None
    return torch.stack([size.to(sizes[0].device) for size in sizes], dim=1)
