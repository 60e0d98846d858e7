"""What is decided apart: each row or image of a batch is computed and cached as if it were drawn alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ditile.cache.config import DBCacheConfig, DBPruneConfig, TaylorSeerCalibratorConfig
from ditile.runner import caching
from tests.more_families import EVERY
from tests.parallel.pipefusion.moves import RUN, calls, enable, skipped, tensors
from tests.runner.cases import MAKE, make_double, run

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

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi asks for float32


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
