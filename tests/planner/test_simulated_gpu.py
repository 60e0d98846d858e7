"""What ditile does on GPUs, on GPUs that are simulated: no finding, and no wait of the host that is not listed here.

Real ranks send each other real numbers, over gloo; what a GPU receives is NaN until somebody has waited for it. A
failure of a plan names the line of ditile that a GPU would not forgive. A failure of a planted bug means that the tests
of plans find nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ditile.cache.config import DBCacheConfig, TaylorSeerCalibratorConfig
from ditile.distributed import transport
from ditile.distributed.transport import PeerChannel, PostedReceive
from ditile.model.recording.recorded_steps import LOG
from ditile.parallel.pipefusion.block_offload import HostCopies
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.caching import enable_cache, summary
from ditile.runner.callbacks import StepWatch
from ditile.runner.graph_segments import GraphSegments, prepare_capture_stream
from ditile.runner.runner import Runner, parallelize
from ditile_lab.machine.messages import LoneMessages, replace_torch_distributed
from ditile_lab.machine.recorded_cases import CASES, compare_recorded_calls
from tests.pool import Pool
from tests.recorded_calls import record_on_simulated_gpus
from tests.runner.cases import MAKE, call_of, divided
from tests.simulated_gpu.gpu import AFTER, CALL, REHEARSAL, SETUP, SimulatedGpu, SimulationError, SimulationRecord
from tests.simulated_gpu.messages import SimulatedMessages, simulate_gpu
from tests.simulated_gpu.tensors import PAGE, SimulatedTensor
from tests.zoo import ZOO

CPU = torch.device("cpu")
OUTSIDE = {SETUP, CALL, REHEARSAL, AFTER}
LARGE = {"height": 40, "width": 56, "max_sequence_length": 7}
FIVE = {"num_inference_steps": 5}
CACHE = DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.9)
# A contiguous tensor: of one that is not the CPU's kernels make the mean in another order.
REFERENCE = {"num_inference_steps": 4, "image": torch.linspace(0, 1, 3 * 16 * 20).view(1, 3, 16, 20)}
TWO = {"num_images_per_prompt": 2}


class Row(NamedTuple):
    """What ranks draw.

    Attributes:
        name: of a pipeline of `MAKE` or of the zoo.
        plan, call: the plan, and changes of the call.
        cache: arguments of `enable_cache`.
        waits: what hosts wait for in steps: names in `WAITS`.
    """

    name: str
    plan: str
    call: dict[str, Any] = {}
    cache: dict[str, Any] | None = None
    waits: str = ""

    def make_pipeline(self) -> Any:
        """The pipeline, with its cache."""
        pipe = MAKE[self.name]() if self.name in MAKE else ZOO[self.name].make()
        return pipe if self.cache is None else enable_cache(pipe, **self.cache)

    def draw(self, pipe: Any, device: torch.device = CPU) -> Tensor:
        """What a pipeline or runner makes in the call."""
        made: Any = pipe(**self.make_arguments(device))[0]
        return made if isinstance(made, Tensor) else torch.as_tensor(made)

    def make_arguments(self, device: torch.device) -> dict[str, Any]:
        """The arguments of a call. Embeddings are on the device, as text encoders make them."""
        call = call_of(self.name, **self.call) if self.name in MAKE else ZOO[self.name].call() | self.call
        return call | {name: value.to(device) for name, value in call.items() if isinstance(value, Tensor)}


ROWS: list[Row] = [
    Row("flux", "pipefusion=2 patches=3"),
    Row("flux true cfg", "pipefusion=3 patches=3 warmup=2"),
    Row("sd3.5 medium", "pipefusion=2 patches=2 ulysses=2", LARGE),
    Row("sd3.5 medium", "pipefusion=3 patches=2 warmup=2 warmup_mode=pipelined"),
    Row("pixart sigma", "pipefusion=3 patches=3 warmup=2 warmup_mode=sequence"),
    Row("flux", "ring=2 ulysses=2", LARGE, waits="survey text grid"),
    Row("flux", "pipefusion=2 patches=2 ring=2", LARGE),
    Row("sd3.5 medium", "ulysses=2 async_ulysses=true", LARGE, waits="survey text index"),
    Row("flux", "tensor=2", waits="survey text grid"),
    Row("flux", "pipefusion=2 patches=2 tensor=2 text=first"),
    Row("sd3.5 medium", "ulysses=2 text=split", waits="survey text index"),
    Row("pixart sigma", "cfg=2 distrifusion=2", waits="survey run index"),
    Row("pixart sigma", "data=3 vae=rows", TWO | {"output_type": "pt"}, waits="index"),
    Row("sd3.5 medium", "data=2 cfg=2", TWO, waits="index"),
    Row("flux", "data=2 pipefusion=2 patches=2"),
    Row("sd3.5 medium", "data=2 ring=2", LARGE, waits="survey text index"),
    Row("pixart sigma", "pipefusion=2 patches=2", FIVE, {"cache_config": CACHE}, waits="decision"),
    Row(
        "flux",
        "ulysses=2",
        FIVE,
        {"cache_config": CACHE, "calibrator_config": TaylorSeerCalibratorConfig()},
        waits="survey text grid decision",
    ),
    Row(
        "flux",
        "pipefusion=2 patches=2",
        FIVE,
        {"cache_config": CACHE.reset(steps_computation_mask=[1, 0, 1, 0, 1])},
        waits="decision",
    ),
    Row("ltx-image-to-video", "pipefusion=2 patches=2"),
    Row("flux-kontext", "pipefusion=2 patches=3 references=2", REFERENCE),
    Row("flux-controlnet", "pipefusion=3 patches=3"),
]
"""A replica of data=2 has nothing to do where there is one picture."""


def draw_on_simulated_gpu(row: Row) -> tuple[str, SimulationRecord]:
    """On a rank: how far its picture is from the CPU's under the same plan, and what was seen."""
    plan = Plan.parse(row.plan)
    with divided(row.make_pipeline(), **asdict(plan)) as runner:
        wanted = row.draw(runner)
    gpu = SimulatedGpu(dist.get_rank() % 8)
    with simulate_gpu(gpu, SimulatedMessages(gpu)), torch.no_grad():
        runner = parallelize(row.make_pipeline(), plan, device=gpu.device, keep_weights=True)
        gpu.record.enter_place(CALL)
        picture = row.draw(runner, gpu.device)
        if row.cache is not None:
            assert any(each.skipped for report in summary(runner, logging=False) for each in report.decisions)
        picture = picture.content if isinstance(picture, SimulatedTensor) else picture
    difference = float((picture.double() - wanted.double()).abs().max())
    gpu.record.places = dict(gpu.record.places)
    return "equal" if difference == 0 else f"differs by {difference:.1g}", gpu.record


