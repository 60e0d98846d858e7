"""Tries what a user put on a model, before rows or tokens of its calls are computed apart.

The table of anatomies says of diffusers' own code that images of a batch do not see each other, and tokens in attention
alone; what was derived says so of a class of the user's. A hook, a forward or a processor that somebody put on the
model may do anything. So the first call that a runner makes with it is made on copies before, which share the weights:
once as it is, and again with other images in place of some, or other tokens in place of some. Those that were left as
they were must come out as before.

A copy is used for one call, because what is tried may count calls, and what it counts must not differ afterwards.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from ditile.cache.cached import find_transformer_cache
from ditile.distributed.heartbeat import is_out_of_memory
from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import gather_json
from ditile.model.hooks.attention_hooks import repeat_heads
from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.model.hooks.block_calls import give_streams, put_tokens_second, read_streams
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import BlockHook, advise_whole_tokens
from ditile.model.hooks.compile import wrap_model_call
from ditile.model.hooks.overrides import IN_CALL, list_parameter_names
from ditile.model.hooks.pieces import list_predictions
from ditile.model.hooks.placeholders import allow_copies
from ditile.model.source import list_pipeline_parts
from ditile.parallel.batch.denoise import DataCfgBatch
from ditile.parallel.pipefusion.loop import Loop
from ditile.plan.anatomy import ListAnatomy
from ditile.plan.errors import ModelError, StateError
from ditile.plan.plan import Plan

TOLERANCE = 1e-4
"""Of the largest value, in float32: what does not depend on something is the same to the last bits."""

KNOWN_PACKAGES = sys.stdlib_module_names | {
    "accelerate", "bitsandbytes", "diffusers", "ditile", "huggingface_hub", "peft", "torch", "torchao", "transformers",
}  # fmt: skip
"""Whose code computes each row by itself, and tokens as the anatomies say."""

CANNOT_CALL = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, AssertionError)
"""What a model raises whose call cannot be made again on a copy."""

ResultT = TypeVar("ResultT")

_PLACES_OF_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class UserCode(NamedTuple):
    """Something on a model that none of the known packages put there.

    Attributes:
        path: of the module that has it, within the model.
        what: it is, in words.
        code: itself.
        is_of_class: whether it belongs to the class of a module, not to an instance.
    """

    path: str
    what: str
    code: object
    is_of_class: bool = False


def list_user_code(model: nn.Module) -> list[UserCode]:
    """What on a model and its parts is not of the known packages."""
    listed: list[UserCode] = []
    classes: dict[type, str] = {}
    for path, module in model.named_modules():
        classes.setdefault(type(module), path)
        for hook in _list_hooks(module):
            if _is_unknown(hook):
                listed.append(UserCode(path, f"the hook {_name(hook)}", hook))
        listed += _list_attributes(path, module)
        if isinstance(module, _NormBase) and (module.training or module.running_mean is None):
            listed.append(UserCode(path, f"a {type(module).__name__} of the statistics of its input", type(module)))
    for cls, path in classes.items():
        listed += _list_class_code(cls, path)
    return listed


def _list_attributes(path: str, module: nn.Module) -> Iterator[UserCode]:
    """What a module has as an attribute of its own: a forward, a processor, hooks of diffusers or accelerate."""
    for name, value in vars(module).items():
        if name == "_diffusers_hook":
            hooks = list(value.hooks.values())
        elif name == "_hf_hook":
            hooks = list(getattr(value, "hooks", [value]))
        elif callable(value) and not isinstance(value, type | nn.Module) and _is_unknown(value):
            yield UserCode(path, f"the {'attention processor' if name == 'processor' else name} {_name(value)}", value)
            continue
        else:
            continue
        for hook in hooks:
            if _is_unknown(hook):
                yield UserCode(path, f"the hook {_name(hook)}", hook)


def _list_class_code(cls: type, path: str) -> Iterator[UserCode]:
    """A class of the user's, or functions of the user's in a class of diffusers."""
    if cls.__module__.split(".")[0] not in KNOWN_PACKAGES:
        yield UserCode(path, f"the class {cls.__name__}", cls, is_of_class=True)
        return
    for base in cls.__mro__:
        if not base.__module__.startswith("diffusers."):
            continue
        for name, function in vars(base).items():
            if isinstance(function, FunctionType) and _is_unknown(function):
                yield UserCode(path, f"another {base.__name__}.{name}", function)


def _is_unknown(code: Any) -> bool:
    return _find_package(code) not in KNOWN_PACKAGES


def _find_package(code: Any) -> str:
    """The package of a function, or of the class of an object."""
    code = _unwrap_function(code)
    if isinstance(code, FunctionType):
        # Not by `__module__`: a function that wraps another one has that one's.
        return str(code.__globals__.get("__name__", "")).split(".")[0]
    return type(code).__module__.split(".")[0]


def _unwrap_function(code: Any) -> Any:
    """The function of a method or a partial call."""
    while isinstance(code, functools.partial):
        code = code.func
    return getattr(code, "__func__", code)


def _name(code: Any) -> str:
    code = _unwrap_function(code)
    return str(getattr(code, "__name__", type(code).__name__))


def copy_model(pipe: Any, model: nn.Module, codes: Sequence[UserCode]) -> nn.Module:
    """A copy of a pipeline's model that shares its weights, and what of it is the pipeline's or ditile's.

    Args:
        pipe, model: the pipeline and its model.
        codes: what is on the model.

    Raises:
        ModelError: if something on it cannot be copied.
    """
    shared = [pipe, *model.parameters(), *model.buffers()]
    shared += [part for part in list_pipeline_parts(pipe).values() if part is not model]
    for module in model.modules():
        values = [*vars(module).values(), *_list_hooks(module)]
        # Ranks and their messages cannot be copied.
        shared += [value for value in values if _find_package(value) == "ditile" and not isinstance(value, nn.Module)]
    functions = _FunctionCopies(model)
    memo = {id(value): value for value in shared} | functions.copies
    cache = find_transformer_cache(model)
    try:
        with nullcontext() if cache is None else cache.lift_hooks(), allow_copies(model):
            copied = copy.deepcopy(model, memo)
    except CANNOT_CALL as error:
        what = " and ".join(code.what for code in codes[:2])
        raise ModelError(
            f"{type(model).__name__} has {what}, and cannot be copied to try that: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; take it off"
        ) from error
    functions.fill_variables(memo)
    for module in copied.modules():
        functions.rebind_methods(module)
    for _, _, processor in find_attention_processors(copied):
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = AttentionBackendName.NATIVE
    vars(copied)[IN_CALL] = True
    return copied


def _list_hooks(module: nn.Module) -> list[Any]:
    return [hook for place in _PLACES_OF_HOOKS for hook in vars(module)[place].values()]


class _FunctionCopies:
    """Copies of the functions on a model, with variables of their own in place of those that functions keep.

    Args:
        model: has them.

    Attributes:
        copies: by the `id` of each function.
    """

    def __init__(self, model: nn.Module) -> None:
        self.copies: dict[int, Any] = {}
        self._functions: list[FunctionType] = []
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        for module in model.modules():
            for value in (*vars(module).values(), *_list_hooks(module)):
                function = _unwrap_function(value)
                if isinstance(function, FunctionType) and id(function) not in self.copies:
                    self._copy_function(function)

    def _copy_function(self, function: FunctionType) -> None:
        # What ditile put on the model knows its ranks.
        if _find_package(function) == "ditile":
            return
        cells = [self._cells.setdefault(id(cell), (cell, CellType())) for cell in function.__closure__ or ()]
        closure = tuple(copied for _, copied in cells) or None
        self.copies[id(function)] = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, closure
        )
        self._functions.append(function)

    def fill_variables(self, memo: dict[int, Any]) -> None:
        """Gives the copies what the functions have in their variables, once the model was copied."""
        for cell, copied_cell in self._cells.values():
            try:
                value = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            copied_cell.cell_contents = _copy_value(value, memo)
        for function in self._functions:
            copied = self.copies[id(function)]
            if function.__defaults__ is not None:
                copied.__defaults__ = tuple(_copy_value(value, memo) for value in function.__defaults__)
            if function.__kwdefaults__ is not None:
                copied.__kwdefaults__ = {n: _copy_value(value, memo) for n, value in function.__kwdefaults__.items()}

    def rebind_methods(self, module: nn.Module) -> None:
        """Puts copies of functions into the methods that were made of them for a module."""
        for namespace in (vars(module), *(vars(module)[place] for place in _PLACES_OF_HOOKS)):
            for name, value in namespace.items():
                if isinstance(value, MethodType) and id(value.__func__) in self.copies:
                    namespace[name] = MethodType(self.copies[id(value.__func__)], value.__self__)


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what a function keeps; what cannot be copied, such as a file, is shared."""
    try:
        return copy.deepcopy(value, memo)
    except CANNOT_CALL:
        return value


