"""Computes a call of a model, or replaces its result by a forecast.

`CallForecasts` wraps the calls of one model, outside of the recording of calls, of the split of the batch and of all
hooks of blocks. A step that is left out makes no call, so it sends nothing and moves no keys. Outputs are kept as the
pipeline gets them, for each branch of guidance, so that one forecast serves every plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.cache.calls.policy import CallPolicy, ComputedOutput, ModelCall
from ditile.cache.methods.gating import GatedGuidance
from ditile.model.fingerprint import fingerprint
from ditile.model.hooks.pieces import open_result_class


@dataclass(slots=True)
class CallBranch:
    """The state of a branch of guidance.

    Attributes:
        outputs: the newest computed outputs, the newest first.
        leaves, spec: the leaves and the structure of the last result, whose tensors a forecast replaces.
        is_fresh: whether the last result is not copied yet, because it may be incomplete until the step ends.
        form: the shape of the latents in the last call.
        skipped: the steps that were left out.
    """

    outputs: list[ComputedOutput] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    is_fresh: bool = False
    form: Any = None
    skipped: set[int] = field(default_factory=set)


class CallForecasts:
    """The outputs of one model in one generation.

    Attributes:
        branches: number of a branch of guidance -> its state.
        steps: the steps in which the model was called, or left out.
    """

    def __init__(self, policy: CallPolicy) -> None:
        self.policy = policy
        self.branches: dict[int, CallBranch] = {}
        self.steps: set[int] = set()

    @property
    def memory_bytes(self) -> int:
        """Return the number of kept bytes."""
        total = 0
        for branch in self.branches.values():
            for output in branch.outputs:
                total += sum(tensor.nbytes for tensor in output.tensors)
        return total

    def decide_call(self, call: ModelCall, planned: bool | None = None) -> bool:
        """Return whether a call is made. `planned` is the answer, if it was known before the step."""
        if not self.branches:
            self.policy.check_first_call(call)
        if call.branch == 0:
            # By now the step before has completed the results that it returned incomplete, so they are copied.
            for earlier in self.branches.values():
                if not earlier.is_fresh:
                    continue
                earlier.is_fresh = False
                newest = earlier.outputs[0]
                copies: list[Tensor] = []
                for tensor in newest.tensors:
                    copies.append(tensor.as_subclass(Tensor).detach().clone())
                earlier.outputs[0] = newest._replace(tensors=copies)
        self.steps.add(call.step)
        branch = self.branches.get(call.branch)
        form = fingerprint(call.latents, "shape")
        # A call of another transformer or batch cannot use the kept outputs.
        if branch is None or branch.spec is None or branch.form != form:
            return True
        if planned is not None:
            return planned
        return self.policy.computes_call(call, branch.outputs)

    def compute_call(self, call: ModelCall, run: partial[Any], *, keeps: bool = True) -> Any:
        """Make a call, and note its result, with copies of the tensors for forecasts if `keeps`."""
        result = self._run_rows(call, run)
        open_result_class(result)
        branch = self.branches.setdefault(call.branch, CallBranch())
        branch.leaves, branch.spec = pytree.tree_flatten(result)
        form = fingerprint(call.latents, "shape")
        if branch.form != form:
            branch.outputs.clear()
        branch.form = form
        if not keeps:
            # Only the shapes of this output are right, but every rank must note it to make later calls alike.
            outputs = [leaf for leaf in branch.leaves if _is_output(leaf)]
            self.policy.note_output(call, ComputedOutput(call, outputs))
            return result
        latents = None
        # Latents are cloned, because the scheduler of some pipelines writes into them.
        if self.policy.keeps_latents:
            latents = pytree.tree_map_only(Tensor, Tensor.clone, call.latents)
        branch.is_fresh = any(type(leaf) is not Tensor for leaf in branch.leaves if isinstance(leaf, Tensor))
        tensors: list[Tensor] = []
        for leaf in branch.leaves:
            if _is_output(leaf):
                kept = leaf if branch.is_fresh else leaf.detach().clone()
                tensors.append(kept)
        output = ComputedOutput(call._replace(latents=latents), tensors)
        # The result of a patch includes the patches before it, so it replaces the last result of the same step.
        if branch.outputs and branch.outputs[0].call.step == call.step:
            branch.outputs.pop(0)
        branch.outputs.insert(0, output)
        del branch.outputs[self.policy.num_kept :]
        self.policy.note_output(call, output)
        return result

    def _run_rows(self, call: ModelCall, run: partial[Any]) -> Any:
        """Make a call on all rows, or only on the rows that guidance still needs."""
        policy = self.policy
        if not isinstance(policy, GatedGuidance):
            return run()
        result = policy.run_half(call, run)
        if result is None:
            return run()
        # The rows without the caption are reported as a branch of their own.
        self.branches.setdefault(call.branch + 1, CallBranch()).skipped.add(call.step)
        open_result_class(result)
        differences = iter(policy.differences[0])

        def join_rows(leaf: Any) -> Any:
            if _is_output(leaf):
                return policy.model.join_rows(leaf, next(differences))
            return leaf

        return pytree.tree_map(join_rows, result)

    def forecast_call(self, call: ModelCall) -> Any:
        """Return the forecast result of a call that is left out."""
        branch = self.branches[call.branch]
        branch.skipped.add(call.step)
        if not branch.outputs:
            # This rank steps no scheduler, so nobody reads what it returns.
            return pytree.tree_unflatten(branch.leaves, branch.spec)
        tensors = iter(self.policy.forecast(call, branch.outputs))
        leaves: list[Any] = []
        for leaf in branch.leaves:
            if _is_output(leaf):
                leaf = next(tensors)
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, branch.spec)


def _is_output(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
