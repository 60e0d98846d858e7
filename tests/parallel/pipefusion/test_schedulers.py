"""Every stock scheduler that the pipelines accept, unmodified: one copy per patch, and the plain pipeline's numbers.

xDiT rewrites two schedulers and fails with Euler and UniPC. All comparisons are bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ditile
from ditile import Plan
from ditile.parallel.pipefusion.patch_schedulers import StepSignature, is_custom_scheduler
from ditile.plan.errors import ModelError, StateError
from tests.parallel.batch.test_batch import close
from tests.pool import Pool, on_ranks, share
from tests.runner.cases import MAKE, call_of, different, divided, run, same
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

STEPS = 4
EPSILON: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"DPM++ order {n}": ("DPMSolverMultistepScheduler", {"solver_order": n}) for n in (1, 2, 3)},
    "DPM++ Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "DPM++ SDE": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "DPM++ Heun": ("DPMSolverMultistepScheduler", {"solver_type": "heun", "euler_at_final": True}),
    "DPM single step": ("DPMSolverSinglestepScheduler", {"solver_order": 2, "final_sigmas_type": "zero"}),
    "UniPC": ("UniPCMultistepScheduler", {}),
    "UniPC order 3": ("UniPCMultistepScheduler", {"solver_order": 3}),
    "UniPC epsilon": ("UniPCMultistepScheduler", {"predict_x0": False, "final_sigmas_type": "sigma_min"}),
    "DEIS": ("DEISMultistepScheduler", {}),
    "SA": ("SASolverScheduler", {}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "KDPM2": ("KDPM2DiscreteScheduler", {}),
    "KDPM2 ancestral": ("KDPM2AncestralDiscreteScheduler", {}),
    "LMS": ("LMSDiscreteScheduler", {}),
    "DDIM": ("DDIMScheduler", {}),
    "DDIM parallel": ("DDIMParallelScheduler", {}),
    "DDPM": ("DDPMScheduler", {}),
    "PNDM": ("PNDMScheduler", {}),
    "PNDM without PRK": ("PNDMScheduler", {"skip_prk_steps": True}),
    "IPNDM": ("IPNDMScheduler", {}),
    "LCM": ("LCMScheduler", {}),
    "TCD": ("TCDScheduler", {}),
    "EDM Euler": ("EDMEulerScheduler", {}),
    "EDM DPM++": ("EDMDPMSolverMultistepScheduler", {}),
}
DYNAMIC = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
DYNAMIC |= {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
FLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "Euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "Euler stochastic": ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    "Euler shifted by size": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "Euler Karras": ("FlowMatchEulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "LCM": ("FlowMatchLCMScheduler", {}),
    "UniPC": ("UniPCMultistepScheduler", DYNAMIC),
    "DPM++": ("DPMSolverMultistepScheduler", DYNAMIC),
    "Heun": ("FlowMatchHeunDiscreteScheduler", {}),  # SD3 only: takes no sigmas
}
RANDOM = ("DPM++ SDE", "SA", "Euler ancestral", "KDPM2 ancestral", "DDPM", "LCM")


def scheduler(name: str, which: tuple[str, dict[str, Any]]) -> Any:
    cls, config = getattr(diffusers, which[0]), which[1]
    if which[0].startswith(("FlowMatch", "EDM", "IPNDM")):
        return cls(**config)
    base = {"beta_end": 0.004} if name.startswith("pixart") else {}
    return cls(**base, **config)


def draw(name: str, generators: str) -> dict[str, Any]:
    """A call that draws from torch's own generator, a given one, or one per image."""
    if generators == "list":
        return call_of(name, num_images_per_prompt=2, seeds=[3, 4])
    return call_of(name, num_inference_steps=STEPS) | ({"generator": None} if generators == "own" else {})


def outcome(pipe: Any, name: str, generators: str, seed: int = 11) -> list[Any]:
    """The pictures of two calls in a row that draw from the same generators, and the states in which these are left."""
    torch.manual_seed(seed)
    call = draw(name, generators)
    given = call["generator"]
    results = [pipe(**call).images for _ in range(2)]
    every = given if isinstance(given, list) else [given] if given is not None else []
    return [*results, torch.get_rng_state(), *(one.get_state() for one in every)]


