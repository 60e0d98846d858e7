"""What a server knows of its model without torch, and what it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import ditile
from ditile.plan.errors import ModelError
from ditile.runner.requests.arguments import build_call_arguments
from ditile.runner.requests.facts import ModelFacts, collect_facts
from ditile.runner.requests.options import GenerateOptions

MODELS = ("shapes-flux", "shapes-pixart", "shapes-wan")
WANTED: list[dict[str, Any]] = [
    {},
    {"height": 64, "width": 64, "steps": 3, "seed": 1},
    {"height": 100},
    {"frames": 6},
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
