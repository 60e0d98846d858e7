"""One deep copy of the stock scheduler per patch: no scheduler is rewritten, and multistep history stays right.

A stochastic scheduler is detected, not listed: if the first step of a generation moves a random generator, every patch
is stepped on the full tensors from the same saved state and only its slice is kept, which is what the plain pipeline
draws. `StepTimesteps` are the timesteps that a pipeline iterates, or slices, and that yield micro-steps.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ditile.distributed import rng
from ditile.errors import ModelError, StateError
from ditile.hooks.pieces import Piece

STEP_ARGUMENTS = ("model_output", "timestep", "sample")


class PatchSchedulers:
    """Copies of one scheduler, made right after its `set_timesteps`.

    Args:
        scheduler: the stock scheduler.
        hide: attributes of the instance that must not be copied (overrides).
        timesteps: the plain timesteps.
        patches: M, or 1 where no patch is stepped.
        steps: how many steps will be made.
        names: what its `step` calls the prediction, the timestep and the latents.
    """

    def __init__(
        self, scheduler: Any, hide: Iterable[str], timesteps: Tensor, patches: int, steps: int, names: Sequence[str]
    ) -> None:
        kept = {name: value for name, value in vars(scheduler).items() if name not in set(hide)}
        kept["timesteps"] = timesteps
        self._copies = [_clone_scheduler(scheduler, kept) for _ in range(patches)]
        has_lookup = hasattr(scheduler, "_init_step_index")
        self._lacks_index = has_lookup and getattr(self._copies[0], "_step_index", 0) is None
        # Schedulers of order 2 draw random numbers in their second stage only.
        self._probes = min(getattr(scheduler, "order", 1), steps)
        self._stochastic: bool | None = None
        self._names = names
        self._latest = patches  # the patch that was stepped last; some may have nothing to step
        self._saved: list[Tensor] = []
        self._drawn: list[Tensor] = []
        self._shadowed: Any = None
        self._extras: dict[int, Sequence[Any]] = {}
        self._is_given = False

    def sync_step_index(self, scheduler: Any) -> None:
        """Tells the stock scheduler, which is never stepped, where it would be: in-painting pipelines read it there."""
        if "_step_index" in vars(scheduler):
            scheduler._step_index = self._copies[self._latest % len(self._copies)]._step_index

    def take_state(self, scheduler: Any) -> None:
        """Takes what the pipeline has changed in the stock scheduler since `give_state`; of latents that are whole."""
        if self._is_given:
            vars(self._copies[0]).update({name: vars(scheduler)[name] for name in self._list_state()})

    def give_state(self, scheduler: Any) -> None:
        """Brings the stock scheduler to where the only copy is: pipelines count it back, or cut its history."""
        self._is_given = True
        vars(scheduler).update({name: vars(self._copies[0])[name] for name in self._list_state()})

    def _list_state(self) -> list[str]:
        return [name for name in vars(self._copies[0]) if name != "timesteps"]

    def scale_sample(self, x: Tensor, timestep: Any, patches: Sequence[int], *, read: bool) -> Tensor:
        """`scale_model_input` by the copies of `patches`; where the result is not read, on a single number."""
        if self._lacks_index:
            self._find_first_index(timestep)
        tiny = x.new_zeros(1)
        scaled = self._copies[patches[0]].scale_model_input(x if read else tiny, timestep)
        for patch in patches[1:]:
            self._copies[patch].scale_model_input(tiny, timestep)
        return scaled if read else x

    def step_on_corner(
        self, prediction: Tensor, timestep: Any, sample: Tensor, call: Mapping[str, Any], *, closes: bool
    ) -> Any:
        """Steps the first copy on a corner of the tensors, to keep its counter right where no result is needed.

        Args:
            closes: whether a step ends here; before that a result is only looked at for its form.

        Returns:
            The scheduler's result; its dtype is that of a real step.
        """
        if self._lacks_index:
            self._find_first_index(timestep)
        if closes or self._shadowed is None:
            generators = rng.list_generators(call.get("generator"), sample.device)
            saved = rng.read_generator_states(generators)
            corner = (slice(None),) + (slice(0, 1),) * (sample.ndim - 1)
            cut = {
                name: value[corner[: value.ndim]] if _is_like(value, sample) else value for name, value in call.items()
            }
            scheduler = self._copies[0] if closes else copy.deepcopy(self._copies[0])
            extras = self._extras.get(-1)
            self._shadowed = self._step_copy(scheduler, prediction[corner], timestep, sample[corner], cut, -1)
            if not closes:
                self._extras[-1] = extras or ()
            rng.restore_generators(generators, saved)
        return self._shadowed

    def step_patch(
        self, patch: int, prediction: Tensor, timestep: Any, sample: Tensor, piece: Piece, call: Mapping[str, Any]
    ) -> tuple[Tensor, Any]:
        """Steps one patch. Returns its new latents and the scheduler's own result.

        Args:
            patch: which.
            prediction, sample: full tensors, fresh at the patch.
            timestep: the step's timestep.
            piece: where the patch is.
            call: further arguments of `scheduler.step`.

        Raises:
            StateError: if the scheduler draws random numbers now and drew none in the first step.
        """
        if self._lacks_index:
            self._find_first_index(timestep)
        generators = rng.list_generators(call.get("generator"), sample.device)
        before = rng.read_generator_states(generators)
        is_first, self._latest = patch <= self._latest, patch
        # The scheduler may keep them, and the tensors themselves are written over in the next step.
        part = piece.take(prediction).clone(), piece.take(sample).clone()
        cut = {name: piece.take_prefix(value) if _is_like(value, sample) else value for name, value in call.items()}
        if self._stochastic is None:
            probe = copy.deepcopy(self._copies[patch])
            for _ in range(self._probes):
                self._step_copy(probe, part[0], timestep, part[1], cut, patch)
            self._extras.pop(patch, None)
            self._stochastic = rng.has_state_change(generators, before)
            rng.restore_generators(generators, before)
        if not self._stochastic:
            result = self._step_copy(self._copies[patch], part[0], timestep, part[1], cut, patch)
            if rng.has_state_change(generators, before):
                raise StateError(
                    f"{type(self._copies[patch]).__name__} draws random numbers now and drew none in the first step; "
                    "use patches=1, or another scheduler"
                )
            return extract_sample(result), result
        if is_first:
            self._saved = before
        rng.restore_generators(generators, self._saved)
        result = self._step_copy(self._copies[patch], prediction.clone(), timestep, sample.clone(), call, patch)
        self._drawn = rng.read_generator_states(generators)
        return piece.take(extract_sample(result)), result

    def skip_patch(self, call: Mapping[str, Any], device: torch.device) -> None:
        """A patch in which nothing of these latents is stepped: random numbers go on behind those of the step."""
        if self._stochastic:
            rng.restore_generators(rng.list_generators(call.get("generator"), device), self._drawn)

    def _find_first_index(self, timestep: Any) -> None:
        """Where the first timestep is, which a host waits for its device to know: once, and not for each copy."""
        self._lacks_index = False
        self._copies[0]._init_step_index(timestep)
        for each in self._copies[1:]:
            each._step_index = self._copies[0]._step_index

    def _step_copy(
        self, scheduler: Any, prediction: Tensor, timestep: Any, sample: Tensor, call: Mapping[str, Any], patch: int
    ) -> Any:
        """Steps a copy; what it made of this patch besides latents in the step before is given to it again."""
        extras = self._extras.get(patch, ())
        own = {name: value.select(extras) if isinstance(value, PatchExtra) else value for name, value in call.items()}
        result = scheduler.step(**dict(zip(self._names, (prediction, timestep, sample), strict=True)), **own)
        self._extras[patch] = result[1:] if isinstance(result, tuple) else ()
        return result


class PatchExtra:
    """Stands for what steps made of the patches besides latents, which the pipeline may give to the next step alone."""

    def __init__(self, index: int) -> None:
        self._index = index

    def select(self, extras: Sequence[Any]) -> Any:
        """That of one patch; None if it was not stepped yet."""
        return extras[self._index] if self._index < len(extras) else None

    def __getattr__(self, name: str) -> Any:
        raise StateError(
            "the pipeline takes more than latents from its scheduler, which has made it of one patch here; use a plan "
            "without pipefusion and patches"
        )


def _is_like(value: Any, sample: Tensor) -> bool:
    """Whether an argument of `step` has the first dimensions of the latents, such as a timestep for each token."""
    return isinstance(value, Tensor) and 1 < value.ndim <= sample.ndim and value.shape == sample.shape[: value.ndim]


def find_step_signature(scheduler: Any) -> inspect.Signature:
    """The parameters of `step`, of the nearest class of a scheduler that names them.

    Raises:
        ModelError: if none does.
    """
    for cls in type(scheduler).__mro__:
        if (step := vars(cls).get("step")) is not None:
            signature = inspect.signature(step.__get__(scheduler))
            if not any(p.kind is p.VAR_POSITIONAL for p in list(signature.parameters.values())[:3]):
                return signature
    raise ModelError(
        f"{type(scheduler).__name__}.step names none of its parameters, so its prediction and latents cannot be told "
        f"apart; call them {', '.join(STEP_ARGUMENTS)}"
    )


def find_argument_names(step: inspect.Signature) -> Sequence[str]:
    """What a scheduler calls the prediction, the timestep and the latents: CogVideoX's has others between these."""
    names = list(step.parameters)
    return STEP_ARGUMENTS if set(STEP_ARGUMENTS) <= set(names) else names[:3]


