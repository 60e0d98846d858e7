"""The counters and times of a server for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ditile.serve.jobs import Job

# Bounds of the histogram in seconds: from a small model's image to a long video.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
# Stages that a call measures. There are two more: "wait" until ranks begin, and "total" until the job has ended.
CALL_STAGES = ("text", "denoise", "decode")
# Name -> help, and labels. Dashboards rely on these names: a "group" is a replica.
_Rows = dict[str, tuple[str, list[str]]]
_COUNTERS: _Rows = {
    "group_failures": ("groups of ranks that ended", ["group"]),
    "jobs_accepted": ("jobs that came", ["kind"]),
    "jobs_ended": ("jobs that ended", ["kind", "state"]),
    "failures": ("jobs that failed", ["code"]),
    "requests_refused": ("requests that became no job", ["status"]),
    "drawn": ("images and videos", ["kind"]),
    "steps": ("denoising steps made", []),
    "steps_left_out": ("denoising steps that a cache skipped", []),
    "pixels": ("pixels of all images and frames", []),
}
_GAUGES: _Rows = {
    "jobs": ("jobs now", ["state"]),
    "group_ready": ("whether a group of ranks is ready", ["group"]),
    "peak_memory_bytes": ("of a rank, in its last call", ["group", "rank"]),
}


class Metrics:
    """Counters of one server, in a registry of its own, so that a process may have several servers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._counters = {}
        for name, (text, labels) in _COUNTERS.items():
            self._counters[name] = Counter(f"ditile_{name}", text, labels, registry=self.registry)
        self._gauges = {}
        for name, (text, labels) in _GAUGES.items():
            self._gauges[name] = Gauge(f"ditile_{name}", text, labels, registry=self.registry)
        self._seconds = Histogram(
            "ditile_seconds", "seconds of a job by stage", ["stage"], registry=self.registry, buckets=_SECONDS
        )
        # Series that a dashboard expects before the first job.
        self.set_job_counts(0, 0)
        for stage in ("wait", *CALL_STAGES, "total"):
            self._seconds.labels(stage)

    def set_job_counts(self, waiting: int, running: int) -> None:
        """Set the numbers of waiting and running jobs."""
        self._gauges["jobs"].labels("queued").set(waiting)
        self._gauges["jobs"].labels("running").set(running)

    def count(self, name: str, *labels: object) -> None:
        """Add one to a counter; `labels` are the values of its labels."""
        counter = self._counters[name]
        if labels:
            counter = counter.labels(*labels)
        counter.inc()

    def note_seconds(self, stage: str, begin: float, end: float | None) -> None:
        """Record the seconds of a stage of a job; nothing if `end` is None."""
        # The system clock may have been set back meanwhile.
        if end is not None:
            self._seconds.labels(stage).observe(max(0.0, end - begin))

    def note_ended_job(self, job: Job, replica: str) -> None:
        """Count a job that ended, in any state, on the replica of this name."""
        self.count("jobs_ended", job.kind, job.state)
        self.note_seconds("total", job.created, job.ended)
        if job.failure is not None:
            self.count("failures", job.failure.code)
        if job.result is not None:
            num_outputs = len(job.result.files)
            width, height = job.result.size
            self._counters["drawn"].labels(job.kind).inc(num_outputs)
            num_frames = num_outputs * max(1, job.result.frames)
            self._counters["pixels"].inc(num_frames * width * height)
            for stage in CALL_STAGES:
                self.note_seconds(stage, 0.0, job.result.seconds.get(stage))
            # Stages and contexts skip nearly the same steps, so the largest number counts. Jobs of a batch share this.
            skipped = 0
            for context in job.result.facts.get("left_out", []):
                skipped = max(skipped, len(context["cached_steps"][-1]))
            batch_size = job.result.facts.get("batch", 1)
            self._counters["steps_left_out"].inc(skipped / batch_size)
            for rank, report in enumerate(job.result.facts.get("reports", [])):
                memory = self._gauges["peak_memory_bytes"].labels(replica, rank)
                memory.set(report["peak_memory_bytes"])

    def set_replica_readiness(self, replica: str, *, is_ready: bool) -> None:
        """Set whether the ranks of a replica can generate."""
        self._gauges["group_ready"].labels(replica).set(is_ready)
