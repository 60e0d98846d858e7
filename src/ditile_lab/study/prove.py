"""Proves an anatomy: a call computed patch by patch, with keys that are stale but did not change, equals the whole.

A pipeline of a few steps has a scheduler that stands still and inputs that never change. After a synchronous step,
patches read keys of the step before, which equal the current ones. So every step must give the result of the whole
model. The code is that of any other image: the loop, the rehearsal, the hooks, the keys and their masks.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.model.anatomies import (
    DERIVED,
    compute_source_hash,
    find_anatomy,
    list_settings,
    make_unknown_error,
    refuse_wrapper,
)
from ditile.model.block_lists import find_block_lists
from ditile.model.block_table import AnatomyRow
from ditile.model.hooks.overrides import find_latents_parameter
from ditile.model.hooks.pieces import list_predictions
from ditile.model.hooks.token_arguments import find_unknown_rows, slice_rows
from ditile.model.pipeline_calls import find_denoisers, find_pipeline_device
from ditile.model.support import list_unknown_models
from ditile.parallel.block_formats import find_row_blocks
from ditile.plan.anatomy import Anatomy
from ditile.plan.errors import DitileError, ModelError, StateError, describe_class_and_text
from ditile.plan.plan import Plan
from ditile_lab.study.capture import CapturedCall
from ditile_lab.study.probe import derive_from_pipeline
from ditile_lab.study.record import find_skip, list_chain
from ditile_lab.study.tensor_cuts import derive_tensor_cuts

TOLERANCE = 1e-4
"""The largest error relative to the largest prediction, in float32: right anatomies differ by units of the last place,
others by 1e-2."""

# These are a synchronous step, and two with keys of the step before.
STEPS = 3

BuildRunner = Callable[[Any, Plan], Any]
"""Makes a runner of a pipeline under a plan of one rank."""


class StillScheduler:
    """A scheduler that returns the prediction instead of new latents."""

    order = 1
    init_noise_sigma = 1.0
    config: Mapping[str, Any] = {}

    def set_timesteps(self, num_inference_steps: int, **others: Any) -> None:
        """Set as many equal timesteps."""
        self.timesteps = torch.ones(num_inference_steps)

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Return the prediction."""
        return (model_output,)


class StillPipeline(DiffusionPipeline):
    """Calls a transformer with the same arguments in every step; in the first with earlier calls' arguments, if any."""

    vae_scale_factor = 1
    transformer: Any

    def __init__(self, transformer: nn.Module) -> None:
        pipe: Any = super()
        pipe.__init__()
        pipe.register_modules(transformer=transformer)
        self.scheduler = StillScheduler()
        pipe.set_progress_bar_config(disable=True)

    @torch.no_grad()
    def __call__(
        self, calls: Sequence[Mapping[str, Any]], latents: Sequence[Tensor], num_inference_steps: int = STEPS
    ) -> Any:
        """Return the predictions of every step, of all branches together: `[steps, *latents.shape]` of each stream."""
        self.scheduler.set_timesteps(num_inference_steps)
        schedulers = [self.scheduler]
        schedulers += [copy.deepcopy(self.scheduler) for _ in latents[1:]]
        earlier_calls = _list_earlier_calls(calls)
        steps = []
        for index, timestep in enumerate(self.scheduler.timesteps):
            if earlier_calls and index == 0:
                for call in earlier_calls:
                    self.transformer(**call)
                # The result of an earlier call may have another shape; the call is made only for the keys that it
                # keeps.
                predictions = latents
            else:
                predictions = combine_predictions([self.transformer(**call) for call in calls])
            stepped = []
            for scheduler, prediction, sample in zip(schedulers, predictions, latents, strict=True):
                stepped.append(scheduler.step(prediction, timestep, sample)[0])
            latents = stepped
            steps.append([x.clone() for x in latents])
        return tuple(torch.stack(stream) for stream in zip(*steps, strict=True))


