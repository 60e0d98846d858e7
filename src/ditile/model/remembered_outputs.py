"""Outputs of modules that do not differ from patch to patch, remembered so that they are computed once in a step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.model.hooks.block_policy import BlockHook, SurveyedBlocks
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import READ_SHAPE, READ_VERSION, GivenMemory, GivenTensors, RememberedOutput
from ditile.model.hooks.overrides import has_forward_hooks, match_modules, override_attribute
from ditile.model.hooks.pieces import has_nan
from ditile.plan.model_spec import ModelSpec


@dataclass(slots=True)
class FoundModules:
    """The modules of a model whose outputs need not be computed for each patch.

    Attributes:
        outside_blocks: found by surveys: name of a module -> whether its output counts for the whole generation; None
            if it is not remembered.
        within_blocks: modules with the same inputs in every patch of a step; None until a step of patches was watched.
    """

    outside_blocks: dict[str, bool | None] = field(default_factory=dict)
    within_blocks: frozenset[str] | None = None


class OutputMemoizer:
    """Remembers the outputs of modules that do not see the latents, so that they are computed once and not for each
    patch.

    A family declares some. Others are found when a call is surveyed with NaN for latents: modules that the model's own
    forward calls once, before the blocks, with the same inputs as for real latents. Their outputs are kept for a step,
    because a pipeline gives all its patches the same conditions, and while their inputs are the same memory, unchanged.
    Outputs made of the latents there are read only on the first stage, so other stages keep them. After the blocks,
    outputs are read only on the last stage, so the other stages keep their first ones.

    Within blocks the first step of patches finds others: modules with the very same input tensors in each patch, such
    as those that compute a modulation from the time, or keys from a text. They are never trusted: their outputs are
    kept for a step, and only while their inputs are the same tensors, unchanged.

    Args:
        transformer, spec: the model, and its spec.
        now: the generation under way.
        first, last: whether this rank has the first stage, and the last one.
        found: the findings of earlier calls, to which this one adds.
    """

    def __init__(
        self,
        transformer: nn.Module,
        spec: ModelSpec,
        now: Generation,
        label: str = "",
        *,
        first: bool = True,
        last: bool = True,
        found: FoundModules | None = None,
    ) -> None:
        self._transformer = transformer
        self._spec = spec
        self._now = now
        self._label = label
        self._first = first
        self._last = last
        self._all_found = FoundModules() if found is None else found
        self._found = self._all_found.outside_blocks
        self._remembered: dict[str, bool] = {}  # by name, whether for the whole generation
        self._excluded = {name for name, lasts in self._found.items() if lasts is None}
        self._is_watching = False
        # The inputs of modules in a survey, until they are called again.
        self._unproven: dict[str, _SurveyedInputs] = {}

    def install_hooks(self, stack: ExitStack, compiled: Sequence[str] = ()) -> None:
        """Override the forwards of modules until the stack is closed, now and after a survey.

        Args:
            compiled: blocks within which nothing is remembered, because the modules in them are part of their graph.
        """
        self._stack = stack
        self._compiled = compiled
        compiled_prefixes = tuple(f"{block}." for block in compiled)
        declared = [(pattern, True) for pattern in self._spec.constant]
        declared += [(pattern, False) for pattern in self._spec.per_step]
        for pattern, lasts in declared:
            for name, module in match_modules(self._transformer, pattern):
                if not f"{self._label}{name}".startswith(compiled_prefixes):
                    self._remember_output(name, module, lasts=lasts)
        # A LoRA that was loaded or unloaded since then may have changed the names.
        modules = dict(self._transformer.named_modules())
        for name, counts in self._found.items():
            if counts is not None and name in modules and name not in self._remembered:
                self._remember_output(name, modules[name], lasts=counts, is_found=True)

    def survey_call(self, run: Callable[[], Any], blocks: Collection[str], survey: SurveyedBlocks) -> Any:
        """Survey a call, and remember from now on the outputs of modules before the blocks.

        Returns:
            The result of `run`.
        """
        modules = _SurveyedModules(survey, self._excluded)
        self._is_watching = True
        try:
            with modules.watch_calls(self._transformer, tuple(f"{block_list}." for block_list in blocks)):
                result = run()
        finally:
            self._is_watching = False
        # The blocks, or the forward after them, read something made of the latents.
        reads_latents = has_nan(result) or survey.is_fed()
        # An output made of the latents, or after the blocks, is remembered only where nobody reads it.
        for name, inputs in modules.inputs.items():
            is_head = name in modules.after_blocks
            lasts = is_head or modules.is_of_latents[name]
            is_read = self._first or reads_latents
            if is_head:
                is_read = self._last
            if (lasts and is_read) or self._remembered.get(name, lasts) != lasts:
                self._excluded.add(name)
            elif not lasts and name not in self._excluded:
                self._unproven[name] = inputs
            if name not in self._remembered and name not in self._excluded:
                self._remember_output(name, self._transformer.get_submodule(name), lasts=lasts, is_found=True)
                if lasts:
                    self._found[name] = lasts
        self._found.update(dict.fromkeys(self._excluded))
        return result

    def _remember_output(self, name: str, module: nn.Module, *, lasts: bool, is_found: bool = False) -> None:
        """Keep a module's output for a step, or for good if `lasts`; if `is_found`, only while its inputs stay the
        same."""
        now = self._now
        forward = module.forward
        path = f"{self._label}{name}"
        # Outputs that a family declares are remembered whatever a survey finds.
        excluded = self._excluded if is_found else set()
        compares = is_found and not lasts

        def forward_once(*args: Any, **kwargs: Any) -> Any:
            is_unproven = name in self._unproven and not self._is_watching
            if is_unproven:
                is_proven = self._unproven.pop(name).are_equal(pytree.tree_leaves((args, kwargs)))
                self._found[name] = False if is_proven else None
                if not is_proven:
                    excluded.add(name)
            if now.is_surveyed or name in excluded:
                return forward(*args, **kwargs)
            step, patch = now.micro_step
            # Rows of another micro-batch, and conditions of another branch, are different inputs.
            given_tensors = filter(torch.is_tensor, (*args, *kwargs.values()))
            key = (path, now.branch, now.micro_batch, *map(READ_SHAPE, given_tensors))
            known = now.memory.outputs.get(key)
            is_fresh = known is not None and (
                lasts or (known.step == step and patch is not None) or known.is_given_same(args, kwargs)
            )
            # The forward may have written into its inputs.
            if known is None or not is_fresh or known.versions != tuple(map(READ_VERSION, known.tensors)):
                output = forward(*args, **kwargs)
                given = GivenMemory(args, kwargs) if compares else None
                known = now.memory.outputs[key] = RememberedOutput(output, given)
            known.step = step
            return known.output

        self._remembered[name] = lasts
        override_attribute(self._stack, module, "forward", forward_once)

    def watch_blocks(self, forward: Callable[..., Any], hooks: Sequence[BlockHook]) -> Callable[..., Any]:
        """Wrap the model's forward so that the first step of patches finds the modules to remember."""
        modules = self._list_block_modules(hooks)
        found = self._all_found.within_blocks
        if found is not None:
            for name in found & modules.keys():
                self._remember_same(name, modules[name])
        if found is not None or not modules:
            return forward
        watch = PatchWatch(self._now, modules)

        @functools.wraps(forward)
        def forward_watched(*args: Any, **kwargs: Any) -> Any:
            step, patch = self._now.micro_step
            if self._now.is_surveyed or patch is None or self._all_found.within_blocks is not None:
                return forward(*args, **kwargs)
            if watch.step in (None, step):
                with watch.watch_call(step):
                    return forward(*args, **kwargs)
            # By now all patches of a step were seen.
            self._all_found.within_blocks = watch.find_modules()
            for name in self._all_found.within_blocks:
                self._remember_same(name, modules[name])
            return forward(*args, **kwargs)

        return forward_watched

    def _list_block_modules(self, hooks: Sequence[BlockHook]) -> dict[str, nn.Module]:
        """Return the modules within blocks that may be remembered: the model's own, without attention to tokens."""
        modules: dict[str, nn.Module] = {}
        for hook in hooks:
            if hook.name in self._compiled:
                continue
            prefix = hook.name.removeprefix(self._label)
            attentions = tuple(path for path, _ in hook.list_attentions())
            for path, module in hook.block.named_modules():
                attends = any(f"{attention}.".startswith(f"{path}.") for attention in attentions)
                if path and not attends and not any(map(has_forward_hooks, module.modules())):
                    modules[f"{prefix}.{path}"] = module
        return modules

    def _remember_same(self, name: str, module: nn.Module) -> None:
        """Keep the output of a module within a block for a step, while its inputs are the same tensors."""
        now = self._now
        forward = module.forward
        path = f"{self._label}{name}"

        def forward_once(*args: Any, **kwargs: Any) -> Any:
            step, patch = now.micro_step
            if patch is None:
                return forward(*args, **kwargs)
            key = (path, now.branch)
            known = now.memory.outputs.get(key)
            # In another step the tensors may be the same, but the weights may not.
            is_known = (
                known is not None and known.step == step and known.is_given_same(args, kwargs) and known.is_unchanged
            )
            if known is None or not is_known:
                output = forward(*args, **kwargs)
                given = GivenTensors(args, kwargs)
                known = RememberedOutput(output, given)
                known.step = step
                now.memory.outputs[key] = known
            return known.output

        override_attribute(self._stack, module, "forward", forward_once)


