"""`ditile verify`: checks a plan on this machine by properties required of every plan on every model.

    exact       if all steps are warmup, the latents of every rank equal those of one device, bit for bit or rounded
    patches     a call computed patch by patch equals the whole call, with random weights
    repeatable  two calls under the plan have one result, which is equal on all ranks
    ages        every key that is read is as old as the schedule says
    no waiting  the host waits for the device in no micro-step (CUDA)
    bytes       each rank sends as many bytes as the formula of `ditile.plan.cost` says
    memory      the memory of a call is free again when it is over

Only rank 0 needs the whole model, for the first two checks. The tests run the same functions on tiny models.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor

from ditile.cli.verdict import Check, PlanVerdict
from ditile.distributed import backend, env
from ditile.distributed.backend import PEER_TIMEOUT, pick_device, release_memory
from ditile.distributed.mesh import find_local_rank, find_process_rank
from ditile.distributed.private_network import make_groups
from ditile.distributed.torchrun import join_torchrun
from ditile.distributed.transport import gather_json, is_on_gpu
from ditile.model.hooks.kv_store import AgeChecks
from ditile.model.pipeline_calls import is_modular
from ditile.model.support import find_loop_model
from ditile.plan import cost
from ditile.plan.errors import ModelError, StateError
from ditile.plan.extras import import_lab
from ditile.plan.numbers import format_bytes
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.plan.schedule import PatchSchedule
from ditile.plan.version import __version__
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.requests.arguments import build_call_arguments, build_object_arguments
from ditile.runner.requests.options import VerifyOptions
from ditile.runner.requests.pipelines import convert_value_errors, find_argument
from ditile.runner.requests.preflight import read_condition_files
from ditile.runner.requests.prepare import silence_advice, silence_libraries, switch_to_conditions
from ditile.runner.runner import Runner, build_single_runner, parallelize

ROUNDING_BY_DTYPE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The share of the largest value by which an exact plan may differ: it adds numbers in another order, in every step."""

PipelineFactory = Callable[[Plan | None], Any]
ArgumentsFactory = Callable[[Any], CallArguments]
"""Both are explained in `run_plan_checks`."""


def verify_plan(options: VerifyOptions, plan: Plan) -> PlanVerdict:
    """Check a plan on a model by name, on this rank; every rank must call it.

    Raises `DitileError` if the model or the plan does not fit.
    """
    with _prepare_calls(options, plan) as (create_pipeline, make_arguments):
        checks, machine = run_plan_checks(create_pipeline, make_arguments, plan, options.steps, options.device)
    return PlanVerdict(f"{options.model}, {options.steps} steps; {plan}; {machine}", checks)


def verify_recorded_steps(options: VerifyOptions, plan: Plan, run_on_ranks: Callable[..., Any]) -> PlanVerdict:
    """Compare calls of recorded steps with calls that run the code, on each axis or under a plan.

    Args:
        run_on_ranks: (name of a function, plan, options, arguments) -> what the first rank returns.

    Raises:
        PlanError: if there are too few GPUs.
    """
    cases = import_lab("machine.recorded_cases")
    num_cards = cases.count_cards(options.device)
    name = "ditile.cli.verify.compare_on_rank"
    findings = cases.compare_plans(plan, num_cards, lambda case: run_on_ranks(name, case, options, (options, case)))
    machine = describe_versions(["cuda"] * num_cards)
    return PlanVerdict(f"{options.model}, recorded or not; {machine}", list(itertools.starmap(Check, findings)))


def compare_on_rank(options: VerifyOptions, plan: Plan) -> Any:
    """Compare calls of recorded steps under a plan with calls that run the code; every rank must call it."""
    with _prepare_calls(options, plan) as (create_pipeline, make_arguments):
        return import_lab("machine.recorded_cases").compare_recorded_calls(
            lambda recorded: parallelize(create_pipeline(plan), plan, options.device, cuda_graphs=recorded),
            lambda runner, more: _generate_first_result(runner, make_arguments(runner.pipe) | more),
        )


