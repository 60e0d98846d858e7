"""Guidance that takes a statistic of the whole prediction, remembers earlier ones, or perturbs blocks.

Bit for bit the pipeline on two and three ranks where all of a prediction is of the step at hand. In stale steps a
statistic is one of a prediction that is partly one step old, said once; a memory is refused before the first step. What
ditile knows of diffusers' loops is a table, which is compared with the source of the installed ones.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers
import pytest
import torch
from diffusers.callbacks import SD3CFGCutoffCallback
from diffusers.guiders import (
    AdaptiveProjectedGuidance,
    ClassifierFreeGuidance,
    ClassifierFreeZeroStarGuidance,
    MagnitudeAwareGuidance,
    TangentialClassifierFreeGuidance,
)

from ditile.model import pipeline_calls
from ditile.model.pipeline_calls import explain_callback_refusal, explain_latent_cut, is_guidance_timed
from ditile.plan.errors import DitileError, ModelError, StateError
from ditile.runner import runner as runner_module
from ditile_lab.study.flows import parse_function, read_name, read_own_attribute
from tests.parallel.batch.test_batch import close, made
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, different, divided, run, same
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

_NUMBER_FUNCTIONS = ("float", "int", "bool", "min", "max", "abs", "round")
"""Functions of plain numbers, whose result depends on the step if an argument does."""
_ROW_FUNCTIONS = ("repeat", "cat", "concat", "stack", "tile", "repeat_interleave")
"""Functions that repeat or join tensors, as pipelines do to make rows for the branches of guidance."""


@functools.cache
def find_latent_cuts(pipeline_call: Callable[..., Any]) -> Mapping[str, frozenset[str]]:
    """The lines of a pipeline's loop that replace the latents by a part of them, such as `latents = latents[:, 1:]`.

    Returns:
        Each line -> the names that must all be true for the line to run.
    """
    cuts = dict[str, frozenset[str]]()
    for loop in _list_loops(pipeline_call):
        stepped = set[str]()
        for step in _list_step_calls(loop):
            # The third argument of `step` is the latents.
            stepped |= set(map(read_name, step.args[2:3])) - {""}
        for node, names in _walk_guarded(loop.body, frozenset()):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Subscript):
                continue
            # The line assigns a part of the latents to the name of the latents.
            sides = set(map(read_name, (node.value.value, *node.targets)))
            if len(sides) == 1 and sides <= stepped:
                cuts[ast.unparse(node)] = names
    return cuts


@functools.cache
def find_timed_guidance(pipeline_call: Callable[..., Any]) -> frozenset[str]:
    """The names that decide in which steps a pipeline's loop calls its model, or on how many rows.

    Returns:
        The names in conditions that depend on the step; empty if every step calls the model in the same way.
    """
    deciding = set[str]()
    for loop in _list_loops(pipeline_call):
        if _list_step_calls(loop):
            deciding |= _TimedConditions(loop).deciding
    return frozenset(deciding)


def _list_loops(pipeline_call: Callable[..., Any]) -> list[ast.For]:
    function = parse_function(pipeline_call)
    if function is None:
        return []
    return [node for node in ast.walk(function) if isinstance(node, ast.For)]


def _list_step_calls(loop: ast.For) -> list[ast.Call]:
    """The calls of a scheduler's `step` in a loop."""
    steps = []
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "step":
            steps.append(node)
    return steps


