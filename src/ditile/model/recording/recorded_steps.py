"""Recorded steps: a call of a model is recorded, and then played in later steps if only numbers differ.

A call is identified by its place (model, branch, patch, stale keys or not) and its form (shapes, types and plain values
of its arguments). The first call of a form is watched for obstacles to recording. The second call runs as code and is
then captured, without its messages; the first play is compared with the code. Later calls are played. Arguments of a
call are copied to memory that stays in place, and its result is cloned. The first step of a generation is never
recorded: it finds the forms of calls. Blocks skipped by a cache are part of the place; if numbers of the call decide on
them, the call runs as code.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.distributed.recording.segments import OperatorWatch, list_tensors
from ditile.distributed.recording.tape import CodeCall, Recording, Segments, Tape
from ditile.model.fingerprint import fingerprint
from ditile.model.hooks.generation import Generation
from ditile.model.recording.first_play import FirstPlay, TensorKeeper
from ditile.model.recording.kept_tapes import CallTape, KeptTapes, StaticInput
from ditile.model.recording.recorded_calls import RecordedCalls
from ditile.model.recording.step_outputs import Outputs, StepOutputs
from ditile.model.recording.survey import list_weight_memory, survey_model
from ditile.plan.errors import DitileError

LOG = logging.getLogger("ditile")

NUM_PREPARING_CALLS = 2
"""Calls of a form that run as code before the first call is played."""
UNPLAYED_FORMS = 16
"""Recording stops at a place after this many forms in a row that were never played."""
LOOKS = 2
"""The maximum number of watched calls of a form: the first may have a problem that a later one does not have."""

CACHE_DECIDES = "a cache decides by numbers of the call, or has none yet"
FIRST_STEP = "the first step"
FIRST_KEYS = "it makes its first keys"
WATCHED = "the first call of its form"
NO_ROOM = "tapes hold as much as they may"
UNEQUAL = "a play differed from its code"
CAPTURE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    DitileError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions during a capture, which repeats a finished call: only the tape is lost."""

