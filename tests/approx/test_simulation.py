"""Stale keys, on real ranks and through the unmodified pipelines, against a simulation that knows nothing of ditile.

Differences are the largest of all latents over the latents' standard deviation. In float64 what is left is rounding:
1e-16, or 1e-7 where the scheduler rounds to float32 itself. In float32 it is what rounding grows into over the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor

import ditile
from tests import tiny
from tests.approx.simulation import Keys, simulate
from tests.pool import Pool

TOLERANCE = {"float64": 1e-6, "float32": 1e-5}
SHAPES = {"pixart": (1, 4, 16, 12), "sd3": (1, 4, 16, 12), "flux": (1, 48, 16)}  # 8 rows of 6 tokens each


@dataclass(frozen=True)
class Case:
    """A picture: 8 rows of tokens cut into `patches`, which is uneven for 3 patches and wherever text counts."""

    family: str
    patches: int
    warmup: int
    steps: int
    dtype: str = "float64"
    ranks: tuple[int, ...] = (2, 3)
    ddim: bool = False
    embedded: bool = False
    changes: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def model(self) -> tuple[Any, ...]:
        return self.family, self.dtype, self.ddim, self.embedded


TWO_CALLS = {"true_cfg_scale": 2.0, "negative_prompt": "blue square"}

CASES = {
    "pixart-2": Case("pixart", 2, 1, 5, ranks=(2,)),
    "pixart-3-cold": Case("pixart", 3, 0, 4, ranks=(1, 3)),
    "pixart-4": Case("pixart", 4, 2, 6, ranks=(2, 4)),
    "pixart-3-ddim": Case("pixart", 3, 1, 7, ddim=True, ranks=(2,)),
    "pixart-3-float32": Case("pixart", 3, 1, 5, "float32", ranks=(3,)),
    "flux-2": Case("flux", 2, 1, 5, ranks=(2,)),
    "flux-3-cold": Case("flux", 3, 0, 5, ranks=(1, 3)),
    "flux-4": Case("flux", 4, 2, 6, ranks=(3,)),
    "flux-2-embedded": Case("flux", 2, 1, 4, embedded=True, ranks=(2,)),
    "flux-3-two-calls": Case("flux", 3, 1, 5, changes=TWO_CALLS, ranks=(2, 4)),
    "flux-3-float32": Case("flux", 3, 1, 5, "float32", ranks=(2,)),
    "flux-2-two-calls-float32": Case("flux", 2, 0, 4, "float32", changes=TWO_CALLS, ranks=(3,)),
    "sd3-2-cold": Case("sd3", 2, 0, 4, ranks=(2,)),
    "sd3-3": Case("sd3", 3, 1, 5, ranks=(3,)),
    "sd3-3-float32": Case("sd3", 3, 1, 5, "float32", ranks=(2,)),
}
RUNS = [(ranks, name) for ranks in (1, 2, 3, 4) for name, case in CASES.items() if ranks in case.ranks]


def pipeline(case: Case) -> Any:
    pipe = tiny.flux(guidance=True) if case.embedded else tiny.FAMILIES[case.family]()
    if case.ddim:
        pipe.scheduler = DDIMScheduler(beta_end=0.004, clip_sample=False)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.to(part, getattr(torch, case.dtype))
    return pipe


def arguments(case: Case) -> dict[str, Any]:
    noise = torch.randn(SHAPES[case.family], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first = noise.to(getattr(torch, case.dtype))
    changes = {"guidance_scale": 3.0, "latents": first, "num_inference_steps": case.steps} | case.changes
    return tiny.arguments(case.family, **changes)


def draw(cases: list[Case]) -> list[Tensor]:
    """What a rank gets, with the pipelines' own calls."""
    pipes: dict[tuple[Any, ...], Any] = {}
    latents = []
    for case in cases:
        pipe = pipes.setdefault(case.model, None) or pipeline(case)
        pipes[case.model] = pipe
        plan = ditile.Plan(pipefusion=torch.distributed.get_world_size(), patches=case.patches, warmup=case.warmup)
        runner = ditile.parallelize(pipe, plan, keep_weights=True)
        latents.append(runner(**arguments(case)).images)
        runner.restore()
    return latents


class Pictures:
    """What the tests compare, each made once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._drawn: dict[int, dict[str, list[Tensor]]] = {}
        self._made: dict[tuple[str, str], Tensor] = {}

    def real(self, name: str, ranks: int) -> list[Tensor]:
        """The latents of each rank; the cases of as many ranks share one process group."""
        if ranks not in self._drawn:
            names = [name for number, name in RUNS if number == ranks]
            of_rank = self._pool.run(draw, ranks, [CASES[name] for name in names])
            self._drawn[ranks] = {
                name: list(latents) for name, latents in zip(names, zip(*of_rank, strict=True), strict=True)
            }
        return self._drawn[ranks][name]

    def simulated(self, name: str, keys: Keys = "stale") -> Tensor:
        """The latents of the simulation."""
        if (name, keys) not in self._made:
            case = CASES[name]
            made = simulate(case.family, pipeline(case), arguments(case), case.patches, case.warmup, keys)
            self._made[name, keys] = made
        return self._made[name, keys]

    def plain(self, name: str) -> Tensor:
        """The latents of the pipeline without a plan."""
        if (name, "plain") not in self._made:
            self._made[name, "plain"] = pipeline(CASES[name])(**arguments(CASES[name])).images
        return self._made[name, "plain"]


@pytest.fixture(scope="module")
def pictures(pool: Pool) -> Pictures:
    return Pictures(pool)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.std())


@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_ranks_equal_the_simulation(pictures: Pictures, ranks: int, name: str) -> None:
    """Every rank ends with the simulation's latents, and the plain picture is at least a hundred times farther away.

    A failure means that some attention read keys of another age, patch, branch or layer than the paper's schedule
    says, that text was stale, or its dummies were seen, or that a patch was stepped with another's history. In one
    family: its table. On some numbers of ranks only: a message was lost, doubled or out of order.
    """
    tolerance = TOLERANCE[CASES[name].dtype]
    wanted = pictures.simulated(name)
    for rank, latents in enumerate(pictures.real(name, ranks)):
        assert distance(latents, wanted) < tolerance, f"rank {rank}"
    assert distance(pictures.plain(name), wanted) > 100 * tolerance


@pytest.mark.parametrize("name", ["pixart-2", "pixart-3-ddim", "flux-2", "flux-3-two-calls", "sd3-3"])
def test_wrong_keys_are_seen(pictures: Pictures, name: str) -> None:
    """Without stale keys of the other patches, or with ones that are never refreshed, the latents are visibly others.

    A failure means that these models do not notice what they attend to, so that the test above proves little.
    """
    wanted = pictures.simulated(name)
    assert distance(pictures.simulated(name, "own"), wanted) > 0.02
    assert distance(pictures.simulated(name, "frozen"), wanted) > 0.02


@pytest.mark.parametrize("name", ["pixart-2", "pixart-3-ddim", "flux-3-two-calls", "flux-2-embedded", "sd3-3"])
def test_the_simulation_without_patches_is_the_pipeline(pictures: Pictures, name: str) -> None:
    """A failure means that the simulation is wrong (or that diffusers changed a forward), not ditile."""
    case = CASES[name]
    whole = simulate(case.family, pipeline(case), arguments(case), case.patches, warmup=case.steps)
    assert distance(whole, pictures.plain(name)) < TOLERANCE[case.dtype]
