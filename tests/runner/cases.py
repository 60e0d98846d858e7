"""What the exact tests share: tiny pipelines by name, a plan around one of them, equality bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ditile.plan.plan import Plan
from ditile.runner.load import Component, list_components, load_model
from ditile.runner.runner import Runner, parallelize
from tests import tiny
from tests.pool import Pool, share

MAKE: dict[str, Callable[[], Any]] = {
    "flux": tiny.flux,
    "flux embedded guidance": lambda: tiny.flux(guidance=True),
    "flux true cfg": tiny.flux,
    "pixart sigma": tiny.pixart,
    "pixart alpha": lambda: tiny.pixart(alpha=True),
    "sd3": lambda: tiny.sd3(dual=()),
    "sd3.5 medium": tiny.sd3,
}
"""A pipeline for every way in which a family is called."""

TRUE_CFG = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}


def call_of(name: str, **changes: Any) -> dict[str, Any]:
    """Arguments for a pipeline of `MAKE`. `seeds=[..]` is a list of generators, `embeds=t` random prompt embeddings."""
    if name == "flux true cfg":
        changes = TRUE_CFG | changes
        if isinstance(changes.get("prompt"), list):  # FluxPipeline wants as many negative prompts
            changes["negative_prompt"] = [changes["negative_prompt"]] * len(changes["prompt"])
    seeds, embeds = changes.pop("seeds", None), changes.pop("embeds", None)
    if seeds:
        changes["generator"] = [torch.Generator().manual_seed(seed) for seed in seeds]
    call = tiny.arguments(name.split()[0].split(".")[0], **changes)
    if embeds:
        call |= _embeddings(name, embeds)
    return call


def find_component(source: Any, name: str = "transformer") -> Component:
    """A component of a pipeline's folder."""
    return next(part for part in list_components(source) if part.name == name)


def load_parts(
    source: Any, plan: Plan, rank: int, dtype: Any, variant: str | None = None, files: dict[str, str] | None = None
) -> dict[str, Any]:
    """The models of which a rank reads a part."""
    parts = {}
    for part in list_components(source):
        if part.is_divided(plan, rank):
            parts[part.name] = load_model(part, plan, rank, dtype, variant, (files or {}).get(part.name))
    return parts


def run(pipe: Any, name: str, **changes: Any) -> Any:
    """The pictures of a pipeline or runner."""
    return pipe(**call_of(name, **changes)).images


def draw_plain(name: str, **changes: Any) -> Any:
    """The pictures of a pipeline of `MAKE` without a plan, drawn once for all ranks and tests of a session."""
    return share(f"{name} {changes}", lambda: run(MAKE[name](), name, **changes))


def make_double(pipe: Any) -> None:
    """Give all models of a pipeline weights in float64, so that no decision and no tolerance hangs on a kernel."""
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.to(part, torch.float64)


def measure_error(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((got - wanted).abs().max() / wanted.abs().max())


def measure_distance(got: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference as a share of the norm."""
    return float((got - wanted).norm() / wanted.norm())


def close(got: Any, wanted: Any, what: Any, tolerance: float = 1e-5) -> None:
    """Raise unless two results differ by no more than rounding."""
    a, b = _array(got), _array(wanted)
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype}, not {b.shape} {b.dtype}"
    assert np.isfinite(b).all()
    distance = float(np.abs(a - b).max() / np.abs(b).max())
    assert distance < tolerance, f"{what}: {distance:.2g}"


@contextmanager
def divided(pipe: Any, *, trusts: bool = True, **plan: Any) -> Iterator[Runner]:
    """The pipeline under a plan; it is whole again afterwards."""
    # Tests look at models by hooks of their own.
    runner = parallelize(pipe, Plan(**plan), keep_weights=True, trust_code=trusts)
    yield runner
    runner.restore()


def same(got: Any, wanted: Any, what: Any = "") -> None:
    """Raises unless two results are equal bit for bit, and not by being broken alike."""
    if isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), what
        for one, other in zip(got, wanted, strict=True):
            same(one, other, what)
        return
    a, b = _array(got), _array(wanted)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, not {b.shape}"
    assert a.dtype == b.dtype, f"{what}: {a.dtype}, not {b.dtype}"
    assert np.isfinite(b).all(), f"{what}: the plain pipeline's result is not finite"
    assert np.array_equal(a, b), f"{what}: differs by {np.abs(a.astype(np.float64) - b).max():.3g}"


def different(got: Any, other: Any, what: Any = "") -> None:
    """Raises if two results are equal: what was to be tested did not happen."""
    assert not np.array_equal(_array(got), _array(other)), f"{what}: equal, and should not be"


def pictures(name: str, plans: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]]) -> list[Tensor]:
    """On a rank: the latents of each call under each plan."""
    actual = []
    pipe = MAKE[name]()
    for plan in plans:
        with divided(pipe, **plan) as runner:
            actual += [run(runner, name, **call) for call in calls]
    return actual


def equal_over_ranks(pool: Pool, degrees: Sequence[int], name: str, plans: Any, calls: Any) -> list[Tensor]:
    """Runs `pictures` on 1 rank and on each of `degrees`; every rank of every degree must give the same."""
    wanted: list[Tensor] = pool.run(pictures, 1, name, [plan | {"pipefusion": 1} for plan in plans], calls)[0]
    for ranks in degrees:
        for rank, got in enumerate(pool.run(pictures, ranks, name, [p | {"pipefusion": ranks} for p in plans], calls)):
            for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
                where = (plans[index // len(calls)], calls[index % len(calls)])
                same(one, other, f"{name}, rank {rank} of {ranks}, {where}")
    return wanted


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _embeddings(name: str, tokens: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    given: dict[str, Any] = {"prompt": None, "prompt_embeds": draw(1, tokens, tiny.WIDTH)}
    if name.startswith("pixart"):
        mask = torch.ones(1, tokens, dtype=torch.int64)
        given |= {"negative_prompt": None, "prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
        return given | {"negative_prompt_embeds": draw(1, tokens, tiny.WIDTH)}
    if name.startswith("flux"):
        return given | {"pooled_prompt_embeds": draw(1, tiny.WIDTH)}
    wide = 2 * tiny.WIDTH
    given |= {"prompt_embeds": draw(1, tokens, wide), "pooled_prompt_embeds": draw(1, wide)}
    return given | {"negative_prompt_embeds": draw(1, tokens, wide), "negative_pooled_prompt_embeds": draw(1, wide)}