class _TimedConditions(ast.NodeVisitor):
    """Finds the conditions in a loop over timesteps that depend on the step, starting from the loop's own variables.

    A name is called timed if its value depends on the step.

    Attributes:
        deciding: the names in timed conditions that guard a call of the model, or an assignment to its arguments.
    """

    def __init__(self, loop: ast.For) -> None:
        self.deciding = set[str]()
        self._timed = _list_names(loop.target)
        self._conditions: list[set[str]] = []
        # Name -> the names that its value is computed from.
        self._sources: dict[str, set[str]] = {}
        self._model_arguments = set[str]()
        for node in ast.walk(loop):
            if isinstance(node, ast.Call) and _is_model_call(node):
                for argument in (*node.args, *(word.value for word in node.keywords)):
                    self._model_arguments |= _list_names(argument)
        for statement in loop.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        """A name becomes timed if it is computed from a timed name, or assigned under a timed condition."""
        self.generic_visit(node)
        names = set[str]().union(*map(_list_names, node.targets))
        if self._conditions and names & self._model_arguments and _may_change_rows(node.value):
            self._note_conditions()
        read = _list_scalar_names(node.value)
        if read & self._timed or self._conditions:
            self._timed |= names
            sources = self._trace_sources(read).union(*self._conditions)
            for name in names:
                self._sources[name] = self._sources.get(name, set()) | sources

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A timed condition decides whether the model is called."""
        self.generic_visit(node)
        if self._conditions and _is_model_call(node):
            self._note_conditions()

    def visit_If(self, node: ast.If) -> None:  # noqa: N802
        """The condition guards both branches."""
        self._visit_condition(node, (*node.body, *node.orelse))

    def visit_IfExp(self, node: ast.IfExp) -> None:  # noqa: N802
        """The condition guards both values of a conditional expression."""
        self._visit_condition(node, (node.body, node.orelse))

    def _visit_condition(self, node: ast.If | ast.IfExp, branches: Sequence[ast.AST]) -> None:
        self.visit(node.test)
        names = _list_scalar_names(node.test)
        is_timed = bool(names & self._timed)
        if is_timed:
            self._conditions.append(self._trace_sources(names))
        for branch in branches:
            self.visit(branch)
        if is_timed:
            self._conditions.pop()

    def _trace_sources(self, names: set[str]) -> set[str]:
        """These names, and the names that their values are computed from."""
        return names.union(*(self._sources.get(name, set()) for name in names))

    def _note_conditions(self) -> None:
        self.deciding = self.deciding.union(*self._conditions)


def _is_model_call(node: ast.Call) -> bool:
    """Whether a pipeline calls its transformer or U-Net."""
    return read_own_attribute(node.func).startswith(("transformer", "unet"))


def _may_change_rows(value: ast.AST) -> bool:
    return any(getattr(node, "attr", None) in _ROW_FUNCTIONS for node in ast.walk(value))


def _list_names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _list_scalar_names(node: ast.AST) -> set[str]:
    """The names in an expression, attributes of `self` included; arguments only of `_NUMBER_FUNCTIONS`."""
    attribute = read_own_attribute(node)
    if attribute:
        return {attribute.lstrip("_")}
    if isinstance(node, ast.Name):
        return {node.id}
    parts: Sequence[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        parts = node.args if read_name(node.func) in _NUMBER_FUNCTIONS else [node.func]
    return set[str]().union(*map(_list_scalar_names, parts))


def _walk_guarded(body: Sequence[ast.stmt], names: frozenset[str]) -> Iterator[tuple[ast.stmt, frozenset[str]]]:
    """Each statement with the names that must be true for it to run: those tested by `if name` or `if a and b`."""
    for node in body:
        yield node, names
        if isinstance(node, ast.If):
            yield from _walk_guarded(node.body, names | _list_required_names(node.test))
            yield from _walk_guarded(node.orelse, names)
        elif isinstance(node, ast.For | ast.While | ast.With):
            yield from _walk_guarded(node.body, names)


def _list_required_names(test: ast.expr) -> set[str]:
    """The names that must be true for a condition to hold."""
    tested = [test]
    if isinstance(test, ast.BoolOp):
        tested = test.values
        # None of several alternatives has to be true.
        if not isinstance(test.op, ast.And):
            return set()
    return set(map(read_name, tested)) - {""}


pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, PATCHES = 4, 3
RESCALED: dict[str, dict[str, Any]] = {
    "ltx": {"guidance_rescale": 0.7},
    "ltx-condition": {"guidance_rescale": 0.7},
    "easy-animate": {"guidance_rescale": 0.7},
    "ltx-2": {"guidance_rescale": 0.6, "audio_guidance_rescale": 0.5},
}
GUIDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rescaled": (ClassifierFreeGuidance, {"guidance_scale": 3.0, "guidance_rescale": 0.5}),
    "momentum": (AdaptiveProjectedGuidance, {"adaptive_projected_guidance_momentum": -0.5}),
    "zero star": (ClassifierFreeZeroStarGuidance, {"guidance_scale": 3.0}),
    "magnitude": (MagnitudeAwareGuidance, {"guidance_scale": 3.0}),
    "tangential": (TangentialClassifierFreeGuidance, {"guidance_scale": 3.0}),
}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    if name in GUIDERS:
        kind, settings = GUIDERS[name]
        pipe = ZOO["qwen-image-modular"].make()
        pipe.update_components(guider=kind(**settings))
        return pipe, {}
    return ZOO[name].make(), RESCALED.get(name, {})


def draw(pipe: Any, name: str, changes: dict[str, Any]) -> list[torch.Tensor]:
    call = ZOO["qwen-image-modular" if name in GUIDERS else name].call()
    return list_tensors(pipe(**call | {"num_inference_steps": STEPS} | changes))


REFUSED = {
    "momentum": "remembers earlier predictions",
    "hunyuan-image": "remembers earlier predictions",
    # Their first step is zero, or they decompose the prediction.
    "zero star": "never: .*places of a patch cannot be told",
    "tangential": "never: .*places of a patch cannot be told",
}
"""Guidance that does not go with stale steps, or not with patches at all, and how it is refused."""


def guide(name: str, stages: int) -> tuple[list[torch.Tensor] | str, list[str]]:
    """On a rank: twice without anything stale, bit for bit; twice with stale steps, or why not; and what is logged."""
    pipe, changes = make(name)
    want = draw(pipe, name, changes)
    try:
        with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=STEPS) as runner, logged() as lines:
            for _ in range(2):
                same(draw(runner, name, changes), want, (name, stages))
    except DitileError as error:
        return f"never: {error}", []
    assert not lines, lines
    if changes:
        different(want[0], draw(pipe, name, dict.fromkeys(changes, 0.0))[0], "without")
    with divided(pipe, pipefusion=stages, patches=PATCHES, warmup=STEPS - 2) as runner, logged() as lines:
        try:
            stale = [draw(runner, name, changes) for _ in range(2)]
        except ModelError as error:
            return str(error), lines
        if changes:  # what the signature has is said alike, whether it is named or not
            draw(runner, name, {})
    same(*stale, name)
    different(stale[0][0], want[0], name)
    return stale[0], lines


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that a runner logs, but for those about the plan."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module.LOG, "warning", lines.append)
        yield lines
    lines[:] = [line for line in lines if "guidance" in line]


@pytest.mark.parametrize("name", [*RESCALED, *GUIDERS, "hunyuan-image"])
def test_a_statistic_of_the_whole_prediction(pool: Pool, name: str) -> None:
    """A failure means a picture of other contrast on some ranks, an approximation in silence, or a refusal where there
    is nothing stale."""
    found = {ranks: pool.run(guide, ranks, name, ranks) for ranks in (1, 2, 3)}
    one, lines = found[1][0]
    for ranks, rows in found.items():
        for rank, (drawn, said) in enumerate(rows):
            if name in REFUSED:
                assert isinstance(drawn, str) and re.search(REFUSED[name], drawn), drawn
                continue
            same(drawn, one, (name, ranks, rank))
            assert said == ([] if rank else lines), (ranks, rank, said)
    if name not in REFUSED:
        values = [f"{key}={value}" for key, value in RESCALED.get(name, {}).items()] or [GUIDERS[name][0].__name__]
        assert "partly one step old" in lines[0] and all(value in lines[0] for value in values), lines
        assert len(lines) == 1 + (name == "ltx-2"), lines


class Recorder(ClassifierFreeGuidance):
    """Remembers whether predictions were numbers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.finite: list[bool] = []

    def forward(self, pred_cond: torch.Tensor, pred_uncond: torch.Tensor | None = None) -> Any:
        self.finite.append(bool(torch.isfinite(pred_cond).all()))
        return super().forward(pred_cond, pred_uncond)


