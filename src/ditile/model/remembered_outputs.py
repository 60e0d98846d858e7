"""Outputs of modules that do not differ from patch to patch, remembered so that they are computed once in a step.

The row of a class names them (`Anatomy.constant` and the columns after it). A survey confirms that they are not made of
the latents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import READ_SHAPE, READ_VERSION, RememberedOutput
from ditile.model.hooks.overrides import has_forward_hooks, match_modules, override_attribute
from ditile.model.hooks.pieces import has_nan
from ditile.plan.anatomy import Anatomy


@dataclass(frozen=True, eq=False)
class OutputMemoizer:
    """Remembers the outputs of modules that do not see the latents, which are computed once and not for each patch.

    Outside the blocks, an output is kept for a step, because a pipeline gives all its patches the same conditions, and
    longer while its inputs are the same tensors, unchanged. An output made of the latents is read only on the first
    stage, and the head's output only on the last; every other stage keeps such an output for good.

    Within the blocks, an output is kept for a step, and only while its inputs are the same tensors, unchanged.

    Attributes:
        transformer, anatomy: the model, and its known structure.
        now: the generation under way.
        first, last: whether this rank has the first stage, and the last one.
        excluded: modules that are never remembered; each survey of a call adds to them.
    """

    transformer: nn.Module
    anatomy: Anatomy
    now: Generation
    label: str = ""
    first: bool = True
    last: bool = True
    excluded: set[str] = field(default_factory=set)

    def install_hooks(self, stack: ExitStack, compiled: Sequence[str] = ()) -> None:
        """Override the forwards of modules until the stack is closed.

        Args:
            compiled: blocks within which nothing is remembered, because the modules in them are part of their graph.
        """
        anatomy = self.anatomy
        compiled_prefixes = tuple(f"{block}." for block in compiled)
        block_prefixes = tuple(f"{name}." for name in anatomy.lists)
        lasting = list(anatomy.constant)
        if not self.first:
            lasting += anatomy.embeds
        if not self.last:
            lasting += anatomy.head
        for name, module in self._find_modules(lasting):
            if not f"{self.label}{name}".startswith(compiled_prefixes):
                self._remember_output(stack, name, module, lasts=True)
        for name, module in self._find_modules(anatomy.per_step):
            if f"{self.label}{name}".startswith(compiled_prefixes):
                continue
            if not name.startswith(block_prefixes):
                self._remember_output(stack, name, module)
            # A hook around a module's forward may count its calls.
            elif not any(map(has_forward_hooks, module.modules())):
                self._remember_output(stack, name, module, within=True)

    def survey_call(self, run: Callable[[], Any], is_fed: Callable[[], bool]) -> Any:
        """Survey a call with NaN for latents, and exclude the modules whose outputs must not be remembered.

        Args:
            is_fed: returns, after the call, whether any block has received more from the latents than its tokens.

        Returns:
            The result of `run`.
        """
        anatomy = self.anatomy
        called = set[str]()

        def note_output(name: str, is_of_latents: bool, module: nn.Module, args: Any, output: Any) -> None:
            parts = output
            if not isinstance(output, tuple):
                parts = (output,)
            is_expected = set(map(has_nan, parts)) == {is_of_latents}
            # A second call has other inputs. And the forward may write into a list or dict, which no version counts.
            if name in called or not is_expected or any(isinstance(part, list | dict) for part in parts):
                self.excluded.add(name)
            called.add(name)

        with ExitStack() as stack:
            for patterns, is_of_latents in ((anatomy.per_step, False), (anatomy.embeds, True)):
                for name, module in self._find_modules(patterns):
                    note = functools.partial(note_output, name, is_of_latents)
                    stack.callback(module.register_forward_hook(note).remove)
            result = run()
        # The blocks, or the forward after them, read something made of the latents.
        if not self.first and anatomy.embeds and (has_nan(result) or is_fed()):
            for name, _ in self._find_modules(anatomy.embeds):
                self.excluded.add(name)
        return result

    def _find_modules(self, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
        for pattern in patterns:
            yield from match_modules(self.transformer, pattern)

    def _remember_output(
        self, stack: ExitStack, name: str, module: nn.Module, *, lasts: bool = False, within: bool = False
    ) -> None:
        """Keep a module's output for a step and longer while its inputs stay the same, or for good if `lasts`.

        For a module `within` a block, the output must be of this step and also of the same inputs.
        """
        now = self.now
        forward = module.forward
        path = f"{self.label}{name}"
        excluded = self.excluded

        def forward_once(*args: Any, **kwargs: Any) -> Any:
            step, patch = now.micro_step
            is_left_out = patch is None if within else name in excluded
            if now.is_surveyed or is_left_out:
                return forward(*args, **kwargs)
            given = (*args, *kwargs.values())
            key: tuple[Any, ...] = (path, now.branch, *kwargs)
            if not within:
                # Rows of another micro-batch, and conditions of another branch, are different inputs.
                key += (now.micro_batch, *map(READ_SHAPE, filter(torch.is_tensor, given)))
            known = now.memory.outputs.get(key)
            is_fresh = False
            if known is not None:
                is_of_step = known.step == step and patch is not None
                # The comparisons are inline to save Python calls for every module of every block.
                is_given_same = known.given_ids == tuple(map(id, given))
                if is_given_same:
                    is_given_same = known.given_versions == tuple(map(READ_VERSION, known.given_tensors))
                # In another step the tensors may be the same, but the weights may not.
                is_fresh = is_of_step and is_given_same
                if not within:
                    is_fresh = lasts or is_of_step or is_given_same
            # Something may have written into the output since.
            if known is None or not is_fresh or known.versions != tuple(map(READ_VERSION, known.tensors)):
                output = forward(*args, **kwargs)
                known = now.memory.outputs[key] = RememberedOutput(output, () if lasts else given)
            known.step = step
            return known.output

        override_attribute(stack, module, "forward", forward_once)