WAITS = {
    # The first call of a model without patches, whose blocks pass on what they are given.
    "survey": {"item: has_nan < note_output"},
    "text": {"item: has_nan < _survey_call"},
    "grid": {"item: read_token_grid < _read_grid"},
    "run": {"aten::nonzero: find_run < find_nan_tokens", "tolist: find_run < find_nan_tokens"},
    # A scheduler of diffusers looks up where it begins.
    "index": {"aten::nonzero: index_for_timestep < _init_step_index", "item: index_for_timestep < _init_step_index"},
    "decision": {"copy cuda to cpu: sum_over_ranks < decide_skips"},
}
"""What a host waits for: kind, function, and who calls it. All but the last once, when a rank first computes."""
OFTEN = WAITS["decision"]


def list_waits(record: SimulationRecord) -> dict[str, list[tuple[str, int]]]:
    """Waits of the host in steps, by kind and functions: the place and the number of each."""
    waits: dict[str, list[tuple[str, int]]] = {}
    for sync, times in record.syncs.items():
        if sync.place not in OUTSIDE:
            functions = [frame.split(" ")[1] for frame in sync.site.split(" < ")]
            # A watch of operators passes on what others ask for.
            asking = [function for function in functions if function != "__torch_dispatch__"]
            waits.setdefault(f"{sync.kind}: {' < '.join(asking[:2])}", []).append((sync.place, times))
    return waits


