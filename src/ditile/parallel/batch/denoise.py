"""One call of the model, of which this rank computes some rows of the batch.

These hooks lie around all other hooks of the model. The pipeline gives and gets full-size tensors; the model sees the
rows of this replica's images and of this half's guidance branches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import AsyncMax, describe_dtype, gather_json
from ditile.model.hooks.batch_rows import BatchDimFinder
from ditile.model.hooks.compile import wrap_model_call
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.overrides import find_latents_parameter, list_parameter_names
from ditile.model.hooks.pieces import Piece
from ditile.model.hooks.token_arguments import find_unknown_rows, slice_rows
from ditile.model.step_memory import explain_branch_refusal
from ditile.parallel.batch.deferred import DeferredWork
from ditile.parallel.batch.shares import (
    BatchSlice,
    CfgExchange,
    Receivers,
    ReplicaImages,
    extract_predictions,
    fill_piece,
    replace_predictions,
)
from ditile.plan.anatomy import ROWS, Kinds, describe_mode
from ditile.plan.errors import ModelError, StateError


class DataCfgBatch:
    """The batch of one call of the pipeline, shared out over the axes data and cfg.

    Args:
        mesh: the axes, and groups for what must be agreed.
        models: what the pipeline calls, one or the other.
        images: how many the pipeline makes.
        batch_dims: finds which dimension of each argument of the models is the batch.
        inputs: the kinds of their arguments, where these are known.

    Attributes:
        num_images: how many the pipeline makes.
    """

    def __init__(
        self,
        mesh: Mesh,
        models: Sequence[nn.Module],
        *,
        images: int,
        batch_dims: BatchDimFinder,
        inputs: Mapping[str, Kinds] | None = None,
    ) -> None:
        self._mesh, self._models, self._model, self.num_images = mesh, models, models[0], images
        self._batch_dims = batch_dims
        self._data = ReplicaImages(mesh["data"], images, mesh.traffic)
        self._cfg = CfgExchange(mesh["cfg"], mesh.traffic)
        self._is_last = mesh.stage_index == mesh.num_stages - 1
        self._names, self._inputs, self._returns_list = list_parameter_names(self._model), inputs, False
        self._latents = find_latents_parameter(self._model)
        self.begin_generation()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no images."""
        return self._data.has_no_images

    @property
    def has_idle_replica(self) -> bool:
        """Whether some rank has no images."""
        return self._data.has_idle_replica

    @property
    def is_split_by_calls(self) -> bool:
        """Whether the halves compute calls of their own, now that the first step is over."""
        return self._by_calls and self._splits_calls(self._now.micro_step.step)

    def _splits_calls(self, step: int) -> bool:
        """Whether the halves compute calls of their own in a step.

        Where calls have another mode than in the step before, what they return may have another shape, and every rank
        computes all of them once.
        """
        if not self._by_calls or step == 0:
            return False
        whole = self._now.findings.whole_steps
        return step not in self._changed_steps and (step in whole) == (step - 1 in whole)

    def install_batch_hooks(
        self, stack: ExitStack, pipe: Any, now: Generation, *, first: bool, decodes_apart: bool = True
    ) -> None:
        """Hooks the batch into the model, and the images into the decoder, until the stack is closed.

        Args:
            now: the generation under way.
            first: whether rank 0 alone needs the pictures.
            decodes_apart: whether each replica decodes its own images; otherwise each decodes all of them.
        """
        if self._data.size == self._cfg.size == 1:
            return
        self._now = now

        def wrap_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
            return functools.update_wrapper(functools.partial(self._call_model, forward), forward)

        for model in self._models:
            wrap_model_call(stack, pipe, model, wrap_forward)
        if not decodes_apart:
            return
        to: Receivers = ("none" if self._mesh.image.index else "first") if first else "all"
        self._data.install_decoder(stack, getattr(pipe, "vae", None), to, lambda: self._over)

    # The loop

    def begin_generation(self) -> None:
        """A generation begins."""
        self._over = self._by_calls = False
        self._hole: Tensor | None = None
        self._predictions: dict[int, list[Tensor]] = {}
        self._results: dict[int, Any] = {}  # as the model returns them: bare, in a tuple or in an object
        self._modes: dict[int, str] = {}  # of each call of the step, when it was last made
        self._changed_steps: set[int] = set()  # in which calls have another mode than in the step before
        # What `_agree_on_rows` returns, by the shape of the model's noisy input.
        self._rows: dict[tuple[int, ...], tuple[list[tuple[str, list[int]]], bool]] = {}
        self._own_slice: BatchSlice | None = None  # of the last call
        self._num_branches: dict[int, int] = {}  # of each call of the step, when it was last made
        self._deferred = DeferredWork()

    def select_branches(self, step: int, calls: int) -> Sequence[int]:
        """Which of the calls of a step this rank computes."""
        if not self._splits_calls(step):
            return range(calls)
        return [call for call in range(calls) if self._cfg.is_own_call(call)]

    def check_prediction(self, prediction: Tensor, sample: Tensor) -> None:
        """Checks, when the scheduler is stepped, that the latents have a row for each image and all calls were made.

        Raises:
            ModelError: if the latents have other rows than the call asked for, or guidance is off and cfg has no use.
        """
        if self._data.size == self._cfg.size == 1:
            return
        now = self._now
        # One row for each image, or as many as the last call had.
        if sample.shape[0] not in (self.num_images, self.num_images * self._num_branches.get(now.branch - 1, 1)):
            raise ModelError(
                f"the latents have {sample.shape[0]} row(s) and the call asks for {self.num_images} image(s), so rows "
                "cannot be shared out; use a plan with data=1 and cfg=1"
            )
        if not self._by_calls:
            return
        if now.calls is None and now.branch < self._cfg.size:
            raise ModelError(
                f"cfg={self._cfg.size} shares out branches of guidance, and {type(self._model).__name__} was called "
                "once, with one row for each image; raise guidance_scale above 1, give the negative_prompt "
                "(--negative-prompt) that some pipelines want too, or use cfg=1"
            )
        if now.calls is None:
            self._deferred.end()
        # Guidance that ended: the calls that were made are all that there are.
        is_cut_short = now.calls is not None and 0 < now.branch < now.calls and self._splits_calls(now.micro_step.step)
        if is_cut_short and self._own_slice is not None and self._is_last and not self.is_idle:
            self._complete_calls(now.branch - 1, self._own_slice)
        if self._splits_calls(now.micro_step.step) and self._hole is None and self._is_last and not self.is_idle:
            # A NaN that the model itself did not make. It is read at the end, so that nothing waits for a GPU here.
            own = [prediction for calls in self._predictions.values() for prediction in calls]
            has_nan = torch.stack([torch.isnan(prediction).any() for prediction in own]).any()
            is_early = bool(self._deferred.problem)
            self._hole = torch.isnan(self._data.view_own_images(prediction)).any() & ~has_nan | is_early

    def check_streams(self, number: int) -> None:
        """Checks, at the end of an iteration, that each prediction of the model steps latents, which come together.

        Args:
            number: of schedulers that were stepped.

        Raises:
            ModelError: if there are more predictions.
        """
        predictions = max(map(len, self._predictions.values()), default=0)
        if self._data.size > 1 and number < predictions:
            raise ModelError(
                f"data={self._data.size}: {type(self._model).__name__} makes {predictions} predictions, and the "
                f"pipeline steps {number} scheduler(s) with them, whose latents alone come together; use data=1"
            )

    def view_own_images(self, batch: Tensor) -> Tensor:
        """A view of this rank's rows of `[images, ...]`."""
        return self._data.view_own_images(batch)

    def gather_latents(self, latents: Tensor) -> Tensor:
        """All latents, on the last stages of all replicas; they must all call it."""
        return self._data.gather_latents(latents)

    def end_generation(self) -> None:
        """The loop is over.

        Raises:
            StateError: if the pipeline used a prediction before it was filled in, and that could not be done again.
        """
        self._over = True
        by_calls, hole = self._by_calls, self._hole
        self._predictions.clear()
        self._results.clear()
        if not by_calls:
            return
        hole_max = AsyncMax(self._mesh.control, 0 if hole is None else int(hole), self._mesh.traffic)
        if hole_max.wait_for_max():
            raise StateError(
                "the pipeline used one prediction before it asked for the next, as it did not in its first step, and "
                "cfg=2 fills both in when the last is there; use cfg=1"
            )

    # A call of the model

    def _call_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = self._now
        # Outside of the loop all rows are every rank's, and every rank finds out by all rows where patches are.
        if now.is_dry or not now.is_under_way:
            return forward(*args, **kwargs)
        branch, step = now.branch, now.micro_step.step
        name, batch = self._find_noisy_input(args, kwargs)
        every = BatchSlice.from_batch_size(len(batch), self.num_images)
        if branch == step == 0 and now.calls is None:
            self._by_calls = self._cfg.size > 1 and every.num_branches == 1
            if self._by_calls and (reason := explain_branch_refusal(self._model)):
                raise ModelError(reason)
        before = self._num_branches.get(branch, every.num_branches)
        if every.num_branches != before and now.is_stale:
            raise StateError(
                f"the batch changed from {before} to {every.num_branches} branches of guidance in step {step}, and "
                "stale keys belong to branches; keep guidance on for the whole run, or use a plan without pipefusion, "
                "patches and distrifusion, such as ulysses"
            )
        self._num_branches[branch] = every.num_branches
        if self._by_calls and every.num_branches > 1:
            raise self._make_calls_error(now, every.num_branches * (branch + 1))
        self._own_slice = batch_slice = replace(every, images=self._data.images)
        mode = f"{describe_mode(kwargs)} {[tuple(x.shape) for x in pytree.tree_leaves(batch[:1])]}"
        if self._modes.setdefault(branch, mode) != mode:
            self._changed_steps.add(step)
        self._modes[branch] = mode
        # Every half computes a call that the step before did not have.
        by_calls = self._splits_calls(step) and now.calls is not None and branch < now.calls
        self._begin_deferred_work(now)
        if self.is_idle:
            return self._defer(self._make_idle_result(now, batch, kwargs), is_absent=False)
        if not by_calls:
            self._compute_batch_slice(forward, args, kwargs, self._cfg.restrict_to_half(batch_slice))
            if self._is_last:
                for k, prediction in enumerate(self._predictions[branch]):
                    self._cfg.exchange_branches(prediction, batch_slice, self._find_fresh_piece(now, branch, k))
        elif self._cfg.is_own_call(branch):
            self._compute_batch_slice(forward, args, kwargs, batch_slice)
        else:
            self._skip_foreign_call(now, batch_slice)
        is_complete = by_calls and self._is_last and branch + 1 == now.calls
        if is_complete:
            self._complete_calls(branch, batch_slice)
        result = self._hand_on(replace_predictions(self._results[branch], self._predictions[branch]))
        is_absent = by_calls and self._is_last and not is_complete and not self._cfg.is_own_call(branch)
        return self._defer(result, is_absent=is_absent)

    def _complete_calls(self, last: int, batch_slice: BatchSlice) -> None:
        """The last call of a step was made: all halves get the predictions of the others."""
        for k in range(len(self._predictions[last])):
            calls = [self._predictions[call][k] for call in range(last + 1)]
            self._cfg.exchange_calls(calls, batch_slice, self._find_fresh_piece(self._now, last, k))
        self._deferred.finish()

    def _begin_deferred_work(self, now: Generation) -> None:
        """A call of a step is next. In the first step every rank sees what cannot be done again.

        Raises:
            ModelError: if the pipeline uses the last prediction so that this could not be done again.
        """
        if not now.branch:
            self._deferred = DeferredWork()
        elif self._by_calls and now.calls is None and self._deferred.problem:
            raise ModelError(
                f"cfg={self._cfg.size} shares out calls of {type(self._model).__name__}, and the pipeline "
                f"{self._deferred.problem} before the next one is made, and so before it is there; use cfg=1"
            )

    def _defer(self, result: Any, *, is_absent: bool) -> Any:
        """A result whose uses are noted, if it is not there yet; in the first step any, to see whether they can be."""
        is_first = self._by_calls and self._now.calls is None
        return pytree.tree_map_only(Tensor, self._deferred.defer, result) if is_absent or is_first else result

    def _find_noisy_input(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, Sequence[Tensor]]:
        """The name of the noisy input, and its value: a tensor, or a list of its rows."""
        name = self._latents
        at = self._names.index(name)
        if at < len(args):
            batch = args[at]
        else:
            name = next((name for name in (name, "hidden_states", "sample") if name in kwargs), "")
            batch = kwargs.get(name)
        # A list of one has one row, whatever the model makes of longer ones.
        is_list = isinstance(batch, list) and (len(batch) == 1 or self._find_kinds(name) == (ROWS,))
        if not isinstance(batch, Tensor) and not is_list:
            raise ModelError(
                f"{type(self._model).__name__} takes its input as {type(batch).__name__}, which is not split by rows; "
                "use a plan with data=1 and cfg=1"
            )
        return name, cast(Sequence[Tensor], batch)

    def _find_kinds(self, name: str) -> Kinds:
        """What is known of an argument of the model."""
        return () if self._inputs is None else self._inputs.get(name, ())

    def _hand_on(self, result: Any) -> Any:
        """A result as the model returns it: where it takes a list of rows, it returns one."""
        return _map_rows(result, Tensor, lambda rows: list(rows.unbind())) if self._returns_list else result

    def _compute_batch_slice(
        self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any], batch_slice: BatchSlice
    ) -> None:
        """Calls the model on some rows, and writes its result into the full-size predictions."""
        now = self._now
        branch, size = now.branch, batch_slice.batch_size
        cut_positional, cut_named, is_cut = self._slice_arguments(args, kwargs, batch_slice)
        result = forward(*cut_positional, **cut_named)
        _, noisy = self._find_noisy_input(args, kwargs)
        if not isinstance(noisy, Tensor):
            result, self._returns_list = _map_rows(result, list, torch.stack), True
        self._results[branch] = result
        predictions = extract_predictions(result, batch_slice.slice_size if is_cut else size)
        if not is_cut and len(predictions) > 1 and batch_slice.slice_size < size:
            raise ModelError(
                f"{type(self._model).__name__} makes {len(predictions)} tensors and can only be called on all "
                f"{size} rows, so it is not known what of these has rows; use a plan with data=1 and cfg=1"
            )
        if not is_cut:
            predictions = [batch_slice.select_batch(prediction) for prediction in predictions]
        self._agree_on_rows(noisy, predictions, result)
        shapes = [(size, *prediction.shape[1:]) for prediction in predictions]
        wholes = self._predictions.get(branch)
        if wholes is None or now.micro_step.patch is None or [tuple(whole.shape) for whole in wholes] != shapes:
            # New tensors, as the pipeline may have kept the last ones.
            wholes = [prediction.new_zeros(shape) for prediction, shape in zip(predictions, shapes, strict=True)]
            self._predictions[branch] = wholes
        for whole, prediction in zip(wholes, predictions, strict=True):
            batch_slice.write_slice(whole, prediction)

    def _slice_arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any], batch_slice: BatchSlice
    ) -> tuple[list[Any], dict[str, Any], bool]:
        """The arguments of a call on some rows, and whether they were cut: some models can only be called on all."""
        if batch_slice.slice_size == batch_slice.batch_size:
            return list(args), kwargs, False
        cut = self.change_rows(args, kwargs, functools.partial(_select_rows, batch_slice))
        return (list(args), kwargs, False) if cut is None else (*cut, True)

    def list_rows(self, args: Sequence[Any], kwargs: dict[str, Any]) -> BatchSlice:
        """All rows of a call."""
        _, batch = self._find_noisy_input(args, kwargs)
        return BatchSlice.from_batch_size(len(batch), self.num_images)

    def change_rows(
        self, args: Sequence[Any], kwargs: dict[str, Any], change: Callable[[Any], Any]
    ) -> tuple[list[Any], dict[str, Any]] | None:
        """The arguments of a call, of which what has rows is changed; None where it is not known what has.

        Args:
            args, kwargs: of the call.
            change: of a tensor `[rows, ...]`, or a list with an item for each row.

        Raises:
            ModelError: if the input is a list, and it is not known what else has rows.
        """
        names = [*self._names[: len(args)], *map(str, range(len(self._names), len(args)))]
        inputs = dict(zip(names, args, strict=True)) | kwargs
        noisy, batch = self._find_noisy_input(args, kwargs)
        if self._inputs is not None and find_unknown_rows(inputs, self._inputs, noisy, len(batch)) is None:
            changed = slice_rows(inputs, self._inputs, change)
            return [changed.pop(name) for name in names], changed
        if not isinstance(batch, Tensor):
            raise ModelError(
                f"{type(self._model).__name__} takes its input as a list, and what else of its arguments has rows is "
                "not known; use a plan with data=1 and cfg=1"
            )
        dims = self._batch_dims.find_dims(inputs, noisy, len(batch))
        if dims is None:
            return None
        changed = dims.slice_arguments(inputs, change)
        return [changed.pop(name) for name in names], changed

    def _skip_foreign_call(self, now: Generation, batch_slice: BatchSlice) -> None:
        """Skips a call of another half: its prediction is NaN until it arrives."""
        branch = now.branch
        if now.micro_step.patch in (None, 0):
            now.memory.forget_branch_keys(branch)
        if now.micro_step.patch is None:
            self._predictions[branch] = [torch.zeros_like(prediction) for prediction in self._predictions[branch]]
        if self._is_last:
            for k, prediction in enumerate(self._predictions[branch]):
                first_branch = batch_slice.view_as_grid(prediction)[0]
                fill_piece(first_branch, self._find_fresh_piece(now, branch, k), torch.nan)
        now.advance_branch()

    def _make_idle_result(self, now: Generation, batch: Sequence[Tensor], kwargs: dict[str, Any]) -> Any:
        """A rank without images does not call the model: zeros as large as the others' predictions."""
        announced, returns_tensor = self._agree_on_rows(batch, None, None)
        now.advance_branch()
        # The dtype may be another than the latents': under autocast it is that of the last product.
        rows = len(batch)
        zeros = [batch[0].new_zeros((rows, *trailing), dtype=getattr(torch, dtype)) for dtype, trailing in announced]
        if returns_tensor:
            return zeros[0]
        if not kwargs.get("return_dict", True):
            return self._hand_on(tuple(zeros))
        if len(zeros) > 1:
            raise ModelError(
                f"{type(self._model).__name__} returns {len(zeros)} tensors in an object, and a rank without images "
                "can only make a tuple of them; use a lower data degree"
            )
        return self._hand_on(Transformer2DModelOutput(sample=zeros[0]))

    def _agree_on_rows(
        self, noisy: Sequence[Tensor], predictions: Sequence[Tensor] | None, result: Any
    ) -> tuple[list[tuple[str, list[int]]], bool]:
        """Where some replica is idle, rank 0 sends the form, dtypes and shapes of predictions' rows; all call it alike.

        It does so once for each size of the noisy input, of which every replica has all rows.

        Returns:
            The dtype and shape of each prediction's rows, and whether the model returns a tensor in nothing else.
        """
        if not self._data.has_idle_replica:
            return [], False
        # A row may be a list itself, of pictures and of the latents after them.
        of_row = [x.shape for x in pytree.tree_leaves(noisy[0]) if isinstance(x, Tensor)]
        size = (len(noisy), *itertools.chain(*of_row))
        if size not in self._rows:
            rows = [[describe_dtype(x), list(x.shape[1:])] for x in predictions or ()]
            mine = [rows, isinstance(result, Tensor)]
            self._rows[size] = gather_json(mine, self._mesh.within_calls)[0]
        return self._rows[size]

    def _find_fresh_piece(self, now: Generation, branch: int, output: int) -> Piece | None:
        """What is fresh of a prediction of a call at the micro-step at hand; None is all of it."""
        patch = now.micro_step.patch
        return None if patch is None else now.findings.prediction_pieces[branch][patch][output]

    def _make_calls_error(self, now: Generation, calls: int) -> StateError:
        return StateError(
            f"the pipeline called {type(self._model).__name__} {calls} times in step {now.micro_step.step} and "
            f"{now.calls} times before; cfg=2 shares out calls, whose number must not change in mid-run; use cfg=1"
        )


def _select_rows(batch_slice: BatchSlice, rows: Any) -> Any:
    """The rows of a slice, of a tensor or a list with an item for each row of the batch."""
    if isinstance(rows, Tensor):
        return batch_slice.select_batch(rows)
    return [rows[k] for k in batch_slice.select_batch(torch.arange(len(rows))).tolist()]


def _map_rows(result: Any, kind: type, make: Callable[[Any], Any]) -> Any:
    """A model's result with something else in place of what is of a type."""
    return pytree.tree_map_only(kind, make, result, is_leaf=lambda value: isinstance(value, kind))
