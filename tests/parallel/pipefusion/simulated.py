"""What the tests against the simulation share: pictures, made by real ranks, by the simulation, and by the pipeline.

Differences are the largest of all latents over the latents' standard deviation. In float64 what is left is rounding:
1e-16, or 1e-7 where the scheduler rounds to float32 itself. In float32 it is what rounding grows into over the steps,
which is most where DDIM divides an epsilon by a small alpha.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import Tensor

import ditile
from tests import tiny
from tests.parallel.pipefusion.simulation import Keys, Method, Simulation
from tests.pool import Pool

SHAPES = {"pixart": (1, 4, 16, 12), "sd3": (1, 4, 16, 12), "flux": (1, 48, 16)}  # 8 rows of 6 tokens each
TWO_CALLS = {"true_cfg_scale": 2.0, "negative_prompt": "blue square"}


@dataclass(frozen=True)
class Case:
    """A picture: 8 rows of tokens cut into `patches`, which is uneven for 3 patches and wherever text counts.

    Of another model than the tiny one if it names the `blocks` in its lists.
    """

    family: str
    patches: int
    warmup: int
    steps: int
    dtype: str = "float64"
    ranks: tuple[int, ...] = (2, 3)
    ddim: bool = False
    embedded: bool = False
    blocks: tuple[int, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    method: Method = "pipefusion"

    @property
    def model(self) -> tuple[Any, ...]:
        return self.family, self.dtype, self.ddim, self.embedded, self.blocks

    @property
    def tolerance(self) -> float:
        if self.dtype == "float64":
            return 1e-6
        return 2e-5 if self.ddim else 1e-5

    @property
    def simulation(self) -> dict[str, Any]:
        return {"method": self.method, "patches": self.patches, "warmup": self.warmup}

    def plan(self, ranks: int) -> ditile.Plan:
        if self.method == "distrifusion":
            return ditile.Plan(distrifusion=ranks, warmup=self.warmup)
        return ditile.Plan(pipefusion=ranks, patches=self.patches, warmup=self.warmup)


def pipeline(case: Case) -> Any:
    pipe = tiny.flux(guidance=True) if case.embedded else tiny.FAMILIES[case.family](*case.blocks)
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


def draw(case: Case) -> Tensor:
    """What a rank gets, with the pipeline's own call."""
    runner = ditile.parallelize(pipeline(case), case.plan(torch.distributed.get_world_size()))
    latents: Tensor = runner(**arguments(case)).images
    return latents


class Pictures:
    """What the tests compare, each made once."""

    def __init__(self, pool: Pool, cases: Mapping[str, Case]) -> None:
        self._pool, self._cases = pool, cases
        self._made: dict[tuple[str, str], Tensor] = {}

    def real(self, name: str, ranks: int) -> list[Tensor]:
        """The latents of each rank."""
        return self._pool.run(draw, ranks, self._cases[name])

    def simulated(self, name: str, keys: Keys = "stale", **changes: Any) -> Tensor:
        """The latents of the simulation, by this or another method, warmup or number of patches."""
        case = self._cases[name]
        how: dict[str, Any] = case.simulation | {"keys": keys} | changes
        key = (name, str(how))
        if key not in self._made:
            self._made[key] = Simulation(pipeline(case), arguments(case), **how).draw()
        return self._made[key]

    def plain(self, name: str) -> Tensor:
        """The latents of the pipeline without a plan."""
        case = self._cases[name]
        key = (str(case.model), f"plain {case.steps} {case.changes}")
        if key not in self._made:
            self._made[key] = pipeline(case)(**arguments(case)).images
        return self._made[key]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.std())