def list_late_syncs(record: SimulationRecord) -> Counter[str]:
    """Waits of the host in steps behind the first one, by the line of ditile or diffusers."""
    late = [sync for sync in record.syncs if sync.place not in OUTSIDE and not sync.place.startswith("step 0")]
    return Counter({f"{sync.kind} at {sync.site.split(' < ')[0]}": record.syncs[sync] for sync in late})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}, {row.plan}")
def test_a_gpu_has_nothing_to_complain_of(pool: Pool, row: Row):
    plan, seen = Plan.parse(row.plan), set[str]()
    for equal, record in pool.run(draw_on_simulated_gpu, plan.world, row):
        assert not record.findings
        assert equal == "equal"
        pinned = [place for place, counts in record.places.items() if counts.pinned and place not in OUTSIDE]
        assert not pinned
        waits = list_waits(record)
        for wait, places in waits.items():
            [*steps] = {place for place, _ in places}
            is_once = len(steps) == 1 and max(times for _, times in places) <= 2
            is_early = steps[0].startswith("step 0")
            assert is_once and is_early or wait in OFTEN, (wait, places)
        seen |= waits.keys()
    assert seen == set[str]().union(*(WAITS[name] for name in row.waits.split()))


def receive_without_wait(receive: PostedReceive) -> Tensor:
    return receive.buffer.to(receive.device)


def send_and_drop(channel: Any, message: Tensor, bases: Any = None) -> None:
    message = message.clone().to(transport.choose_transfer_device(message.device, channel._group))
    work = channel._start_transfer(message, sends=True)
    channel._sending.append((work, None))
    channel._sent += 1


def send_by_one_buffer(channel: Any, message: Tensor, bases: Any = None) -> None:
    boxes = vars(channel).setdefault("boxes", {})
    box = boxes.setdefault(message.shape, torch.empty_like(message))
    box.copy_(message)
    SEND(channel, box, bases)


def send_with_cpu_tensor(channel: Any, message: Tensor, bases: Any = None) -> None:
    SEND(channel, message + torch.ones(message.shape), bases)


def send_and_read(channel: Any, message: Tensor, bases: Any = None) -> None:
    float(message.float().mean())
    SEND(channel, message, bases)


SEND = PeerChannel.send_tensor
PLANTED: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "a missing wait": (PostedReceive, "wait_for_message", receive_without_wait, "race"),
    "a send that is not kept": (PeerChannel, "send_tensor", send_and_drop, "freed in flight"),
    "a buffer used again": (PeerChannel, "send_tensor", send_by_one_buffer, "race"),
    "a tensor on the CPU": (PeerChannel, "send_tensor", send_with_cpu_tensor, "several devices"),
    "a number that is read": (PeerChannel, "send_tensor", send_and_read, "item"),
}


def simulate_tiny_rank(rank: int, planted: tuple[type, str, Callable[..., Any], str] | None = None) -> SimulationRecord:
    """What one stage of two alone does, to which the other sends noise."""
    plan, gpu = Plan.parse("pipefusion=2 patches=2"), SimulatedGpu(rank)
    bug = nullcontext() if planted is None else mock.patch.object(*planted[:3])
    alone = replace_torch_distributed(LoneMessages(rank, plan.world, gpu.device))
    with alone, simulate_gpu(gpu, SimulatedMessages(gpu)), torch.no_grad(), bug:
        runner = parallelize(MAKE["flux"](), plan, device=gpu.device, keep_weights=True)
        gpu.record.enter_place(CALL)
        try:
            runner(**call_of("flux", output_type="latent"))
        except (SimulationError, ModelError):
            if planted is None:
                raise
    return gpu.record


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug: str):
    planted = PLANTED[bug]
    records = [simulate_tiny_rank(rank, planted) for rank in range(2)]
    found = {finding.kind for record in records for finding in record.findings}
    waited = {each.partition(" at ")[0] for record in records for each in list_late_syncs(record)}
    assert planted[3] in found | waited


