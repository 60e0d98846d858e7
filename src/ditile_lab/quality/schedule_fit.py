"""`ditile fit`: generates captions in full, fits a schedule of computed steps to them, and measures its loss.

In full means with more steps than anyone waits for, 48 for a pipeline of 20: a schedule of few calls that is fitted to
these is closer to what the model means than the pipeline's own steps are.

One process generates. For each caption it keeps the products of the scheduler's inputs in all steps, not the tensors.
Then it generates the captions again with the most common budgets, and compares the images in 8 bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ditile.cache.config import FittedScheduleConfig
from ditile.cache.fitted.identity import (
    Identity,
    describe_call,
    describe_latents,
    describe_models,
    describe_scheduler,
)
from ditile.cache.fitted.schedule import FEWEST_FORECAST_STEPS, OwnSteps, Schedule, StepBudget
from ditile.model.hooks.overrides import WatchedMethod, find_latents_parameter, list_parameter_names, override_attribute
from ditile.parallel.pipefusion.patch_schedulers import StepSignature, extract_sample
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.runner.compose import find_loop_models
from ditile.runner.model_files import defaults
from ditile.runner.requests.arguments import build_call_arguments, build_object_arguments
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.facts import count_request_steps
from ditile.runner.requests.options import EngineOptions
from ditile.runner.requests.preflight import read_condition_files
from ditile.runner.requests.prepare import prepare_runner
from ditile.runner.requests.results import list_drawn
from ditile_lab.quality.captions import BUNDLED_SOURCE, load_captions
from ditile_lab.quality.fit import Matrix, compute_gram_matrix, fit_budgets
from ditile_lab.quality.metrics import compute_psnr
from ditile_lab.quality.options import FitOptions
from ditile_lab.sessions import use_cache_within

if TYPE_CHECKING:
    from rich.table import Table

MEASURED_GAINS = 7
"""The number of steps in which the effect of an error is measured; it is interpolated between them."""

CAPTIONS_OF_GAINS = 3
"""The number of captions for this measurement, which hardly depends on the caption."""

MEASURED_SHARES = (0.75, 0.6, 0.5, 0.4, 0.3)
"""The shares of computed steps that are measured: above them little is saved, and below them images change."""

Frames = NDArray[np.uint8]


@dataclass(slots=True)
class StepRecord:
    """The inputs of the scheduler in one call of a pipeline.

    Attributes:
        predictions: the prediction of each step, in the host's memory.
        latents: the latents after the last step, in the host's memory.
        models: the number of the model that was called before each step.
        shape: the shape of one image's latents, in the form that the first model takes.
    """

    predictions: list[Tensor] = field(default_factory=list)
    latents: Tensor = field(default_factory=lambda: torch.empty(0))
    models: list[int] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    called: int = 0


class FullRun(NamedTuple):
    """One caption, generated with all steps: the frames `[frames, H, W, 3]`, the recorded steps, and their products.

    Only the predictions of the first captions are kept. `own_frames` are those of the pipeline's own number of steps.
    """

    frames: Frames
    own_frames: Frames
    steps: StepRecord
    gram: Matrix


@contextmanager
def record_steps(pipe: Any) -> Iterator[StepRecord]:
    """Record the steps of a pipeline's calls within the context."""
    record = StepRecord()
    signature = StepSignature(pipe.scheduler)

    def note_step(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The prediction is copied, because the pipeline may write into it.
        record.predictions.append(signature.bind(args, kwargs).prediction.detach().to("cpu", copy=True))
        record.models.append(record.called)
        result = stock(*args, **kwargs)
        record.latents = extract_sample(result).detach().to("cpu", copy=True)
        return result

    def note_call(number: int, name: str, place: int, model: nn.Module, args: Any, kwargs: Any) -> None:
        record.called = number
        latents = kwargs.get(name)
        if latents is None and place < len(args):
            latents = args[place]
        record.shape = record.shape or describe_latents(latents)

    with ExitStack() as stack:
        watched = WatchedMethod(note_step, pipe.scheduler.step)
        override_attribute(stack, pipe.scheduler, "step", watched)
        for number, model in enumerate(find_loop_models(pipe)):
            name = find_latents_parameter(model)
            place = list_parameter_names(model).index(name)
            note = functools.partial(note_call, number, name, place)
            stack.callback(model.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield record


class ScheduleFitting:
    """Fits a schedule to a model.

    Args:
        options: the model, the call, and the number of captions.

    Raises:
        DitileError: if the model or an option does not fit.
    """

    def __init__(self, options: FitOptions) -> None:
        self._options = options
        self._captions = choose_captions(options)
        request = options.to_generate_options(prompt=self._captions[0], seed=options.seed)
        self._request = request
        engine = EngineOptions(
            dtype=options.dtype, device=options.device, threads=options.threads, stall_timeout=options.stall_timeout
        )
        self._conditions = read_condition_files(request)
        self._pipe, self._runner = prepare_runner(
            options.model,
            engine,
            Plan(),
            CacheOptions(),
            conditions=list(self._conditions),
            components=options.components,
        )
        self._pipe.set_progress_bar_config(disable=True)
        self._base = build_call_arguments(self._pipe, request, defaults(options.model))
        self._own_steps = count_request_steps(request)
        self._reference_steps = options.choose_reference_steps(self._own_steps)
        if self._reference_steps < self._own_steps:
            raise ModelError(
                f"reference_steps={self._reference_steps} are fewer than the {self._own_steps} steps of the call; give "
                f"{self._own_steps} or more"
            )

    def fit(self) -> Schedule:
        """Fit the schedule, and return it with the measurements."""
        total = len(self._captions)
        with show_progress_bar("generating with all steps", total) as advance:
            runs: list[FullRun] = []
            for number, caption in enumerate(self._captions):
                runs.append(self._generate_in_full(number, caption))
                advance(1)
        models = runs[0].steps.models
        switches = []
        for step in range(1, len(models)):
            if models[step] != models[step - 1]:
                switches.append(step)
        self._identity = self._describe_identity(runs[0].steps)
        gains = self._find_gains(runs, switches)
        gram = np.mean([run.gram for run in runs], axis=0)
        mean_square = float(np.mean([_measure_square(run.steps.latents) for run in runs]))
        budgets = fit_budgets(gram, gains, switches, mean_square, has_exact_gains=self._is_first_order)
        if self._is_finer:
            # A call with as many steps as the pipeline's own saves nothing.
            budgets = [budget for budget in budgets if budget.size < self._own_steps]
        return self._measure_budgets(self._make_schedule(*budgets), runs)

    @property
    def _is_finer(self) -> bool:
        """Return whether the schedule is fitted to more steps than the pipeline's own."""
        return self._reference_steps > self._own_steps

    def _generate_in_full(self, number: int, caption: str) -> FullRun:
        # The pipeline's own steps come first, because the scheduler's sigmas are read after the finer run.
        own_frames = np.empty(0, np.uint8)
        if self._is_finer:
            own_frames = self._generate(number, caption, self._own_steps)
        with record_steps(self._pipe) as record:
            frames = self._generate(number, caption, self._reference_steps)
        if len(record.predictions) < 2:
            raise ModelError(
                f"model {self._options.model!r} made {len(record.predictions)} step(s) with its scheduler, and of one "
                "alone none can be left out; give more steps"
            )
        gram = compute_gram_matrix(record.predictions)
        if number >= CAPTIONS_OF_GAINS:
            record.predictions.clear()
        return FullRun(frames, own_frames, record, gram)

    def _generate(self, number: int, caption: str, num_steps: int) -> Frames:
        """Return the image of a caption in 8 bits `[frames, H, W, 3]`."""
        seed = self._options.seed + number
        call: CallArguments = self._base | {"num_inference_steps": num_steps}
        call |= build_object_arguments(self._pipe, self._request, [seed], conditions=self._conditions)
        if "prompt" in call:
            call["prompt"] = caption
        frames: list[Any] = []
        for drawn in list_drawn(self._pipe, self._runner(**call)):
            if isinstance(drawn, list | tuple):
                frames += drawn
            else:
                frames.append(drawn)
        return np.stack([np.asarray(frame)[..., :3] for frame in frames]).astype(np.uint8)

    def _describe_identity(self, steps: StepRecord) -> Identity:
        models = find_loop_models(self._pipe)
        fields = describe_models(models) | describe_call(self._pipe, models[0], self._base)
        fields |= describe_scheduler(self._pipe.scheduler, len(steps.models))
        return Identity(**fields, latents=steps.shape)

    def _make_schedule(self, *budgets: StepBudget) -> Schedule:
        return Schedule(
            model=self._options.model, identity=self._identity, captions=len(self._captions), budgets=budgets
        )

    @property
    def _is_first_order(self) -> bool:
        """Return whether a step only adds its prediction to the latents, by a factor from the sigmas."""
        return type(self._pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"

    def _find_gains(self, runs: Sequence[FullRun], switches: Sequence[int]) -> list[float]:
        """Find the effect of an error in each step's prediction on the final latents."""
        num_steps = len(runs[0].gram)
        if self._is_first_order:
            sigmas = [*self._identity.sigmas, 0.0]
            return [abs(after - before) for before, after in itertools.pairwise(sigmas)]
        # Other schedulers also use a prediction in later steps, or scale it, so its effect is measured.
        spread_steps = {round(step) for step in np.linspace(1, num_steps - 1, MEASURED_GAINS)}
        steps = sorted(spread_steps.difference(switches))
        measured: list[float] = []
        with show_progress_bar("measuring the effect of errors", len(steps)) as advance:
            for step in steps:
                measured.append(self._measure_gain(step, runs[:CAPTIONS_OF_GAINS]))
                advance(1)
        logs = np.interp(np.arange(num_steps), steps, np.log(np.maximum(measured, 1e-12)))
        return [math.exp(log) for log in logs]

    def _measure_gain(self, step: int, runs: Sequence[FullRun]) -> float:
        """Return the change of the final latents over the error of one step that reuses the last prediction."""
        others = tuple(number for number in range(len(runs[0].gram)) if number != step)
        budget = StepBudget(computed=others, weights={step: (1.0, 0.0)}, predicted_db=0.0)
        moved = 0.0
        missed = 0.0
        for number, run in enumerate(runs):
            with record_steps(self._pipe) as record:
                self._generate_with(self._make_schedule(budget), len(others), number)
            predictions = run.steps.predictions
            moved += _measure_square(record.latents - run.steps.latents)
            missed += _measure_square(predictions[step - 1] - predictions[step])
        return math.sqrt(moved / max(missed, 1e-30))

    def _generate_with(self, schedule: Schedule, size: int, number: int) -> Frames:
        """Generate the image of a caption with `size` computed steps."""
        config = FittedScheduleConfig(steps=size, schedule=schedule)
        with use_cache_within(self._runner, {"cache_config": config}):
            return self._generate(number, self._captions[number], self._reference_steps)

    def _measure_budgets(self, schedule: Schedule, runs: Sequence[FullRun]) -> Schedule:
        """Return the schedule with the measured PSNR of the budgets that matter."""
        sizes = {budget.size for budget in schedule.budgets} & {*choose_measured_sizes(self._own_steps)}
        budgets: list[StepBudget] = []
        with show_progress_bar("generating with fewer steps", len(sizes) * len(runs)) as advance:
            for budget in schedule.budgets:
                if budget.size not in sizes:
                    budgets.append(budget)
                    continue
                drawn = []
                for number in range(len(runs)):
                    drawn.append(self._generate_with(schedule, budget.size, number))
                    advance(1)
                measured = _compare(drawn, [run.frames for run in runs])
                if self._is_finer:
                    to_own = _compare(drawn, [run.own_frames for run in runs])
                    measured |= {f"own_{name}": value for name, value in to_own.items()}
                budgets.append(budget.model_copy(update=measured))
        own = None
        if self._is_finer:
            differences = _compare([run.own_frames for run in runs], [run.frames for run in runs])
            own = OwnSteps(steps=self._own_steps, **differences)
        return schedule.model_copy(update={"budgets": tuple(budgets), "own": own})


def _compare(drawn: Sequence[Frames], others: Sequence[Frames]) -> dict[str, float]:
    """Return the mean and the worst PSNR of images to others of the same captions."""
    decibels = list(map(compute_decibels, drawn, others))
    return {"mean_db": round(float(np.mean(decibels)), 2), "worst_db": round(min(decibels), 2)}


def choose_captions(options: FitOptions) -> list[str]:
    """Choose the captions for the fit. Of the bundled ones it takes the last: `ditile evaluate` takes the first.

    Raises:
        ModelError: if the source cannot be read, or has fewer captions.
    """
    count = options.num_captions
    captions = [caption.text for caption in load_captions(options.captions, None, 10**6)]
    if count > len(captions):
        raise ModelError(
            f"num_captions={count} exceeds the {len(captions)} captions of {options.captions!r}; give {len(captions)} "
            "or less"
        )
    if options.captions == BUNDLED_SOURCE:
        return captions[-count:]
    return captions[:count]


def choose_measured_sizes(num_steps: int) -> list[int]:
    """Choose the numbers of computed steps for which images are compared with those of all steps, the most first."""
    if num_steps < FEWEST_FORECAST_STEPS:
        return list(range(num_steps - 1, 1, -1))
    return [round(share * num_steps) for share in MEASURED_SHARES]


def compute_decibels(frames: Frames, others: Frames) -> float:
    """Compute the PSNR of an image, or of all frames of a video."""
    # A video is one tall image here.
    shape = (1, -1, *frames.shape[-2:])
    return float(compute_psnr(frames.reshape(shape), others.reshape(shape))[0])


def _measure_square(values: Tensor) -> float:
    return float(values.double().square().mean())


def fit_schedule(options: FitOptions) -> tuple[Schedule, Path]:
    """Fit a schedule and write it; return it and its file.

    Raises:
        DitileError: if the model or an option does not fit; nothing is written then.
    """
    schedule = ScheduleFitting(options).fit()
    path = Path(options.choose_file(schedule.num_steps))
    schedule.write(path)
    return schedule, path


def build_schedule_table(schedule: Schedule) -> Table:
    """Build a table with a line for each budget, within 80 columns."""
    from rich.table import Table

    own = schedule.own
    title = f"{schedule.model}, {schedule.num_steps} steps, {schedule.captions} captions"
    titles = ["steps", "work, %", "expected, dB", "mean, dB", "worst, dB"]
    if own is not None:
        title += f"\n{own.steps} plain steps are {own.mean_db:.1f} dB from these, at worst {own.worst_db:.1f}"
        titles = ["steps", "work, %", "expected", "mean, dB", "worst", f"to {own.steps} steps", "worst"]
    table = Table(title=title)
    for name in titles:
        table.add_column(name, justify="right")
    all_steps = schedule.num_steps
    if own is not None:
        all_steps = own.steps
    for budget in schedule.budgets:
        row = [str(budget.size), f"{100 * budget.size / all_steps:.0f}", f"{budget.predicted_db:.1f}"]
        measured = [budget.mean_db, budget.worst_db]
        if own is not None:
            measured += [budget.own_mean_db, budget.own_worst_db]
        for decibels in measured:
            cell = "-"
            if decibels is not None:
                cell = f"{decibels:.1f}"
            row.append(cell)
        table.add_row(*row)
    return table
