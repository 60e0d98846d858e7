"""What a server knows of its model without torch, and what it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import ditile
from ditile.plan.errors import ModelError
from ditile.runner.requests.arguments import build_call_arguments
from ditile.runner.requests.facts import ModelFacts, collect_facts
from ditile.runner.requests.options import GenerateOptions
from ditile.serve.jobs import Job, JobResult, Request
from ditile.serve.metrics import Metrics
from tests.serve.servers import read_metric

MODELS = ("shapes-flux", "shapes-pixart", "shapes-wan")
WANTED: list[dict[str, Any]] = [
    {},
    {"height": 64, "width": 64, "steps": 3, "seed": 1},
    {"height": 100},
    {"frames": 6},
    {"frames": 5, "fps": 4},
    {"true_cfg": 1.0, "negative_prompt": "red"},
    {"guidance": 1.0, "negative_prompt": "red"},
    {"guidance": 5.0},
]


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> tuple[Any, ModelFacts]:
    pipe = ditile.load(request.param)
    facts = collect_facts(pipe, request.param, "pipefusion=2")
    return pipe, ModelFacts.from_json(json.loads(json.dumps(facts.to_json())))


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_facts_refuse_what_the_pipeline_does(loaded: tuple[Any, ModelFacts], wanted: dict[str, Any]) -> None:
    pipe, facts = loaded
    options = GenerateOptions(model=facts.name, prompt="a red circle", **wanted)

    def try_to(check: Any) -> str:
        try:
            check()
        except ModelError as error:
            return str(error)
        return ""

    by_pipeline = try_to(lambda: build_call_arguments(pipe, options, ditile.defaults(facts.name)))
    by_facts = try_to(lambda: facts.check_options(options))
    if "height" in wanted and facts.is_video:  # a recorded family checks sizes in its call
        assert bool(by_facts) == (wanted["height"] == 100)
    else:
        assert by_facts == by_pipeline


def test_what_is_known_of_a_model(loaded: tuple[Any, ModelFacts]) -> None:
    facts = loaded[1]
    side = 64 if facts.is_video else 128
    assert (facts.size, facts.size_multiple, facts.plan) == ([side, side], 8, "pipefusion=2")
    assert facts.is_video == (facts.name == "shapes-wan")
    assert facts.find_default("num_inference_steps") == 20 and facts.example
    assert facts.takes("true_cfg_scale") == (facts.name == "shapes-flux")
    if facts.is_video:
        assert (facts.fps, facts.frames_ratio, facts.find_default("num_frames")) == (8, 4, 9)
        assert [facts.count_frames(seconds) for seconds in (0.01, 0.5, 1, 1.2)] == [1, 5, 9, 9]


def test_edits_and_masks_that_a_model_has(loaded: tuple[Any, ModelFacts]) -> None:
    """Of FLUX diffusers has both classes; of PixArt none, and shapes-wan draws from text alone."""
    facts = loaded[1]
    options = GenerateOptions(prompt="a red circle", image=("image",))
    if facts.name != "shapes-flux":
        with pytest.raises(ModelError, match="leave the image out"):
            facts.check_options(options)
        return
    assert facts.edit is not None and facts.edit.pipeline == "FluxImg2ImgPipeline"
    assert facts.inpaint is not None and facts.inpaint.pipeline == "FluxInpaintPipeline"
    facts.check_options(options)
    facts.check_options(replace(options, mask="mask"))
    with pytest.raises(ModelError, match="starts from 1 at most, and not from 2 images"):
        facts.check_options(replace(options, image=("image", "image-1")))
    with pytest.raises(ModelError, match=r"strength=0.01 of 20 steps is less than one step"):
        facts.check_options(GenerateOptions(prompt="a red circle", image=("image",), strength=0.01))


def build_job(**changes: object) -> Job:
    request = Request(options=GenerateOptions(prompt="a red circle", num_images=2))
    return Job(**{"id": "image_1", "owner": "", "kind": "image", "request": request, "created": 10.0} | changes)  # type: ignore[arg-type]


def test_a_job_that_is_done() -> None:
    metrics = Metrics()
    result = JobResult(
        files=["0.png", "1.png"],
        seeds=[1, 2],
        size=(32, 16),
        seconds={"total": 4.0, "text": 0.5, "denoise": 3.0, "decode": 0.5},
        num_steps=4,
        facts={
            "left_out": [{"cached_steps": [[3, 5, 7]]}, {"cached_steps": [[3]]}],
            "reports": [{"peak_memory_bytes": 7}, {"peak_memory_bytes": 9}],
        },
    )
    job = build_job(state="done", started=11.0, ended=15.0, result=result)
    metrics.count("jobs_accepted", job.kind)
    metrics.note_seconds("wait", job.created, job.started)
    for _ in range(4):
        metrics.count("steps")
    metrics.note_ended_job(job, "1")
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    values = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
    assert values["ditile_drawn_total", "image"] == 2 and values["ditile_pixels_total",] == 2 * 32 * 16
    assert values["ditile_steps_total",] == 4 and values["ditile_steps_left_out_total",] == 3
    assert values["ditile_peak_memory_bytes", "0", "1"] == 7 and values["ditile_peak_memory_bytes", "1", "1"] == 9
    sums = {stage: values["ditile_seconds_sum", stage] for stage in ("wait", "text", "denoise", "decode", "total")}
    assert sums == {"wait": 1.0, "text": 0.5, "denoise": 3.0, "decode": 0.5, "total": 5.0}
    assert (
        read_metric(metrics, "ditile_jobs_ended_total", kind="image", state="done") == 1
        and read_metric(metrics, "ditile_jobs_ended_total", kind="image", state="failed") == 0
    )