def test_a_guider_keeps_nothing_of_a_rehearsal() -> None:
    """It is what it was before: a failure means that its first step has NaN in what it remembers."""
    pipe = ZOO["qwen-image-modular"].make()
    pipe.update_components(guider=Recorder(guidance_scale=3.0))
    with divided(pipe, patches=PATCHES, warmup=1) as runner:
        for _ in range(2):
            pipe.guider.finite.clear()
            draw(runner, "momentum", {})
            assert pipe.guider.finite == [True] * (1 + PATCHES * (STEPS - 1))


TIMED_STEPS = 6
ROUNDING = 1e-5
EXACT = (
    {"ulysses": 2},
    {"ring": 2},
    {"tensor": 2},
    {"cfg": 2},
    {"data": 2},
    {"distrifusion": 2, "warmup": TIMED_STEPS},
)


def test_tables_are_what_the_loops_of_diffusers_say() -> None:
    """A failure means that calls are rehearsed in all steps for nothing, or not where they change."""
    timed = {}
    cuts = {}
    for name in dir(diffusers):
        kind = getattr(diffusers, name, None) if name.endswith("Pipeline") else None
        if not inspect.isclass(kind):
            continue
        function = inspect.unwrap(kind.__call__)
        deciding = find_timed_guidance(function)
        if deciding:
            asked = deciding & inspect.signature(function).parameters.keys()
            timed[name] = asked - {"num_inference_steps", "timesteps", "sigmas"}
        for names in find_latent_cuts(function).values():
            cuts[name] = names
    assert timed == {name: set(names) for name, names in pipeline_calls._TIMED_GUIDANCE.items()}
    assert cuts == {name: {argument} for name, argument in pipeline_calls._LATENT_CUTS.items()}


