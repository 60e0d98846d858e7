"""Proves an anatomy: a call that is computed patch by patch, with keys that are stale but did not change, is the whole.

A pipeline of a few steps whose scheduler stands still and whose inputs never change: after a synchronous step, patches
read keys of the step before, which are what they would be now. So every step must give what the whole model gives. The
code that runs is that of any other picture: the loop, the rehearsal, the hooks, the keys and their masks.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.cache.cached import find_transformer_cache
from ditile.model.anatomies import find_anatomy, forget_anatomy, make_unknown_error, refuse_wrapper, remember_anatomy
from ditile.model.block_lists import find_block_lists
from ditile.model.hooks.overrides import find_latents_parameter
from ditile.model.hooks.pieces import list_predictions
from ditile.model.hooks.token_arguments import find_unknown_rows, slice_rows
from ditile.model.pipeline_calls import find_denoisers, find_pipeline_device
from ditile.model.probe import derive_from_pipeline
from ditile.model.record import CapturedCall, find_skip, list_chain
from ditile.model.registry import find_model_spec
from ditile.parallel.tensor.derive import derive_tensor_cuts
from ditile.plan.errors import DitileError, ModelError, StateError
from ditile.plan.plan import Plan

TOLERANCE = 1e-4
"""Of the largest prediction, in float32: anatomies that are right differ by units of the last place, others by 1e-2."""

STEPS = 3

BuildRunner = Callable[[Any, Plan], Any]
"""Makes a runner of a pipeline under a plan of one rank."""


class StillScheduler:
    """A scheduler that returns the prediction in place of new latents."""

    order, init_noise_sigma = 1, 1.0
    config: Mapping[str, Any] = {}

    def set_timesteps(self, num_inference_steps: int, **others: Any) -> None:
        """Sets as many equal timesteps."""
        self.timesteps = torch.ones(num_inference_steps)

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """The prediction."""
        return (model_output,)


class StillPipeline(DiffusionPipeline):
    """Calls a transformer with the same arguments in every step; in the first, with those of calls before, if any.

    Args:
        transformer: the model.
    """

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
        """The predictions of every step, of all branches together: `[steps, *latents.shape]` of each stream."""
        self.scheduler.set_timesteps(num_inference_steps)
        schedulers = [self.scheduler, *(copy.deepcopy(self.scheduler) for _ in latents[1:])]
        steps = []
        before = [call.before for call in calls if isinstance(call, CapturedCall) and call.before is not None]
        for index, timestep in enumerate(self.scheduler.timesteps):
            results = [self.transformer(**call) for call in (before if before and not index else calls)]
            # What a call before gives may have another shape; it is there for what it keeps.
            predictions = latents if before and not index else combine_predictions(results)
            triples = zip(schedulers, predictions, latents, strict=True)
            latents = [scheduler.step(prediction, timestep, x)[0] for scheduler, prediction, x in triples]
            steps.append([x.clone() for x in latents])
        return tuple(torch.stack(each) for each in zip(*steps, strict=True))


def combine_predictions(results: Sequence[Any]) -> list[Tensor]:
    """Guidance of the branches of a step, each the result of a call: of a video, or of a video and its sound."""
    first, *others = (list_predictions(result) for result in results)
    for other in others:
        first = [2.0 * one - two for one, two in zip(first, other, strict=True)]
    return first


def prove_anatomy(
    transformer: nn.Module, calls: Sequence[Mapping[str, Any]], build: BuildRunner, *, patches: int = 3
) -> float:
    """The largest difference of a patched call to the whole one, and of rows apart, relative to the largest prediction.

    Args:
        transformer: in float32, whole, with an anatomy.
        calls: the arguments of the calls of one step: branches of guidance.
        build: makes a runner of a pipeline under a plan of one rank.
        patches: how many.

    Raises:
        DitileError: what a wrong anatomy runs into; others may do so too.
    """
    pipe = StillPipeline(transformer)
    with torch.no_grad():
        want = combine_predictions([transformer(**call) for call in calls])
    has_before = any(isinstance(call, CapturedCall) and call.before is not None for call in calls)
    runner = build(pipe, Plan(patches=patches, warmup=1))
    try:
        latents = [torch.zeros_like(x) for x in want]
        got = runner(calls=calls, latents=latents, num_inference_steps=STEPS + has_before)
    finally:
        runner.restore()
    # The first iterations are rehearsals. A stepped patch is in the latents when its turn comes in the next step, so
    # the last one is there when that turn follows, and at the end.
    ends = [*(len(got[0]) - 2 - patches * step for step in range(STEPS - 1)), -1]
    pairs = zip(got, want, strict=True)
    difference = max(float((steps[ends] - x).abs().max() / x.abs().max()) for steps, x in pairs)
    # Keys that an earlier call kept have rows too.
    return difference if has_before else max(difference, *(_compare_rows(transformer, call) for call in calls))


def _compare_rows(transformer: nn.Module, call: Mapping[str, Any]) -> float:
    """The difference of a call on each row of the batch alone to that on all, where its arguments are known."""
    anatomy, name = find_anatomy(transformer), find_latents_parameter(transformer)
    latents = call[name]
    rows = len(latents) if isinstance(latents, list) else int(latents.shape[0])
    if anatomy is None or rows == 1 or find_unknown_rows(call, anatomy.inputs, name, rows) is not None:
        return 0.0
    with torch.no_grad():
        whole = list_predictions(transformer(**call))
        parts = []
        for row in range(rows):
            own = slice_rows(call, anatomy.inputs, operator.itemgetter(slice(row, row + 1)))
            parts.append(list_predictions(transformer(**own)))
    joined = [
        torch.cat([x.reshape(1, *y.shape[1:]) for x in row])
        for row, y in zip(zip(*parts, strict=True), whole, strict=True)
    ]
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(joined, whole, strict=True))


def list_unknown_models(pipe: Any) -> list[nn.Module]:
    """The models of a pipeline whose anatomies are neither in the table nor derived yet."""
    unknown = []
    for transformer in find_denoisers(pipe).values():
        spec = find_model_spec(transformer)
        if find_anatomy(transformer) is None and (spec is None or spec.anatomy is None):
            unknown.append(transformer)
    return unknown


def ensure_anatomies(pipe: Any, build: BuildRunner, example: Mapping[str, Any] | None = None) -> None:
    """Derives and proves the anatomies of the models of a pipeline that are not in the table.

    Torch's random state is afterwards what it was: what is drawn next does not depend on the plan.

    Args:
        pipe: the pipeline.
        build: makes a runner of a pipeline under a plan of one rank.
        example: the arguments of a call of the pipeline; without them it is called with a prompt and a size.

    Raises:
        ProbeError: if the pipeline cannot be called with these arguments.
        ModelError: if one cannot be derived, or does not hold.
    """
    for transformer in list_unknown_models(pipe):
        refuse_wrapper(transformer)
        with torch.random.fork_rng(_list_random_devices(pipe)):
            _derive_and_prove(pipe, transformer, build, example)


def prove_pipeline(pipe: Any, build: BuildRunner) -> float:
    """The largest difference that the proof finds on twins of a pipeline's models, in calls that the pipeline makes.

    Args:
        pipe: with anatomies that are known, shipped, derived or written by hand.
        build: makes a runner of a pipeline under a plan of one rank.

    Raises:
        ModelError: if the pipeline cannot be called to see how it calls its models.
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
    """The GPUs that a pipeline may draw numbers on: other ones need not get a context here."""
    if not torch.cuda.is_initialized():
        return set()
    current, own = torch.cuda.current_device(), find_pipeline_device(pipe)
    return {current, own.index} if own.type == "cuda" and own.index is not None else {current}