@contextlib.contextmanager
def _prepare_calls(options: VerifyOptions, plan: Plan) -> Iterator[tuple[PipelineFactory, ArgumentsFactory]]:
    """Join the ranks, and yield two functions: one makes a pipeline, the other the arguments of its call.

    What libraries print goes to the standard error, since the standard output is only for the verdict.
    """
    with contextlib.redirect_stdout(sys.stderr), silence_advice():
        silence_libraries()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        join_torchrun(options.stall_timeout)
        generate_options = options.to_generate_options()
        conditions = read_condition_files(generate_options)

        def create_pipeline(plan: Plan | None) -> Any:
            pipe: Any = load(options.model, dtype=options.dtype, plan=plan, components=options.components)
            if conditions:
                pipe = switch_to_conditions(pipe, [*conditions], dtype=options.dtype)
            pipe.set_progress_bar_config(disable=True)
            return pipe

        def make_arguments(pipe: Any) -> CallArguments:
            call = build_call_arguments(pipe, generate_options, defaults(options.model))
            if conditions and find_argument(type(pipe), ("strength",)):
                # With a lower strength the pipeline would skip some of the few steps.
                call["strength"] = 1.0
            if is_modular(pipe):
                call["output"] = ["latents"]
            else:
                call["output_type"] = "latent"
            call |= build_object_arguments(
                pipe, generate_options, range(plan.data), conditions=conditions, alone=plan.data == 1
            )
            if plan.data > 1:
                for name in ("prompt", "negative_prompt"):
                    if name in call:
                        call[name] = [call[name]] * plan.data
            return call

        yield create_pipeline, make_arguments


def run_plan_checks(
    create_pipeline: PipelineFactory, make_arguments: ArgumentsFactory, plan: Plan, steps: int, device: str | None
) -> tuple[list[Check], str]:
    """Run all checks of a plan, and describe the machine. Every rank must call it, and gets the same result.

    Args:
        create_pipeline: (plan) -> the pipeline, with the parts that this rank needs for the plan, or with all of them
            for None. Every rank makes the same pipeline.
        make_arguments: (pipeline) -> the arguments of a call that returns tensors, with new generators each time; the
            first of its results (`images`, `frames`) is compared.
        steps: the steps of the calls, at least 3.
        device: the device of this rank; by default its GPU if it has one, otherwise the CPU.
    """
    proof = None
    reference = None
    with _wait_for_slowest_rank():
        # Only rank 0 has room for a whole model.
        if find_process_rank(plan) == 0:
            whole_pipe = create_pipeline(None)
            proof = _prove_patches(whole_pipe, plan)
            reference = _compute_reference_latents(whole_pipe, make_arguments, pick_device(device, find_local_rank()))
            # The memory of the whole model is needed for this rank's share.
            del whole_pipe
            release_memory()
    # Packed messages are rounded, and no warmup undoes that.
    exact_plan = replace(plan, wire_dtype=None)
    if plan.attends_to_stale_keys:
        # If every step is synchronous, no key is stale.
        exact_plan = replace(exact_plan, warmup=steps)
    runner = parallelize(create_pipeline(exact_plan), exact_plan, device)
    latents = _generate_first_result(runner, make_arguments(runner.pipe))
    checks = [
        _check_exactness(runner, latents, reference),
        Check("this model may be computed in patches", *gather_json(proof, runner.mesh.everyone)[0]),
    ]
    # These are freed before memory is measured.
    del runner, latents
    release_memory()
    # Now the plan itself runs, with its stale keys. Every read of a key compares its age with the schedule.
    ages = AgeChecks()
    runner = parallelize(create_pipeline(plan), plan, device, checks=ages)
    first_result = _digest_call_result(runner, make_arguments, reference)
    # Tapes grow with each call up to their own limit, which would count as a leak.
    runner.forget_recorded_steps()
    bytes_after_first = _measure_tensor_bytes(runner)
    assert runner.report is not None
    sent = runner.report.sent
    # Waits are looked for in the second call. The first one rehearses, which takes more waits, and more calls of the
    # model than the schedule has.
    digest_second = functools.partial(_digest_call_result, runner, make_arguments, reference)
    second_result, sync_check = _check_host_syncs(runner, steps, digest_second)
    runner.forget_recorded_steps()
    checks += [
        _check_repeatability(runner, first_result, second_result),
        _check_key_ages(runner, ages, steps),
        sync_check,
        _check_traffic_bytes(runner, sent),
        _check_memory_growth(runner, bytes_after_first, _measure_tensor_bytes(runner)),
    ]
    return checks, describe_versions(runner.devices)


