"""(pipeline, plan, mesh) -> the strategies of the plan: built once, in order, and installed in order for each call.

No other module knows two strategies at once. A comment gives the reason for each position in the order.
"""

from __future__ import annotations

import functools
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ditile.cache.agreement import AgreementGroups, ImageAgreement, LoopClock, StageAgreement
from ditile.cache.cached import ModelCache, TransformerCache, find_model_cache
from ditile.cache.calls.call_cache import CallCache, LoopForecasts
from ditile.distributed import cpus
from ditile.distributed.mesh import Axis, Mesh
from ditile.distributed.trace import GenerationTrace
from ditile.distributed.transport import gather_json
from ditile.model import support
from ditile.model.anatomies import build_block_hooks, find_anatomy
from ditile.model.call_families import find_call_family
from ditile.model.hooks.block_hooks import CallCountHooks, TransformerHooks
from ditile.model.hooks.block_policy import BlockHook, LayerAttention
from ditile.model.hooks.compile import decide_compile, unwrap_compiled, wrap_model_call
from ditile.model.hooks.fused import fuse_projections
from ditile.model.hooks.kv_store import AgeChecks
from ditile.model.hooks.placeholders import list_quantized_parameters, refuse_saving
from ditile.model.hooks.protocols import AttentionKernel, HeadExchange, KeySource
from ditile.model.pipeline_calls import (
    explain_manager_refusal,
    find_denoisers,
    find_offload_devices,
    is_guidance_timed,
    list_call_parameters,
    list_denoiser_names,
    list_pipeline_parts,
    read_call_values,
)
from ditile.model.recording.recorded_steps import RecordedSteps
from ditile.parallel.attention.core import (
    AttentionCore,
    FreshKeys,
    LocalKeyMaskSource,
    StaleKeys,
)
from ditile.parallel.attention.kernel import NATIVE, DiffusersKernel, choose_kernel, register_backend
from ditile.parallel.attention.rotary import RotaryEmbedding
from ditile.parallel.batch.denoise import DataCfgBatch
from ditile.parallel.block_formats import find_row_blocks
from ditile.parallel.pipefusion.block_costs import divide_blocks
from ditile.parallel.pipefusion.block_offload import BlockOffload, HostCopies, explain_offload_refusal
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.parallel.pipefusion.known_calls import describe_call_shapes
from ditile.parallel.pipefusion.loop import Loop
from ditile.parallel.pipefusion.shared_warmup import WarmupGroup, WarmupGroupKeys
from ditile.parallel.pipefusion.step_agreement import StepCallbacks
from ditile.parallel.pipefusion.weight_streaming import WeightStream
from ditile.parallel.sequence.distrifusion import DistriFusionKeys
from ditile.parallel.sequence.masks import GatheredKeyMaskSource
from ditile.parallel.sequence.ring import AxisGather, RingKeys
from ditile.parallel.sequence.ulysses import OverlappedUlysses, UlyssesExchange
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.parallel.tensor.sharding import ShardedTransformer, check_unsharded, find_tensor_table, shard_weights
from ditile.parallel.text.encoders import After, TextEncoders
from ditile.parallel.vae.host_frames import install_host_frames
from ditile.parallel.vae.parallel_vae import ParallelVAE
from ditile.plan.anatomy import Anatomy
from ditile.plan.cost import make_token_split
from ditile.plan.errors import ModelError, PlanError, StateError, StoppedError
from ditile.plan.numbers import format_bytes
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import AUTO, Facts, Plan
from ditile.plan.shape import CallFamily, Weights, count_images
from ditile.runner.transformer_calls import TransformerCalls
from ditile.runner.user_code import list_user_code


