"""Block hooks: where strategies meet the blocks of a model, on the instance that the user gave, during one call.

A hook overrides `forward` on one block instance while the pipeline runs. Between calls the model is what it was, so
LoRAs are loaded, switched, fused and unloaded as ever. A block of another stage is a placeholder: the module stays in
its list without weights and children, and its hook passes the tokens through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ditile.errors import StateError
from ditile.hooks.attention_hooks import install_attention
from ditile.hooks.attention_processors import (
    UNFUSE,
    cache_signatures,
    has_fused_projections,
    replace_cross_processors,
)
from ditile.hooks.batch_rows import BatchDimFinder
from ditile.hooks.block_calls import BlockCalls
from ditile.hooks.block_policy import BlockHook, BlockPolicy, LayerAttention
from ditile.hooks.compile import (
    CompileFunction,
    bypass_compiled_model,
    exclude_from_compile,
    find_compiler,
    wrap_block_call,
    wrap_model_call,
)
from ditile.hooks.generation import Generation
from ditile.hooks.overrides import IN_CALL, match_modules, override_attribute
from ditile.hooks.placeholders import (
    ModuleContents,
    ReplacementBlock,
    build_meta_model,
    is_placeholder,
    lend_parts,
    restore_contents,
    turn_into_placeholder,
)
from ditile.hooks.token_arguments import is_cut
from ditile.plan.anatomy import Anatomy, ListAnatomy
from ditile.plan.shape import Weights
from ditile.plan.spec import ModelSpec

LOADED_ATTRIBUTE = "_loaded_by_ditile"
"""The attribute of a transformer that says what was read of it."""


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """What was read of a transformer whose other blocks are placeholders from the start.

    Attributes:
        owned: the blocks that were read.
        weights: the parameters of the whole.
        bytes_read: from the files.
        guard: refuses calls until a runner has it.
        shard: (index, ranks) of the part that was read of each tensor.
    """

    owned: range
    weights: Weights
    bytes_read: int
    guard: RemovableHandle
    shard: tuple[int, int] = (0, 1)


FuseBlock = Callable[[ExitStack, BlockHook], None]
"""Makes fewer and larger kernels of what a block computes, until the stack is closed."""


class TransformerHooks:
    """The hooks of the blocks of one transformer, in order.

    Args:
        transformer, spec, anatomy: the model, and what is known of it.
        other: the hooks of another model of as many blocks, which the pipeline calls in other steps.
        label: before the names of the blocks, where the pipeline calls two models.

    Attributes:
        batch_dims: finds which dimension of each argument of the transformer is the batch.
        replacement_blocks: for placeholders that are computed here all the same, with streamed weights.
    """

    def __init__(
        self,
        transformer: nn.Module,
        spec: ModelSpec,
        anatomy: Anatomy,
        other: TransformerHooks | None = None,
        label: str = "",
    ) -> None:
        self.transformer, self.spec, self.anatomy, self.other = transformer, spec, anatomy, other
        self._label = label
        self.batch_dims = BatchDimFinder(transformer, spec.batch if spec.example is not None else None)
        blocks = [
            (list_name, f"{label}{list_name}.{i}", block, of_list)
            for list_name, of_list in anatomy.lists.items()
            for i, block in enumerate(transformer.get_submodule(list_name).children())
        ]
        self.chain = [BlockHook(index, *location) for index, location in enumerate(blocks)]
        self.replacement_blocks: Mapping[int, ReplacementBlock] = {}
        self._stored_contents: dict[int, ModuleContents] = {}
        self._guard: RemovableHandle | None = None

    @property
    def models(self) -> list[TransformerHooks]:
        """The hooks of every model that the pipeline calls."""
        return [self] if self.other is None else [self, self.other]

    def describe_weights(self) -> Weights:
        """What the transformer is made of; blocks that are placeholders count as empty."""
        blocks = tuple(sum(p.numel() for p in hook.block.parameters()) for hook in self.chain)
        shared = sum(p.numel() for p in self.transformer.parameters()) - sum(blocks)
        layers = tuple(tuple(hook.sees_text(path) for path, _ in hook.list_attentions()) for hook in self.chain)
        out = int(getattr(dict(self.transformer.named_modules()).get(self.spec.out), "out_features", 0))
        path_exchanges = list(self._find_tensor_exchanges())
        exchanges = tuple(
            tuple(exchange for path, exchange in path_exchanges if path.startswith(f"{hook.name}."))
            for hook in self.chain
        )
        tensors = tuple(
            tuple(x.numel() for x in (*hook.block.parameters(), *hook.block.buffers())) for hook in self.chain
        )
        return Weights(blocks=blocks, shared=shared, layers=layers, out=out, exchanges=exchanges, tensors=tensors)

    def _find_tensor_exchanges(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Where tensor parallelism exchanges what, by the family's table of token streams."""
        for pattern, streams in self.spec.tensor_tokens.items():
            for path, module in match_modules(self.transformer, pattern):
                kind = "sum" if hasattr(module, "out_features") else "gather"
                yield from ((path, (kind, stream)) for stream in streams.values())

    def copy_to_meta(self) -> TransformerHooks:
        """The same of the whole model by its config, without weights."""
        return TransformerHooks(build_meta_model(self.transformer), self.spec, self.anatomy)

    @property
    def loaded_blocks(self) -> LoadedBlocks | None:
        """What was read of the transformer; None if it was read whole, or is a runner's already."""
        return vars(self.transformer).get(LOADED_ATTRIBUTE)

    @loaded_blocks.setter
    def loaded_blocks(self, loaded: LoadedBlocks) -> None:
        vars(self.transformer)[LOADED_ATTRIBUTE] = loaded

    def has_placeholders(self) -> bool:
        """Whether some block is a placeholder."""
        return any(is_placeholder(hook.block) for model in self.models for hook in model.chain)

    def claim_blocks(self, owned: range, *, keep: bool, shard: tuple[int, int] = (0, 1)) -> Weights:
        """Leaves these blocks to a runner, of a transformer that is whole or of which no others were read.

        Returns:
            The parameters of the whole.

        Raises:
            StateError: if a runner has it, other blocks were read, or others are to be kept and were not read.
        """
        loaded, name = self.loaded_blocks, type(self.transformer).__name__
        if loaded is None and self.has_placeholders():
            raise StateError(f"this {name} is cut into stages already; restore() its runner, or reload it")
        if self.other is not None:
            self.other.claim_blocks(owned, keep=keep, shard=shard)
        if loaded is None:
            weights = self.describe_weights()
            self.empty_other_blocks(owned, keep=keep)
            return weights
        here, wanted = (f"{blocks.start} to {blocks.stop - 1}" for blocks in (loaded.owned, owned))
        if keep:
            raise StateError(
                f"keep_weights=True, and of this {name} only blocks {here} were loaded; load it without a plan, or "
                "leave keep_weights out"
            )
        if (loaded.owned, loaded.shard) != (owned, shard):
            raise StateError(
                f"of this {name} blocks {here}, shard {loaded.shard[0]} of {loaded.shard[1]}, were loaded, and here "
                f"the plan needs {wanted}, shard {shard[0]} of {shard[1]}; load it for this plan"
            )
        del vars(self.transformer)[LOADED_ATTRIBUTE]
        loaded.guard.remove()
        return loaded.weights

    def explain_refusal(self, blocks: range) -> str | None:
        """Why the attention of some of these blocks cannot be divided, or None: it has an unknown processor."""
        for hook in (hook for model in self.models for hook in model.chain[blocks.start : blocks.stop]):
            for path, attention in hook.list_attentions():
                processor = getattr(attention, "processor", None)
                if self.spec.stock and type(processor) not in self.spec.stock:
                    known = ", ".join(cls.__name__ for cls in self.spec.stock)
                elif isinstance(processor, nn.Module):
                    known = "those without weights of their own"
                else:
                    continue
                remedy = "set it back, or unload the IP-adapter that brought it"
                return (
                    f"{hook.name}.{path} has the attention processor {type(processor).__name__}, and known to work "
                    f"under PipeFusion: {known}; {UNFUSE if has_fused_projections(attention) else remedy}"
                )
        return None

    def empty_other_blocks(self, owned: range, *, keep: bool) -> None:
        """Takes the weights out of all blocks but the owned ones; keeps them aside only if `keep`."""
        for hook in self.chain:
            if hook.index not in owned:
                parts = turn_into_placeholder(hook.block)
                if keep:
                    self._stored_contents[hook.index] = parts

    def restore_blocks(self) -> None:
        """Puts the weights back that `empty_other_blocks` kept."""
        if self.other is not None:
            self.other.restore_blocks()
        for index, parts in self._stored_contents.items():
            restore_contents(self.chain[index].block, parts)
        self._stored_contents.clear()
        if self._guard is not None:
            self._guard.remove()

    def guard_calls(self) -> RemovableHandle:
        """Lets calls of the transformer, and of its copies, raise `StateError` outside a runner, until it is whole."""

        def refuse_partial_call(transformer: nn.Module, *_: Any) -> None:
            if IN_CALL not in vars(transformer):
                raise StateError(
                    f"this {type(transformer).__name__} has a part of its weights, so it works in calls of its runner "
                    "alone; call the runner that ditile.parallelize returned in place of the pipeline"
                )

        self._guard = self.transformer.register_forward_pre_hook(exclude_from_compile(refuse_partial_call))
        return self._guard

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
    ) -> Iterator[None]:
        """Installs the hooks of a policy for the length of a call.

        Args:
            policy: decides at each hook.
            owned: the blocks that run here.
            now: the generation under way.
            core: (layer, backend, kind) -> the attention of a layer.
            dispatch: the name of the attention backend that calls a core, given the name that a processor has.
            fuse: is called on the blocks that run here uncompiled.
            pipe: the pipeline of the model, which may have compiled it.
            compile_: compiles the forward of each block, where the user did not.
        """
        memo = OutputMemoizer(self.spec, now, self._label)
        is_whole = (lambda: now.is_whole) if self.anatomy.modes else None
        calls = BlockCalls(self.transformer, self.chain, self.anatomy, policy, now, self.spec.grid)
        # Before the bypass below, which hides what the user compiled the model with.
        compile_ = find_compiler(pipe, self.transformer) or compile_
        with ExitStack() as stack:
            override_attribute(stack, self.transformer, IN_CALL, True)
            if self.other is not None:
                others = self.other.install_hooks(
                    policy, owned, now, core, dispatch, fuse=fuse, pipe=pipe, compile_=compile_
                )
                stack.enter_context(others)
            bypass_compiled_model(stack, pipe, self.transformer)
            override_attribute(stack, self.transformer, "forward", calls.wrap_transformer(self.transformer.forward))
            compiled = []
            for hook in self.chain:
                varying = functools.partial(_list_varying_arguments, hook.anatomy, now)
                wrap = functools.partial(self._wrap_block, calls, hook)
                is_own = hook.index in owned
                alike = (other.block for other in self.chain if other.index in owned)
                whole = next((block for block in alike if type(block) is type(hook.block)), None)
                if not is_own and whole is not None and is_placeholder(hook.block):
                    lend_parts(stack, hook.block, whole)
                # Before the hook of the block, which may compute attention itself, and is not called in every pass.
                if is_own or hook.index in self.replacement_blocks:
                    active_hook = hook if is_own else replace(hook, block=self.replacement_blocks[hook.index].block)
                    install_attention(stack, self.spec, active_hook, core, dispatch, is_whole)
                    replace_cross_processors(stack, self.spec, active_hook.block, now)
                if wrap_block_call(stack, hook.block, compile_ if is_own else None, wrap, varying):
                    compiled.append(hook.name)
                if is_own and hook.name not in compiled:
                    cache_signatures(stack, hook.block)
                    fuse(stack, hook)
            first = 0 in owned or bool(self.replacement_blocks)
            memo.install_hooks(stack, self.transformer, first=first, compiled=compiled)
            yield

    def _wrap_block(self, calls: BlockCalls, hook: BlockHook, forward: Callable[..., Any]) -> Callable[..., Any]:
        return calls.wrap_block(hook, self.replacement_blocks.get(hook.index) or forward)


