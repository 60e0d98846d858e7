"""What a cache keeps, forecasts and measures, and what is left of it, on real transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ditile.cache.cached import find_model_cache
from ditile.cache.config import (
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    ParamsModifier,
    TaylorSeerCalibratorConfig,
)
from ditile.cache.forecast import DMD, FoCa, Reuse, TaylorSeer
from ditile.model.block_lists import find_block_lists
from ditile.plan.errors import ModelError, StateError
from ditile.runner import caching
from tests.cache.hand import Hand, mean
from tests.cache.pictures import RUN, STEPS, calls, enable, live, outputs, skipped, tensors
from tests.families import EVERY
from tests.runner.cases import MAKE, different, make_double, run, same

FLOWS = {
    "image": "PixArtTransformer2DModel",
    "image, text": "CogVideoXTransformer3DModel",
    "text, image": "FluxTransformer2DModel",
    "text, image; the last returns no text": "SD3Transformer2DModel",
    "text, image; then both as one": "ChromaTransformer2DModel",
}
ALWAYS, DRIFT = 1.0, [(0, 1 + 0.05 * step) for step in range(8)]
ROUND = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=0, residual_diff_threshold=ALWAYS)
EARLY = ROUND.reset(max_warmup_steps=4)

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")


def by_hand(name: str, model: nn.Module, moves: Any = DRIFT, **how: Any) -> tuple[list[list[Tensor]], Hand]:
    hand = Hand(model, find_block_lists(model), **how)
    return outputs(name, hand, moves), hand


def with_cache(name: str, model: nn.Module, config: Any, calibrator: Any = None, moves: Any = DRIFT) -> list[Any]:
    """What each step returns, and no buffer is left behind."""
    enable(model, config.reset(num_inference_steps=len(moves)), calibrator)
    found = outputs(name, model, moves)
    assert find_model_cache(model).memory_bytes == 0
    return found


MEMORIES: dict[str, tuple[Calibration, Callable[[], Any]]] = {
    "TaylorSeer": (TaylorSeerCalibratorConfig(), lambda: TaylorSeer(1)),
    "TaylorSeer of order 2": (TaylorSeerCalibratorConfig(taylorseer_order=2), lambda: TaylorSeer(2)),
    "FoCa": (FoCaCalibratorConfig(), FoCa),
    "DMD": (DMDCalibratorConfig(), DMD),
}


@pytest.mark.parametrize(("flow", "kind"), list(itertools.product(FLOWS, MEMORIES)))
def test_calibrators_continue_what_was_computed(flow: str, kind: str) -> None:
    """Four computed steps, and four that are forecast from them. A failure means that a forecast is given other steps
    or streams than were computed, or feeds on forecasts."""
    calibrator, memory = MEMORIES[kind]
    name = FLOWS[flow]
    model = EVERY[name].make()
    wanted, hand = by_hand(name, model, threshold=9e9, spare=4, memory=memory)
    reused, _ = by_hand(name, model, threshold=9e9, spare=4)
    different(wanted[-1][0], reused[-1][0], "nothing was forecast")
    for store in ("residual", "hidden"):
        wanted, _ = by_hand(name, model, threshold=9e9, spare=4, memory=memory, hidden=store == "hidden")
        same(with_cache(name, model, EARLY.reset(store=store), calibrator), wanted, f"{flow} {kind} {store}")
        assert skipped(model) == [[4, 5, 6, 7]] == [hand.skipped]
        caching.disable_cache(model)


@pytest.mark.parametrize("kind", ["DBCache", "DBPrune"])
def test_what_is_kept_may_be_smaller(kind: str) -> None:
    """A failure means that probes and residuals are kept in full, or that tokens lose their type."""
    name = FLOWS["text, image"]
    model = EVERY[name].make()
    config = DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=4) if kind == "DBPrune" else EARLY
    kept = {}
    for dtype in (None, "bfloat16"):
        enable(model, config.reset(store_dtype=dtype, num_inference_steps=len(DRIFT)))
        outputs(name, model, DRIFT)
        kept[dtype] = find_model_cache(model).kept_bytes
        caching.disable_cache(model)
    assert kept["bfloat16"] * 2 == kept[None] > 0
    if kind == "DBCache":
        wanted, _ = by_hand(name, model, threshold=9e9, spare=4, memory=lambda: Reuse(torch.bfloat16))
        same(with_cache(name, model, config.reset(store_dtype="bfloat16")), wanted)


MEASURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of what is added": ({}, {}),
    "of the tokens": ({"l1_hidden_states_diff_threshold": 0.0}, {"tokens": True}),
    "of every second channel": (
        {"downsample_factor": 2}, {"measure": lambda before, now: mean(before[..., ::2], now[..., ::2])}
    ),
    "of tokens that changed": (
        {"important_condition_threshold": 0.014}, {"measure": lambda before, now: important(before, now, 0.014)}
    ),
}  # fmt: skip


def important(before: Tensor, now: Tensor, least: float) -> float:
    """Of those tokens alone whose own difference is more."""
    own = (now - before).abs().sum(-1) / before.abs().sum(-1)
    return mean(before[own > least], now[own > least]) if (own > least).any() else 0.0


@pytest.mark.parametrize("how", MEASURES)
@pytest.mark.parametrize("flow", ["image", "text, image"])
def test_what_is_measured(flow: str, how: str) -> None:
    """On an input that drifts away, so that it matters what a step is compared with: the last one that was computed."""
    changes, mine = MEASURES[how]
    name = FLOWS[flow]
    model = EVERY[name].make()
    _, measured = by_hand(name, model, **mine)
    _, plain = by_hand(name, model)
    assert (measured.differences == plain.differences) == (not changes)
    threshold = 2.4 * measured.differences[0]  # what two or three steps change
    wanted, hand = by_hand(name, model, threshold=threshold, **mine)
    assert 3 <= len(hand.skipped) <= 6, hand.differences
    set_to = {key: threshold for key in changes if key.startswith("l1")} or {"residual_diff_threshold": threshold}
    same(with_cache(name, model, ROUND.reset(**{"residual_diff_threshold": 0.0, **changes, **set_to})), wanted, how)
    [report] = caching.summary(model, logging=False)
    assert skipped(model) == [hand.skipped]
    found = [difference for _, difference in report.decisions[0].differences]
    assert found == pytest.approx(hand.differences, rel=1e-4)


# What is left behind


@pytest.mark.parametrize("config", [ROUND, DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=0)], ids=str)
def test_nothing_is_remembered_after_the_last_step(config: Any) -> None:
    """Not a tensor is alive that was not before. A failure means that memory stays taken between pictures."""
    name = FLOWS["text, image"]
    model = EVERY[name].make()
    enable(model, config, TaylorSeerCalibratorConfig())
    inputs = list(calls(name))
    before = live()
    with torch.no_grad():
        for step, call in enumerate(inputs):
            model(**call)
            assert (find_model_cache(model).memory_bytes > 0) == (step < STEPS - 1)
            assert bool(live() - before) == (step < STEPS - 1)
    assert any(skipped(model)) and find_model_cache(model).kept_bytes > 0


def test_pictures_without_a_pipeline() -> None:
    """The number of steps must be known; a picture that was cut short is forgotten when the next is announced."""
    name = FLOWS["image"]
    model = EVERY[name].make()
    caching.enable_cache(model, ROUND)
    inputs = list(calls(name))
    with torch.no_grad():
        with pytest.raises(StateError, match="refresh_context"):
            model(**inputs[0])
        caching.refresh_context(model, num_inference_steps=STEPS)
        wanted = outputs(name, model)
        same(outputs(name, model), wanted, "a second picture of as many steps")
        model(**inputs[4])
        caching.refresh_context(model, STEPS)
        same(outputs(name, model), wanted, "after one that was cut short")
        caching.refresh_context(model, 3, residual_diff_threshold=0.0)
        different(tensors(model(**inputs[0]))[0], tensors(model(**inputs[1]))[0])
    with pytest.raises(ModelError, match="residual_diff_threshold"):
        caching.refresh_context(model, 3, residual_diff_treshold=0.1)
    caching.disable_cache(model)
    with pytest.raises(StateError, match="enable_cache"):
        caching.refresh_context(model, 3)


def test_lists_may_have_settings_of_their_own() -> None:
    """Two contexts: the second list decides by itself, with a probe of its own."""
    name = FLOWS["text, image; then both as one"]
    model = EVERY[name].make()
    double, single = find_block_lists(model)
    hand = Hand(model, [single], threshold=9e9)
    wanted = outputs(name, hand)
    modifiers = [
        ParamsModifier(cache_config=DBCacheConfig(residual_diff_threshold=0.0)),
        ParamsModifier(cache_config=DBCacheConfig(residual_diff_threshold=ALWAYS)),
    ]
    caching.enable_cache(model, ROUND.reset(num_inference_steps=STEPS), params_modifiers=modifiers)
    same(outputs(name, model), wanted)
    reports = {report.name: report for report in caching.summary(model, logging=False)}
    assert reports[single.name].cached_steps == [1, 2, 3, 4] and double.name not in reports


OTHER_MOVES = ((0, 1.0), (1, 1.0), (1, 1.02), (1, 0.98), (2, 1.0))
APART = [[1, 3], [2, 3]]
MOVED = ("x", "hidden_states", "pooled_text_emb")
TABLES = ("visual_rope_pos",)
TOGETHER = {
    "ErnieImageTransformer2DModel": "tokens are [S, B, C]",
    "QwenImage21Transformer2DModel": "modulation has a row more",
}
"""Where rows cannot be told apart."""
CONFIG = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=0, residual_diff_threshold=0.04, couple="row")


def mixed(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The first row of one call, and the second of another."""

    def both(a: Any, b: Any) -> Any:
        if isinstance(a, list):
            return [a[0], b[1]]
        return torch.cat([a[:1], b[1:]]) if isinstance(a, Tensor) and not torch.equal(a, b) else a

    return {name: both(one[name], other[name]) if name in MOVED else one[name] for name in one}


