"""Questions that ditile asks of a pipeline of either kind: one class with one call, or a tree of modular blocks.

A modular pipeline (diffusers' `ModularPipeline`) has no code itself. Its inputs, its loop over timesteps and the
progress bar of that loop belong to the blocks of its tree. A user may call any part of the tree as a pipeline.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from inspect import Parameter
from numbers import Real
from typing import Any

import torch
from diffusers import ModularPipeline
from diffusers.callbacks import (
    SD3CFGCutoffCallback,
    SDCFGCutoffCallback,
    SDXLCFGCutoffCallback,
    SDXLControlnetCFGCutoffCallback,
)
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines import SequentialPipelineBlocks, modular_pipeline
from diffusers.modular_pipelines.components_manager import CustomOffloadHook
from torch import nn
from transformers import PreTrainedTokenizerBase

from ditile.model.hooks.compile import unwrap_compiled
from ditile.model.hooks.overrides import give_own_class, list_replaced_methods, replace_globals
from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError, quote_value
from ditile.plan.guidance import GuidanceRule
from ditile.plan.plan import suggest_whole_images

COUNT_NAME = re.compile(r"num_inference_steps|height|width|num_frames|video_length|num_\w+_per_prompt")
"""Names of numbers that leave nothing to generate if they are zero."""
CONTENT_NAME = re.compile(r"(prompt|timesteps|sigmas)(_\d|_embeds)*")
"""Names of arguments that must not be empty if they are present."""
DENOISER_NAME = re.compile(r"(transformer|unet)(_\w+)?")
"""Names of components that a pipeline calls in its loop."""
_CUTOFF_CALLBACKS = (
    SD3CFGCutoffCallback,
    SDCFGCutoffCallback,
    SDXLCFGCutoffCallback,
    SDXLControlnetCFGCutoffCallback,
)
"""Callbacks of diffusers that end guidance during a run, through an attribute of the pipeline."""
_PLACEWISE_GUIDERS = ("ClassifierFreeGuidance", "LTX2Guidance")
"""Guiders that treat each place of a prediction separately, unless they rescale the whole."""
_STATISTICAL_GUIDERS = ("AdaptiveProjectedGuidance", "AdaptiveProjectedMixGuidance", "MagnitudeAwareGuidance")
"""Guiders that scale each place by statistics of the whole prediction."""
_LATENT_CUTS = {"ChronoEditPipeline": "enable_temporal_reasoning"}
"""Pipelines whose loop continues with a part of its latents -> the argument that requests it."""
_TIMED_GUIDANCE: dict[str, tuple[str, ...]] = {
    "AceStepPipeline": ("cfg_interval_start", "cfg_interval_end"),
    "AnyFlowFARPipeline": (),
    "Flux2KleinKVPipeline": (),
    "HunyuanVideoFramepackPipeline": (),
    "Lumina2Pipeline": ("cfg_trunc_ratio",),
    "RePaintPipeline": (),
    "StableDiffusion3Pipeline": ("skip_guidance_layers", "skip_layer_guidance_start", "skip_layer_guidance_stop"),
    "ZImageControlNetInpaintPipeline": ("cfg_truncation",),
    "ZImageControlNetPipeline": ("cfg_truncation",),
    "ZImageImg2ImgPipeline": ("cfg_truncation",),
    "ZImageInpaintPipeline": ("cfg_truncation",),
    "ZImageOmniPipeline": ("cfg_truncation",),
    "ZImagePipeline": ("cfg_truncation",),
}
"""Pipelines whose loop calls its model differently in some steps -> the arguments that request it. Empty: it always
does."""
_BESIDE_THE_LOOP = re.compile(r"vae|encoder|decoder|checker|embed|project|adapter|control")
"""Parts of the names of components that a user's own pipeline does not call in its loop."""
COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")  # a pipeline has one of these arguments, if any


