"""Of a patch only its own tokens are embedded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor, nn

from ditile.hooks.generation import Generation
from ditile.hooks.overrides import override
from ditile.plan.spec import ModelSpec


def embed_patches(stack: ExitStack, spec: ModelSpec, transformer: nn.Module, current: Callable[[], Generation]) -> None:
    """Until the stack is closed, the family's embedding makes the tokens that are computed; others hold nothing."""
    if spec.embed is None:
        return
    module = transformer.get_submodule(spec.image_tokens)
    forward: Callable[[Tensor], Tensor] = module.forward
    some = spec.embed(module, forward)

    def embedded(latents: Tensor) -> Tensor:
        now = current()
        if now.micro.patch is None or now.branch not in now.layouts:
            return forward(latents)
        runs = now.part(now.micro.patch).image
        tokens = [some(latents, run) for run in runs]
        whole = tokens[0].new_empty((latents.shape[0], now.layout.image, tokens[0].shape[2]))
        for run, found in zip(runs, tokens, strict=True):
            whole[:, run.start : run.stop] = found
        return whole

    override(stack, module, "forward", embedded)
