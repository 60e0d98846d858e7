"""Who may ask a server, how much at once, and what it says of itself."""

import json
import logging
import time
from pathlib import Path

import httpx
import pytest

from ditile.plan.errors import LoadError, RankError, StateError
from ditile.serve.api.answers import convert_error
from ditile.serve.api_keys import read_api_keys
from ditile.serve.replica import describe_failed_replica, describe_lost_ranks
from tests.serve.servers import PROMPT, read_error, serve_painted

DRAW = "/v1/images/generations"


def test_keys(tmp_path: Path) -> None:
    """Each key has its own jobs; health and the address of a picture need none."""
    (tmp_path / "keys").write_text("# keys\nann:first-secret\n\nbob: second-secret\nthird-secret\n")
    with serve_painted(tmp_path / "state", api_key=str(tmp_path / "keys")) as served:
        ask = served.client
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first-secret"},
            {"x-api-key": "ä".encode()},
        ):
            answer = ask.post(DRAW, json={"prompt": PROMPT}, headers=headers)
            assert answer.status_code == 401 and read_error(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/metrics", "/v1/models", "/v1/plan", "/openapi.json"):
            assert ask.get(path).status_code == 401, path
        assert ask.get("/health").status_code == 200
        ann, key_5 = {"authorization": "Bearer first-secret"}, {"x-api-key": "third-secret"}
        answer = ask.post(DRAW, json={"prompt": PROMPT, "response_format": "url"}, headers=ann)
        assert ask.get(answer.json()["data"][0]["url"]).status_code == 200
        assert ask.post(DRAW, json={"prompt": PROMPT}, headers=key_5).status_code == 200
        ids = [batch.jobs[0].id for batch in served.group.batches]
        owners = [served.service.find_job(job_id, None).owner for job_id in ids]
        assert owners == ["ann", "key-5"]
        # Names of this machine are asked for only where there are no keys.
        assert ask.get("/v1/models", headers=ann | {"host": "draw.example.org"}).status_code == 200


def test_a_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITILE_API_KEY", "ann:first-secret\nsecond-secret")
    assert read_api_keys(None) == [("ann", b"first-secret"), ("key-2", b"second-secret")]
    monkeypatch.delenv("DITILE_API_KEY")
    assert read_api_keys(None) == []


def test_pages_of_the_web_cannot_draw_here(tmp_path: Path) -> None:
    """From another origin, but for those that are named; `test_gate` has names that lead to this machine."""
    with serve_painted(tmp_path, cors="https://friend.example") as served:
        for origin in ("https://evil.example", "null"):
            answer = served.post(DRAW, {"prompt": PROMPT}, headers={"origin": origin})
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
        for origin in ("https://friend.example", served.url):
            answer = served.post(DRAW, {"prompt": PROMPT}, headers={"origin": origin})
            assert answer.status_code == 200
            assert answer.headers.get("access-control-allow-origin") == (origin if "friend" in origin else None)
        asked = {"origin": "https://friend.example", "access-control-request-method": "POST"}
        assert served.client.options(DRAW, headers=asked).status_code == 200


def test_what_a_server_says_of_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ditile.serve.access"), serve_painted(tmp_path) as served:
        health = served.client.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "ok"
        models = served.client.get("/v1/models").json()
        assert models["object"] == "list" and models["data"][0]["id"] == "shapes-flux"
        assert served.client.get("/v1/models/shapes-flux").json() == models["data"][0]
        assert served.client.get("/v1/models/other").status_code == 404
        assert served.client.get("/v1/plan").json()["plan"] == "pipefusion=2"
        assert served.post(DRAW, {"prompt": PROMPT, "n": 2}).status_code == 200
        assert served.post(DRAW, {}).status_code == 400
        metrics = served.client.get("/metrics").text
        assert 'ditile_drawn_total{kind="image"} 2.0' in metrics
        assert 'ditile_requests_refused_total{status="400"} 1.0' in metrics
        assert served.client.get("/openapi.json").json()["paths"][DRAW]["post"]["requestBody"]["content"]
        served.group.state = "down"
        answer = served.client.get("/health")
        assert answer.status_code == 503 and answer.json()["status"] == "restarting"
        served.group.state = "ready"
    lines = [json.loads(record.message) for record in caplog.records if record.name == "ditile.serve.access"]
    drawn = next(line for line in lines if line["path"] == DRAW and line["status"] == 200)
    assert set(drawn) == {"time", "method", "path", "status", "ms", "owner", "job"}
    assert drawn["job"].startswith("image_") and drawn["ms"] > 0 and abs(drawn["time"] - time.time()) < 60
    assert "red circle" not in caplog.text


def test_a_bug_is_one_line(tmp_path: Path) -> None:
    """What nobody foresaw is in the log, and not in the answer."""
    with serve_painted(tmp_path) as served:
        served.service.describe_plan = lambda: {"plan": object()}  # type: ignore[method-assign]
        answer = httpx.get(f"{served.url}/v1/plan", trust_env=False)
        assert answer.status_code == 500 and read_error(answer)["message"] == "the server failed; its log says why"


def test_what_a_disk_says_is_in_the_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure would tell clients folders and hosts of the server's machine."""
    secret = "/srv/ann/project: no space left on 10.1.2.3"

    def fail(*_: object) -> None:
        raise StateError(secret)

    with serve_painted(tmp_path) as served:
        monkeypatch.setattr(served.service._store, "accept_job", fail)
        answer = served.post(DRAW, {"prompt": PROMPT})
        assert answer.status_code == 503
        assert "log says why" in read_error(answer)["message"] and "project" not in answer.text
        assert "project" not in served.client.get("/health").text
    assert secret in caplog.text


def test_how_ranks_end_is_told_without_their_words() -> None:
    """A failure would tell clients folders and hosts of the server's machine."""
    secret = "connect [10.1.2.3]:29500 in /srv/ann/project: CUDA out of memory"
    for error in (RankError(1, "builtins.OSError", secret), LoadError(secret), StateError(secret)):
        failures = [describe_lost_ranks(error), describe_failed_replica(error, True)]
        texts = [failure.message for failure in failures] + [convert_error(error).message]
        assert not [text for text in texts if "10.1.2.3" in text or "project" in text]
    assert failures[0].code == "out_of_memory"


@pytest.mark.parametrize(("mode", "warns"), [(0o640, True), (0o600, False)])
def test_a_file_of_keys_that_others_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    """A failure would leave keys open to all users of a machine without a word."""
    path = tmp_path / "keys"
    path.write_text("ann:first-secret\n")
    path.chmod(mode)
    assert read_api_keys(str(path)) == [("ann", b"first-secret")]
    lines = [f"api_key={str(path)!r} can be read by other users of this machine; try chmod 600 {path}"]
    assert caplog.messages == (lines if warns else [])
