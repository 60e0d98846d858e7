"""Tries what a user put on a model, before rows or tokens of its calls are computed apart.

The table of anatomies says of diffusers' own code that images of a batch do not see each other, and tokens see each
other in attention alone; for a user's own class the derivation says so. A hook, a forward or a processor that somebody
put on the model may do anything. So the first call that a runner makes with it is first made on copies, which share the
weights: once as it is, and again with some images, or some tokens, replaced. The rest must come out as before.

Each copy is used for one call, because what is tried may count calls, and what it counts must not differ afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn

from ditile.distributed.heartbeat import is_out_of_memory
from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import gather_json
from ditile.model.hooks.attention_hooks import AttentionWatch, repeat_heads
from ditile.model.hooks.block_calls import give_streams, put_tokens_second, read_streams
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import BlockHook, advise_whole_tokens
from ditile.model.hooks.compile import wrap_model_call
from ditile.model.hooks.overrides import list_parameter_names
from ditile.model.hooks.pieces import list_predictions
from ditile.parallel.batch.denoise import DataCfgBatch
from ditile.parallel.pipefusion.loop import Loop
from ditile.plan.anatomy import ListAnatomy
from ditile.plan.errors import ModelError, StateError, describe_class_and_text
from ditile.plan.plan import Plan
from ditile.runner.user_code import (
    CANNOT_CALL,
    UserCode,
    copy_model,
    keep_globals,
    list_code_of_tokens,
    list_user_code,
)

TOLERANCE = 1e-4
"""Of the largest value, in float32: what does not depend on something is the same to the last bits."""
PIPELINED = "warmup_mode=pipelined"
ResultT = TypeVar("ResultT")


@dataclass
class CodeTrial:
    """Tries what the user put on the models of a pipeline, in the first call of a runner that has it.

    Args:
        plan: how they are divided.
        owned: the blocks whose weights this rank has.

    Attributes:
        is_due: whether the current call has something that was not tried; the same on every rank.
    """

    pipe: Any
    models: Sequence[TransformerHooks]
    plan: Plan
    mesh: Mesh
    owned: range
    is_due: bool = False
    _codes: list[list[UserCode]] = field(default_factory=list)
    _tried_rows: list[UserCode] = field(default_factory=list)
    _tried_tokens: list[UserCode] = field(default_factory=list)

    @property
    def _divides_rows(self) -> bool:
        return self.plan.data * self.plan.cfg > 1 or self.plan.warmup_mode == "pipelined"

    @property
    def _divides_tokens(self) -> bool:
        """Whether tokens of every call are computed apart; in stale steps they always are."""
        return self.plan.token_ranks > 1 or self.plan.warmup_mode in ("sequence", "separate")

    def find_new_code(self) -> bool:
        """Looks at the models; returns whether something is on them that this rank did not try."""
        # With shared streams the blocks of a copy would wait for the shares of a runner.
        if self.plan.tensor > 1 and self.plan.split_scheme == "sequence":
            return False
        may_divide_tokens = self._divides_tokens or self.plan.attends_to_stale_keys
        if not (self._divides_rows or may_divide_tokens):
            return False
        self._codes = [list_user_code(hooks.transformer) for hooks in self.models]
        codes = self._list_codes()
        if not codes:
            return False
        has_new_rows = self._divides_rows and not _are_same(codes, self._tried_rows)
        return has_new_rows or (may_divide_tokens and not _are_same(codes, self._tried_tokens))

    def _list_codes(self) -> list[UserCode]:
        """What is on all models."""
        codes: list[UserCode] = []
        for codes_of_model in self._codes:
            codes += codes_of_model
        return codes

    def prepare_call(self, loop: Loop, batch: DataCfgBatch) -> Callable[[ExitStack], None]:
        """Makes the copies that a trial needs, before anything of a call lies on the models.

        Returns:
            What puts the trial around the models, until a stack is closed.
        """
        if not self.is_due:
            return lambda stack: None
        originals: list[nn.Module] = []
        refusal: str | None = None
        try:
            for hooks, codes in zip(self.models, self._codes, strict=True):
                originals.append(copy_model(self.pipe, hooks.transformer, codes))
        except (ModelError, StateError) as error:
            # Other ranks may have nothing that cannot be copied, and wait for this one's word in the trial.
            refusal = str(error)

        def is_time() -> bool:
            now = loop.generation
            # A replica without images does not rehearse: the trial comes where all ranks are, in the first step.
            return self.is_due and now.is_under_way and not (now.is_dry and batch.has_idle_replica)

        def wrap_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
            def try_before(*args: Any, **kwargs: Any) -> Any:
                if is_time():
                    self.is_due = False
                    self._try_call(originals, refusal, loop, batch, args, kwargs)
                return forward(*args, **kwargs)

            return functools.update_wrapper(try_before, forward)

        def install_trial(stack: ExitStack) -> None:
            for hooks in self.models:
                wrap_model_call(stack, self.pipe, hooks.transformer, wrap_forward)

        return install_trial

    def _try_call(
        self,
        originals: Sequence[nn.Module],
        refusal: str | None,
        loop: Loop,
        batch: DataCfgBatch,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Raises `ModelError` on every rank if one finds what depends on something that is computed apart."""
        divides_tokens = self._divides_tokens or loop.generation.schedule.has_stale_steps
        refusal = agree_on_refusal(refusal, self.mesh)
        if refusal is None:
            refusal = self._try_models(originals, batch, args, kwargs, divides_tokens=divides_tokens)
        if refusal is not None:
            # In the first step receives of stages are posted, so this call is one that has failed.
            if not batch.has_idle_replica:
                loop.withdraw_generation()
            raise ModelError(refusal)
        if self._divides_rows:
            self._tried_rows = self._list_codes()
        if divides_tokens:
            self._tried_tokens = self._list_codes()

    def _try_models(
        self,
        originals: Sequence[nn.Module],
        batch: DataCfgBatch,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        divides_tokens: bool,
    ) -> str | None:
        """Why something cannot be computed apart, the same on every rank, or None."""
        refusal: str | None = None
        # A call without stale steps leaves the question of tokens to a later one, which need not ask about rows again.
        asks_for_rows = not _are_same(self._list_codes(), self._tried_rows)
        for hooks, original, codes in zip(self.models, originals, self._codes, strict=True):
            trial = _ModelTrial(self, hooks, original, codes)
            has_code = asks_for_rows and bool(codes)
            has_code_of_tokens = bool(list_code_of_tokens(hooks.transformer, codes))
            # Ranks that hold shares of one model's weights make its calls together.
            everyone = gather_json([has_code, has_code_of_tokens], self.mesh.within_calls)
            if self._divides_rows and any(has_code for has_code, _ in everyone):
                refusal = refusal or trial.find_dependent_rows(batch, args, kwargs)
            if divides_tokens and hooks.chain and any(has_code for _, has_code in everyone):
                refusal = refusal or trial.find_dependent_tokens(args, kwargs)
        return refusal


