"""Bytes that a rank needs at its peak: weights, kept keys, what a call has in flight, and the process itself."""

from __future__ import annotations

from typing import NamedTuple

from ditile import cost
from ditile.blocks.stages import held
from ditile.cost import Job, Place
from ditile.generation import Micro
from ditile.planner.footprint import Held
from ditile.planner.profile import Profile
from ditile.planner.subject import Subject

WHOLE = 3
"""Tensors of a token's width that tensor parallelism does not divide: the residual stream, its norm, what is added."""
STEPPED = 6
"""Latents that a pipeline and its scheduler hold at once: theirs, the predictions of some steps, and the next ones."""


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
    owned = held(job.stages, place.stage, plan.crew or (plan.pipefusion if plan.warmup_mode == "sequence" else 0))
    blocks = sum(job.weights.blocks[block] for block in owned)
    weights = job.weights.shared + -(-blocks // plan.tensor)
    text = {"each": subject.text, "first": subject.text if rank == 0 else 0, "split": -(-subject.text // plan.world)}
    return Bytes(
        weights=weights * size, text=text[plan.text] * size, vae=subject.vae * size, keys=cost.key_bytes(job, rank),
        activations=_activations(subject, job, rank, words), decode=_decode(subject, job, place, rank),
        idle=profile.idle_bytes,
    )  # fmt: skip


def peak(subject: Subject, job: Job, profile: Profile, words: int = 0) -> int:
    """Of the rank that needs most: the first of a stage has the largest share of its tokens."""
    plan = job.plan
    step = plan.world // (plan.data * plan.cfg * plan.pipefusion)
    return max(needed(subject, job, profile, stage * step, words).total for stage in range(plan.pipefusion))


def _activations(subject: Subject, job: Job, rank: int, words: int) -> int:
    """Of the largest micro-step, a synchronous one with all patches; what is remembered; and what is under way."""
    plan, place = job.plan, job.place(rank)
    image, text = cost.tokens(job, place, Micro(0, None))
    row = job.own(place).batch * job.shape.element_size
    found, channels = subject.counted.footprint, job.shape.channels
    text = text or words

    def most(moments: tuple[Held, ...], more: float = 0.0) -> float:
        return max(_divided(one, channels, plan.tensor).at(image, text) for one in moments) + more * (image + text)

    computed = max(most(found.moments), most(found.attending, _exchanged(job) / plan.tensor))
    kept = sum(found.kept[block].at(image, text) for block in job.stages[place.stage]) / plan.tensor
    latents = STEPPED * job.own(place).latent_bytes
    return int(row * (computed + kept)) + latents + _under_way(job, place, rank)


def _decode(subject: Subject, job: Job, place: Place, rank: int) -> int:
    """Of the pictures of a replica, on the rank that gives them out; or of a rank's rows of them."""
    shape, plan = job.own(place), job.plan
    if plan.vae == "whole" and rank % (plan.world // plan.data):
        return 0
    pixels = (shape.height // subject.vae_scale) * (shape.width // subject.vae_scale)
    ranks = 1 if plan.vae == "whole" else plan.world // plan.data
    return int(shape.images * pixels * subject.decoded * shape.element_size / ranks)


def _divided(held: Held, channels: int, tensor: int) -> Held:
    """What a rank holds of it under tensor parallelism."""
    if tensor == 1:
        return held
    return Held(*(min(x, WHOLE * channels) + max(0.0, x - WHOLE * channels) / tensor for x in held))


def _exchanged(job: Job) -> float:
    """Numbers of a token that an exchange around attention adds to what is held then."""
    plan, channels = job.plan, job.shape.channels
    ulysses = 6 * channels if plan.ulysses > 1 else 0  # queries, keys and values as sent, and as received
    ring = 4 * channels if plan.ring > 1 else 0  # keys and values that are passed on, and the next ones
    return ulysses + ring


def _under_way(job: Job, place: Place, rank: int) -> int:
    """Bytes of messages that are kept until they have arrived."""
    if job.plan.distrifusion > 1:
        return cost.key_bytes(job, rank)
    if place.stage == job.plan.pipefusion - 1:
        return 0
    patches = range(job.plan.num_patches)
    return 2 * job.calls(1) * sum(cost.between(job, place, patch) for patch in patches)  # of two steps