@contextmanager
def keep_globals(codes: Sequence[UserCode]) -> Iterator[None]:
    """Puts numbers and containers back that functions on a model keep in variables of their module."""
    variables: list[tuple[dict[str, Any], str, Any, Any]] = []
    for code in codes:
        function = _unwrap_function(code.code)
        for name in function.__code__.co_names if isinstance(function, FunctionType) else ():
            value = function.__globals__.get(name)
            if isinstance(value, int | float | list | dict | set):
                variables.append((function.__globals__, name, value, copy.copy(value)))
    try:
        yield
    finally:
        for namespace, name, value, before in variables:
            namespace[name] = value
            if isinstance(value, list):
                value[:] = before
            elif isinstance(value, dict | set):
                value.clear()
                value.update(before)


@dataclass
class CodeTrial:
    """Tries what the user put on the models of a pipeline, in the first call of a runner that has it.

    Args:
        pipe: the pipeline.
        models: the hooks of its models.
        plan: how they are divided.
        mesh: the ranks.
        owned: the blocks whose weights this rank has.

    Attributes:
        is_due: whether the call under way has something that was not tried; the same on every rank.
    """

    pipe: Any
    models: Sequence[TransformerHooks]
    plan: Plan
    mesh: Mesh
    owned: range
    is_due: bool = False
    _codes: list[list[UserCode]] = field(default_factory=list)
    _tried: dict[str, list[UserCode]] = field(default_factory=dict)

    @property
    def _divides_rows(self) -> bool:
        return self.plan.data * self.plan.cfg > 1 or self.plan.warmup_mode == "pipelined"

    @property
    def _divides_tokens(self) -> bool:
        """Whether tokens of every call are computed apart; in stale steps they are so too."""
        return self.plan.token_ranks > 1 or self.plan.warmup_mode in ("sequence", "separate")

    @property
    def _can_copy(self) -> bool:
        """Whether a copy of a model can be called: with shared streams its blocks wait for the shares of a runner."""
        return self.plan.tensor == 1 or self.plan.split_scheme == "row"

    def find_new_code(self) -> bool:
        """Looks at the models; returns whether something is on them that this rank did not try."""
        if not self._can_copy:
            return False
        kinds = {"rows": self._divides_rows, "tokens": self._divides_tokens or self.plan.attends_to_stale_keys}
        self._codes = [list_user_code(hooks.transformer) if any(kinds.values()) else [] for hooks in self.models]
        listed = list(itertools.chain(*self._codes))
        if not listed:
            return False
        return any(is_needed and not _are_same(listed, self._tried.get(kind, [])) for kind, is_needed in kinds.items())

    def prepare_call(self, loop: Loop, batch: DataCfgBatch) -> Callable[[ExitStack], None]:
        """Makes the copies that a trial needs, before anything of a call lies on the models.

        Args:
            loop: of the call.
            batch: knows the rows of a call.

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
        listed = list(itertools.chain(*self._codes))
        if self._divides_rows:
            self._tried["rows"] = listed
        if divides_tokens:
            self._tried["tokens"] = listed

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
        # A call without stale steps leaves the question of tokens to a later one, which need not ask of rows again.
        asks_of_rows = not _are_same(list(itertools.chain(*self._codes)), self._tried.get("rows", []))
        for hooks, original, codes in zip(self.models, originals, self._codes, strict=True):
            trial = _ModelTrial(self, hooks, original, codes)
            of_tokens = list_code_of_tokens(hooks.transformer, codes)
            # Ranks that hold shares of one model's weights make its calls together.
            has_code = gather_json([asks_of_rows and bool(codes), bool(of_tokens)], self.mesh.within_calls)
            if self._divides_rows and any(has_any for has_any, _ in has_code):
                refusal = refusal or trial.find_dependent_rows(batch, args, kwargs)
            if divides_tokens and hooks.chain and any(has_any for _, has_any in has_code):
                refusal = refusal or trial.find_dependent_tokens(args, kwargs)
        return refusal


def agree_on_refusal(refusal: str | None, mesh: Mesh) -> str | None:
    """The first refusal of any rank, on every rank."""
    return next(filter(None, gather_json(refusal, mesh.within_calls)), None)


def _are_same(codes: Sequence[UserCode], others: Sequence[UserCode]) -> bool:
    """Whether the same things are in the same places."""
    places = [(code.path, id(code.code)) for code in codes]
    return places == [(code.path, id(code.code)) for code in others]


def list_code_of_tokens(model: nn.Module, codes: Sequence[UserCode]) -> list[UserCode]:
    """What says of tokens something that is not known: the classes of a model of the user's were proven."""
    is_known = _find_package(model) in KNOWN_PACKAGES
    return [code for code in codes if is_known or not code.is_of_class]