_CALL_TYPES: dict[re.Pattern[str], tuple[Any, str]] = {
    re.compile(COUNT_NAME.pattern + r"|max_sequence_length|(\w+_)?guidance_scale(_\d)?|true_cfg_scale|strength"): (
        (Real, torch.Tensor),
        "number",
    ),
    re.compile("generator"): (torch.Generator, "torch.Generator"),
    re.compile(r"latents|(negative_)?(pooled_)?prompt_embeds(_\d)?"): (torch.Tensor, "tensor"),
    re.compile(r"(negative_)?prompt(_\d)?"): ((str, Mapping), "text"),
}
"""Names of arguments -> what they are in all pipelines; diffusers' annotations are not reliable."""


def check_call_types(call: Mapping[str, Any]) -> None:
    """Check the types of numbers, prompts and tensors. Raises `ModelError` for a type that no pipeline takes."""
    for name, value in call.items():
        values = value if isinstance(value, list | tuple) else [value]
        for pattern, (kinds, noun) in _CALL_TYPES.items():
            if pattern.fullmatch(name) and not all(isinstance(part, kinds) for part in values if part is not None):
                raise ModelError(f"{name}={quote_value(value)} is not a {noun}, nor a list of them")


def is_modular(pipe: Any) -> bool:
    """Return whether a pipeline is a tree of blocks."""
    return isinstance(pipe, ModularPipeline)


def find_call_owner(pipe: Any) -> Any:
    """Return the object that defines a pipeline's call: its class, or the modular pipeline itself."""
    return pipe if is_modular(pipe) else type(pipe)


def list_required_inputs(pipe: Any) -> set[str]:
    """Return the arguments that every call of a pipeline, or of a class of pipelines, must have."""
    if is_modular(pipe):
        return {argument.name for argument in pipe._blocks.inputs if argument.required}
    parameters = list_call_parameters(pipe)
    return {name for name, parameter in parameters.items() if parameter.default is Parameter.empty}


def list_call_parameters(pipe: Any) -> dict[str, Parameter]:
    """Return the parameters of a pipeline's call by name; of a modular one, the inputs of its blocks.

    Args:
        pipe: a pipeline, or a class of pipelines.
    """
    if not is_modular(pipe):
        parameters = dict(inspect.signature(pipe.__call__).parameters)
        parameters.pop("self", None)
        return parameters
    # All get a default, because which inputs are needed depends on other inputs and on earlier blocks.
    parameters = {}
    for argument in pipe._blocks.inputs:
        if argument.name is not None:
            parameters[argument.name] = Parameter(
                argument.name, Parameter.KEYWORD_ONLY, default=argument.default, annotation=argument.type_hint
            )
    return parameters