@dataclass(frozen=True, slots=True)
class Composition:
    """The strategies of a plan on this rank, built and not yet installed.

    Attributes:
        block_hooks: the hooks of the model that the pipeline calls, its transformer or U-Net.
        stages: the blocks of each stage; this rank owns one stage.
        weights: the parameter counts of the undivided transformer.
        sharded: this rank's share of the weights of its blocks.
        parallel_vae: decodes and encodes a band of rows on each rank of an image; None if the VAE is not divided.
        loop: drives the pipeline's loop, and knows the current generation.
        attention: builds the attention of each layer.
        compile: whether ditile compiles the blocks.
        recorder: records calls of the model as CUDA graphs, on request.
        offload: streams the weights of blocks from the host's memory, if the plan asks for it.
        guards: make the pipeline and its siblings refuse operations on whole weights until `restore`.
        serial_plan: with warmup_mode=auto, the plan for calls in which the weights of blocks cannot be sent.
        trusts_code: whether the user's code on the models may be given parts of a call.
    """

    pipe: Any
    plan: Plan
    mesh: Mesh
    device: torch.device
    block_hooks: TransformerHooks
    stages: list[range]
    weights: Weights
    sharded: ShardedTransformer
    encoders: TextEncoders
    parallel_vae: ParallelVAE | None
    pipefusion: PipeFusion
    loop: Loop
    attention: LayerAttentionBuilder
    compile: bool
    recorder: RecordedSteps | None
    offload: BlockOffload | None
    serial_plan: Plan | None
    trusts_code: bool
    guards: ExitStack

    @property
    def model(self) -> nn.Module:
        """Return the pipeline's transformer or U-Net."""
        return self.block_hooks.transformer

    @property
    def models(self) -> list[nn.Module]:
        """Return all models called in the pipeline's loop."""
        return [hooks.transformer for hooks in self.block_hooks.models]

    @property
    def family(self) -> CallFamily | None:
        """Return the family of the model's calls; None if their shape cannot be computed from their arguments."""
        if isinstance(self.pipe, TransformerCalls):
            return None
        return find_call_family(self.model)

    @property
    def trace(self) -> GenerationTrace:
        """Return the trace, which is empty unless the call asked for one."""
        return self.mesh.traffic.trace

    @property
    def resident_blocks(self) -> range:
        """Return the blocks with weights on this rank."""
        return self.stages[self.mesh.stage_index]

    @property
    def calls_whole_model(self) -> bool:
        """Return whether the strategies hook nothing inside the model."""
        return isinstance(self.block_hooks, CallCountHooks)

    @property
    def model_caches(self) -> list[ModelCache]:
        """Return the caches of the pipeline's models. They may come and go between calls.

        They include caches of models that every rank calls whole, such as one for the branch without a prompt.
        """
        caches: dict[nn.Module, ModelCache] = {}
        for part in list_pipeline_parts(self.pipe).values():
            if isinstance(part, nn.Module):
                model = unwrap_compiled(part)
                cache = find_model_cache(model)
                if cache is not None:
                    caches[model] = cache
        return list(caches.values())

    @property
    def block_caches(self) -> list[TransformerCache]:
        """Return the caches of blocks."""
        return [cache for cache in self.model_caches if isinstance(cache, TransformerCache)]

    def find_refusal_reason(self) -> str | None:
        """Return why the model cannot run on this rank in its present state, or None."""
        reason = self.block_hooks.explain_refusal(self.resident_blocks)
        if self.offload is not None:
            reason = reason or explain_offload_refusal(self.block_hooks.models)
        reading_option = "" if self.recorder is None else "cuda_graphs=True"
        reason = reason or explain_manager_refusal(self.pipe, self.device, reading_option)
        # With a serial plan, a call that cannot stream weights runs serially instead.
        if self.serial_plan is None:
            reason = reason or self.explain_streaming_refusal()
        return reason

    def explain_streaming_refusal(self) -> str | None:
        """Return why the weights of this rank's blocks cannot be sent to the other stages now, or None."""
        warmup_group = self.pipefusion.warmup_group
        if warmup_group is None:
            return None
        reason = warmup_group.weight_stream.explain_refusal()
        return reason or explain_manager_refusal(self.pipe, self.device, "warmup_mode=sequence")

    def list_divided_parts(self) -> list[nn.Module]:
        """Return the pipeline's models whose calls are divided. Compiled models stay wrapped."""
        parts: list[nn.Module] = [getattr(self.pipe, name) for name in list_denoiser_names(self.pipe)]
        if self.parallel_vae is not None:
            parts.append(self.pipe.vae)
        if self.plan.text == "split":
            parts += self.encoders.encoders.values()
        return parts

    def list_partial_models(self) -> list[nn.Module]:
        """Return the models that are only partly on this rank, now or after a call."""
        models: list[nn.Module] = []
        if self.plan.divides_blocks:
            models += self.models
        if not self.encoders.stay_whole:
            models += self.encoders.encoders.values()
        return models

    def guard_pipeline(self, pipe: Any) -> None:
        """Make a pipeline on these models refuse operations on whole weights, before they touch anything."""
        partial_models = self.list_partial_models()
        if partial_models:
            refuse_saving(self.guards, pipe, partial_models)
        if self.plan.tensor > 1:
            self.sharded.guard_pipeline_loaders(pipe)

    def renew_groups(self) -> None:
        """Give every strategy new groups, without messages from failed calls. All ranks must call it."""
        # Tapes send through the old groups, so they are useless now.
        self.release_recordings()
        self.mesh.renew_groups(self.plan)
        self.mesh.connect_groups(self.plan, self.device)
        # Channels belong to groups, which are new now.
        self.pipefusion.open_channels()
        self.pipefusion.connect_channels(self.device)

    @contextmanager
    def install_for_call(
        self, callbacks: StepCallbacks, call: CallArguments, agreement_groups: AgreementGroups | None, *, first: bool
    ) -> Iterator[Loop]:
        """Install all strategies for one call, on the pipeline's present scheduler.

        Args:
            callbacks: the actions at the ends of steps.
            call: the pipeline's arguments.
            agreement_groups: the groups of ranks that decide together about skipped blocks; None without caches.
            first: whether only rank 0 needs the images.
        """
        values = read_call_values(call)
        batch = DataCfgBatch(
            self.mesh,
            self.models,
            images=count_images(values),
            batch_dims=self.block_hooks.batch_dims,
            inputs=self.block_hooks.anatomy.inputs or None,
            keeps_calls=self.plan.keeps_calls,
            has_lone_calls=isinstance(self.pipe, TransformerCalls),
        )
        with ExitStack() as stack:
            for cache in self.model_caches:
                stack.enter_context(cache.expect_calls())
            self.loop.recorder = self.recorder
            # Recordings begin before any hook of the call is on the models.
            if self.recorder is not None:
                self.recorder.begin_generation()
                self.loop.when_over.append(self.recorder.end_generation)
                stack.callback(self.loop.when_over.clear)
            stack.enter_context(self.encoders.install_for_call(self.model))
            if self.parallel_vae is not None:
                stack.enter_context(self.parallel_vae.install_forwards())
            self._install_host_frames(stack, values)
            if self.offload is not None:
                stack.enter_context(self.offload.install_for_call())
            # Caches come before the hooks of blocks, which go around them.
            if agreement_groups is not None:
                stack.enter_context(self._attach_caches(batch, agreement_groups))
            stack.enter_context(self._install_block_hooks())
            # User code on a VAE may let images see each other, so each replica then decodes all of them.
            vae = getattr(self.pipe, "vae", None)
            decodes_apart = self.trusts_code or not isinstance(vae, nn.Module) or not list_user_code(vae)
            # The batch goes around the hooks of blocks, so that the model sees only this rank's part of it.
            batch.install_batch_hooks(stack, self.pipe, self.loop.generation, first=first, decodes_apart=decodes_apart)
            self.loop.forecasts = self._surround_calls(stack, batch, call)
            # The loop comes last and is undone first: after an error it cleans up while all hooks are still there.
            self.loop.call_shapes = describe_call_shapes(self.pipe, call)
            self.loop.has_timed_guidance = is_guidance_timed(self.pipe, values)
            self.loop.install_scheduler_hooks(stack, self.pipe, self.models, batch, callbacks)
            try:
                yield self.loop
            except StoppedError:  # between two calls of the model, when all tapes are complete
                raise
            except BaseException:
                # An unfinished or failed tape is useless.
                self.release_recordings()
                raise

    def _install_host_frames(self, stack: ExitStack, call: CallArguments) -> None:
        """Decode into the host's memory if the call returns PIL images or NumPy arrays anyway."""
        parameter = list_call_parameters(self.pipe).get("output_type")
        output_type = call.get("output_type", getattr(parameter, "default", None))
        # With several replicas, frames are sent from device to device.
        if output_type in ("pil", "np") and self.plan.data == 1:
            install_host_frames(stack, getattr(self.pipe, "vae", None))

    def prepare_recorder(self, *, traced: bool) -> bool:
        """Inspect the models before a call. Return whether this rank may record their calls."""
        if self.recorder is None:
            return False
        self.recorder.caches = {cache.transformer: cache for cache in self.block_caches}
        self.recorder.refusal = ""
        if not self.recorder.caches.keys() <= set(self.models):
            self.recorder.refusal = "a cache is on a model that is not divided"
        # User code may keep state in Python, which a recording would not update. Hooks of the call are not there yet.
        if any(map(list_user_code, self.models)):
            self.recorder.refusal = "code of the user is on the model"
        # A trace's events would become part of the graphs.
        if traced:
            self.recorder.refusal = "runner.trace is on"
        return not self.recorder.refusal

    def release_recordings(self) -> None:
        """Forget all recordings, and free their memory."""
        if self.recorder is not None:
            self.recorder.release()

    def _install_block_hooks(self) -> AbstractContextManager[None]:
        around = None
        if self.offload is not None:
            around = self.offload.wrap_forward
        compile_block = torch.compile if self.compile else None
        return self.block_hooks.install_hooks(
            self.pipefusion,
            self.resident_blocks,
            self.loop.generation,
            self.attention.build_layer_attention,
            self.attention.choose_dispatch_backend,
            pipe=self.pipe,
            compile_=compile_block,
            around=around,
            fuse=self._fuse_small_kernels,
        )

    @contextmanager
    def _attach_caches(self, batch: DataCfgBatch, agreement_groups: AgreementGroups) -> Iterator[None]:
        """Give the caches the loop's clock and an agreement with other ranks during a call."""
        loop = self.loop
        names: dict[nn.Module, str] = {}
        stages: dict[nn.Module, int] = {}
        # A cache knows a block, not its name or stage. Both models are cut into stages alike.
        for hooks in self.block_hooks.models:
            names |= {hook.block: hook.name for hook in hooks.chain}
            for stage, blocks in enumerate(self.stages):
                for index in blocks:
                    stages[hooks.chain[index].block] = stage
        agreement = StageAgreement(
            agreement_groups, self.mesh, loop.generation, lambda: batch.is_split_by_calls, names, stages
        )
        kept_buffers = None
        if self.recorder is not None:
            kept_buffers = self.recorder.kept_buffers

        def count_separate_images(model: nn.Module) -> int | None:
            # A model that is not divided is called on all images in every replica.
            if model not in self.models:
                if loop.num_images is None:
                    return None
                return batch.num_images
            # Stale keys belong to the whole batch, so one image cannot be skipped without the others.
            if self.plan.attends_to_stale_keys:
                return None
            return loop.num_images

        with ExitStack() as stack:
            for cache in self.block_caches:
                count = functools.partial(count_separate_images, cache.transformer)
                clock = LoopClock(loop.generation, lambda: loop.num_steps, self.plan, cache, count)
                loop.when_over.append(clock.end_generation)
                compile_ = None
                if self.compile and cache.transformer in self.models:
                    compile_ = torch.compile
                stack.enter_context(cache.join_call(clock, agreement, kept_buffers, compile_))
            # After an error the loop has not cleared its callbacks, and the next call adds new ones.
            stack.callback(loop.when_over.clear)
            try:
                yield
            except StoppedError:  # all ranks end after the same step
                agreement.close_channels()
                raise
            agreement.close_channels()

    def _surround_calls(self, stack: ExitStack, batch: DataCfgBatch, call: CallArguments) -> LoopForecasts | None:
        """Wrap models in their caches of whole calls until the stack is closed. Returns None without such caches."""
        caches = [cache for cache in self.model_caches if isinstance(cache, CallCache)]
        if not caches:
            return None
        for cache in caches:
            if reason := cache.explain_plan_refusal(self.plan):
                raise ModelError(reason)
        agreement = ImageAgreement(self.mesh, batch.select_own_rows)
        forecasts = LoopForecasts(
            caches, self.loop.generation, lambda: self.pipefusion.is_last_stage, agreement, batch.num_images
        )
        # The caches go around the batch, because a skipped call exchanges no rows.
        for cache in caches:
            # The forecasts decide before the model is called, so the clock has nothing to do then.
            stack.enter_context(cache.use_clock(None))
            cache.check_pipeline_call(call)
            wrap_model_call(stack, self.pipe, cache.transformer, functools.partial(forecasts.wrap_forward, cache))
        return forecasts

    def _fuse_small_kernels(self, stack: ExitStack, block_hook: BlockHook) -> None:
        """Merge several kernels into one. The kernels of a patch are small, and launching many takes long."""
        self.attention.rotary.replace_processors(stack, block_hook.block)
        # async_ulysses sends v while k is computed, so it needs separate kernels. Offloaded weights stay separate too.
        if not self.plan.async_ulysses and self.offload is None:
            self_pairs = [pair for pair in block_hook.list_attentions() if not block_hook.sees_other_keys(pair[0])]
            fuse_projections(stack, self_pairs, self.device)


