"""What a server counts: one method for each event, and names that Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from ditile.plan.plan import Plan
from ditile.runner.requests.options import GenerateOptions
from ditile.serve.jobs import Failure, Job, JobResult, Request
from ditile.serve.metrics import Metrics
from tests.pool import Pool
from tests.serve.servers import read_metric
from tests.serve.test_request_cache import serve_requests


def build_job(**changes: object) -> Job:
    request = Request(options=GenerateOptions(prompt="a red circle", num_images=2))
    return Job(**{"id": "image_1", "owner": "", "kind": "image", "request": request, "created": 10.0} | changes)  # type: ignore[arg-type]


def test_a_job_that_is_done() -> None:
    metrics = Metrics()
    result = JobResult(
        files=["0.png", "1.png"],
        seeds=[1, 2],
        size=(32, 16),
        seconds={"total": 4.0, "text": 0.5, "denoise": 3.0, "decode": 0.5},
        num_steps=4,
        facts={
            "left_out": [{"cached_steps": [[3, 5, 7]]}, {"cached_steps": [[3]]}],
            "reports": [
                {"peak_memory_bytes": 7, "step_seconds": [], "waited": {}},
                {
                    "peak_memory_bytes": 9,
                    "step_seconds": [0.5, 1.5],
                    "waited": {"activations": [0.25, 0.0], "latents": [0.0, 0.25]},
                },
            ],
        },
    )
    job = build_job(state="done", started=11.0, ended=15.0, result=result)
    metrics.note_accepted_job(job)
    metrics.note_started_job(job)
    for _ in range(4):
        metrics.note_step()
    metrics.note_ended_job(job, "1")
    families = text_string_to_metric_families(metrics.render_text().decode())
    values = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
    assert values["ditile_drawn_total", "image"] == 2 and values["ditile_pixels_total",] == 2 * 32 * 16
    assert values["ditile_steps_total",] == 4 and values["ditile_steps_left_out_total",] == 3
    assert values["ditile_peak_memory_bytes", "0", "1"] == 7 and values["ditile_peak_memory_bytes", "1", "1"] == 9
    # The first rank was not traced.
    assert values["ditile_waiting_share", "1", "1"] == 0.25
    assert ("ditile_waiting_share", "0", "1") not in values
    sums = {stage: values["ditile_seconds_sum", stage] for stage in ("wait", "text", "denoise", "decode", "total")}
    assert sums == {"wait": 1.0, "text": 0.5, "denoise": 3.0, "decode": 0.5, "total": 5.0}
    assert (
        read_metric(metrics, "ditile_jobs_ended_total", kind="image", state="done") == 1
        and read_metric(metrics, "ditile_jobs_ended_total", kind="image", state="failed") == 0
    )


def test_failures_and_groups() -> None:
    metrics = Metrics()
    metrics.note_ended_job(build_job(state="failed", ended=11.0, failure=Failure(code="rank_failed", message="m")))
    metrics.note_refused_request(429)
    metrics.note_ready_replica("0")
    assert read_metric(metrics, "ditile_group_ready", group="0") == 1
    metrics.note_lost_replica("0")
    metrics.set_job_counts(3, 2)
    assert read_metric(metrics, "ditile_failures_total", code="rank_failed") == 1
    assert read_metric(metrics, "ditile_requests_refused_total", status="429") == 1
    assert read_metric(metrics, "ditile_group_ready", group="0") == 0
    assert read_metric(metrics, "ditile_group_failures_total", group="0") == 1
    assert [read_metric(metrics, "ditile_jobs", state=state) for state in ("queued", "running")] == [3, 2]


def test_a_traced_call_says_how_long_ranks_waited(pool: Pool) -> None:
    """With the reports of two stages, of which the second waits for the first in the synchronous step.

    A failure means that a dashboard never sees the gaps of a plan.
    """
    plan = Plan(pipefusion=2)
    requests = [{"client": {"trace": True}}, {"client": {}}]
    answers, _ = pool.run(serve_requests, plan.world, plan, requests)
    for answer, is_traced in zip(answers, (True, False), strict=True):
        metrics = Metrics()
        metrics.note_ended_job(build_job(state="done", ended=15.0, result=JobResult.from_json(answer["result"])))
        text = metrics.render_text().decode()
        shares = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("ditile_waiting_share{")]
        assert len(shares) == 2 * is_traced and all(0 < share < 1 for share in shares)