# The checks, each of which returns one line of the verdict.


def _check_exactness(runner: Runner, latents: Tensor, reference: Tensor | None) -> Check:
    """Compare the latents of rank 0 with the reference, and check that all ranks have the same latents."""
    # The latents and the weights may be of different types.
    dtypes = {parameter.dtype for parameter in find_loop_model(runner.pipe).parameters()} | {latents.dtype}
    rounding = max(rounding for dtype, rounding in ROUNDING_BY_DTYPE.items() if dtype in dtypes)
    answer = (_compute_difference(latents, reference), _hash_latents(latents), rounding)
    answers = gather_json(answer, runner.mesh.everyone)
    difference = answers[0][0]
    are_equal = len({digest for _, digest, _ in answers}) == 1
    allowed = max(rounding for _, _, rounding in answers)
    finding = "equal bit for bit"
    if difference != 0:
        finding = f"largest difference: {difference:.1e} of the largest value (up to {allowed:.0e} is rounding)"
    if not are_equal:
        finding += "; ranks differ from each other"
    return Check("with no stale keys: the image of one device", difference <= allowed and are_equal, finding)


def _prove_patches(pipe: Any, plan: Plan) -> tuple[bool | None, str]:
    """Prove that a call computed patch by patch equals the whole call, and return `ok` and `says` of a `Check`."""
    if plan.divides_the_batch_alone:
        return None, "not needed: each device computes whole images"
    prove = import_lab("study.prove")
    try:
        difference = prove.prove_pipeline(pipe, build_single_runner)
    except ModelError as error:
        return None, f"not tried: {error}"
    except StateError as error:
        return False, str(error)
    says = f"largest difference: {difference:.1e} of the largest value, with random weights"
    return difference <= prove.TOLERANCE, says


def _digest_call_result(
    runner: Runner, make_arguments: ArgumentsFactory, reference: Tensor | None
) -> tuple[str, float]:
    """Return the digest of a call's result, and its difference from the reference, keeping no tensor alive."""
    latents = _generate_first_result(runner, make_arguments(runner.pipe))
    return _hash_latents(latents), _compute_difference(latents, reference)


def _check_repeatability(runner: Runner, first_result: tuple[str, float], second_result: tuple[str, float]) -> Check:
    answers = gather_json([first_result[0], second_result[0], first_result[1]], runner.mesh.everyone)
    first_digests = {answer[0] for answer in answers}
    second_digests = {answer[1] for answer in answers}
    problems = []
    if len(first_digests) > 1 or len(second_digests) > 1:
        problems.append("ranks have different results")
    if first_digests != second_digests:
        problems.append("the second call differs from the first")
    says = "; ".join(problems) or f"equal on {len(answers)} rank(s), twice"
    causes = []
    if runner.plan.attends_to_stale_keys:
        causes.append("stale keys")
    if runner.plan.wire_dtype is not None:
        causes.append(f"{runner.plan.wire_dtype} messages")
    difference = answers[0][2]
    if difference and causes and not problems:
        says += (
            ". The image of one device is a little different, as this plan's approximation allows "
            f"({', '.join(causes)}): by {difference:.1e} of the largest value at most"
        )
    return Check("the same call twice: one image, on all ranks", not problems, says)


