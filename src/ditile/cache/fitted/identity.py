"""Identifies the generations for which a fitted schedule holds: the model with its weights, the arguments of the call,
and the scheduler.

The same functions describe a generation when a schedule is fitted and when one is used. If a generation differs from
the description, it has other outputs, for which the weights of the forecasts are wrong.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ditile.plan.option_classes import drop_missing

# The command line reads schedules before it imports torch.
if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SAMPLES = 2
"""How many leading values are kept of each weight matrix."""

WEIGHT_TOLERANCE = 0.0042
"""Weights that differ by less, relative to the larger one, are equal: rounding to bfloat16 changes a weight by less."""

LEAST_WEIGHT = 1e-7
"""Weights that differ by less are equal too: rounding to float16 changes the smallest ones by as much as this."""

SIGMA_TOLERANCE = 1e-3
"""Sigmas that differ by less, relative to the largest sigma, are equal. Another number of steps, or another size, makes
a far larger difference."""

MAX_STEPS = 10_000
"""More steps than any generation has."""

GUIDANCE_ENDINGS = ("guidance_scale", "guidance_scale_2", "cfg_scale", "guidance_rescale", "pag_scale")
"""The endings of arguments that say how strong guidance is."""

SIZE_ARGUMENTS = ("height", "width", "num_frames")

SOLVER_SETTINGS = (
    "algorithm_type",
    "euler_at_final",
    "eta",
    "final_sigmas_type",
    "lower_order_final",
    "predict_x0",
    "prediction_type",
    "solver_order",
    "solver_type",
    "stochastic_sampling",
    "thresholding",
)
"""The settings that decide, besides the sigmas, how a scheduler turns a prediction into a step."""


def _check_printable(name: str) -> str:
    # Error messages quote names, so a name must not move the cursor of a terminal, or begin a line.
    if not name.isprintable():
        raise ValueError("a name has characters that cannot be printed")
    return name


Number = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_printable)]
ListShares = Callable[["nn.Module"], Collection[str]]
"""Lists the modules of a model whose leading weights are on another rank."""
Samples = Annotated[tuple[Number, ...], Field(min_length=1, max_length=SAMPLES)]


class Identity(BaseModel):
    """The facts about a model and its calls for which a schedule holds.

    Attributes:
        model_class: the class of the first model that the pipeline calls.
        weights: for each model, the leading values of each weight matrix or kernel.
        loras: the active LoRAs, with their scales.
        guidance: the scales of guidance; true_cfg_scale counts as 1 without a negative prompt.
        size: height and width in pixels, and frames, as far as the call or the pipeline says them.
        scheduler: the scheduler's class.
        solver: the scheduler's settings besides the sigmas.
        sigmas: the scheduler's sigma at each step; timesteps, if it has no sigmas.
        latents: the shape of one image's latents, as the model takes them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_class: Name
    weights: Annotated[tuple[Mapping[Name, Samples], ...], Field(min_length=1)]
    loras: tuple[Name, ...] = ()
    guidance: Mapping[Name, Number | None]
    size: Mapping[Name, int]
    scheduler: Name
    solver: Mapping[Name, bool | int | Number | Name | None]
    sigmas: Annotated[tuple[Number, ...], Field(min_length=2, max_length=MAX_STEPS)]
    latents: tuple[int, ...]


def find_difference(identity: Identity, present: Mapping[str, Any], models: Sequence[nn.Module] = ()) -> str:
    """Describe how a generation differs from the fitted ones, and what would work; "" if it does not differ.

    Args:
        present: the fields of the generation that are known so far, by name.
        models: the models that the pipeline calls; needed to compare weights.
    """
    for field, advice in _ADVICE.items():
        if field not in present:
            continue
        fitted = getattr(identity, field)
        value = present[field]
        difference = ""
        if field == "weights":
            # The models say which blocks are on other ranks: each rank compares only its own blocks.
            difference = _compare_weights(fitted, value, models)
        elif field == "sigmas":
            difference = _compare_sigmas(fitted, value)
        elif isinstance(fitted, Mapping):
            difference = _compare_items(fitted, value)
        elif fitted != value:
            difference = f"is for {field}={_format(fitted)}, and the call has {_format(value)}"
        if difference:
            return f"{difference}; {advice}"
    return ""


