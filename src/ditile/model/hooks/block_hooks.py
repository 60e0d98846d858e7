"""Block hooks: where strategies meet the blocks of a model, on the instance that the user gave, during one call.

A hook overrides `forward` on one block instance while the pipeline runs. Between calls the model is what it was, so
LoRAs are loaded, switched, fused and unloaded as ever. A block of another stage is a placeholder: the module stays in
its list without weights and children, and its hook passes the tokens through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.model.hooks.attention_hooks import install_attention
from ditile.model.hooks.attention_processors import (
    UNFUSE,
    cache_signatures,
    has_fused_projections,
    replace_cross_processors,
)
from ditile.model.hooks.batch_rows import BatchDimFinder
from ditile.model.hooks.block_calls import BlockCalls
from ditile.model.hooks.block_policy import ADAPTER_PROCESSORS, BlockHook, BlockPolicy, LayerAttention, SurveyedBlocks
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
from ditile.model.hooks.kv_store import READ_SHAPE, READ_VERSION, RememberedOutput
from ditile.model.hooks.overrides import IN_CALL, match_modules, override_attribute
from ditile.model.hooks.pieces import has_nan
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
from ditile.plan.anatomy import Anatomy, ListAnatomy
from ditile.plan.errors import StateError
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
        guards: refuse calls, and to save a part of the weights, until a runner has it.
        shard: (index, ranks) of the part that was read of each tensor.
    """

    owned: range
    weights: Weights
    bytes_read: int
    guards: ExitStack
    shard: tuple[int, int] = (0, 1)


