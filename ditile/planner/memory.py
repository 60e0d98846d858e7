"""Bytes that a rank needs at its peak: weights, kept keys, what a call has in flight, and the process itself."""

from __future__ import annotations

from typing import NamedTuple

from ditile import cost
from ditile.blocks.stages import held
from ditile.cost import Job, Place
from ditile.generation import Micro
from ditile.planner.kernels import Kernel
from ditile.planner.profile import Profile
from ditile.planner.subject import Subject

IN_FLIGHT = 3
"""Copies of the largest intermediate that are alive at once: what is read, written, and waits to be added."""


class Bytes(NamedTuple):
    """What a rank needs, by kind."""

    weights: int
    text: int
    vae: int
    keys: int
    activations: int
    idle: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def needed(subject: Subject, job: Job, profile: Profile, rank: int = 0) -> Bytes:
    """Of a rank of a call."""
    place, plan, size = job.place(rank), job.plan, job.shape.element_size
    owned = held(job.stages, place.stage, plan.crew or (plan.pipefusion if plan.warmup_mode == "sequence" else 0))
    blocks = sum(job.weights.blocks[block] for block in owned)
    weights = job.weights.shared + -(-blocks // plan.tensor)
    text = {"each": subject.text, "first": subject.text if rank == 0 else 0, "split": -(-subject.text // plan.world)}
    return Bytes(
        weights=weights * size, text=text[plan.text] * size, vae=subject.vae * size, keys=cost.key_bytes(job, rank),
        activations=_activations(subject, job, place), idle=profile.idle_bytes,
    )  # fmt: skip


def peak(subject: Subject, job: Job, profile: Profile) -> int:
    """Of the rank that needs most: the first of a stage has the largest share of its tokens."""
    plan = job.plan
    step = plan.world // (plan.data * plan.cfg * plan.pipefusion)
    return max(needed(subject, job, profile, stage * step).total for stage in range(plan.pipefusion))


def _activations(subject: Subject, job: Job, place: Place) -> int:
    """Of the widest kernel of the largest micro-step: a synchronous one has all patches."""
    image, text = cost.tokens(job, place, Micro(0, None))
    tokens = {"image": image, "text": text, "both": image + text, "once": 1}
    blocks = {id(work): work for work in subject.counted.blocks}.values()
    widest = max(_numbers(kernel) * tokens[kernel.stream] for work in blocks for kernel in work)
    return int(IN_FLIGHT * widest * job.own(place).batch * job.shape.element_size / job.plan.tensor)


def _numbers(kernel: Kernel) -> float:
    """Numbers of a token that a kernel writes."""
    if kernel.kind == "matmul":
        return float(kernel.size[1])
    return kernel.size[0] if kernel.kind == "attention" else kernel.size[0] / 2