class LayerAttentionBuilder:
    """Builds the attention of each layer from an exchange of heads, a source of keys and a kernel.

    Args:
        loop: knows the current generation.
        kernel: the attention kernel; None keeps each processor's own.
        warmup_group: the stages that compute synchronous steps together; None if they run one after the other.

    Attributes:
        records: whether calls of the generation may be recorded on some rank.
        stale_keys: the class that keeps the keys of PipeFusion's patches.
        rotary: applies rotary embeddings in fewer kernels.
    """

    stale_keys: type[StaleKeys] = StaleKeys

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        loop: Loop,
        kernel: DiffusersKernel | None,
        warmup_group: WarmupGroup | None,
        options: CompositionOptions,
    ) -> None:
        self.records = False
        self._plan = plan
        self._mesh = mesh
        self._generation = loop.generation
        self._kernel = kernel
        self._warmup_group = warmup_group
        self._checks = options.checks
        self._masks: LocalKeyMaskSource | GatheredKeyMaskSource = LocalKeyMaskSource()
        if mesh.sequence.num_ranks > 1:
            self._masks = GatheredKeyMaskSource(
                mesh.sequence, mesh["ulysses"], mesh.traffic, plan.head_weights, remembers=lambda: not self.records
            )
        self.rotary = RotaryEmbedding()
        if options.recorder is not None:
            options.recorder.scopes = (self.rotary.hide_tables,)
        # All layers write this one tensor, which keeps their messages in order where blocks are compiled.
        self._turn = torch.tensor(0)

    def choose_dispatch_backend(self, backend: Any) -> Any:
        """Return the name of the backend for ditile's attention in place of a processor's own backend."""
        if self._kernel is not None:
            backend = self._kernel.backend
        return register_backend(backend)

    def build_layer_attention(self, layer: str, backend: Any, *, kind: str, through_dispatch: bool) -> LayerAttention:
        """Build the attention of a layer.

        Args:
            layer: its name in the model.
            backend: the kernel that its processor names.
            kind: the kind of its tokens, as in `ListAnatomy.attention`.
            through_dispatch: whether its processor goes through diffusers' dispatch of attention.
        """
        kernel: AttentionKernel | None = self._kernel
        if kernel is None:
            kernel = DiffusersKernel(backend) if through_dispatch else NATIVE
        keys = self._build_layer_keys(layer, kernel)
        return AttentionCore(
            self._generation, self._build_exchange(layer), keys, self._masks, kind=kind, turn=self._turn
        )

    def _build_exchange(self, layer: str) -> HeadExchange:
        axis = self._mesh["ulysses"]
        traffic = self._mesh.traffic
        uneven = self._plan.uaa is not False
        weights = self._plan.head_weights
        if axis.num_ranks == 1:
            return HeadExchange()
        find_bases = functools.partial(self._generation.find_bases, layer)
        if self._plan.async_ulysses:
            return OverlappedUlysses(axis, traffic, find_bases, self._generation, uneven=uneven, weights=weights)
        return UlyssesExchange(axis, traffic, find_bases, uneven=uneven, weights=weights)

    def _build_layer_keys(self, layer: str, kernel: AttentionKernel) -> KeySource:
        """Build the source of a layer's keys: fresh keys, keys of other ranks, or stale keys."""
        generation = self._generation
        traffic = self._mesh.traffic
        distrifusion = self._mesh["distrifusion"]
        if distrifusion.num_ranks > 1:
            return DistriFusionKeys(generation, layer, distrifusion, kernel, traffic, check=self._checks)
        find_bases = functools.partial(generation.find_bases, layer)
        gather: AxisGather | None = None
        for axis in (self._mesh["ring"], self._mesh["gather"]):
            if axis.num_ranks > 1:
                gather = AxisGather(axis, traffic, find_bases)
        fresh_keys: FreshKeys | RingKeys = FreshKeys(kernel, gather)
        if self._plan.ring > 1:
            fresh_keys = RingKeys(self._mesh["ring"], kernel, traffic, find_bases)
        keys: KeySource = fresh_keys
        # A single patch needs no keys from the previous step.
        if self._plan.num_patches > 1:
            keys = self.stale_keys(generation, layer, kernel, fresh_keys, gather, check=self._checks)
        # This source goes around the others, and replaces them in the steps that the group computes.
        if self._warmup_group is not None:
            keys = WarmupGroupKeys(generation, layer, self._warmup_group, kernel, keys)
        return keys