def _check_key_ages(runner: Runner, ages: AgeChecks, steps: int) -> Check:
    """Check that the ages of some keys were compared. A wrong age raises `StateError` during the call."""
    name = "stale keys are as old as scheduled"
    counts = gather_json(ages.passed, runner.mesh.everyone)
    schedule = PatchSchedule.from_plan(runner.plan, steps)
    if not any(map(schedule.reads_stale_keys, range(steps))):
        return Check(name, None, "not needed: this plan has no stale keys")
    return Check(name, min(counts) > 0, f"{sum(counts):,} reads checked, on {len(counts)} rank(s)")


def _check_traffic_bytes(runner: Runner, sent: dict[str, int]) -> Check:
    """Check the bytes that each rank sent in the first call against the formula, by kind."""
    name = "ranks send as many bytes as calculated"
    job = runner.job()
    if job is None:
        return Check(name, None, "not calculated: ditile has no formula for this model")
    problems = []
    total = 0
    other_bytes: dict[str, int] = {}
    answers = gather_json([sent, cost.count_traffic_bytes(job, runner.mesh.rank)], runner.mesh.everyone)
    for rank, (sent_by_rank, formula) in enumerate(answers):
        for kind in cost.KINDS:
            size = sent_by_rank.get(kind, 0)
            total += size
            if size != formula.get(kind, 0):
                problems.append(f"rank {rank} sent {size} of {kind}, by formula {formula.get(kind, 0)}")
        for kind in sent_by_rank.keys() - set(cost.KINDS):
            other_bytes[kind] = other_bytes.get(kind, 0) + sent_by_rank[kind]
    says = f"{format_bytes(total)} over {len(answers)} rank(s)"
    if other_bytes:
        others = [f"{kind} {format_bytes(size)}" for kind, size in sorted(other_bytes.items())]
        says += f"; besides that: {', '.join(others)}"
    return Check(name, not problems, "; ".join(problems) or says)


def _check_memory_growth(runner: Runner, before: int, after: int) -> Check:
    answers = gather_json([before, after], runner.mesh.everyone)
    problems = []
    for rank, (bytes_before, bytes_after) in enumerate(answers):
        if bytes_after > bytes_before:
            problems.append(f"rank {rank} holds {format_bytes(bytes_after - bytes_before)} more")
    says = f"{format_bytes(max(bytes_before for bytes_before, _ in answers))} after each call"
    return Check("a second call needs no more memory", not problems, "; ".join(problems) or says)


def _check_host_syncs(
    runner: Runner, steps: int, make_call: Callable[[], tuple[str, float]]
) -> tuple[tuple[str, float], Check]:
    """Make a call, and check that the host does not wait for the device in the micro-steps after the first stale step.

    Earlier micro-steps may wait, since they compute what is remembered, and schedulers look up their step.
    """
    name = "the CPU does not wait for the GPU within steps"
    device = torch.device(runner.devices[runner.mesh.rank])
    if any(torch.device(text).type != "cuda" for text in runner.devices):
        return make_call(), Check(name, None, "not needed: there is no GPU")
    if runner.mesh.everyone is not None and not is_on_gpu(device, runner.mesh.everyone):
        says = "not counted: gloo carries messages through the CPU, which waits for each"
        return make_call(), Check(name, None, says)
    schedule = PatchSchedule.from_plan(runner.plan, steps)
    micro_step_counts = [len(schedule.list_micro_steps(step)) for step in range(steps)]
    first_step = min(steps - 1, schedule.warmup + 1)
    job = runner.job()
    call_counts = []
    for step, num_patches in enumerate(micro_step_counts):
        calls_per_patch = 1
        if job is not None:
            calls_per_patch = job.count_calls_in_step(step)
        call_counts.append(calls_per_patch * num_patches)
    first_call = sum(call_counts[:first_step])
    num_calls = sum(call_counts)
    call_numbers = itertools.count()

    def update_sync_mode(*_: Any) -> None:
        # This runs before each call, so warnings end before the last one: after it the pipeline reads the result.
        mode = "warn" if first_call <= next(call_numbers) < num_calls - 1 else "default"
        torch.cuda.set_sync_debug_mode(mode)

    handle = find_loop_model(runner.pipe).register_forward_pre_hook(update_sync_mode)
    try:
        # torch.cuda warns of each wait.
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            result = make_call()
    finally:
        handle.remove()
        torch.cuda.set_sync_debug_mode("default")
    places = []
    for message in messages:
        if "synchroniz" in str(message.message):
            places.append(f"{os.path.basename(message.filename)}:{message.lineno}")
    answers = gather_json(places, runner.mesh.everyone)
    count = max(map(len, answers))
    says = f"{count} waits in {sum(micro_step_counts[first_step:])} computations of a patch"
    if count:
        says += f": {', '.join(sorted(set[str]().union(*answers)))}"
    return result, Check(name, count == 0, says)