class _SeenTensor:
    """An input tensor of a module; equal to the same tensor, while it lives and is unchanged."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = ref(tensor)
        self._version = tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SeenTensor) or self._version != other._version:
            return False
        tensor = self._reference()
        return tensor is not None and tensor is other._reference()

    __hash__ = None  # type: ignore[assignment]


class _SeenCall(NamedTuple):
    """The inputs of a module.

    Attributes:
        values: tensors, or the names of the modules that made them if those have the same inputs, and numbers.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]

    def list_makers(self) -> set[str]:
        """Return the makers of the inputs, by name."""
        return {value for value in self.values if isinstance(value, str)}


class PatchWatch:
    """Finds modules with the same inputs in every patch of a step, also if such modules made these inputs.

    Args:
        now: the generation under way.

    Attributes:
        step: the watched step; None before the first call.
    """

    def __init__(self, now: Generation, modules: Mapping[str, nn.Module]) -> None:
        self._now = now
        self._modules = modules
        self.step: int | None = None
        self._same = set(modules)
        self._first: dict[tuple[str, int], _SeenCall] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._called: set[str] = set()
        # The outputs of modules with the same inputs, by the id of the tensor. The references are weak, because with
        # the first patch these are all tensors that blocks make.
        self._made: dict[int, tuple[str, ReferenceType[Tensor]]] = {}
        self._patches: set[int | None] = set()

    @contextmanager
    def watch_call(self, step: int) -> Iterator[None]:
        """Watch a call of the model within the context."""
        self.step = step
        self._patches.add(self._now.micro_step.patch)
        with ExitStack() as stack:
            stack.callback(self._called.clear)
            stack.callback(self._made.clear)
            for name, module in self._modules.items():
                note = functools.partial(self._note_call, name)
                stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            yield

    def find_modules(self) -> frozenset[str]:
        """Return the outermost modules with the same inputs that have weights, and the makers of their inputs.

        There are none if only one patch was seen.
        """
        same: set[str] = set()
        for (name, _), number in self._calls.items():
            # The module must be called once in each patch.
            if name in self._same and number == len(self._patches) > 1:
                same.add(name)
        outermost: set[str] = set()
        for name in same:
            outer = name.rpartition(".")[0]
            while outer and outer not in same:
                outer = outer.rpartition(".")[0]
            if not outer:
                outermost.add(name)
        waiting: list[str] = []
        for name in outermost:
            if next(self._modules[name].parameters(), None) is not None:
                waiting.append(name)
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                # The input of a module is the same tensor only if it is not computed again.
                makers = self._list_makers(name)
                waiting += makers & outermost
        return frozenset(found)

    def _list_makers(self, name: str) -> set[str]:
        """Return the makers of a module's inputs."""
        makers: set[str] = set()
        for (called, _), call in self._first.items():
            if called == name:
                makers |= call.list_makers()
        return makers

    def _note_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen = self._describe_call(args, kwargs)
        # A module that is called twice may have different inputs each time.
        if name in self._called or seen is None or not isinstance(output, Tensor):
            self._same.discard(name)
        self._called.add(name)
        if name not in self._same or seen is None:
            return
        key = (name, self._now.branch)
        self._calls[key] += 1
        if self._first.setdefault(key, seen) == seen:
            self._made[id(output)] = (name, ref(output))
        else:
            self._same.discard(name)

    def _describe_call(self, args: Any, kwargs: Any) -> _SeenCall | None:
        """Describe the inputs of a module; None if there is no tensor, or anything but tensors and numbers."""
        values: list[Any] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if value.is_inference():
                    return None
                maker, made = self._made.get(id(value), ("", None))
                # A tensor that was freed may have left its id to another tensor.
                if made is not None and made() is value:
                    values.append(maker)
                else:
                    values.append(_SeenTensor(value))
            elif isinstance(value, int | float | None):
                values.append(value)
            else:
                return None
        return _SeenCall((*kwargs,), tuple(values))