class CompositionOptions(NamedTuple):
    """The arguments of `parallelize` besides the plan.

    Attributes:
        moves: whether the pipeline is moved to the device.
    """

    keep_weights: bool
    text_after: After = "keep"
    attention: str | None = None
    compile: bool | Literal["auto"] = False
    checks: AgeChecks | None = None
    recorder: RecordedSteps | None = None
    trusts_code: bool = False
    moves: bool = True


def compose_strategies(
    pipe: Any, plan: Plan, mesh: Mesh, device: torch.device, options: CompositionOptions
) -> Composition:
    """Build every strategy of a plan, keep this rank's share of the pipeline's weights, and move it to the device.

    Raises:
        ModelError: if the pipeline cannot be divided.
        PlanError: if the plan does not fit the model.
        StateError: if an earlier runner cut the pipeline's weights, and was not restored.
    """
    # Steps that may raise come first, so that an error leaves the pipeline unchanged.
    _check_weights_stay(pipe, plan, device, options)
    block_hooks = _build_block_hooks(pipe, plan, options)
    compiles = decide_compile(options.compile, block_hooks.transformer, block_hooks.chain, plan, device, mesh.rank)
    plan, serial_plan = _choose_warmup_mode(pipe, block_hooks, plan, mesh)
    stages = divide_into_stages(block_hooks, plan)
    kernel = None
    transformer: Any = block_hooks.transformer
    if options.attention is not None:
        kernel = choose_kernel(options.attention, device, transformer.dtype, lse=plan.ring > 1)
    encoders = TextEncoders(pipe, plan, mesh, device, keep=options.keep_weights, after=options.text_after)
    parallel_vae = _build_parallel_vae(pipe, plan, mesh)
    # Build this before weights are taken out: weight streaming needs descriptions of the blocks of every stage.
    warmup_group = _build_warmup_group(pipe, block_hooks, stages, plan, mesh, may_rest=serial_plan is not None)
    weights, sharded, offload = _take_own_weights(pipe, block_hooks, encoders, stages, plan, device, mesh, options)
    joint = block_hooks.anatomy.joint
    pipefusion = PipeFusion(mesh, stages[mesh.stage_index], plan, joint, sharded.streams, warmup_group)
    kept_buffers = None if options.recorder is None else options.recorder.kept_buffers
    may_change = _may_change(block_hooks)
    loop = Loop(
        pipefusion, mesh, plan, make_token_split(plan), kept_buffers, may_change=may_change, serial_plan=serial_plan
    )
    attention = LayerAttentionBuilder(plan, mesh, loop, kernel, warmup_group, options)
    composition = Composition(
        pipe=pipe,
        plan=plan,
        mesh=mesh,
        device=device,
        block_hooks=block_hooks,
        stages=stages,
        weights=weights,
        sharded=sharded,
        encoders=encoders,
        parallel_vae=parallel_vae,
        pipefusion=pipefusion,
        loop=loop,
        attention=attention,
        compile=compiles,
        recorder=options.recorder,
        offload=offload,
        serial_plan=serial_plan,
        trusts_code=options.trusts_code,
        guards=ExitStack(),
    )
    composition.guard_pipeline(pipe)
    return composition


