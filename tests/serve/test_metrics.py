"""What a server counts: one method for each event, and names that Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from ditile.runner.requests.options import GenerateOptions
from ditile.serve.jobs import Job, JobResult, Request
from ditile.serve.metrics import Metrics
from tests.serve.servers import read_metric


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
            "reports": [{"peak_memory_bytes": 7}, {"peak_memory_bytes": 9}],
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
    sums = {stage: values["ditile_seconds_sum", stage] for stage in ("wait", "text", "denoise", "decode", "total")}
    assert sums == {"wait": 1.0, "text": 0.5, "denoise": 3.0, "decode": 0.5, "total": 5.0}
    assert (
        read_metric(metrics, "ditile_jobs_ended_total", kind="image", state="done") == 1
        and read_metric(metrics, "ditile_jobs_ended_total", kind="image", state="failed") == 0
    )
