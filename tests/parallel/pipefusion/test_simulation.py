"""Stale keys of PipeFusion and of DistriFusion, on real ranks and in unmodified pipelines, against a simulation."""

from __future__ import annotations

import pytest

from tests.parallel.pipefusion.simulated import TWO_CALLS, Case, Pictures, distance
from tests.pool import Pool

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
    "pixart-8": Case("pixart", 8, 1, 4, ranks=(8,), blocks=(8,)),
    "flux-8": Case("flux", 8, 1, 4, ranks=(8,), blocks=(3, 5)),
    "sd3-8": Case("sd3", 5, 1, 4, ranks=(8,), blocks=(8,)),
    "sd3-2-cold": Case("sd3", 2, 0, 4, ranks=(2,)),
    "sd3-3": Case("sd3", 3, 1, 5, ranks=(3,)),
    "sd3-3-float32": Case("sd3", 3, 1, 5, "float32", ranks=(2,)),
}
STEPS = 4


def distribute(family: str, ranks: int, warmup: int, dtype: str = "float64", **also: object) -> Case:
    return Case(family, ranks, warmup, STEPS, dtype, (ranks,), method="distrifusion", **also)  # type: ignore[arg-type]


KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "pixart": ("pixart", {}),  # DPM-Solver++, which has a history
    "pixart-ddim": ("pixart", {"ddim": True}),
    "flux": ("flux", {}),
    "flux-two-calls": ("flux", {"changes": TWO_CALLS}),
    "sd3": ("sd3", {}),  # with dual attention
}
CASES |= {
    f"distrifusion-{kind}-{ranks}-warmup-{warmup}": distribute(family, ranks, warmup, **also)
    for kind, (family, also) in KINDS.items()
    for ranks, warmup in ((2, 0), (2, 2), (3, 1), (4, 1))
}
CASES |= {
    f"distrifusion-{kind}-{ranks}-float32": distribute(family, ranks, 1, "float32", **also)
    for (kind, (family, also)), ranks in zip(KINDS.items(), (3, 2, 4, 3, 2), strict=True)
}
CASES |= {
    f"distrifusion-{kind}-{ranks}-all": distribute(family, ranks, STEPS, "float32", **also)
    for (kind, (family, also)), ranks in zip(KINDS.items(), (4, 3, 2, 4, 3), strict=True)
}
CASES |= {f"distrifusion-{kind}-8-warmup-1": distribute(*KINDS[kind][:1], 8, 1) for kind in ("pixart", "sd3")}
SYNCHRONOUS = [name for name, case in CASES.items() if case.warmup == case.steps]
"""Whose picture is the pipeline's."""
RUNS = [(ranks, name) for name, case in CASES.items() for ranks in case.ranks if name not in SYNCHRONOUS]


@pytest.fixture(scope="module")
def pictures(pool: Pool) -> Pictures:
    return Pictures(pool, CASES)


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_ranks_equal_the_simulation(pictures: Pictures, ranks: int, name: str) -> None:
    """Every rank ends with the simulation's latents, and the plain picture is at least a hundred times farther away.

    A failure means that some attention read keys of another age, patch, branch or layer than the paper's schedule
    says, that text was stale, or its dummies were seen, or that a patch was stepped with another's history. In one
    family: its table. On some numbers of ranks only: a message was lost, doubled or out of order. With DistriFusion:
    keys were those of another rank, or the patches were put together in another order.
    """
    tolerance = CASES[name].tolerance
    wanted = pictures.simulated(name)
    for rank, latents in enumerate(pictures.real(name, ranks)):
        assert distance(latents, wanted) < tolerance, f"rank {rank}"
    assert distance(pictures.plain(name), wanted) > 100 * tolerance


@pytest.mark.nightly
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_warmup_to_the_end_is_the_pipeline(pictures: Pictures, name: str) -> None:
    """A failure means that a synchronous step does not wait for the keys of all ranks, or wants another order."""
    for rank, latents in enumerate(pictures.real(name, *CASES[name].ranks)):
        assert distance(latents, pictures.plain(name)) < CASES[name].tolerance, f"rank {rank}"


VISIBLE = ["pixart-2", "pixart-3-ddim", "flux-2", "flux-3-two-calls", "sd3-3"]
VISIBLE += [f"distrifusion-{kind}-3-warmup-1" for kind in KINDS]


@pytest.mark.nightly
@pytest.mark.parametrize("name", VISIBLE)
def test_wrong_keys_are_seen(pictures: Pictures, name: str) -> None:
    """Without stale keys of the other patches, with ones that are never refreshed, or with those of the other method,
    the latents are visibly others.

    A failure means that these models do not notice what they attend to, so that the test above proves little.
    """
    wanted = pictures.simulated(name)
    assert distance(pictures.simulated(name, "own"), wanted) > 0.02
    assert distance(pictures.simulated(name, "frozen"), wanted) > 0.02
    if name.startswith("distrifusion"):
        assert distance(pictures.simulated(name, method="pipefusion"), wanted) > 0.02


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pixart-2", "pixart-3-ddim", "flux-3-two-calls", "flux-2-embedded", "sd3-3"])
def test_the_simulation_without_patches_is_the_pipeline(pictures: Pictures, name: str) -> None:
    """A failure means that the simulation is wrong (or that diffusers changed a forward), not ditile."""
    whole = pictures.simulated(name, warmup=0, patches=1)
    assert distance(whole, pictures.plain(name)) < CASES[name].tolerance
