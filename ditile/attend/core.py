"""AttentionCore: where q, k and v of one layer meet the keys that survived (DistriFusion and PipeFusion's stale keys).

After projections, qk-norm and rope: keys and values of the patch go over their stale selves in the layer's store, and
the patch attends to the whole. In a synchronous step nothing is stale and the kernel gets what came.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ditile.attend.kernel import Kernel
from ditile.errors import StateError
from ditile.generation import Generation
from ditile.memory import KeyStore


class AttentionCore:
    """One attention layer.

    Args:
        current: the generation under way.
        layer: the layer's name in the model.
        kernel: attends.
        joint: whether the layer sees the text too.
        check: assert that the ages of the keys are what the schedule says.
    """

    def __init__(
        self, current: Callable[[], Generation], layer: str, kernel: Kernel, *, joint: bool, check: bool
    ) -> None:
        self._current, self._layer, self._kernel, self._joint, self._check = current, layer, kernel, joint, check

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends. `[B, S, N, H]`, where S counts the tokens of the micro-step at hand."""
        generation = self._current()
        step, patch = generation.micro
        if patch is None:
            if generation.keeps_keys(step):
                self._store(generation).fill(k, v, step)
            return self._kernel(q, k, v)
        store = self._store(generation)
        k, v = store.update(k, v, patch, step)
        if self._check:
            self._assert_ages(store, generation)
        return self._kernel(q, k, v)

    def _store(self, generation: Generation) -> KeyStore:
        return generation.memory.store(generation.branch, self._layer, generation.layout, joint=self._joint)

    def _assert_ages(self, store: KeyStore, generation: Generation) -> None:
        step = generation.micro.step
        wanted = tuple(None if age > step else age for age in generation.ages(generation.micro))
        if store.ages(step) != wanted:
            raise StateError(
                f"{self._layer} at {generation.micro} branch {generation.branch} reads keys of ages "
                f"{store.ages(step)}, and the schedule says {wanted}"
            )
