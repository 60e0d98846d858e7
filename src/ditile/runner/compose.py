"""(pipeline, plan, mesh) -> everything seated in the pipeline, in order. Nothing else knows two strategies at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ditile.cache.agreement import AgreementGroups, LoopClock, StageAgreement
from ditile.cache.cached import TransformerCache, find_transformer_cache
from ditile.distributed.mesh import Mesh
from ditile.distributed.trace import GenerationTrace
from ditile.errors import ModelError, StateError
from ditile.hooks.block_hooks import BlockHook, CallCountHooks, LayerAttention, TransformerHooks
from ditile.hooks.compile import unwrap_compiled
from ditile.hooks.fused import fuse_linear_gelu, fuse_projections
from ditile.hooks.generation import Generation
from ditile.hooks.kv_store import AgeChecks
from ditile.hooks.placeholders import list_quantized_parameters
from ditile.hooks.protocols import AttentionKernel, HeadExchange, KeySource, WholeTokenStreams
from ditile.models import registry
from ditile.parallel.attention import intercept
from ditile.parallel.attention.core import (
    AttentionCore,
    FreshKeys,
    LocalKeyMaskSource,
    NoExchange,
    StaleKeys,
    skip_ring_gather,
)
from ditile.parallel.attention.kernel import NATIVE, DiffusersKernel, choose_kernel
from ditile.parallel.batch.denoise import DataCfgBatch
from ditile.parallel.batch.split import count_images
from ditile.parallel.pipefusion.block_costs import divide_blocks
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.parallel.pipefusion.loop import Loop, StepCallbacks
from ditile.parallel.pipefusion.shared_warmup import WarmupGroup, WarmupGroupKeys
from ditile.parallel.pipefusion.weight_streaming import WeightStream
from ditile.parallel.sequence.cp_hooks import CP_PLAN_SPEC, ContextParallelAttention, ContextParallelHooks, MaskOrigins
from ditile.parallel.sequence.cp_plan import ContextParallelSplits
from ditile.parallel.sequence.distrifusion import DistriFusionKeys
from ditile.parallel.sequence.masks import GatheredKeyMaskSource
from ditile.parallel.sequence.ring import RingGather, RingKeys
from ditile.parallel.sequence.ulysses import OverlappedUlysses, UlyssesExchange
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.parallel.tensor.tensor import ShardedTransformer, find_tensor_table, shard_weights
from ditile.parallel.text.encoders import After, TextEncoders
from ditile.parallel.vae.vae import ParallelVAE
from ditile.plan.layout import Split
from ditile.plan.plan import Facts, Plan
from ditile.plan.shape import Weights
from ditile.plan.spec import ModelSpec
from ditile.plan.stages import select_local_blocks

DENOISER_NAMES = ("transformer", "transformer_2", "unet")
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
    block_hooks: TransformerHooks
    stages: list[range]
    weights: Weights
    pipefusion: PipeFusion
    sharded: ShardedTransformer
    parallel_vae: ParallelVAE | None
    trace: GenerationTrace
    encoders: TextEncoders
    kernel: DiffusersKernel | None = None
    splits: ContextParallelSplits | None = None
    checks: AgeChecks | None = None
    compile: bool = False
    stale_keys: type[StaleKeys] = StaleKeys

    @property
    def resident_blocks(self) -> range:
        """The blocks whose weights this rank holds."""
        return select_local_blocks(self.stages, self.mesh.stage_index, self.plan.crew)

    def find_refusal_reason(self) -> str | None:
        """Why the model cannot run as it is now on this rank, or None."""
        warmup_group = self.pipefusion.warmup_group
        weight_stream = None if warmup_group is None else warmup_group.weight_stream
        return self.block_hooks.explain_refusal(self.resident_blocks) or (
            None if weight_stream is None else weight_stream.explain_refusal()
        )

    @property
    def calls_whole_model(self) -> bool:
        """Whether nothing inside the model is touched."""
        return isinstance(self.block_hooks, CallCountHooks)

    @property
    def model_caches(self) -> list[TransformerCache]:
        """The caches of the pipeline's models, which may come and go between calls."""
        registry = (getattr(self.pipe, name, None) for name in DENOISER_NAMES)
        return [
            cache
            for model in registry
            if model is not None and (cache := find_transformer_cache(unwrap_compiled(model))) is not None
        ]

    @contextmanager
    def install_for_call(
        self, hooks: StepCallbacks, call: Mapping[str, Any], decisions: AgreementGroups | None, *, first: bool
    ) -> Iterator[Loop]:
        """Everything in its place for the length of one call. The scheduler is the one that the pipeline has now.

        Args:
            hooks: what happens at the ends of steps.
            call: the pipeline's arguments.
            decisions: who decides together on what caches leave out; None without caches.
            first: whether rank 0 alone needs the pictures.
        """
        dim, never = self.spec.latent_dim, self.spec.batch
        batch = DataCfgBatch(self.mesh, self.model, images=count_images(call), latent_dim=dim, never=never)
        loop = Loop(
            self.pipe.scheduler,
            self.pipefusion,
            self.mesh,
            self.plan,
            build_token_split(self.plan),
            batch,
            latent_dim=dim,
            trace=self.trace,
        )
        sequence, traffic, turn = self.mesh.sequence, self.mesh.traffic, torch.tensor(0)

        def build_attention_core(layer: str, backend: Any, *, joint: bool, through_dispatch: bool) -> LayerAttention:
            kernel = self.kernel or (DiffusersKernel(backend) if through_dispatch else NATIVE)
            keys = self._build_layer_keys(loop.get_generation, layer, kernel)
            exchange, splits = self._build_exchange(loop.get_generation), self.splits
            if splits is not None:
                source = MaskOrigins(splits, cached=bool(self.model_caches))
                gathered = GatheredKeyMaskSource(sequence, self.mesh["ulysses"], traffic, source)
                over = AttentionCore(
                    loop.get_generation, exchange, keys, gathered, joint=joint, turn=turn
                ).attend_over_tokens
                return ContextParallelAttention(splits, over, kernel, gathered, source)
            masks = (
                LocalKeyMaskSource()
                if sequence.num_ranks == 1
                else GatheredKeyMaskSource(sequence, self.mesh["ulysses"], traffic)
            )
            return AttentionCore(loop.get_generation, exchange, keys, masks, joint=joint, turn=turn)

        def choose_dispatch_backend(backend: Any) -> Any:
            return intercept.register_backend(backend if self.kernel is None else self.kernel.backend)

        for cache in self.model_caches:
            cache.update_compilation()  # before the seats, which lie around the slots
        with ExitStack() as stack:
            stack.enter_context(self.encoders.install_for_call(self.model))
            if self.parallel_vae is not None:
                stack.enter_context(self.parallel_vae.install_forwards())
            fuse = functools.partial(self._fuse_small_products, loop.get_generation)
            hooks_context = self.block_hooks.install_hooks(
                self.pipefusion,
                self.resident_blocks,
                loop.get_generation,
                build_attention_core,
                choose_dispatch_backend,
                pipe=self.pipe,
                compile_=torch.compile if self.compile else None,
                fuse=fuse,
            )
            stack.enter_context(hooks_context)
            batch.install_batch_hooks(
                stack, self.pipe, loop.get_generation, first=first
            )  # around all that sees the model's rows
            if decisions is not None:
                stack.enter_context(self._attach_caches(loop, batch, decisions))
            loop.install_scheduler_hooks(
                stack, self.pipe, hooks
            )  # outermost: an error in the loop finds the seats still there
            yield loop

    @contextmanager
    def _attach_caches(self, loop: Loop, batch: DataCfgBatch, decisions: AgreementGroups) -> Iterator[None]:
        """Lends the caches, whose slots lie inside the seats, the loop's clock and this rank's part in decisions."""
        names = {block_hook.block: block_hook.name for block_hook in self.block_hooks.chain}
        chain = self.block_hooks.chain
        stages = {chain[k].block: stage for stage, blocks in enumerate(self.stages) for k in blocks}
        agreement = StageAgreement(
            decisions, self.mesh, loop.get_generation, lambda: batch.is_split_by_calls, names, stages
        )
        stale = self.plan.attends_to_stale_keys
        with ExitStack() as stack:
            for cache in self.model_caches:
                images = (lambda: None) if stale else (lambda: loop.num_images)
                clock = LoopClock(
                    loop.get_generation,
                    lambda: loop.num_steps,
                    self.plan,
                    images,
                    cache.begin_generation,
                    cache.end_generation,
                )
                loop.when_over.append(clock.end_generation)
                stack.enter_context(cache.use_clock_and_agreement(clock, agreement))
            clean = False
            try:
                yield
                clean = True
            finally:
                agreement.close_channels(clean=clean)

    def _fuse_small_products(self, current: Callable[[], Generation], stack: ExitStack, block_hook: BlockHook) -> None:
        """Small products are slow, and those of a patch are small."""
        if not self.plan.async_ulysses:  # it has q, k and v travel while the next is made
            fuse_projections(stack, block_hook.list_attentions(), self.device)
        if self.plan.rounds_otherwise:
            fuse_linear_gelu(stack, block_hook.block, self.device, lambda: True)
        elif self.plan.attends_to_stale_keys:
            fuse_linear_gelu(
                stack, block_hook.block, self.device, lambda: current().is_stale(current().micro_step.step)
            )

    def _build_exchange(self, current: Callable[[], Generation]) -> HeadExchange:
        axis, traffic = self.mesh["ulysses"], self.mesh.traffic
        if axis.num_ranks == 1:
            return NoExchange()
        return (
            OverlappedUlysses(axis, traffic, self.trace, current)
            if self.plan.async_ulysses
            else UlyssesExchange(axis, traffic)
        )

    def _build_layer_keys(self, current: Callable[[], Generation], layer: str, kernel: AttentionKernel) -> KeySource:
        """Whose keys a layer attends to, and how old they may be."""
        ring, distri, traffic, check = self.mesh["ring"], self.mesh["distrifusion"], self.mesh.traffic, self.checks
        if distri.num_ranks > 1:
            return DistriFusionKeys(current, layer, distri, kernel, traffic, check=check)
        fresh = FreshKeys(kernel) if ring.num_ranks == 1 else RingKeys(ring, kernel, traffic)
        keys: KeySource = fresh
        if self.plan.num_patches > 1:
            gather = skip_ring_gather if ring.num_ranks == 1 else RingGather(ring, traffic)
            keys = self.stale_keys(current, layer, kernel, fresh, gather, check=check)
        warmup_group = self.pipefusion.warmup_group
        return keys if warmup_group is None else WarmupGroupKeys(current, layer, warmup_group, kernel, keys)


