"""The plans of single calls of a transformer, whose sampler is elsewhere."""

from __future__ import annotations

import dataclasses

from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan

REFUSALS = {
    "data": "divides the images of a pipeline's call, and a call of the transformer has rows; use cfg=N for those",
    "distrifusion": "reads keys of the step before, and a call does not know of it; use gather or ring",
    "references": "computes reference images in some steps alone, and a call does not know its step; leave it out",
    "patches": "are one step apart, and a call is one step; leave it out",
    "wire_dtype": "rounds what ranks send, and calls are exact; leave it out",
    "text": "divides text encoders, which are not loaded; leave it out",
    "vae": "divides the decode, and no VAE is loaded; leave it out",
}
"""Field of a plan -> why it must have its default."""


def choose_call_plan(plan: Plan) -> Plan:
    """Return the plan of single calls, with one patch: in a single step, patches would find no earlier keys.

    Raises:
        PlanError: if a part of the plan approximates, needs more than one call, or is for other parts of a pipeline.
    """
    default = Plan()
    for name, reason in REFUSALS.items():
        value = getattr(plan, name)
        if value != getattr(default, name) and not (name == "patches" and value == 1):
            raise PlanError(f"{name}={value} {reason}")
    if plan.warmup == 0:
        raise PlanError("warmup=0 lets the first step read keys that are not there; leave it out")
    if plan.pipefusion > 1:
        return dataclasses.replace(plan, patches=1)
    return plan
