"""`ditile verify`: checks a plan on this machine, by properties that any plan on any model must have.

    exact       with warmup = steps the latents of every rank equal those of one rank: bit for bit, or up to rounding
    repeatable  two calls under the plan have one result, which is equal on all ranks
    ages        every key that is read is as old as the schedule says
    no waiting  in no micro-step the host waits for the device (CUDA)
    bytes       each rank sends as many bytes as the formula of `ditile.plan.cost` says
    memory      the memory of a call is free again when it is over

Only rank 0 needs the whole model, for the first check. The tests run the same functions on tiny models.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed import backend, env
from ditile.distributed.backend import PEER_TIMEOUT, pick_device
from ditile.distributed.private_network import make_groups
from ditile.distributed.torchrun import join_torchrun
from ditile.distributed.transport import gather_json
from ditile.model.hooks.kv_store import AgeChecks
from ditile.model.pipeline_calls import is_modular
from ditile.model.registry import find_loop_model
from ditile.plan import cost
from ditile.plan.errors import ModelError, StateError
from ditile.plan.plan import AUTO, Plan
from ditile.plan.schedule import Schedule
from ditile.plan.units import format_bytes
from ditile.plan.version import __version__
from ditile.runner.load import defaults, load
from ditile.runner.prove import TOLERANCE, prove_pipeline
from ditile.runner.requests.arguments import build_call_arguments, build_object_arguments
from ditile.runner.requests.command_options import VerifyOptions
from ditile.runner.requests.conditions import read_condition_files
from ditile.runner.requests.pipelines import convert_value_errors, find_argument
from ditile.runner.requests.prepare import silence_libraries, switch_to_conditions
from ditile.runner.runner import LOG, Runner, build_single_runner, parallelize

if TYPE_CHECKING:
    from rich.table import Table

ROUNDING_BY_DTYPE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The share of the largest value by which an exact plan may differ: it adds in another order, in every step."""