def _derive_and_prove(pipe: Any, transformer: nn.Module, build: BuildRunner, example: Mapping[str, Any] | None) -> None:
    try:
        twin = make_twin(transformer)
    except ModelError as error:
        # The rest of it is what a cache could be told.
        raise make_unknown_error(transformer, str(error).partition("; ")[0]) from error
    anatomy, calls = derive_from_pipeline(pipe, transformer, twin, example)
    remember_anatomy(transformer, derive_tensor_cuts(twin, anatomy, calls[0]))
    try:
        for branches in list_proofs(twin, calls):
            _check_proof(transformer, twin, branches, build)
    except BaseException:
        forget_anatomy(transformer)
        raise


def make_twin(transformer: nn.Module, blocks: int = 2) -> nn.Module:
    """A copy of a transformer in float32 with few blocks and random weights, in which no gate is closed.

    Of each list it has the first blocks, and one of each other kind, such as those that have experts.
    """
    cache = find_transformer_cache(transformer)
    with ExitStack() as stack:
        if cache is not None:
            stack.enter_context(cache.lift_hooks())
        for each in find_block_lists(transformer):
            path, _, name = each.name.rpartition(".")
            owner = transformer.get_submodule(path)
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, nn.ModuleList(_select_unlike_blocks(each.blocks, blocks)))
        twin = copy.deepcopy(transformer).float().cpu().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in twin.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_matrix = parameter.ndim > 1
        noise = (
            noise / parameter[0].numel() ** 0.5 if is_matrix else noise * 0.1 + ("norm" in name and "weight" in name)
        )
        parameter.data = noise
    return twin


