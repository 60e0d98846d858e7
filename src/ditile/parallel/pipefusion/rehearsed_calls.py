"""What rehearsals found, kept from call to call: a call of the same shapes is recognised, and not rehearsed again.

A rehearsal learns from shapes: where the tokens of a patch come out is the same for any prompt, seed, or number of
steps. What it may have learnt from besides is compared first, see `describe_call_shapes`. Then the pipeline's loop runs
two iterations in which no model is called at all: its calls are looked up by their shapes, and by what says how long
the prompts are in them (`describe_lengths`), and given a result of zeros.
These iterations say again what depends on numbers, such as a mask that blends nothing: how latents are handed on.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
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

from ditile.model.hooks.generation import Findings, Generation
from ditile.model.hooks.pieces import Piece
from ditile.model.pipeline_calls import list_schedulers

NOT_LEARNT_FROM = ("callback", "generator", "num_inference_steps", "timesteps", "sigmas", "output")
"""How arguments of pipelines begin of which a rehearsal learns nothing."""
MOST_KEPT = 8
"""Calls of so many kinds are kept; the one that was not made for the longest time is forgotten."""


def describe_call_shapes(pipe: Any, call: Mapping[str, Any]) -> Hashable:
    """What a rehearsal may learn from before the loop begins; equal for calls that may be alike.

    That is the pipeline's class and config, its schedulers and guiders with their settings, and of the arguments the
    shapes of tensors and pictures, the number of prompts, and all other values but those of `NOT_LEARNT_FROM`. An
    object of another type is like no other, so that such a call is always rehearsed.
    """
    guiders = {name: part for name, part in vars(pipe).items() if isinstance(part, BaseGuidance)}
    parts = {f"guider {name}": part for name, part in guiders.items()}
    parts |= {f"scheduler {number}": part for number, part in enumerate(list_schedulers(pipe))}
    settings = {name: (type(part), str(getattr(part, "config", None))) for name, part in parts.items()}
    # Users set these beside the config.
    changed = {name: {k: v for k, v in vars(part).items() if k[0] != "_"} for name, part in guiders.items()}
    given = {name: value for name, value in call.items() if not name.startswith(NOT_LEARNT_FROM)}
    of_arguments = tuple((name, _describe_value(name, given[name])) for name in sorted(given))
    return type(pipe), str(pipe.config), tuple(settings.items()), _describe_value("", changed), of_arguments


def _describe_value(name: str, value: Any) -> Hashable:
    if isinstance(value, Tensor | np.ndarray):
        return type(value).__name__, tuple(value.shape), str(value.dtype)
    if isinstance(value, Image):
        return type(value).__name__, value.size, value.mode
    if isinstance(value, PipelineState | SimpleNamespace) or dataclasses.is_dataclass(type(value)):
        return type(value), _describe_value(name, vars(value))
    if isinstance(value, Mapping):
        return tuple((str(key), _describe_value(f"{name}.{key}", value[key])) for key in sorted(value, key=str))
    if isinstance(value, list | tuple):
        return type(value).__name__, *(_describe_value(name, each) for each in value)
    if isinstance(value, str) and "prompt" in name:
        return "str"
    return (type(value).__name__, value) if isinstance(value, str | int | float | None) else object()


def describe_lengths(inputs: Mapping[str, Any]) -> Hashable:
    """What of a model's arguments says how long texts are in a padded batch: the numbers of masks, integers in lists.

    Tokens of a patch may lie elsewhere where these are others, whatever the shapes (Lumina 2 leaves padding out).

    Args:
        inputs: the arguments by name.
    """
    described: list[Hashable] = []
    for name, value in inputs.items():
        leaves = pytree.tree_leaves(value)
        if "mask" in name:
            described += [(name, _digest_numbers(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
        if isinstance(value, list | tuple):
            described += [(name, leaf) for leaf in leaves if type(leaf) is int]
    return tuple(described)


def _digest_numbers(x: Tensor) -> str:
    return sha256(x.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedCall:
    """What the rehearsal of a call found, without any of its numbers.

    Attributes:
        calls: of models in its first iteration, as `Findings.forms` names them, with what `describe_lengths` says.
        results: of these calls by branch, and of other models' calls, as `forget_numbers` describes them.
        shapes: of the predictions that schedulers are stepped with.
        pieces: of the latents, by scheduler and patch.
        findings: of its generation.
        lets_group_rest: whether the warmup group rests all the same.
    """

    calls: frozenset[Hashable]
    results: tuple[dict[int, Any], dict[Any, Any]]
    shapes: Sequence[tuple[int, ...]]
    pieces: Sequence[Sequence[Piece]]
    findings: Findings
    lets_group_rest: bool

    def make_results(self) -> tuple[dict[int, Any], dict[Any, Any]]:
        """Results of zeros."""
        made: tuple[dict[int, Any], dict[Any, Any]] = pytree.tree_map_only(_Zeros, _Zeros.make_tensor, self.results)
        return made

    def restore_findings(self, now: Generation) -> None:
        """The generation has what the rehearsal found."""
        now.findings = dataclasses.replace(self.findings)
        if self.lets_group_rest:
            now.shares.warmup_split = None


@dataclass(frozen=True, slots=True)
class _Zeros:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def make_tensor(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def forget_numbers(results: Any) -> Any:
    """Results of models without their numbers; None if they have more than tensors, which may be large."""
    forgotten = pytree.tree_map_only(Tensor, lambda x: _Zeros(x.shape, x.dtype, x.device), results)
    leaves = pytree.tree_leaves(forgotten)
    return forgotten if all(isinstance(leaf, _Zeros | str | int | float | None) for leaf in leaves) else None


class RehearsedCalls:
    """The calls of a pipeline that were rehearsed; ranks keep the same, as they make the same calls."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Hashable, Hashable], RehearsedCall] = OrderedDict()
        self._shapes: Hashable = None
        self._noted: RehearsedCall | None = None

    def list_calls(self, shapes: Hashable) -> list[RehearsedCall]:
        """A call begins: those that it may be like, given what `describe_call_shapes` says of it."""
        self._shapes = shapes
        self._noted = None
        return [call for (described, _), call in self._kept.items() if described == shapes]

    def note_call(self, found: RehearsedCall | None) -> None:
        """What was found of the call, which is kept once its steps were made."""
        self._noted = found

    def keep_noted_call(self) -> None:
        """The call's steps were made."""
        if self._noted is None:
            return
        key = self._shapes, self._noted.calls
        self._kept[key], self._noted = self._noted, None
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