def as_plain(name: str, table: dict[str, Any], which: list[str], generators: str, patches: int) -> list[str]:
    """What differs from the plain pipeline, for each scheduler."""
    pipe, wrong = MAKE[name](), []
    for key in which:
        pipe.scheduler = scheduler(name, table[key])
        wanted = share(f"{name} by {key}, {generators}", outcome, pipe, name, generators)
        pipe.scheduler = scheduler(name, table[key])
        with divided(pipe, pipefusion=2, patches=patches, warmup=99) as runner:
            got = outcome(runner, name, generators, seed=11 + torch.distributed.get_rank())
        try:
            same(got, wanted, f"{name} {key} generators={generators}")
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


EVERY = [*((key, "pixart sigma") for key in EPSILON), *((key, "sd3") for key in FLOW)]
EVERY += [(key, "flux") for key in FLOW if key != "Heun"]
"""What schedulers keep: earlier predictions, halves of a step, numbers that they drew."""


@pytest.mark.parametrize(("key", "name"), EVERY)
def test_every_scheduler_is_exact(pool: Pool, key: str, name: str) -> None:
    """Two calls in a row with one generator. A failure means that copies of this scheduler, stepped by patches, forget
    or confuse what it keeps between steps, or draw other numbers."""
    if key == "LMS":
        pytest.importorskip("scipy")
    table = EPSILON if name.startswith("pixart") else FLOW
    for wrong in pool.run(as_plain, 2, name, table, [key], "one", 3):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("generators", ["own", "list"])
def test_generators(pool: Pool, generators: str) -> None:
    """A failure means that ranks draw other numbers than the plain pipeline, or leave generators elsewhere than it."""
    for wrong in pool.run(as_plain, 2, "pixart sigma", EPSILON, [*RANDOM, "Euler"], generators, 3):
        assert not wrong, "\n".join(wrong)
    for wrong in pool.run(as_plain, 2, "sd3", FLOW, ["Euler stochastic", "Euler"], generators, 3):
        assert not wrong, "\n".join(wrong)


@on_ranks(2)
def test_statistics_of_the_whole_image_are_refused() -> None:
    """A failure means that each patch is clipped by a quantile of its own, without a word."""
    pipe = MAKE["pixart sigma"]()
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler(thresholding=True)
    with divided(pipe, pipefusion=2) as runner:
        with pytest.raises(ModelError, match="thresholding=True"):
            runner(**call_of("pixart sigma"))
        pipe.scheduler = diffusers.DPMSolverMultistepScheduler()
        assert isinstance(runner(**call_of("pixart sigma")).images, Tensor)


@pytest.mark.parametrize("key", ["DPM++ order 3", "UniPC", "Heun", "Euler ancestral", "DDPM"])
def test_stale_keys_leave_schedulers_alone(pool: Pool, key: str) -> None:
    """Two stages against one, with stale keys. A failure means that a copy's history depends on the stage it is on."""
    wanted = pool.run(stale, 1, key, 1)[0]
    for got in pool.run(stale, 2, key, 2):
        same(got, wanted, key)
    different(wanted, pool.run(stale, 1, key, 1, 99)[0], "nothing was stale")


def stale(key: str, stages: int, warmup: int = 1) -> Any:
    pipe = MAKE["pixart sigma"]()
    pipe.scheduler = scheduler("pixart sigma", EPSILON[key])
    with divided(pipe, pipefusion=stages, patches=3, warmup=warmup) as runner:
        return runner(**call_of("pixart sigma")).images


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cosmos", "chrono-edit-reasoning"])
def test_a_pipeline_that_changes_its_scheduler_in_the_loop(name: str) -> None:
    """The first counts it back and steps once more, the second cuts its history; one process and no patches.

    A failure means that the scheduler that a pipeline sees is not the one that is stepped.
    """
    entry = ZOO[name]
    pipe = entry.make()
    wanted = pipe(**entry.call())
    runner = ditile.parallelize(pipe, Plan(), keep_weights=True)
    assert torch.equal(list_tensors(runner(**entry.call()))[0], list_tensors(wanted)[0])


ROUNDING = 1e-5
TWO = {"num_images_per_prompt": 2}
EXACT: tuple[dict[str, Any], ...] = ({"data": 2}, {"ulysses": 2}, {"tensor": 2}, {"distrifusion": 2, "warmup": 99})
PATCHES = {"pipefusion": 2, "patches": 2, "warmup": 99}
Euler: Any = diffusers.FlowMatchEulerDiscreteScheduler


