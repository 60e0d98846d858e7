"""(pipeline, plan, mesh) -> everything seated in the pipeline, in order. Nothing else knows two strategies at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ditile.cache.agreement import Groups, LoopClock, StageAgreement
from ditile.cache.cached import Cached, cached
from ditile.distributed.mesh import Mesh
from ditile.distributed.trace import Trace
from ditile.errors import ModelError, StateError
from ditile.hooks.block_hooks import Core, OneSeat, Seat, Seats
from ditile.hooks.feed_forward import fuse_gelu
from ditile.hooks.fused import project_at_once
from ditile.hooks.generation import Generation
from ditile.hooks.kv_store import AgeChecks
from ditile.hooks.opaque import uncompiled
from ditile.hooks.protocols import Exchange, Kernel, Keys, WholeStreams
from ditile.hooks.quantized import quantized
from ditile.models import registry
from ditile.parallel.attention import dispatch, intercept
from ditile.parallel.attention.core import AttentionCore, FreshKeys, NoExchange, OwnMasks, StaleKeys, alone
from ditile.parallel.attention.kernel import NATIVE, Dispatched, chosen
from ditile.parallel.batch.denoise import SharedBatch
from ditile.parallel.batch.split import images_of
from ditile.parallel.pipefusion.block_costs import divide
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.parallel.pipefusion.loop import Hooks, Loop
from ditile.parallel.pipefusion.shared_warmup import Crew, CrewKeys
from ditile.parallel.pipefusion.weight_streaming import Lender
from ditile.parallel.sequence.cp_hooks import PLANNED, PlannedSeats
from ditile.parallel.sequence.cp_plan import Splits
from ditile.parallel.sequence.distrifusion import DistriKeys
from ditile.parallel.sequence.masks import GatheredMasks
from ditile.parallel.sequence.planned import MasksOfCall, PlannedAttention
from ditile.parallel.sequence.ring import RingGather, RingKeys
from ditile.parallel.sequence.ulysses import Overlapped, Ulysses
from ditile.parallel.tensor.cuts import Cuts
from ditile.parallel.tensor.tensor import Sharded, shard, table_of
from ditile.parallel.text.encoders import After, Encoders
from ditile.parallel.vae.vae import ParallelVAE
from ditile.plan.layout import Split
from ditile.plan.plan import Facts, Plan
from ditile.plan.shape import Weights
from ditile.plan.spec import ModelSpec
from ditile.plan.stages import held

MODELS = ("transformer", "transformer_2", "unet")
"""What a pipeline may call in its loop."""


@dataclass(frozen=True, slots=True)
class Composition:
    """What a plan makes of a pipeline on this rank.

    Attributes:
        model: the transformer or U-Net that the pipeline calls.
        stages: the blocks of every stage, of which this rank owns one.
        weights: the parameters of the undivided transformer.
        sharded: this rank's share of the weights of its blocks.
        parallel_vae: decodes and encodes rows on every rank of an image; None where each does all.
        kernel: attends; None is what each processor would use.
        splits: what is split in the call at hand, where a table says so.
        checks: asserts the ages of keys, if asked to.
        compile: whether the blocks are compiled, where the user has not.
        stale_keys: what keeps the keys of PipeFusion's patches.
    """

    pipe: Any
    plan: Plan
    mesh: Mesh
    device: torch.device
    model: torch.nn.Module
    spec: ModelSpec
    seats: Seats
    stages: list[range]
    weights: Weights
    pipefusion: PipeFusion
    sharded: Sharded
    parallel_vae: ParallelVAE | None
    trace: Trace
    encoders: Encoders
    kernel: Dispatched | None = None
    splits: Splits | None = None
    checks: AgeChecks | None = None
    compile: bool = False
    stale_keys: type[StaleKeys] = StaleKeys

    @property
    def held(self) -> range:
        """The blocks whose weights this rank holds."""
        return held(self.stages, self.mesh.stage, self.plan.crew)

    def refuse(self) -> str | None:
        """Why the model cannot run as it is now on this rank, or None."""
        crew = self.pipefusion.crew
        lender = None if crew is None else crew.lender
        return self.seats.refuse(self.held) or (None if lender is None else lender.refuse())

    @property
    def calls_whole_model(self) -> bool:
        """Whether nothing inside the model is touched."""
        return isinstance(self.seats, OneSeat)

    @property
    def caches(self) -> list[Cached]:
        """The caches of the pipeline's models, which may come and go between calls."""
        registry = (getattr(self.pipe, name, None) for name in MODELS)
        return [found for model in registry if model is not None and (found := cached(uncompiled(model))) is not None]

    @contextmanager
    def installed(
        self, hooks: Hooks, call: Mapping[str, Any], decisions: Groups | None, *, first: bool
    ) -> Iterator[Loop]:
        """Everything in its place for the length of one call. The scheduler is the one that the pipeline has now.

        Args:
            hooks: what happens at the ends of steps.
            call: the pipeline's arguments.
            decisions: who decides together on what caches leave out; None without caches.
            first: whether rank 0 alone needs the pictures.
        """
        dim, never = self.spec.latent_dim, self.spec.batch
        batch = SharedBatch(self.mesh, self.model, images=images_of(call), latent_dim=dim, never=never)
        loop = Loop(
            self.pipe.scheduler, self.pipefusion, self.mesh, self.plan, split_of(self.plan), batch,
            latent_dim=dim, trace=self.trace,
        )  # fmt: skip
        sequence, traffic, turn = self.mesh.sequence, self.mesh.traffic, torch.tensor(0)

        def core(layer: str, backend: Any, *, joint: bool, through_dispatch: bool) -> Core:
            kernel = self.kernel or (Dispatched(backend) if through_dispatch else NATIVE)
            keys = self._keys(loop.current, layer, kernel)
            exchange, splits = self._exchange(loop.current), self.splits
            if splits is not None:
                source = MasksOfCall(splits, cached=bool(self.caches))
                gathered = GatheredMasks(sequence, self.mesh["ulysses"], traffic, source)
                over = AttentionCore(loop.current, exchange, keys, gathered, joint=joint, turn=turn).over
                return PlannedAttention(splits, over, kernel, gathered, source)
            masks = OwnMasks() if sequence.size == 1 else GatheredMasks(sequence, self.mesh["ulysses"], traffic)
            return AttentionCore(loop.current, exchange, keys, masks, joint=joint, turn=turn)

        def handed_over(backend: Any) -> Any:
            return dispatch.backend(backend if self.kernel is None else self.kernel.backend)

        for cache in self.caches:
            cache.refit()  # before the seats, which lie around the slots
        with ExitStack() as stack:
            stack.enter_context(self.encoders.installed(self.model))
            if self.parallel_vae is not None:
                stack.enter_context(self.parallel_vae.installed())
            fuse = functools.partial(self._fuse, loop.current)
            seated = self.seats.installed(
                self.pipefusion, self.held, loop.current, core, handed_over, pipe=self.pipe,
                compile_=torch.compile if self.compile else None, fuse=fuse,
            )  # fmt: skip
            stack.enter_context(seated)
            batch.install(stack, self.pipe, loop.current, first=first)  # around all that sees the model's rows
            if decisions is not None:
                stack.enter_context(self._cached(loop, batch, decisions))
            loop.install(stack, self.pipe, hooks)  # outermost: an error in the loop finds the seats still there
            yield loop

    @contextmanager
    def _cached(self, loop: Loop, batch: SharedBatch, decisions: Groups) -> Iterator[None]:
        """Lends the caches, whose slots lie inside the seats, the loop's clock and this rank's part in decisions."""
        names = {seat.block: seat.name for seat in self.seats.chain}
        chain = self.seats.chain
        stages = {chain[k].block: stage for stage, blocks in enumerate(self.stages) for k in blocks}
        agreement = StageAgreement(decisions, self.mesh, loop.current, lambda: batch.by_calls, names, stages)
        stale = self.plan.attends_to_stale_keys
        with ExitStack() as stack:
            for cache in self.caches:
                images = (lambda: None) if stale else (lambda: loop.images)
                clock = LoopClock(loop.current, lambda: loop.steps, self.plan, images, cache.begin, cache.end)
                loop.when_over.append(clock.over)
                stack.enter_context(cache.lent(clock, agreement))
            clean = False
            try:
                yield
                clean = True
            finally:
                agreement.close(clean=clean)

    def _fuse(self, current: Callable[[], Generation], stack: ExitStack, seat: Seat) -> None:
        """Small products are slow, and those of a patch are small."""
        if not self.plan.async_ulysses:  # it has q, k and v travel while the next is made
            project_at_once(stack, seat.attentions(), self.device)
        if self.plan.rounds_otherwise:
            fuse_gelu(stack, seat.block, self.device, lambda: True)
        elif self.plan.attends_to_stale_keys:
            fuse_gelu(stack, seat.block, self.device, lambda: current().is_stale(current().micro.step))

    def _exchange(self, current: Callable[[], Generation]) -> Exchange:
        axis, traffic = self.mesh["ulysses"], self.mesh.traffic
        if axis.size == 1:
            return NoExchange()
        return Overlapped(axis, traffic, self.trace, current) if self.plan.async_ulysses else Ulysses(axis, traffic)

    def _keys(self, current: Callable[[], Generation], layer: str, kernel: Kernel) -> Keys:
        """Whose keys a layer attends to, and how old they may be."""
        ring, distri, traffic, check = self.mesh["ring"], self.mesh["distrifusion"], self.mesh.traffic, self.checks
        if distri.size > 1:
            return DistriKeys(current, layer, distri, kernel, traffic, check=check)
        fresh = FreshKeys(kernel) if ring.size == 1 else RingKeys(ring, kernel, traffic)
        keys: Keys = fresh
        if self.plan.num_patches > 1:
            gather = alone if ring.size == 1 else RingGather(ring, traffic)
            keys = self.stale_keys(current, layer, kernel, fresh, gather, check=check)
        crew = self.pipefusion.crew
        return keys if crew is None else CrewKeys(current, layer, crew, kernel, keys)


