"""Caches of whole calls: exact at their limits, and on ranks equal to one process, all methods alike.

MagCache, SeaCache and Spectrum are equal to diffusers, or to formulas written out here.
"""

from __future__ import annotations

import math
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

import ditile
from ditile.cache.forecast import Chebyshev
from ditile.cache.methods.magcache import plan_computed_steps
from ditile.cache.methods.seacache import read_noise_level
from ditile.cache.methods.spectrum import ChebyshevCalibratorConfig
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner import caching
from tests.cache.pictures import skipped
from tests.cache.test_easycache import make
from tests.pool import CaseError, Pool
from tests.runner.cases import MAKE, call_of, divided, make_double, same

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
STEPS = 9
RATIOS = [1.0, 1.4, 1.2, 1.01, 1.02, 1.01, 1.0, 0.97, 0.9]
MAG = ditile.MagCacheConfig(mag_ratios=RATIOS, retention_ratio=0.3)
SPECTRUM = ditile.SpectrumConfig(warmup_steps=3, flex_window=0.5)
SEA = ditile.SeaCacheConfig(threshold=0.9)
EASY = ditile.EasyCacheConfig(threshold=0.8, retention_steps=2)
METHODS = {"mag": MAG, "spectrum": SPECTRUM, "sea": SEA, "easy": EASY, "fitted": ditile.FittedScheduleConfig(steps=5)}
GATE = ditile.GuidanceGateConfig(gate=0.5)
GATED = list(range(4, STEPS))
NOTHING_LEFT_OUT = [
    MAG.reset(threshold=0),
    MAG.reset(max_skip_steps=0),
    ditile.MagCacheConfig(calibrate=True),
    SPECTRUM.reset(window_size=1, flex_window=0),
    SEA.reset(threshold=0),
    SEA.reset(retention_steps=STEPS),
    EASY.reset(threshold=0),
    ditile.FittedScheduleConfig(steps=STEPS),
]
FAMILIES = [
    *("flux", "pixart-sigma", "qwen-image", "wan-2.1", "z-image", "stable-diffusion-3"),
    *("unet", "sana", "mochi", "hunyuan-dit"),
]


def family(name: str) -> tuple[Any, dict[str, Any]]:
    return make(name, STEPS)


@pytest.mark.parametrize("name", FAMILIES)
def test_methods_leave_out_steps_and_none_at_their_limit(name: str) -> None:
    """A failure at the limit: a cache that computes everything changes the image."""
    pipe, _ = family(name)
    plain = pipe(**family(name)[1])[0]
    largest = EASY.reset(threshold=1000.0)
    for config in (*NOTHING_LEFT_OUT, *(METHODS | {"easy": largest}).values()):
        if name == "unet" and not isinstance(config, ditile.EasyCacheConfig):
            continue
        ditile.enable_cache(pipe, config)
        image = pipe(**family(name)[1])[0]
        if config in NOTHING_LEFT_OUT:
            same(image, plain, str(config))
            assert not any(skipped(pipe)), config
        else:
            assert all(skipped(pipe)) and caching.summary(pipe, logging=False)[0].saved > 0, config
        assert config is not largest or all(steps == list(range(2, STEPS - 1)) for steps in skipped(pipe))
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


EXACT = [
    *(("flux", plan) for plan in ("ulysses=2", "ring=2", "tensor=2", "pipefusion=3 patches=1")),
    *(("flux true cfg", plan) for plan in ("cfg=2", "ulysses=2", "ring=2", "data=2")),
    *(("pixart sigma", plan) for plan in ("cfg=2", "tensor=2", "ulysses=2", "data=2", "patches=1", "ulysses=2 cfg=2")),
    *(("sd3.5 medium", plan) for plan in ("ulysses=2 cfg=2", "ulysses=2")),
    ("pixart sigma", "pipefusion=2 patches=1"),
]


def list_methods(name: str, plan: str) -> dict[str, Any]:
    """Return those that run under a plan: gating needs both branches and all rows, and two know no stages."""
    methods = dict(METHODS)
    if "pipefusion" in plan:
        del methods["easy"], methods["fitted"]
    elif name != "flux" and "cfg" not in plan:
        methods["gate"] = GATE
    return methods


def draw(name: str, methods: dict[str, Any], plan: str | None) -> dict[str, tuple[Tensor, list[list[int]], int]]:
    """Latents in float64, the steps left out, and bytes that were sent to agree; of each method."""
    found = {}
    for method, config in methods.items():
        pipe = MAKE[name]()
        make_double(pipe)
        ditile.enable_cache(pipe, config)
        call = call_of(name, num_inference_steps=STEPS, num_images_per_prompt=2)
        if plan is None:
            found[method] = pipe(**call).images, skipped(pipe), 0
            continue
        with divided(pipe, **Plan.parse(plan).to_dict()) as runner:
            latents = runner(**call).images
            found[method] = latents, skipped(pipe), runner.mesh.traffic.bytes.get("decisions", 0)
    return found


@pytest.mark.parametrize(("name", "plan"), EXACT)
def test_ranks_leave_out_what_one_process_does(pool: Pool, name: str, plan: str) -> None:
    """A failure: ranks decided apart, computed other rows than they returned, or remembered another's tokens."""
    methods, parsed = list_methods(name, plan), Plan.parse(plan)
    wanted = draw(name, methods, None)
    assert all(any(steps) for _, steps, _ in wanted.values())
    if "gate" in methods:
        assert wanted["gate"][1] == [[], GATED]
    # One that leaves out all that it may would hide what it measured.
    assert 0 < len(wanted["easy"][1][0]) < STEPS - 3 if "easy" in methods else True
    for rank, found in enumerate(pool.run(draw, parsed.world, name, methods, plan)):
        for method, (latents, own, sent) in found.items():
            right, steps, _ = wanted[method]
            assert float((latents - right).abs().max() / right.std()) < 1e-6, f"rank {rank}, {method}"
            assert own[: len(steps)] == steps or method not in ("easy", "gate", "fitted"), f"rank {rank}, {method}"
            if method == "easy" and parsed.data == 1:
                # A number of 8 bytes to each other rank, in each step that is measured.
                assert sent == 8 * (parsed.world - 1) * (STEPS - 1 - 2)
            assert method in ("sea", "easy") or sent == 0, f"rank {rank} sent {sent} bytes although all know the steps"


def refuse(config: Any, plan: str) -> None:
    draw("pixart sigma", {"": config}, plan)


@pytest.mark.parametrize(
    ("config", "plan", "message"),
    [
        (GATE, "cfg=2", "gate=0.5 leaves one half of cfg=2 without work"),
        (GATE, "pipefusion=2 patches=2", "gate=0.5 changes how many rows a call has"),
        (EASY, "distrifusion=2 warmup=1", "decides in each step.*use a schedule"),
    ],
)
def test_plans_that_cannot_do_it_refuse(pool: Pool, config: Any, plan: str, message: str) -> None:
    """Gating needs both branches and all rows; EasyCache decides what stages must know before."""
    with pytest.raises(CaseError, match=message):
        pool.run(refuse, 2, config, plan)