def describe_models(models: Sequence[nn.Module], list_later_shares: ListShares = lambda _: ()) -> dict[str, Any]:
    """Return the fields that identify these models, with their present weights; see `sample_weights`."""
    loras: set[str] = set()
    for model in models:
        loras |= set(_iterate_active_loras(model))
    return {
        "model_class": type(models[0]).__name__,
        "loras": tuple(sorted(loras)),
        "weights": tuple(sample_weights(model, list_later_shares(model)) for model in models),
    }


def describe_call(pipe: Any, model: nn.Module, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields about a call of a pipeline, with the pipeline's defaults for what the call leaves out."""
    complete: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(pipe).__call__).parameters.items():
        if parameter.default is not parameter.empty:
            complete[name] = parameter.default
    complete |= drop_missing(call)
    guidance: dict[str, float | None] = {}
    for name, value in complete.items():
        if name.endswith(GUIDANCE_ENDINGS) and (value is None or isinstance(value, int | float)):
            guidance[name] = value
    if "true_cfg_scale" in guidance:
        # Pipelines with a true_cfg_scale guide only if there is a negative prompt and the scale is above 1.
        negatives = [name for name in drop_missing(complete) if name.startswith("negative_prompt")]
        if not negatives or (guidance["true_cfg_scale"] or 0) <= 1:
            guidance["true_cfg_scale"] = 1.0
        # An embedded scale has no effect on a model that does not take it.
        if getattr(getattr(model, "config", None), "guidance_embeds", None) is False:
            guidance.pop("guidance_scale", None)
    if guidance.get("guidance_scale_2", 0) is None:
        # By default Wan 2.2's second model has the scale of the first one.
        guidance["guidance_scale_2"] = guidance.get("guidance_scale")
    default_side = getattr(pipe, "default_sample_size", getattr(getattr(model, "config", None), "sample_size", None))
    vae_scale = getattr(pipe, "vae_scale_factor", None)
    size: dict[str, int] = {}
    for name in SIZE_ARGUMENTS:
        value = complete.get(name)
        # A side that the call leaves out is the pipeline's default.
        is_default_side = value is None and name in complete and name != "num_frames"
        if is_default_side and isinstance(default_side, int) and isinstance(vae_scale, int):
            value = default_side * vae_scale
        if isinstance(value, int):
            size[name] = value
    return {"guidance": guidance, "size": size}


def describe_scheduler(scheduler: Any, num_steps: int) -> dict[str, Any]:
    """Return the fields about a scheduler and its steps. Its timesteps must be set."""
    config = getattr(scheduler, "config", {})
    return {
        "scheduler": type(scheduler).__name__,
        "solver": {name: config[name] for name in SOLVER_SETTINGS if name in config},
        "sigmas": tuple(read_sigmas(scheduler, num_steps)),
    }


def describe_latents(latents: Any) -> tuple[int, ...]:
    """Return the shape of one image's latents. `latents` is a tensor with a row for each image, or a list of rows."""
    from torch import Tensor

    if isinstance(latents, Tensor):
        return tuple(latents.shape[1:])
    first = latents[0]
    return tuple(first.shape) if isinstance(first, Tensor) else ()


def read_sigmas(scheduler: Any, num_steps: int) -> list[float]:
    """Return the noise levels at which a generation of `num_steps` steps calls the model: sigmas, or else timesteps."""
    from torch import Tensor

    sigmas = getattr(scheduler, "sigmas", None)
    if isinstance(sigmas, Tensor) and len(sigmas) > num_steps:
        # The last sigma is the noise after the last step, where the model is not called.
        return list(map(float, sigmas.tolist()[-num_steps - 1 : -1]))
    # Iterating a runner's timesteps would drive its loop, so they are converted to a list.
    return list(map(float, scheduler.timesteps.tolist()[-num_steps:]))


