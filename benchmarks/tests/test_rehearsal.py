"""What `python -m benchmarks.rehearsal` counts as the rehearsal of a call."""

from __future__ import annotations

from benchmarks.rehearsal import make_rehearsal_table, measure_rehearsals
from tests.runner.cases import MAKE, call_of


def test_a_rehearsal_is_a_call_for_each_patch_and_a_survey() -> None:
    """By a clock that tells how often the model's head was called. A failure means that something else is measured."""
    pipe, heads = MAKE["flux"](), list[None]()
    pipe.transformer.proj_out.register_forward_hook(lambda *_: heads.append(None))
    call = {name: value for name, value in call_of("flux").items() if name not in ("num_inference_steps", "generator")}
    found = measure_rehearsals(pipe, call, 3, 2, lambda: float(len(heads)))
    assert found == {"step_s": 1.0, "rehearsed": 4.0, "recognised": 0.0}
    assert make_rehearsal_table(found, 3).row_count == 1
