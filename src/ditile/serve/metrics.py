"""What a server counts and times, for Prometheus. Each event of the service has one method here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ditile.serve.jobs import Drawn, Job, State

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
"""Bounds of histograms: from a small model's picture to a long video."""
STAGES = ("wait", "text", "denoise", "decode", "total")
"""Of a job: until ranks begin to draw it, the three parts of its call, and from its arrival to its end."""


class Metrics:
    """Counters of one server, in a registry of its own, so that a process may have several servers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._jobs = Gauge("ditile_jobs", "jobs now", ["state"], registry=registry)
        self._ready = Gauge("ditile_group_ready", "whether a group of ranks can draw", ["group"], registry=registry)
        self._restarts = Counter("ditile_group_failures", "groups of ranks that ended", ["group"], registry=registry)
        self._accepted = Counter("ditile_jobs_accepted", "jobs that came", ["kind"], registry=registry)
        self._ended = Counter("ditile_jobs_ended", "jobs that ended", ["kind", "state"], registry=registry)
        self._failures = Counter("ditile_failures", "jobs that failed", ["code"], registry=registry)
        self._refused = Counter("ditile_requests_refused", "requests that became no job", ["status"], registry=registry)
        self._drawn = Counter("ditile_drawn", "pictures and videos", ["kind"], registry=registry)
        self._steps = Counter("ditile_steps", "denoising steps made", registry=registry)
        self._left_out = Counter("ditile_steps_left_out", "denoising steps that a cache left out", registry=registry)
        self._pixels = Counter("ditile_pixels", "pixels of all pictures and frames", registry=registry)
        self._seconds = Histogram(
            "ditile_seconds", "seconds of a job by stage", ["stage"], registry=registry, buckets=_SECONDS
        )
        self._memory = Gauge(
            "ditile_peak_memory_bytes", "of a rank, in its last call", ["group", "rank"], registry=registry
        )
        for state in ("queued", "running"):
            self._jobs.labels(state)
        for stage in STAGES:
            self._seconds.labels(stage)

    def set_job_counts(self, waiting: int, running: int) -> None:
        """How many jobs there are now that have not ended."""
        self._jobs.labels("queued").set(waiting)
        self._jobs.labels("running").set(running)

    def note_accepted_job(self, job: Job) -> None:
        """A job came."""
        self._accepted.labels(job.kind).inc()

    def note_refused_request(self, status: int) -> None:
        """A request became no job; `status` is that of HTTP."""
        self._refused.labels(str(status)).inc()

    def note_started_job(self, job: Job) -> None:
        """Ranks began to draw a job; `started` is set."""
        if job.started is not None:
            self._seconds.labels("wait").observe(max(0.0, job.started - job.created))

    def note_step(self) -> None:
        """A batch made a step."""
        self._steps.inc()

    def note_ended_job(self, job: Job, group: str = "0") -> None:
        """A job ended, in any state; `group` is the name of the group that drew it."""
        self._ended.labels(job.kind, job.state).inc()
        if job.ended is not None:
            self._seconds.labels("total").observe(max(0.0, job.ended - job.created))
        if job.failure is not None:
            self._failures.labels(job.failure.code).inc()
        if job.drawn is not None:
            self._note_drawn(job, job.drawn, group)

    def note_ready_group(self, group: str) -> None:
        """The ranks of a group are warm."""
        self._ready.labels(group).set(1)

    def note_lost_group(self, group: str) -> None:
        """The ranks of a group ended or hang."""
        self._ready.labels(group).set(0)
        self._restarts.labels(group).inc()

    def render_text(self) -> bytes:
        """All of it in the text format of Prometheus."""
        return generate_latest(self.registry)

    def read_value(self, name: str, **labels: str) -> float:
        """The value of one sample; 0 if there is none."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def count_jobs(self, kind: str, state: State) -> int:
        """How many jobs of a kind ended in a state."""
        return int(self.read_value("ditile_jobs_ended_total", kind=kind, state=state))

    def _note_drawn(self, job: Job, drawn: Drawn, group: str) -> None:
        self._drawn.labels(job.kind).inc(len(drawn.files))
        self._pixels.inc(len(drawn.files) * drawn.size[0] * drawn.size[1] * max(1, drawn.frames))
        for stage in ("text", "denoise", "decode"):
            if stage in drawn.seconds:
                self._seconds.labels(stage).observe(drawn.seconds[stage])
        # Stages and contexts leave out nearly the same steps, of which the most are counted.
        # The steps of a batch are counted once.
        left_out = max((len(context["cached_steps"][-1]) for context in drawn.facts.get("left_out", [])), default=0)
        self._left_out.inc(left_out / drawn.facts.get("batch", 1))
        for rank, report in enumerate(drawn.facts.get("reports", [])):
            self._memory.labels(group, str(rank)).set(report["peak_memory_bytes"])
