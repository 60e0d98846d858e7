"""MagCache, SeaCache and Spectrum: equal to diffusers, to formulas written out here, and on ranks to one process."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

import ditile
from ditile.cache.config import BlockCacheConfig
from ditile.cache.forecast import Chebyshev
from ditile.cache.methods.magcache import plan_computed_steps
from ditile.cache.methods.seacache import read_noise_level
from ditile.cache.methods.spectrum import ChebyshevCalibratorConfig
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner import caching
from ditile.runner.runner import parallelize
from tests.cache.hand_cache import HandCache
from tests.cache.pictures import skipped
from tests.parallel.pipefusion.simulated import Case, arguments, distance, pipeline
from tests.parallel.pipefusion.simulation import simulate
from tests.pool import Pool
from tests.runner.cases import MAKE, call_of, make_double, same
from tests.zoo import ZOO

STEPS = 9
RATIOS = [1.0, 1.4, 1.2, 1.01, 1.02, 1.01, 1.0, 0.97, 0.9]
MAG = ditile.MagCacheConfig(mag_ratios=RATIOS, retention_ratio=0.3)
SPECTRUM = ditile.SpectrumConfig(warmup_steps=3, flex_window=0.5)
SEA = ditile.SeaCacheConfig(threshold=0.9)
METHODS = {"mag": MAG, "spectrum": SPECTRUM, "sea": SEA}
NOTHING_LEFT_OUT = [
    MAG.reset(threshold=0),
    MAG.reset(max_skip_steps=0),
    ditile.MagCacheConfig(calibrate=True),
    SPECTRUM.reset(window_size=1, flex_window=0),
    SEA.reset(threshold=0),
    SEA.reset(retention_steps=STEPS),
]
FAMILIES = ["flux", "pixart-sigma", "qwen-image", "wan-2.1", "z-image", "stable-diffusion-3"]


def family(name: str) -> tuple[Any, dict[str, Any]]:
    entry = ZOO[name]
    return entry.make(), entry.call() | {"num_inference_steps": STEPS}


@pytest.mark.parametrize("name", FAMILIES)
def test_methods_leave_out_steps_and_none_at_their_limit(name: str) -> None:
    """A failure at the limit: a cache that computes everything changes the image."""
    pipe, _ = family(name)
    plain = pipe(**family(name)[1])[0]
    for config in NOTHING_LEFT_OUT:
        ditile.enable_cache(pipe, config)
        same(pipe(**family(name)[1])[0], plain, str(config))
        assert not any(skipped(pipe)), config
    for config in METHODS.values():
        ditile.enable_cache(pipe, config)
        pipe(**family(name)[1])
        assert all(skipped(pipe)) and caching.summary(pipe, logging=False)[0].saved > 0, config
    ditile.disable_cache(pipe)
    same(pipe(**family(name)[1])[0], plain, "the cache was taken off")


def test_magcache_is_that_of_diffusers() -> None:
    """The image and the ratios of diffusers' own hooks. A failure: names or defaults mean something else here."""
    pipe, call = family("flux")
    theirs = diffusers.MagCacheConfig(mag_ratios=RATIOS, num_inference_steps=STEPS, retention_ratio=0.3)
    pipe.transformer.enable_cache(theirs)
    wanted = pipe(**call)[0]
    pipe.transformer.disable_cache()
    ditile.enable_cache(pipe, MAG)
    same(pipe(**family("flux")[1])[0], wanted)
    steps = [step for step, computes in enumerate(plan_computed_steps(MAG, STEPS)) if not computes]
    assert steps and all(branch == steps for branch in skipped(pipe))