def _take_own_weights(
    pipe: Any,
    block_hooks: TransformerHooks,
    encoders: TextEncoders,
    stages: list[range],
    plan: Plan,
    device: torch.device,
    mesh: Mesh,
    options: CompositionOptions,
) -> tuple[Weights, ShardedTransformer, BlockOffload | None]:
    """Take the weights held by other ranks out of the models, and move the rest to the device.

    Returns:
        The weights of the undivided transformer, this rank's share, and the `BlockOffload` if the plan asks for one.
    """
    # Check first: `claim_blocks` clears `loaded_blocks` and takes weights out, and a refusal must leave models whole.
    keep = options.keep_weights
    shards: list[CallArguments] = []
    if plan.tensor > 1:
        for hooks in block_hooks.models:
            shards.append(_match_shard(hooks, plan, mesh["tensor"], keep=keep))
    owned = stages[mesh.stage_index]
    weights = block_hooks.claim_blocks(owned, keep=keep, shard=(mesh["tensor"].index, plan.list_tensor_weights()))
    # These guards come before those of tensor parallelism, which surround them and run first.
    if plan.divides_blocks:
        block_hooks.guard_saving()
    # With split_scheme=row the model itself sums over the ranks, even if the pipeline is called directly on all ranks.
    if plan.pipefusion > 1 or (plan.tensor > 1 and plan.split_scheme == "sequence"):
        block_hooks.guard_calls()
    # Shard after the stage split, so that only this rank's weights are sharded. Without `shards` this share is empty.
    sharded = ShardedTransformer(TensorCuts({}, 0, (1,)), keep=True)
    for number, (hooks, cut) in enumerate(zip(block_hooks.models, shards, strict=False)):
        share = shard_weights(hooks.transformer, axis=mesh["tensor"], traffic=mesh.traffic, **cut)
        if number == 0:
            sharded = share
        else:
            sharded.join_share(share)
    weights = replace(weights, tensor_units=sum(sharded.cuts.shares))
    encoders.empty_foreign_parts()
    # Move after all weights are taken out, so that the device never gets weights that this rank drops.
    offload = None
    if plan.offloads_rank(mesh.rank):
        offload = BlockOffload(block_hooks.models, owned, HostCopies(device))
    # The check is collective, so a rank that offloads nothing takes part too.
    if plan.offload == "blocks":
        _check_host_memory(offload, mesh)
    if offload is None and options.moves:
        move_pipeline(pipe, device)
    elif offload is not None:
        with offload.hold_blocks_back():
            move_pipeline(pipe, device)
        # Pinned memory is allocated now, because that may wait for the device.
        offload.pack_weights()
    return weights, sharded, offload


