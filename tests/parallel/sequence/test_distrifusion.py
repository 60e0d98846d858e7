"""DistriFusion, on real ranks and through the unmodified pipelines, against a simulation without ditile."""

from __future__ import annotations

import pytest

from tests.parallel.pipefusion.simulated import TWO_CALLS, Case, Pictures, distance
from tests.pool import Pool

STEPS = 4


def case(family: str, ranks: int, warmup: int, dtype: str = "float64", **also: object) -> Case:
    return Case(family, ranks, warmup, STEPS, dtype, (ranks,), method="distrifusion", **also)  # type: ignore[arg-type]


KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "pixart": ("pixart", {}),  # DPM-Solver++, which has a history
    "pixart-ddim": ("pixart", {"ddim": True}),
    "flux": ("flux", {}),
    "flux-two-calls": ("flux", {"changes": TWO_CALLS}),
    "sd3": ("sd3", {}),  # with dual attention
}
CASES = {
    f"{kind}-{ranks}-warmup-{warmup}": case(family, ranks, warmup, **also)
    for kind, (family, also) in KINDS.items()
    for ranks, warmup in ((2, 0), (2, 2), (3, 1), (4, 1))
}
CASES |= {
    f"{kind}-{ranks}-float32": case(family, ranks, 1, "float32", **also)
    for (kind, (family, also)), ranks in zip(KINDS.items(), (3, 2, 4, 3, 2), strict=True)
}
CASES |= {
    f"{kind}-{ranks}-all": case(family, ranks, STEPS, "float32", **also)
    for (kind, (family, also)), ranks in zip(KINDS.items(), (4, 3, 2, 4, 3), strict=True)
}
CASES |= {f"{kind}-8-warmup-1": case(*KINDS[kind][:1], 8, 1) for kind in ("pixart", "sd3")}
STALE = [name for name, case in CASES.items() if case.warmup < STEPS]


@pytest.fixture(scope="module")
def pictures(pool: Pool) -> Pictures:
    return Pictures(pool, CASES)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STALE)
def test_ranks_equal_the_simulation(pictures: Pictures, name: str) -> None:
    """Every rank ends with the simulation's latents, and the plain picture is at least a hundred times farther away.

    A failure means that a rank read keys of another age, rank, branch or layer, that its text was stale or another
    rank's, or that the patches were put together in another order.
    """
    case, wanted = CASES[name], pictures.simulated(name)
    for rank, latents in enumerate(pictures.real(name, *case.ranks)):
        assert distance(latents, wanted) < case.tolerance, f"rank {rank}"
    assert distance(pictures.plain(name), wanted) > 100 * case.tolerance


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CASES if name not in STALE])
def test_warmup_to_the_end_is_the_pipeline(pictures: Pictures, name: str) -> None:
    """A failure means that a synchronous step does not wait for the keys of all ranks, or wants another order."""
    for rank, latents in enumerate(pictures.real(name, *CASES[name].ranks)):
        assert distance(latents, pictures.plain(name)) < CASES[name].tolerance, f"rank {rank}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", [f"{kind}-3-warmup-1" for kind in KINDS])
def test_wrong_keys_are_seen(pictures: Pictures, name: str) -> None:
    """Keys that are never exchanged, never refreshed, or fresh where PipeFusion's are, give visibly other latents.

    A failure means that these models do not notice what they attend to, so that the first test proves little.
    """
    wanted = pictures.simulated(name)
    assert distance(pictures.simulated(name, "own"), wanted) > 0.02
    assert distance(pictures.simulated(name, "frozen"), wanted) > 0.02
    assert distance(pictures.simulated(name, method="pipefusion"), wanted) > 0.02
