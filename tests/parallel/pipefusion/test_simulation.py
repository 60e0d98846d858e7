"""PipeFusion's stale keys, on real ranks and through the unmodified pipelines, against a simulation without ditile."""

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
RUNS = [(ranks, name) for ranks in (1, 2, 3, 4, 8) for name, case in CASES.items() if ranks in case.ranks]


@pytest.fixture(scope="module")
def pictures(pool: Pool) -> Pictures:
    return Pictures(pool, CASES)


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_ranks_equal_the_simulation(pictures: Pictures, ranks: int, name: str) -> None:
    """Every rank ends with the simulation's latents, and the plain picture is at least a hundred times farther away.

    A failure means that some attention read keys of another age, patch, branch or layer than the paper's schedule
    says, that text was stale, or its dummies were seen, or that a patch was stepped with another's history. In one
    family: its table. On some numbers of ranks only: a message was lost, doubled or out of order.
    """
    tolerance = CASES[name].tolerance
    wanted = pictures.simulated(name)
    for rank, latents in enumerate(pictures.real(name, ranks)):
        assert distance(latents, wanted) < tolerance, f"rank {rank}"
    assert distance(pictures.plain(name), wanted) > 100 * tolerance


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pixart-2", "pixart-3-ddim", "flux-2", "flux-3-two-calls", "sd3-3"])
def test_wrong_keys_are_seen(pictures: Pictures, name: str) -> None:
    """Without stale keys of the other patches, or with ones that are never refreshed, the latents are visibly others.

    A failure means that these models do not notice what they attend to, so that the test above proves little.
    """
    wanted = pictures.simulated(name)
    assert distance(pictures.simulated(name, "own"), wanted) > 0.02
    assert distance(pictures.simulated(name, "frozen"), wanted) > 0.02


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pixart-2", "pixart-3-ddim", "flux-3-two-calls", "flux-2-embedded", "sd3-3"])
def test_the_simulation_without_patches_is_the_pipeline(pictures: Pictures, name: str) -> None:
    """A failure means that the simulation is wrong (or that diffusers changed a forward), not ditile."""
    whole = pictures.simulated(name, warmup=CASES[name].steps)
    assert distance(whole, pictures.plain(name)) < CASES[name].tolerance
