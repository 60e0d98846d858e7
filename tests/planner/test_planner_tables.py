"""Plans for families without a `ModelSpec`: their real forward, what their ranks send, and what the command answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ditile.cli.main import main
from ditile.errors import ModelError, PlanError
from ditile.hooks.placeholders import build_meta_model, init_on_meta_device
from ditile.models.known import CONFIGS
from ditile.plan import cost
from ditile.plan.plan import Plan
from ditile.planner.footprint import LiveBytes
from ditile.planner.seconds import RankTokens, merge_work
from ditile.planner.subject import PlanSubject
from ditile.planner.tables import TABLES, find_family_table
from ditile.runner.runner import parallelize
from tests.parallel.sequence.planned import MAKE, denoising, wan_pipeline
from tests.planner.test_planner import count_work_flops
from tests.pool import Pool

ROWS, COLUMNS, TEXT = 5, 7, 9
COVERED = ["wan", "ltx", "qwen", "flux2"]
PLANS = ["ulysses=2", "ring=2"]


def subject_of(transformer: Any) -> PlanSubject:
    """A model of `MAKE` as the planner has it, whose VAE makes 8 pixels of one."""
    table = TABLES[type(transformer)]
    return PlanSubject(
        "tiny", getattr(diffusers, table.spec.pipelines[0]), build_meta_model(transformer), 8, table=table
    )


@pytest.mark.parametrize("name", COVERED)
def test_counted_is_what_a_real_forward_does(name: str) -> None:
    """Operations of two rows at another size than the counted one, attention by products, which torch counts.

    A failure means that a kernel grows with the wrong tokens: the latency of any other size would be wrong."""
    transformer, latents, inputs = MAKE[name](ROWS, COLUMNS, TEXT)
    counted = subject_of(transformer).transformer_work
    call = {"hidden_states": latents, "timestep": torch.ones(2), "return_dict": False, **inputs}
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        transformer(**call)
    rest = (counted.first, counted.last, counted.every, counted.step, counted.once)
    tokens = RankTokens(2, ROWS * COLUMNS, TEXT, ROWS * COLUMNS, TEXT)
    work = merge_work([*counted.blocks, *counted.block_steps, *counted.block_once, *rest])
    assert count_work_flops(work, tokens) == counter.get_total_flops() > 0


@pytest.mark.parametrize("name", COVERED)
def test_what_a_real_forward_holds(name: str) -> None:
    """A failure means that memory is foretold too low, or plans that fit are set aside."""
    transformer, latents, inputs = MAKE[name](20, 20, 30)
    footprint = subject_of(transformer).get_footprint(1)
    row = {key: value if isinstance(value, int) else value[:1] for key, value in inputs.items()}
    with torch.no_grad(), LiveBytes() as live:
        transformer(hidden_states=latents[:1], timestep=torch.ones(1), return_dict=False, **row)
    foretold = 4 * max(held.count_numbers(400, 30) for held in footprint.moments)
    assert foretold == pytest.approx(live.peak, rel=0.1)


def sent(name: str, plans: list[str]) -> list[dict[str, int]]:
    """On a rank: bytes by kind, under each plan."""
    result = []
    for text in plans:
        pipe, call = denoising(name, ROWS, COLUMNS, TEXT)
        if name != "ltx":
            call["inputs"].pop("encoder_hidden_states_mask", None)  # as pipelines pass it where all texts are whole
        runner = parallelize(pipe, Plan.parse(text))
        runner(**call)
        result.append(dict(runner.mesh.traffic.bytes))
        runner.restore()
    return result


@pytest.mark.parametrize("name", COVERED)
def test_foretold_bytes_are_counted_bytes(pool: Pool, name: str) -> None:
    """35 tokens, 9 of text, 3 or 4 heads: nothing divides. A failure means that exposed communication is priced from
    other bytes than travel."""
    transformer, _, _ = MAKE[name](ROWS, COLUMNS, TEXT)
    subject = subject_of(transformer)
    side = 8 * subject.model_spec.latent_per_token(transformer.config)
    call = {"height": ROWS * side, "width": COLUMNS * side, "num_inference_steps": 2, "guidance_scale": 1.0,
            "max_sequence_length": TEXT, "num_images_per_prompt": 2}  # fmt: skip
    shape = subject.make_call_shape(call | ({"num_frames": 1} if TABLES[type(transformer)].is_video else {}))
    for rank, of_plans in enumerate(pool.run(sent, 2, name, PLANS)):
        for text, result in zip(PLANS, of_plans, strict=True):
            job = subject.make_plan_job(Plan.parse(text), shape)
            foretold = cost.count_traffic_bytes(job, rank)
            kind = text.partition("=")[0]
            assert foretold == {kind: result[kind], "prediction": result["prediction"]}, f"{name}, {text}, rank {rank}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Wan of one transformer."""
    pipe, _ = wan_pipeline()
    pipe.transformer_2 = None
    pipe.register_to_config(boundary_ratio=None, transformer_2=(None, None))
    path = tmp_path_factory.mktemp("wan")
    pipe.save_pretrained(path)
    return path