PipelineFactory = Callable[[Plan | None], Any]
"""See `run_plan_checks`."""
ArgumentsFactory = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a verdict; `ok` is None if there is nothing to check, and `says` is what was found."""

    name: str
    ok: bool | None
    says: str


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """The result of `ditile verify` for a plan, the same on every rank."""

    title: str
    checks: list[Check]

    @property
    def is_proven(self) -> bool:
        """Whether no check failed."""
        return all(check.ok is not False for check in self.checks)

    def render_tables(self) -> list[Table | str]:
        """What the command shows."""
        return [self.title, build_verdict_table(self)]


def build_verdict_table(verdict: PlanVerdict) -> Table:
    """The verdict with a tick or a cross for every check."""
    from rich.table import Table

    table = Table()
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    for check in verdict.checks:
        table.add_row({True: "✓", False: "✗", None: "-"}[check.ok], check.name, check.says)
    table.add_row("✓" if verdict.is_proven else "✗", "proven" if verdict.is_proven else "not proven", "")
    return table


def verify_plan(proof: VerifyOptions, plan: Plan) -> PlanVerdict:
    """Checks a plan on a model by name, on this rank; every rank must call it.

    Raises:
        DitileError: if the model or the plan does not fit.
    """
    with contextlib.redirect_stdout(sys.stderr), _silence_advice():
        silence_libraries()
        if proof.threads is not None:
            torch.set_num_threads(proof.threads)
        join_torchrun(proof.stall_timeout)

        wanted = proof.to_generate_options()
        started_from = read_condition_files(wanted)

        def make_pipeline(plan: Plan | None) -> Any:
            pipe: Any = load(proof.model, dtype=proof.dtype, plan=plan)
            if started_from:
                pipe = switch_to_conditions(pipe, [*started_from], dtype=proof.dtype)
            pipe.set_progress_bar_config(disable=True)
            return pipe

        def make_verify_arguments(pipe: Any) -> dict[str, Any]:
            own = defaults(proof.model)
            base = build_call_arguments(pipe, wanted, own)
            if started_from and find_argument(type(pipe), ("strength",)):
                base["strength"] = 1.0  # else some steps are left out
            base |= {"output": ["latents"]} if is_modular(pipe) else {"output_type": "latent"}
            base |= build_object_arguments(
                pipe, wanted, range(plan.data), conditions=started_from, alone=plan.data == 1
            )
            if plan.data == 1:
                return base
            return base | {name: [base[name]] * plan.data for name in ("prompt", "negative_prompt") if name in base}

        checks, where = run_plan_checks(make_pipeline, make_verify_arguments, plan, proof.steps, device=proof.device)
    return PlanVerdict(f"{proof.model}, {proof.steps} steps; {plan}; {where}", checks)


@contextlib.contextmanager
def _silence_advice() -> Iterator[None]:
    """Logs errors alone within it: advice on a plan does not fit the few steps of a check."""
    before = LOG.level
    LOG.setLevel(logging.ERROR)
    try:
        yield
    finally:
        LOG.setLevel(before)


def run_plan_checks(
    make: PipelineFactory, call: ArgumentsFactory, plan: Plan, steps: int, device: str | None = None
) -> tuple[list[Check], str]:
    """All checks of a plan, and a description of the machine; every rank must call it, and gets the same.

    Args:
        make: (plan) -> the pipeline, alike on every rank, with what this rank needs for the plan; the whole for None.
        call: (pipeline) -> the arguments of a call that returns tensors, with new generators each time; the first of
            its results (`images`, `frames`) is compared.
        plan: the plan that is checked.
        steps: of the calls, at least 3.
        device: this rank's; by default its GPU, else the CPU.
    """
    place = env.read_torchrun_place()
    rank, local = (place.rank, place.local_rank) if place is not None else (0, 0)
    with _wait_for_slowest_rank():
        whole = make(None) if rank == 0 else None
        proof = None if whole is None or plan.divides_the_batch_alone else _prove_patches(whole)
        reference_latents = (
            None if whole is None else _compute_reference_latents(whole, call, pick_device(device, local))
        )
        del whole
    exact = replace(plan, wire_dtype=None, warmup=steps if plan.attends_to_stale_keys else plan.warmup)
    runner = parallelize(make(exact), exact, device)
    latents = _draw_first_result(runner, call(runner.pipe))
    checks = [_check_exactness(runner, latents, reference_latents), _read_proof(runner, proof)]
    del runner, latents
    _release_memory()
    ages = AgeChecks()
    runner = parallelize(make(plan), plan, device, checks=ages)
    sync_counter = _HostSyncCounter(runner, steps)
    with sync_counter.count_host_syncs():
        first = _digest_call_result(runner, call, reference_latents)
    after_first = _measure_tensor_bytes(runner)
    traffic_bytes = _count_traffic_bytes(runner)
    second = _digest_call_result(runner, call, reference_latents)
    checks += [
        _check_repeatability(runner, first, second),
        _check_key_ages(runner, ages, steps),
        sync_counter.check_host_syncs(),
        _check_traffic_bytes(runner, traffic_bytes),
        _check_memory_growth(runner, after_first, _measure_tensor_bytes(runner)),
    ]
    return checks, _describe_environment(runner)


# The checks


def _check_exactness(runner: Runner, latents: Tensor, reference_latents: Tensor | None) -> Check:
    """Rank 0 compares its latents with the reference; the other ranks must have the same latents as rank 0."""
    difference = _compute_difference(latents, reference_latents) if reference_latents is not None else 0.0
    everyone = gather_json(
        [difference, _hash_latents(latents), _find_allowed_rounding(runner, latents)], runner.mesh.everyone
    )
    difference = everyone[0][0]
    alike = len({digest for _, digest, _ in everyone}) == 1
    allowed = max(rounding for _, _, rounding in everyone)
    finding = "equal bit for bit"
    if difference != 0:
        finding = f"largest difference: {difference:.1e} of the largest value (up to {allowed:.0e} is rounding)"
    finding += "" if alike else "; ranks differ from each other"
    return Check("with no stale keys: the picture of one device", difference <= allowed and alike, finding)


def _prove_patches(pipe: Any) -> list[Any]:
    """Whether a call that is computed patch by patch is the whole call, as the values of a `Check`."""
    try:
        difference = prove_pipeline(pipe, build_single_runner)
    except ModelError as error:
        return [None, f"not tried: {error}"]
    except StateError as error:
        return [False, str(error)]
    return [difference <= TOLERANCE, f"largest difference: {difference:.1e} of the largest value, with random weights"]


def _read_proof(runner: Runner, proof: list[Any] | None) -> Check:
    ok, says = gather_json(proof, runner.mesh.everyone)[0] or (None, "not needed: each device computes whole pictures")
    return Check("this model may be computed in patches", ok, says)


def _find_allowed_rounding(runner: Runner, latents: Tensor) -> float:
    """The rounding of the coarsest type among the latents and the model's weights, which may be of different types."""
    kinds = {latents.dtype} | {parameter.dtype for parameter in find_loop_model(runner.pipe).parameters()}
    return max(rounding for kind, rounding in ROUNDING_BY_DTYPE.items() if kind in kinds)


