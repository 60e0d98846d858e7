"""`ditile verify --simulate cuda` tells what ranks would do on GPUs. A failure: a table that is empty or wrong, or a
traceback for a line that only asks for too much."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ditile.cli import main, simulate
from ditile.cli.options import VerifyOptions
from ditile.errors import StateError
from ditile.plan.plan import Plan
from ditile.planner.simulation.gpu import SETUP, Finding, SimulatedMessage, SimulationError, SimulationRecord

WORDS = ("verify", "--simulate", "cuda", "--steps", "4")
"""Of a bundled model, of which configs alone are read too."""
WIDTH = 80


def read_rows(out: str, title: str) -> dict[str, list[str]]:
    """First cell -> the others, of the first table behind a line."""
    lines = out.partition(title)[2].splitlines()[1:]
    table = [line for line in lines[: next(k for k, line in enumerate(lines) if line.startswith("└"))] if "│" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in table]
    return {row[0]: row[1:] for row in cells}


def test_every_table_of_a_pipeline_of_two_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory of each rank and step, messages, waits with their lines; and the planner's memory beside it."""
    assert main.main([*WORDS, "--model", "shapes-flux", "--plan", "pipefusion=2 patches=2"]) == 0
    out = capsys.readouterr().out
    assert "shapes-flux, 128 x 128, 4 steps, float32; pipefusion=2 patches=2" in out
    memory = read_rows(out, "MB of each rank")
    assert list(memory) == ["0", "1"]
    for weights, keys, peak, _, planned, ratio in memory.values():
        assert float(weights) + float(keys) < float(peak)
        assert float(ratio) == pytest.approx(float(planned) / float(peak), abs=0.01) == pytest.approx(1, abs=0.1)
    steps = read_rows(out, "at the peak of each step")
    assert "step 0" in steps and all(len(cells) == 2 for cells in steps.values())
    for rank, row in memory.items():
        assert max(float(cells[int(rank)]) for cells in steps.values()) == float(row[2])
    sent = re.findall(r"│ (0|1|0-1) +│ (\w+) +│ (NCCL|gloo) │ +(\d+) │ +([\d.]+ \w?B) │", out)
    assert {("0", "isend", "NCCL"), ("1", "irecv", "NCCL")} <= {row[:3] for row in sent}
    waits = read_rows(out, "how often the host waits")
    assert waits["later steps"] == ["0", "0"] and waits["rehearsal"] != ["0", "0"]
    assert re.search(r"rehearsal +\d+  item\n    ditile/\S+\.py:\d+\b.*\n", out)
    assert "no finding" in out
    assert all(len(line) <= WIDTH for line in out.splitlines() if line[:1] in "┏┃┡│└")


def test_replicas_have_a_picture_each(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure: a pipeline's own text beside the embeddings, or one picture for two replicas."""
    assert main.main([*WORDS, "--model", "shapes-pixart", "--plan", "data=2 cfg=2", "--ranks", "3,0"]) == 0
    out = capsys.readouterr().out
    assert list(read_rows(out, "MB of each rank")) == ["0", "3"]
    assert re.search(r"│ 0, 3 +│ all_gather +│ NCCL", out)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--plan", "pipefusion=2 patches=2 warmup=auto"), "warmup=auto decides by numbers"),
        (("--plan", "pipefusion=2 patches=2 warmup_mode=auto"), "warmup_mode=auto cannot be simulated"),
        (("--plan", "pipefusion=2 patches=2 warmup_mode=sequence"), "warmup_mode=sequence cannot be simulated"),
        (("--plan", "pipefusion=2 patches=2 warmup_mode=separate"), "warmup_mode=separate cannot be simulated"),
        (("--plan", "tensor=2"), "tensor=2 cannot be simulated"),
        (("--plan", "auto"), "plan='auto': "),
        (("--plan", "pipefusion=2", "--ranks", "2"), "ranks=2 is none of 'pipefusion=2', which has ranks 0 to 1"),
        (("--plan", "pipefusion=2", "--pipefusion", "2"), "leave one of them out"),
        (("--plan", "pipefusion=2", "--device", "cpu"), "device='cpu': the GPUs are simulated"),
        (("--plan", "pipefusion=2", "--image", "a.png"), "a simulated call starts from no file"),
        (("--plan", "pipefusion=two"), "'two' is not a whole number"),
        (("--height", "66"), "height=66"),
        (("--frames", "5"), "frames=5"),
        (("--model", "nothing-like-it"), "model 'nothing-like-it' is not known"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_simulated_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert main.main([*WORDS, *words]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ditile: ")]
    assert len(err) == 1 and says in err[0]


def _fill_wrong_arguments(proof: VerifyOptions, plan: Plan) -> dict[str, Any]:
    size = {"height": 128, "width": 128, "num_inference_steps": 4, "max_sequence_length": 24}
    return size | {"callback_on_step_end_tensor_inputs": ["nothing"], "timesteps": [2, 1], "sigmas": [1.0, 0.5]}


def test_what_a_pipeline_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure: a traceback for a value that only the pipeline's own code looks at."""
    monkeypatch.setattr(simulate, "_fill_call_arguments", _fill_wrong_arguments)
    assert main.main([*WORDS, "--model", "shapes-pixart"]) == 2
    assert "PixArtSigmaPipeline refuses this call" in capsys.readouterr().err


def test_ranks_are_for_simulations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["verify", "--pipefusion", "2", "--ranks", "1"]) == 2
    assert "add --simulate cuda" in capsys.readouterr().err


def test_findings_and_refusals_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would not forgive is a line with its place, and the command fails."""
    record = SimulationRecord()
    record.findings[Finding("race", "add_ uses what irecv still writes", "ditile/hooks/pieces.py:1")] += 1
    record.place = "step 1 patch 0"
    record.here.peak_bytes = 5000
    record.messages.append(SimulatedMessage(SETUP, "isend", (0, 1), 10, True))
    found = simulate.SimulatedCall(record, 3000, 1000)
    monkeypatch.setattr(simulate, "simulate_rank", lambda *_, **__: found)
    assert main.main([*WORDS, "--plan", "pipefusion=2", "--model", "shapes-flux"]) == 1
    out = capsys.readouterr().out
    assert "finding on rank 0-1: race: add_ uses what irecv still writes\n    ditile/hooks/pieces.py:1" in out
    # A message from before the call is none of it.
    assert read_rows(out, "messages of the call") == {"0-1": ["none", "", "0", "0 B", ""]}

    def fail(*_: Any, **__: Any) -> Any:
        raise SimulationError("aten::add of ['cpu', 'cuda:0']")

    monkeypatch.setattr(simulate, "simulate_rank", fail)
    with pytest.raises(StateError, match="rank 0 on a simulated GPU: aten::add"):
        simulate.simulate_plan(VerifyOptions(simulate="cuda"), Plan(pipefusion=2))
    assert main.main([*WORDS, "--plan", "pipefusion=2"]) == 1
    assert "the plan is not proven: rank 0 on a simulated GPU" in capsys.readouterr().err


def test_a_published_model_without_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """A stage of FLUX.1-dev in bf16: weights are not there, and memory is a GPU's."""
    words = ("--model", "flux.1-dev", "--plan", "pipefusion=8 patches=2", "--height", "512", "--width", "512")
    assert main.main([*WORDS[:-1], "3", *words, "--ranks", "5"]) == 0
    out = capsys.readouterr().out
    assert "flux.1-dev, 512 x 512, 3 steps, bfloat16" in out
    (memory,) = read_rows(out, "GB of each rank").values()
    assert float(memory[0]) > 2 and float(memory[-1]) == pytest.approx(1, abs=0.1)