def build_token_split(plan: Plan) -> Split:
    """How a plan's ranks share out the tokens."""
    return Split(plan.ring, plan.distrifusion, plan.ulysses, plan.uaa is not False)


def divide_into_stages(block_hooks: TransformerHooks, plan: Plan) -> list[range]:
    """The blocks of every stage; none where they are not known.

    Raises:
        PlanError: if the plan does not fit the model.
    """
    name = type(block_hooks.transformer).__name__
    if block_hooks.chain:
        plan.check(Facts(model=name, blocks=len(block_hooks.chain)))
        plan.check(Facts(model=name, heads=int(block_hooks.transformer.config["num_attention_heads"])))  # type: ignore[index]
        return divide_blocks(block_hooks, plan)
    return [range(0)] * plan.pipefusion


def move_pipeline(pipe: Any, device: torch.device) -> None:
    """Moves all of a pipeline that is not on a device yet: diffusers looks through all of it even where nothing is."""
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    if any(x.device != device for part in modules for x in (*part.parameters(), *part.buffers())):
        pipe.to(device)


def find_named_kernel(
    attention: str | None, transformer: Any, device: torch.device, plan: Plan
) -> DiffusersKernel | None:
    """The kernel that was asked for by name.

    Raises:
        ModelError: if it is unknown, or cannot run here.
    """
    return choose_kernel(attention, device, transformer.dtype, lse=plan.ring > 1) if attention is not None else None


