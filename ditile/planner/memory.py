"""Bytes that a rank needs at its peak: weights, kept keys, what a call has in flight, and the process itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ditile import cost
from ditile.blocks.lending import AHEAD as BORROWED
from ditile.blocks.pipefusion import AHEAD as RECEIVED
from ditile.blocks.stages import held
from ditile.cost import Job, Place
from ditile.generation import Micro
from ditile.planner.footprint import Footprint, Held
from ditile.planner.profile import Profile
from ditile.planner.subject import Subject

WHOLE = 5
"""Tensors of a token's width that tensor parallelism does not divide: the residual stream, norms, and around a sum."""
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
    weights = job.weights.shared + subject.buffers + sum(_weights(subject, job, block) for block in owned)
    if plan.warmup_mode == "sequence":
        weights += (BORROWED + 1) * max(_weights(subject, job, block) for block in range(len(job.weights.blocks)))
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


def _weights(subject: Subject, job: Job, block: int) -> int:
    """Parameters of a block that a rank has of it."""
    cut = subject.cut[block] if job.plan.tensor > 1 else 0
    return job.weights.blocks[block] - cut + -(-cut // job.plan.tensor)


def _activations(subject: Subject, job: Job, rank: int, words: int) -> int:
    """What is computed and sent at the largest micro-step; what is remembered; and what is received ahead."""
    plan, place, found, schedule = job.plan, job.place(rank), subject.counted.footprint, job.schedule
    row = job.own(place).batch * job.shape.element_size
    last = {0, max(plan.least_warmup - 1, 0), min(plan.least_warmup + 2, job.shape.steps - 1)}
    micros = {micro.patch: micro for step in sorted(last) for micro in schedule.micros(step)}
    computed = max(_computed(found, job, place, one, words) + _sent(job, place, one) for one in micros.values())
    _, text = cost.tokens(job, place, Micro(0, None))
    kept = sum(found.kept[block].at(job.layout.image, text or words) for block in job.stages[place.stage])
    kept /= plan.tensor
    if place.stage > 0:
        kept += job.layout.image * job.shape.channels  # the embedded latents, which nobody reads
    if len(schedule.pieces(Micro(0, None))) > 1:
        kept *= 2  # as rows, and together
    latents = STEPPED * job.own(place).latent_bytes
    return int(computed + row * kept) + latents + _ahead(job, place) + _exchanging(job, rank)


def _computed(found: Footprint, job: Job, place: Place, micro: Micro, words: int) -> float:
    """Bytes at the peak of a micro-step."""
    plan, channels, schedule = job.plan, job.shape.channels, job.schedule
    image, text = cost.tokens(job, place, micro)
    if micro.patch is None and plan.warmup_mode in ("sequence", "separate"):
        crew = plan.crew or plan.pipefusion
        image, text = -(-image // crew), -(-text // crew)
    exchanged = _exchanged(job) / plan.tensor * (image + text)

    def most(moments: Sequence[Held]) -> float:
        return max(_divided(one, channels, plan.tensor).at(image, text or words) for one in moments)

    numbers = max(most(found.moments), most(found.attending) + exchanged)
    rows = job.own(place).batch * len(schedule.pieces(micro)[0]) / schedule.rows
    return rows * numbers * job.shape.element_size


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
    if plan.ulysses > 1:  # queries, keys and values as sent, as received, and, where there is no store, in order
        return (9 if plan.num_patches == 1 else 6) * channels
    return 6 * channels if plan.ring > 1 else 0  # keys and values that are passed on, the next ones, the sum so far


def _sent(job: Job, place: Place, micro: Micro) -> float:
    """Bytes that were sent to the next stage and are kept: those of two steps, and of the rows computed before."""
    if place.stage == job.plan.pipefusion - 1:
        return 0
    pieces = len(job.schedule.pieces(micro))
    steps = min(2, micro.step) + (pieces - 1) / pieces
    return steps * job.calls(1) * sum(cost.between(job, place, patch) for patch in range(job.plan.num_patches))


def _ahead(job: Job, place: Place) -> int:
    """Bytes of the messages that are received before they are needed, and of the one that is read."""
    return (RECEIVED + 1) * cost.between(job, place, 0) if place.stage > 0 else 0


def _exchanging(job: Job, rank: int) -> int:
    """Bytes of the keys of all layers that DistriFusion has under way."""
    return cost.key_bytes(job, rank) if job.plan.distrifusion > 1 else 0
