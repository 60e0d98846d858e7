"""Block hooks: where strategies meet the blocks of a model, on the instance that the user gave, during one call.

A hook overrides `forward` on one block instance while the pipeline runs. Between calls the model is what it was, so
LoRAs are loaded, switched, fused and unloaded as ever. A block of another stage is a placeholder: the module stays in
its list without weights and children, and its hook passes the tokens through.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ditile.errors import StateError
from ditile.hooks.attention_processors import (
    UNFUSE,
    cache_signatures,
    has_fused_projections,
    replace_cross_processors,
)
from ditile.hooks.batch_rows import BatchDimFinder, join_batch_results
from ditile.hooks.compile import (
    CompileFunction,
    bypass_compiled_model,
    exclude_from_compile,
    find_compiler,
    wrap_block_call,
    wrap_model_call,
)
from ditile.hooks.generation import Generation
from ditile.hooks.memoize import OutputMemoizer, embed_patches
from ditile.hooks.overrides import IN_CALL, list_parameter_names, match_modules, override_attribute
from ditile.hooks.placeholders import (
    ModuleContents,
    ReplacementBlock,
    is_placeholder,
    restore_contents,
    turn_into_placeholder,
)
from ditile.plan.layout import Grid
from ditile.plan.shape import Weights
from ditile.plan.spec import BlockIO, ModelSpec, View

LOADED_ATTRIBUTE = "_loaded_by_ditile"
"""The attribute of a transformer that says what was read of it."""


class LayerAttention(Protocol):
    """The attention of a layer, such as `AttentionCore`.

    Attributes:
        overlaps: whether it is faster if q, k and v are computed one after the other.
    """

    overlaps: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor: ...


class TokenState(NamedTuple):
    """The tokens on their way through the blocks: image `[B, n, C]`; text `[B, t, C]`, where it is a stream too."""

    image: Tensor
    text: Tensor | None


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


class BlockPolicy(Protocol):
    """What happens at the hooks of a model."""

    def begin_transformer_call(self, grid: Grid, batch_size: int) -> Sequence[range]:
        """The transformer is called; returns the runs of its batch that are computed one after the other."""

    def begin_micro_batch(self, micro_batch: int) -> None:
        """One of several micro-batches is next."""

    def run_block(self, index: int, block: Callable[[TokenState], TokenState], state: TokenState) -> TokenState:
        """The forward has reached a block."""

    def run_output(self, head: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
        """The forward has reached the output module, which makes `width` channels of each token."""

    def end_transformer_call(self) -> None:
        """The transformer returns."""


@dataclass(frozen=True, slots=True)
class BlockHook:
    """A block in the chain."""

    index: int
    name: str
    block: nn.Module
    io: BlockIO

    def list_attentions(self) -> list[tuple[str, Any]]:
        """The attention modules that the block has, by attribute."""
        candidates = ((name, getattr(self.block, name, None)) for name in (*self.io.attn, *self.io.image_attn))
        return [(name, attention) for name, attention in candidates if attention is not None]


FuseBlock = Callable[[ExitStack, BlockHook], None]
"""Makes fewer and larger kernels of what a block computes, until the stack is closed."""


class TransformerHooks:
    """The hooks of the blocks of one transformer, in order.

    Attributes:
        batch_dims: finds which dimension of each argument of the transformer is the batch.
        replacement_blocks: for placeholders that are computed here all the same, with streamed weights.
    """

    def __init__(self, transformer: nn.Module, spec: ModelSpec) -> None:
        self.transformer, self.spec = transformer, spec
        self.batch_dims = BatchDimFinder(transformer, spec.batch if spec.blocks else None)
        blocks = [
            (f"{name}.{i}", block, io)
            for name, io in spec.blocks.items()
            for i, block in enumerate(transformer.get_submodule(name).children())
        ]
        self.chain = [BlockHook(index, *location) for index, location in enumerate(blocks)]
        self.replacement_blocks: Mapping[int, ReplacementBlock] = {}
        self._stored_contents: dict[int, ModuleContents] = {}
        self._guard: RemovableHandle | None = None

    def describe_weights(self) -> Weights:
        """What the transformer is made of; blocks that are placeholders count as empty."""
        blocks = tuple(sum(p.numel() for p in hook.block.parameters()) for hook in self.chain)
        shared = sum(p.numel() for p in self.transformer.parameters()) - sum(blocks)
        layers = tuple(tuple(name in hook.io.attn for name, _ in hook.list_attentions()) for hook in self.chain)
        head = self.transformer.get_submodule(self.spec.out) if self.chain else None
        out = int(getattr(head, "out_features", 0))
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

    @property
    def loaded_blocks(self) -> LoadedBlocks | None:
        """What was read of the transformer; None if it was read whole, or is a runner's already."""
        return vars(self.transformer).get(LOADED_ATTRIBUTE)

    @loaded_blocks.setter
    def loaded_blocks(self, loaded: LoadedBlocks) -> None:
        vars(self.transformer)[LOADED_ATTRIBUTE] = loaded

    def has_placeholders(self) -> bool:
        """Whether some block is a placeholder."""
        return any(is_placeholder(hook.block) for hook in self.chain)

    def claim_blocks(self, owned: range, *, keep: bool, shard: tuple[int, int] = (0, 1)) -> Weights:
        """Leaves these blocks to a runner, of a transformer that is whole or of which no others were read.

        Returns:
            The parameters of the whole.

        Raises:
            StateError: if a runner has it, other blocks were read, or others are to be kept and were not read.
        """
        loaded, name = self.loaded_blocks, type(self.transformer).__name__
        if loaded is None:
            if self.has_placeholders():
                raise StateError(f"this {name} is cut into stages already; restore() its runner, or reload it")
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
        for hook in self.chain[blocks.start : blocks.stop]:
            for name, attention in hook.list_attentions():
                if not self._is_known_processor(processor := attention.processor):
                    known = ", ".join(cls.__name__ for cls in self.spec.stock) or "those of dispatch_attention_fn"
                    remedy = "set it back, or unload the IP-adapter that brought it"
                    return (
                        f"{hook.name}.{name} has the attention processor {type(processor).__name__}, and known to work "
                        f"under PipeFusion: {known}; {UNFUSE if has_fused_projections(attention) else remedy}"
                    )
        return None

    def _is_known_processor(self, processor: Any) -> bool:
        if self.spec.stock:
            return type(processor) in self.spec.stock
        return hasattr(processor, "_attention_backend") and not isinstance(processor, nn.Module)

    def empty_other_blocks(self, owned: range, *, keep: bool) -> None:
        """Takes the weights out of all blocks but the owned ones; keeps them aside only if `keep`."""
        for hook in self.chain:
            if hook.index not in owned:
                parts = turn_into_placeholder(hook.block)
                if keep:
                    self._stored_contents[hook.index] = parts

    def restore_blocks(self) -> None:
        """Puts the weights back that `empty_other_blocks` kept."""
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
        current: Callable[[], Generation],
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
            current: the generation under way.
            core: (layer, backend, joint) -> the attention of a layer.
            dispatch: the name of the attention backend that calls a core, given the name that a processor has.
            fuse: is called on the blocks that run here uncompiled.
            pipe: the pipeline of the model, which may have compiled it.
            compile_: compiles the forward of each block, where the user did not.
        """
        memo = OutputMemoizer(self.spec, current)
        # Before the bypass below, which hides what the user compiled the model with.
        compile_ = find_compiler(pipe, self.transformer) or compile_
        with ExitStack() as stack:
            override_attribute(stack, self.transformer, IN_CALL, True)
            bypass_compiled_model(stack, pipe, self.transformer)
            self._hook_forward(stack, policy, current)
            compiled = []
            for hook in self.chain:
                varying = functools.partial(_list_varying_arguments, hook.io, current)
                wrap = functools.partial(self._hook_block, hook, policy, current)
                is_own = hook.index in owned
                if wrap_block_call(stack, hook.block, compile_ if is_own else None, wrap, varying):
                    compiled.append(hook.name)
                if is_own or hook.index in self.replacement_blocks:
                    active_hook = hook if is_own else replace(hook, block=self.replacement_blocks[hook.index].block)
                    self._hook_attention(stack, active_hook, core, dispatch)
                    replace_cross_processors(stack, self.spec, active_hook.block, current)
                if is_own and hook.name not in compiled:
                    cache_signatures(stack, hook.block)
                    fuse(stack, hook)
            self._hook_output(stack, policy)
            first = 0 in owned or bool(self.replacement_blocks)
            if first:
                embed_patches(stack, self.spec, self.transformer, current)
            memo.install_hooks(stack, self.transformer, first=first, compiled=compiled)
            yield

    def _hook_forward(self, stack: ExitStack, policy: BlockPolicy, current: Callable[[], Generation]) -> None:
        forward = self.transformer.forward
        names = list_parameter_names(self.transformer)

        def forward_micro_batches(*args: Any, **kwargs: Any) -> Any:
            now, inputs = current(), dict(zip(names, args, strict=False)) | kwargs
            grid = now.get_branch_constant("grid", lambda: self.spec.grid(self.transformer, inputs))
            batch_size = int(inputs["hidden_states"].shape[0])
            micro_batches = policy.begin_transformer_call(grid, batch_size)
            if len(micro_batches) == 1:
                result = forward(*args, **kwargs)
            else:
                results, dims = [], self.batch_dims.find_dims(inputs, "hidden_states", batch_size)
                assert dims is not None  # the family's table says it
                for index, batch_range in enumerate(micro_batches):
                    policy.begin_micro_batch(index)
                    select = operator.itemgetter(slice(batch_range.start, batch_range.stop))
                    results.append(forward(**dims.slice_arguments(inputs, select)))
                result = join_batch_results(results)
            policy.end_transformer_call()
            return result

        override_attribute(stack, self.transformer, "forward", forward_micro_batches)

    def _hook_block(
        self, hook: BlockHook, policy: BlockPolicy, current: Callable[[], Generation], block_forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        forward: Callable[..., Any] = self.replacement_blocks.get(hook.index) or block_forward
        io, names, streams = hook.io, list_parameter_names(hook.block), "text" in hook.io.returns

        def forward_through_policy(*args: Any, **kwargs: Any) -> Any:
            call = dict(zip(names, args, strict=False)) | kwargs

            def compute_block(state: TokenState) -> TokenState:
                call["hidden_states"] = state.image
                if streams:
                    call["encoder_hidden_states"] = state.text
                _slice_token_arguments(call, io, current())
                out = forward(**call)
                named = dict(zip(io.returns, out if isinstance(out, tuple) else (out,), strict=True))
                return TokenState(named["image"], named.get("text"))

            state = TokenState(call["hidden_states"], call["encoder_hidden_states"] if streams else None)
            state = policy.run_block(hook.index, compute_block, state)
            if not streams:
                return state.image
            return tuple(state.text if name == "text" else state.image for name in io.returns)

        return forward_through_policy

    def _hook_attention(
        self, stack: ExitStack, hook: BlockHook, core: Callable[..., LayerAttention], dispatch: Any
    ) -> None:
        for name, attention in hook.list_attentions():
            layer, joint = f"{hook.name}.{name}", name in hook.io.attn
            processor = self._make_processor(attention.processor, layer, joint, core, dispatch)
            override_attribute(stack, attention, "processor", processor)

    def _make_processor(
        self, stock: Any, layer: str, joint: bool, core: Callable[..., LayerAttention], dispatch: Any
    ) -> Any:
        if self.spec.processor is not None:
            return self.spec.processor(core(layer, None, joint=joint, through_dispatch=False))
        attend = core(layer, stock._attention_backend, joint=joint, through_dispatch=True)
        if self.spec.overlapped is not None and attend.overlaps:
            return self.spec.overlapped(attend)
        processor = copy.copy(stock)
        processor._parallel_config = attend
        processor._attention_backend = dispatch(stock._attention_backend)
        return processor

    def _hook_output(self, stack: ExitStack, policy: BlockPolicy) -> None:
        head = self.transformer.get_submodule(self.spec.out)
        forward, width = head.forward, int(head.out_features)  # type: ignore[arg-type]
        override_attribute(stack, head, "forward", lambda x: policy.run_output(forward, x, width))


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
        current: Callable[[], Generation],
        core: Callable[..., LayerAttention],
        dispatch: Any,
        *,
        fuse: FuseBlock,
        pipe: Any = None,
        compile_: CompileFunction | None = None,
    ) -> Iterator[None]:
        """Installs only the count of calls, and a memory of what the family declares constant."""
        compiled = []
        with ExitStack() as stack:
            whole = find_compiler(pipe, self.transformer) is not None
            if compile_ is not None and not whole:
                for hook in self.chain:
                    if wrap_block_call(stack, hook.block, compile_, lambda forward: forward):
                        compiled.append(hook.name)
            if not whole:
                for hook in self.chain:
                    replace_cross_processors(stack, self.spec, hook.block, current)
                OutputMemoizer(self.spec, current).install_hooks(stack, self.transformer, first=True, compiled=compiled)
            wrap_model_call(stack, pipe, self.transformer, functools.partial(count_model_calls, current))
            yield


def count_model_calls(current: Callable[[], Generation], forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward after which the next branch of guidance is at hand."""

    def forward_and_count(*args: Any, **kwargs: Any) -> Any:
        now = current()
        result = forward(*args, **kwargs)
        now.advance_branch()
        return result

    return functools.update_wrapper(forward_and_count, forward)


def _slice_token_arguments(call: dict[str, Any], io: BlockIO, now: Generation) -> None:
    if now.has_all_image_tokens:
        return
    patch = now.micro_step.patch
    for name, cut in io.tokens.items():
        if (value := call.get(name)) is not None:
            make = functools.partial(cut, value, View(now.branch_layout, now.get_own_part(patch)))
            call[name] = now.memory.get_cached_slice((name, now.branch, patch), value, make)


def _list_varying_arguments(io: BlockIO, current: Callable[[], Generation]) -> Sequence[str]:
    """The arguments of a block that have another number of tokens from patch to patch."""
    return ("hidden_states", "encoder_hidden_states", *io.tokens) if current().branch_layout.num_patches > 1 else ()