def normalise(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A step that computes with a statistic of all images."""
    return lambda prediction, *args, **kwargs: stock(prediction / prediction.std(), *args, **kwargs)


class Normalised(Euler):  # type: ignore[misc]
    def step(self, eps: Tensor, when: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
        return super().step(eps / eps.std(), when, x, *rest, **more)


class Growing(Euler):  # type: ignore[misc]
    """Doubles the size of the latents of SD3 after the second step."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        return (functional.interpolate(result[0], scale_factor=2),) if self.step_index == 2 else result


def with_scheduler(name: str, scheduler: Any) -> Any:
    pipe = MAKE[name]().to(torch.float64)
    pipe.scheduler = scheduler
    return pipe


@on_ranks(2)
def test_methods_that_the_user_replaced_are_called() -> None:
    """A failure means that they are not called, are gone afterwards, or see a part of what the pipeline gives them."""
    pipe = MAKE["flux"]()
    stock = run(pipe, "flux", **TWO)
    replacements = {name: normalise(getattr(pipe.scheduler, name)) for name in ("step", "scale_noise")}
    vars(pipe.scheduler).update(replacements)
    wanted = run(pipe, "flux", **TWO)
    different(wanted, stock, "the replaced step")
    for plan in EXACT:
        with divided(pipe, **plan) as runner:
            close(run(runner, "flux", **TWO), wanted, plan, tolerance=ROUNDING)
    says = "FlowMatchEulerDiscreteScheduler.step was replaced on the scheduler itself.*a class derived from Flow"
    with divided(pipe, **PATCHES) as runner, pytest.raises(ModelError, match=says):
        run(runner, "flux")
    assert {name: vars(pipe.scheduler)[name] for name in replacements} == replacements
    # What the refusal proposes.
    pipe = with_scheduler("flux", Normalised())
    wanted = run(pipe, "flux", **TWO)
    for plan in (*EXACT, PATCHES):
        with divided(pipe, **plan) as runner:
            close(run(runner, "flux", **TWO), wanted, plan, tolerance=ROUNDING)
    # A replica without images makes no micro-steps, and its part of the predictions is not gathered.
    says = "data=2 is more than the 1 image.*use data=1, or a plan without pipefusion and patches"
    with divided(pipe, data=2, patches=2, warmup=99) as runner, pytest.raises(ModelError, match=says):
        run(runner, "flux")


def forms() -> dict[str, Any]:
    """Steps that take their arguments in all ways that Python has."""

    class Packed(Euler):  # type: ignore[misc]
        def step(self, *given: Any, **named: Any) -> Any:
            return super().step(*given, **named)

    class Named(Euler):  # type: ignore[misc]
        def step(self, *, sample: Tensor, timestep: Any, model_output: Tensor) -> Any:
            return super().step(model_output, timestep, sample)

    return {kind.__name__: kind for kind in (Packed, Named)}


@pytest.mark.parametrize("name", ["Packed", "Named"])
def test_a_step_may_take_its_arguments_in_any_way(name: str) -> None:
    """A failure means that a call is made otherwise than the pipeline made it."""
    scheduler, plain = forms()[name](), Euler()
    prediction, latents = torch.ones(1, 4), torch.zeros(1, 4)
    for each in (scheduler, plain):
        each.set_timesteps(4)
    t = plain.timesteps[0]
    args: tuple[Any, ...] = () if name == "Named" else (prediction, t, latents)
    named = {"model_output": prediction, "timestep": t, "sample": latents} if name == "Named" else {"return_dict": True}
    call = StepSignature(scheduler).bind(args, named)
    assert (call.prediction, call.timestep, call.sample) == (prediction, t, latents)
    got = call.make(scheduler.step, prediction * 2, latents, call.extra).prev_sample
    assert torch.equal(got, plain.step(prediction * 2, t, latents).prev_sample)
    assert is_custom_scheduler(scheduler) and not is_custom_scheduler(plain)


@on_ranks(2)
def test_latents_that_grow_in_patches_are_refused_alike() -> None:
    """A failure means that ranks which step nothing wait for those that do, or that gloo ends the process."""
    with divided(with_scheduler("sd3", Growing()), **PATCHES) as runner, pytest.raises(StateError) as caught:
        run(runner, "sd3")
    says = str(caught.value)
    assert says.startswith("Growing makes latents of shape (1, 4, 32, 24) of those of (1, 4, 16, 12), and patches")