class _ModelTrial:
    """The trial of one model.

    Args:
        trial: of the pipeline.
        hooks: of the model, of which `original` is a copy.
        codes: what is on it.
    """

    def __init__(
        self, trial: CodeTrial, hooks: TransformerHooks, original: nn.Module, codes: Sequence[UserCode]
    ) -> None:
        self._trial, self._hooks, self._original, self._codes = trial, hooks, original, codes
        self._device = next(original.parameters()).device
        dtypes = [parameter.dtype for parameter in original.parameters() if parameter.is_floating_point()]
        # Sums may round otherwise where rows or tokens are grouped by their values, as for experts.
        self._tolerance = max(TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in dtypes[:1]))

    def find_dependent_rows(self, batch: DataCfgBatch, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Why rows of a call cannot be computed apart, the same on every rank, or None."""
        whole = batch.list_rows(args, kwargs)
        # Two images do: the first one, which others may look at, and the last one.
        images = sorted({0, whole.num_images - 1})
        rows = torch.tensor([branch * whole.num_images + image for branch in whole.branches for image in images])
        before: list[Tensor] = []
        for axis, what, first in _list_row_trials(self._trial.plan, whole.num_branches, len(images)):
            for changed in (first, ~first):
                unchanged = batch.change_rows(args, kwargs, functools.partial(_pick_rows, rows))
                altered = batch.change_rows(args, kwargs, functools.partial(_alter_rows, rows, changed))
                # Every rank computes all rows of a call in which it is not known what has rows.
                if unchanged is None or altered is None:
                    return None
                if not before:
                    before, refusal = self._call_together(functools.partial(self._predict, *unchanged))
                    if refusal is not None:
                        return refusal

                explanation = self._explain(self._codes, what, axis, _advise_rows(axis))
                compare = functools.partial(self._compare_rows, before, ~changed, explanation)
                _, refusal = self._call_together(functools.partial(self._predict, *altered), compare)
                if refusal is not None:
                    return refusal
        return None

    def _compare_rows(self, before: list[Tensor], kept: Tensor, explanation: str, after: list[Tensor]) -> str | None:
        """The explanation, if rows that were kept are others than before."""
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
        if refusal is not None:
            return refusal

        def compare(after: list[WatchedTokens]) -> str | None:
            for x, y in zip(before, after, strict=True):
                kept = ~y.changed
                if self._differ(x.digest[..., kept], y.digest[..., kept]):
                    return self._explain_tokens(x.block)
            return None

        for choose in (_choose_tokens, _choose_other_tokens):
            _, refusal = self._call_together(functools.partial(watch, choose), compare)
            if refusal is not None:
                return refusal
        return None

    def _call_together(
        self, call: Callable[[], list[ResultT]], compare: Callable[[list[ResultT]], str | None] | None = None
    ) -> tuple[list[ResultT], str | None]:
        """What a call on a copy gives, and why any rank refuses it.

        Ranks that hold shares of the weights wait for each other in every call: so none of them makes a call more than
        the others.

        Args:
            call: on a copy.
            compare: says what is wrong with its result.
        """
        result: list[ResultT] = []
        refusal: str | None = None
        try:
            result = call()
            refusal = None if compare is None else compare(result)
        except ModelError as error:
            refusal = str(error)
        except CANNOT_CALL as error:
            # A full GPU says nothing of what the user put on the model.
            if is_out_of_memory(error):
                raise
            refusal = self._explain_error(error)
        return result, agree_on_refusal(refusal, self._trial.mesh)

    def _explain_tokens(self, block: str) -> str:
        """That tokens change each other in a block."""
        codes = list_code_of_tokens(self._hooks.transformer, self._codes)
        inside = [code for code in codes if f"{code.path}.".startswith(f"{block}.")]
        what = "tokens change each other outside of attention"
        return self._explain(inside or codes, what, self._name_token_axis(), self._advise_tokens())

    def _predict(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        with ExitStack() as stack:
            model = self._copy_for_call(stack)
            if len(self._trial.owned) < len(self._hooks.chain):
                self._watch_blocks(model, _TokenWatch(_change_no_tokens))
            return list_predictions(self._call(model, args, kwargs))

    def _watch_tokens(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], choose: ChooseTokens
    ) -> list[WatchedTokens]:
        """What blocks are given in a call in which some tokens are others."""
        watch = _TokenWatch(choose)
        with ExitStack() as stack:
            model = self._copy_for_call(stack)
            self._watch_blocks(model, watch)
            stack.enter_context(_TokensApart())
            self._call(model, args, kwargs)
        return watch.seen

    def _call(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a copy returns.

        Raises:
            RuntimeError: if it draws random numbers.
        """
        read_state: Callable[[], Tensor] = torch.get_rng_state
        if self._device.type == "cuda":
            read_state = functools.partial(torch.cuda.get_rng_state, self._device)
        before = read_state()
        result = model(*args, **kwargs)
        if not torch.equal(before, read_state()):
            raise RuntimeError("it draws random numbers, and for a part of a call these are others")
        return result

    def _copy_for_call(self, stack: ExitStack) -> nn.Module:
        """A copy of the model for one call, after which no random number was drawn, and nothing was counted."""
        devices = [self._device] if self._device.type == "cuda" else []
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(attention_backend("native"))
        stack.enter_context(keep_globals(self._codes))
        return copy_model(self._trial.pipe, self._original, list_user_code(self._original))

    def _watch_blocks(self, model: nn.Module, watch: _TokenWatch) -> None:
        """Lets something see what blocks are given; those of other stages pass it on."""
        last = self._hooks.chain[-1].index
        for hook in self._hooks.chain:
            block = model.get_submodule(hook.name.rpartition(":")[2])
            forward = block.forward if hook.index in self._trial.owned else None
            names = list_parameter_names(hook.block)
            block.forward = functools.partial(watch.visit_block, hook, names, forward, hook.index == last)

    def _differ(self, x: Tensor, y: Tensor) -> bool:
        if not x.numel():
            return False
        x, y = x.float(), y.float()
        difference = float((x - y).abs().max())
        return difference > self._tolerance * float(x.abs().max()) or difference != difference

    def _explain(self, codes: Sequence[UserCode], what: str, axis: str, remedy: str) -> str:
        return f"{self._describe(codes)}, with which {what}, and {axis} computes them apart; {remedy}, or take it off"

    def _explain_error(self, error: Exception) -> str:
        return (
            f"{self._describe(self._codes)}, and a call that tries whether that may be divided ended in "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}; take it off"
        )

    def _describe(self, codes: Sequence[UserCode]) -> str:
        name = type(self._original).__name__
        if not codes:
            return f"{name} has on another rank what is not diffusers'"
        return f"{f'{name}.{codes[0].path}'.rstrip('.')} has {codes[0].what}"

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
        """What would work in place of what divides tokens."""
        plan, model = self._trial.plan, self._hooks.transformer
        if plan.token_ranks > 1:
            return advise_whole_tokens(model, self._hooks.anatomy, plan)
        if plan.warmup_mode in ("sequence", "separate"):
            return "use warmup_mode=serial with warmup equal to the steps"
        return "use warmup equal to the steps"