def split_of(plan: Plan) -> Split:
    """How a plan's ranks share out the tokens."""
    return Split(plan.ring, plan.distrifusion, plan.ulysses, plan.uaa is not False)


def stages_of(seats: Seats, plan: Plan) -> list[range]:
    """The blocks of every stage; none where they are not known.

    Raises:
        PlanError: if the plan does not fit the model.
    """
    name = type(seats.transformer).__name__
    if seats.chain:
        plan.check(Facts(model=name, blocks=len(seats.chain)))
        plan.check(Facts(model=name, heads=int(seats.transformer.config["num_attention_heads"])))  # type: ignore[index]
        return divide(seats, plan)
    return [range(0)] * plan.pipefusion


def move(pipe: Any, device: torch.device) -> None:
    """Moves all of a pipeline that is not on a device yet: diffusers looks through all of it even where nothing is."""
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    if any(x.device != device for part in modules for x in (*part.parameters(), *part.buffers())):
        pipe.to(device)


def kernel_of(attention: str | None, transformer: Any, device: torch.device, plan: Plan) -> Dispatched | None:
    """The kernel that was asked for by name.

    Raises:
        ModelError: if it is unknown, or cannot run here.
    """
    return chosen(attention, device, transformer.dtype, lse=plan.ring > 1) if attention is not None else None


