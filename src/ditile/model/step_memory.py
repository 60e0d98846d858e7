"""diffusers' hooks on the user's model that keep state from step to step, and the plans that they fit.

Such hooks are diffusers' caches (`transformer.enable_cache`, or the functions that it calls), and any hook that a user
derives from `ModelHook`. A plan may call a block with this rank's tokens only, one patch at a time, or on another rank.
A hook then works only if it neither compares tokens nor skips blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from diffusers.hooks.hooks import ModelHook
from diffusers.hooks.mag_cache import MagCacheHeadHook
from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastHook
from diffusers.hooks.smoothed_energy_guidance_utils import SmoothedEnergyGuidanceHook
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheHook
from torch import nn

from ditile.plan.plan import Plan

_LAYER_HOOKS = (PyramidAttentionBroadcastHook, TaylorSeerCacheHook)
"""Hooks that decide only by the step, and remember the output of one layer."""
_STEP_HOOKS = (*_LAYER_HOOKS, MagCacheHeadHook)
"""Hooks that decide only by the step; the last one skips all blocks after the first."""
_REMEDY = "call disable_cache() on the model, and ditile.enable_cache(pipe) in place of it"


def explain_hook_refusal(models: Iterable[nn.Module], plan: Plan, steps: int | None) -> str | None:
    """Explain why hooks on models change the image under a plan; None if they do not.

    Args:
        models: the models that the pipeline calls in its loop, not compiled.
        plan: how the models are divided.
        steps: the number of steps in the call, if known.
    """
    # The classes of hooks that the plan accepts.
    accepted: tuple[type[ModelHook], ...] = (ModelHook,)
    divides_between_layers = plan.tensor > 1 and plan.split_scheme == "sequence"
    # A hook would give a patch what it remembers of the patch before.
    if plan.attends_to_stale_keys and (steps is None or plan.warmup < steps):
        accepted = ()
    # A hook on blocks skips from the first block to the last, and a stage lacks one of them.
    elif plan.pipefusion > 1:
        accepted = _LAYER_HOOKS
    # Ranks with different tokens would decide differently if a hook compared them.
    elif plan.token_ranks * plan.distrifusion > 1 or divides_between_layers:
        accepted = _STEP_HOOKS
    for model in models:
        for where, hook in _list_hooks(model):
            looks_at_tokens = hook._is_stateful or isinstance(hook, SmoothedEnergyGuidanceHook)
            if not looks_at_tokens or isinstance(hook, accepted):
                continue
            axes = "data and tensor"
            # A hook with a state manager has a memory for each branch, so ranks may have one branch each.
            if hasattr(hook, "state_manager"):
                axes = "data, cfg and tensor"
            if plan.split_scheme != "row":
                axes += " alone with split_scheme=row"
            else:
                axes += " alone"
            return (
                f"{where} has diffusers' {type(hook).__name__}, which remembers or compares tokens of whole calls, "
                f"and '{plan}' divides these; {_REMEDY}, or use a plan of {axes}"
            )
    return None


def explain_branch_refusal(model: nn.Module) -> str | None:
    """Explain why hooks on a model need all branches of guidance on one rank; None if they do not."""
    for where, hook in _list_hooks(model):
        # A state manager has a memory for each context of the pipeline, "cond" and "uncond".
        if hook._is_stateful and not hasattr(hook, "state_manager"):
            return (
                f"{where} has diffusers' {type(hook).__name__}, which counts the calls of all branches of guidance "
                f"together, and cfg splits them; {_REMEDY}, or use data"
            )
    return None


def _list_hooks(model: nn.Module) -> Iterator[tuple[str, ModelHook]]:
    """Yield diffusers' hooks on the modules of a model, with the names of the modules."""
    for path, module in model.named_modules():
        registry = vars(module).get("_diffusers_hook")
        if registry is not None:
            where = f"{type(model).__name__}.{path}".rstrip(".")
            for hook in registry.hooks.values():
                yield where, hook
