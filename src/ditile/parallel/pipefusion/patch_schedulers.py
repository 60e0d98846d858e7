"""One deep copy of the stock scheduler per patch: no scheduler is rewritten, and multistep history stays correct.

A stochastic scheduler is detected, not listed: the first step of a generation moves a random generator. Then every
patch is stepped on the full tensors from the same saved state, and only its slice is kept, so that it has the plain
pipeline's noise. A user's own scheduler is treated the same way, because it may compute statistics of a whole
prediction. `StepTimesteps` are the timesteps that a pipeline iterates, or slices, and that yield micro-steps.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ditile.model.hooks.overrides import list_replaced_methods
from ditile.model.hooks.pieces import Piece
from ditile.parallel import rng_state
from ditile.plan.errors import ModelError, StateError
from ditile.plan.plan import suggest_whole_images

STEP_ARGUMENTS = ("model_output", "timestep", "sample")
OVERRIDES = ("set_timesteps", "step", "scale_model_input")
"""The methods of a scheduler that the loop overrides on the instance."""


Place = int | str
"""The place of an argument in a call: the number of a positional one, or the name of a keyword."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of a scheduler's `step`, with its arguments where the pipeline put them.

    Attributes:
        prediction, timestep, sample: the three arguments of every step.
        places: the places of these three in the call.
        extra: its other arguments, by their places.
        generator: the random generator, if the call has one.
    """

    prediction: Tensor
    timestep: Any
    sample: Tensor
    places: Sequence[Place]
    extra: Mapping[Place, Any]
    generator: Any = None

    def make(self, step: Callable[..., Any], prediction: Tensor, sample: Tensor, extra: Mapping[Place, Any]) -> Any:
        """Call `step` with these tensors and extra arguments."""
        values = dict(zip(self.places, (prediction, self.timestep, sample), strict=True))
        values.update(extra)
        named = {}
        for place, value in values.items():
            if isinstance(place, str):
                named[place] = value
        positional = map(values.__getitem__, range(len(values) - len(named)))
        return step(*positional, **named)


class StepSignature:
    """The places of the prediction, the timestep and the latents among the arguments of a scheduler's `step`.

    Raises:
        ModelError: if no class of the scheduler names its parameters.
    """

    def __init__(self, scheduler: Any) -> None:
        # Find the scheduler's nearest class that names the parameters of `step`.
        steps = []
        for cls in type(scheduler).__mro__:
            if "step" in vars(cls):
                steps.append(vars(cls)["step"].__get__(scheduler))
        # An object around a scheduler may forward its step without a class that defines one.
        for step in steps or [scheduler.step]:
            parameters = inspect.signature(step).parameters
            first_three = list(parameters.values())[:3]
            if inspect.Parameter.VAR_POSITIONAL not in [parameter.kind for parameter in first_three]:
                break
        else:
            raise ModelError(
                f"{type(scheduler).__name__}.step names none of its parameters, so its prediction and latents cannot "
                f"be told apart; call them {', '.join(STEP_ARGUMENTS)}"
            )
        order = list(parameters)
        # CogVideoX has other parameters between these.
        roles: Sequence[str] = STEP_ARGUMENTS if set(STEP_ARGUMENTS) <= set(order) else order[:3]
        self._roles = [(order.index(name), name) for name in roles]
        self._generator_index = order.index("generator") if "generator" in order else len(order)
        # The places of the three are kept by the call's number of positional arguments.
        self._places: dict[int, list[Place]] = {}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepCall:
        """Separate the three arguments of a call from the others; raise `TypeError` if one is missing."""
        count = len(args)
        extra: dict[Place, Any] = dict(enumerate(args))
        extra.update(kwargs)
        places = self._places.get(count)
        if places is None:
            places = []
            for index, name in self._roles:
                place: Place = index if index < count else name
                places.append(place)
            self._places[count] = places
        try:
            prediction, timestep, sample = map(extra.pop, places)
        except KeyError as error:
            raise TypeError(f"scheduler.step() is called without {error}") from error
        # A subclass of Tensor, such as a deferred prediction, would record the scheduler's operations.
        if type(prediction) is not Tensor:
            prediction = prediction.as_subclass(Tensor)
        generator = extra.get(self._generator_index, extra.get("generator"))
        return StepCall(prediction, timestep, sample, places, extra, generator)


class PatchSchedulers:
    """Copies of one scheduler, made after its `set_timesteps` and before any step.

    Args:
        patches: M, or 1 if no patch is stepped.
    """

    def __init__(self, scheduler: Any, timesteps: Tensor, patches: int, steps: int) -> None:
        attributes = {name: value for name, value in vars(scheduler).items() if name not in OVERRIDES}
        attributes["timesteps"] = timesteps
        self._copies: list[Any] = []
        for _ in range(patches):
            # The scheduler itself is not deep-copied, because its overrides lead back to the pipeline.
            clone = copy.copy(scheduler)
            vars(clone).clear()
            vars(clone).update(copy.deepcopy(attributes))
            self._copies.append(clone)
        has_lookup = hasattr(scheduler, "_init_step_index")
        self._lacks_index = has_lookup and getattr(self._copies[0], "_step_index", 0) is None
        # Schedulers of order 2 generate random numbers only in their second stage.
        self._probe_steps = min(getattr(scheduler, "order", 1), steps)
        # A user's own scheduler may generate numbers only in a later step, so probing the first step is not conclusive.
        self._is_custom = is_custom_scheduler(scheduler)
        # This says whether each patch is stepped on the full tensors; None if the first step has to show it.
        self._steps_whole: bool | None = None
        if self._is_custom:
            self._steps_whole = True
        # This is the patch that was stepped last; at first it is none of them, see `sync_step_index`.
        self._latest_patch = patches
        # States of the random generators, by the number of the step: patches may be some steps apart.
        self._states_before: dict[int, list[Tensor]] = {}
        self._states_after: dict[int, list[Tensor]] = {}
        self._num_made = [0] * patches  # steps that each patch has made
        self._corner_result: Any = None
        self._extra_results: dict[int, Sequence[Any]] = {}  # by patch, of its last step; -1 is the corner

    def sync_step_index(self, scheduler: Any) -> None:
        """Set the index of the stock scheduler, because in-painting pipelines read it there.

        The stock scheduler is never stepped.
        """
        if "_step_index" in vars(scheduler):
            # Before a patch was stepped the first copy stands for all.
            latest_copy = self._copies[self._latest_patch % len(self._copies)]
            scheduler._step_index = latest_copy._step_index

    def scale_sample(self, x: Tensor, timestep: Any, patches: Sequence[int], *, read: bool) -> Tensor:
        """Call `scale_model_input` of the copies of `patches`; on a single number if nobody reads the result."""
        if self._lacks_index:
            self._find_first_index(timestep)
        unread_input = x if self._is_custom else x.new_zeros(1)
        # The copies are called even if no result is read, because some schedulers count steps in this method.
        first, *others = patches
        for patch in others:
            self._copies[patch].scale_model_input(unread_input, timestep)
        first_input = x if read else unread_input
        scaled: Tensor = self._copies[first].scale_model_input(first_input, timestep)
        return scaled if read else x

    def step_on_corner(self, call: StepCall, sample: Tensor, *, closes: bool) -> Any:
        """Step the first copy on a corner of the tensors, to keep its counter right.

        The numbers of the result are not needed.

        Args:
            call: the call of `scheduler.step`.
            closes: whether a step ends here; otherwise only the form of the result is needed.

        Returns:
            The scheduler's result; its dtype is that of a real step.
        """
        if self._lacks_index:
            self._find_first_index(call.timestep)
        # Within a step the form stays the same, so an earlier result can be returned.
        if not closes and self._corner_result is not None:
            return self._corner_result
        generators = rng_state.list_generators(call.generator, sample.device)
        state = rng_state.read_generator_states(generators)
        # A user's own scheduler gets all of the tensors: it may ask for their shape, and change it.
        length = None if self._is_custom else 1
        corner = (slice(None), *[slice(length)] * (sample.ndim - 1))
        extra = dict(call.extra)
        for place, value in call.extra.items():
            if _is_like(value, sample):
                extra[place] = value[corner[: value.ndim]]
        scheduler = self._copies[0]
        extra_results = self._extra_results.get(-1, ())
        if not closes:
            scheduler = copy.deepcopy(scheduler)
        self._corner_result = self._step_copy(scheduler, call, call.prediction[corner], sample[corner], extra, -1)
        if not closes:
            self._extra_results[-1] = extra_results  # `_step_copy` replaced them
        rng_state.restore_generators(generators, state)
        return self._corner_result

    def step_patch(self, patch: int, call: StepCall, sample: Tensor, piece: Piece) -> tuple[Tensor, Any]:
        """Step one patch; return its new latents and the scheduler's own result.

        Args:
            call: the call of `scheduler.step`, with the full prediction, fresh at the patch.
            sample: the latents, also full.

        Raises:
            StateError: if the scheduler generates random numbers now but did not in the first step, or makes latents of
                another size.
        """
        if self._lacks_index:
            self._find_first_index(call.timestep)
        generators = rng_state.list_generators(call.generator, sample.device)
        state = rng_state.read_generator_states(generators)
        self._latest_patch = patch
        step = self._count_step(patch)
        if not self._steps_whole:
            # These are clones, because the scheduler may keep them in its history, and the next step overwrites the
            # full tensors.
            prediction_part = piece.take(call.prediction).clone()
            sample_part = piece.take(sample).clone()
            extra = dict(call.extra)
            for place, value in call.extra.items():
                if _is_like(value, sample):
                    extra[place] = piece.take_prefix(value)
            if self._steps_whole is None:
                self._steps_whole = self._draws_numbers(patch, call, prediction_part, sample_part, extra, generators)
        if not self._steps_whole:
            result = self._step_copy(self._copies[patch], call, prediction_part, sample_part, extra, patch)
            stepped = extract_sample(result)
            check_size(self._copies[patch], sample_part, stepped)
            if rng_state.has_state_change(generators, state):
                raise StateError(
                    f"{type(self._copies[patch]).__name__} draws random numbers now and drew none in the first step; "
                    "use patches=1, or another scheduler"
                )
            return stepped, result
        # All patches of a step generate the same numbers for the whole latents, and each keeps those of its slice.
        rng_state.restore_generators(generators, self._states_before.setdefault(step, state))
        prediction = call.prediction.clone()
        result = self._step_copy(self._copies[patch], call, prediction, sample.clone(), call.extra, patch)
        stepped = extract_sample(result)
        check_size(self._copies[patch], sample, stepped)
        self._states_after[step] = rng_state.read_generator_states(generators)
        return piece.take(stepped), result

    def _draws_numbers(
        self,
        patch: int,
        call: StepCall,
        prediction: Tensor,
        sample: Tensor,
        extra: Mapping[Place, Any],
        generators: Sequence[torch.Generator],
    ) -> bool:
        """Return whether the first steps of a copy move a random generator, and leave everything as it was."""
        state = rng_state.read_generator_states(generators)
        probe = copy.deepcopy(self._copies[patch])
        for _ in range(self._probe_steps):
            self._step_copy(probe, call, prediction, sample, extra, patch)
        self._extra_results.pop(patch, None)
        has_drawn = rng_state.has_state_change(generators, state)
        rng_state.restore_generators(generators, state)
        return has_drawn

    def skip_patch(self, patch: int, call: StepCall, device: torch.device) -> None:
        """Set random generators to their state after this step of another patch, for a patch without these latents."""
        state = self._states_after.get(self._count_step(patch))
        if self._steps_whole and state is not None:
            rng_state.restore_generators(rng_state.list_generators(call.generator, device), state)

    def _count_step(self, patch: int) -> int:
        """Return the number of a patch's next step, and drop states of steps that all patches have made."""
        step = self._num_made[patch]
        self._num_made[patch] += 1
        oldest = min(self._num_made) - 1
        for states in (self._states_before, self._states_after):
            for known_step in list(states):
                if known_step < oldest:
                    del states[known_step]
        return step

    def _find_first_index(self, timestep: Any) -> None:
        """Look the first timestep up once for all copies, because the host waits for the device in the lookup."""
        self._lacks_index = False
        self._copies[0]._init_step_index(timestep)
        for scheduler in self._copies[1:]:
            scheduler._step_index = self._copies[0]._step_index

    def _step_copy(
        self,
        scheduler: Any,
        call: StepCall,
        prediction: Tensor,
        sample: Tensor,
        extra: Mapping[Place, Any],
        patch: int,
    ) -> Any:
        """Step a copy, and pass it the results besides latents from its last step of this patch."""
        own_extra = dict(extra)
        for place, value in extra.items():
            if isinstance(value, PatchExtra):
                own_extra[place] = value.select(self._extra_results.get(patch, ()))
        result = call.make(scheduler.step, prediction, sample, own_extra)
        self._extra_results[patch] = result[1:] if isinstance(result, tuple) else ()
        return result