def vae_of(pipe: Any, plan: Plan, mesh: Mesh) -> ParallelVAE | None:
    """A pipeline's autoencoder by rows, where the plan wants it.

    Raises:
        ModelError: if it cannot be divided.
    """
    if plan.vae != "rows":
        return None
    return ParallelVAE(getattr(pipe, "vae", None), mesh.image, mesh.traffic, block_size=plan.vae_block_size)


def check_pipeline(pipe: Any) -> None:
    """Raises `ModelError` unless something has a model that it calls in its loop."""
    if not any(isinstance(getattr(pipe, name, None), nn.Module) for name in MODELS):
        raise ModelError(
            f"{type(pipe).__name__} has no transformer and no unet, so there is no call to divide; give a pipeline of "
            "diffusers"
        )


def compose(
    pipe: Any, plan: Plan, mesh: Mesh, device: torch.device, *, keep_weights: bool, text_after: After = "keep",
    attention: str | None = None, cp_plan: Mapping[str, Any] | None = None, compile: bool = False,
) -> Composition:  # fmt: skip
    """Cuts the pipeline's model into stages and keeps this rank's; or splits its calls as a table says.

    Raises:
        ModelError: if the pipeline cannot be divided.
        PlanError: if the plan does not fit the model.
        StateError: if the pipeline was cut before.
    """
    whole = plan.divides_the_batch_alone and attention is None
    planned = {} if whole else registry.planned(pipe, cp_plan)
    if planned:
        return _compose_planned(pipe, plan, mesh, device, planned, attention, keep_weights, text_after, compile)
    spec = registry.support(pipe, plan)  # says no before anything is touched
    model = registry.model_of(pipe)
    seats = (OneSeat if whole else Seats)(model, spec)
    _refuse(pipe, plan, seats, attention, compile)
    stages = stages_of(seats, plan)
    kernel = kernel_of(attention, model, device, plan)
    encoders = Encoders(
        pipe, plan.text, mesh.image, mesh.control, device, mesh.traffic, keep=keep_weights, after=text_after
    )
    parallel_vae = vae_of(pipe, plan, mesh)
    tensor, loaded = mesh["tensor"], seats.loaded is not None
    crew = _crew(seats, stages, plan, mesh)  # while all blocks are whole
    weights = seats.take(held(stages, mesh.stage, plan.crew), keep=keep_weights, shard=(tensor.index, tensor.size))
    sharded = _shard(pipe, model, plan, mesh, spec, loaded=loaded, keep=keep_weights)
    encoders.take()  # all before anything is moved: a device never sees the rest
    move(pipe, device)
    trace = mesh.traffic.trace
    pipefusion = PipeFusion(mesh, stages[mesh.stage], plan, spec.joint, trace, sharded.streams, crew)
    return Composition(
        pipe, plan, mesh, device, model, spec, seats, stages, weights, pipefusion, sharded, parallel_vae, trace,
        encoders, kernel, compile=compile,
    )  # fmt: skip