class OwnLoop(diffusers.FluxPipeline):  # type: ignore[misc]
    """A loop of which nothing is known."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_a_call_asks_for_other_steps_by_its_arguments() -> None:
    pipe = ZOO["lumina-2"].make()
    assert not is_guidance_timed(pipe, {"num_inference_steps": 9, "cfg_trunc_ratio": 1.0})
    assert is_guidance_timed(pipe, {"cfg_trunc_ratio": 0.5})
    flux = MAKE["flux"]()
    assert not is_guidance_timed(flux, {})
    flux.__class__ = OwnLoop
    assert is_guidance_timed(flux, {})
    assert explain_latent_cut(diffusers.ChronoEditPipeline, {"enable_temporal_reasoning": False}) is None
    refusal = explain_latent_cut(diffusers.ChronoEditPipeline, {"enable_temporal_reasoning": True})
    assert refusal is not None and "enable_temporal_reasoning=False" in refusal


@on_ranks(2)
def test_lumina_2_ends_guidance_by_an_argument() -> None:
    """A failure means that a call which any of these plans can compute is refused, or refused in mid-run."""
    entry = ZOO["lumina-2"]

    def draw(pipe: Any, **changes: Any) -> Any:
        return pipe(**entry.call() | {"num_inference_steps": TIMED_STEPS, "cfg_trunc_ratio": 0.5} | changes).images

    pipe = entry.make()
    wanted, guided = draw(pipe), draw(pipe, cfg_trunc_ratio=1.0)
    for plan in EXACT:
        with divided(pipe, **plan) as runner:
            close(draw(runner), wanted, plan, tolerance=ROUNDING)
    done: list[int] = []
    with divided(pipe, pipefusion=2, warmup=TIMED_STEPS) as runner:
        with pytest.raises(StateError, match=r"its model on \[1\] rows in step 3 and on \[1, 1\] in the first one"):
            draw(runner, callback_on_step_end=lambda _, step, *__: done.append(step) or {})
        assert not done
        close(draw(runner, cfg_trunc_ratio=1.0), guided, "guidance in all steps", tolerance=ROUNDING)
    # The first step without a second call is synchronous, and so are its keys those of one call.
    with divided(pipe, distrifusion=2, warmup=1) as runner:
        assert draw(runner).shape == wanted.shape
        assert runner.report.synchronous == [0, 3]


@on_ranks(2)
def test_a_callback_ends_guidance() -> None:
    """A failure means that keys of two branches are kept for one, or that a callback is met in mid-run alone."""

    def ends() -> dict[str, Any]:
        callback = SD3CFGCutoffCallback(cutoff_step_ratio=0.5)
        return {"callback_on_step_end": callback, "num_inference_steps": TIMED_STEPS}

    # In fp32 the distance would be that of two kernels, which differ by processor.
    pipe = made("sd3")
    wanted = run(pipe, "sd3", **ends())
    for plan in EXACT:
        with divided(pipe, **plan) as runner:
            close(run(runner, "sd3", **ends()), wanted, plan)
    for plan in ({"pipefusion": 2, "warmup": TIMED_STEPS}, {"distrifusion": 2, "warmup": 1}):
        with divided(pipe, **plan) as runner, pytest.raises(ModelError, match="SD3CFGCutoffCallback sets _guidance_sc"):
            run(runner, "sd3", **ends())


def end_by_attribute(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
    if step == 2:
        pipe._guidance_scale = 1.0
    return {}


@on_ranks(2)
def test_a_callback_of_the_user_ends_guidance() -> None:
    """A failure means an error of shapes, or that stages wait for a branch that is not computed."""
    call = {"callback_on_step_end": end_by_attribute, "num_inference_steps": TIMED_STEPS}
    pipe = made("sd3")
    expected = run(pipe, "sd3", **call)
    for plan in ({"pipefusion": 2, "warmup": TIMED_STEPS}, {"distrifusion": 2, "warmup": 1}):
        with divided(pipe, **plan) as runner, pytest.raises(ModelError, match="end_by_attribute sets _guidance_scale"):
            run(runner, "sd3", **call)
    with divided(pipe, ulysses=2) as runner:
        close(run(runner, "sd3", **call), expected, "whole steps")


@pytest.mark.parametrize(
    ("callback", "scale", "is_refused"),
    [
        (SD3CFGCutoffCallback(cutoff_step_ratio=0.5), 3.0, True),
        (SD3CFGCutoffCallback(cutoff_step_ratio=0.5), 1.0, False),
        (SD3CFGCutoffCallback(cutoff_step_ratio=1.0), 3.0, False),
        (None, 3.0, False),
    ],
)
def test_callbacks_that_end_guidance_are_told_from_others(callback: Any, scale: float, is_refused: bool) -> None:
    """A failure means that a callback is refused which changes no calls, or that one that does is met in mid-run."""
    call = {"callback_on_step_end": callback, "guidance_scale": scale}
    assert (explain_callback_refusal(MAKE["sd3"](), call, TIMED_STEPS) is not None) == is_refused