def extract_sample(result: Any) -> Tensor:
    """The new sample of a scheduler's result, tuple or output object."""
    sample: Tensor = result[0] if isinstance(result, tuple) else result.prev_sample
    return sample


class StepResult(tuple[Any, ...]):
    """The results of a scheduler's step: the new latents first, as nearly all pipelines index it.

    The others are made of what this rank stepped. A pipeline that unpacks them gets what `whole` makes of them.
    """

    whole: Callable[[Sequence[Any]], Sequence[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter((self[0], *self.whole(self[1:])))


def replace_latents(
    result: Any, latents: Tensor, whole: Callable[[Sequence[Any]], Sequence[Any]], *, keep: bool
) -> Any:
    """A scheduler's result with other latents in it.

    Args:
        result: tuple or output object.
        latents: of all images.
        whole: makes the other results whole from those that were made here.
        keep: whether the other fields of an output object stay.
    """
    if not isinstance(result, tuple):
        return type(result)(**{**(result if keep else {}), "prev_sample": latents})
    step_result = StepResult((latents, *result[1:]))
    step_result.whole = whole
    return step_result


def _clone_scheduler(scheduler: Any, attributes: Mapping[str, Any]) -> Any:
    clone = copy.copy(scheduler)
    vars(clone).clear()
    vars(clone).update(copy.deepcopy(dict(attributes)))
    return clone


Drive = Callable[[tuple[Tensor, ...]], Iterator[Tensor]]
"""Yields the timestep of each micro-step, from those of the steps."""


class StepTimesteps(Tensor):
    """A scheduler's timesteps that iterate in micro-steps; a slice `[k:]` or `[:n]` counts in steps and does so too.

    Everything else (length, other indexing, arithmetic) is that of the plain tensor. So is a slice of a single one that
    says where it ends: pipelines give `timesteps[:1]` to schedulers that add noise, which iterate it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    drive: Drive

    @classmethod
    def wrap_timesteps(cls, plain: Tensor, drive: Drive) -> StepTimesteps:
        """Wraps plain timesteps, which `drive` iterates."""
        timesteps = plain.as_subclass(cls)
        timesteps.drive = drive
        return timesteps

    def to_plain_tensor(self) -> Tensor:
        """The timesteps as an ordinary tensor."""
        return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.to_plain_tensor().clone()

    def __getitem__(self, index: Any) -> Tensor:
        part = self.to_plain_tensor()[index]
        is_run = isinstance(index, slice) and index.step in (None, 1) and (index.stop is None or len(part) > 1)
        return StepTimesteps.wrap_timesteps(part, self.drive) if is_run else part

    def __iter__(self) -> Iterator[Tensor]:
        return self.drive(self.to_plain_tensor().unbind(0))