def _list_earlier_calls(calls: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """List the calls that fill the cache of keys for the calls of a step."""
    earlier_calls = []
    for call in calls:
        if isinstance(call, CapturedCall) and call.before is not None:
            earlier_calls.append(call.before)
    return earlier_calls


def combine_predictions(results: Sequence[Any]) -> list[Tensor]:
    """Combine the branches of a step by guidance, each the result of a call: of a video, or of a video and its
    sound."""
    combined, *others = (list_predictions(result) for result in results)
    for other in others:
        combined = [2.0 * one - two for one, two in zip(combined, other, strict=True)]
    return combined


def prove_anatomy(
    transformer: nn.Module, calls: Sequence[Mapping[str, Any]], build: BuildRunner, *, patches: int = 3
) -> float:
    """Measure the largest error of a patched call and of separate rows, relative to the largest prediction.

    Args:
        transformer: in float32, whole, with an anatomy.
        calls: the arguments of the calls of one step: branches of guidance.
        build: makes a runner of a pipeline under a plan of one rank.
        patches: the number of patches.

    Raises:
        DitileError: raised by a wrong anatomy; other errors are possible too.
    """
    pipe = StillPipeline(transformer)
    with torch.no_grad():
        expected = combine_predictions([transformer(**call) for call in calls])
    has_earlier = bool(_list_earlier_calls(calls))
    runner = build(pipe, Plan(patches=patches, warmup=1))
    try:
        latents = [torch.zeros_like(x) for x in expected]
        actual = runner(calls=calls, latents=latents, num_inference_steps=STEPS + has_earlier)
    finally:
        runner.restore()
    # The first iterations are rehearsals. A denoised patch is in the latents when its turn comes in the next step, so
    # the last one is there when that turn follows, and at the end.
    num_iterations = len(actual[0])
    ends = [num_iterations - 2 - patches * step for step in range(STEPS - 1)]
    ends.append(-1)
    differences = []
    for steps, x in zip(actual, expected, strict=True):
        difference = (steps[ends] - x).abs().max()
        differences.append(float(difference / x.abs().max()))
    # Keys that an earlier call kept also have rows, so these cannot be compared.
    if not has_earlier:
        differences += [_compare_rows(transformer, call) for call in calls]
    return max(differences)


def _compare_rows(transformer: nn.Module, call: Mapping[str, Any]) -> float:
    """Compare a call on separate rows of the batch with one on all, if the arguments' rows are known."""
    anatomy = find_anatomy(transformer)
    name = find_latents_parameter(transformer)
    rows = len(call[name])
    if anatomy is None or rows == 1 or find_unknown_rows(call, anatomy.inputs, name, rows) is not None:
        return 0.0
    with torch.no_grad():
        whole = list_predictions(transformer(**call))
        parts = []
        for row in range(rows):
            call_of_row = slice_rows(call, anatomy.inputs, operator.itemgetter(slice(row, row + 1)))
            parts.append(list_predictions(transformer(**call_of_row)))
    differences = []
    for stream, expected in enumerate(whole):
        rows_of_stream = [part[stream].reshape(1, *expected.shape[1:]) for part in parts]
        difference = (torch.cat(rows_of_stream) - expected).abs().max()
        differences.append(float(difference / expected.abs().max()))
    return max(differences)


def ensure_anatomies(pipe: Any, build: BuildRunner, example: Mapping[str, Any] | None = None) -> None:
    """Derive and prove the anatomies of a pipeline's models outside the table.

    Torch's random state is restored, so that later random numbers do not depend on the plan.

    Args:
        build: makes a runner of a pipeline under a plan of one rank.
        example: the arguments of a call of the pipeline; without them it is called with a prompt and a size.

    Raises:
        ProbeError: if the pipeline cannot be called with these arguments.
        ModelError: if an anatomy cannot be derived, or does not hold.
    """
    for transformer in list_unknown_models(pipe):
        refuse_wrapper(transformer)
        with torch.random.fork_rng(_list_random_devices(pipe)):
            _derive_and_prove(pipe, transformer, build, example)


def prove_pipeline(pipe: Any, build: BuildRunner) -> float:
    """Measure the largest error of the proof on twins of a pipeline's models, in calls made by the pipeline.

    Args:
        pipe: with known anatomies: shipped, derived or written by hand.
        build: makes a runner of a pipeline under a plan of one rank.

    Raises:
        ModelError: if the pipeline cannot be called to observe its calls of the models.
        StateError: if a call cannot be computed patch by patch.
    """
    differences = []
    with torch.random.fork_rng(_list_random_devices(pipe)):
        for transformer in find_denoisers(pipe).values():
            twin = make_twin(transformer)
            _, calls = derive_from_pipeline(pipe, transformer, twin)
            try:
                differences += [prove_anatomy(twin, branches, build) for branches in list_proofs(twin, calls)]
            except DitileError as error:
                name = type(transformer).__name__
                raise StateError(f"{name}: {str(error).replace(StillPipeline.__name__, name)}") from error
    return max(differences)


def _list_random_devices(pipe: Any) -> set[int]:
    """Return the GPUs whose random numbers a pipeline may use; other ones need no context here."""
    if not torch.cuda.is_initialized():
        return set()
    devices = {torch.cuda.current_device()}
    device = find_pipeline_device(pipe)
    if device.type == "cuda" and device.index is not None:
        devices.add(device.index)
    return devices


def _derive_and_prove(pipe: Any, transformer: nn.Module, build: BuildRunner, example: Mapping[str, Any] | None) -> None:
    try:
        twin = make_twin(transformer)
    except ModelError as error:
        # The rest of the message is advice on caches.
        raise make_unknown_error(transformer, str(error).partition("; ")[0]) from error
    anatomy, calls = derive_from_pipeline(pipe, transformer, twin, example)
    remember_anatomy(transformer, derive_tensor_cuts(twin, anatomy, calls[0]))
    try:
        for branches in list_proofs(twin, calls):
            _check_proof(transformer, twin, branches, build)
    except BaseException:
        forget_anatomy(transformer)
        raise


def remember_anatomy(transformer: nn.Module, anatomy: Anatomy) -> None:
    """Keep the anatomy of a class for this process, in place of an earlier one."""
    new_row = {**write_row(transformer, anatomy), "of": list_settings(transformer)}
    # The newest row comes first, and replaces rows derived from the same sources and settings.
    rows: list[AnatomyRow] = [new_row]
    for row in DERIVED.get(type(transformer), ()):
        if row["source"] != new_row["source"] or row["of"] != new_row["of"]:
            rows.append(row)
    DERIVED[type(transformer)] = rows


def forget_anatomy(transformer: nn.Module) -> None:
    """Forget the derived anatomies of a class."""
    DERIVED.pop(type(transformer), None)


def write_row(transformer: nn.Module, anatomy: Anatomy) -> dict[str, Any]:
    """Build the row of a transformer's class."""
    row = {"source": compute_source_hash(transformer, anatomy.lists), **asdict(anatomy)}
    return {name: value for name, value in row.items() if value or name in ("source", "lists", "joint", "inputs")}


def make_twin(transformer: nn.Module, blocks: int = 2) -> nn.Module:
    """Copy a transformer in float32 with few blocks and random weights, which leave no gate closed.

    It has the first blocks of each list, and one of each other type, such as blocks with experts.

    Raises:
        ModelError: if it has weights in blocks, such as those of GGUF, which cannot be copied and filled with random
            numbers.
    """
    for name, parameter in transformer.named_parameters():
        row_blocks = find_row_blocks(parameter)
        if row_blocks is not None:
            raise ModelError(f"{name} is stored in blocks of {row_blocks.name}; give the model with plain weights")
    with ExitStack() as stack:
        for block_list in find_block_lists(transformer):
            path, _, name = block_list.name.rpartition(".")
            owner = transformer.get_submodule(path)
            # This is before the copy, so that it does not take all blocks; the transformer gets its list back later.
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, nn.ModuleList(_select_unlike_blocks(block_list.blocks, blocks)))
        twin = copy.deepcopy(transformer).float().cpu().eval()
    # Zeros, like in the gates of a new model, would hide the effect of a wrong anatomy.
    generator = torch.Generator().manual_seed(0)
    for name, parameter in twin.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            # This makes outputs about as large as inputs.
            noise = noise / parameter[0].numel() ** 0.5
        else:
            noise = noise * 0.1
            # Weights of norms stay near 1.
            if "norm" in name and "weight" in name:
                noise = noise + 1
        parameter.data = noise
    return twin