def _refuse(pipe: Any, plan: Plan, seats: Seats, attention: str | None, compile: bool) -> None:
    """Says no to a model that cannot be divided so, before anything is touched."""
    model = seats.transformer
    if attention is not None and not seats.spec.blocks:
        raise ModelError(
            f"attention={attention!r}: nothing is known of the attention of {type(model).__name__}; leave it out, or "
            "choose the kernel with set_attention_backend"
        )
    if compile and not seats.chain:
        raise ModelError(
            f"compile=True: nothing is known of the blocks of {type(model).__name__}; leave it out, and compile the "
            "whole: pipe.transformer = torch.compile(pipe.transformer)"
        )
    if seats.is_cut() and seats.loaded is None:
        raise StateError(f"this {type(pipe).__name__} is cut into stages already; restore() its runner, or reload it")
    reason = seats.refuse(range(len(seats.chain)))
    if reason:
        raise ModelError(reason)
    if plan.tensor > 1 and seats.loaded is None and (names := quantized(model)):
        raise ModelError(
            f"tensor={plan.tensor} cuts plain weights, and {names[0]} is quantized; quantize the pipeline after "
            "parallelize, when each rank has its share"
        )


def _compose_planned(
    pipe: Any, plan: Plan, mesh: Mesh, device: torch.device, planned: dict[str, Mapping[str, Any]],
    attention: str | None, keep: bool, text_after: After, compile: bool,
) -> Composition:  # fmt: skip
    """For models that have a table of splits: all weights on every rank, one stage, one patch."""
    transformers = {name: uncompiled(getattr(pipe, name)) for name in planned}
    model = registry.model_of(pipe) if plan.cfg * plan.data > 1 else uncompiled(pipe.transformer)
    kind = type(model).__name__
    if compile:
        raise ModelError(f"compile=True: the tokens of {kind} are split in the midst of its forward; leave it out")
    plan.check_planned(kind)
    splits = None
    if mesh.sequence.size > 1:
        splits = Splits(mesh.sequence, mesh.traffic, uneven=plan.uaa is not False)
    tables = list(planned.values())
    seats = PlannedSeats(transformers, tables, splits, intercept.seat)
    for heads in seats.heads:
        plan.check(Facts(model=kind, heads=heads))
    kernel = kernel_of(attention, model, device, plan)
    encoders = Encoders(pipe, plan.text, mesh.image, mesh.control, device, mesh.traffic, keep=keep, after=text_after)
    parallel_vae = vae_of(pipe, plan, mesh)
    weights = seats.weights()
    encoders.take()
    move(pipe, device)
    trace = mesh.traffic.trace
    pipefusion = PipeFusion(mesh, range(0), plan, "none", trace, WholeStreams())
    whole = Sharded(Cuts({}, 0, 1), keep=True)
    return Composition(
        pipe, plan, mesh, device, model, PLANNED, seats, [range(0)], weights, pipefusion, whole, parallel_vae, trace,
        encoders, kernel, splits,
    )  # fmt: skip


def _crew(seats: Seats, stages: list[range], plan: Plan, mesh: Mesh) -> Crew | None:
    """The stages that compute the synchronous steps together, where the plan has some."""
    if plan.warmup_mode not in ("sequence", "separate"):
        return None
    if plan.warmup_mode == "separate":
        return Crew(mesh, seats, stages, plan.crew, None)
    lender = Lender(seats, stages, mesh)
    seats.stand_ins = lender.stand_ins
    return Crew(mesh, seats, stages, plan.pipefusion, lender)


def _shard(
    pipe: Any, model: torch.nn.Module, plan: Plan, mesh: Mesh, spec: ModelSpec, *, loaded: bool, keep: bool
) -> Sharded:
    """Leaves this rank its share of the weights of every block, and makes the pipeline refuse what needs whole ones."""
    if plan.tensor == 1:
        return Sharded(Cuts({}, 0, 1), keep=True)
    table = table_of(model, spec)
    sequence = spec.tensor_tokens if plan.split_scheme == "sequence" else None
    sharded = shard(model, table, mesh["tensor"], mesh.traffic, sequence=sequence, loaded=loaded, keep=keep)
    sharded.guard(pipe)
    return sharded
