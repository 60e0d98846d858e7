"""Plans for families whose calls are recorded: what their pipelines do at any size, without weights."""

from __future__ import annotations

import functools
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ditile.cli.main import main
from ditile.model.hooks.block_calls import BlockCalls
from ditile.model.hooks.placeholders import init_on_meta_device
from ditile.model.known import KnownModel, list_known_models
from ditile.plan import cost
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.plan.shape import Shape
from ditile.planner.footprint import VaeScale, count_decoder_numbers, measure_vae_scale
from ditile.planner.memory import count_host_memory, count_rank_memory
from ditile.planner.recording.sizes import SizesOnly
from ditile.planner.seconds import RankTokens, merge_work
from ditile.planner.subject import PlanSubject, renew_numbers
from ditile.runner.model_files import defaults
from ditile.runner.requests.pipelines import find_output_kind
from ditile.runner.runner import parallelize
from ditile.runner.weights.prequantized import StoredWeights
from ditile_lab.bench.session import LiveBytes
from ditile_lab.study.capture import capture_call
from tests.planner.test_planner import EVEN, count_work_flops
from tests.pool import Pool
from tests.zoo import ZOO
from tests.zoo.encoders import in_large_squares

TINY = ["wan-2.1", "qwen-image", "flux-2", "ltx", "hunyuan-video", "krea-2", "cogvideox-2b", "kandinsky-5", "aura-flow",
        "cogview-4"]  # fmt: skip


@functools.cache
def known_subject(name: str) -> PlanSubject:
    folder = next(model.folder for model in list_known_models() if model.name == name)
    return PlanSubject.from_configs(name, folder)