def _select_unlike_blocks(blocks: Sequence[nn.Module], number: int) -> list[nn.Module]:
    """Select the first blocks, and the first of each other composition."""
    selected: list[nn.Module] = []
    compositions: list[list[type]] = []
    for index, block in enumerate(blocks):
        composition = [type(module) for module in block.modules()]
        if index < number or composition not in compositions:
            selected.append(block)
            compositions.append(composition)
    return selected


def list_proofs(transformer: nn.Module, calls: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """List the guidance branches of each proof: each call by itself, and the first with the next of equal latents."""
    name = find_latents_parameter(transformer)

    def describe_latents(call: Mapping[str, Any]) -> list[Any]:
        return [getattr(x, "shape", None) for x in pytree.tree_leaves(call[name])]

    proofs: list[list[Mapping[str, Any]]] = [[call] for call in calls]
    for other in calls[1:]:
        if describe_latents(other) == describe_latents(calls[0]):
            proofs.append([calls[0], other])
            break
    return proofs


def _check_proof(
    transformer: nn.Module, twin: nn.Module, branches: Sequence[Mapping[str, Any]], build: BuildRunner
) -> None:
    """Raise `ModelError` unless a transformer's anatomy holds on a twin with the branches of a step."""
    name = type(transformer).__name__
    remedy = "use a plan of data or cfg"
    cause: Exception | None = None
    try:
        difference = prove_anatomy(twin, branches, build)
        problem = (
            f"a call computed patch by patch differs from the whole by {difference:.1e} of its largest value, and up "
            f"to {TOLERANCE:.0e} is rounding, so its blocks make something else of a part of the tokens, as with a "
            f"table of positions of their own; {remedy}"
        )
        if difference <= TOLERANCE:
            return
    except DitileError as error:
        cause = error
        problem = f"{str(error).replace(StillPipeline.__name__, name)}; or {remedy}"
    except Exception as error:  # the model may raise anything for inputs with too many or too few tokens
        cause = error
        problem = f"it cannot be computed patch by patch: {describe_class_and_text(error)}; {remedy}"
    raise ModelError(f"{name}: {_explain_skip(twin, branches[0]) or problem}") from cause


def _explain_skip(twin: nn.Module, call: Mapping[str, Any]) -> str:
    """Explain that tokens skip blocks; empty if they do not."""
    try:
        skip = find_skip(twin, list_chain(twin), call)
    except Exception:  # NaN is not a valid index; the refusal then lacks this reason
        return ""
    if skip is None:
        return ""
    return (
        f"{skip[0]} hands its tokens to {skip[1]}, past the blocks between, and a divided model hands them from each "
        "block to the next alone; use a plan of data or cfg"
    )