def build_parallel_vae(pipe: Any, plan: Plan, mesh: Mesh) -> ParallelVAE | None:
    """A pipeline's autoencoder by rows, where the plan wants it.

    Raises:
        ModelError: if it cannot be divided.
    """
    if plan.vae != "rows":
        return None
    return ParallelVAE(getattr(pipe, "vae", None), mesh.image, mesh.traffic, block_size=plan.vae_block_size)


def check_pipeline(pipe: Any) -> None:
    """Raises `ModelError` unless something has a model that it calls in its loop."""
    if not any(isinstance(getattr(pipe, name, None), nn.Module) for name in DENOISER_NAMES):
        raise ModelError(
            f"{type(pipe).__name__} has no transformer and no unet, so there is no call to divide; give a pipeline of "
            "diffusers"
        )


def compose_strategies(
    pipe: Any,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    *,
    keep_weights: bool,
    text_after: After = "keep",
    attention: str | None = None,
    cp_plan: Mapping[str, Any] | None = None,
    compile: bool = False,
) -> Composition:
    """Cuts the pipeline's model into stages and keeps this rank's; or splits its calls as a table says.

    Raises:
        ModelError: if the pipeline cannot be divided.
        PlanError: if the plan does not fit the model.
        StateError: if the pipeline was cut before.
    """
    whole = plan.divides_the_batch_alone and attention is None
    planned = {} if whole else registry.find_cp_plans(pipe, cp_plan)
    if planned:
        return _compose_from_split_tables(
            pipe, plan, mesh, device, planned, attention, keep_weights, text_after, compile
        )
    spec = registry.select_plan_spec(pipe, plan)  # says no before anything is touched
    model = registry.find_loop_model(pipe)
    block_hooks = (CallCountHooks if whole else TransformerHooks)(model, spec)
    _check_model_divisible(pipe, plan, block_hooks, attention, compile)
    stages = divide_into_stages(block_hooks, plan)
    kernel = find_named_kernel(attention, model, device, plan)
    encoders = TextEncoders(
        pipe, plan.text, mesh.image, mesh.control, device, mesh.traffic, keep=keep_weights, after=text_after
    )
    parallel_vae = build_parallel_vae(pipe, plan, mesh)
    tensor, loaded = mesh["tensor"], block_hooks.loaded_blocks is not None
    warmup_group = _build_warmup_group(block_hooks, stages, plan, mesh)  # while all blocks are whole
    weights = block_hooks.claim_blocks(
        select_local_blocks(stages, mesh.stage_index, plan.crew),
        keep=keep_weights,
        shard=(tensor.index, tensor.num_ranks),
    )
    sharded = _shard_transformer(pipe, model, plan, mesh, spec, loaded=loaded, keep=keep_weights)
    encoders.empty_foreign_parts()  # all before anything is moved: a device never sees the rest
    move_pipeline(pipe, device)
    trace = mesh.traffic.trace
    pipefusion = PipeFusion(mesh, stages[mesh.stage_index], plan, spec.joint, trace, sharded.streams, warmup_group)
    return Composition(
        pipe,
        plan,
        mesh,
        device,
        model,
        spec,
        block_hooks,
        stages,
        weights,
        pipefusion,
        sharded,
        parallel_vae,
        trace,
        encoders,
        kernel,
        compile=compile,
    )


