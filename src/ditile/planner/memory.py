"""Bytes that a rank needs at its peak: weights, kept keys, what a call has in flight, and the process itself."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ditile.parallel.pipefusion.prefetch import AHEAD as RECEIVED
from ditile.parallel.pipefusion.weight_streaming import AHEAD as BORROWED
from ditile.plan import cost
from ditile.plan.cost import Job, Place
from ditile.plan.schedule import Micro
from ditile.plan.stages import held
from ditile.planner.footprint import Footprint
from ditile.planner.profile import FUSED, Profile
from ditile.planner.subject import Subject

STEPPED = 6
"""Latents that a pipeline and its scheduler hold at once: theirs, predictions of some steps, and the next ones."""


class Bytes(NamedTuple):
    """What a rank needs, by kind.

    Attributes:
        weights, text, vae: parameters, of what it has of the transformer and the text encoders, and of the VAE.
        keys: keys and values that outlive a step.
        activations: all else that a call has in flight while it denoises.
        decode: the same while it decodes, when keys are gone.
        idle: of the process by itself.
    """

    weights: int
    text: int
    vae: int
    keys: int
    activations: int
    decode: int
    idle: int

    @property
    def denoising(self) -> int:
        """At the peak of a denoising step, without VAE and process."""
        return self.weights + self.text + self.keys + self.activations

    @property
    def total(self) -> int:
        """At the peak."""
        return self.weights + self.text + self.vae + self.idle + max(self.keys + self.activations, self.decode)


def needed(subject: Subject, job: Job, profile: Profile, rank: int = 0, words: int = 0) -> Bytes:
    """Of a rank of a call, whose cross attention sees so many words."""
    place, plan, size = job.place(rank), job.plan, job.shape.element_size
    owned = held(job.stages, place.stage, plan.crew)
    weights = job.weights.shared + subject.buffers + subject.parameters(owned, plan.tensor)
    if plan.warmup_mode == "sequence":
        every = range(len(job.weights.blocks))
        weights += (BORROWED + 1) * max(subject.parameters(range(block, block + 1), plan.tensor) for block in every)
    text = {"each": subject.text, "first": subject.text if rank == 0 else 0, "split": -(-subject.text // plan.world)}
    return Bytes(
        weights=weights * size, text=text[plan.text] * size, vae=subject.vae * size, keys=cost.key_bytes(job, rank),
        activations=_activations(subject, job, profile, rank, words), decode=_decode(subject, job, place, rank),
        idle=profile.idle_bytes,
    )  # fmt: skip


def peak(subject: Subject, job: Job, profile: Profile, words: int = 0) -> int:
    """Of the rank that needs most: the first of a stage has the largest share of its tokens."""
    plan, last = job.plan, job.plan.pipefusion - 1
    step = plan.world // (plan.data * plan.cfg * plan.pipefusion)
    heaviest = max(range(1, last), key=lambda stage: subject.parameters(job.stages[stage], 1), default=0)
    return max(needed(subject, job, profile, stage * step, words).total for stage in {0, heaviest, last})


def _activations(subject: Subject, job: Job, profile: Profile, rank: int, words: int) -> int:
    """What is computed, sent and received ahead at the largest micro-step; and what is remembered."""
    plan, place, schedule = job.plan, job.place(rank), job.schedule
    found = subject.footprint(plan.tensor)
    if plan.rounds_otherwise and FUSED in profile.pointwise:  # in every step; others have some in which it is apart
        found = replace(found, moments=found.fused)
    row = job.own(place.data).batch * job.shape.element_size
    steps = (0, max(plan.least_warmup - 1, 0), min(plan.least_warmup + 2, job.shape.steps - 1))
    micros = {micro.patch: micro for micro in (schedule.micro_of(step, 0) for step in steps)}
    computed = max(
        row * _computed(found, job, place, micro, words) + _ahead(job, place, micro) for micro in micros.values()
    )
    _, text = cost.tokens(job, place, Micro(0, None))
    kept = subject.kept(job.stages[place.stage], plan.tensor, job.layout.image, text or words)
    if place.stage > 0:
        kept += job.layout.image * job.shape.channels  # the embedded latents, which nobody reads
    if len(schedule.pieces(Micro(0, None))) > 1:
        kept *= 2  # as rows, and together
    latents = STEPPED * job.own(place.data).latent_bytes
    return int(computed + row * kept) + latents + _exchanging(job, rank)


def _computed(found: Footprint, job: Job, place: Place, micro: Micro, words: int) -> float:
    """Numbers of a row at the peak of a micro-step, with what was sent to the next stage before it."""
    plan, schedule = job.plan, job.schedule
    pieces = schedule.pieces(micro)
    image, text = cost.tokens(job, place, Micro(0, None))
    steps = min(2, micro.step) + (len(pieces) - 1) / len(pieces) if place.stage < plan.pipefusion - 1 else 0
    sent = steps * job.calls(1) * (image + text) * job.shape.channels
    if plan.split_scheme == "sequence":
        sent /= plan.tensor
    if micro.patch is not None:
        image, text = cost.tokens(job, place, micro)
    elif plan.warmup_mode in ("sequence", "separate"):
        crew = plan.crew or plan.pipefusion
        image, text = -(-image // crew), -(-text // crew)
    exchanged = _exchanged(job) / plan.tensor * (image + text)
    most = max(held.at(image, text or words) for held in found.moments)
    attending = max(held.at(image, text or words) for held in found.attending) + exchanged
    return max(most, attending) * len(pieces[0]) / schedule.rows + sent


def _decode(subject: Subject, job: Job, place: Place, rank: int) -> int:
    """Of the pictures of a replica, on the rank that gives them out; or of a rank's rows of them."""
    shape, plan = job.own(place.data), job.plan
    if plan.vae == "whole" and rank % (plan.world // plan.data):
        return 0
    pixels = (shape.height // subject.vae_scale) * (shape.width // subject.vae_scale)
    ranks = 1 if plan.vae == "whole" else plan.world // plan.data
    return int(shape.images * pixels * subject.decoded(shape.frames) * shape.element_size / ranks)


def _exchanged(job: Job) -> float:
    """Numbers of a token that an exchange around attention adds to what is held then."""
    plan, channels = job.plan, job.shape.channels
    if plan.ulysses > 1:  # queries, keys and values as sent, as received, and in order; with a store it is fitted
        return (9 if plan.num_patches == 1 else 5) * channels
    return 6 * channels if plan.ring > 1 else 0  # keys and values that are passed on, the next ones, the sum so far


def _ahead(job: Job, place: Place, micro: Micro) -> int:
    """Bytes of the messages that are received before they are needed, and of the one that is read.

    In the first step none is expected before its call.
    """
    return (RECEIVED + 1) * cost.between(job, place, 0) if place.stage > 0 and micro.step > 0 else 0


def _exchanging(job: Job, rank: int) -> int:
    """Bytes of the keys of all layers that DistriFusion has under way; those of the text are every rank's own."""
    return cost.key_bytes(job, rank, text=False) if job.plan.distrifusion > 1 else 0