def single(value: Any, row: int, name: str = "") -> Any:
    """One row of a call of two."""
    if isinstance(value, dict):
        return {key: single(part, row, key) for key, part in value.items()}
    if isinstance(value, list) and name not in TABLES:
        return [value[row]] if len(value) == 2 else [single(part, row) for part in value]
    if isinstance(value, Tensor) and name.endswith("llama3"):  # [layers, rows, ..]
        return value[:, row : row + 1]
    return value[row : row + 1] if isinstance(value, Tensor) and value.ndim and value.shape[0] == 2 else value


def of_row(out: Any, row: int) -> list[Tensor]:
    """What a model returns for one row."""
    found = tensors(out)
    return [found[row]] if isinstance(out[0], list) else [x[row : row + 1] for x in found]


@pytest.mark.parametrize("name", RUN)
@torch.no_grad()
def test_rows_of_every_family(name: str) -> None:
    """One row moves at other steps than the other. A failure means that rows decide for each other, or that something
    that belongs to one is given to the other where a block runs for some of them."""
    model = EVERY[name].make()
    batch = [mixed(*pair) for pair in zip(calls(name), calls(name, OTHER_MOVES), strict=True)]
    enable(model, CONFIG)
    got = [model(**call) for call in batch]
    if name in TOGETHER:
        assert skipped(model) == [[3]], TOGETHER[name]
        return
    assert skipped(model) == APART
    for row in range(2):
        enable(model, CONFIG)
        for step, call in enumerate(batch):
            [*wanted] = of_row(model(**single(call, row)), 0)
            for x, y in zip(of_row(got[step], row), wanted, strict=True):
                assert near(x, y), f"step {step}, row {row}"
        assert skipped(model) == [APART[row]]


