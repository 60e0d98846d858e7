"""Branches of guidance are counted as pipelines count them: by the scale and the negative prompt that a call has."""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.matrix_page import read_families
from ditile.model.hooks.overrides import list_parameter_names
from ditile.model.known import CONFIGS
from ditile.model.pipeline_calls import read_guidance_rule
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.planner.question import PlanQuestion
from ditile.planner.recording.recorded import read_prompt_table
from ditile.planner.subject import PlanSubject
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.facts import collect_call_facts
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.preflight import check_request_by_files
from tests.zoo import ZOO

CLASSES = {each["pipeline"]: each["name"] for each in reversed(read_families()["families"])
           if each["pipeline"] in read_prompt_table() and "Modular" not in each["pipeline"]}  # fmt: skip
"""Pipelines that can be planned for -> the one of the zoo that is of this class and used most. Guidance of a modular
one is a component, and no argument of its call."""
PUBLISHED = {name: name for name in ZOO if name.startswith("qwen-image-edit")}
PUBLISHED |= {"qwen-image-2.1": "qwen-image-2.1", "z-image": "z-image-turbo"}
"""Tiny pipelines whose folders lack something, or have too few rotations -> a published model of the class."""
CALLS = [(0.0, True), (1.0, False), (1.0, True), (3.0, False), (3.0, True)]
"""The scale of guidance, and whether there is a negative prompt."""


class SteppedError(Exception):
    """The first step has ended."""


def count_real_branches(pipe: Any, call: dict[str, Any]) -> int:
    """Rows of the model's calls in the first step of one picture."""
    rows: list[int] = []
    model, forward = pipe.transformer, pipe.transformer.forward
    name = list_parameter_names(model)[0]

    @functools.wraps(forward)
    def forward_and_count(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(args[0] if args else kwargs[name]))
        return forward(*args, **kwargs)

    def end_step(*_: Any, **__: Any) -> Any:
        raise SteppedError

    model.forward, pipe.scheduler.step = forward_and_count, end_step
    try:
        with suppress(SteppedError):
            pipe(**call)
    finally:
        del model.forward, pipe.scheduler.step
    return sum(rows)


def list_real_calls(pipe: Any, name: str, scale: dict[str, float]) -> dict[bool, dict[str, Any]]:
    """Calls with a negative prompt, and without."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    call = {key: value for key, value in ZOO[name].call().items() if not key.startswith("negative_")} | scale
    negative = {f"negative_{key}": value for key, value in call.items() if f"negative_{key}" in parameters}
    if isinstance(call.get("prompt"), str) and "negative_prompt" in parameters:
        negative["negative_prompt"] = "a square"
    return {False: call, True: call | negative}


@pytest.mark.parametrize("name", CLASSES.values())
def test_branches_are_those_of_the_pipeline(name: str, tmp_path: Path) -> None:
    """With scales of 0, 1 and more, with a negative prompt and without.

    A failure means that a plan divides branches that are not there, or leaves half of a machine idle."""
    pipe = ZOO[name].make()
    source = CONFIGS / PUBLISHED[name] if name in PUBLISHED else tmp_path
    if source == tmp_path:
        pipe.save_pretrained(tmp_path)
    subject, rule = PlanSubject.from_configs(name, source), read_guidance_rule(type(pipe), pipe.config)
    parameters = inspect.signature(type(pipe).__call__).parameters
    own = next((each for each in ("true_cfg_scale", "guidance_scale") if each in parameters), None)
    for value, has_negative in CALLS if own is not None else CALLS[-2:]:
        scale = {} if own is None else {own: value}
        calls = list_real_calls(pipe, name, scale)
        try:
            real = count_real_branches(pipe, calls[has_negative])
        except (TypeError, ValueError, AttributeError):
            # It has an empty prompt encoded where none is given, for which the tiny one has no encoder.
            real = count_real_branches(pipe, calls[True])
        numbers = {key: each for key, each in calls[False].items() if isinstance(each, int | float)}
        asked: dict[str, Any] = {"max_sequence_length": 32, **numbers, "prompt": ""}
        if name in PUBLISHED:
            # Its tokens have other sides.
            asked |= dict.fromkeys(("height", "width"), 1024)
        asked |= {"negative_prompt": "a square"} if has_negative else {}
        shape = subject.make_call_shape(asked)
        assert shape.branches_per_call * shape.calls == real, (value, has_negative)
        if rule is not None:
            defaults = {key: each.default for key, each in parameters.items()}
            assert rule.is_guided({**defaults, **asked}) == (real > 1), (rule, value, has_negative)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a pipeline that is guided by a negative prompt alone, and says nothing of its own calls."""
    folder = tmp_path_factory.mktemp("tiny") / "qwen"
    ZOO["qwen-image"].make().save_pretrained(folder)
    return str(folder)


def test_a_call_without_a_negative_prompt_is_planned_as_one_branch(qwen: str) -> None:
    """A failure means that `--plan auto` chooses what the call refuses."""
    subject = PlanSubject.from_configs("qwen", Path(qwen))

    def count_branches(**asked: Any) -> int:
        shape = subject.make_call_shape(PlanQuestion(model=qwen, height=64, width=64, **asked).fill_call_arguments())
        return shape.branches_per_call * shape.calls

    assert [count_branches(), count_branches(negative_prompt="a square"), count_branches(true_cfg=4.0)] == [1, 2, 2]
    assert count_branches(negative_prompt="a square", true_cfg=1.0) == 1


def test_branches_that_are_not_there_are_refused_by_the_files(qwen: str) -> None:
    """In one line that says what works. A failure means that weights are loaded first."""
    wanted, plan = GenerateOptions(model=qwen, prompt="a red circle"), Plan(cfg=2)
    with pytest.raises(PlanError, match=r"QwenImagePipeline has no second one without a negative prompt; give negative_"
                                        r"prompt \(--negative-prompt \" \"\), or use cfg=1"):  # fmt: skip
        check_request_by_files(wanted, plan, CacheOptions())
    for works in ({"negative_prompt": " "}, {"true_cfg": 4.0}):
        check_request_by_files(GenerateOptions(model=qwen, prompt="a red circle", **works), plan, CacheOptions())
    with pytest.raises(PlanError, match=r"at true_cfg_scale=1.0; give true_cfg_scale \(--true-cfg\) above 1, or use"):
        check_request_by_files(GenerateOptions(model=qwen, prompt="a red circle", true_cfg=1.0), plan, CacheOptions())
    check_request_by_files(wanted, Plan(ulysses=2), CacheOptions())
    facts = collect_call_facts(type(ZOO["flux-2-klein"].make()), {"is_distilled": True})
    with pytest.raises(PlanError, match="its guidance is embedded or distilled; use cfg=1"):
        facts.check_cfg(plan, {"guidance_scale": 4.0})