# The measurements that the checks compare.


def _compute_reference_latents(pipe: Any, make_arguments: ArgumentsFactory, device: torch.device) -> Tensor:
    """Compute the latents of the pipeline without any plan. Each call of its model reports progress to `launch`."""
    # Without these reports `launch` would take rank 0 for hanging while the others wait.
    find_loop_model(pipe).register_forward_pre_hook(lambda *_: env.report_progress())
    pipe.to(device)
    with convert_value_errors(pipe):
        return _generate_first_result(pipe, make_arguments(pipe)).cpu()


def _generate_first_result(pipe: Any, call: CallArguments) -> Tensor:
    """Return the first result of a pipeline or a runner."""
    results = pipe(**call)
    if isinstance(results, dict):
        results = list(results.values())
    return results[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def _wait_for_slowest_rank() -> Iterator[None]:
    """Make all ranks wait at the end for the slowest, however long it takes: rank 0 fetches and runs a whole model."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # Ranks connect within the run's private network. Outside of it gloo would report refused connections as errors,
    # and try again.
    with make_groups():
        everyone = backend.make_group_on_one_loop(range(dist.get_world_size()), PEER_TIMEOUT, "gloo")
    try:
        yield
    finally:
        # Reached after an error too, so that the other ranks do not wait for a failed one.
        dist.barrier(everyone)
        dist.destroy_process_group(everyone)


def _compute_difference(latents: Tensor, reference: Tensor | None) -> float:
    """Return the largest difference as a share of the largest value.

    It is infinite if the shapes differ or a value is not finite, and 0 without a reference.
    """
    if reference is None:
        return 0.0
    latents = latents.cpu().double()
    reference = reference.double()
    if latents.shape != reference.shape:
        return math.inf
    if not latents.isfinite().all() or not reference.isfinite().all():
        return math.inf
    return float((latents - reference).abs().max() / reference.abs().max())


def _hash_latents(latents: Tensor) -> str:
    data = latents.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _measure_tensor_bytes(runner: Runner) -> int:
    """Measure the bytes of all tensors: allocated on a GPU, alive on a CPU."""
    release_memory()
    device = torch.device(runner.devices[runner.mesh.rank])
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    counts = []
    # gloo frees a sent tensor in a thread, a moment after the wait for it ends.
    for seconds in (0.0, 0.05, 0.05):
        time.sleep(seconds)
        sizes: dict[int, int] = {}
        for instance in gc.get_objects():
            # isinstance would ask proxies for their class, which may compute. A tensor of `vmap` has no storage.
            if issubclass(type(instance), torch.Tensor) and not torch._C._functorch.is_batchedtensor(instance):
                storage = instance.untyped_storage()
                if storage.device.type == "cpu":
                    sizes[storage._cdata] = storage.nbytes()
        counts.append(sum(sizes.values()))
    return min(counts)


def describe_versions(devices: Sequence[str]) -> str:
    """Describe versions and the devices of the ranks for a bug report."""
    device_types = sorted({torch.device(device).type for device in devices})
    machine = platform.machine()
    if "cuda" in device_types:
        machine = torch.cuda.get_device_name()
    return (
        f"ditile {__version__}, torch {torch.__version__}, diffusers {diffusers.__version__}, "
        f"Python {platform.python_version()}, {len(devices)} rank(s) on {', '.join(device_types)} {machine}"
    )