def video(frames: int, height: int, width: int, *, ratio: int = 4, pixels: int = 16) -> int:
    """Tokens of a video, by hand."""
    return ((frames - 1) // ratio + 1) * (height // pixels) * (width // pixels)


PUBLISHED: list[tuple[str, int, int, int]] = [
    ("wan2.1-t2v-14b", video(81, 720, 1280), 0, 2),
    ("wan2.1-t2v-1.3b", video(81, 480, 832), 0, 2),
    ("wan2.2-t2v-14b", video(81, 720, 1280), 0, 2),
    ("wan2.2-i2v-14b", video(81, 720, 1280), 0, 2),
    ("wan2.2-ti2v-5b", video(121, 704, 1280, pixels=32), 0, 2),
    ("hunyuanvideo", video(129, 720, 1280), 256, 1),
    # 1000 tokens of Qwen2.5-VL, 256 of ByT5, 729 for a picture that is not there
    ("hunyuanvideo-1.5", video(121, 720, 1280), 1000 + 256 + 729, 2),
    # the text is the sound: 121 frames at 24 a second, 25 latents of sound a second
    ("ltx-2", video(121, 512, 768, ratio=8, pixels=32), round(121 / 24 * 25), 4),
    ("ltx-video", video(161, 512, 704, ratio=8, pixels=32), 0, 1),
    ("cogvideox-5b", video(49, 480, 720), 226, 1),
    ("qwen-image", 64 * 64, 512, 2),
    ("qwen-image-2.1", 64 * 64 + 512, 0, 1),
    ("qwen-image-edit", 2 * 64 * 64, 512, 2),
    ("qwen-image-edit-2509", 2 * 64 * 64, 512, 2),
    ("qwen-image-edit-2511", 2 * 64 * 64, 512, 2),
    ("z-image-turbo", 64 * 64 + 512, 0, 1),
    ("flux.2-dev", 64 * 64, 512, 1),
    ("flux.2-klein-9b", 64 * 64, 512, 1),
    ("flux.2-klein-4b", 64 * 64, 512, 1),
    ("krea-2", 64 * 64 + 512, 0, 2),
    ("krea-2-turbo", 64 * 64 + 512, 0, 1),
    ("flux.3-klein", 64 * 64, 512, 1),
    ("flux.3-klein-base", 64 * 64, 512, 2),
    ("ltx-2.5", video(121, 544, 960, ratio=8, pixels=32), round(121 / 24 * 25), 1),
    # one sequence of 512 tokens of text, 37 latent frames (5 for each 17 frames, and 2 for the last 5), and sound of
    # two channels with 40 latents a second
    ("minimax-h3", 512 + 37 * (768 // 32) * (1344 // 32) + 2 * round(124 / 24 * 40), 0, 1),
]
"""Models, and the tokens, tokens of text and transformer calls of a step of their call."""


@pytest.mark.parametrize(("name", "tokens", "text", "calls"), PUBLISHED)
def test_published_models_have_the_tokens_of_their_call(name: str, tokens: int, text: int, calls: int) -> None:
    """At the size that their authors name. The latents have as many numbers as the recorded call gives the model.

    A failure means that a published model is planned for at another size than it runs at."""
    subject, call = known_subject(name), {"prompt": "", **defaults(name)}
    shape = subject.make_call_shape(call, 2)
    assert (shape.grid.num_tokens, shape.text, shape.calls) == (tokens, text, calls)
    assert shape.batch == (2 if name in ("ltx-video", "cogvideox-5b") else 1)
    (recorded, *_) = subject._record(call).calls
    out = subject.parameter_counts.out * tokens
    if name == "minimax-h3":
        # A token of sound has fewer numbers, and text has none.
        assert recorded.out == 37 * 24 * 42 * 96 + 2 * 207 * 32
    else:
        assert recorded.out in (out * recorded.rows, (out - subject.parameter_counts.out * 512) * recorded.rows) or (
            name in ("ltx-2", "ltx-2.5") and recorded.out > out * recorded.rows
        )


def test_every_published_model_is_listed_above() -> None:
    listed = {row[0] for row in PUBLISHED}
    assert listed == {model.name for model in list_known_models() if model.hub_id is not None and not model.cuts_rows}


@pytest.mark.parametrize(
    ("name", "billions"),
    {"wan2.2-ti2v-5b": 5.0, "wan2.1-t2v-1.3b": 1.42, "flux.2-dev": 32.2, "flux.2-klein-9b": 9.08,
     "flux.2-klein-4b": 3.88, "krea-2": 12.8, "z-image-turbo": 6.15, "ltx-2": 18.9, "hunyuanvideo": 12.8,
     "hunyuanvideo-1.5": 8.33, "cogvideox-5b": 5.57, "flux.3-klein": 5.55, "minimax-h3": 33.1, "ltx-2.5": 19.0}.items(),
)  # fmt: skip
def test_published_models_have_their_parameters(name: str, billions: float) -> None:
    """As their names and cards say, to the digits that they give."""
    weights = known_subject(name).parameter_counts
    assert (sum(weights.blocks) + weights.shared) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name of a tiny pipeline -> the pipeline, and the folder that it is saved in."""

    @functools.cache
    def save(name: str) -> tuple[Any, Path]:
        pipe, path = ZOO[name].make(), tmp_path_factory.mktemp("tiny") / name
        pipe.save_pretrained(path)
        return pipe, path

    return save


def describe_tiny_call(name: str) -> dict[str, Any]:
    """The call of a tiny pipeline, as the planner is asked for it."""
    call = ZOO[name].call()
    sizes = {key: value for key, value in call.items() if isinstance(value, int | float | Image.Image | list)}
    lengths = [call[key].shape[1] for key in ("prompt_embeds", "prompt_embeds_qwen") if key in call]
    negative = {"negative_prompt": ""} if any(key.startswith("negative_") for key in call) else {}
    return {"max_sequence_length": lengths[0] if lengths else 12, "prompt": "", **sizes, **negative}


def make_tiny_shape(subject: PlanSubject, name: str) -> Shape:
    return subject.make_call_shape(describe_tiny_call(name))


@pytest.mark.parametrize("name", TINY)
def test_counted_is_what_a_real_forward_does(saved: Any, name: str) -> None:
    """Operations at another size than the counted one, attention by products, which torch counts.

    A failure means that a kernel grows with the wrong tokens: the latency of any other size would be wrong."""
    pipe, path = saved(name)
    subject = PlanSubject.from_configs(name, path)
    counted, shape = subject.transformer_work, make_tiny_shape(subject, name)
    call = capture_call(pipe, pipe.transformer, ZOO[name].call())
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        pipe.transformer(**call)
    rest = (counted.first, counted.last, counted.every, counted.step, counted.once)
    image, text = shape.grid.num_tokens, shape.text or describe_tiny_call(name)["max_sequence_length"]
    tokens = RankTokens(shape.batch, image, text, image, text)
    work = merge_work([*counted.blocks, *counted.block_steps, *counted.block_once, *rest])
    # Of one sequence, what is in front of the text's place counts as long as all of it.
    slack = 0.1 if name in ("krea-2", "hunyuan-video", "aura-flow") else 1e-9
    assert count_work_flops(work, tokens) == pytest.approx(counter.get_total_flops(), rel=slack)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("name", ["wan-2.1", "flux-2", "qwen-image", "ltx"])
def test_what_a_real_forward_holds(saved: Any, name: str) -> None:
    """A failure means that memory is foretold too low, or plans that fit are set aside."""
    pipe, path = saved(name)
    subject = PlanSubject.from_configs(name, path)
    side = dict.fromkeys(("height", "width"), 20 * subject.token_side)
    footprint, shape = subject.transformer_work.footprint, subject.make_call_shape(describe_tiny_call(name) | side)
    call = capture_call(pipe, pipe.transformer, ZOO[name].call() | side)
    with torch.no_grad(), LiveBytes() as live:
        pipe.transformer(**call)
    text = shape.text or describe_tiny_call(name)["max_sequence_length"]
    foretold = 4 * shape.batch * max(held.count_numbers(shape.grid.num_tokens, text) for held in footprint.moments)
    assert foretold == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize("name", ["wan-2.1", "flux-2", "ltx", "kandinsky-5"])
def test_patches_are_cut_where_the_engine_cuts_them(saved: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every frame of a video whose latents have them. Else plans are priced for other patches."""
    grids, survey_call = [], BlockCalls._survey_call

    def survey_and_note(self: BlockCalls, *args: Any, **kwargs: Any) -> Any:
        form = survey_call(self, *args, **kwargs)
        grids.append(form.grid)
        return form

    monkeypatch.setattr(BlockCalls, "_survey_call", survey_and_note)
    pipe, path = saved(name)
    runner = parallelize(pipe, Plan(pipefusion=1, patches=2, warmup=1), keep_weights=True)
    runner(**ZOO[name].call())
    runner.restore()
    assert set(grids) == {make_tiny_shape(PlanSubject.from_configs(name, path), name).grid}


STEPS = 5
SIZES = {"flux-kontext": {"height": 24, "width": 32, "max_area": 24 * 32}}
SENT = {
    "wan-2.1": ["ulysses=2", "ring=2", "pipefusion=2 patches=2", "cfg=2", "tensor=2"],
    "qwen-image": ["ulysses=2", "ring=2"],
    "flux-2": ["ulysses=2", "ring=2", "pipefusion=2 patches=2", "distrifusion=2", "tensor=2"],
    "flux-kontext": [
        "pipefusion=2 references=0", "pipefusion=2 references=1 patches=5", "pipefusion=2 references=2 patches=3",
        "distrifusion=2 references=0", "ulysses=2 references=2 patches=2", "ring=2 references=0 patches=2",
        "pipefusion=2 patches=4", "pipefusion=2 references=0 patches=3 warmup=2 warmup_mode=sequence",
    ],
    "qwen-image-edit": ["pipefusion=2 references=0", "cfg=2 references=0 patches=2", "distrifusion=2 references=2"],
    "flux-2-klein-edit": ["pipefusion=2 references=0", "ulysses=2 references=0 patches=3"],
}  # fmt: skip


def send_tiny_call(name: str, plans: list[str]) -> list[tuple[dict[str, int], int, list[int], int]]:
    """On a rank: bytes by kind, tokens of references, the steps that computed them, and bytes of keys."""
    result = []
    for text in plans:
        runner = parallelize(ZOO[name].make(), Plan.parse(text))
        call = ZOO[name].call() | SIZES.get(name, {}) | {"num_inference_steps": STEPS}
        # Branches of one length, as a planner that knows no text takes them to be.
        same = {key: call[key.removeprefix("negative_")] for key in call if key.startswith("negative_prompt_embeds")}
        runner(**call | same)
        report: Any = runner.report
        sent = dict(runner.mesh.traffic.bytes)
        result.append((sent, report.reference_tokens, report.reference_steps, report.key_bytes))
    return result


@pytest.mark.parametrize("name", SENT)
def test_foretold_bytes_and_tokens_are_counted(pool: Pool, saved: Any, name: str) -> None:
    """Exactly, of every rank. A failure means that exposed communication is priced from other bytes than travel."""
    inputs = [key for key in ("image",) if key in ZOO[name].call()]
    subject = PlanSubject.from_configs(name, saved(name)[1], inputs)
    if name == "qwen-image-edit":  # its autoencoder is none that a config describes
        assert subject.recorder is not None
        with init_on_meta_device():
            in_large_squares(subject.recorder.pipe.vae)
    call = describe_tiny_call(name) | SIZES.get(name, {}) | {"num_inference_steps": STEPS}
    shape = subject.make_call_shape(call)
    for rank, of_plans in enumerate(pool.run(send_tiny_call, 2, name, SENT[name])):
        for text, (sent, tokens, steps, keys) in zip(SENT[name], of_plans, strict=True):
            job = subject.make_plan_job(Plan.parse(text), shape)
            foretold = cost.count_traffic_bytes(job, rank)
            counted = {kind: sent[kind] for kind in foretold}
            if "tensor" in foretold:
                # The keys of cross attention are normed too; their text is not a part of the plan.
                assert foretold.pop("tensor") == pytest.approx(counted.pop("tensor"), rel=0.005)
            assert foretold == counted, f"{name}, {text}, rank {rank}: {sent}"
            if job.plan.cfg == 1:  # in step 0 each half makes the calls of both
                assert keys == job.plan_rank(rank).count_kept_key_bytes(), text
            if job.plan.references is not None:
                assert tokens == job.image_layout.count_reference_tokens() == shape.references
                assert steps == [step for step in range(STEPS) if job.step_schedule.computes_references(step)]


ASKED = ("--height", "96", "--width", "128", "--steps", "4", "--hardware", "l40-pcie", "--devices", "4", "--json", "-")


def test_the_command_plans_a_video(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """More frames take longer. A failure means that saved models of this rung cannot be planned for."""
    _, folder = saved("wan-2.1")
    answers = []
    for frames in ("5", "81"):
        assert main(["plan", "--model", str(folder), "--frames", frames, *ASKED]) == 0
        answers.append(json.loads(capsys.readouterr().out)["plans"])
    short, long = answers
    assert 0 < short[0]["latency_s"] < long[0]["latency_s"]
    assert short[0]["memory_bytes"] < long[0]["memory_bytes"]
    for plan in long:
        assert len(plan["memory_by_rank"]) == Plan.parse(plan["plan"]).world
        assert max(rank["peak"] for rank in plan["memory_by_rank"]) == plan["memory_bytes"]
    for words, said in (
        (("--frames", "10"), "frames=10 are not a multiple of 4 and one more; try frames=13"),
        (("--price", "pipefusion=200"), "'pipefusion=200' needs 200 devices"),
        (("--width", "100"), "width=100 is not a multiple of 16"),
    ):
        assert main(["plan", "--model", str(folder), *ASKED, *words]) == 2
        shown = capsys.readouterr()
        assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_two_transformers_are_there_twice(saved: Any) -> None:
    """Wan 2.2 holds cfg and stages; a stage has its blocks of both transformers.

    A failure means that memory is foretold for one of them."""
    both = PlanSubject.from_configs("both", saved("wan-2.2")[1])
    alone = PlanSubject.from_configs("alone", saved("wan-2.1")[1])
    shape = make_tiny_shape(both, "wan-2.2")
    for text in ("cfg=2", "pipefusion=2 patches=2", "ulysses=2"):
        plan = Plan.parse(text)
        assert both.can_run_plan(plan)
        twice, once = (count_rank_memory(each, each.make_plan_job(plan, shape), EVEN) for each in (both, alone))
        assert (twice.weights, twice.keys) == (2 * once.weights, 2 * once.keys) and once.weights > 0


@pytest.mark.parametrize("offload", ["", " offload=blocks"])
def test_a_file_has_the_first_of_two_transformers(saved: Any, offload: str) -> None:
    """A failure means that the weights of the other one, which are not quantized, are foretold as if they were."""
    stored = {"transformer": StoredWeights(quantized=1000, plain=0, quantized_bytes=500)}
    both = PlanSubject.from_configs("both", saved("wan-2.2")[1])
    alone = PlanSubject.from_configs("alone", saved("wan-2.1")[1])
    shape = make_tiny_shape(both, "wan-2.2")
    plan = Plan.parse("pipefusion=2 patches=2" + offload)
    results = []
    for subject in (replace(both, stored=stored), replace(alone, stored=stored), alone):
        job = subject.make_plan_job(plan, shape)
        # The buffers of offloaded blocks have room for the largest block of either.
        weights = 0 if offload else count_rank_memory(subject, job, EVEN).weights
        results.append((weights, count_host_memory(subject, job)))
    (weights, host), (first, first_host), (second, second_host) = results
    assert first <= second and weights == first + second
    assert (host.kept > 0) is bool(offload) and host.kept == first_host.kept + second_host.kept
    assert first_host.loading < second_host.loading <= host.loading


def test_known_numbers_decide_when_a_call_is_counted() -> None:
    """A failure means that whatever was in memory decides, so that prices differ from run to run."""
    known = torch.full((2, 3), 7.0)
    with SizesOnly() as sizes:
        unknown = renew_numbers(sizes, sizes.make_unknown(2, 3))
        renewed = renew_numbers(sizes, known)
    assert sizes.is_unknown(unknown) and not sizes.is_unknown(renewed)
    assert torch.equal(renewed, known) and renewed is not known


H3_VAE = {
    "block_out_channels": (8,) * 6, "layers_per_block": 1, "norm_num_groups": 2, "decoder_num_layers": 1,
    "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 32,
}  # fmt: skip


def test_frames_of_a_vae_of_chunks() -> None:
    """17 frames are 5 latent frames, and the last 5 are 2, for any sizes of its layers; of other VAEs each latent frame
    has as many.

    A failure means that a video is refused that the model makes, or priced with other tokens."""
    scale = measure_vae_scale(diffusers.AutoencoderKLMiniMaxH3, H3_VAE)
    assert scale == VaeScale(16, 17, 5, "latent_channels", 5, 2) and scale.counted_frames == (7, 12)
    assert [scale.count_latent_frames(frames) for frames in (22, 39, 124)] == [7, 12, 37]
    for frames, near in ((121, 124), (110, 124), (4, 5)):
        with pytest.raises(ModelError, match=f"frames={frames} are not a multiple of 17 and 5 more; try frames={near}"):
            scale.count_latent_frames(frames)
    assert VaeScale(8, 4).count_latent_frames(81) == 21 and VaeScale(8, 4).counted_frames == (3, 4)


@pytest.mark.parametrize("known", list_known_models(), ids=lambda known: known.name)
def test_the_table_is_what_the_configs_say(known: KnownModel) -> None:
    """What is said of models before torch is imported. A failure means that something is refused that works."""
    subject = PlanSubject.from_configs(known.name, known.folder)
    call = subject.fill_arguments({})
    assert known.is_video == (known.hub_id is None and find_output_kind(subject.pipeline) == "video")
    assert known.transformer == type(subject.transformer).__name__
    assert known.blocks == len(subject.block_hooks.chain)
    assert known.heads == subject.attention_heads[0]
    assert known.token_side == subject.token_side
    assert (known.height, known.width) == (call["height"], call["width"])
    if known.hub_id is not None and known.cuts_rows:
        # Else a peak of memory is not that of the model's own VAE.
        assert subject.decoder is not None
        assert subject.decodes == subject.count_decode_numbers()
        assert subject.decodes == count_decoder_numbers(subject.coder, subject.decoder)
    assert known.cuts_rows == bool(subject.block_hooks.anatomy.grid)
    assert known.bins_sizes == ("use_resolution_binning" in inspect.signature(subject.pipeline.__call__).parameters)
