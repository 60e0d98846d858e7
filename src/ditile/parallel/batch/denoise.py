"""One call of the model, of which this rank computes some rows of the batch.

These hooks are the outermost hooks of the model. The pipeline passes and gets full-size tensors; the model sees the
rows of this replica's images and of this group's guidance branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import AsyncReduction
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
from ditile.plan.plan import suggest_whole_images


class DataCfgBatch:
    """The batch of one call of the pipeline, split over the axes data and cfg.

    Args:
        mesh: the axes, and the groups in which ranks agree.
        images: how many images the pipeline generates.
        batch_dims: finds the batch dimension of each argument of the models, where `inputs` does not give it.
        inputs: the kinds of the models' arguments, if known.
        keeps_calls: see `Plan.keeps_calls`.
        has_lone_calls: whether each step makes a single call of the model, so that groups cannot share calls.

    Attributes:
        num_images: how many images the pipeline generates.
    """

    def __init__(
        self,
        mesh: Mesh,
        models: Sequence[nn.Module],
        *,
        images: int,
        batch_dims: BatchDimFinder,
        inputs: Mapping[str, Kinds] | None,
        keeps_calls: bool,
        has_lone_calls: bool = False,
    ) -> None:
        self._mesh = mesh
        self._has_lone_calls = has_lone_calls
        self._models = models
        self._model = models[0]
        self.num_images = images
        self._batch_dims = batch_dims
        self._data = ReplicaImages(mesh["data"], images, mesh.traffic)
        self._cfg = CfgExchange(mesh["cfg"], mesh.traffic, keeps_calls)
        self._is_last = mesh.stage_index == mesh.num_stages - 1
        self._names = list_parameter_names(self._model)
        self._inputs = inputs
        self._returns_list = False
        self._latents = find_latents_parameter(self._model)
        self.begin_generation()

    @property
    def is_split_by_calls(self) -> bool:
        """Return whether the groups compute calls of their own, now that the first step is over."""
        return self._by_calls and self._splits_calls(self._now.micro_step.step)

    def _splits_calls(self, step: int) -> bool:
        """Return whether the groups compute calls of their own in a step."""
        # Step 0 shows how many calls there are. If calls have another mode than in the step before, their results may
        # have another shape, and every rank computes all of them once to learn this shape.
        if not self._by_calls or step <= self._learning_step or step in self._changed_steps:
            return False
        whole_steps = self._now.findings.whole_steps
        return (step in whole_steps) == (step - 1 in whole_steps)

    def install_batch_hooks(
        self, stack: ExitStack, pipe: Any, now: Generation, *, first: bool, decodes_apart: bool
    ) -> None:
        """Divide the rows in the model's calls, and the images in the decoder's, until the stack is closed.

        Args:
            now: the generation under way.
            first: whether only rank 0 needs the decoded images.
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
        to: Receivers = "all"
        if first:
            to = "none" if self._mesh.image.index else "first"
        self._data.install_decoder(stack, getattr(pipe, "vae", None), to, lambda: self._is_over)

    # The denoising loop calls the methods below.

    def begin_generation(self) -> None:
        """Reset the state for a new generation."""
        self._is_over = False
        self._by_calls = False
        self._learning_step = 0  # the last step that shows how predictions are used; until then no call is shared
        self._used_early: Tensor | None = None  # whether the pipeline used a prediction before it arrived
        self._predictions: dict[int, list[Tensor]] = {}
        self._results: dict[int, Any] = {}  # as the model returns them: bare, in a tuple or in an object
        self._modes: dict[int, str] = {}  # number of a call in the step -> its mode when it was last made
        self._changed_steps: set[int] = set()  # in which calls have another mode than in the step before
        self._num_branches: dict[int, int] = {}  # number of a call in the step -> its branches when it was last made
        self._last_num_branches: list[int] = []  # of each call in the step before
        self._most_parts = 0  # branches, or calls that are kept whole, in one of the first steps
        self._call_slices: dict[int, list[BatchSlice]] = {}  # number of a call that groups share -> each group's rows
        self._deferred = DeferredWork()

    def select_branches(self, step: int, calls: int) -> Sequence[int]:
        """Return the numbers of the calls that this rank computes in a step."""
        if not self._splits_calls(step):
            return range(calls)
        own_branches = self._cfg.spread_calls(self._list_num_branches(calls))[self._cfg.index]
        return [call for call, branches in enumerate(own_branches) if branches]

    def _list_num_branches(self, calls: int) -> list[int]:
        """Return the number of branches in each of the first `calls` calls of a step, when they were last made."""
        return [self._num_branches[call] for call in range(calls)]

    def check_prediction(self, prediction: Tensor, sample: Tensor) -> None:
        """Check the rows of the latents and the number of calls.

        This runs when the scheduler is stepped.

        Raises:
            ModelError: if the latents have another number of rows than the call asked for, or guidance is off and cfg
                has no use.
        """
        if self._data.size == self._cfg.size == 1:
            return
        now = self._now
        # One row for each image, or as many rows as the last call had: DiT steps a copy for each branch.
        branches = self._num_branches.get(now.branch - 1, 1)
        if sample.shape[0] not in (self.num_images, self.num_images * branches):
            raise ModelError(
                f"the latents have {sample.shape[0]} row(s) and the call asks for {self.num_images} image(s), so rows "
                "cannot be split; use a plan with data=1 and cfg=1"
            )
        if now.is_forecast:
            return
        self._learn_calls()
        if not self._by_calls:
            return
        if not self._is_last or not self._splits_calls(now.micro_step.step):
            return
        # Guidance has ended: there are no more calls, so the exchange does not wait for any.
        if now.calls is not None and 0 < now.branch < now.calls:
            self._complete_calls()
        if self._used_early is None:
            # A NaN that the model did not make itself shows that a prediction was used early. The flag is read at the
            # end of the generation, so that nothing waits for the device now.
            own: list[Tensor] = []
            for predictions in self._predictions.values():
                own += predictions
            model_made_nan = torch.stack([torch.isnan(prediction).any() for prediction in own]).any()
            has_nan = torch.isnan(self._data.view_own_images(prediction)).any()
            self._used_early = has_nan & ~model_made_nan | bool(self._deferred.problem)

    def check_streams(self, number: int) -> None:
        """Check that each prediction of the model is given to a scheduler: only latents that are stepped are gathered.

        This runs at the end of an iteration.

        Args:
            number: the number of schedulers that were stepped.

        Raises:
            ModelError: if there are more predictions.
        """
        predictions = max(map(len, self._predictions.values()), default=0)
        if self._data.size > 1 and number < predictions:
            raise ModelError(
                f"data={self._data.size}: {type(self._model).__name__} makes {predictions} predictions, and only the "
                f"latents of the {number} scheduler(s) that the pipeline steps are gathered; use data=1"
            )

    def view_own_images(self, batch: Tensor) -> Tensor:
        """Return a view of this rank's rows of `[images, ...]`."""
        return self._data.view_own_images(batch)

    def select_own_rows(self, batch: Tensor) -> Tensor:
        """Return the rows of this rank's images in all branches of guidance.

        `batch` has the rows of a call.
        """
        if self._data.size == 1:
            return batch
        rows = BatchSlice.from_batch_size(len(batch), self.num_images)
        return rows._replace(images=self._data.images).select_batch(batch)

    def gather_latents(self, latents: Tensor) -> Tensor:
        """Gather all latents on the last stages of all replicas, which must all call it."""
        return self._data.gather_latents(latents)

    def end_generation(self) -> None:
        """End the loop and check that no prediction was used too early.

        Raises:
            StateError: if the pipeline used a prediction before it arrived, and that could not be repeated.
        """
        self._is_over = True
        self._predictions.clear()
        self._results.clear()
        if not self._by_calls:
            return
        # Every rank of the call takes part, even without a prediction to look at.
        used_early = 0 if self._used_early is None else int(self._used_early)
        if any(AsyncReduction(self._mesh.control, [used_early], self._mesh.traffic).wait_for_numbers()):
            raise StateError(
                "the pipeline used one prediction before it asked for the next, as it did not in its first step, and "
                f"cfg={self._cfg.size} fills all in when the last one arrives; use cfg=1"
            )

    # The methods below make one call of the model.

    def _call_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = self._now
        # Outside of the loop every rank computes all rows. In a dry iteration every rank finds the places of patches,
        # for which it needs all rows.
        if now.is_dry or not now.is_under_way:
            return forward(*args, **kwargs)
        branch = now.branch
        step = now.micro_step.step
        _, batch = self._find_noisy_input(args, kwargs)
        all_rows = BatchSlice.from_batch_size(len(batch), self.num_images)
        self._check_branches(all_rows.num_branches)
        batch_slice = all_rows._replace(images=self._data.images)
        mode = f"{describe_mode(kwargs)} {[tuple(x.shape) for x in pytree.tree_leaves(batch[:1])]}"
        if self._modes.setdefault(branch, mode) != mode:
            self._changed_steps.add(step)
        self._modes[branch] = mode
        # Every rank computes all calls of the first step, so if one of their uses cannot be repeated, all ranks raise.
        is_learning = self._is_learning
        if not branch:
            self._deferred = DeferredWork()
            self._call_slices.clear()
        elif self._by_calls and is_learning and self._deferred.problem:
            raise ModelError(
                f"cfg={self._cfg.size} splits calls of {type(self._model).__name__}, and the pipeline "
                f"{self._deferred.problem} before the next one is made, and so before it arrives; use cfg=1"
            )
        is_absent = self._compute_own_rows(forward, args, kwargs, batch_slice)
        result = replace_predictions(self._results[branch], self._predictions[branch])
        # A model that takes a list of rows also returns one.
        if self._returns_list:
            result = _map_rows(result, Tensor, lambda rows: list(rows.unbind()))
        # Uses of a result that has not arrived are recorded. In a learning step the uses of every result are.
        if is_absent or is_learning:
            result = pytree.tree_map_only(Tensor, self._deferred.defer, result)
        return result

    def _compute_own_rows(
        self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any], batch_slice: BatchSlice
    ) -> bool:
        """Compute this group's rows of a call; return whether other rows arrive later."""
        now = self._now
        branch = now.branch
        calls = now.calls
        slices = self._slice_call(batch_slice)
        is_absent = False
        if slices is None:
            # If calls are shared later, each group needs what all rows of this one leave behind, such as keys.
            own_slice = batch_slice if self._by_calls else self._cfg.restrict_to_group(batch_slice)
            self._compute_batch_slice(forward, args, kwargs, own_slice)
            if self._is_last and not self._by_calls:
                for output, prediction in enumerate(self._predictions[branch]):
                    self._cfg.exchange_branches(prediction, batch_slice, self._find_fresh_piece(branch, output))
        else:
            self._call_slices[branch] = slices
            own_slice = slices[self._cfg.index]
            if own_slice.branches:
                self._compute_batch_slice(forward, args, kwargs, own_slice)
            else:
                # Another group makes the call. The keys of step 0, which every group computed, are never read again:
                # their memory is freed.
                patch = now.micro_step.patch
                if patch in (None, 0):
                    now.memory.forget_branch_keys(branch)
                if patch is None:
                    self._predictions[branch] = list(map(torch.zeros_like, self._predictions[branch]))
                now.advance_branch()
            is_absent = self._is_last and own_slice != batch_slice
            if is_absent:
                # What other groups compute is NaN until it arrives.
                for output, prediction in enumerate(self._predictions[branch]):
                    piece = self._find_fresh_piece(branch, output)
                    grid = batch_slice.view_as_grid(prediction)
                    for absent in batch_slice.branches:
                        if absent not in own_slice.branches:
                            fill_piece(grid[absent], piece, torch.nan)
        # The last call ends the step even if all groups compute it: calls before it may have been shared.
        if self._is_last and branch + 1 == calls:
            self._complete_calls()
            return False
        return is_absent

    def _check_branches(self, num_branches: int) -> None:
        """Check that this call has as many branches of guidance as in the step before, where that must be so.

        The first call decides whether groups share calls.
        """
        now = self._now
        branch = now.branch
        step = now.micro_step.step
        if not branch:
            self._last_num_branches = self._list_num_branches(now.calls or 0)
        if branch == step == 0 and now.calls is None:
            # Groups share calls if the first has fewer branches than there are groups, unless each step has one call.
            self._by_calls = num_branches < self._cfg.size and not self._has_lone_calls
            reason = explain_branch_refusal(self._model) if self._by_calls else None
            if reason:
                raise ModelError(reason)
        before = self._num_branches.get(branch, num_branches)
        if num_branches != before and now.is_stale:
            raise StateError(
                f"the batch changed from {before} to {num_branches} branches of guidance in step {step}, and "
                f"stale keys belong to branches; keep guidance on for the whole run, or use "
                f"{suggest_whole_images(stale_keys=True)}"
            )
        self._num_branches[branch] = num_branches
        if self._by_calls and num_branches != before and now.pieces:
            raise StateError(
                f"the pipeline asked for another number of branches of guidance in step {step} than before; "
                f"cfg={self._cfg.size} splits calls, whose number must not change during the run; use cfg=1"
            )

    @property
    def _is_learning(self) -> bool:
        """Return whether uses of predictions are recorded in this step to see what they are."""
        if self._now.calls is None:
            return self._by_calls
        return 0 < self._learning_step == self._now.micro_step.step

    def _learn_calls(self) -> None:
        """Learn from the calls of a step how to split the next steps' calls.

        Raises:
            ModelError: if there are fewer branches than groups.
        """
        now = self._now
        step = now.micro_step.step
        counts = self._list_num_branches(now.branch)
        if self._is_learning:
            self._deferred.end()
        if self._by_calls:
            # Each group must have a branch, or a call kept whole. Later steps may have fewer, as when guidance ends.
            parts = len(counts) if self._cfg.keeps_calls else sum(counts)
            self._most_parts = max(self._most_parts, parts)
            # Without guidance the first step shows the most parts. Skip-layer guidance begins after the first step.
            is_known = step == 1 or (step == 0 and sum(counts) == 1)
            if is_known and self._most_parts < self._cfg.size:
                splits = (
                    f"cfg={self._cfg.size} splits branches of guidance, and {type(self._model).__name__} was called"
                )
                if sum(counts) == 1:
                    raise ModelError(
                        f"{splits} once, with one row for each image; raise guidance_scale above 1, give the "
                        "negative_prompt (--negative-prompt) that some pipelines want too, or use cfg=1"
                    )
                called = f"{splits} {len(counts)} time(s) in a step, with {sum(counts)} branches"
                if self._most_parts < sum(counts):
                    called += ", and stages and stale keys keep the calls whole"
                raise ModelError(f"{called}; use cfg={self._most_parts}")
        elif self._is_learning:
            self._by_calls = not self._deferred.problem and not explain_branch_refusal(self._model)
        elif now.calls is None and self._cfg.gains_from_calls(counts):
            # The next step shows whether predictions can be used before they arrive.
            self._learning_step = step + 1

    def _slice_call(self, batch_slice: BatchSlice) -> list[BatchSlice] | None:
        """Return the rows of each group in this call of the step; None if the call is not shared.

        If the call had another number of branches in the step before, every group computes it.
        """
        now = self._now
        branch = now.branch
        if now.calls is None or not self._splits_calls(now.micro_step.step):
            return None
        before = self._last_num_branches
        if branch >= len(before) or before[branch] != batch_slice.num_branches:
            return None
        branches_of_groups = self._cfg.spread_calls(before)
        return [batch_slice._replace(branches=branches_of_calls[branch]) for branches_of_calls in branches_of_groups]

    def _complete_calls(self) -> None:
        """Exchange the predictions of a step between the groups after its last call."""
        if not self._call_slices:
            return
        last = max(self._call_slices)
        for output in range(len(self._predictions[last])):
            predictions = [self._predictions[call][output] for call in self._call_slices]
            piece = self._find_fresh_piece(last, output)
            self._cfg.exchange_calls(predictions, list(self._call_slices.values()), piece)
        self._call_slices.clear()
        # Only after all outputs have arrived: an operation may use several of them.
        self._deferred.finish()

    def _find_noisy_input(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, Sequence[Tensor]]:
        """Return the noisy input's name and its value: a tensor, or a list of its rows."""
        name = self._latents
        position = self._names.index(name)
        if position < len(args):
            batch = args[position]
        else:
            name = next((key for key in (name, "hidden_states", "sample") if key in kwargs), "")
            batch = kwargs.get(name)
        kinds = None if self._inputs is None else self._inputs.get(name)
        # A list with one item has one row, whatever the model does with longer lists.
        is_list = isinstance(batch, list) and (len(batch) == 1 or kinds == (ROWS,))
        if not isinstance(batch, Tensor) and not is_list:
            raise ModelError(
                f"{type(self._model).__name__} takes its input as {type(batch).__name__}, which is not split by rows; "
                "use a plan with data=1 and cfg=1"
            )
        return name, cast(Sequence[Tensor], batch)

    def _compute_batch_slice(
        self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any], batch_slice: BatchSlice
    ) -> None:
        """Call the model on some rows and write its result into the full-size predictions."""
        now = self._now
        branch = now.branch
        size = batch_slice.batch_size
        has_all_rows = batch_slice.slice_size == size
        cut = None
        if not has_all_rows:
            cut = self._change_rows(args, kwargs, functools.partial(_select_rows, batch_slice))
        # Without a cut the call has all rows: some models can only be called on all.
        cut_positional, cut_named = (args, kwargs) if cut is None else cut
        result = forward(*cut_positional, **cut_named)
        _, noisy = self._find_noisy_input(args, kwargs)
        if not isinstance(noisy, Tensor):
            result = _map_rows(result, list, torch.stack)
            self._returns_list = True
        self._results[branch] = result
        num_rows = size if cut is None else batch_slice.slice_size
        predictions = extract_predictions(result, num_rows)
        if cut is None and not has_all_rows:
            if len(predictions) > 1:
                raise ModelError(
                    f"{type(self._model).__name__} makes {len(predictions)} tensors and can only be called on all "
                    f"{size} rows, so it is not known what of these has rows; use a plan with data=1 and cfg=1"
                )
            predictions = [batch_slice.select_batch(prediction) for prediction in predictions]
        shapes = [(size, *prediction.shape[1:]) for prediction in predictions]
        wholes = self._predictions.get(branch)
        is_whole_step = now.micro_step.patch is None
        if wholes is None or is_whole_step or [tuple(whole.shape) for whole in wholes] != shapes:
            # New tensors, as the pipeline may have kept the last ones.
            wholes = [prediction.new_zeros(shape) for prediction, shape in zip(predictions, shapes, strict=True)]
            self._predictions[branch] = wholes
        for whole, prediction in zip(wholes, predictions, strict=True):
            batch_slice.write_slice(whole, prediction)

    def _change_rows(
        self, args: Sequence[Any], kwargs: dict[str, Any], change: Callable[[Any], Any]
    ) -> tuple[list[Any], dict[str, Any]] | None:
        """Change the arguments that have rows, and return all arguments. None if it is not known which have rows.

        Args:
            change: takes a tensor `[rows, ...]`, or a list with an item for each row.

        Raises:
            ModelError: if the input is a list and the other arguments with rows are not known.
        """
        # Arguments without a name, such as those of *args, are named by their number.
        names = list(self._names[: len(args)])
        for number in range(len(names), len(args)):
            names.append(str(number))
        inputs = dict(zip(names, args, strict=True)) | kwargs
        noisy, batch = self._find_noisy_input(args, kwargs)
        if self._inputs is not None and find_unknown_rows(inputs, self._inputs, noisy, len(batch)) is None:
            changed = slice_rows(inputs, self._inputs, change)
        elif not isinstance(batch, Tensor):
            raise ModelError(
                f"{type(self._model).__name__} takes its input as a list, and it is not known which other arguments "
                "have rows; use a plan with data=1 and cfg=1"
            )
        else:
            # The table has no row for the model, as for a U-Net, or does not know this call.
            dims = self._batch_dims.find_dims(inputs, noisy, len(batch))
            if dims is None:
                return None
            changed = dims.slice_arguments(inputs, change)
        return [changed.pop(name) for name in names], changed

    def _find_fresh_piece(self, branch: int, output: int) -> Piece | None:
        """Return the fresh piece of a call's prediction in this micro-step; None is all of it."""
        patch = self._now.micro_step.patch
        if patch is None:
            return None
        return self._now.findings.prediction_pieces[branch][patch][output]


def _select_rows(batch_slice: BatchSlice, rows: Any) -> Any:
    """Return the rows of a slice from a tensor or a list with an item for each row of the batch."""
    if isinstance(rows, Tensor):
        return batch_slice.select_batch(rows)
    numbers = batch_slice.select_batch(torch.arange(len(rows)))
    return [rows[number] for number in numbers.tolist()]


def _map_rows(result: Any, kind: type, make: Callable[[Any], Any]) -> Any:
    """Replace everything of a type in a model's result."""
    return pytree.tree_map_only(kind, make, result, is_leaf=lambda value: isinstance(value, kind))
