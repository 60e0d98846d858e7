"""A server under load: clients that leave, ranks and a server that are killed."""

from pathlib import Path

import pytest

from benchmarks.serve_load import Load, LoadJob, find_wrong_jobs


@pytest.mark.parametrize("model, rank_kills, server_kills", [("shapes-pixart", 1, 0), ("shapes-wan", 0, 1)])
def test_no_job_is_lost_or_drawn_twice(model: str, rank_kills: int, server_kills: int, tmp_path: Path) -> None:
    """A failure would mean a client that waits for ever, or work that is done again or for nobody."""
    wanted = LoadJob(model=model, requests=30, clients=8, rank_kills=rank_kills, server_kills=server_kills, seed=1)
    load = Load(wanted, tmp_path)
    result = load.run_load()
    assert not find_wrong_jobs(result, wanted.requests), result.reasons
    ends = list(result.ends.values())
    assert ends.count("done") >= wanted.requests // 4
    assert ("deleted" if wanted.is_video else "left") in ends
    assert not load.find_orphans()
