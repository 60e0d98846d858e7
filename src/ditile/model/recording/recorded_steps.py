"""Recorded steps: what a call of a model did is played in later steps, as long as nothing but numbers differs.

A call is known by its place (model, branch, patch, stale keys or not) and its form (shapes, types and plain values of
its arguments). The first call of a form runs with a watch that looks for what cannot be recorded; the second one is
recorded; later ones are played. What a call is given is copied to memory that stays, and what it returns is cloned.
The first step of a generation is never recorded: it finds the forms of calls and what is constant.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.distributed.recording.segments import OperatorWatch, list_tensors
from ditile.distributed.recording.tape import NoSegments, Recording, Segments, Tape
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import GenerationMemory, KeptBuffers
from ditile.model.recording.step_outputs import Outputs, StepOutputs

FORMS_KEPT = 4
"""Forms of the calls of one place that are kept, such as prompts of a few lengths."""
UNPLAYED_FORMS = 16
"""Forms in a row that were dropped before they were played, after which a place is not recorded any more."""
ADAPTERS = "peft."
"""Modules of this package compute what their settings say, which may change between calls."""

LOOKS = 2
"""Calls of a form that are only watched, where the first one has a problem: it may be one of the first call alone."""

_READ_ADDRESS = operator.methodcaller("data_ptr")
_PLAIN_LEAVES = (Tensor, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
"""Arguments and results that are told apart by their values."""


class StaticInput:
    """Memory that stays as long as a tape reads it, and the tensor that was last copied to it."""

    def __init__(self, like: Tensor) -> None:
        # Written in calls of inference mode and of others.
        with torch.inference_mode(False):
            self.tensor = torch.empty_like(like, requires_grad=False)
        self._source: Tensor | None = None
        self._state: tuple[Any, ...] = ()

    def fill(self, source: Tensor) -> None:
        """Copies a tensor, unless it is the last one, unchanged."""
        # Inference tensors have no version, so their changes are not seen.
        if source.is_inference():
            self._source = None
            self._state = ()
            self.tensor.copy_(source)
            return
        state = (source.data_ptr(), source._version, source.shape, source.stride())
        if state != self._state:
            self.tensor.copy_(source)
        # Referenced here, so that no other tensor gets its memory and looks like it.
        self._source = source
        self._state = state


@dataclass(slots=True)
class ConstantInput:
    """A value that is constant in a generation, as a tape reads it.

    Attributes:
        leaves: its parts: numbers, and memory that stays for each tensor.
        statics: the same value in that memory.
    """

    leaves: list[Any]
    statics: Any

    def fill(self, value: Any) -> bool:
        """Copies the value of another generation; False where its numbers or shapes are others."""
        leaves = pytree.tree_leaves(value)
        if len(leaves) != len(self.leaves):
            return False
        for own, leaf in zip(self.leaves, leaves, strict=True):
            if not isinstance(own, StaticInput):
                if own != leaf:
                    return False
            elif not isinstance(leaf, Tensor) or (leaf.shape, leaf.dtype) != (own.tensor.shape, own.tensor.dtype):
                return False
            else:
                own.fill(leaf)
        return True


@dataclass(slots=True)
class CallTape:
    """The calls of one form.

    Attributes:
        problem: why they cannot be recorded; empty if they can.
        num_looks: calls that were watched.
        model_problem: why they cannot be recorded now, as adapters and hooks come and go.
        tape: what they do; None until it is recorded.
        inputs: memory for each tensor that a call is given.
        constant_keys: of what is constant in a generation, as the watched call read it.
        constants: the same as the tape reads it.
        marks: (branch and layer, segment, age) of the keys that are in the store after a call.
        result: what a call returns, in the tape's memory.
        addresses: of weights, keys and whatever stays from step to step.
        epoch: when the addresses were last compared, see `GenerationMemory`.
        is_played: whether it was of use.
        makers: tapes of other patches that must have been played before it in a step.
        num_lost: steps in which they were not.
    """

    problem: str = ""
    num_looks: int = 0
    model_problem: str = ""
    tape: Tape | None = None
    inputs: list[StaticInput] = field(default_factory=list)
    constant_keys: set[Hashable] = field(default_factory=set)
    constants: dict[Hashable, ConstantInput] = field(default_factory=dict)
    marks: list[tuple[tuple[int, str], int, int]] = field(default_factory=list)
    result: Any = None
    addresses: Any = None
    epoch: object = None
    is_played: bool = False
    makers: frozenset[Tape] = frozenset()
    num_lost: int = 0


class RecordedSteps:
    """The recorded calls of a runner, which outlive its calls.

    Args:
        make_segments: makes what captures a call.

    Attributes:
        scopes: contexts in which nothing is remembered that would tie a tape to memory of other calls.
        kept_buffers: keys and values, which stay where they are from generation to generation.
        has_played: whether the last call was played.
        num_recorded, num_played: calls so far.
        problems: why calls were not recorded, and how many.
        failure: the error of a recording, after which nothing is recorded.
    """

    def __init__(self, make_segments: Callable[[], Segments]) -> None:
        self._make_segments = make_segments
        self.scopes: Sequence[Callable[[], AbstractContextManager[None]]] = ()
        self.kept_buffers = KeptBuffers()
        self.has_played = False
        self.num_recorded = 0
        self.num_played = 0
        self.problems: dict[str, int] = {}
        self.failure = ""
        self._calls: dict[Hashable, OrderedDict[Hashable, CallTape]] = {}
        # Numbers among the arguments may differ in each step, as a timestep that is no tensor.
        self._unplayed: dict[Hashable, int] = {}
        # Recorded calls reference the memory they read, so memory that none reads is freed.
        self._statics: WeakValueDictionary[Hashable, StaticInput] = WeakValueDictionary()
        self._models: dict[int, tuple[object, Any, str]] = {}
        self._shared = StepOutputs()

    def release(self) -> None:
        """Forgets all recorded calls, and frees their memory."""
        self._calls.clear()
        self._unplayed.clear()
        self._models.clear()
        self._shared = StepOutputs()
        self.kept_buffers.clear()

    def run_call(self, now: Generation, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call of a model: with its code, recorded, or played."""
        self.has_played = False
        if _is_never_recorded(now):
            return forward(*args, **kwargs)
        if self.failure:
            return self._run_code(self.failure, forward, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(leaf, _PLAIN_LEAVES) for leaf in leaves):
            return self._run_code("an argument is no tensor and no number", forward, args, kwargs)
        place = _describe_place(now, model)
        form = (spec, *map(_describe_leaf, leaves), now.tokens.layout, *_describe_modes())
        call = self._find_call(place, form)
        if _is_first_step(now) and not (call and self._can_play_at_once(call, now, model)):
            return forward(*args, **kwargs)
        if call is None and self._unplayed.get(place, 0) >= UNPLAYED_FORMS:
            return self._run_code("its arguments are others in each step", forward, args, kwargs)
        if call is None:
            call = self._add_call(place, form)
        self._shared.enter_call(now, model)
        if call.num_looks == 0 or (call.problem and call.num_looks < LOOKS):
            return self._look_at_call(call, now, forward, args, kwargs)
        if call.epoch is not now.memory.epoch:
            self._compare_addresses(call, now, model)
        problem = call.problem or call.model_problem
        if problem:
            return self._run_code(problem, forward, args, kwargs)
        if not all(map(now.memory.has_constant, call.constant_keys)):
            return self._look_at_call(call, now, forward, args, kwargs)
        self._fill_constants(call, now.memory, model)
        if call.tape is not None and not call.makers <= self._shared.tapes:
            return self._replace_lost_tape(call, now, forward, args, kwargs)
        call.inputs = self._fill_inputs((id(model), now.branch), leaves)
        if call.tape is None:
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            self._record_call(call, now, model, forward, args, kwargs)
        else:
            now.memory.mark_segments(call.marks, now.micro_step.step)
            call.tape.play()
            self._shared.note_play(call.tape)
            call.is_played = True
            self.has_played = True
            self.num_played += 1
        return pytree.tree_map_only(Tensor, torch.clone, call.result)

    def _can_play_at_once(self, call: CallTape, now: Generation, model: nn.Module) -> bool:
        """Whether a call in the first step of a generation is the same as in an earlier one, but for its arguments."""
        if call.tape is None or call.constant_keys or call.marks:
            return False
        addresses, problem = self._look_at_model(now, model)
        if problem or call.addresses[0] != addresses:
            return False
        return now.memory.adopt_buffers(call.addresses[1])

    def _run_code(self, problem: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.problems[problem] = self.problems.get(problem, 0) + 1
        return forward(*args, **kwargs)

    def _replace_lost_tape(
        self, call: CallTape, now: Generation, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Makes a call whose tape reads what another one did not compute in this step."""
        call.num_lost += 1
        if call.num_lost > LOOKS:
            # From now on it computes all it needs, which is to be looked at.
            call.tape = None
            call.makers = frozenset()
            return self._look_at_call(call, now, forward, args, kwargs)
        if self._shared.tapes:
            # Others computed it, which the next recording will read.
            call.tape = None
        return self._run_code("what it shares with other patches was not played", forward, args, kwargs)

    def _find_call(self, place: Hashable, form: Hashable) -> CallTape | None:
        forms = self._calls.setdefault(place, OrderedDict())
        call = forms.get(form)
        # The hash of a form takes dozens of calls.
        if call is not None and len(forms) > 1:
            forms.move_to_end(form)
        return call

    def _add_call(self, place: Hashable, form: Hashable) -> CallTape:
        forms = self._calls[place]
        forms[form] = CallTape()
        if len(forms) > FORMS_KEPT:
            _, dropped = forms.popitem(last=False)
            self._unplayed[place] = 0 if dropped.is_played else self._unplayed.get(place, 0) + 1
        return forms[form]

    def _look_at_call(
        self, call: CallTape, now: Generation, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """The first call of a form: it loads kernels, and shows what cannot be recorded while nothing depends on it."""

        def note_constant(key: Hashable, value: Any) -> Any:
            call.constant_keys.add(key)
            return value

        call.num_looks += 1
        watch = OperatorWatch()
        constants = now.memory.read_constants_with(note_constant)
        shared: Outputs = {}
        if _shares_outputs(call, now):
            shared = self._shared.looked
        with self._hide_remembered(now, shared), constants, watch, Recording(NoSegments()).record_within():
            result = forward(*args, **kwargs)
        call.problem = watch.problem
        inputs = list_tensors((args, kwargs))
        if watch.written & {tensor.untyped_storage().data_ptr() for tensor in inputs}:
            # A tape is given copies, which are filled again only where the pipeline's tensors have changed.
            call.problem = "it writes into its arguments"
        if len({tensor.device for tensor in inputs}) > 1:
            # What is computed on the CPU would stay what it was.
            call.problem = "its arguments are on several devices"
        if not all(isinstance(leaf, _PLAIN_LEAVES) for leaf in pytree.tree_leaves(result)):
            call.problem = "its result is no tensor and no number"
        return result

    def _record_call(
        self,
        call: CallTape,
        now: Generation,
        model: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Makes a call, and a tape of it."""
        memory = now.memory
        written = memory.list_written_steps(now.branch)
        unknown: list[Hashable] = []

        def read_constant(key: Hashable, value: Any) -> Any:
            if key not in call.constants:
                unknown.append(key)
                return value
            return call.constants[key].statics

        watch = OperatorWatch()
        recording = Recording(self._make_segments()).record_within()
        shared = self._list_shared_outputs(call, now)
        with self._hide_remembered(now, shared), memory.read_constants_with(read_constant), watch, recording as tape:
            try:
                call.result = forward(*args, **kwargs)
            except Exception as error:
                self.failure = f"a recording failed: {type(error).__name__}"
                raise
        problem = watch.problem
        if unknown:
            problem = "its constants are others than in its first call"
        if memory.list_written_steps(now.branch).keys() != written.keys():
            # A tape does not make the stores of keys.
            problem = "it makes its first keys"
        if problem:
            # The call was made, and its tape is dropped.
            call.problem = problem
            call.num_looks = LOOKS
            call.makers = frozenset()
            return
        call.tape = tape
        if now.micro_step.patch is not None:
            self._shared.keep_outputs(tape, shared)
        call.marks = memory.list_marks(now.branch, now.micro_step.step, written)
        call.addresses = self._list_addresses(now, model)
        # Weights and keys may go: a tape whose addresses differ is not played.
        known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        known.update(memory.list_storage_addresses(now.branch))
        tape.held.append([tensor for address, tensor in watch.read.items() if address not in known])
        self.num_recorded += 1

    def _list_shared_outputs(self, call: CallTape, now: Generation) -> Outputs:
        """What the tapes of other patches have computed in this step; a call that is recorded depends on them."""
        call.makers = frozenset()
        if not _shares_outputs(call, now):
            return {}
        call.makers = frozenset(self._shared.tapes)
        return self._shared.list_outputs()

    @contextmanager
    def _hide_remembered(self, now: Generation, shared: Outputs) -> Iterator[None]:
        """Within it, nothing is remembered but what calls share: a tape would read the memory of another call."""
        with ExitStack() as stack:
            stack.enter_context(now.memory.hide_remembered(shared))
            for scope in self.scopes:
                stack.enter_context(scope())
            yield

    def _fill_inputs(self, owner: Hashable, leaves: list[Any]) -> list[StaticInput]:
        """Copies tensors to memory that stays, which takes their place among the leaves."""
        inputs: list[StaticInput] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                static = self._get_static((owner, index), leaf)
                static.fill(leaf)
                inputs.append(static)
                leaves[index] = static.tensor
        return inputs

    def _get_static(self, owner: Hashable, like: Tensor) -> StaticInput:
        # Calls of all patches share them, so a tensor that all are given is copied once.
        key = (owner, like.shape, like.dtype, like.stride())
        static = self._statics.get(key)
        if static is None:
            static = StaticInput(like)
            self._statics[key] = static
        return static

    def _make_constant(self, owner: Hashable, value: Any) -> ConstantInput:
        leaves, spec = pytree.tree_flatten(value)
        own: list[Any] = []
        statics: list[Any] = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                own.append(leaf)
                statics.append(leaf)
                continue
            static = self._get_static((owner, index), leaf)
            static.fill(leaf)
            own.append(static)
            statics.append(static.tensor)
        return ConstantInput(own, pytree.tree_unflatten(statics, spec))

    def _fill_constants(self, call: CallTape, memory: GenerationMemory, model: nn.Module) -> None:
        """Copies the constants of this generation, before any segment: a tape only reads them."""
        for key in call.constant_keys:
            value = memory.find_constant(key)
            if key not in call.constants or not call.constants[key].fill(value):
                # What the tape computes may depend on the numbers of a constant.
                call.tape = None
                call.constants[key] = self._make_constant((id(model), key), value)

    def _compare_addresses(self, call: CallTape, now: Generation, model: nn.Module) -> None:
        """Forgets a tape if something that it reads or writes has moved, and looks at the model again."""
        call.epoch = now.memory.epoch
        _, call.model_problem = self._look_at_model(now, model)
        addresses = self._list_addresses(now, model)
        if addresses != call.addresses:
            call.tape = None
        call.addresses = addresses

    def _list_addresses(self, now: Generation, model: nn.Module) -> Any:
        addresses, _ = self._look_at_model(now, model)
        return addresses, now.memory.list_addresses(now.branch)

    def _look_at_model(self, now: Generation, model: nn.Module) -> tuple[Any, str]:
        """Where a model's weights are, and why it cannot be recorded; once in an epoch for all its calls."""
        epoch, addresses, problem = self._models.get(id(model), (None, None, ""))
        if epoch is not now.memory.epoch:
            addresses, problem = _survey_model(model)
            self._models[id(model)] = (now.memory.epoch, addresses, problem)
        return addresses, problem


def _shares_outputs(call: CallTape, now: Generation) -> bool:
    """Whether a call may read what calls of other patches computed in the same step."""
    return now.micro_step.patch is not None and call.num_lost <= LOOKS


def _is_never_recorded(now: Generation) -> bool:
    # Some rows of a batch, or stages that compute a step together, are in no place of their own.
    shares_step = now.micro_step.patch is None and now.shares.warmup_split is not None
    # Autocast remembers the weights that it has cast, in memory of the call.
    is_cast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    return now.is_surveyed or now.is_dry or now.batch_range is not None or shares_step or is_cast


def _is_first_step(now: Generation) -> bool:
    return now.calls is None or now.micro_step.step == 0


def _describe_place(now: Generation, model: nn.Module) -> Hashable:
    # A patch writes its keys in each step alike; ranks of DistriFusion send none in the last one.
    keeps_keys = now.keeps_keys and now.micro_step.patch is None
    return (
        id(model),
        now.branch,
        now.micro_step.patch,
        now.token_patch,
        now.is_stale,
        keeps_keys,
        now.is_whole,
        now.may_round,
        now.memory.has_incoming_keys(now.branch),
    )


def _describe_modes() -> tuple[bool, ...]:
    return (torch.is_inference_mode_enabled(), torch.is_grad_enabled())


def _describe_settings() -> tuple[Any, ...]:
    """Settings of the process that choose kernels."""
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        _AttentionBackendRegistry.get_active_backend(),
    )


def _describe_leaf(leaf: Any) -> Hashable:
    """Equal for arguments that give the same tape."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride(), leaf.device
    return type(leaf), leaf


_NAMES_OF_MODULES = frozenset(vars(nn.Module()))
_NUMBERS = (bool, int, float, str, list, tuple)


def _survey_model(model: nn.Module) -> tuple[Any, str]:
    """Where a model's weights are and how it is set, and why it cannot be recorded, or nothing.

    A loop over the tables of the modules: torch's own iterators make twenty times as many Python calls.
    """
    problem = ""
    weights: list[Tensor | None] = []
    settings: list[Any] = [_describe_settings()]
    modules: list[nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is None:
            continue
        contents = vars(module)
        # Each table may have names without a value.
        weights.extend(contents["_parameters"].values())
        weights.extend(contents["_buffers"].values())
        modules.extend(contents["_modules"].values())
        settings.append(type(module))
        # Scales of adapters, FreeU and their kind are numbers on modules and processors.
        for name in contents.keys() - _NAMES_OF_MODULES:
            value = contents[name]
            if isinstance(value, _NUMBERS):
                settings.append((name, repr(value)))
        processor = contents.get("processor")
        if processor is not None and not isinstance(processor, nn.Module):
            # Processors of ditile are new in each call, so only the class and numbers count.
            settings.append(type(processor))
            for name, value in vars(processor).items():
                if isinstance(value, _NUMBERS):
                    settings.append((name, repr(value)))
        if type(module).__module__.startswith(ADAPTERS):
            problem = "adapters are on the model"
        if module is not model and (contents["_forward_hooks"] or contents["_forward_pre_hooks"]):
            problem = f"hooks are on a {type(module).__name__}"
        # diffusers' `cache_context` leaves a registry without hooks on each model.
        if "_hf_hook" in contents or getattr(contents.get("_diffusers_hook"), "hooks", None):
            problem = f"hooks are on a {type(module).__name__}"
    for weight_class in set(map(type, weights)) - {nn.Parameter, Tensor, type(None)}:
        # Subclasses, such as quantized weights, do not tell the addresses of their numbers.
        problem = f"weights are of class {weight_class.__name__}"
    if problem:
        return (), problem
    return (tuple(map(_READ_ADDRESS, filter(torch.is_tensor, weights))), settings), ""