def check_size(scheduler: Any, before: Tensor, after: Tensor) -> None:
    """Raise `StateError` if a scheduler changes the size of latents that are cut into patches."""
    if after.shape != before.shape:
        raise StateError(
            f"{type(scheduler).__name__} makes latents of shape {tuple(after.shape)} of those of "
            f"{tuple(before.shape)}, and patches belong to one size; use {suggest_whole_images()}"
        )


def is_custom_scheduler(scheduler: Any) -> bool:
    """Return whether a scheduler may have code of the user's own.

    The schedulers of diffusers step each place of the latents by itself.
    """
    modules = set[str]()
    for cls in type(scheduler).__mro__:
        step = vars(cls).get("step")
        modules |= {cls.__module__, getattr(step, "__globals__", {}).get("__name__", cls.__module__)}
    roots = {module.partition(".")[0] for module in modules}
    return not roots <= {"diffusers", "builtins"} or bool(list_replaced_methods(scheduler))


class PatchExtra:
    """A placeholder for a patch step's results besides latents; the pipeline may only pass it to the next step."""

    def __init__(self, index: int) -> None:
        self._index = index

    def select(self, extra_results: Sequence[Any]) -> Any:
        """Return the value of one patch; None if the patch was not stepped yet."""
        if self._index < len(extra_results):
            return extra_results[self._index]
        return None

    def __getattr__(self, name: str) -> Any:
        raise StateError(
            f"the pipeline takes more than latents from its scheduler, which has made it of one patch here; use "
            f"{suggest_whole_images()}"
        )