_PLAIN_LEAVES = (Tensor, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
"""The only types of arguments and results in calls that are recorded."""


class Invocation(NamedTuple):
    """A call of a model in a generation, by its code."""

    now: Generation
    model: nn.Module
    forward: Callable[..., Any]
    args: Any
    kwargs: Any

    def run(self) -> Any:
        """Make the call."""
        return self.forward(*self.args, **self.kwargs)


class BlockCache(Protocol):
    """Leaves out blocks of a model, see `ditile.cache`."""

    def prepare_call(self, args: Any, kwargs: Any) -> Hashable | None:
        """Decide on a call before it is made; None if numbers of the call decide."""

    def list_stored_keys(self) -> Sequence[Any] | None:
        """List the values stored by blocks in a recorded call; None if some were stored for the first time."""

    def repeat_call(self) -> AbstractContextManager[None]:
        """Repeat the last call within the context, from the state before that call, without noting anything."""

    def end_played_call(self, stored: Sequence[Any]) -> None:
        """Note that a tape was played instead of the call."""


class RecordedSteps:
    """The recorded calls of a runner, which last from one call of the runner to the next.

    Args:
        make_segments: makes the capturer of a call.
        limit_bytes: limit for the memory of tapes, with the keys and values kept for them.
        has_room: (bytes of all pools, of one pool) -> whether one more call can be captured in that pool.
        checks: whether skipped copies of inputs are checked.

    Attributes:
        refusal: why calls of the current generation cannot be recorded; empty if they can.
        caches: the cache of blocks of each model.
        scopes: contexts that hide remembered values, which would tie a tape to memory of other calls.
        kept_buffers: memory for keys and values that stays in place between generations.
        num_recorded, num_played: numbers of calls so far.
        problems: reason -> number of calls that were not recorded.
        preparations: reason -> number of calls that ran as code to prepare recording.
        failure: why nothing is recorded any more: a failed recording, or a lack of memory.
    """

    def __init__(
        self,
        make_segments: Callable[[], Segments],
        limit_bytes: int = sys.maxsize,
        has_room: Callable[[int, int], bool] = lambda all_bytes, own_bytes: True,
        *,
        checks: bool = False,
    ) -> None:
        self._checks = checks
        self._tapes = KeptTapes(make_segments, limit_bytes, has_room)
        self.kept_buffers = self._tapes.kept_buffers
        self.refusal = ""
        self.caches: Mapping[nn.Module, BlockCache] = {}
        self.scopes: Sequence[Callable[[], AbstractContextManager[None]]] = ()
        self.num_recorded = 0
        self.num_played = 0
        self.problems: Counter[str] = Counter()
        self.preparations: Counter[str] = Counter()
        self.failure = ""
        self._counts_before = (0, 0, Counter[str]())
        # By place, the forms in a row that were never played: a plain number, like a timestep, may differ in each step.
        self._unplayed: Counter[Hashable] = Counter()
        self._models: dict[int, tuple[object, Any, str]] = {}  # id -> (epoch, addresses of weights, problem)
        self._shared = StepOutputs()

    def begin_generation(self) -> None:
        """Begin a call of the pipeline."""
        self._tapes.begin_generation()
        self._counts_before = (self.num_recorded, self.num_played, self.problems + self.preparations)

    def end_generation(self) -> None:
        """End a call of the pipeline, and forget what its last step shared."""
        self._tapes.end_generation()
        self._shared.forget_step()

    def summarize_generation(self) -> RecordedCalls:
        """Summarize the recordings since the generation began."""
        recorded, played, reasons = self._counts_before
        recorded = self.num_recorded - recorded
        played = self.num_played - played
        as_code = dict(self.problems + self.preparations - reasons)
        calls = recorded + played + sum(as_code.values())
        return RecordedCalls(calls, recorded, played, as_code, self._tapes.num_bytes)

    def release(self) -> None:
        """Forget all recorded calls, and free their memory."""
        self._tapes.clear()
        self._unplayed.clear()
        self._models.clear()
        self._shared = StepOutputs()

    def reset(self) -> None:
        """Forget all recorded calls, and any failed recording: later calls are recorded again."""
        self.release()
        self.failure = ""

    def run_call(self, now: Generation, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of a model: with its code, recorded, or played."""
        model_call = Invocation(now, model, forward, args, kwargs)
        if now.is_surveyed or now.is_dry:
            return model_call.run()
        if self.failure or self.refusal:
            return self._run_code(self.failure or self.refusal, model_call)
        reason = _explain_code(now)
        if reason:
            return self._prepare_call(reason, model_call)
        decision: Hashable = ()
        if model in self.caches:
            # A cache has nothing to reuse yet.
            if _is_first_step(now):
                return self._prepare_call(FIRST_STEP, model_call)
            decision = self.caches[model].prepare_call(args, kwargs)
            if decision is None:
                return self._run_code(CACHE_DECIDES, model_call)
        return self._run_decided(decision, model_call)

    def _run_decided(self, decision: Hashable, model_call: Invocation) -> Any:
        """Make a call whose blocks follow a cache's decision. Each decision has its own tape."""
        now, model, _, args, kwargs = model_call
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(leaf, _PLAIN_LEAVES) for leaf in leaves):
            return self._run_code("an argument is neither a tensor nor a number", model_call)
        place = (*_describe_place(now, model), decision)
        form = (
            spec,
            fingerprint(leaves, "memory"),
            now.tokens.layout,
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
        )
        call = self._tapes.find_call((place, form))
        if _is_first_call(now, model) and not (call and self._can_play_at_once(call, now, model)):
            return self._prepare_call(FIRST_STEP, model_call)
        if call is None and self._unplayed[place] >= UNPLAYED_FORMS:
            return self._run_code("its arguments are others in each step", model_call)
        if call is None:
            # The size of the images is that of the model's first tensor argument, its latents.
            size = next((leaf.shape for leaf in leaves if isinstance(leaf, Tensor)), None)
            call = CallTape(place, size)
            self._tapes.add_call((place, form), call)
        self._shared.enter_call(now, model)
        if call.num_looks == 0 or (call.problem and not call.is_given_up and call.num_looks < LOOKS):
            return self._look_at_call(call, model_call)
        if call.epoch is not now.memory.epoch:
            self._compare_addresses(call, now, model)
        problem = call.problem or call.model_problem
        if problem:
            return self._run_code(problem, model_call)
        if call.tape is None and not call.made_stores <= now.memory.copy_store_states(now.branch).keys():
            # New key stores would be in memory shared by tapes.
            return self._run_code(FIRST_KEYS, model_call)
        if call.tape is None and not self._tapes.make_room_to_capture(call.size):
            return self._run_code(NO_ROOM, model_call)
        if call.tape is not None and not call.makers <= self._shared.tapes:
            return self._replace_lost_tape(call, model_call)
        # Between two steps a callback may change numbers, so inputs are copied again in each step.
        moment = (now.memory.epoch, now.micro_step.step)
        call.inputs, statics = self._fill_inputs((id(model), now.branch), leaves, moment)
        if call.tape is None:
            static_args, static_kwargs = pytree.tree_unflatten(statics, spec)
            return self._record_call(call, model_call, model_call._replace(args=static_args, kwargs=static_kwargs))
        self._play_call(call, call.tape, now, model)
        return pytree.tree_map_only(Tensor, torch.clone, call.result)

    def _play_call(self, call: CallTape, tape: Tape, now: Generation, model: nn.Module) -> None:
        now.memory.mark_segments(call.marks, now.micro_step.step)
        tape.play()
        self._shared.note_play(tape)
        if model in self.caches:
            self.caches[model].end_played_call(call.stored)
        self._unplayed[call.place] = 0
        self.num_played += 1

    def _can_play_at_once(self, call: CallTape, now: Generation, model: nn.Module) -> bool:
        """Return whether a call in the first step of a generation equals an earlier one except for its arguments."""
        if call.tape is None or call.marks:
            return False
        # With several stages, the code must run in the first step, to learn the form of their messages.
        if now.schedule.stages > 1:
            return False
        addresses, problem = self._look_at_model(now, model)
        if problem or call.addresses[0] != addresses:
            return False
        now.memory.adopt_buffers(call.addresses[1])
        return bool(call.addresses[1] == now.memory.list_addresses(now.branch, call.buffers))

    def _run_code(self, problem: str, model_call: Invocation) -> Any:
        self.problems[problem] += 1
        return model_call.run()

    def _prepare_call(self, reason: str, model_call: Invocation) -> Any:
        self.preparations[reason] += 1
        return model_call.run()

    def _replace_lost_tape(self, call: CallTape, model_call: Invocation) -> Any:
        """Make a call by its code, because its tape reads outputs of a tape that was not played in this step."""
        call.num_lost += 1
        if call.num_lost > LOOKS:
            # From now on the call computes everything it needs, so it is watched again.
            call.drop_tape()
            return self._look_at_call(call, model_call)
        if self._shared.tapes:
            # Other tapes have computed such outputs, and the next recording will read those.
            call.drop_tape()
        return self._run_code("what it shares with other patches was not played", model_call)

    def note_code(self, reason: str) -> None:
        """Note a call made without the recorder."""
        self.preparations[reason] += 1

    def _look_at_call(self, call: CallTape, model_call: Invocation) -> Any:
        """Make a call that is watched: it loads kernels and shows obstacles to recording."""

        now = model_call.now
        self.preparations[WATCHED] += 1
        call.num_looks += 1
        watch = OperatorWatch()
        stores = now.memory.copy_store_states(now.branch).keys()
        shared: Outputs = {}
        if _shares_outputs(call, now):
            shared = self._shared.looked
        inputs = list_tensors((model_call.args, model_call.kwargs))
        with self._hide_remembered(now, shared), watch, CodeCall().listen():
            result = model_call.run()
        call.problem = watch.problem
        call.made_stores |= now.memory.copy_store_states(now.branch).keys() - stores
        if watch.written & {tensor.untyped_storage().data_ptr() for tensor in inputs}:
            # A tape reads copies, which are filled again only if the pipeline's tensors have changed.
            call.problem = "it writes into its arguments"
        if len({tensor.device for tensor in inputs}) > 1:
            # Values computed on the CPU would never change.
            call.problem = "its arguments are on several devices"
        if not all(isinstance(leaf, _PLAIN_LEAVES) for leaf in pytree.tree_leaves(result)):
            call.problem = "its result is neither a tensor nor a number"
        if not call.problem:
            self._unplayed[call.place] += 1
        return result

    def _record_call(self, call: CallTape, model_call: Invocation, static_call: Invocation) -> Any:
        """Make a call by its code, and a tape of it. Return the result of the code.

        Args:
            static_call: the same call with arguments in memory that stays.
        """
        now = model_call.now
        model = model_call.model
        states = now.memory.copy_store_states(now.branch)
        survey = survey_model(model)
        keeper = TensorKeeper()
        watch = OperatorWatch(keeper.copy_tensor)
        code = CodeCall(keeper.copy_tensor)
        with watch, code.listen():
            result = model_call.run()
        problem = watch.problem
        states_after = now.memory.copy_store_states(now.branch)
        # A tape cannot create key stores.
        if states_after.keys() != states.keys():
            problem = FIRST_KEYS
        if not problem and model in self.caches:
            stored = self.caches[model].list_stored_keys()
            call.stored = stored or ()
            if stored is None:
                problem = "a cache remembers something for the first time"
        if survey_model(model) != survey:
            # For example a model that counts its calls, or changed scales of LoRAs.
            problem = "it changes its own settings"
        if not problem:
            first_play = FirstPlay(code, result, watch.overwritten, keeper)
            # Messages of the code read and write memory that is written by the tape too.
            for wait in filter(None, code.under_way):
                wait()
            try:
                now.memory.restore_store_states(states)
                problem = self._capture_call(call, static_call, first_play)
            except CAPTURE_ERRORS as error:
                self.release()
                self.failure = f"a recording failed: {type(error).__name__}"
                LOG.warning("%s (%s); steps run as code from now on", self.failure, error)
                problem = self.failure
            finally:
                now.memory.restore_store_states(states_after)
        if problem:
            call.give_up(problem)
            self.problems[problem] += 1
        else:
            self.num_recorded += 1
            assert call.tape is not None
            if self._tapes.enforce_limit():
                self._shared.note_play(call.tape)
            else:
                call.give_up(NO_ROOM)
                self._tapes.enforce_limit()
        return result

    def _capture_call(self, call: CallTape, static_call: Invocation, first_play: FirstPlay) -> str:
        """Make a tape of a call made by its code, and play it once. Return why it cannot be used, or nothing."""
        now = static_call.now
        model = static_call.model
        memory = now.memory
        recording = Recording(self._tapes.get_segments(call.size), first_play.code, call.inputs[0].tensor.device)
        shared: Outputs = {}
        call.makers = frozenset()
        if _shares_outputs(call, now):
            # The call depends on the outputs of other patches' tapes in this step.
            call.makers = frozenset(self._shared.tapes)
            shared = self._shared.list_outputs()
        watch = OperatorWatch()
        with ExitStack() as stack:
            stack.enter_context(self._hide_remembered(now, shared))
            marks = stack.enter_context(memory.list_marks(now.micro_step.step))
            call.buffers = stack.enter_context(memory.note_asked_buffers())
            if model in self.caches:
                stack.enter_context(self.caches[model].repeat_call())
            stack.enter_context(watch)
            stack.enter_context(recording.record_within())
            result = static_call.run()
        if now.micro_step.patch is not None:
            self._shared.keep_outputs(recording, shared)
        made = result
        if not now.is_read:  # nobody reads the result of an earlier stage, so it need not be equal
            made = first_play.result
        difference = first_play.find_difference(recording, made, watch.made)
        if difference:
            place = f"{type(model).__name__}, branch {now.branch}, patch {now.micro_step.patch}, size {call.size}"
            LOG.warning("%s in %s: %s; such calls run as code", UNEQUAL, place, difference)
            return UNEQUAL
        # The tape holds what it reads; weights and keys are left out, because a tape is not played if these move.
        known = {tensor.untyped_storage().data_ptr() for tensor in list_weight_memory(model)}
        known.update(memory.list_storage_addresses(now.branch))
        recording.tape.held.append([tensor for address, tensor in watch.read.items() if address not in known])
        call.result = result
        call.marks = marks
        call.tape = recording.tape
        call.addresses = self._list_addresses(call, now, model)
        return ""

    @contextmanager
    def _hide_remembered(self, now: Generation, shared: Outputs) -> Iterator[None]:
        """Hide remembered values, except shared ones, within the context: a tape would read another call's memory."""
        with ExitStack() as stack:
            stack.enter_context(now.memory.hide_remembered(shared))
            for scope in self.scopes:
                stack.enter_context(scope())
            yield

    def _fill_inputs(self, owner: Hashable, leaves: list[Any], moment: Hashable) -> tuple[list[StaticInput], list[Any]]:
        """Copy tensors to memory that stays; return that memory, and the leaves with it in place of tensors."""
        inputs: list[StaticInput] = []
        statics = list(leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                static = self._tapes.get_static((owner, index), leaf)
                static.fill(leaf, moment, checks=self._checks)
                inputs.append(static)
                statics[index] = static.tensor
        return inputs, statics

    def _compare_addresses(self, call: CallTape, now: Generation, model: nn.Module) -> None:
        """Forget a tape if memory read or written by it has moved, and look at the model again."""
        call.epoch = now.memory.epoch
        _, call.model_problem = self._look_at_model(now, model)
        if call.tape is not None:
            # Perhaps no call has asked for the tape's buffers yet in this generation.
            now.memory.adopt_buffers(call.addresses[1])
        addresses = self._list_addresses(call, now, model)
        if addresses != call.addresses:
            call.drop_tape()
        call.addresses = addresses

    def _list_addresses(self, call: CallTape, now: Generation, model: nn.Module) -> Any:
        addresses, _ = self._look_at_model(now, model)
        return addresses, now.memory.list_addresses(now.branch, call.buffers)

    def _look_at_model(self, now: Generation, model: nn.Module) -> tuple[Any, str]:
        """Return the result of `survey_model`, which runs once in an epoch for all calls of the model."""
        epoch, addresses, problem = self._models.get(id(model), (None, None, ""))
        if epoch is not now.memory.epoch:
            addresses, problem = survey_model(model)
            self._models[id(model)] = (now.memory.epoch, addresses, problem)
        return addresses, problem


def _shares_outputs(call: CallTape, now: Generation) -> bool:
    """Return whether a call may read outputs of other patches' calls in the same step."""
    return now.micro_step.patch is not None and call.num_lost <= LOOKS


def _explain_code(now: Generation) -> str:
    """Return why a call runs by its code although later ones may be recorded, or nothing."""
    # `_describe_place` does not tell calls of some rows, or of stages that compute a step together, from others.
    if now.batch_range is not None:
        return "a part of a batch"
    if now.micro_step.patch is None and now.shares.warmup_split is not None:
        return "several ranks share the step"
    # Autocast remembers the weights that it has cast, in memory of the call.
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    return ""


def _is_first_step(now: Generation) -> bool:
    return now.calls is None or now.micro_step.step == 0


def _is_first_call(now: Generation, model: nn.Module) -> bool:
    """Return whether a model is called for the first time, and so makes constants; it may be in mid-run, as in Wan."""
    begun = now.memory.begun_models
    key = (model, now.branch)
    is_first = _is_first_step(now)
    # `begun` is empty if no call so far reached this function, see `_explain_code`.
    if begun and key not in begun:
        is_first = True
    if is_first:
        begun.add(key)
    return is_first


def _describe_place(now: Generation, model: nn.Module) -> tuple[Hashable, ...]:
    # Ranks of DistriFusion send no keys in the last step; a patch writes its keys alike in every step.
    keeps_keys = now.keeps_keys and now.micro_step.patch is None
    return (
        id(model),
        now.branch,
        now.micro_step.patch,
        now.token_patch,
        now.is_stale,
        keeps_keys,
        now.is_whole,
        now.memory.list_incoming_layers(now.branch),
    )