def _select_unlike_blocks(blocks: Sequence[nn.Module], number: int) -> list[nn.Module]:
    selected = list(blocks[:number])
    kinds = [[type(module) for module in block.modules()] for block in selected]
    for block in blocks[number:]:
        kind = [type(module) for module in block.modules()]
        if kind not in kinds:
            selected.append(block)
            kinds.append(kind)
    return selected


def list_proofs(transformer: nn.Module, calls: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The branches of guidance of each proof: each call alone, and the first with the next that has such latents."""
    name = find_latents_parameter(transformer)

    def describe_latents(call: Mapping[str, Any]) -> list[Any]:
        return [getattr(x, "shape", None) for x in pytree.tree_leaves(call[name])]

    first, *others = calls
    alike = [other for other in others if describe_latents(other) == describe_latents(first)]
    return [*([call] for call in calls), *([first, other] for other in alike[:1])]


def _check_proof(
    transformer: nn.Module, twin: nn.Module, branches: Sequence[Mapping[str, Any]], build: BuildRunner
) -> None:
    """Raises `ModelError` unless the anatomy of a transformer holds, by a twin and the branches of a step."""
    name = type(transformer).__name__
    remedy = "use a plan of data or cfg"
    try:
        difference = prove_anatomy(twin, branches, build)
    except DitileError as error:
        problem = f"{str(error).replace(StillPipeline.__name__, name)}; or {remedy}"
        raise ModelError(f"{name}: {_explain_skip(twin, branches[0]) or problem}") from error
    except Exception as error:  # whatever the model runs into where it is given too much or too little
        problem = f"it cannot be computed patch by patch: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelError(f"{name}: {_explain_skip(twin, branches[0]) or f'{problem}; {remedy}'}") from error
    if difference <= TOLERANCE:
        return
    problem = (
        f"a call computed patch by patch differs from the whole by {difference:.1e} of its largest value, and up to "
        f"{TOLERANCE:.0e} is rounding, so its blocks make something else of a part of the tokens, as with a table of "
        f"positions of their own; {remedy}"
    )
    raise ModelError(f"{name}: {_explain_skip(twin, branches[0]) or problem}")


def _explain_skip(twin: nn.Module, call: Mapping[str, Any]) -> str:
    """That tokens skip blocks, where they do; empty where they do not."""
    try:
        skip = find_skip(twin, list_chain(twin), call)
    except Exception:  # NaN is no index: what refused the model is said without this reason
        return ""
    if skip is None:
        return ""
    return (
        f"{skip[0]} hands its tokens to {skip[1]}, past the blocks between, and a divided model hands them from each "
        "block to the next alone; use a plan of data or cfg"
    )