def _is_like(value: Any, sample: Tensor) -> bool:
    """Return whether an argument of `step` has the first dimensions of the latents, like a timestep for each token."""
    if not isinstance(value, Tensor) or not 1 < value.ndim <= sample.ndim:
        return False
    return value.shape == sample.shape[: value.ndim]


def extract_sample(result: Any) -> Tensor:
    """Return the new sample from a scheduler's result: a tuple, an output object, or the sample itself."""
    if isinstance(result, Tensor):
        return result
    sample: Tensor = result[0] if isinstance(result, tuple) else result.prev_sample
    return sample


class StepResult(tuple[Any, ...]):
    """The results of a scheduler's step, with the new latents first, where nearly all pipelines read them.

    The other results come from the part that this rank stepped. A pipeline that unpacks them gets the result of
    `complete`.
    """

    complete: Callable[[Sequence[Any]], Sequence[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter((self[0], *self.complete(self[1:])))


def replace_latents(result: Any, latents: Tensor, complete: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    """Put other latents into a scheduler's result, a tuple or output object.

    See `StepResult` for `complete`.
    """
    if isinstance(result, Tensor):
        return latents
    if not isinstance(result, tuple):
        return type(result)(prev_sample=latents)
    step_result = StepResult((latents, *result[1:]))
    step_result.complete = complete
    return step_result


Drive = Callable[[tuple[Tensor, ...]], Iterator[Tensor]]
"""Yields the timestep of each micro-step, given the timesteps of the steps."""


class StepTimesteps(Tensor):
    """A scheduler's timesteps that iterate in micro-steps, like their slices `[k:]` and `[:n]`, which count steps.

    Everything else (length, other indexing, arithmetic) is as in a plain tensor. So is a slice of one timestep that has
    an end: pipelines pass `timesteps[:1]` to schedulers that add noise, which iterate it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    drive: Drive

    @classmethod
    def wrap_timesteps(cls, plain: Tensor, drive: Drive) -> StepTimesteps:
        """Wrap plain timesteps, which `drive` iterates."""
        timesteps = plain.as_subclass(cls)
        timesteps.drive = drive
        return timesteps

    def to_plain_tensor(self) -> Tensor:
        """Return the timesteps as an ordinary tensor."""
        return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.to_plain_tensor().clone()

    def __getitem__(self, index: Any) -> Tensor:
        part = self.to_plain_tensor()[index]
        if not isinstance(index, slice) or index.step not in (None, 1):
            return part
        if index.stop is not None and len(part) <= 1:
            return part
        return StepTimesteps.wrap_timesteps(part, self.drive)

    def __iter__(self) -> Iterator[Tensor]:
        return self.drive(self.to_plain_tensor().unbind(0))