def agree_on_refusal(refusal: str | None, mesh: Mesh) -> str | None:
    """The first refusal of any rank, on every rank."""
    return next(filter(None, gather_json(refusal, mesh.within_calls)), None)


def _are_same(codes: Sequence[UserCode], others: Sequence[UserCode]) -> bool:
    """Whether the same things are in the same places."""
    places = [(code.path, id(code.code)) for code in codes]
    return places == [(code.path, id(code.code)) for code in others]


class _ModelTrial:
    """The trial of one model.

    Args:
        hooks: of the model, of which `original` is a copy.
    """

    def __init__(
        self, trial: CodeTrial, hooks: TransformerHooks, original: nn.Module, codes: Sequence[UserCode]
    ) -> None:
        self._trial = trial
        self._hooks = hooks
        self._original = original
        self._codes = codes
        self._device = next(original.parameters()).device
        self._tolerance = TOLERANCE
        dtypes = [parameter.dtype for parameter in original.parameters() if parameter.is_floating_point()]
        if dtypes:
            # Sums may round differently where rows or tokens are grouped by their values, as for experts.
            self._tolerance = max(TOLERANCE, 4 * torch.finfo(dtypes[0]).eps)

    def find_dependent_rows(self, batch: DataCfgBatch, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Why rows of a call cannot be computed apart, the same on every rank, or None."""
        whole = batch.list_rows(args, kwargs)
        # Two images are enough: the first one, which others may look at, and the last one.
        images = sorted({0, whole.num_images - 1})
        trials = list(_iterate_row_trials(self._trial.plan, whole.num_branches, len(images)))
        if not trials:
            return None
        places = []
        for branch in whole.branches:
            places += [branch * whole.num_images + image for image in images]
        rows = torch.tensor(places)
        unchanged = batch.change_rows(args, kwargs, functools.partial(_pick_rows, rows))
        # Every rank computes all rows of a call in which it is not known what has rows.
        if unchanged is None:
            return None
        before, refusal = self._call_together(functools.partial(self._predict, *unchanged))
        for axis, problem, first in trials:
            explanation = self._explain(self._codes, problem, axis, _advise_rows(axis))
            for changed in (first, ~first):
                if refusal is not None:
                    return refusal
                altered = batch.change_rows(args, kwargs, functools.partial(_alter_rows, rows, changed))
                if altered is None:
                    return None
                compare = functools.partial(self._compare_rows, before, ~changed, explanation)
                _, refusal = self._call_together(functools.partial(self._predict, *altered), compare)
        return refusal

    def _compare_rows(self, before: list[Tensor], kept: Tensor, explanation: str, after: list[Tensor]) -> str | None:
        """The explanation, if rows that were kept have changed."""
        places = kept.nonzero().flatten()
        for x, y in zip(before, after, strict=True):
            has_rows = len(x) == len(kept)
            if has_rows and self._differ(x[places.to(x.device)], y[places.to(y.device)]):
                return explanation
        return None

    def find_dependent_tokens(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Why tokens of a call cannot be computed apart, the same on every rank, or None."""
        watch = functools.partial(self._watch_tokens, args, kwargs)
        before, refusal = self._call_together(functools.partial(watch, _change_no_tokens))

        def compare(after: list[WatchedTokens]) -> str | None:
            for x, y in zip(before, after, strict=True):
                kept = ~y.changed
                if self._differ(x.digest[..., kept], y.digest[..., kept]):
                    return self._explain_tokens(x.block)
            return None

        for choose in (_choose_tokens, _choose_other_tokens):
            if refusal is not None:
                return refusal
            _, refusal = self._call_together(functools.partial(watch, choose), compare)
        return refusal

    def _call_together(
        self, call: Callable[[], list[ResultT]], compare: Callable[[list[ResultT]], str | None] | None = None
    ) -> tuple[list[ResultT], str | None]:
        """The result of a call on a copy, and why any rank refuses it; `compare` says what is wrong with it."""
        # Ranks that hold shares of the weights wait for each other in every call, so none makes one more than others.
        result: list[ResultT] = []
        refusal: str | None = None
        try:
            result = call()
            if compare is not None:
                refusal = compare(result)
        except ModelError as error:
            refusal = str(error)
        except CANNOT_CALL as error:
            # A full GPU says nothing of what the user put on the model.
            if is_out_of_memory(error):
                raise
            refusal = (
                f"{self._describe(self._codes)}, and a call that tries whether that may be divided ended in "
                f"{describe_class_and_text(error)}; take it off"
            )
        return result, agree_on_refusal(refusal, self._trial.mesh)

    def _predict(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        with ExitStack() as stack:
            model = self._copy_for_call(stack)
            if len(self._trial.owned) < len(self._hooks.chain):
                self._watch_blocks(model, _TokenWatch(_change_no_tokens))
            return list_predictions(self._call(model, args, kwargs))

    def _watch_tokens(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], choose: ChooseTokens
    ) -> list[WatchedTokens]:
        """The inputs of all blocks in a call in which some tokens are changed."""
        watch = _TokenWatch(choose)
        with ExitStack() as stack:
            model = self._copy_for_call(stack)
            self._watch_blocks(model, watch)
            stack.enter_context(AttentionWatch(_attend_apart))
            self._call(model, args, kwargs)
        return watch.seen

    def _call(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a copy. Raises `RuntimeError` if it uses random numbers."""
        read_state: Callable[[], Tensor] = torch.get_rng_state
        if self._device.type == "cuda":
            read_state = functools.partial(torch.cuda.get_rng_state, self._device)
        before = read_state()
        result = model(*args, **kwargs)
        if not torch.equal(before, read_state()):
            raise RuntimeError("it uses random numbers, which differ for a part of a call")
        return result

    def _copy_for_call(self, stack: ExitStack) -> nn.Module:
        """A copy of the model for one call, after which random states and what functions keep are as before."""
        devices = [self._device] if self._device.type == "cuda" else []
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(attention_backend("native"))
        stack.enter_context(keep_globals(self._codes))
        return copy_model(self._trial.pipe, self._original, list_user_code(self._original))

    def _watch_blocks(self, model: nn.Module, watch: _TokenWatch) -> None:
        """Shows the inputs of blocks to a watch; blocks of other stages pass them on."""
        last = self._hooks.chain[-1].index
        for hook in self._hooks.chain:
            block = model.get_submodule(hook.name.rpartition(":")[2])
            forward = block.forward if hook.index in self._trial.owned else None
            names = list_parameter_names(hook.block)
            block.forward = functools.partial(watch.visit_block, hook, names, forward, hook.index == last)

    def _differ(self, x: Tensor, y: Tensor) -> bool:
        if not x.numel():
            return False
        x = x.float()
        difference = float((x - y.float()).abs().max())
        # Written so that NaN differs.
        return not difference <= self._tolerance * float(x.abs().max())

    def _explain_tokens(self, block: str) -> str:
        """That tokens change each other in a block."""
        codes = list_code_of_tokens(self._hooks.transformer, self._codes)
        inside = [code for code in codes if f"{code.path}.".startswith(f"{block}.")]
        problem = "tokens change each other outside of attention"
        return self._explain(inside or codes, problem, self._name_token_axis(), self._advise_tokens())

    def _explain(self, codes: Sequence[UserCode], problem: str, axis: str, remedy: str) -> str:
        return (
            f"{self._describe(codes)}, with which {problem}, and {axis} computes them apart; {remedy}, or take it off"
        )

    def _describe(self, codes: Sequence[UserCode]) -> str:
        name = type(self._original).__name__
        if not codes:
            return f"{name} has on another rank what is not diffusers'"
        path = f"{name}.{codes[0].path}".rstrip(".")
        return f"{path} has {codes[0].description}"

    def _name_token_axis(self) -> str:
        """The first of what divides tokens in a plan."""
        plan = self._trial.plan
        for name in ("ulysses", "ring", "distrifusion"):
            if getattr(plan, name) > 1:
                return f"{name}={getattr(plan, name)}"
        if plan.warmup_mode in ("sequence", "separate"):
            return f"warmup_mode={plan.warmup_mode}"
        return f"patches={plan.num_patches}"

    def _advise_tokens(self) -> str:
        """What would work instead of what divides tokens."""
        plan = self._trial.plan
        if plan.token_ranks > 1:
            return advise_whole_tokens(self._hooks.transformer, self._hooks.anatomy, plan)
        if plan.warmup_mode in ("sequence", "separate"):
            return "use warmup_mode=serial with warmup equal to the steps"
        return "use warmup equal to the steps"


def _iterate_row_trials(plan: Plan, branches: int, images: int) -> Iterator[tuple[str, str, Tensor]]:
    """What divides rows, what would be wrong with that, and a mark for each row of `[branches, images]` apart."""
    is_pipelined = plan.warmup_mode == "pipelined"
    grid = torch.zeros(branches, images, dtype=torch.bool)
    if images > 1 and (plan.data > 1 or is_pipelined):
        axis = f"data={plan.data}" if plan.data > 1 else PIPELINED
        first = grid.index_fill(1, torch.tensor([0]), True)
        yield axis, "images of a batch change each other", first.flatten()
    if branches > 1 and (plan.cfg > 1 or is_pipelined):
        axis = f"cfg={plan.cfg}" if plan.cfg > 1 else PIPELINED
        first = grid.index_fill(0, torch.arange(branches // 2), True)
        yield axis, "branches of guidance change each other", first.flatten()


def _advise_rows(axis: str) -> str:
    if axis == PIPELINED:
        return "use warmup_mode=serial"
    name, _, _ = axis.partition("=")
    return f"use {name}=1"


def _pick_rows(rows: Tensor, values: Any) -> Any:
    """Some rows of a tensor, or of a list with an item for each row."""
    if isinstance(values, Tensor):
        return values[rows.to(values.device)]
    return [values[row] for row in rows.tolist()]


def _alter_rows(rows: Tensor, changed: Tensor, values: Any) -> Any:
    """The same with other numbers in the marked rows."""
    picked = _pick_rows(rows, values)
    if isinstance(picked, list):
        for index in changed.nonzero().flatten().tolist():
            picked[index] = _alter(picked[index])
        return picked
    marks = changed.to(picked.device).view(-1, *[1] * (picked.ndim - 1))
    return torch.where(marks, _alter(picked), picked)


def _alter(x: Any) -> Any:
    """Other numbers, which a norm does not make the same again; what may be an index or a time stays."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        return x
    return x.flip(-1) * 2 + 1


class WatchedTokens(NamedTuple):
    """The input of a block, or the result of the last one.

    Attributes:
        digest: a few numbers of each token, `[numbers, rows, tokens]`.
        changed: which tokens were changed before the first block.
    """

    block: str
    digest: Tensor
    changed: Tensor


ChooseTokens = Callable[[int], Tensor]
"""A number of tokens -> which of them are changed."""


def _choose_tokens(length: int) -> Tensor:
    """About half of the tokens, the first one among them, and the last one not."""
    chosen = torch.rand(length, generator=torch.Generator().manual_seed(length)) < 0.5
    chosen[:1] = True
    chosen[-1:] = False
    return chosen


def _choose_other_tokens(length: int) -> Tensor:
    return ~_choose_tokens(length)


def _change_no_tokens(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.bool)


class _TokenWatch:
    """Changes tokens before the first block, and looks at the inputs of all blocks.

    Args:
        choose: which tokens are changed.
    """

    def __init__(self, choose: ChooseTokens) -> None:
        self.seen: list[WatchedTokens] = []
        self._choose = choose
        self._block_before = ""
        self._changed_image = torch.zeros(0, dtype=torch.bool)
        self._changed_text = torch.zeros(0, dtype=torch.bool)

    def visit_block(
        self,
        hook: BlockHook,
        names: Sequence[str],
        forward: Callable[..., Any] | None,
        is_last: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The result of a block; without a forward its inputs are handed on."""
        anatomy = hook.anatomy
        call = dict(zip(names, args, strict=False)) | kwargs
        image, text = read_streams(anatomy, call)
        if "text" not in anatomy.returns:
            text = None
        if hook.index == 0:
            image, text = self._change_tokens(anatomy, image, text)
            call[anatomy.image] = image
            if text is not None:
                call[anatomy.text or ""] = text
        self._record(self._block_before or hook.name, anatomy, image, text)
        self._block_before = hook.name.rpartition(":")[2]
        if forward is None:
            out = give_streams(anatomy, image, text)
        else:
            positional = [call.pop(name) for name in names[: len(args)]]
            out = forward(*positional, *args[len(names) :], **call)
        if is_last:
            streams: dict[str, Any] = {"image": out}
            if anatomy.is_tuple:
                streams = dict(zip(anatomy.returns, out, strict=True))
            self._record(self._block_before, anatomy, streams["image"], streams.get("text"))
        return out

    def _change_tokens(self, anatomy: ListAnatomy, image: Tensor, text: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self._changed_image = self._choose(image.shape[anatomy.tokens]).to(image.device)
        image = _alter_tokens(anatomy, image, self._changed_image)
        if text is not None:
            self._changed_text = self._choose(text.shape[anatomy.tokens]).to(text.device)
            text = _alter_tokens(anatomy, text, self._changed_text)
        return image, text

    def _record(self, block: str, anatomy: ListAnatomy, image: Tensor, text: Tensor | None) -> None:
        num_tokens = image.shape[anatomy.tokens]
        changed_image = self._changed_image.to(image.device)
        changed_text = self._changed_text.to(image.device)
        if num_tokens != len(changed_image):
            # The image has the text with it. Text that the forward adds later was not changed.
            missing = num_tokens - len(changed_image) - len(changed_text)
            changed_text = torch.cat([changed_text, changed_text.new_zeros(max(missing, 0))])
            parts = [changed_text, changed_image]
            if anatomy.joint == "image_first":
                parts.reverse()
            changed_image = torch.cat(parts)
        for stream, changed in ((image, changed_image), (text, self._changed_text)):
            if stream is not None and stream.shape[anatomy.tokens] == len(changed):
                tokens = put_tokens_second(stream, anatomy).float()
                digest = torch.stack([torch.linalg.vector_norm(tokens, dim=-1), tokens.mean(dim=-1)])
                self.seen.append(WatchedTokens(block, digest, changed))


def _alter_tokens(anatomy: ListAnatomy, stream: Tensor, changed: Tensor) -> Tensor:
    shape = [1] * stream.ndim
    shape[anatomy.tokens] = -1
    return torch.where(changed.view(shape), _alter(stream), stream)


def _attend_apart(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attention in which each token sees itself alone: whatever else reaches a token comes another way."""
    query, key, value = (x.movedim(-2, 1) for x in (query, key, value))
    own = query.mean(dim=-1, keepdim=True)
    # The keys of a text, or of more than the tokens.
    if query.shape[1] != key.shape[1]:
        return own.expand(*own.shape[:-1], value.shape[-1]).movedim(1, -2)
    if query.ndim == 4:
        key = repeat_heads(key, query.shape[2])
        value = repeat_heads(value, query.shape[2])
    return (value + own + key.mean(dim=-1, keepdim=True)).movedim(1, -2)