def _digest_call_result(runner: Runner, call: ArgumentsFactory, reference_latents: Tensor | None) -> tuple[str, float]:
    """The digest of a call's result, and on rank 0 its difference from the reference. It keeps no tensor alive."""
    latents = _draw_first_result(runner, call(runner.pipe))
    return _hash_latents(latents), _compute_difference(
        latents, reference_latents
    ) if reference_latents is not None else 0.0


def _check_repeatability(runner: Runner, first: tuple[str, float], second: tuple[str, float]) -> Check:
    everyone = gather_json([first[0], second[0], first[1]], runner.mesh.everyone)
    of_first, of_second = ({answer[k] for answer in everyone} for k in range(2))
    problems = [] if len(of_first) == len(of_second) == 1 else ["ranks have different results"]
    problems += [] if of_first == of_second else ["the second call differs from the first"]
    says = (
        f"equal on {len(everyone)} rank(s), twice; it differs by {everyone[0][2]:.1e} of the largest value from the "
        "picture of one device"
    )
    return Check("the same call twice: one picture, on all ranks", not problems, "; ".join(problems) or says)


def _check_key_ages(runner: Runner, ages: AgeChecks, steps: int) -> Check:
    """Checks that the ages of some keys were compared; a wrong age raises `StateError` during the call."""
    everyone = gather_json(ages.passed, runner.mesh.everyone)
    schedule = Schedule.from_plan(runner.plan, steps)
    if not any(schedule.reads_stale_keys(step) for step in range(steps)):
        return Check("stale keys are as old as scheduled", None, "not needed: this plan has no stale keys")
    return Check(
        "stale keys are as old as scheduled",
        min(everyone) > 0,
        f"{sum(everyone):,} reads checked, on {len(everyone)} rank(s)",
    )