ASKED = ("--height", "64", "--width", "96", "--steps", "4", "--hardware", "l40-pcie", "--devices", "4", "--json", "-")


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_command_plans_a_video(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More frames take longer. A failure means that saved models of this rung cannot be planned for."""
    short, long = (answered(capsys, "--model", str(folder), "--frames", n, *ASKED)["plans"] for n in ("5", "81"))
    plans = [Plan.parse(row["plan"]) for row in long]
    assert {plan.cfg * plan.ulysses * plan.ring for plan in plans} >= {1, 2, 4}
    assert all(plan.world == plan.cfg * plan.token_ranks for plan in plans)
    assert 0 < short[0]["latency_s"] < long[0]["latency_s"]
    assert short[0]["memory_bytes"] < long[0]["memory_bytes"]
    for words, said in (
        (("--frames", "10"), "frames=10 are not a multiple of 4 and one more; try frames=9"),
        (("--price", "pipefusion=200"), "'pipefusion=200' needs 200 devices"),
    ):
        assert main(["plan", "--model", str(folder), *words, *ASKED]) != 0
        assert said in " ".join(capsys.readouterr().err.split())


def test_two_transformers_share_out_tokens_alone(folder: Path) -> None:
    """As the runner has it: Wan 2.2's second one is in the memory, and cfg is refused."""
    alone = PlanSubject.from_configs("wan", folder)
    pipe, _ = wan_pipeline()
    pipe.save_pretrained(both := folder.parent / "both")
    turns = PlanSubject.from_configs("wan", both)
    assert turns.replicated_numbers - alone.replicated_numbers == sum(p.numel() for p in alone.transformer.parameters())
    shape = turns.make_call_shape({"height": 64, "width": 96, "num_frames": 5})
    assert shape.grid.rows == 2 * 64 // 16 and shape.frames == 2
    with pytest.raises(PlanError, match="calls two models in turns"):
        turns.make_plan_job(Plan(cfg=2), shape)
    assert (
        turns.can_run_plan(Plan(ulysses=2)) and not turns.can_run_plan(Plan(cfg=2)) and alone.can_run_plan(Plan(cfg=2))
    )


def test_a_picture_has_no_frames() -> None:
    with pytest.raises(ModelError, match="frames=9: QwenImagePipeline makes pictures; leave it out"):
        PlanSubject.from_configs("qwen-image", CONFIGS / "qwen-image").make_call_shape({"num_frames": 9})


@pytest.mark.parametrize(
    ("kind", "index", "said"),
    [
        (
            "CogVideoXTransformer3DModel",
            {"_class_name": "CogVideoXPipeline"},
            "nothing says what its forward is called",
        ),
        ("WanTransformer3DModel", {"_class_name": "WanImageToVideoPipeline"}, "WanImageToVideoPipeline gives"),
        ("WanTransformer3DModel", {"_class_name": "WanPipeline", "expand_timesteps": True}, "a time for each token"),
    ],
)
def test_others_are_refused(kind: str, index: dict[str, Any], said: str) -> None:
    """A failure means that a model is priced by another call than its pipeline makes."""
    with init_on_meta_device():
        made = getattr(diffusers, kind)(num_layers=1, num_attention_heads=2, attention_head_dim=16)
    with pytest.raises(ModelError, match=said) as caught:
        find_family_table(made, index)
    assert "WanPipeline, LTXPipeline, QwenImagePipeline, Flux2Pipeline" in str(caught.value)
