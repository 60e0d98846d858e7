"""What stands for CUDA graphs on a CPU: operators that are called again on the same memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ditile.distributed.recording.segments import (
    OPERATORS_IN_PYTHON,
    has_own_operators,
    list_tensors,
    list_written_tensors,
)
from ditile.distributed.recording.tape import CURRENT, Action, Recording
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import AgeChecks
from ditile.model.recording import kept_tapes, recorded_steps
from ditile.model.recording.recorded_steps import RecordedSteps
from ditile.parallel.tensor import cuts
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep
from ditile.runner import runner as runners
from ditile.runner.graph_segments import GraphSegments, prepare_capture_stream
from tests.zoo import ZOO, rows


class OperatorSegments(TorchDispatchMode):
    """Segments of the operators that a call makes.

    A pool of CUDA graphs gives memory to others as soon as the call has dropped it. Here it is not used again, so other
    numbers are written there whenever the tape is played: what reads it afterwards is seen in the image. Later segments
    of the pool may be given what an earlier one has dropped, so playing that one fills all that they hold.

    Attributes:
        num_bytes: most that a pool would hold between two segments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        # Each tensor that is kept for the replays, by its memory.
        self._kept: dict[int, dict[int, Tensor]] = {}
        self._made: dict[int, Tensor] = {}
        # In which segment it was made, counted over all tapes.
        self._made_in: dict[int, int] = {}
        self._num_segments = 0
        # Nothing is computed in a capture, so what it writes into memory from outside is undone.
        self._overwritten: list[tuple[Tensor, Tensor]] = []
        self.num_bytes = 0
        self._is_open = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPERATORS_IN_PYTHON and not CURRENT.is_exchanging:
            with self:
                return OPERATORS_IN_PYTHON[func](*args, **(kwargs or {}))
        if any(map(has_own_operators, types)):
            return NotImplemented
        if CURRENT.is_exchanging:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in list_written_tensors(func, args, kwargs or {}):
            if _find_address(tensor) not in self._made:
                self._overwritten.append((tensor, tensor.clone()))
        result = func(*args, **(kwargs or {}))
        # Other tensors of the same memory, so that those of the call go when the call drops them.
        own_args, own_kwargs = pytree.tree_map_only(Tensor, self._keep, (args, kwargs or {}))
        inputs = {_find_address(tensor) for tensor in list_tensors((args, kwargs))}
        for tensor in list_tensors(result):
            if _find_address(tensor) not in inputs and tensor.numel():
                self._made[_find_address(tensor)] = self._keep(tensor)
                self._made_in[_find_address(tensor)] = self._num_segments
        self._calls.append((func, own_args, own_kwargs, pytree.tree_map_only(Tensor, self._keep, result)))
        return result

    def _keep(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            alias = torch.empty(0, dtype=tensor.dtype).set_(
                tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            # The memory of a conjugate is that of the number itself.
            if tensor.is_conj():
                alias = alias.conj()
            if tensor.is_neg():
                alias = torch._neg_view(alias)
        self._kept.setdefault(_find_address(tensor), {})[id(alias)] = alias
        return alias

    def _list_dropped(self) -> list[Tensor]:
        """Memory that only the replays know."""
        dropped = []
        for address, tensor in list(self._made.items()):
            storage = tensor.untyped_storage()
            # The storage itself counts too.
            if torch._C._storage_Use_Count(storage._cdata) <= len(self._kept[address]) + 1:
                dropped.append(self._made.pop(address))
        return dropped

    def open(self) -> None:
        self._calls = []
        self._is_open = True
        self.__enter__()

    def abandon(self) -> None:
        if self._is_open:
            self._is_open = False
            self.__exit__(None, None, None)
        for tensor, before in reversed(self._overwritten):
            tensor.copy_(before)
        self._overwritten = []

    def close(self) -> Action | None:
        self.abandon()
        calls = []
        for func, args, kwargs, recorded in self._calls:
            outputs = list_tensors(recorded)
            inputs = {_find_address(tensor) for tensor in list_tensors((args, kwargs))}
            if func._schema.is_mutable:
                calls.append((func, args, kwargs, []))
            elif any(_find_address(tensor) not in inputs for tensor in outputs):
                calls.append((func, args, kwargs, outputs))
        dropped = self._list_dropped()
        self.num_bytes = max(self.num_bytes, sum(tensor.untyped_storage().nbytes() for tensor in self._made.values()))
        number = self._num_segments
        self._num_segments += 1
        if not calls:
            return None

        def replay() -> None:
            # A graph is one call, so the operators of a segment do not count.
            profile = sys.getprofile()
            sys.setprofile(None)
            for func, args, kwargs, outputs in calls:
                results = list_tensors(func(*args, **kwargs))
                for output, result in zip(outputs, results, strict=False):
                    output.copy_(result)
            later = [self._made[address] for address in self._made if self._made_in[address] > number]
            for tensor in (*dropped, *later):
                _poison_memory(tensor)
            sys.setprofile(profile)

        return replay

    def borrow(self, tensor: Tensor) -> Tensor:
        return self._keep(tensor)


def _poison_memory(tensor: Tensor) -> None:
    """Write NaN into all memory behind a tensor, the largest numbers for integers, and the other values for masks."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if tensor.dtype == torch.bool:
        memory.logical_not_()
    elif tensor.is_floating_point() or tensor.is_complex():
        memory.fill_(torch.nan)
    else:
        memory.fill_(torch.iinfo(tensor.dtype).max)


def _find_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def record_on_cpu(
    segments: Callable[[], OperatorSegments] = OperatorSegments, limit_bytes: int = sys.maxsize, *, checks: bool = True
) -> Iterator[list[RecordedSteps]]:
    """Within it `cuda_graphs=True` records on a CPU; gives the recorders that are made."""
    made: list[RecordedSteps] = []

    def build(setting: bool, plan: Plan, device: torch.device) -> RecordedSteps | None:
        if not setting:
            return None
        made.append(RecordedSteps(segments, limit_bytes, checks=checks))
        return made[-1]

    def is_capturing() -> bool:
        return isinstance(CURRENT.recording, Recording) and not CURRENT.is_exchanging

    is_patched = mock.patch.object(torch.cuda, "is_current_stream_capturing", is_capturing)
    with mock.patch.object(runners, "build_recorder", build), is_patched:
        yield made


def generate(runner: Any, name: str, seed: int = 0, **more: Any) -> list[Tensor]:
    """Return the results of a call of the zoo, of five steps."""
    call = ZOO[name].call() | {"num_inference_steps": 5} | more
    return [x.clone() for x in rows.list_tensors(runner(**call | {"generator": torch.Generator().manual_seed(seed)}))]


def draw_both_ways(
    make: Callable[[], Any],
    plan: Plan,
    draw: Callable[[Any], Sequence[Tensor]],
    segments: Callable[[], OperatorSegments] = OperatorSegments,
    limit_bytes: int = sys.maxsize,
    **options: Any,
) -> tuple[Sequence[Tensor], RecordedSteps]:
    """Check that a runner draws with recorded calls what it draws without, and return that and the recorder.

    Messages and the ages of keys are compared too.

    Args:
        draw: makes calls of a runner and returns what they give.
        options: of `parallelize`.
    """
    drawn, seen = [], []
    with record_on_cpu(segments, limit_bytes) as recorders:
        for recorded in (False, True):
            checks = AgeChecks()
            runner = runners.parallelize(make(), plan, cuda_graphs=recorded, checks=checks, trust_code=True, **options)
            drawn.append(draw(runner))
            seen.append((dict(runner.mesh.traffic.bytes), dict(runner.mesh.traffic.calls), checks.passed))
    equal = list(map(torch.equal, *drawn))
    assert len(drawn[0]) == len(drawn[1]) and all(equal), equal
    assert seen[0] == seen[1]
    return drawn[0], recorders[0]


@torch.no_grad()
def run_step(
    recorder: RecordedSteps, model: nn.Module, call: Callable[..., Tensor], x: Tensor, step: int = 1
) -> Tensor:
    """Return what a recorder makes of a call of a model in a step."""
    return recorder.run_call(Generation(calls=1, micro_step=MicroStep(step, None)), model, call, (x,), {})


@contextmanager
def record_on_simulated_gpus() -> Iterator[None]:
    """Within it calls are recorded as graphs of a simulated GPU."""
    # A stream is of one simulated GPU.
    prepare_capture_stream.cache_clear()
    with ExitStack() as stack:
        # The addresses of a simulated GPU are none that a storage can be made of.
        stack.enter_context(mock.patch.object(GraphSegments, "borrow", lambda segments, tensor: tensor))
        # A check of a copy that was left out reads numbers, for which the host waits.
        stack.enter_context(mock.patch.object(kept_tapes, "has_same_bits", lambda *_: True))
        # A weight on a simulated GPU is of a class of its own, as a quantized one is.
        stack.enter_context(mock.patch.object(cuts, "_check_linear_shardable"))
        stack.enter_context(mock.patch.object(recorded_steps, "survey_model", lambda model: ((), "")))
        yield