PIPELINED = "warmup_mode=pipelined"


def _list_row_trials(plan: Plan, branches: int, images: int) -> Iterator[tuple[str, str, Tensor]]:
    """What divides rows, what would be wrong with that, and a mark for each row of `[branches, images]` apart."""
    is_pipelined = plan.warmup_mode == "pipelined"
    grid = torch.zeros(branches, images, dtype=torch.bool)
    if images > 1 and (plan.data > 1 or is_pipelined):
        first = grid.index_fill(1, torch.tensor([0]), True)
        axis = f"data={plan.data}" if plan.data > 1 else PIPELINED
        yield axis, "images of a batch change each other", first.flatten()
    if branches > 1 and (plan.cfg > 1 or is_pipelined):
        first = grid.index_fill(0, torch.arange(branches // 2), True)
        axis = f"cfg={plan.cfg}" if plan.cfg > 1 else PIPELINED
        yield axis, "branches of guidance change each other", first.flatten()


def _advise_rows(axis: str) -> str:
    return "use warmup_mode=serial" if axis == PIPELINED else f"use {axis.partition('=')[0]}=1"


def _pick_rows(rows: Tensor, values: Any) -> Any:
    """Some rows of a tensor, or of a list with an item for each row."""
    return values[rows.to(values.device)] if isinstance(values, Tensor) else [values[row] for row in rows.tolist()]


def _alter_rows(rows: Tensor, changed: Tensor, values: Any) -> Any:
    """The same with other numbers in those that are marked."""
    picked = _pick_rows(rows, values)
    if isinstance(picked, list):
        return [_alter(value) if is_changed else value for value, is_changed in zip(picked, changed, strict=True)]
    altered = _alter(picked)
    marks = changed.to(picked.device).view(-1, *[1] * (picked.ndim - 1))
    return torch.where(marks, altered, picked)


def _alter(x: Any) -> Any:
    """Other numbers, which a norm does not make the same again; what may be an index or a time stays."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        return x
    return x.flip(-1) * 2 + 1


class WatchedTokens(NamedTuple):
    """What a block was given, or the last one returned.

    Attributes:
        block: the one that made it.
        digest: a few numbers of each token, `[numbers, rows, tokens]`.
        changed: which tokens were changed in front of the first block.
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
    """Changes tokens in front of the first block, and sees what all blocks are given.

    Args:
        choose: which tokens are changed.
    """

    def __init__(self, choose: ChooseTokens) -> None:
        self.seen: list[WatchedTokens] = []
        self._choose, self._before = choose, ""
        self._image = self._text = torch.zeros(0, dtype=torch.bool)

    def visit_block(
        self,
        hook: BlockHook,
        names: Sequence[str],
        forward: Callable[..., Any] | None,
        is_last: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What a block returns; without a forward it passes on what it is given."""
        anatomy = hook.anatomy
        call = dict(zip(names, args, strict=False)) | kwargs
        image, text = read_streams(anatomy, call)
        if "text" not in anatomy.returns:
            text = None
        if not hook.index:
            image, text = self._change_tokens(anatomy, image, text)
            call[anatomy.image] = image
            if text is not None:
                call[anatomy.text or ""] = text
        self._note(self._before or hook.name, anatomy, image, text)
        self._before = hook.name.rpartition(":")[2]
        if forward is None:
            out = give_streams(anatomy, image, text)
        else:
            positional = [call.pop(name) for name in names[: len(args)]]
            out = forward(*positional, *args[len(names) :], **call)
        if is_last:
            named = dict(zip(anatomy.returns, out, strict=True)) if anatomy.is_tuple else {"image": out}
            self._note(self._before, anatomy, named["image"], named.get("text"))
        return out

    def _change_tokens(self, anatomy: ListAnatomy, image: Tensor, text: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self._image = self._choose(image.shape[anatomy.tokens]).to(image.device)
        image = _alter_tokens(anatomy, image, self._image)
        if text is not None:
            self._text = self._choose(text.shape[anatomy.tokens]).to(text.device)
            text = _alter_tokens(anatomy, text, self._text)
        return image, text

    def _note(self, block: str, anatomy: ListAnatomy, image: Tensor, text: Tensor | None) -> None:
        # Text that the forward puts to the image later was not changed.
        missing = image.shape[anatomy.tokens] - len(self._image) - len(self._text)
        changed = self._image.to(image.device)
        words = torch.cat([self._text.to(image.device), changed.new_zeros(max(missing, 0))])
        if image.shape[anatomy.tokens] != len(changed):
            parts = [changed, words] if anatomy.joint == "image_first" else [words, changed]
            changed = torch.cat(parts)
        for stream, marks in ((image, changed), (text, self._text)):
            if stream is not None and stream.shape[anatomy.tokens] == len(marks):
                tokens = put_tokens_second(stream, anatomy).float()
                digest = torch.stack([torch.linalg.vector_norm(tokens, dim=-1), tokens.mean(dim=-1)])
                self.seen.append(WatchedTokens(block, digest, marks))


def _alter_tokens(anatomy: ListAnatomy, stream: Tensor, changed: Tensor) -> Tensor:
    shape = [1] * stream.ndim
    shape[anatomy.tokens] = -1
    return torch.where(changed.view(shape), _alter(stream), stream)


class _TokensApart(TorchFunctionMode):
    """Attention in which each token sees itself alone: whatever comes to a token else comes by another way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        query, key, value = (named[name].movedim(-2, 1) for name in ("query", "key", "value"))
        own = query.mean(dim=-1, keepdim=True)
        if query.shape[1] != key.shape[1]:  # the keys of a text, or more than those of the tokens
            return own.expand(*own.shape[:-1], value.shape[-1]).movedim(1, -2)
        if query.ndim == 4:
            key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
        return (value + own + key.mean(dim=-1, keepdim=True)).movedim(1, -2)