class _SurveyedModules:
    """The calls of modules outside of blocks in a survey.

    Args:
        survey: the inputs of the blocks in it.
        excluded: gets the names of modules that must not be remembered.

    Attributes:
        inputs: the inputs of each module that no other module called.
        is_of_latents: whether all outputs of a module are made of the latents.
        after_blocks: modules that were called after the last block.
    """

    def __init__(self, survey: SurveyedBlocks, excluded: set[str]) -> None:
        self._survey = survey
        self._excluded = excluded
        self.inputs: dict[str, _SurveyedInputs] = {}
        self.is_of_latents: dict[str, bool] = {}
        self.after_blocks: set[str] = set()
        self._called: set[str] = set()
        self._active: list[str] = []
        self._reads = _ReadWatch()

    @contextmanager
    def watch_calls(self, model: nn.Module, block_prefixes: tuple[str, ...]) -> Iterator[None]:
        """Watch a call of the model within the context."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if not name or f"{name}.".startswith(block_prefixes):
                    continue
                before = module.register_forward_pre_hook(functools.partial(self._note_call, name), with_kwargs=True)
                after = module.register_forward_hook(functools.partial(self._note_output, name), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(self._reads)
            yield

    def _note_call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name in self._called:
            self._excluded.add(name)
        elif not self._active:
            # Only outermost modules are recorded here.
            self.inputs[name] = _SurveyedInputs(pytree.tree_leaves((args, kwargs)))
            self._reads.tensors.clear()
            if self._survey.has_ended:
                self.after_blocks.add(name)
        self._called.add(name)
        self._active.append(name)

    def _note_output(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._active.pop()
        parts = output if isinstance(output, tuple) else (output,)
        if name in self.inputs and not self._active:
            inputs = self.inputs[name]
            inputs.forget_unread(self._reads.tensors)
            # The module returns an input that it has not read.
            if not inputs.unread.isdisjoint(map(id, parts)):
                self._excluded.add(name)
        # The forward may write into an output that is not a tensor, and no version counts that.
        is_between = self._survey.has_begun and name not in self.after_blocks
        if is_between or any(isinstance(part, list | dict) for part in parts):
            self._excluded.add(name)
        self.is_of_latents[name] = bool(parts) and all(map(has_nan, parts))


class _ReadWatch(TorchDispatchMode):
    """Records which tensors operators read.

    Attributes:
        tensors: their ids; the reader of this set keeps them alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code stays compiled under the watch."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors.update(map(id, pytree.tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


class _SurveyedInputs:
    """The inputs of a module in a survey.

    Args:
        leaves: all values.

    Attributes:
        unread: ids of the tensors that no operator read, such as latents that only say which type to compute in.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves
        self.unread: frozenset[int] = frozenset()

    def forget_unread(self, read: set[int]) -> None:
        """Note the tensors read in the call of the module."""
        self.unread = frozenset(id(leaf) for leaf in self._leaves if isinstance(leaf, Tensor)) - read

    def are_equal(self, leaves: list[Any]) -> bool:
        """Return whether a call has the same input numbers, where the module reads them. Waits for the device."""
        if len(leaves) != len(self._leaves):
            return False
        for own, other in zip(self._leaves, leaves, strict=True):
            if isinstance(own, Tensor) and isinstance(other, Tensor):
                # For a tensor that is not read, only its form counts.
                is_alike = (own.shape, own.dtype) == (other.shape, other.dtype)
                is_unread = is_alike and id(own) in self.unread
                if not is_unread and not torch.equal(own, other):
                    return False
            elif own is not other and own != other:
                return False
        return True