def read_call_values(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, including those in the state of another modular pipeline."""
    values = getattr(call.get("state"), "values", None)
    if not isinstance(values, dict):
        return dict(call)
    return {**values, **call}


def list_pipeline_parts(pipe: Any) -> dict[str, Any]:
    """Return a pipeline's parts by name, including attributes that `components` leaves out."""
    components = getattr(pipe, "components", None) or {}
    return {**components, **getattr(pipe, "__dict__", {})}


def list_schedulers(pipe: Any) -> list[Any]:
    """Return the schedulers that a pipeline may step, the driver of its loop first."""
    schedulers = [pipe.scheduler]
    for part in vars(pipe).values():
        if not hasattr(part, "set_timesteps") or not hasattr(part, "step"):
            continue
        # They are compared by identity, because a user's own class may define equality.
        if all(part is not known for known in schedulers):
            schedulers.append(part)
    return schedulers


def list_denoiser_names(pipe: Any) -> list[str]:
    """Return the names of a pipeline's attributes for the models in its loop, its transformer or U-Net first.

    A modular pipeline may use its own names for two checkpoints of a model.
    """
    names = ["transformer", "transformer_2", "unet", "unet_2"]
    if is_modular(pipe):
        names = sorted(filter(DENOISER_NAME.fullmatch, pipe.component_names))
    names = [name for name in names if isinstance(getattr(pipe, name, None), nn.Module)]
    if not names and not is_modular(pipe):
        # A model from neither of these libraries may have any name.
        for name, part in (getattr(pipe, "components", None) or {}).items():
            if not isinstance(part, nn.Module) or _BESIDE_THE_LOOP.search(name):
                continue
            library, _, _ = type(part).__module__.partition(".")
            if library not in ("diffusers", "transformers"):
                names.append(name)
        # It is unknown which of several models its loop calls.
        if len(names) > 1:
            return []
    # Transformers come before U-Nets: a pipeline with both calls the transformer in its loop.
    return [name for name in names if name[0] == names[0][0]]


def find_pipeline_device(pipe: Any) -> torch.device:
    """Return the device of a pipeline. Pipelines with a plain module of torch have no attribute for it."""
    device = getattr(pipe, "device", None)
    if device is not None:
        return torch.device(device)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            for weight in part.parameters():
                return weight.device
    return torch.device("cpu")


def find_denoisers(pipe: Any) -> dict[str, nn.Module]:
    """Return the models of a pipeline's loop by name; a compiled model is unwrapped.

    Raises:
        ModelError: if it has none, or two that differ in their classes.
    """
    models = {name: unwrap_compiled(getattr(pipe, name)) for name in list_denoiser_names(pipe)}
    if len({type(model) for model in models.values()}) > 1:
        raise ModelError(f"{type(pipe).__name__} calls models of two classes in turns, {' and '.join(models)}")
    if not models:
        remedy = "give the model of its loop one of these names"
        if is_modular(pipe):
            remedy = "load_components() loads them"
        raise ModelError(
            f"{type(pipe).__name__} has no transformer and no unet, so there is no call to divide; {remedy}"
        )
    return models


def find_offload_devices(pipe: Any) -> dict[str, torch.device]:
    """Return the components that a ComponentsManager keeps on the CPU between calls -> the device of their calls."""
    devices = {}
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        # This is the attribute for accelerate's hook. `getattr` does not work: a compiled module would answer for the
        # module inside it.
        hook = vars(part).get("_hf_hook")
        if isinstance(hook, CustomOffloadHook):
            devices[name] = torch.device(hook.execution_device or "cpu")
    return devices


def explain_manager_refusal(pipe: Any, device: torch.device, reader: str) -> str | None:
    """Explain why a ComponentsManager that offloads components cannot work with a runner; None if it can.

    Args:
        reader: the part of the plan that reads the weights of blocks between the calls of the model; empty if none
            does.
    """
    for name, call_device in find_offload_devices(pipe).items():
        if (call_device.type, call_device.index or 0) != (device.type, device.index or 0):
            return (
                f"a ComponentsManager moves {name} to {call_device}, and this rank computes on {device}; call "
                f"enable_auto_cpu_offload(device={str(device)!r}) of the manager of this rank"
            )
        if reader:
            return (
                f"{reader} reads weights where they were when the pipeline was divided, and a ComponentsManager moves "
                f"those of {name} between the calls; leave it out, or call disable_auto_cpu_offload()"
            )
    return None


def count_most_iterations(pipe: Any, call: Mapping[str, Any], steps: int | None) -> int | None:
    """Return the maximum number of iterations in a pipeline's loop: solvers of higher order make several in a step.

    Args:
        call: its arguments; timesteps and sigmas in them may override the number of steps.
        steps: the number of steps; None if unknown.

    Returns:
        The count; None without a number of steps, or if timesteps or sigmas have no length.
    """
    if steps is None:
        return None
    max_steps = steps
    for name in ("timesteps", "sigmas"):
        if call.get(name) is None:
            continue
        try:
            max_steps = max(max_steps, len(call[name]))
        # The argument is a number, or a tensor of one number: the pipeline itself checks it.
        except TypeError:
            return None
    return int(max_steps * getattr(pipe.scheduler, "order", 1))


def describe_stale_statistics(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Describe the statistics of a prediction that a call uses; in a step of patches a part of these is one step old.

    Args:
        call: its arguments, and the defaults of the others.

    Returns:
        A line for the user; None if it uses none.
    """
    named = []
    for name, value in call.items():
        if name.endswith("guidance_rescale") and isinstance(value, int | float) and value:
            named.append(f"{name}={value}")
    for name, part in vars(pipe).items():
        if isinstance(part, BaseGuidance) and not _guides_each_place_alone(part):
            named.append(f"{type(part).__name__} ({name})")
    if not named:
        return None
    return (
        f"guidance with {', '.join(named)} takes a statistic of the whole prediction, which is partly one step old in "
        "a step of patches: an approximation, as stale keys are; with warmup equal to the steps it is exact"
    )


def read_guidance_rule(pipeline: Any, config: Mapping[str, Any]) -> GuidanceRule | None:
    """Read from the table of rules when a call of a pipeline has a second branch of guidance.

    Args:
        pipeline: a pipeline, or a class of pipelines.
        config: the pipeline's config, which says whether its model is distilled.

    Returns:
        None for a class that is not in the table, and for a user's own call.
    """
    kind = pipeline if inspect.isclass(pipeline) else type(pipeline)
    row = _read_guidance_table().get(_find_loop_owner(kind) or "")
    if row is None:
        return None
    scales = tuple(row["scales"])
    if row["unless_distilled"] and config.get("is_distilled"):
        scales = ()
    return GuidanceRule(scales=scales, above=row["above"], needs_negative_prompt=row["needs_negative_prompt"])


@functools.cache
def _read_guidance_table() -> Mapping[str, Mapping[str, Any]]:
    """Read `guidance.json`: class of pipelines -> its rule."""
    rules: list[Mapping[str, Any]] = json.loads((ASSETS / "guidance.json").read_text("utf-8"))
    table: dict[str, Mapping[str, Any]] = {}
    for rule in rules:
        table |= dict.fromkeys(rule["pipelines"], rule)
    return table


def describe_cut_prompts(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Describe the first text of a call that every text encoder cuts; return None if no text is cut by all."""
    parameter = list_call_parameters(pipe).get("max_sequence_length")
    max_tokens = call.get("max_sequence_length", getattr(parameter, "default", None))
    for name in ("prompt", "negative_prompt"):
        texts = call.get(name)
        for text in texts if isinstance(texts, list) else [texts]:
            # CLIP reads 77 tokens of a prompt, and T5 reads 512: the encoder that cuts the least counts.
            num_cut, num_tokens = min(_count_cut_tokens(pipe, text, max_tokens), default=(0, 0))
            if num_cut > 0:
                return f"the {name} has {num_tokens} tokens, and {num_tokens - num_cut} are read"
    return None


def _count_cut_tokens(pipe: Any, text: Any, max_tokens: Any) -> Iterator[tuple[int, int]]:
    """Yield for each text encoder how many tokens of a text it does not read, and how many there are."""
    for name, tokenizer in pipe.components.items():
        encoder = getattr(pipe, name.replace("tokenizer", "text_encoder"), None)
        if encoder is None or not isinstance(tokenizer, PreTrainedTokenizerBase) or not isinstance(text, str):
            continue
        limit = tokenizer.model_max_length
        # CLIP has an embedding for each place, and reads no further token; T5 reads as many tokens as the call says.
        places = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
        num_tokens = len(tokenizer(text, verbose=False).input_ids)
        yield max(0, num_tokens - min(places or limit, max_tokens or limit)), num_tokens


def explain_empty_call(call: Mapping[str, Any]) -> str | None:
    """Explain why a call requests nothing that could be generated; None if it does."""
    for name, value in call.items():
        if COUNT_NAME.fullmatch(name) and isinstance(value, Real) and value < 1:
            return f"{name}={value} leaves nothing to generate; give 1 or more, or leave it out for the pipeline's own"
        is_empty = getattr(value, "shape", (1,))[:1] == (0,)
        if isinstance(value, list | tuple):
            is_empty = not value
        if is_empty and CONTENT_NAME.fullmatch(name):
            return f"{name} is empty, so there is nothing to generate; give one or more, or leave it out"
    return None


def explain_condition_refusal(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Explain why a call with image prompts, or with skip-layer guidance, cannot be divided; None if it can."""
    if call.get("skip_guidance_layers") is not None:
        return (
            "skip_guidance_layers leaves blocks out by the index of the loop's iteration, which may count patches in a "
            "divided model; use data and cfg alone, which call whole models, or leave it out"
        )
    transformer = getattr(pipe, "transformer", None)
    # FLUX.1 and Stable Diffusion 3 keep what reads image prompts under different names.
    for name in ("encoder_hid_proj", "image_proj"):
        if getattr(transformer, name, None) is not None:
            return None
    for name in ("ip_adapter_image", "ip_adapter_image_embeds"):
        for argument in (name, f"negative_{name}"):
            if call.get(argument) is not None:
                return f"there is no IP-adapter here that can be divided; leave {argument} out"
    return None


def explain_callback_refusal(pipe: Any, call: Mapping[str, Any], steps: int | None) -> str | None:
    """Explain why a callback's effect on guidance during a run cannot be divided into patches; None if it can.

    Args:
        call: its arguments, and the defaults of the others.
        steps: the number of steps, if known.
    """
    if not hasattr(type(pipe), "do_classifier_free_guidance"):
        return None
    given_callback = call.get("callback_on_step_end")
    # A call without a scale has a default above 1.
    scale = call.get("guidance_scale", 2)
    if scale is None or scale <= 1:
        return None
    for callback in getattr(given_callback, "callbacks", [given_callback]):
        if not isinstance(callback, _CUTOFF_CALLBACKS):
            continue
        config = getattr(callback, "config", {})
        index = config.get("cutoff_step_index")
        ratio = config.get("cutoff_step_ratio")
        if index is None and ratio is not None and steps is not None:
            index = int(steps * ratio)
        # After the last step a callback changes nothing.
        if index is None or steps is None or index < steps - 1:
            return explain_ended_guidance(type(callback).__name__)
    return None


def explain_ended_guidance(callback: str) -> str:
    """Explain why a callback that ends guidance is refused."""
    return (
        f"{callback} sets _guidance_scale so that guidance ends in mid-run, which cannot be divided into patches; "
        f"guide all steps, or use {suggest_whole_images(stale_keys=True)}"
    )


def is_guidance_timed(pipe: Any, call: Mapping[str, Any]) -> bool:
    """Return whether a call may guide only some steps, in which the model is called more often."""
    owner = _find_loop_owner(type(pipe))
    # Nothing is known of a user's own loop.
    if owner is None:
        return True
    if owner not in _TIMED_GUIDANCE:
        return False
    parameters = list_call_parameters(pipe)
    asked = _TIMED_GUIDANCE[owner]
    return not asked or any(name in call and call[name] != parameters[name].default for name in asked)


def explain_latent_cut(kind: type, call: Mapping[str, Any]) -> str | None:
    """Explain why a call that continues with a part of its latents cannot be divided into patches; None if it can."""
    name = _LATENT_CUTS.get(_find_loop_owner(kind) or "")
    if name is None or not call.get(name):
        return None
    return (
        f"{kind.__name__} goes on with a part of its latents in mid-run, and patches and stale keys belong to one "
        f"size; use {suggest_whole_images(stale_keys=True)}, or {name}=False"
    )


def _find_loop_owner(kind: type) -> str | None:
    """Return the name of the class that defines a pipeline class's call; None for a user's own call."""
    function = inspect.unwrap(kind.__call__)
    if function.__module__.partition(".")[0] not in ("diffusers", "ditile"):
        return None
    return str(function.__qualname__).partition(".")[0]


_CALLED_BY_PIPELINES = ("add_noise", "scale_noise", "set_begin_index", "set_timesteps")
"""Scheduler methods called only by pipelines, on their scheduler and not on a copy."""


def explain_replaced_step_refusal(pipe: Any) -> str | None:
    """Explain why replaced methods of schedulers do not work with patches or several stages; None if they do."""
    for scheduler in list_schedulers(pipe):
        replaced = [name for name in list_replaced_methods(scheduler) if name not in _CALLED_BY_PIPELINES]
        if replaced:
            kind = type(scheduler).__name__
            return (
                f"{kind}.{replaced[0]} was replaced on the scheduler itself, and patches are stepped by copies of it, "
                f"which the new function does not know; override {replaced[0]} in a class derived from {kind}, or use "
                f"{suggest_whole_images()}"
            )
    return None


def explain_changed_size_refusal(pipe: Any) -> str | None:
    """Explain why a scheduler that changes the size of latents cannot work with cut ones; None if the size stays."""
    scales = getattr(pipe.scheduler, "config", {}).get("scale_factors") or ()
    if all(scale == 1 for scale in scales):
        return None
    return (
        f"{type(pipe.scheduler).__name__} with scale_factors={list(scales)} changes the size of the latents between "
        "steps, and patches and stale keys belong to one size; use "
        f"{suggest_whole_images(stale_keys=True)}"
    )


def explain_scheduler_refusal(pipe: Any) -> str | None:
    """Explain why a pipeline's scheduler cannot step latents patch by patch; None if it can."""
    scheduler = type(pipe.scheduler).__name__
    config = getattr(pipe.scheduler, "config", {})
    if config.get("thresholding"):
        return f"{scheduler} with thresholding=True takes a quantile of the whole image; set thresholding=False"
    if config.get("noise_sampler_seed") is not None:
        return f"{scheduler} with noise_sampler_seed draws noise by the shape that it steps; leave the seed at None"
    return None


def explain_guider_refusal(pipe: Any, *, partial: bool, fresh: bool, trusts_code: bool) -> str | None:
    """Explain why a modular pipeline's guidance cannot be divided with its model; None if it can.

    Args:
        partial: whether the plan attends to stale keys or has stages, so that predictions are known in part.
        fresh: whether every part of a prediction that is used is from the current step.
        trusts_code: whether a user's guider may receive a prediction that is partly unknown.
    """
    for name, part in vars(pipe).items():
        if not isinstance(part, BaseGuidance):
            continue
        kind = f"{type(part).__name__} ({name})"
        if type(part).prepare_models is not BaseGuidance.prepare_models:
            return (
                f"{kind} changes blocks of the model between calls of a step, and these are divided; use a guider such "
                "as ClassifierFreeGuidance, or a plan of data or cfg"
            )
        if partial and (part._start, part._stop) != (0.0, 1.0):
            return (
                f"{kind} guides from {part._start:.0%} to {part._stop:.0%} of the steps, and guidance that changes the "
                "number of calls in mid-run cannot be divided into patches; use start=0.0 and stop=1.0"
            )
        if not partial or _guides_each_place_alone(part):
            continue
        # This is a number if predictions are averaged over steps, and otherwise None.
        momentum = getattr(part, "adaptive_projected_guidance_momentum", None)
        if not fresh and momentum is not None:
            return (
                f"{kind} remembers earlier predictions, and in a step of patches it is given one for each patch; use a "
                "guider without a memory, such as ClassifierFreeGuidance, or warmup equal to the steps"
            )
        owner = _find_guidance_owner(part)
        is_trusted = owner is None and trusts_code
        if owner not in (*_PLACEWISE_GUIDERS, *_STATISTICAL_GUIDERS) and not is_trusted:
            return (
                f"{kind} computes with the whole prediction, and in it the places of a patch cannot be told; use "
                f"another guider, such as ClassifierFreeGuidance, or {suggest_whole_images()}"
            )
    return None


def _guides_each_place_alone(guider: BaseGuidance) -> bool:
    """Return whether a guider computes each place of a prediction from only that place."""
    return _find_guidance_owner(guider) in _PLACEWISE_GUIDERS and not getattr(guider, "guidance_rescale", 0)


def _find_guidance_owner(guider: BaseGuidance) -> str | None:
    """Return the name of the diffusers class that defines a guider's forward; None for a user's own forward."""
    guide = type(guider).forward
    if not guide.__module__.startswith("diffusers."):
        return None
    return str(guide.__qualname__).partition(".")[0]


def iterate_blocks(pipe: Any) -> Iterator[Any]:
    """Yield the blocks of a modular pipeline's tree; none for any other pipeline."""
    queue = [pipe._blocks] if is_modular(pipe) else []
    while queue:
        block = queue.pop()
        yield block
        queue += (getattr(block, "sub_blocks", None) or {}).values()


def replace_call_globals(
    stack: ExitStack, pipe: Any, pipeline_call: Callable[..., Any], values: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a pipeline's call with other values for some global names; its modules stay unchanged.

    Blocks of a modular pipeline that use such a name get their own class until the stack is closed.

    Args:
        pipeline_call: the function of the pipeline's class.

    Raises:
        ModelError: if a block overrides a call that uses such a name, and calls it by `super`.
    """
    for block in iterate_blocks(pipe):
        kind = type(block)
        functions = {}
        for name in dir(kind):
            # `getattr_static` returns no function for a static method, whose copy would become a method.
            method = inspect.getattr_static(kind, name)
            if _uses_globals(method, values):
                functions[name] = method
        is_inherited = any(_uses_globals(vars(cls).get("__call__"), values) for cls in kind.__mro__)
        if is_inherited and "__call__" not in functions and _uses_globals(kind.__call__, {"super": None}):
            raise ModelError(
                f"{kind.__name__} calls the loop that it inherits from its own, so its steps cannot be counted; "
                f"give it a loop of its own, or use {suggest_whole_images()}"
            )
        if functions:
            copies = {name: replace_globals(function, values) for name, function in functions.items()}
            give_own_class(stack, block, copies)
    return replace_globals(pipeline_call, values)


def skip_decode_blocks(stack: ExitStack, pipe: Any) -> None:
    """End a modular pipeline's call after the last block with a model of its loop, until the stack is closed.

    Later blocks, such as the decoder, leave the state unchanged. A tree whose blocks do not follow each other runs
    unchanged.
    """
    if not isinstance(pipe._blocks, SequentialPipelineBlocks):
        return
    blocks: list[Any] = [*vars(pipe)["_blocks"].sub_blocks.values()]
    denoisers = set(list_denoiser_names(pipe))
    after_loop = len(blocks)
    for index, block in enumerate(blocks):
        if any(spec.name in denoisers for spec in block.expected_components):
            after_loop = index + 1
    for block in blocks[after_loop:]:
        give_own_class(stack, block, {"__call__": lambda _, components, state: (components, state)})


def hide_block_tracebacks(stack: ExitStack) -> None:
    """Keep blocks from logging the errors that pass through them, until the stack is closed.

    Each block of a tree would log the traceback; the error is reported where it is caught.
    """
    logger = logging.getLogger(modular_pipeline.__name__)

    def passes_no_error(_: logging.LogRecord) -> bool:
        return sys.exc_info()[1] is None

    logger.addFilter(passes_no_error)
    stack.callback(logger.removeFilter, passes_no_error)


def _uses_globals(function: Any, names: Mapping[str, Any]) -> bool:
    if not inspect.isfunction(function):
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and not names.keys().isdisjoint(code.co_names)
