"""Questions to `ditile plan`: hosts, bounds beside a given plan, and what is done where memory is short."""

from __future__ import annotations

import json

import pytest

from ditile.answer import answer
from ditile.cli import main
from ditile.options import Ask
from ditile.plan import Plan
from ditile.planner import hardware
from ditile.planner.ops import Left, Ops
from ditile.planner.search import Wanted, pricer_of, search
from ditile.planner.subject import CONFIGS, Subject

FLUX = ("--model", "flux.1-dev", "--hardware", "l40-pcie")


@pytest.mark.parametrize(
    ("model", "devices", "hosts"), [("flux.1-dev", 8, 4), ("flux.1-dev", 16, 16), ("pixart-sigma", 32, 4)]
)
def test_hosts_of_few_devices_have_plans(model: str, devices: int, hosts: int) -> None:
    """A failure means that some product of degrees over hosts has no price."""
    asked = Ask(model=model, hardware="l40-pcie", devices=devices, hosts=hosts, interlink="10Gbit")
    assert answer(asked).found.prices


@pytest.mark.parametrize("text", ["ring=2 tensor=4", "distrifusion=2 tensor=4", "ulysses=2 tensor=4"])
def test_the_prediction_is_gathered_over_the_link_that_tokens_cross(text: str) -> None:
    """Ranks with other tokens are on the other host. A failure means that a gather between hosts costs nothing."""
    one, profile = Subject.of("flux.1-dev", CONFIGS / "flux.1-dev"), hardware.profile("l40-pcie", "1Gbit")
    shape = one.shape({"height": 512, "width": 512, "num_inference_steps": 4, "prompt": ""}, 2)
    pricer, job = pricer_of(one, {}, profile, 4), one.job(Plan.parse(text), shape)
    assert pricer.price(job).exposed_s > pricer_of(one, {}, profile).price(job).exposed_s
    assert Ops(pricer, job, Left()).link(text.split("=")[0]).bandwidth < profile.link.bandwidth / 10
    assert Ops(pricer, job, Left()).link("pipefusion") == profile.link, "no axis, no other host"