def _check_model_divisible(
    pipe: Any, plan: Plan, block_hooks: TransformerHooks, attention: str | None, compile: bool
) -> None:
    """Says no to a model that cannot be divided so, before anything is touched."""
    model = block_hooks.transformer
    if attention is not None and not block_hooks.spec.blocks:
        raise ModelError(
            f"attention={attention!r}: nothing is known of the attention of {type(model).__name__}; leave it out, or "
            "choose the kernel with set_attention_backend"
        )
    if compile and not block_hooks.chain:
        raise ModelError(
            f"compile=True: nothing is known of the blocks of {type(model).__name__}; leave it out, and compile the "
            "whole: pipe.transformer = torch.compile(pipe.transformer)"
        )
    if block_hooks.has_placeholders() and block_hooks.loaded_blocks is None:
        raise StateError(f"this {type(pipe).__name__} is cut into stages already; restore() its runner, or reload it")
    reason = block_hooks.explain_refusal(range(len(block_hooks.chain)))
    if reason:
        raise ModelError(reason)
    if plan.tensor > 1 and block_hooks.loaded_blocks is None and (names := list_quantized_parameters(model)):
        raise ModelError(
            f"tensor={plan.tensor} cuts plain weights, and {names[0]} is quantized; quantize the pipeline after "
            "parallelize, when each rank has its share"
        )