def test_a_stage_alone_shows_what_a_gpu_would_be_given():
    for record in map(simulate_tiny_rank, range(2)):
        assert not record.findings and not list_late_syncs(record)
        micros = [counts for place, counts in record.places.items() if "patch" in place]
        assert len(micros) == 6 and all(counts.kernels and not counts.pinned for counts in micros)
        # Keys and values stay from step to step: what is alive does not grow.
        assert micros[-1].peak_bytes <= max(counts.peak_bytes for counts in micros[:4])


def simulate_memory(offload: str) -> tuple[SimulationRecord, int, list[int]]:
    """What a rank of FLUX does in patches: its record, the bytes of weights on the GPU, and those of each block."""
    gpu = SimulatedGpu(0)
    with simulate_gpu(gpu), torch.no_grad():
        pipe = MAKE["flux"]()
        blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
        runner = parallelize(pipe, Plan(patches=2, offload=offload), device=gpu.device)  # type: ignore[arg-type]
        weights, gpu.record.place = gpu.record.live_bytes, CALL
        runner(**call_of("flux", output_type="latent"))
        sizes = [sum(-(-p.nbytes // PAGE) * PAGE for p in block.parameters()) for block in blocks]
    return gpu.record, weights, sizes


def test_offloaded_blocks_take_two_buffers_and_no_wait():
    """The peak by formula: two buffers in place of all blocks, and nothing else changes. A copy is waited for by the
    stream and never by the host; one that is used too early is a race."""
    (kept, weights, sizes), (away, rest, _) = simulate_memory("none"), simulate_memory("blocks")
    assert weights - rest == sum(sizes)
    assert not kept.findings and not away.findings
    waits = [
        sorted((sync.place, times) for sync, times in record.syncs.items() if "step" in sync.place)
        for record in (kept, away)
    ]
    assert waits[0] == waits[1], "the host waits for a block"
    largest = max(sizes)
    saved = kept.peak_bytes - away.peak_bytes
    # In a buffer tensors begin at multiples of 16 bytes and not of a page.
    assert sum(sizes) - 2 * largest <= saved <= sum(sizes) - 2 * largest + 2 * PAGE * 40


def test_a_block_that_does_not_wait_for_its_weights_is_found(monkeypatch):
    monkeypatch.setattr(HostCopies, "wait_for_copy", lambda self, copied: None)
    record, _, _ = simulate_memory("blocks")
    assert any(finding.kind == "race" for finding in record.findings)


PLAYED = 6
"""The first image in which all steps but the first are played: images before 4 are without recorded steps."""
CHECKED = "has_same_bits"
"""What waits only with `DITILE_CHECK=1`, as in all tests: inputs that are not copied again are compared."""


def note_latents(step: int, latents: Any) -> None:
    """As a preview, which reads the latents of some steps."""


RECORDED_ROWS = [
    Row("flux", "patches=3", FIVE),
    Row("flux true cfg", "pipefusion=2 patches=2", FIVE),
    Row("flux", "pipefusion=3 patches=3", FIVE),
    Row("flux", "pipefusion=2 patches=2", FIVE | {"watch": StepWatch(on_latents=note_latents, latents_at={1, 3})}),
    Row("flux", "ulysses=2", LARGE | FIVE),
    Row("flux", "ring=2", LARGE | FIVE),
    Row("flux", "tensor=2", FIVE),
    Row("flux", "distrifusion=2", FIVE),
    Row("sd3.5 medium", "cfg=2", FIVE),
]


class RecordedImages(NamedTuple):
    """What a rank saw.

    Attributes:
        cases: of `ditile verify --recorded`.
        findings: of all images.
        waits: of the host in steps of an image that is played, after its first one.
        lost_pools: that failed captures left behind.
        warnings: of recorded steps and others, with their arguments.
    """

    cases: list[tuple[str, bool, str]]
    findings: list[Any]
    waits: dict[str, int]
    lost_pools: int
    warnings: list[str]


def generate_recorded(row: Row) -> RecordedImages:
    """On a rank: the images of `ditile verify --recorded`, some without recorded steps and some with them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    plan = Plan.parse(row.plan)
    gpu = SimulatedGpu(rank)
    messages = SimulatedMessages(gpu) if plan.world > 1 else None
    warnings: list[str] = []
    waits: list[dict[str, int]] = []

    runners: list[Runner] = []

    def make_runner(recorded: bool) -> Runner:
        gpu.record.enter_place(SETUP)
        for runner in runners:
            runner.restore()
        runners.append(
            parallelize(row.make_pipeline(), plan, device=gpu.device, keep_weights=True, cuda_graphs=recorded)
        )
        return runners[-1]

    def call(runner: Runner, more: Mapping[str, Any]) -> Tensor:
        syncs = list_late_syncs(gpu.record).items()
        waits.append({site: count for site, count in syncs if not site.endswith(CHECKED)})
        gpu.record.syncs.clear()
        gpu.record.enter_place(CALL)
        latents: Tensor = runner(**row.make_arguments(gpu.device) | {"output_type": "latent"} | more)[0]
        return latents

    with ExitStack() as stack:
        stack.enter_context(record_on_simulated_gpus())
        stack.enter_context(torch.no_grad())
        stack.enter_context(simulate_gpu(gpu, messages))
        stack.enter_context(mock.patch.object(LOG, "warning", lambda text, *args: warnings.append(f"{text} {args}")))
        cases = compare_recorded_calls(make_runner, call)
    return RecordedImages(cases, [*gpu.record.findings], waits[PLAYED + 1], gpu.lost_pools, warnings)


@pytest.mark.parametrize("row", RECORDED_ROWS, ids=lambda row: f"{row.name}, {row.plan}")
def test_recorded_steps_wait_for_nothing(pool: Pool, row: Row) -> None:
    """A failure means a race, or a host that stands still in each step, where recording was to take it out.

    Captures fail on the first rank, where a number is read in the middle of a segment: its images are right, a warning
    says so once, and what was captured after it is played.
    """
    for rank, images in enumerate(pool.run(generate_recorded, Plan.parse(row.plan).world, row)):
        assert [name for name, *_ in images.cases] == [*CASES]
        assert all(is_right for _, is_right, _ in images.cases), images.cases
        assert not images.findings
        assert not images.waits
        assert not images.lost_pools
        warnings = [text for text in images.warnings if "run as code" in text]
        if rank == 0:
            (warning,) = warnings
            assert "a recording failed: CaptureError" in warning
            assert "not permitted when stream is capturing: item" in warning
        else:
            assert not warnings


def trace_recorded(folder: Path) -> tuple[bool, list[str], list[Any]]:
    """On a rank: whether a traced image is as those before it, why its calls ran as code, and findings."""
    gpu = SimulatedGpu(dist.get_rank())
    row = Row("flux", "pipefusion=2 patches=2", FIVE)
    images = []
    with record_on_simulated_gpus(), torch.no_grad(), simulate_gpu(gpu, SimulatedMessages(gpu)):
        runner = parallelize(row.make_pipeline(), Plan.parse(row.plan), device=gpu.device, cuda_graphs=True)
        for runner.trace in (False, False, True):
            gpu.record.enter_place(CALL)
            images.append(row.draw(runner, gpu.device))
        # It waits for points that were recorded in the call: those of a capture tell nothing.
        runner.write_trace(folder / "trace.json")
        are_equal = all(torch.equal(image, images[0]) for image in images)
    assert runner.report is not None and runner.report.recorded is not None
    assert not runner.report.recorded.recorded and not runner.report.recorded.played
    return are_equal, [*runner.report.recorded.as_code], [*gpu.record.findings]


def test_a_traced_call_records_and_plays_nothing(pool: Pool, tmp_path: Path) -> None:
    """A failure means an error of CUDA when the trace of a run with recorded steps is written."""
    assert pool.run(trace_recorded, 2, tmp_path) == [(True, ["runner.trace is on"], [])] * 2


def test_a_device_has_one_stream_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means 32 MB of cuBLAS for each size of images, in the memory of tapes and for good."""
    with simulate_gpu(SimulatedGpu()) as gpu:
        products = []
        monkeypatch.setattr(torch, "mm", lambda *_: products.append(gpu.graph))
        prepare_capture_stream.cache_clear()
        streams = {GraphSegments(gpu.device)._stream for _ in range(3)}
    prepare_capture_stream.cache_clear()
    assert len(streams) == 1
    assert products == [None], "one, and not in a capture"