def sample_weights(model: nn.Module, later_shares: Collection[str]) -> dict[str, tuple[float, ...] | None]:
    """Return the leading values of each weight matrix on this rank. A quantized or offloaded matrix has none.

    Biases and norms are left out, so that a file stays small: what changes them changes matrices too.

    Args:
        later_shares: paths of modules whose leading values another rank has; their entry is None.
    """
    import torch

    from ditile.model.hooks.placeholders import is_plain_parameter

    sampled: dict[str, tuple[float, ...] | None] = {}
    leading_by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or parameter.ndim < 2:
            continue
        # peft moves the Linear that a LoRA wraps into this attribute.
        name = name.replace(".base_layer", "")
        if name.rpartition(".")[0] in later_shares:
            sampled[name] = None
            continue
        if not is_plain_parameter(parameter) or parameter.is_meta or not parameter.numel():
            sampled[name] = ()
            continue
        # Values are taken along the last dimension: flattening would copy all of a matrix that is not contiguous.
        leading = parameter.detach()[(0,) * (parameter.ndim - 1)][:SAMPLES].float()
        leading_by_device.setdefault(leading.device, {})[name] = leading
    for tensors in leading_by_device.values():
        # The values of a device are copied at once, and not one parameter at a time.
        values = iter(torch.cat(list(tensors.values())).tolist())
        for name, leading in tensors.items():
            samples = itertools.islice(values, len(leading))
            sampled[name] = tuple(float(f"{value:.5g}") for value in samples)
    return sampled


def _iterate_active_loras(model: nn.Module) -> Iterator[str]:
    """Yield the LoRAs of peft that change the model's output, with their scales."""
    layers: list[Any] = list(model.modules())
    for layer in layers:
        merged = getattr(layer, "merged_adapters", None)
        if merged is None:
            continue
        active = [] if layer.disable_adapters else layer.active_adapters
        for name in {*active, *merged} & layer._get_available_adapters():
            # Some adapters, such as IA3, have no scale.
            scale = float(getattr(layer, "scaling", {}).get(name, 1.0))
            if scale != 0.0 or name in merged:
                yield f"{name} at {scale:.6g}"


def _compare_weights(
    fitted: Sequence[Mapping[str, Sequence[float]]],
    present: Sequence[Mapping[str, Sequence[float] | None]],
    models: Sequence[nn.Module],
) -> str:
    if len(fitted) != len(present):
        return f"is for {len(fitted)} models, and the pipeline calls {len(present)}"
    for samples, present_samples, model in zip(fitted, present, models, strict=True):
        for name, values in present_samples.items():
            if values is None:
                continue
            if not values:
                return f"cannot be compared with {name}, which is quantized or offloaded"
            fitted_values = samples.get(name, ())
            if len(fitted_values) != len(values):
                return f"was fitted to other weights than {name} has"
            for fitted_value, value in zip(fitted_values, values, strict=True):
                largest = max(abs(fitted_value), abs(value))
                if abs(fitted_value - value) > WEIGHT_TOLERANCE * largest + LEAST_WEIGHT:
                    return f"was fitted to other weights than {name} has"
        for name in samples.keys() - present_samples.keys():
            if not _is_elsewhere(model, name):
                return f"was fitted to a model with {name}, which this one has not"
    return ""


def _is_elsewhere(model: nn.Module, name: str) -> bool:
    """Return whether a parameter belongs to a block on another rank."""
    from ditile.model.hooks.placeholders import is_placeholder

    module = model
    for part in name.split("."):
        if is_placeholder(module):
            return True
        child = module._modules.get(part)
        if child is None:
            return False
        module = child
    return False


def _compare_items(fitted: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Describe a difference between settings of a call or a scheduler."""
    for name, value in fitted.items():
        # A setting that this call does not have cannot be compared.
        if name in present and present[name] != value:
            return f"is for {name}={_format(value)}, and the call has {_format(present[name])}"
    for name, value in present.items():
        if name not in fitted:
            return f"does not say {name}, and the call has {_format(value)}"
    return ""


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _compare_sigmas(fitted: Sequence[float], present: Sequence[float]) -> str:
    if len(fitted) == len(present):
        differences = [abs(sigma - other) for sigma, other in zip(fitted, present, strict=True)]
        if max(differences) <= SIGMA_TOLERANCE * max(map(abs, fitted)):
            return ""
    return f"is for other sigmas than the {len(present)} steps of this call have, as of another size or shift"


_ADVICE = {
    "model_class": "use a schedule of this model",
    # This comes before the weights, which differ too if a LoRA is fused.
    "loras": "disable the LoRA, or fuse it, save the pipeline and fit a schedule to that",
    "weights": "load the weights that it was fitted to, and quantize none",
    "guidance": "set it as it was fitted",
    "size": "set it as it was fitted",
    "scheduler": "set that one",
    "solver": "set it as it was fitted",
    "sigmas": "call it as it was fitted",
    "latents": "generate in the size of the schedule",
}
"""Field -> what would work if the field differs. Fields are compared in this order."""
