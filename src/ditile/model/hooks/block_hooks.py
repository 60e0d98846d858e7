"""Block hooks: where strategies meet the blocks of a model, on the instance that the user gave, during one call.

A hook overrides `forward` on one block instance while the pipeline runs. Between calls the model is unchanged, so LoRAs
are loaded, switched, fused and unloaded as before. A block of another stage is a placeholder: the module stays in its
list without weights and children, and its hook passes the tokens through.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ditile.model.hooks.attention_hooks import install_attention
from ditile.model.hooks.attention_processors import (
    cache_signatures,
)
from ditile.model.hooks.batch_rows import BatchDimFinder
from ditile.model.hooks.block_calls import BlockCalls
from ditile.model.hooks.block_policy import ADAPTER_PROCESSORS, BlockHook, BlockPolicy, LayerAttention
from ditile.model.hooks.compile import (
    CompileFunction,
    ForwardCall,
    bypass_compiled_model,
    exclude_from_compile,
    find_compiler,
    wrap_block_call,
    wrap_model_call,
)
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.overrides import IN_CALL, match_modules, override_attribute
from ditile.model.hooks.placeholders import (
    ModuleContents,
    ReplacementBlock,
    build_meta_model,
    is_placeholder,
    lend_parts,
    refuse_saving,
    restore_contents,
    turn_into_placeholder,
)
from ditile.model.hooks.token_arguments import is_cut
from ditile.model.processors import find_overlapped_processors
from ditile.model.remembered_outputs import OutputMemoizer
from ditile.plan.anatomy import Anatomy, ListAnatomy
from ditile.plan.errors import StateError
from ditile.plan.shape import Weights

LOADED_ATTRIBUTE = "_loaded_by_ditile"
"""The attribute of a transformer that holds its `LoadedBlocks`."""


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """The part of a transformer that was read from files, if its other blocks are placeholders from the start.

    Attributes:
        owned: the blocks that were read.
        weights: the numbers of parameters in the whole transformer.
        bytes_read: the bytes that were read from the files.
        guards: refuse calls and saving with only a part of the weights, until a runner has the transformer.
        shard: (index, weights of the ranks) of the part read from each tensor.
        tensor_shares: see `TensorCuts`.
    """

    owned: range
    weights: Weights
    bytes_read: int
    guards: ExitStack
    shard: tuple[int, tuple[float, ...]] = (0, (1.0,))
    tensor_shares: tuple[int, ...] = (1,)


WrapForward = Callable[[Generation, BlockHook, bool, ForwardCall], ForwardCall]
"""(generation, block, whether anything but the next block reads its result, forward) -> the extended forward."""

FuseBlock = Callable[[ExitStack, BlockHook], None]
"""Fuses the kernels of a block into fewer and larger ones, until the stack is closed."""


class TransformerHooks:
    """The hooks of the blocks of one transformer, in order.

    Args:
        transformer, anatomy: the model and its known structure.
        other: the hooks of another model with as many blocks, which the pipeline calls in other steps.
        label: a prefix of the names of the blocks, where the pipeline calls two models.

    Attributes:
        batch_dims: finds which dimension of each argument of the transformer is the batch.
        replacement_blocks: index of a placeholder -> the block that computes here in its place, with streamed weights.
        guards: make the transformer refuse some uses until it is whole again; see `guard_calls` and `guard_saving`.
    """

    def __init__(
        self,
        transformer: nn.Module,
        anatomy: Anatomy,
        other: TransformerHooks | None = None,
        label: str = "",
    ) -> None:
        self.transformer = transformer
        self.anatomy = anatomy
        self.other = other
        self._label = label
        self.batch_dims = BatchDimFinder(transformer, anatomy.inputs)
        self.chain: list[BlockHook] = []
        for list_name, list_anatomy in anatomy.lists.items():
            for place, block in enumerate(transformer.get_submodule(list_name).children()):
                name = f"{label}{list_name}.{place}"
                self.chain.append(BlockHook(len(self.chain), list_name, name, block, list_anatomy))
        self.replacement_blocks: Mapping[int, ReplacementBlock] = {}
        self._stored_contents: dict[int, ModuleContents] = {}
        self.guards = ExitStack()
        self._excluded_modules = set[str]()
        self._adapters = {hook.name: hook.list_adapter_kinds() for hook in self.chain}

    @property
    def models(self) -> list[TransformerHooks]:
        """Return the hooks of every model that the pipeline calls."""
        if self.other is None:
            return [self]
        return [self, self.other]

    def describe_weights(self) -> Weights:
        """Count the transformer's weights; placeholder blocks count 0."""
        blocks: list[int] = []
        layers: list[tuple[bool, ...]] = []
        exchanges: list[tuple[tuple[str, str], ...]] = []
        tensors: list[tuple[int, ...]] = []
        exchanges_by_path = list(self._find_tensor_exchanges())
        for hook in self.chain:
            prefix = f"{hook.name}."
            blocks.append(_count_parameters(hook.block))
            layers.append(tuple(hook.sees_text(path) for path, _ in hook.list_attentions()))
            exchanges.append(tuple(exchange for path, exchange in exchanges_by_path if path.startswith(prefix)))
            own_tensors = itertools.chain(hook.block.parameters(), hook.block.buffers())
            tensors.append(tuple(map(Tensor.numel, own_tensors)))
        last_linear = dict(self.transformer.named_modules()).get("proj_out")
        return Weights(
            blocks=tuple(blocks),
            shared=_count_parameters(self.transformer) - sum(blocks),
            layers=tuple(layers),
            out=int(getattr(last_linear, "out_features", 0)),
            exchanges=tuple(exchanges),
            tensors=tuple(tensors),
        )

    def _find_tensor_exchanges(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield the tensor parallel exchanges as (path, (collective, stream)), by the family's table of token
        streams."""
        for pattern, streams in self.anatomy.token_streams.items():
            for path, module in match_modules(self.transformer, pattern):
                collective = "sum" if hasattr(module, "out_features") else "gather"
                for stream in streams.values():
                    yield path, (collective, stream)

    def copy_to_meta(self) -> TransformerHooks:
        """Return the hooks of a copy of the whole model without weights, built from its config."""
        return TransformerHooks(build_meta_model(self.transformer), self.anatomy)

    @property
    def loaded_blocks(self) -> LoadedBlocks | None:
        """Return the loaded part of the transformer; None if all of it was loaded, or it already belongs to a
        runner."""
        return vars(self.transformer).get(LOADED_ATTRIBUTE)

    @loaded_blocks.setter
    def loaded_blocks(self, loaded: LoadedBlocks) -> None:
        vars(self.transformer)[LOADED_ATTRIBUTE] = loaded

    def has_placeholders(self) -> bool:
        """Return whether some block is a placeholder."""
        hooks = itertools.chain.from_iterable(model.chain for model in self.models)
        return any(is_placeholder(hook.block) for hook in hooks)

    def claim_blocks(self, owned: range, *, keep: bool, shard: tuple[int, tuple[float, ...]]) -> Weights:
        """Hand these blocks over to a runner, from a transformer that is whole or has only these blocks.

        Returns:
            The numbers of parameters in the whole transformer.

        Raises:
            StateError: if a runner has the transformer, or not all blocks that are needed here were read.
        """
        loaded = self.loaded_blocks
        name = type(self.transformer).__name__
        if loaded is None and self.has_placeholders():
            raise StateError(f"this {name} is cut into stages already; restore() its runner, or reload it")
        if self.other is not None:
            self.other.claim_blocks(owned, keep=keep, shard=shard)
        if loaded is None:
            weights = self.describe_weights()
            self.empty_other_blocks(owned, keep=keep)
            return weights
        span = f"{loaded.owned.start} to {loaded.owned.stop - 1}"
        if keep:
            raise StateError(
                f"keep_weights=True, and of this {name} only blocks {span} were loaded; load it without a plan, or "
                "leave keep_weights out"
            )
        if (loaded.owned, loaded.shard) != (owned, shard):
            raise StateError(
                f"of this {name} blocks {span}, {_describe_shard(*loaded.shard)}, were loaded, and here the plan needs "
                f"{owned.start} to {owned.stop - 1}, {_describe_shard(*shard)}; load it for this plan"
            )
        del vars(self.transformer)[LOADED_ATTRIBUTE]
        loaded.guards.close()
        return loaded.weights

    def explain_refusal(self, blocks: range) -> str | None:
        """Explain why the attention of these blocks cannot be divided; None if it can."""
        for model in self.models:
            for hook in model.chain[blocks.start : blocks.stop]:
                if hook.name in self._adapters and hook.list_adapter_kinds() != self._adapters[hook.name]:
                    return (
                        f"the IP-adapters of {hook.name} differ from those when the pipeline was divided; restore() "
                        "the runner, and call parallelize with them"
                    )
                for path, attention in hook.list_attentions():
                    processor = getattr(attention, "processor", None)
                    if isinstance(processor, nn.Module) and not isinstance(processor, ADAPTER_PROCESSORS):
                        return (
                            f"{hook.name}.{path} has the attention processor {type(processor).__name__}, which has "
                            "weights of its own; set it back, or unload the IP-adapter that brought it"
                        )
        return None

    def empty_other_blocks(self, owned: range, *, keep: bool) -> None:
        """Take the weights out of all blocks except the owned ones, and store them if `keep`."""
        for hook in self.chain:
            # The weights of own blocks stay.
            if hook.index in owned:
                continue
            prefix = f"{hook.name.removeprefix(self._label)}."
            # The forward reads these parts of the block without calling it.
            read_outside = [path.removeprefix(prefix) for path in self.anatomy.outside if path.startswith(prefix)]
            parts = turn_into_placeholder(hook.block, read_outside)
            if keep:
                self._stored_contents[hook.index] = parts

    def restore_blocks(self) -> None:
        """Put back the weights kept by `empty_other_blocks`."""
        if self.other is not None:
            self.other.restore_blocks()
        for index, parts in self._stored_contents.items():
            restore_contents(self.chain[index].block, parts)
        self._stored_contents.clear()
        self.guards.close()

    def guard_saving(self) -> None:
        """Make every model refuse to be saved or copied until it is whole."""
        for model in self.models:
            refuse_saving(model.guards, model.transformer)

    def guard_calls(self) -> None:
        """Make calls of the transformer and its copies raise `StateError` outside a runner until it is whole."""

        def refuse_partial_call(transformer: nn.Module, *_: Any) -> None:
            if IN_CALL not in vars(transformer):
                raise StateError(
                    f"this {type(transformer).__name__} has a part of its weights, so only its runner can call it; "
                    "call the runner that ditile.parallelize returned in place of the pipeline"
                )

        # A pre-hook runs before any forward, also before one that is put on the model later.
        guard = self.transformer.register_forward_pre_hook(exclude_from_compile(refuse_partial_call))
        self.guards.callback(guard.remove)

    @contextmanager
    def install_hooks(
        self,
        policy: BlockPolicy,
        owned: range,
        now: Generation,
        core: Callable[..., LayerAttention],
        dispatch: Callable[[Any], Any],
        *,
        fuse: FuseBlock,
        pipe: Any = None,
        compile_: CompileFunction | None = None,
        around: WrapForward | None = None,
    ) -> Iterator[None]:
        """Install the hooks of a policy for the length of a call.

        Args:
            owned: the blocks that run here.
            now: the generation under way.
            core: (layer, backend, kind, through_dispatch) -> the attention of a layer.
            dispatch: (the backend that a processor names) -> the backend that calls a core.
            fuse: is called on the owned blocks that are not compiled.
            pipe: the pipeline of the model, which may have compiled it.
            compile_: compiles the forward of each block that runs here, unless the user compiled the model.
            around: wraps the forward of a block that runs here, if given.
        """
        memo = self._make_memoizer(policy, owned, now)
        calls = BlockCalls(self.transformer, self.chain, self.anatomy, policy, now, memo)
        # This must come before the bypass below, which hides the compiler that the user chose.
        compile_ = find_compiler(pipe, self.transformer) or compile_
        with ExitStack() as stack:
            # Without this attribute the guard of a partial model refuses the call.
            override_attribute(stack, self.transformer, IN_CALL, True)
            if self.other is not None:
                others = self.other.install_hooks(
                    policy, owned, now, core, dispatch, fuse=fuse, pipe=pipe, compile_=compile_, around=around
                )
                stack.enter_context(others)
            bypass_compiled_model(stack, pipe, self.transformer)
            own = self.chain[owned.start : owned.stop]
            # Reversed, so that the first block of a class stands for all of them.
            own_blocks = {type(hook.block): hook.block for hook in reversed(own)}
            compiled: list[str] = []
            for hook in self.chain:
                is_own = hook.index in owned
                if not is_own and type(hook.block) in own_blocks and is_placeholder(hook.block):
                    lend_parts(stack, hook.block, own_blocks[type(hook.block)])
                # This precedes the block's hook: a block may compute attention itself, and some passes do not call it.
                if is_own or hook.index in self.replacement_blocks:
                    self._replace_attention(stack, hook, now, core, dispatch, is_own=is_own)
                own_around = functools.partial(around, now, hook) if around and is_own else None
                wrap = functools.partial(self._wrap_block, calls, hook, owned, own_around)
                varying = functools.partial(_list_varying_arguments, hook.anatomy, now)
                block_compile = compile_ if is_own else None
                if wrap_block_call(stack, hook.block, block_compile, wrap, varying):
                    compiled.append(hook.name)
                elif is_own:
                    cache_signatures(stack, hook.block)
                    fuse(stack, hook)
            memo.install_hooks(stack, compiled)
            override_attribute(stack, self.transformer, "forward", calls.wrap_transformer(self.transformer.forward))
            yield

    def _make_memoizer(self, policy: BlockPolicy, owned: range, now: Generation) -> OutputMemoizer:
        """Make the object that remembers outputs of modules on this rank."""
        first = 0 in owned or bool(self.replacement_blocks)
        # Tensor parallelism may exchange something after the blocks, which all stages count.
        last = owned.stop == len(self.chain) or policy.plan.tensor > 1
        return OutputMemoizer(
            self.transformer,
            self.anatomy,
            now,
            self._label,
            first=first,
            last=last,
            excluded=self._excluded_modules,
        )

    def _replace_attention(
        self,
        stack: ExitStack,
        hook: BlockHook,
        now: Generation,
        core: Callable[..., LayerAttention],
        dispatch: Callable[[Any], Any],
        *,
        is_own: bool,
    ) -> None:
        """Replace the attention of a block, or of its replacement block."""
        if not is_own:
            hook = replace(hook, block=self.replacement_blocks[hook.index].block)
        is_whole = (lambda: now.is_whole) if self.anatomy.modes else None
        install_attention(stack, hook, find_overlapped_processors(self.transformer), core, dispatch, is_whole)

    def _wrap_block(
        self,
        calls: BlockCalls,
        hook: BlockHook,
        owned: range,
        around: Callable[[bool, ForwardCall], ForwardCall] | None,
        forward: ForwardCall,
    ) -> ForwardCall:
        forward = self.replacement_blocks.get(hook.index) or forward
        if around is not None:
            forward = around(hook.index + 1 not in owned, forward)
        return calls.wrap_block(hook, forward)


class CallCountHooks(TransformerHooks):
    """Hooks for a model with unknown blocks: its calls are counted, and run unchanged."""

    def explain_refusal(self, blocks: range) -> str | None:
        """Return None, since attention is the model's own."""
        return None

    @contextmanager
    def install_hooks(
        self,
        policy: BlockPolicy,
        owned: range,
        now: Generation,
        core: Callable[..., LayerAttention],
        dispatch: Any,
        *,
        fuse: FuseBlock,
        pipe: Any = None,
        compile_: CompileFunction | None = None,
        around: WrapForward | None = None,
    ) -> Iterator[None]:
        """Install only the call counter and a memory for outputs that the family declares constant."""
        with ExitStack() as stack:
            for model in self.models:
                # In a model that is compiled as a whole, a replaced part would break its graph.
                if find_compiler(pipe, model.transformer) is None:
                    compiled: list[str] = []
                    for hook in model.chain:
                        if compile_ is None:
                            continue
                        if wrap_block_call(stack, hook.block, compile_, lambda forward: forward):
                            compiled.append(hook.name)
                    memo = OutputMemoizer(model.transformer, model.anatomy, now, model._label)
                    memo.install_hooks(stack, compiled)
                count = functools.partial(count_model_calls, now, model.transformer)
                wrap_model_call(stack, pipe, model.transformer, count)
            yield


def _describe_shard(index: int, weights: Sequence[float]) -> str:
    shares = ":".join(f"{weight:g}" for weight in weights)
    return f"shard {index} of {shares}"


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def count_model_calls(now: Generation, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's forward so that it can be recorded and counts a guidance branch when it returns.

    Calls outside of the loop, such as one that computes the keys of a reference image, are not counted.
    """

    def forward_and_count(*args: Any, **kwargs: Any) -> Any:
        if not now.is_under_way:
            return forward(*args, **kwargs)
        if now.recorder is None:
            result = forward(*args, **kwargs)
        else:
            result = now.recorder.run_call(now, model, forward, args, kwargs)
        now.advance_branch()
        return result

    return functools.update_wrapper(forward_and_count, forward)


def _list_varying_arguments(anatomy: ListAnatomy, now: Generation) -> Sequence[str]:
    """List the arguments of a block whose number of tokens differs between patches."""
    if now.tokens.layout.num_patches == 1:
        return ()
    cut_arguments = [name for name, kinds in anatomy.arguments.items() if is_cut(kinds)]
    streams = [name for name in (anatomy.image, anatomy.text) if name]
    return (*streams, *cut_arguments)
