"""Of a patch only its own tokens are embedded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor, nn

from ditile.hooks.generation import Generation
from ditile.hooks.overrides import override_attribute
from ditile.plan.spec import ModelSpec


def embed_patches(stack: ExitStack, spec: ModelSpec, transformer: nn.Module, current: Callable[[], Generation]) -> None:
    """Until the stack is closed, the family's embedding makes the tokens that are computed; others hold nothing."""
    if spec.embed is None:
        return
    module = transformer.get_submodule(spec.image_tokens)
    forward: Callable[[Tensor], Tensor] = module.forward
    embed_run = spec.embed(module, forward)

    def embed_own_tokens(latents: Tensor) -> Tensor:
        now = current()
        if now.micro_step.patch is None or now.branch not in now.layouts:
            return forward(latents)
        runs = now.get_own_part(now.micro_step.patch).image
        tokens = [embed_run(latents, run) for run in runs]
        whole = tokens[0].new_empty((latents.shape[0], now.branch_layout.image_tokens, tokens[0].shape[2]))
        for run, run_tokens in zip(runs, tokens, strict=True):
            whole[:, run.start : run.stop] = run_tokens
        return whole

    override_attribute(stack, module, "forward", embed_own_tokens)