def _check_host_memory(offload: BlockOffload | None, mesh: Mesh) -> None:
    """Check that each host has memory for its ranks' weights. Raises `PlanError` on all ranks otherwise."""
    kept_bytes = Counter[str]()
    memory_of_host = {}
    own_bytes = 0 if offload is None else offload.count_host_bytes()
    # Ranks with the same host name share the memory of one host.
    own_entry = [platform.node(), own_bytes, cpus.count_memory_bytes()]
    for host, size, memory in gather_json(own_entry, mesh.everyone):
        kept_bytes[host] += size
        memory_of_host[host] = memory
    for host, size in kept_bytes.items():
        if size > memory_of_host[host]:
            raise PlanError(
                f"offload=blocks: the ranks of {host} keep {format_bytes(size)} of weights in its memory, and it has "
                f"{format_bytes(memory_of_host[host])}; quantize, or divide them over the ranks by pipefusion or tensor"
            )


def _build_parallel_vae(pipe: Any, plan: Plan, mesh: Mesh) -> ParallelVAE | None:
    """Build an autoencoder divided by rows if the plan asks for it."""
    if plan.vae != "rows":
        return None
    vae = getattr(pipe, "vae", None)
    weights = plan.list_rank_weights()
    return ParallelVAE(vae, mesh.image, mesh.traffic, block_size=plan.vae_block_size, weights=weights)