WrapForward = Callable[[Generation, BlockHook, bool, ForwardCall], ForwardCall]
"""(generation, block, whether others than the next block read what it returns, forward) -> the forward, with more."""

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
        guards: what the transformer refuses until it is whole again; see `guard_calls` and `guard_saving`.
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
        self.guards = ExitStack()
        self._found_constants: dict[str, bool | None] = {}
        self._adapters = {hook.name: hook.list_adapter_kinds() for hook in self.chain}

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
        loaded.guards.close()
        return loaded.weights

    def explain_refusal(self, blocks: range) -> str | None:
        """Why the attention of some of these blocks cannot be divided, or None: it has an unknown processor."""
        for hook in (hook for model in self.models for hook in model.chain[blocks.start : blocks.stop]):
            if hook.name in self._adapters and hook.list_adapter_kinds() != self._adapters[hook.name]:
                return (
                    f"the IP-adapters of {hook.name} are others than when the pipeline was divided; restore() the "
                    "runner, and call parallelize with them"
                )
            for path, attention in hook.list_attentions():
                processor = getattr(attention, "processor", None)
                if isinstance(processor, ADAPTER_PROCESSORS):
                    continue
                if self.spec.stock and type(processor) not in self.spec.stock:
                    known = ", ".join(cls.__name__ for cls in self.spec.stock)
                elif isinstance(processor, nn.Module):
                    known = "those without weights of their own"
                else:
                    continue
                remedy = "set it back, or unload the IP-adapter that brought it"
                return (
                    f"{hook.name}.{path} has the attention processor {type(processor).__name__}, and known to work "
                    f"in a divided model: {known}; {UNFUSE if has_fused_projections(attention) else remedy}"
                )
        return None

    def empty_other_blocks(self, owned: range, *, keep: bool) -> None:
        """Takes the weights out of all blocks but the owned ones; keeps them aside only if `keep`."""
        for hook in self.chain:
            if hook.index not in owned:
                prefix = f"{hook.name.removeprefix(self._label)}."
                kept = [path.removeprefix(prefix) for path in self.anatomy.outside if path.startswith(prefix)]
                parts = turn_into_placeholder(hook.block, kept)
                if keep:
                    self._stored_contents[hook.index] = parts

    def restore_blocks(self) -> None:
        """Puts the weights back that `empty_other_blocks` kept."""
        if self.other is not None:
            self.other.restore_blocks()
        for index, parts in self._stored_contents.items():
            restore_contents(self.chain[index].block, parts)
        self._stored_contents.clear()
        self.guards.close()

    def guard_saving(self) -> None:
        """Lets every model refuse to be saved or copied, until it is whole."""
        for model in self.models:
            refuse_saving(model.guards, model.transformer)

    def guard_calls(self) -> None:
        """Lets calls of the transformer, and of its copies, raise `StateError` outside a runner, until it is whole."""

        def refuse_partial_call(transformer: nn.Module, *_: Any) -> None:
            if IN_CALL not in vars(transformer):
                raise StateError(
                    f"this {type(transformer).__name__} has a part of its weights, so it works in calls of its runner "
                    "alone; call the runner that ditile.parallelize returned in place of the pipeline"
                )

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
            around: makes of the forward of a block that runs here another one, if given.
        """
        first = 0 in owned or bool(self.replacement_blocks)
        memo = OutputMemoizer(self.transformer, self.spec, now, self._label, first=first, found=self._found_constants)
        is_whole = (lambda: now.is_whole) if self.anatomy.modes else None
        calls = BlockCalls(self.transformer, self.chain, self.anatomy, policy, now, memo, self.spec.grid)
        # Before the bypass below, which hides what the user compiled the model with.
        compile_ = find_compiler(pipe, self.transformer) or compile_
        with ExitStack() as stack:
            override_attribute(stack, self.transformer, IN_CALL, True)
            if self.other is not None:
                others = self.other.install_hooks(
                    policy, owned, now, core, dispatch, fuse=fuse, pipe=pipe, compile_=compile_, around=around
                )
                stack.enter_context(others)
            bypass_compiled_model(stack, pipe, self.transformer)
            override_attribute(stack, self.transformer, "forward", calls.wrap_transformer(self.transformer.forward))
            compiled = []
            for hook in self.chain:
                varying = functools.partial(_list_varying_arguments, hook.anatomy, now)
                is_own = hook.index in owned
                own_around = functools.partial(around, now, hook) if around and is_own else None
                wrap = functools.partial(self._wrap_block, calls, hook, owned, own_around)
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
            memo.install_hooks(stack, compiled)
            yield

    def _wrap_block(
        self,
        calls: BlockCalls,
        hook: BlockHook,
        owned: range,
        around: Callable[[bool, ForwardCall], ForwardCall] | None,
        forward: ForwardCall,
    ) -> ForwardCall:
        forward = self.replacement_blocks.get(hook.index) or forward
        return calls.wrap_block(hook, forward if around is None else around(hook.index + 1 not in owned, forward))


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
        around: WrapForward | None = None,
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
            OutputMemoizer(self.transformer, self.spec, now, self._label).install_hooks(stack, compiled)
        wrap_model_call(stack, pipe, self.transformer, functools.partial(count_model_calls, now))


class OutputMemoizer:
    """Remembers what modules return that do not see the latents, so that it is computed once and not for each patch.

    A family declares some. Others are found when a call is surveyed, with NaN for latents: modules that the model's own
    forward calls, once, in front of the blocks, and gives the same with the latents as they are. What they return
    counts for a step, in all of whose patches a pipeline gives the same conditions, and for as long as they are given
    the same memory, unchanged. What is made of the latents there is read on the first stage alone: others keep it.

    Args:
        transformer, spec: the model, and what is known of it.
        now: the generation under way.
        label: before the names of its modules.
        first: whether this rank has the first stage.
        found: what surveys of earlier calls found, to which this one's add: the next call may need no survey. By the
            name of a module whether what it returns counts for the whole generation; None where it is not remembered.
    """

    def __init__(
        self,
        transformer: nn.Module,
        spec: ModelSpec,
        now: Generation,
        label: str = "",
        *,
        first: bool = True,
        found: dict[str, bool | None] | None = None,
    ) -> None:
        self._transformer, self._spec, self._now, self._label, self._first = transformer, spec, now, label, first
        self._found = {} if found is None else found
        self._remembered: dict[str, bool] = {}  # by name, whether for the whole generation
        self._excluded = {name for name, lasts in self._found.items() if lasts is None}
        self._is_watching = False
        self._unproven: dict[str, Any] = {}  # what modules were given in a survey, until they are called again

    def install_hooks(self, stack: ExitStack, compiled: Sequence[str] = ()) -> None:
        """Overrides the forwards of modules until the stack is closed: now, and when a call was surveyed.

        Args:
            stack: undoes it.
            compiled: blocks within which nothing is remembered: what they call is part of their graph.
        """
        self._stack = stack
        for patterns, lasts in ((self._spec.constant, True), (self._spec.per_step, False)):
            for pattern in patterns:
                for name, module in match_modules(self._transformer, pattern):
                    if not any(f"{self._label}{name}".startswith(f"{block}.") for block in compiled):
                        self._remember_output(name, module, lasts=lasts)
        # A LoRA that has come or gone since may have changed the names.
        modules = dict(self._transformer.named_modules())
        for name, counts in self._found.items():
            if counts is not None and name in modules and name not in self._remembered:
                self._remember_output(name, modules[name], lasts=counts, is_found=True)

    def survey_call(self, run: Callable[[], Any], blocks: Collection[str], survey: SurveyedBlocks) -> Any:
        """Surveys a call, and remembers from now on what modules in front of the blocks return.

        Args:
            run: makes the call.
            blocks: the lists of blocks.
            survey: what blocks are given in it.

        Returns:
            What `run` does.
        """
        given, of_latents = dict[str, Any](), dict[str, bool]()
        called, active = set[str](), list[str]()

        def note_call(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            if name in called:
                self._excluded.add(name)
            elif not active:
                given[name] = args, kwargs
            called.add(name)
            active.append(name)

        def note_output(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            active.pop()
            parts = output if isinstance(output, tuple) else (output,)
            # The forward may write into what is not a tensor unseen.
            if survey.has_begun or any(isinstance(part, list | dict) for part in parts):
                self._excluded.add(name)
            of_latents[name] = bool(parts) and all(map(has_nan, parts))

        with ExitStack() as watched:
            for name, module in self._transformer.named_modules():
                if name and not any(f"{name}.".startswith(f"{each}.") for each in blocks):
                    for register, note in (
                        (module.register_forward_pre_hook, note_call),
                        (module.register_forward_hook, note_output),
                    ):
                        watched.callback(register(functools.partial(note, name), with_kwargs=True).remove)
            watched.callback(setattr, self, "_is_watching", False)
            self._is_watching = True
            result = run()
        # What is made of the latents is read behind the blocks, or by them.
        reads_latents = has_nan(result) or survey.is_fed()
        for name in given:
            lasts = of_latents[name]
            if (lasts and (self._first or reads_latents)) or self._remembered.get(name, lasts) != lasts:
                self._excluded.add(name)
            elif not lasts and name not in self._excluded:
                self._unproven[name] = given[name]
            if name not in self._remembered and name not in self._excluded:
                self._remember_output(name, self._transformer.get_submodule(name), lasts=lasts, is_found=True)
                if lasts:
                    self._found[name] = lasts
        self._found.update(dict.fromkeys(self._excluded))
        return result

    def _remember_output(self, name: str, module: nn.Module, *, lasts: bool, is_found: bool = False) -> None:
        """What a module returns counts for a step, or `lasts`; if `is_found`, also as long as it is given the same."""
        now, forward, path = self._now, module.forward, f"{self._label}{name}"
        excluded, compares = self._excluded if is_found else set(), is_found and not lasts

        def forward_once(*args: Any, **kwargs: Any) -> Any:
            is_unproven = name in self._unproven and not self._is_watching
            if is_unproven:
                is_proven = _are_equal(self._unproven.pop(name), (args, kwargs))
                self._found[name] = False if is_proven else None
                if not is_proven:
                    excluded.add(name)
            if now.is_surveyed or name in excluded:
                return forward(*args, **kwargs)
            step, patch = now.micro_step
            key = (path, now.branch, now.micro_batch, *map(READ_SHAPE, filter(torch.is_tensor, args)))
            known = now.memory.outputs.get(key)
            if (
                known is None
                or not (lasts or (known.step == step and patch is not None) or known.is_given_same(args, kwargs))
                or known.versions != tuple(map(READ_VERSION, known.tensors))  # the forward wrote into it
            ):
                output = forward(*args, **kwargs)
                known = now.memory.outputs[key] = RememberedOutput(output, (args, kwargs) if compares else None)
            known.step = step
            return known.output

        self._remembered[name] = lasts
        override_attribute(self._stack, module, "forward", forward_once)


def _are_equal(values: Any, others: Any) -> bool:
    """Whether two calls were given the same numbers. Waits for the device."""
    some, more = pytree.tree_leaves(values), pytree.tree_leaves(others)
    return len(some) == len(more) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or x == y
        for x, y in zip(some, more, strict=True)
    )


def count_model_calls(now: Generation, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward after which the next branch of guidance is at hand.

    Outside of the loop, as where keys of a reference are made, it is a call of the whole model and nothing else.
    """

    def forward_and_count(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if now.is_under_way:
            now.advance_branch()
        return result

    return functools.update_wrapper(forward_and_count, forward)


def _list_varying_arguments(anatomy: ListAnatomy, now: Generation) -> Sequence[str]:
    """The arguments of a block that have another number of tokens from patch to patch."""
    if now.tokens.layout.num_patches == 1:
        return ()
    cut = (name for name, kinds in anatomy.arguments.items() if is_cut(kinds))
    return tuple(filter(None, (anatomy.image, anatomy.text, *cut)))
