"""A user's own scheduler code: methods replaced on the object, steps with any parameters, latents of changing size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ditile.parallel.pipefusion.patch_schedulers import StepSignature, is_custom_scheduler
from ditile.plan.errors import ModelError, StateError
from tests.parallel.batch.test_batch import close
from tests.pool import Pool
from tests.runner.cases import MAKE, different, divided, run

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


def replaced_methods() -> None:
    pipe = MAKE["flux"]()
    stock = run(pipe, "flux", **TWO)
    replacements = {name: normalise(getattr(pipe.scheduler, name)) for name in ("step", "scale_noise")}
    vars(pipe.scheduler).update(replacements)
    wanted = run(pipe, "flux", **TWO)
    different(wanted, stock, "the replaced step")
    for plan in EXACT:
        with divided(pipe, **plan) as runner:
            close(run(runner, "flux", **TWO), wanted, plan, ROUNDING)
    says = "FlowMatchEulerDiscreteScheduler.step was replaced on the scheduler itself.*a class derived from Flow"
    with divided(pipe, **PATCHES) as runner, pytest.raises(ModelError, match=says):
        run(runner, "flux")
    assert {name: vars(pipe.scheduler)[name] for name in replacements} == replacements
    # What the refusal proposes.
    pipe = with_scheduler("flux", Normalised())
    wanted = run(pipe, "flux", **TWO)
    for plan in (*EXACT, PATCHES):
        with divided(pipe, **plan) as runner:
            close(run(runner, "flux", **TWO), wanted, plan, ROUNDING)
    # A replica without images makes no micro-steps, and its part of the predictions is not gathered.
    says = "data=2 is more than the 1 image.*use data=1, or a plan without pipefusion and patches"
    with divided(pipe, data=2, patches=2, warmup=99) as runner, pytest.raises(ModelError, match=says):
        run(runner, "flux")


def test_methods_that_the_user_replaced_are_called(pool: Pool) -> None:
    """A failure means that they are not called, are gone afterwards, or see a part of what the pipeline gives them."""
    pool.run(replaced_methods, 2)


def forms() -> dict[str, Any]:
    """Steps that take their arguments in all ways that Python has."""

    class Rest(Euler):  # type: ignore[misc]
        def step(self, model_output: Tensor, timestep: Any, sample: Tensor, **rest: Any) -> Any:
            return super().step(model_output, timestep, sample, **rest)

    class Packed(Euler):  # type: ignore[misc]
        def step(self, *given: Any, **named: Any) -> Any:
            return super().step(*given, **named)

    class Positional(Euler):  # type: ignore[misc]
        def step(self, eps: Tensor, t: Any, x: Tensor, /, *, return_dict: bool = True) -> Any:
            return super().step(eps, t, x, return_dict=return_dict)

    class Named(Euler):  # type: ignore[misc]
        def step(self, *, sample: Tensor, timestep: Any, model_output: Tensor) -> Any:
            return super().step(model_output, timestep, sample)

    return {kind.__name__: kind for kind in (Rest, Packed, Positional, Named)}


@pytest.mark.parametrize("name", ["Rest", "Packed", "Positional", "Named"])
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


def grows_in_patches() -> str:
    with divided(with_scheduler("sd3", Growing()), **PATCHES) as runner, pytest.raises(StateError) as caught:
        run(runner, "sd3")
    return str(caught.value)


def test_latents_that_grow_in_patches_are_refused_alike(pool: Pool) -> None:
    """A failure means that ranks which step nothing wait for those that do, or that gloo ends the process."""
    for says in pool.run(grows_in_patches, 2):
        assert says.startswith("Growing makes latents of shape (1, 4, 32, 24) of those of (1, 4, 16, 12), and patches")
