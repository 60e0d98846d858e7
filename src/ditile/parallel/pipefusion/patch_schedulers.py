"""One deep copy of the stock scheduler per patch: no scheduler is rewritten, and multistep history stays right.

A stochastic scheduler is detected, not listed: if the first step of a generation moves a random generator, every patch
is stepped on the full tensors from the same saved state and only its slice is kept, which is what the plain pipeline
draws. So is a scheduler of the user's own, which may compute with statistics of a whole prediction. `StepTimesteps` are
the timesteps that a pipeline iterates, or slices, and that yield micro-steps.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ditile.model.hooks.overrides import list_replaced_methods
from ditile.model.hooks.pieces import Piece
from ditile.parallel import rng_state
from ditile.plan.errors import ModelError, StateError

STEP_ARGUMENTS = ("model_output", "timestep", "sample")


Place = int | str
"""Where a call has an argument: the number of a positional one, or the name of a keyword."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of a scheduler's `step`, in the form in which the pipeline made it: a step may name its arguments anyhow.

    Attributes:
        prediction, timestep, sample: what is stepped.
        places: where the call has these three.
        others: its other arguments, by their places.
        generator: what it draws random numbers from, if it says so.
    """

    prediction: Tensor
    timestep: Any
    sample: Tensor
    places: Sequence[Place]
    others: Mapping[Place, Any]
    generator: Any = None

    def make(self, step: Callable[..., Any], prediction: Tensor, sample: Tensor, others: Mapping[Place, Any]) -> Any:
        """Makes the call of a step on these tensors."""
        values = dict(zip(self.places, (prediction, self.timestep, sample), strict=True))
        values.update(others)
        named = {}
        for place, value in values.items():
            if isinstance(place, str):
                named[place] = value
        positional = map(values.__getitem__, range(len(values) - len(named)))
        return step(*positional, **named)


class StepSignature:
    """Says which arguments of a scheduler's `step` are the prediction, the timestep and the latents.

    Args:
        scheduler: the stock scheduler.

    Raises:
        ModelError: if no class of it names its parameters.
    """

    def __init__(self, scheduler: Any) -> None:
        parameters = find_step_signature(scheduler)
        order = list(parameters.parameters)
        self._roles = [(order.index(name), name) for name in find_argument_names(parameters)]
        self._places: dict[int, list[Place]] = {}  # of the three, by the number of positional arguments
        self._generator = (order.index("generator") if "generator" in order else len(order), "generator")

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepCall:
        """Tells the arguments of a call apart.

        Raises:
            TypeError: if one of the three is missing.
        """
        count = len(args)
        others: dict[Place, Any] = dict(enumerate(args))
        others.update(kwargs)
        places = self._places.get(count)
        if places is None:
            places = self._places[count] = [index if index < count else name for index, name in self._roles]
        try:
            prediction, timestep, sample = map(others.pop, places)
        except KeyError as error:
            raise TypeError(f"scheduler.step() is called without {error}") from error
        # Not one whose way through the pipeline is watched.
        if type(prediction) is not Tensor:
            prediction = prediction.as_subclass(Tensor)
        index, name = self._generator
        generator = others.get(index, others.get(name))
        return StepCall(prediction, timestep, sample, places, others, generator)


class PatchSchedulers:
    """Copies of one scheduler, made right after its `set_timesteps`.

    Args:
        scheduler: the stock scheduler.
        hide: attributes of the instance that must not be copied (overrides).
        timesteps: the plain timesteps.
        patches: M, or 1 where no patch is stepped.
        steps: how many steps will be made.
    """

    def __init__(self, scheduler: Any, hide: Iterable[str], timesteps: Tensor, patches: int, steps: int) -> None:
        kept = {name: value for name, value in vars(scheduler).items() if name not in set(hide)}
        kept["timesteps"] = timesteps
        self._copies = [_clone_scheduler(scheduler, kept) for _ in range(patches)]
        has_lookup = hasattr(scheduler, "_init_step_index")
        self._lacks_index = has_lookup and getattr(self._copies[0], "_step_index", 0) is None
        # Schedulers of order 2 draw random numbers in their second stage only.
        self._probes = min(getattr(scheduler, "order", 1), steps)
        # What a user's own scheduler does is not known: it may draw later, or compute with the whole prediction.
        self._is_custom = is_custom_scheduler(scheduler)
        self._steps_whole = True if self._is_custom else None
        self._latest = patches  # the patch that was stepped last; some may have nothing to step
        self._saved: list[Tensor] = []
        self._drawn: list[Tensor] = []
        self._shadowed: Any = None
        self._extras: dict[int, Sequence[Any]] = {}

    def sync_step_index(self, scheduler: Any) -> None:
        """Tells the stock scheduler, which is never stepped, where it would be: in-painting pipelines read it there."""
        if "_step_index" in vars(scheduler):
            scheduler._step_index = self._copies[self._latest % len(self._copies)]._step_index

    def scale_sample(self, x: Tensor, timestep: Any, patches: Sequence[int], *, read: bool) -> Tensor:
        """`scale_model_input` by the copies of `patches`; where the result is not read, on a single number."""
        if self._lacks_index:
            self._find_first_index(timestep)
        unread = x if self._is_custom else x.new_zeros(1)
        scaled = self._copies[patches[0]].scale_model_input(x if read else unread, timestep)
        for patch in patches[1:]:
            self._copies[patch].scale_model_input(unread, timestep)
        return scaled if read else x

    def step_on_corner(self, call: StepCall, sample: Tensor, *, closes: bool) -> Any:
        """Steps the first copy on a corner of the tensors, to keep its counter right where no result is needed.

        Args:
            call: of `scheduler.step`.
            sample: the latents.
            closes: whether a step ends here; before that a result is only looked at for its form.

        Returns:
            The scheduler's result; its dtype is that of a real step.
        """
        if self._lacks_index:
            self._find_first_index(call.timestep)
        if closes or self._shadowed is None:
            generators = rng_state.list_generators(call.generator, sample.device)
            saved = rng_state.read_generator_states(generators)
            # A user's own scheduler gets all of them: it may ask for their shape, and change it.
            length = None if self._is_custom else 1
            corner = (slice(None),) + (slice(0, length),) * (sample.ndim - 1)
            cut = {
                place: value[corner[: value.ndim]] if _is_like(value, sample) else value
                for place, value in call.others.items()
            }
            scheduler = self._copies[0] if closes else copy.deepcopy(self._copies[0])
            extras = self._extras.get(-1)
            prediction = call.prediction[corner]
            self._shadowed = self._step_copy(scheduler, call, prediction, sample[corner], cut, -1)
            if not closes:
                self._extras[-1] = extras or ()
            rng_state.restore_generators(generators, saved)
        return self._shadowed

    def step_patch(self, patch: int, call: StepCall, sample: Tensor, piece: Piece) -> tuple[Tensor, Any]:
        """Steps one patch. Returns its new latents and the scheduler's own result.

        Args:
            patch: which.
            call: of `scheduler.step`, with the full prediction, fresh at the patch.
            sample: the latents, also full.
            piece: where the patch is.

        Raises:
            StateError: if the scheduler draws random numbers now and drew none in the first step, or makes latents of
                another size.
        """
        if self._lacks_index:
            self._find_first_index(call.timestep)
        generators = rng_state.list_generators(call.generator, sample.device)
        before = rng_state.read_generator_states(generators)
        is_first, self._latest = patch <= self._latest, patch
        if not self._steps_whole:
            # The scheduler may keep them, and the tensors themselves are written over in the next step.
            part = piece.take(call.prediction).clone(), piece.take(sample).clone()
            cut = {
                place: piece.take_prefix(value) if _is_like(value, sample) else value
                for place, value in call.others.items()
            }
            if self._steps_whole is None:
                self._steps_whole = self._draws_numbers(patch, call, part, cut, generators)
        if not self._steps_whole:
            result = self._step_copy(self._copies[patch], call, *part, cut, patch)
            stepped = extract_sample(result)
            if stepped.shape != part[1].shape:
                raise_changed_size(self._copies[patch], part[1], stepped)
            if rng_state.has_state_change(generators, before):
                raise StateError(
                    f"{type(self._copies[patch]).__name__} draws random numbers now and drew none in the first step; "
                    "use patches=1, or another scheduler"
                )
            return stepped, result
        if is_first:
            self._saved = before
        rng_state.restore_generators(generators, self._saved)
        whole = call.prediction.clone(), sample.clone()
        result = self._step_copy(self._copies[patch], call, *whole, call.others, patch)
        stepped = extract_sample(result)
        if stepped.shape != sample.shape:
            raise_changed_size(self._copies[patch], sample, stepped)
        self._drawn = rng_state.read_generator_states(generators)
        return piece.take(stepped), result

    def _draws_numbers(
        self,
        patch: int,
        call: StepCall,
        part: tuple[Tensor, Tensor],
        cut: Mapping[Place, Any],
        generators: Sequence[torch.Generator],
    ) -> bool:
        """Whether the first steps of a copy move a random generator; leaves all as it was."""
        before = rng_state.read_generator_states(generators)
        probe = copy.deepcopy(self._copies[patch])
        for _ in range(self._probes):
            self._step_copy(probe, call, *part, cut, patch)
        self._extras.pop(patch, None)
        has_drawn = rng_state.has_state_change(generators, before)
        rng_state.restore_generators(generators, before)
        return has_drawn

    def skip_patch(self, call: StepCall, device: torch.device) -> None:
        """A patch in which nothing of these latents is stepped: random numbers go on behind those of the step."""
        if self._steps_whole and self._drawn:
            rng_state.restore_generators(rng_state.list_generators(call.generator, device), self._drawn)

    def _find_first_index(self, timestep: Any) -> None:
        """Where the first timestep is, which a host waits for its device to know: once, and not for each copy."""
        self._lacks_index = False
        self._copies[0]._init_step_index(timestep)
        for each in self._copies[1:]:
            each._step_index = self._copies[0]._step_index

    def _step_copy(
        self,
        scheduler: Any,
        call: StepCall,
        prediction: Tensor,
        sample: Tensor,
        others: Mapping[Place, Any],
        patch: int,
    ) -> Any:
        """Steps a copy; what it made of this patch besides latents in the step before is given to it again."""
        extras = self._extras.get(patch, ())
        own = dict(others)
        for place, value in others.items():
            if isinstance(value, PatchExtra):
                own[place] = value.select(extras)
        result = call.make(scheduler.step, prediction, sample, own)
        self._extras[patch] = result[1:] if isinstance(result, tuple) else ()
        return result


def raise_changed_size(scheduler: Any, before: Tensor, after: Tensor) -> NoReturn:
    """Raises `StateError` of a scheduler that makes latents of another size where these are cut into patches."""
    raise StateError(
        f"{type(scheduler).__name__} makes latents of shape {tuple(after.shape)} of those of {tuple(before.shape)}, "
        "and patches belong to one size; use a plan without pipefusion and patches, such as ulysses"
    )


def is_custom_scheduler(scheduler: Any) -> bool:
    """Whether code of a scheduler may be a user's own, and not of diffusers, whose steps take each place by itself."""
    modules = set[str]()
    for cls in type(scheduler).__mro__:
        step = vars(cls).get("step")
        modules |= {cls.__module__, getattr(step, "__globals__", {}).get("__name__", cls.__module__)}
    roots = {module.partition(".")[0] for module in modules}
    return not roots <= {"diffusers", "builtins"} or bool(list_replaced_methods(scheduler))


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
    steps = [vars(cls)["step"].__get__(scheduler) for cls in type(scheduler).__mro__ if "step" in vars(cls)]
    # What is put around a scheduler may hand on its step.
    for step in steps or [scheduler.step]:
        signature = inspect.signature(step)
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
    """The new sample of a scheduler's result: a tuple, an output object, or the sample itself."""
    if isinstance(result, Tensor):
        return result
    sample: Tensor = result[0] if isinstance(result, tuple) else result.prev_sample
    return sample


class StepResult(tuple[Any, ...]):
    """The results of a scheduler's step: the new latents first, as nearly all pipelines index it.

    The others are made of what this rank stepped. A pipeline that unpacks them gets what `whole` makes of them.
    """

    whole: Callable[[Sequence[Any]], Sequence[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter((self[0], *self.whole(self[1:])))


def replace_latents(result: Any, latents: Tensor, whole: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    """A scheduler's result with other latents in it.

    Args:
        result: tuple or output object.
        latents: of all images.
        whole: makes the other results whole from those that were made here.
    """
    if isinstance(result, Tensor):
        return latents
    if not isinstance(result, tuple):
        return type(result)(prev_sample=latents)
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