class CallCountHooks(TransformerHooks):
    """A model whose blocks need not be known: its calls are counted, and run as they are."""

    def explain_refusal(self, blocks: range) -> str | None:
        """None: attention is the model's own."""
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
    ) -> Iterator[None]:
        """Installs only the count of calls, and a memory of what the family declares constant."""
        with ExitStack() as stack:
            for model in self.models:
                model._install_counter(stack, now, pipe, compile_)  # type: ignore[attr-defined]
            yield

    def _install_counter(self, stack: ExitStack, now: Generation, pipe: Any, compile_: CompileFunction | None) -> None:
        compiled, whole = [], find_compiler(pipe, self.transformer) is not None
        if compile_ is not None and not whole:
            for hook in self.chain:
                if wrap_block_call(stack, hook.block, compile_, lambda forward: forward):
                    compiled.append(hook.name)
        if not whole:
            for hook in self.chain:
                replace_cross_processors(stack, self.spec, hook.block, now)
            memo = OutputMemoizer(self.spec, now, self._label)
            memo.install_hooks(stack, self.transformer, first=True, compiled=compiled)
        wrap_model_call(stack, pipe, self.transformer, functools.partial(count_model_calls, now))


class OutputMemoizer:
    """Remembers the outputs of modules that a family declares constant, in a generation or in a step."""

    def __init__(self, spec: ModelSpec, now: Generation, label: str = "") -> None:
        self._spec, self._now, self._label = spec, now, label

    def install_hooks(
        self, stack: ExitStack, transformer: nn.Module, *, first: bool, compiled: Sequence[str] = ()
    ) -> None:
        """Overrides the forwards of those modules until the stack is closed.

        Args:
            first: whether this rank has the first stage, which reads the embedded latents.
            compiled: blocks within which nothing is remembered: what they call is part of their graph.
        """
        # Other stages never read the embedded latents, so those of the first step will do.
        constant = self._spec.constant if first else (*self._spec.constant, self._spec.image_tokens)
        for patterns, wrap in ((constant, self._memoize_constant), (self._spec.per_step, self._memoize_per_step)):
            for pattern in patterns:
                for name, module in match_modules(transformer, pattern):
                    path = f"{self._label}{name}"
                    if not any(path.startswith(f"{block}.") for block in compiled):
                        override_attribute(stack, module, "forward", wrap(path, module.forward))

    def _memoize_constant(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_once(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            shapes = tuple(arg.shape for arg in args if isinstance(arg, Tensor))
            return now.get_branch_constant((name, shapes), lambda: forward(*args, **kwargs))

        return forward_once

    def _memoize_per_step(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_once_per_step(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now.micro_step.patch is None:
                return forward(*args, **kwargs)
            return now.memory.get_step_constant((name, now.branch), lambda: forward(*args, **kwargs))

        return forward_once_per_step


def count_model_calls(now: Generation, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward after which the next branch of guidance is at hand."""

    def forward_and_count(*args: Any, **kwargs: Any) -> Any:
        now.check_under_way()
        result = forward(*args, **kwargs)
        now.advance_branch()
        return result

    return functools.update_wrapper(forward_and_count, forward)


def _list_varying_arguments(anatomy: ListAnatomy, now: Generation) -> Sequence[str]:
    """The arguments of a block that have another number of tokens from patch to patch."""
    if now.branch_layout.num_patches == 1:
        return ()
    cut = (name for name, kinds in anatomy.arguments.items() if is_cut(kinds))
    return tuple(filter(None, (anatomy.image, anatomy.text, *cut)))
