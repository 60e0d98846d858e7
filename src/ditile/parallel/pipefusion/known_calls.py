"""Known calls: the findings of a rehearsal are kept, so that a call with the same shapes needs no rehearsal.

A rehearsal depends on shapes: the places of a patch's tokens are the same for any prompt, seed, or number of steps.
Whatever it may depend on before the loop is compared first, see `describe_call_shapes`. Then the pipeline's loop runs
two iterations in which no model is called. Calls of models are looked up by their shapes, and by the arguments that
give the lengths of the prompts (`describe_lengths`). They get a result of zeros. These iterations show again how the
pipeline passes latents on, which depends on numbers, such as a mask that blends nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from PIL.Image import Image
from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.model.hooks.generation import Findings
from ditile.model.hooks.pieces import Piece
from ditile.model.pipeline_calls import list_schedulers
from ditile.parallel.pipefusion.dry_iterations import DryIterations
from ditile.parallel.pipefusion.other_models import OtherModels

IRRELEVANT_ARGUMENTS = ("callback", "generator", "num_inference_steps", "timesteps", "sigmas", "output")
"""The beginnings of names of pipeline arguments that do not affect a rehearsal."""
MAX_KNOWN_CALLS = 8
"""How many calls are kept; the least recently made one is forgotten."""


def describe_call_shapes(pipe: Any, call: Mapping[str, Any]) -> Hashable:
    """Describe everything before the loop that may affect a rehearsal; calls that may be alike get equal descriptions.

    A description has the pipeline's class and config, and its schedulers and guiders with their settings. From the
    arguments it has the shapes of tensors and images, the number of prompts, and all other values that are not of
    `IRRELEVANT_ARGUMENTS`. An object of another type equals no other, so that such a call is always rehearsed.
    """
    parts: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for name, part in vars(pipe).items():
        if not isinstance(part, BaseGuidance):
            continue
        parts[name] = part
        # Users set these without changing the config.
        settings_of_guider = {}
        for key, value in vars(part).items():
            if not key.startswith("_"):
                settings_of_guider[key] = value
        attributes[name] = settings_of_guider
    for number, scheduler in enumerate(list_schedulers(pipe)):
        parts[f"scheduler {number}"] = scheduler
    settings = []
    for name, part in parts.items():
        settings.append((name, type(part), str(getattr(part, "config", None))))
    arguments = {name: value for name, value in call.items() if not name.startswith(IRRELEVANT_ARGUMENTS)}
    return (
        type(pipe),
        str(pipe.config),
        tuple(settings),
        _describe_value("", attributes),
        tuple((name, _describe_value(name, arguments[name])) for name in sorted(arguments)),
    )


def _describe_value(name: str, value: Any) -> Hashable:
    if isinstance(value, Tensor | np.ndarray):
        return type(value).__name__, tuple(value.shape), str(value.dtype)
    if isinstance(value, Image):
        return type(value).__name__, value.size, value.mode
    if isinstance(value, PipelineState | SimpleNamespace) or dataclasses.is_dataclass(type(value)):
        return type(value), _describe_value(name, vars(value))
    if isinstance(value, Mapping):
        items = []
        for key in sorted(value, key=str):
            items.append((str(key), _describe_value(f"{name}.{key}", value[key])))
        return tuple(items)
    if isinstance(value, list | tuple):
        return type(value).__name__, *(_describe_value(name, item) for item in value)
    # The words of a prompt do not change a shape.
    if isinstance(value, str) and "prompt" in name:
        return "str"
    if isinstance(value, str | int | float | None):
        return type(value).__name__, value
    return object()


def describe_lengths(inputs: Mapping[str, Any]) -> Hashable:
    """Describe the arguments of a model that give the lengths of texts in a padded batch.

    These are numbers of masks, and integers in lists.
    """
    # These lengths decide where the tokens of a patch are, whatever the shapes: Lumina 2 leaves padding out.
    lengths: list[Hashable] = []
    for name, value in inputs.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and "mask" in name:
                numbers = leaf.detach().cpu().flatten().contiguous().view(torch.uint8).numpy()
                lengths.append((name, sha256(numbers.tobytes()).hexdigest()))
            elif type(leaf) is int and isinstance(value, list | tuple):
                lengths.append((name, leaf))
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class KnownCall:
    """The findings of a call's rehearsal, without any of its numbers.

    Attributes:
        calls: the calls of models in its first iteration, each named as in `Findings.forms`, with the result of
            `describe_lengths`.
        results: the results of these calls by branch, and of other models' calls as in `OtherModels.results`; tensors
            are a single zero, repeated.
        other_inputs: the inputs of other models' calls, as in `OtherModels.inputs`.
        shapes: the shapes of the predictions that schedulers are stepped with.
        pieces: the pieces of the latents, by scheduler and patch.
        findings: a copy of its generation's findings that shares `forms`, so that forms of later steps are kept too.
        lets_group_rest: whether the warmup group rests.
    """

    calls: frozenset[Hashable]
    results: Any
    other_inputs: Mapping[tuple[str, int, int], Hashable]
    shapes: Sequence[tuple[int, ...]]
    pieces: Sequence[Sequence[Piece]]
    findings: Findings
    lets_group_rest: bool

    @classmethod
    def from_rehearsal(
        cls, dry: DryIterations, calls: frozenset[Hashable], results: Any, other_models: OtherModels
    ) -> KnownCall | None:
        """Return the findings of a rehearsal.

        The result is None if calls' results cannot be made from shapes, or if several stages compute whole steps.
        """
        described = pytree.tree_map_only(
            Tensor, lambda x: x.new_zeros(()).expand(x.shape), (results, other_models.results)
        )
        # A result with objects other than tensors and plain values is not kept, because they may be large.
        has_objects = any(
            not isinstance(leaf, Tensor | str | int | float | None) for leaf in pytree.tree_leaves(described)
        )
        # Recognising a call takes two iterations of the first step, which do not cut the tokens of whole steps. But a
        # stage expects the messages of such a step ahead, and must know their sizes then.
        needs_sizes_ahead = bool(dry.now.findings.whole_steps) and dry.now.schedule.stages > 1
        if has_objects or needs_sizes_ahead:
            return None
        return cls(
            calls=calls,
            results=described,
            other_inputs=dict(other_models.inputs),
            shapes=[stream.predicted_shape for stream in dry.streams],
            pieces=[stream.pieces for stream in dry.streams],
            findings=dataclasses.replace(dry.now.findings),
            lets_group_rest=dry.now.shares.warmup_split is None,
        )

    def make_results(self) -> Any:
        """Make the results from zeros."""
        return pytree.tree_map_only(Tensor, lambda x: x.new_zeros(x.shape), self.results)


KnownCalls = dict[tuple[Hashable, Hashable], KnownCall]
"""(what `describe_call_shapes` returns and more, the calls of models) -> what a rehearsal found, the newest last. All
ranks keep the same, because they make the same calls."""
