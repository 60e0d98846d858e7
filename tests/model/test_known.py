"""What is said of models before torch is imported. A failure means that something is refused that works."""

from __future__ import annotations

import inspect

import pytest

from ditile.model.known import KnownModel, find_known_model, list_known_models
from ditile.planner.subject import PlanSubject
from ditile.runner.model_files import defaults
from ditile.runner.requests.pipelines import returns_videos


@pytest.mark.parametrize("known", list_known_models(), ids=lambda known: known.name)
def test_the_table_is_what_the_configs_say(known: KnownModel) -> None:
    subject = PlanSubject.from_configs(known.name, known.folder)
    call = subject.fill_arguments({})
    assert known.is_video == (known.hub_id is None and returns_videos(subject.pipeline))
    assert known.transformer == type(subject.transformer).__name__
    assert known.blocks == len(subject.block_hooks.chain)
    assert known.heads == subject.attention_heads[0]
    assert known.token_side == subject.token_side
    assert (known.height, known.width) == (call["height"], call["width"])
    assert known.cuts_rows == bool(subject.block_hooks.anatomy.grid)
    assert known.bins_sizes == ("use_resolution_binning" in inspect.signature(subject.pipeline.__call__).parameters)


@pytest.mark.parametrize(
    ("prompt", "knows"),
    [
        ("a large red circle on the left", True),
        ("a lighthouse at dawn", False),
    ],
)
def test_a_prompt_names_what_a_bundled_model_knows(prompt: str, knows: bool) -> None:
    bundled, published = find_known_model("shapes-pixart"), find_known_model("black-forest-labs/FLUX.1-dev")
    assert bundled is not None and (bundled.explain_unknown_prompt(prompt) is None) is knows
    assert published is not None and published.name == "flux.1-dev" and published.explain_unknown_prompt(prompt) is None


NEGATIVE_PROMPTS = {
    # The snippets of their cards have true_cfg_scale=4.0 and one space.
    " ": "qwen-image qwen-image-edit qwen-image-edit-2509 qwen-image-edit-2511",
    # The default of the authors' own code (github.com/Wan-Video, `sample_neg_prompt`), which the cards repeat.
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，"
    "残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，"
    "三条腿，背景人很多，倒着走": "wan2.1-t2v-1.3b wan2.1-t2v-14b wan2.2-t2v-14b wan2.2-i2v-14b wan2.2-ti2v-5b",
    # The examples of their cards and of their pipelines in diffusers.
    "worst quality, inconsistent motion, blurry, jittery, distorted": "ltx-video ltx-2",
}


def test_defaults_have_the_negative_prompts_of_the_cards() -> None:
    """A failure means pictures that are not those of the card; of Qwen-Image, pictures without guidance."""
    found = {model.name: defaults(model.name).get("negative_prompt") for model in list_known_models() if model.hub_id}
    named = {name: text for text, names in NEGATIVE_PROMPTS.items() for name in names.split()}
    assert {name: text for name, text in found.items() if text is not None} == named