def _check_weights_stay(pipe: Any, plan: Plan, device: torch.device, options: CompositionOptions) -> None:
    """Raise `ModelError` if a ComponentsManager moves weights that must stay, or moves any to another device."""
    reading_option = ""
    if options.recorder is not None:
        reading_option = "cuda_graphs=True"
    elif plan.warmup_mode == "sequence":
        reading_option = "warmup_mode=sequence"
    elif plan.offload == "blocks":
        reading_option = "offload=blocks"
    if reason := explain_manager_refusal(pipe, device, reading_option):
        raise ModelError(reason)


def _may_change(block_hooks: TransformerHooks) -> bool:
    """Return whether the model, or its mode, changes between the steps of a call."""
    return block_hooks.other is not None or any(hooks.anatomy.modes for hooks in block_hooks.models)


def find_loop_models(pipe: Any) -> list[nn.Module]:
    """Return the models called in a pipeline's loop now, unwrapped if they are compiled."""
    return [unwrap_compiled(getattr(pipe, name)) for name in list_denoiser_names(pipe)]


def divide_into_stages(block_hooks: TransformerHooks, plan: Plan) -> list[range]:
    """Return the blocks of every stage; empty ranges if the blocks are unknown.

    Raises:
        PlanError: if the plan does not fit the model.
    """
    if not block_hooks.chain:
        return [range(0)] * plan.pipefusion
    plan.check(Facts(model=type(block_hooks.transformer).__name__, blocks=len(block_hooks.chain)))
    return divide_blocks(block_hooks, plan)


def move_pipeline(pipe: Any, device: torch.device) -> None:
    """Move a pipeline to a device if some of it is elsewhere. `pipe.to` takes long even if all of it is there."""
    offloaded = find_offload_devices(pipe)
    away: list[nn.Module] = []
    has_plain_module = False
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        # `pipe.to` asks each part for its dtype before it moves the parts, and a plain module of torch has no dtype.
        has_plain_module = has_plain_module or not hasattr(part, "dtype")
        tensors = (*part.parameters(), *part.buffers())
        # A ComponentsManager of diffusers moves its parts itself.
        if name not in offloaded and any(tensor.device != device for tensor in tensors):
            away.append(part)
    if offloaded or has_plain_module:
        for part in away:
            part.to(device)
    elif away:
        pipe.to(device)


def check_pipeline(pipe: Any) -> None:
    """Check that this is a pipeline with a model in its loop, and a scheduler. Raises `ModelError` otherwise."""
    if not isinstance(getattr(pipe, "components", None), Mapping):
        raise ModelError(
            f"{type(pipe).__name__} is not a diffusers pipeline; give a pipeline, such as ditile.load(NAME), or derive "
            "your class from diffusers.DiffusionPipeline and call register_modules(transformer=..., scheduler=...)"
        )
    find_denoisers(pipe)
    scheduler = getattr(pipe, "scheduler", None)
    if not (hasattr(scheduler, "set_timesteps") and hasattr(scheduler, "step")):
        instead = ""
        others = [name for name, part in vars(pipe).items() if hasattr(part, "set_timesteps")]
        if others:
            instead = f", but {' and '.join(others)}"
        raise ModelError(
            f"{type(pipe).__name__} has no part `scheduler` that it steps in its loop{instead}, so its steps cannot be "
            "told apart; call it on one device"
        )