def _count_traffic_bytes(runner: Runner) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that this rank sent in the last call, by kind: counted, and by formula."""
    assert runner.report is not None
    job = runner.job()
    return runner.report.sent, {} if job is None else cost.count_traffic_bytes(job, runner.mesh.rank)


def _check_traffic_bytes(runner: Runner, traffic_bytes: tuple[dict[str, int], dict[str, int]]) -> Check:
    name = "ranks send as many bytes as calculated"
    if runner.plan.warmup == AUTO:
        return Check(name, None, f"not calculated: warmup={AUTO} decides during the call how many steps send what")
    if runner.job() is None:
        return Check(name, None, "not calculated: ditile has no formula for this model")
    everyone = gather_json(traffic_bytes, runner.mesh.everyone)
    wrong = []
    total = 0
    others = dict[str, int]()
    for rank, (sent, formula) in enumerate(everyone):
        for kind in (kind for kind in cost.KINDS if sent.get(kind, 0) != formula.get(kind, 0)):
            wrong.append(f"rank {rank} sent {sent.get(kind, 0)} of {kind}, by formula {formula.get(kind, 0)}")
        for kind, size in sent.items():
            total += size if kind in cost.KINDS else 0
            if kind not in cost.KINDS:
                others[kind] = others.get(kind, 0) + size
    also = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in others.items())
    says = f"{format_bytes(total)} over {len(everyone)} rank(s)" + (f"; beside that: {also}" if also else "")
    return Check(name, not wrong, "; ".join(wrong) or says)


def _check_memory_growth(runner: Runner, before: int, after: int) -> Check:
    everyone = gather_json([before, after], runner.mesh.everyone)
    grown = [(rank, b - a) for rank, (a, b) in enumerate(everyone) if b > a]
    says = "; ".join(f"rank {rank} holds {format_bytes(more)} more" for rank, more in grown)
    return Check(
        "a second call needs no more memory",
        not grown,
        says or f"{format_bytes(max(a for a, _ in everyone))} after each call",
    )


class _HostSyncCounter:
    """Counts how often the host waits for the device in the micro-steps behind the first stale step.

    In earlier micro-steps constants are made and schedulers look up their step, which may wait.
    """

    def __init__(self, runner: Runner, steps: int) -> None:
        self._runner, schedule = runner, Schedule.from_plan(runner.plan, steps)
        self._micros = [len(schedule.list_micro_steps(step)) for step in range(steps)]
        self._skipped = min(steps - 1, schedule.warmup + 1)
        self._sync_warnings: list[Any] = []
        self._calls, self._is_cuda = 0, torch.device(runner.devices[runner.mesh.rank]).type == "cuda"

    @contextlib.contextmanager
    def count_host_syncs(self) -> Iterator[None]:
        """Counts within."""
        if not self._is_cuda:
            yield
            return
        job = self._runner.job()
        model = find_loop_model(self._runner.pipe)
        calls = [
            (1 if job is None else job.count_calls_in_step(step)) * micros for step, micros in enumerate(self._micros)
        ]
        first = sum(calls[: self._skipped])
        last = sum(calls)

        def update_sync_mode(*_: Any) -> None:
            mode = "warn" if first <= self._calls < last - 1 else "default"
            self._calls += 1
            torch.cuda.set_sync_debug_mode(mode)

        handle = model.register_forward_pre_hook(update_sync_mode)
        try:
            with warnings.catch_warnings(record=True) as sync_warnings:
                warnings.simplefilter("always")
                yield
            self._sync_warnings = [w for w in sync_warnings if "synchroniz" in str(w.message)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
            handle.remove()

    def check_host_syncs(self) -> Check:
        """The count of all ranks."""
        name = "the CPU does not wait for the GPU within steps"
        where = sorted({f"{os.path.basename(w.filename)}:{w.lineno}" for w in self._sync_warnings})
        everyone = gather_json([len(self._sync_warnings), where], self._runner.mesh.everyone)
        if not self._is_cuda:
            return Check(name, None, "not needed: there is no GPU")
        micros = sum(self._micros[self._skipped :])
        count = max(count for count, _ in everyone)
        places = ", ".join(sorted({place for _, places in everyone for place in places}))
        return Check(
            name, count == 0, f"{count} waits in {micros} computations of a patch" + (f": {places}" if count else "")
        )


# What they measure with


def _compute_reference_latents(pipe: Any, call: ArgumentsFactory, device: torch.device) -> Tensor:
    """The latents of the pipeline without any plan; each call of its model reports progress to `launch`."""
    find_loop_model(pipe).register_forward_pre_hook(lambda *_: env.report_progress())
    pipe.to(device)
    with convert_value_errors(pipe):
        latents: Tensor = _draw_first_result(pipe, call(pipe)).cpu()
    del pipe
    _release_memory()
    return latents


def _draw_first_result(pipe: Any, call: Mapping[str, Any]) -> Tensor:
    """The first of the results of a pipeline or a runner."""
    results = pipe(**call)
    first: Tensor = next(iter(results.values())) if isinstance(results, dict) else results[0]
    return first


@contextlib.contextmanager
def _wait_for_slowest_rank() -> Iterator[None]:
    """At its end all ranks wait for the slowest, however long it takes: rank 0 fetches and runs a whole model."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # Outside of the run's private network its ports refuse connections, which gloo reports as errors and tries again.
    with make_groups():
        everyone = backend.make_group_on_one_loop(range(dist.get_world_size()), PEER_TIMEOUT, "gloo")
    try:
        yield
    finally:  # also after an error, so that the other ranks do not wait for a rank that failed
        dist.barrier(everyone)
        dist.destroy_process_group(everyone)


def _compute_difference(latents: Tensor, reference_latents: Tensor) -> float:
    """The largest difference as a share of the largest value; infinite if either is not finite."""
    latents = latents.cpu()
    if latents.shape != reference_latents.shape or not (
        latents.isfinite().all() and reference_latents.isfinite().all()
    ):
        return float("inf")
    return float((latents.double() - reference_latents.double()).abs().max() / reference_latents.double().abs().max())


def _hash_latents(latents: Tensor) -> str:
    data = latents.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _measure_tensor_bytes(runner: Runner) -> int:
    """Bytes of all tensors: allocated on a GPU, alive on a CPU."""
    _release_memory()
    device = torch.device(runner.devices[runner.mesh.rank])
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return min(_count_live_cpu_bytes(seconds) for seconds in (0.0, 0.05, 0.05))


def _count_live_cpu_bytes(wait_seconds: float) -> int:
    """Bytes of tensors on the CPU, after some seconds: a thread of gloo frees a sent tensor a moment after the wait for
    it has ended."""
    time.sleep(wait_seconds)
    storages = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage.device.type == "cpu"}.values())


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _describe_environment(runner: Runner) -> str:
    """Versions and devices, which a bug report needs."""
    names = {"cpu": platform.machine()}
    kinds = {torch.device(device).type for device in runner.devices}
    if "cuda" in kinds:
        names["cuda"] = torch.cuda.get_device_name()
    devices = ", ".join(f"{kind} {names.get(kind, '')}".strip() for kind in sorted(kinds))
    return (
        f"ditile {__version__}, torch {torch.__version__}, diffusers {diffusers.__version__}, "
        f"Python {platform.python_version()}, {len(runner.devices)} rank(s) on {devices}"
    )
