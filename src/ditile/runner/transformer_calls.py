"""A transformer without a pipeline, under a plan: each of its calls is one step of a loop that does nothing else.

The runner divides what a pipeline does between two steps of its scheduler. So a call of a transformer whose sampler is
elsewhere, as in ComfyUI, runs in a loop of a single step, whose scheduler returns the prediction as it is. That step is
synchronous: nothing of another call is read, and the prediction is that of one device.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from diffusers.configuration_utils import ConfigMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from torch import Tensor, nn

from ditile.model.hooks.compile import unwrap_compiled
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments

NextCall = Callable[[Any], CallArguments | None]
# A model of video and sound makes two.
MAX_PREDICTIONS = 4


class PredictionScheduler(SchedulerMixin, ConfigMixin):
    """A scheduler of one step, whose result is the prediction."""

    order = 1

    def __init__(self) -> None:
        registering: Any = self
        registering.register_to_config()
        self.timesteps = torch.zeros(1)

    def set_timesteps(self) -> None:
        """Begin the step."""
        self.timesteps = torch.zeros(1)

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor) -> tuple[Tensor]:
        """Return the prediction."""
        return (model_output,)


class TransformerCalls(DiffusionPipeline):
    """A pipeline that has only a transformer. Each call is a loop of one step."""

    transformer: Any
    scheduler: Any

    def __init__(self, transformer: nn.Module, scheduler: PredictionScheduler) -> None:
        pipeline: Any = super()
        pipeline.__init__()
        pipeline.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, arguments: CallArguments, callback_on_prediction: NextCall | None = None) -> Any:
        """Call the transformer, and return its prediction.

        Args:
            arguments: the arguments of its forward, by name.
            callback_on_prediction: takes each prediction, and returns the arguments of the next call, or None after the
                last. The calls of one chain install the plan's hooks once, and need arguments of the same shapes.

        Returns:
            The last prediction: a tensor, or a list of them if the transformer makes several.
        """
        while True:
            prediction = self._predict(arguments)
            if callback_on_prediction is None:
                return prediction
            following = callback_on_prediction(prediction)
            if following is None:
                return prediction
            arguments = following

    def _predict(self, arguments: CallArguments) -> Any:
        # Copy the scheduler first: the loop knows only the copies that were made before it begins.
        schedulers = [self.scheduler, *(copy.copy(self.scheduler) for _ in range(1, MAX_PREDICTIONS))]
        self.scheduler.set_timesteps()
        for timestep in self.scheduler.timesteps:
            result = self.transformer(**{**arguments, "return_dict": False})
            # Kandinsky 5 returns its prediction without a tuple; `list` would take the tensor's rows for predictions.
            if isinstance(result, Tensor):
                result = (result,)
            # Some models make a list with a tensor for each row.
            is_listed = isinstance(result[0], list)
            predictions = [torch.stack(result[0])] if is_listed else list(result)
            if len(predictions) > MAX_PREDICTIONS:
                raise ModelError(f"{type(self.transformer).__name__} makes {len(predictions)} predictions in a call")
            # The scheduler's step gathers what other ranks computed.
            for number, prediction in enumerate(predictions):
                sample = torch.zeros_like(prediction)
                stepped = schedulers[number].step(prediction, timestep, sample)[0]
                predictions[number] = stepped.as_subclass(Tensor)
        if is_listed:
            return list(predictions[0].unbind())
        return predictions[0] if len(predictions) == 1 else predictions


def build_transformer_calls(transformer: nn.Module, owner: type[Any] | None = None) -> TransformerCalls:
    """Build the pipeline of a transformer's calls.

    Args:
        owner: the class of its pipeline, whose loader of LoRAs it gets.
    """
    for cls in owner.__mro__ if owner is not None else ():
        if issubclass(cls, LoraBaseMixin) and cls is not LoraBaseMixin and not issubclass(cls, DiffusionPipeline):
            # The sampler's side has the text encoders, whose keys are left out. The loaders ask for these attributes.
            values = {"_lora_loadable_modules": ["transformer"], "text_encoder": None, "__module__": __name__}
            built: TransformerCalls = type(TransformerCalls.__name__, (TransformerCalls, cls), values)(
                transformer, PredictionScheduler()
            )
            return built
    return TransformerCalls(transformer, PredictionScheduler())


def check_call_names(transformer: nn.Module, arguments: CallArguments) -> None:
    """Check that a transformer's forward takes arguments of these names, and needs no more. Raises `ModelError`."""
    model = unwrap_compiled(transformer)
    try:
        inspect.signature(type(model).forward).bind(model, **arguments)
    except TypeError as error:
        raise ModelError(f"{type(model).__name__}: {error}") from None