def _build_block_hooks(pipe: Any, plan: Plan, options: CompositionOptions) -> TransformerHooks:
    """Build the hooks of a pipeline's models before it is touched, and check that the plan can divide them."""
    calls_whole_model = plan.divides_the_batch_alone and options.attention is None
    support.check_plan_fits_loop(pipe, plan)
    block_hooks: TransformerHooks | None = None
    models = find_denoisers(pipe)
    # The hooks of the first model hold the hooks of the second one, which must exist before.
    for name, model in reversed(models.items()):
        label = f"{name}:" if len(models) > 1 else ""
        if calls_whole_model:
            anatomy = find_anatomy(model) or Anatomy({}, "none")
            block_hooks = CallCountHooks(model, anatomy, block_hooks, label)
        else:
            block_hooks = build_block_hooks(model, block_hooks, label)
    assert block_hooks is not None
    model = block_hooks.transformer
    attention = options.attention
    if attention is not None and not block_hooks.chain:
        raise ModelError(
            f"attention={attention!r}: nothing is known of the attention of {type(model).__name__}; leave it out, or "
            "choose the kernel with set_attention_backend"
        )
    if plan.warmup_mode not in ("serial", AUTO) and any(hooks.anatomy.modes for hooks in block_hooks.models):
        raise ModelError(
            f"warmup_mode={plan.warmup_mode}: {type(model).__name__} keeps keys of the first step in a cache of its "
            "own, which stages do not send each other; use serial"
        )
    if block_hooks.has_placeholders() and block_hooks.loaded_blocks is None:
        raise StateError(f"this {type(pipe).__name__} is cut into stages already; restore() its runner, or reload it")
    all_blocks = range(len(block_hooks.chain))
    reason = block_hooks.explain_refusal(all_blocks)
    if plan.offload == "blocks":
        reason = reason or explain_offload_refusal(block_hooks.models)
    if reason:
        raise ModelError(reason)
    uncuttable = ""
    for path in list_quantized_parameters(model):
        # GGUF's weights, and most of torchao's, can be cut.
        if find_row_blocks(model.get_parameter(path)) is None:
            uncuttable = uncuttable or path
    # Weights that were loaded by share are cut already.
    if plan.tensor > 1 and block_hooks.loaded_blocks is None and uncuttable:
        raise ModelError(
            f"tensor={plan.tensor} cuts plain weights, and {uncuttable} is quantized; quantize the pipeline after "
            "parallelize, when each rank has its share"
        )
    return block_hooks


def _choose_warmup_mode(pipe: Any, block_hooks: TransformerHooks, plan: Plan, mesh: Mesh) -> tuple[Plan, Plan | None]:
    """Return the plan with a mode in place of auto, and the plan for calls that its warmup group cannot serve."""
    group_plan = plan.resolve_warmup()
    serial_plan = plan.resolve_warmup(streams=False)
    # The plan names a mode, or `auto` has none to choose from.
    if group_plan == serial_plan:
        return group_plan, None
    reasons = (
        _may_change(block_hooks),
        bool(find_offload_devices(pipe)),
        bool(list_quantized_parameters(block_hooks.transformer)),
    )
    # All ranks choose the same mode: the serial one if any rank cannot send its weights.
    if any(gather_json(any(reasons), mesh.everyone)):
        return serial_plan, None
    return group_plan, serial_plan


def _build_warmup_group(
    pipe: Any, block_hooks: TransformerHooks, stages: list[range], plan: Plan, mesh: Mesh, *, may_rest: bool
) -> WarmupGroup | None:
    """Build the group of stages for shared synchronous steps, if the plan has some."""
    if plan.warmup_mode != "sequence":
        return None
    if block_hooks.other is not None:
        raise ModelError(
            f"warmup_mode=sequence: {type(pipe).__name__} calls two models in turns; use serial or pipelined"
        )
    weight_stream = WeightStream(block_hooks, stages, mesh)
    # In a synchronous step, streamed blocks run in place of the blocks of other stages.
    block_hooks.replacement_blocks = weight_stream.streamed_blocks
    return WarmupGroup(mesh, block_hooks, stages[mesh.stage_index], weight_stream, may_rest=may_rest)


def _match_shard(hooks: TransformerHooks, plan: Plan, axis: Axis, *, keep: bool) -> CallArguments:
    """Return how tensor parallelism cuts a model. Raises `ModelError` if it cannot."""
    model = hooks.transformer
    loaded: tuple[int, ...] = ()
    if hooks.loaded_blocks is not None:
        loaded = hooks.loaded_blocks.tensor_shares
    sequence = None
    if plan.split_scheme == "sequence":
        sequence = hooks.anatomy.token_streams
    table = find_tensor_table(model, hooks.anatomy.tensor)
    check_unsharded(model, sequence)
    weights = plan.tensor_weights
    TensorCuts.match_tensor_table(model, table, axis.index, axis.num_ranks, weights=weights, loaded=loaded)
    return {"table": table, "sequence": sequence, "weights": weights, "loaded": loaded, "keep": keep}