def test_magcache_measures_the_ratios_of_diffusers(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure: a table that was measured here decides otherwise than one that diffusers measured."""
    pipe, call = family("flux")
    pipe.transformer.enable_cache(diffusers.MagCacheConfig(calibrate=True, num_inference_steps=STEPS))
    pipe(**call)
    pipe.transformer.disable_cache()
    # A line for each branch of guidance.
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
    theirs = np.mean([[float(ratio) for ratio in line.strip("[]").split(",")] for line in lines], axis=0)
    ditile.enable_cache(pipe, ditile.MagCacheConfig(calibrate=True))
    pipe(**family("flux")[1])
    [report] = caching.summary(pipe)
    assert report.mag_ratios == pytest.approx(list(theirs), rel=1e-5)
    assert "ratios=1.00000," in capsys.readouterr().out
    assert type(report).from_dict(report.to_dict()) == report


def test_seacache_is_that_of_diffusers() -> None:
    """diffusers has it for Wan. A failure: another filter, another sum, or another line."""
    pipe, call = family("wan-2.1")
    settings = {"threshold": 0.5, "retention_steps": 2}
    pipe.transformer.enable_cache(diffusers.SeaCacheConfig(**settings))
    wanted = torch.as_tensor(pipe(**call)[0])
    pipe.transformer.disable_cache()
    ditile.enable_cache(pipe, ditile.SeaCacheConfig(**settings))
    got = torch.as_tensor(pipe(**family("wan-2.1")[1])[0])
    assert any(skipped(pipe))
    assert float((got - wanted).abs().max() / wanted.std()) < 1e-4


def test_noise_is_known_of_both_kinds_of_schedulers() -> None:
    """Of flow matching, of alphas, and of alphas that are used for flow matching."""
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    flow.set_timesteps(10)
    assert read_noise_level(flow, 5) == (pytest.approx(1 - float(flow.sigmas[5])), pytest.approx(float(flow.sigmas[5])))
    plain = diffusers.DPMSolverMultistepScheduler()
    plain.set_timesteps(10)
    signal, noise = read_noise_level(plain, 3)
    assert (
        signal**2 == pytest.approx(float(plain.alphas_cumprod[plain.timesteps[3]])) and math.hypot(signal, noise) == 1
    )
    unipc = diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    unipc.set_timesteps(10)
    assert sum(read_noise_level(unipc, 4)) == pytest.approx(1)
    with pytest.raises(ModelError, match="class NoneType does not say it; use MagCacheConfig"):
        read_noise_level(None, 0)


def test_spectrum_is_a_ridge_regression() -> None:
    """The forecast is that of normal equations over the values themselves, mixed with a line."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 7))
    computed = [0, 1, 2, 5, 9]
    for share in (1.0, 0.5):
        forecast = Chebyshev(ChebyshevCalibratorConfig(steps=20, degree=3, ridge=0.1, share=share))
        for step, value in zip(computed, values, strict=True):
            forecast.add_computed_step(step, torch.from_numpy(value))
        powers = np.polynomial.chebyshev.chebvander(2 * np.array(computed) / 20 - 1, 3)
        x = np.polynomial.chebyshev.chebvander([2 * 13 / 20 - 1], 3)
        fitted = x @ np.linalg.solve(powers.T @ powers + 0.1 * np.eye(4), powers.T @ values)
        line = values[-1] + (values[-1] - values[-2]) * (13 - 9) / (9 - 5)
        wanted = share * fitted[0] + (1 - share) * line
        assert forecast.forecast_value(13).numpy() == pytest.approx(wanted, rel=1e-9)


EXACT = [("flux", "ulysses=2"), ("flux", "ring=2"), ("flux", "tensor=2"), ("flux true cfg", "cfg=2"),
         ("pixart sigma", "cfg=2"), ("pixart sigma", "ulysses=2"), ("sd3.5 medium", "ulysses=2 cfg=2"),
         ("pixart sigma", "pipefusion=2 patches=1"), ("flux", "pipefusion=3 patches=1"),
         ("pixart sigma", "data=2")]  # fmt: skip


def draw(name: str, plan: str | None) -> dict[str, tuple[Tensor, Any, int]]:
    """Latents in float64, the steps left out, and bytes that were sent to agree; of each method."""
    found = {}
    for method, config in METHODS.items():
        pipe = MAKE[name]()
        make_double(pipe)
        ditile.enable_cache(pipe, config)
        call = call_of(name, num_inference_steps=STEPS, num_images_per_prompt=2)
        if plan is None:
            found[method] = pipe(**call).images, skipped(pipe), 0
            continue
        runner = parallelize(pipe, Plan.parse(plan), keep_weights=True)
        latents = runner(**call).images
        sent = runner.mesh.traffic.bytes.get("decisions", 0)
        ditile.disable_cache(pipe)
        found[method] = latents, [], sent
        runner.restore()
    return found


@pytest.mark.parametrize(("name", "plan"), EXACT)
def test_ranks_leave_out_what_one_process_does(pool: Pool, name: str, plan: str) -> None:
    """A failure: ranks decided apart, or what is remembered belongs to other tokens or rows."""
    wanted = draw(name, None)
    assert all(any(steps) for _, steps, _ in wanted.values())
    for rank, found in enumerate(pool.run(draw, Plan.parse(plan).world, name, plan)):
        for method, (latents, _, sent) in found.items():
            right, _, _ = wanted[method]
            assert float((latents - right).abs().max() / right.std()) < 1e-6, f"rank {rank}, {method}"
            assert method == "sea" or sent == 0, f"rank {rank} sent {sent} bytes although all know the steps"


class HandMask(HandCache):
    """Steps that are known before: what the blocks added, or a ridge regression of what they returned."""

    def __init__(self, mask: list[int], config: BlockCacheConfig, case: Case) -> None:
        super().__init__(0, 0, 0.0, 0, case.warmup, case.steps)
        self.mask, self.config = mask, config
        self.values: dict[Any, list[tuple[int, Tensor]]] = {}

    def decide(self, branch: int, patches: list[int]) -> bool:
        keys = [(branch, patch) for patch in patches]
        read_next = self.step == self.warmup - 1 and self.warmup < self.steps
        return self.note(keys, not (self.mask[self.step] or read_next or any(key not in self.added for key in keys)))

    def compute(self, blocks: Any, run: Any, words: Any, tokens: Tensor, patches: list[int]) -> Any:
        words, out = super().compute(blocks, run, words, tokens, patches)
        for patch in patches:
            part = out[:, self.place.spans[patch]] if self.place.patch is None else out
            self.values.setdefault((self.place.branch, patch), []).append((self.step, part))
        return words, out

    def add(self, words: Any, tokens: Tensor, patches: list[int]) -> tuple[Any, Tensor]:
        added, out = super().add(words, tokens, patches)
        if isinstance(self.config, ditile.SpectrumConfig):
            out = torch.cat([self.regress(self.values[self.place.branch, patch]) for patch in patches], 1)
        return added, out

    def regress(self, values: list[tuple[int, Tensor]]) -> Tensor:
        times = 2 * np.array([step for step, _ in values]) / self.steps - 1
        powers = np.polynomial.chebyshev.chebvander(times, self.config.m)
        x = np.polynomial.chebyshev.chebvander([2 * self.step / self.steps - 1], self.config.m)
        weights = x @ np.linalg.solve(powers.T @ powers + self.config.lam * np.eye(self.config.m + 1), powers.T)
        return sum(w * value for w, (_, value) in zip(weights[0], values, strict=True))


class HandSea(HandMask):
    """The latents of each patch, filtered by themselves; the line through the last two computed steps."""

    def __init__(self, config: ditile.SeaCacheConfig, scheduler: Any, columns: int, case: Case) -> None:
        super().__init__([], config, case)
        self.scheduler, self.columns = scheduler, columns
        self.features: dict[Any, np.ndarray] = {}
        self.sums: dict[Any, float] = {}
        self.streaks: dict[Any, int] = {}
        self.lines: dict[Any, list[tuple[int, Tensor]]] = {}

    def decide(self, branch: int, patches: list[int]) -> bool:
        keys, config = [(branch, patch) for patch in patches], self.config
        changes = []
        for key in keys:
            feature = self.filter(self.latents[key[1]])
            before = self.features.get(key)
            changes.append(None if before is None else (np.abs(feature - before).sum(), np.abs(before).sum()))
            self.features[key] = feature
        read_next = self.step == self.warmup - 1 and self.warmup < self.steps
        forced = self.step < config.retention_steps or self.step >= self.steps - config.cache_end_steps or read_next
        forced |= any(self.streaks.get(key, 0) >= config.max_consecutive_cached for key in keys)
        skip = False
        if None not in changes and not forced:
            difference = sum(c for c, _ in changes) / sum(s for _, s in changes)
            totals = [self.sums.get(key, 0.0) + difference for key in keys]
            self.differences += totals
            skip = all(total < config.threshold for total in totals)
        for number, key in enumerate(keys):
            self.sums[key] = totals[number] if skip else 0.0
            self.streaks[key] = self.streaks.get(key, 0) + 1 if skip else 0
        return self.note(keys, skip)

    def filter(self, x: Tensor) -> np.ndarray:
        grid = x.numpy()
        grid = grid.reshape(len(grid), -1, self.columns, grid.shape[-1]).transpose(0, 3, 1, 2) if x.ndim == 3 else grid
        products = getattr(self.scheduler, "alphas_cumprod", None)
        b = min(max(float(self.scheduler.sigmas[self.step]), 1e-6), 1 - 1e-6)
        a = 1 - b
        if products is not None:
            share = float(products[self.scheduler.timesteps[self.step]])
            a, b = math.sqrt(share), math.sqrt(1 - share)
        gain = np.ones(())
        for dim in (2, 3):
            clean = 1 / (np.abs(np.fft.fftfreq(grid.shape[dim])) ** 2 + 1e-16)
            axis = a * clean / (a * a * clean + b * b + 1e-16)
            gain = gain * (axis[:, None] if dim == 2 else axis)
        return np.fft.ifft2(np.fft.fft2(grid) * gain / gain.mean()).real

    def compute(self, blocks: Any, run: Any, words: Any, tokens: Tensor, patches: list[int]) -> Any:
        result = super().compute(blocks, run, words, tokens, patches)
        for patch in patches:
            key = (self.place.branch, patch)
            self.lines[key] = [*self.lines.get(key, []), (self.step, self.added[key][1])][-2:]
        return result

    def add(self, words: Any, tokens: Tensor, patches: list[int]) -> tuple[Any, Tensor]:
        kept = dict(self.added)
        for patch in patches:
            key = (self.place.branch, patch)
            (first, before), (last, value) = (self.lines[key] * 2)[-2:]
            slope = (value - before) / max(last - first, 1)
            self.added[key] = (self.added[key][0], value + slope * (self.step - last))
        result = super().add(words, tokens, patches)
        self.added = kept
        return result


STALE = {
    "pixart": Case("pixart", 3, 1, STEPS, ranks=(2,)),
    "flux": Case("flux", 3, 2, STEPS, ranks=(2,)),
    "distrifusion": Case("pixart", 2, 2, STEPS, ranks=(2,), method="distrifusion"),
    "distrifusion-flux": Case("flux", 2, 1, STEPS, ranks=(2,), method="distrifusion"),
}


def by_hand(case: Case, config: BlockCacheConfig) -> tuple[Tensor, HandCache]:
    pipe, call = pipeline(case), arguments(case)
    if isinstance(config, ditile.SeaCacheConfig):
        scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        sigmas = {"sigmas": [1 - i / case.steps for i in range(case.steps)]}
        scheduler.set_timesteps(**(sigmas if case.family == "flux" else {"num_inference_steps": case.steps}))
        cache: HandMask = HandSea(config, scheduler, 6, case)
    else:
        rules, _ = config.resolve_for(case.steps, None)
        cache = HandMask(list(rules.steps_computation_mask), config, case)
    how = {"method": case.method, "warmup": case.warmup, "patches": case.patches, "cache": cache}
    return simulate(family=case.family, pipe=pipe, call=call, **how), cache


def draw_stale(name: str, config: BlockCacheConfig) -> tuple[Tensor, list[Any]]:
    case = STALE[name]
    pipe = ditile.enable_cache(pipeline(case), config)
    latents = ditile.parallelize(pipe, case.plan(2))(**arguments(case)).images
    return latents, [report.to_dict() for report in caching.summary(pipe, logging=False)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STALE)
def test_stale_keys_and_methods_are_those_of_the_simulation(pool: Pool, name: str, method: str) -> None:
    """A failure: a patch was decided on by another's latents, or forecast from another's values."""
    case, config = STALE[name], METHODS[method]
    for threshold in (0.2, 0.1, 0.4, 0.05, 0.8, 0.025) if method == "sea" else (None,):
        if threshold is not None:
            config = config.reset(threshold=threshold)
        wanted, cache = by_hand(case, config)
        margin = min((abs(d - threshold) for d in cache.differences), default=1.0) if threshold else 1.0
        if any(cache.skipped.values()) and margin > 1e-3:
            break
    else:
        pytest.fail(f"no threshold tells the steps apart: {cache.differences}")
    for rank, (latents, [report]) in enumerate(pool.run(draw_stale, 2, name, config)):
        for each in report["decisions"]:
            key = (each["branch"], each["patch"])
            assert each["skipped"] == cache.skipped.get(key, cache.skipped[key[0], 0]), f"rank {rank}, {key}"
        assert distance(latents, wanted) < 1e-6, f"rank {rank}"