def _compose_from_split_tables(
    pipe: Any,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    planned: dict[str, Mapping[str, Any]],
    attention: str | None,
    keep: bool,
    text_after: After,
    compile: bool,
) -> Composition:
    """For models that have a table of splits: all weights on every rank, one stage, one patch."""
    transformers = {name: unwrap_compiled(getattr(pipe, name)) for name in planned}
    model = registry.find_loop_model(pipe) if plan.cfg * plan.data > 1 else unwrap_compiled(pipe.transformer)
    kind = type(model).__name__
    if compile:
        raise ModelError(f"compile=True: the tokens of {kind} are split in the midst of its forward; leave it out")
    plan.check_planned(kind)
    splits = None
    if mesh.sequence.num_ranks > 1:
        splits = ContextParallelSplits(mesh.sequence, mesh.traffic, uneven=plan.uaa is not False)
    tables = list(planned.values())
    block_hooks = ContextParallelHooks(transformers, tables, splits, intercept.install_redirect)
    for heads in block_hooks.head_counts:
        plan.check(Facts(model=kind, heads=heads))
    kernel = find_named_kernel(attention, model, device, plan)
    encoders = TextEncoders(
        pipe, plan.text, mesh.image, mesh.control, device, mesh.traffic, keep=keep, after=text_after
    )
    parallel_vae = build_parallel_vae(pipe, plan, mesh)
    weights = block_hooks.describe_weights()
    encoders.empty_foreign_parts()
    move_pipeline(pipe, device)
    trace = mesh.traffic.trace
    pipefusion = PipeFusion(mesh, range(0), plan, "none", trace, WholeTokenStreams())
    whole = ShardedTransformer(TensorCuts({}, 0, 1), keep=True)
    return Composition(
        pipe,
        plan,
        mesh,
        device,
        model,
        CP_PLAN_SPEC,
        block_hooks,
        [range(0)],
        weights,
        pipefusion,
        whole,
        parallel_vae,
        trace,
        encoders,
        kernel,
        splits,
    )


def _build_warmup_group(
    block_hooks: TransformerHooks, stages: list[range], plan: Plan, mesh: Mesh
) -> WarmupGroup | None:
    """The stages that compute the synchronous steps together, where the plan has some."""
    if plan.warmup_mode not in ("sequence", "separate"):
        return None
    if plan.warmup_mode == "separate":
        return WarmupGroup(mesh, block_hooks, stages, plan.crew, None)
    weight_stream = WeightStream(block_hooks, stages, mesh)
    block_hooks.replacement_blocks = weight_stream.streamed_blocks
    return WarmupGroup(mesh, block_hooks, stages, plan.pipefusion, weight_stream)


def _shard_transformer(
    pipe: Any, model: torch.nn.Module, plan: Plan, mesh: Mesh, spec: ModelSpec, *, loaded: bool, keep: bool
) -> ShardedTransformer:
    """Leaves this rank its share of the weights of every block, and makes the pipeline refuse what needs whole ones."""
    if plan.tensor == 1:
        return ShardedTransformer(TensorCuts({}, 0, 1), keep=True)
    table = find_tensor_table(model, spec)
    sequence = spec.tensor_tokens if plan.split_scheme == "sequence" else None
    sharded = shard_weights(model, table, mesh["tensor"], mesh.traffic, sequence=sequence, loaded=loaded, keep=keep)
    sharded.guard_pipeline_loaders(pipe)
    return sharded