def near(x: Tensor, y: Tensor) -> bool:
    """Equal but for the sums of other shapes of matrices."""
    return x.shape == y.shape and float((x - y).abs().max()) <= 3e-5 * float(y.abs().max())


# Images of a pipeline

IMAGES = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2, max_continuous_cached_steps=2)
PRUNE = DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=2)


def draw(pipe: Any, name: str, seeds: list[int]) -> tuple[Tensor, list[Any]]:
    """Latents, and of each image what was decided."""
    latents = run(pipe, name, num_inference_steps=9, num_images_per_prompt=len(seeds), seeds=seeds)
    [report] = caching.summary(pipe, logging=False)
    of_image: list[Any] = [[] for _ in seeds]
    for each in report.decisions:
        of_image[each.unit].append((each.branch, each.skipped))
    return latents, of_image


@pytest.mark.parametrize("config", [IMAGES, PRUNE], ids=["DBCache", "DBPrune"])
@pytest.mark.parametrize("name", ["pixart sigma", "flux true cfg", "sd3.5 medium"])
def test_an_image_does_not_know_what_it_is_drawn_with(name: str, config: Any) -> None:
    """Each image is cached in the steps, and drawn, as if it were alone; all its rows of guidance together. A failure
    means that one image makes another be computed or skipped, or that a picture depends on its neighbours."""
    pipe = MAKE[name]()
    make_double(pipe)
    caching.enable_cache(pipe, config.reset(residual_diff_threshold=1e-9))
    draw(pipe, name, [3, 4, 5])
    measured = caching.summary(pipe, logging=False)[0].differences
    for percent in (50, 35, 65, 25, 75, 85):
        threshold = float(np.percentile(measured, percent)) * 1.003  # on none of them
        caching.enable_cache(pipe, config.reset(residual_diff_threshold=threshold), TaylorSeerCalibratorConfig())
        alone = {seed: draw(pipe, name, [seed]) for seed in (3, 4, 5)}
        if alone[3][1] != alone[4][1]:
            break
    assert alone[3][1] != alone[4][1], "images that are cached alike tell nothing"
    assert all(any(steps for _, steps in decisions) for _, [decisions] in alone.values())
    for seeds in ([3, 4], [5, 3, 4]):
        latents, found = draw(pipe, name, seeds)
        for k, seed in enumerate(seeds):
            wanted, [decisions] = alone[seed]
            assert found[k] == decisions, f"{seed} of {seeds}"
            assert float((latents[k] - wanted[0]).abs().max()) <= 1e-9 * float(wanted.abs().max()), f"{seed} of {seeds}"
