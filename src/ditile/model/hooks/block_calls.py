"""One call of a transformer whose blocks are divided: full-size tensors outside of blocks, this rank's tokens inside.

The model's own forward keeps full-size tensors. Between consecutive blocks the hooks hand on the patch's tokens
directly, and the forward's full-size tensors pass through unchanged. If the forward makes new tokens between two blocks
(by a concatenation, a slice, a ControlNet's residual), and after the last block, it gets a full-size tensor that holds
the patch's tokens at their positions. So its operations there must act on each token separately.

A survey, a cheap first pass of each kind of call in which blocks return their inputs, finds the number of tokens and
the blocks before which the forward makes new tokens. A rehearsal writes NaN to a patch's tokens after the last block:
the NaN in the result then mark the patch's latents.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.distributed.recording.segments import list_tensors
from ditile.model.fingerprint import fingerprint
from ditile.model.hooks.attention_hooks import AttentionWatch
from ditile.model.hooks.batch_rows import join_batch_results
from ditile.model.hooks.block_policy import (
    BlockHook,
    BlockPolicy,
    CallForm,
    TokenState,
    advise_whole_tokens,
)
from ditile.model.hooks.generation import Generation, RehearsedModel
from ditile.model.hooks.overrides import find_latents_parameter, list_parameter_names
from ditile.model.hooks.pieces import (
    Piece,
    RehearsedPrediction,
    find_nan_tokens,
    flag_nan_tokens,
    has_nan,
    list_predictions,
    poison_latents,
)
from ditile.model.hooks.token_arguments import (
    cut_argument,
    find_misfit,
    find_unknown_rows,
    is_cut,
    slice_rows,
    write_runs,
)
from ditile.model.remembered_outputs import OutputMemoizer
from ditile.plan.anatomy import ROWS, Anatomy, Kinds, ListAnatomy, describe_mode, select_word
from ditile.plan.errors import ModelError, StateError
from ditile.plan.layout import Grid, merge_ranges

Forward = Callable[..., Any]
VisitBlock = Callable[[Generation, BlockHook, dict[str, Any], Forward], Any]
"""Returns a block's output in a call, given its arguments; the block's forward takes these arguments by name."""

FOR_ATTENTION = "attention_kwargs"
"""Suffix of diffusers' arguments that only attention reads. Attention cuts their masks itself."""


class BlockCalls:
    """The calls of one transformer in a pipeline's call.

    Args:
        anatomy: the meaning of the dimensions of its arguments.
        now: the current generation.
        memo: remembers the outputs of modules outside of blocks.
    """

    def __init__(
        self,
        transformer: nn.Module,
        chain: Sequence[BlockHook],
        anatomy: Anatomy,
        policy: BlockPolicy,
        now: Generation,
        memo: OutputMemoizer,
    ) -> None:
        self._transformer = transformer
        self._model_name = type(transformer).__name__
        self._last = len(chain) - 1
        self._anatomy = anatomy
        self._policy = policy
        self._now = now
        self._memo = memo
        self._advice = advise_whole_tokens(transformer, anatomy, policy.plan)
        self._parameter_names = list_parameter_names(transformer)
        self._latents = find_latents_parameter(transformer)
        self._divided = _DividedPass(policy, anatomy, self._last)
        self._all_blocks = range(len(chain))
        self._active_blocks: Collection[int] = self._all_blocks
        self._visit_block: VisitBlock = self._divided.visit_block
        self._visits = 0  # number of visited blocks in the current call

    def wrap_transformer(self, forward: Forward) -> Forward:
        """Wrap the transformer's forward: run it in micro-batches, after a survey of each kind of call."""

        def forward_from_start(num_visits: int, *args: Any, **kwargs: Any) -> Any:
            self._visits = 0  # the recorder may call this a second time
            self._policy.restart_transformer_call()
            result = forward(*args, **kwargs)
            # Check only real calls: a played call visits no block, and a capture may end in the middle.
            self._check_visits(num_visits)
            return result

        @functools.wraps(forward)
        def forward_divided(*args: Any, **kwargs: Any) -> Any:
            now = self._now.check_under_way()
            # The pipeline only blends its latents, and needs no prediction.
            if now.dry.blended_step is not None:
                return now.take_rehearsed_result()
            inputs = dict(zip(self._parameter_names, args, strict=False)) | kwargs
            mode = describe_mode(inputs)
            now.is_whole = self._is_computed_whole(now, mode)
            call_key = (now.branch, id(self._transformer), mode, fingerprint(inputs, "shape"))
            if now.dry.recognises_call is not None and now.dry.recognises_call(call_key, inputs, self._latents):
                return now.take_rehearsed_result()
            forms = now.findings.forms
            form = forms.get(call_key)
            if form is None or now.dry.surveys_again:
                self._policy.begin_survey()
                form = forms[call_key] = self._survey_call(forward, inputs, form, checks=not now.is_whole)
            now.form = form
            # Cut the tokens before the call, because its hooks ask for their positions.
            self._policy.begin_branch(form)
            if now.dry.patch is not None:
                return self._rehearse_call(now, forward, inputs)
            micro_batches = self._policy.begin_transformer_call(self._count_rows(inputs, form))
            self._visits = 0
            self._active_blocks = self._policy.select_active_blocks(self._all_blocks)
            run = functools.partial(forward_from_start, form.visits)
            if len(micro_batches) > 1:
                if now.recorder is not None:
                    now.recorder.note_code("its batch is computed in parts")
                result = self._run_micro_batches(forward, inputs, micro_batches)
                self._check_visits(form.visits * len(micro_batches))
            elif now.recorder is None:
                result = run(*args, **kwargs)
            else:
                result = now.recorder.run_call(now, self._transformer, run, args, kwargs)
            self._divided.forget_tokens()
            self._policy.end_transformer_call()
            return result

        return _leave_inference_mode(forward_divided)

    def wrap_block(self, hook: BlockHook, forward: Forward) -> Forward:
        """Wrap a block's forward so that it computes this rank's tokens."""
        # They are read once, when the block is wrapped: `inspect` is too slow for every call.
        names = list_parameter_names(hook.block)
        index = hook.index
        now = self._now
        pass_on = make_pass_on(hook.anatomy)

        def forward_at_hook(*args: Any, **kwargs: Any) -> Any:
            call = dict(zip(names, args, strict=False)) | kwargs
            self._visits += 1
            if index not in self._active_blocks:
                return pass_on(call)
            if len(args) <= len(names):
                return self._visit_block(now, hook, call, forward)
            # Arguments that a block takes as `*args` have no names, and are passed on unchanged.
            rest = functools.partial(_call_with_rest, forward, names, args[len(names) :])
            return self._visit_block(now, hook, call, rest)

        return forward_at_hook

    def _check_visits(self, expected: int) -> None:
        """Raise `StateError` if the forward ran another number of blocks: stages exchange messages at blocks."""
        if self._visits != expected:
            # `self._advice` is not used: it may name tensor parallelism, and such a plan counts blocks too.
            raise StateError(
                f"{self._model_name} ran {self._visits} blocks at {self._now.micro_step}, and "
                f"{expected} when it was first called so; it must run the same blocks in every call, so use a plan of "
                "data or cfg, in which calls are made as the pipeline makes them"
            )

    def _run_micro_batches(self, forward: Forward, inputs: Mapping[str, Any], micro_batches: Sequence[range]) -> Any:
        rows = micro_batches[-1].stop
        input_kinds = self._anatomy.inputs
        name = find_unknown_rows(inputs, input_kinds, self._latents, rows)
        if name is not None:
            raise ModelError(
                f"whether {name} of {self._model_name} has a row for each of {rows} images is not "
                "known, so warmup_mode=pipelined cannot split it; use warmup_mode=serial"
            )
        # The pipeline gets one result for the whole batch.
        results = []
        for index, batch_range in enumerate(micro_batches):
            # The messages of a micro-batch are due before its first block is reached.
            self._policy.begin_micro_batch(index)
            select = operator.itemgetter(slice(batch_range.start, batch_range.stop))
            results.append(forward(**slice_rows(inputs, input_kinds, select)))
        return join_batch_results(results)

    def _count_rows(self, inputs: Mapping[str, Any], form: CallForm) -> int:
        """Count the rows of a call's batch from its arguments, or from its blocks if no argument has known rows."""
        for name, kinds in self._anatomy.inputs.items():
            value: Any = inputs.get(name)
            # The value is a list with an item for each row.
            if kinds == (ROWS,) and isinstance(value, list):
                return len(value)
            if not isinstance(value, Tensor):
                continue
            word = select_word(kinds[0], value.ndim)
            if word is not None and "B" in word:
                return int(value.shape[word.index("B")])
        return form.rows

    def _is_computed_whole(self, now: Generation, mode: str) -> bool:
        """Return whether every rank of the sequence axes computes all tokens of a call in this mode."""
        modes = self._anatomy.modes
        if modes and mode not in modes:
            raise ModelError(
                f"{self._model_name} is called with {mode or 'no mode'}, and known are "
                f"{', '.join(modes)}; let the pipeline keep keys in a cache, as it does by default, or {self._advice}"
            )
        is_whole = modes.get(mode, False)
        if is_whole and now.micro_step.patch is not None:
            raise StateError(
                f"a call with {mode} is computed whole, and comes in a step of patches, at {now.micro_step}"
            )
        return is_whole

    def _survey_call(
        self, forward: Forward, inputs: dict[str, Any], prior: CallForm | None, *, checks: bool
    ) -> CallForm:
        """Run the forward with blocks that pass their inputs on, to learn the form of a call."""
        padding = frozenset[int]()
        if self._now.schedule.references is not None and self._anatomy.is_one_sequence:
            padding = self._find_padding(forward, inputs)
        survey = _SurveyPass(self._model_name, self._anatomy, self._last, self._advice, checks=checks)
        poisoned = poison_latents(inputs, self._latents, *self._now.findings.live_arguments)
        self._visits = 0
        run = functools.partial(self._run_pass, survey.visit_block, forward, poisoned)
        result = self._memo.survey_call(run, survey.is_fed)
        form = survey.describe_call()
        form = form._replace(grid=self._read_grid(inputs, form), visits=self._visits, padding=padding)
        if prior is not None:
            # In a second survey other inputs are NaN too, so the result says nothing about the text.
            return form._replace(returns_text=prior.returns_text)
        return form._replace(returns_text=survey.poisons_text and has_nan(result))

    def _find_padding(self, forward: Forward, inputs: Mapping[str, Any]) -> frozenset[int]:
        """Find the tokens of a single sequence that are not made of the latents."""
        flags: list[Tensor] = []

        def pass_first_block(now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
            image, text = read_streams(hook.anatomy, call)
            if not hook.index:
                flags.append(flag_nan_tokens(image, hook.anatomy.tokens))
                image = torch.nan_to_num(image)
            return give_streams(hook.anatomy, image, text)

        # Attention ahead of the blocks must not spread the NaN of the latents to other tokens.
        with AttentionWatch(_keep_own_values):
            self._run_pass(pass_first_block, forward, poison_latents(inputs, self._latents))
        # The survey that follows refuses a call without blocks.
        if not flags:
            return frozenset()
        return frozenset((~flags[-1]).nonzero().flatten().tolist())

    def _read_grid(self, inputs: Mapping[str, Any], form: CallForm) -> Grid:
        """Return the rows of image tokens: those that an argument shows, rows of a video's frames, or single tokens.

        Latents of a video are `[B, .., H, W]` or `[B, F, H, W, C]`.
        """
        flat = form.grid
        tokens = flat.num_tokens
        if self._anatomy.grid:
            grid = read_token_grid(self._transformer, inputs[self._anatomy.grid])
            return grid if grid.num_tokens == tokens else flat
        latents = inputs[self._latents]
        config = getattr(self._transformer, "config", None)
        side = pytree.tree_leaves(getattr(config, "patch_size", None))[-1]
        is_video = isinstance(latents, Tensor) and latents.ndim == 5 and form.latents in (None, range(tokens))
        if not is_video or not isinstance(side, int):
            return flat
        (kinds,) = self._anatomy.inputs.get(self._latents) or ("",)
        # The last dimension holds channels if its size does not depend on the image.
        is_channel_last = (select_word(kinds, 5) or "").endswith(".")
        height, width = latents.shape[2:4] if is_channel_last else latents.shape[3:]
        grid = Grid(height // side, width // side)
        if not 1 < self._policy.row_parts <= grid.rows:
            return flat  # nothing cuts rows, or there are too few
        frames, rest = divmod(tokens, grid.num_tokens or tokens)
        if rest or frames == 1:
            return flat
        return grid._replace(frames=frames)

    def _rehearse_call(self, now: Generation, forward: Forward, inputs: Mapping[str, Any]) -> Any:
        """Run the forward without its blocks, with NaN in place of a patch's tokens after the last block."""
        assert now.dry.patch is not None
        rows = self._count_rows(inputs, now.form)
        now.dry.called_models[now.branch] = RehearsedModel(id(self._transformer), now.is_whole, rows)
        self._visits = 0
        result = self._run_pass(functools.partial(_rehearse_block, self._last), forward, inputs)
        self._check_visits(now.form.visits)
        pieces = [Piece.from_mask(torch.isnan(prediction)) for prediction in list_predictions(result)]
        now.findings.prediction_pieces.setdefault(now.branch, {})[now.dry.patch] = pieces
        # A sum over the whole prediction must not spread NaN to other patches.
        result = pytree.tree_map_only(Tensor, lambda x: x.as_subclass(RehearsedPrediction), result)
        now.dry.results[now.branch] = result
        return now.take_rehearsed_result()

    def _run_pass(self, visit_block: VisitBlock, forward: Forward, inputs: Mapping[str, Any]) -> Any:
        self._visit_block = visit_block
        self._active_blocks = self._all_blocks
        self._now.is_surveyed = True
        try:
            with torch.no_grad():
                return forward(**inputs)
        finally:
            self._now.is_surveyed = False
            self._visit_block = self._divided.visit_block


def read_token_grid(transformer: nn.Module, shown: Tensor) -> Grid:
    """Return the rows of image tokens, from the argument that shows them (see `Anatomy.grid`)."""
    if shown.ndim == 4:
        size: int = transformer.config.patch_size  # type: ignore[assignment, union-attr]
        height, width = shown.shape[-2:]
        return Grid(height // size, width // size)
    # Some pipelines give each row of the batch a copy of the same positions.
    ids = shown
    if shown.ndim == 3:
        ids = shown[0]
    # Column 1 has each token's row. It may be rounded (bfloat16 above 256), but the first two rows always differ.
    columns = int((ids[:, 1] == ids[0, 1]).int().cumprod(0).sum())
    return Grid(ids.shape[0] // columns, columns)


def _keep_own_values(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Return each token's own value in self-attention, so that a token's NaN does not reach other tokens."""
    return value if query.shape == value.shape else None


def _call_with_rest(forward: Forward, names: Sequence[str], rest: Sequence[Any], **call: Any) -> Any:
    return forward(*(call.pop(name) for name in names), *rest, **call)


def make_pass_on(anatomy: ListAnatomy) -> Callable[[Mapping[str, Any]], Any]:
    """Make a function of a block's arguments that returns the streams unchanged."""
    streams = {"image": anatomy.image, "text": anatomy.text}
    names = [streams[name] for name in anatomy.returns]
    # `itemgetter` returns no tuple for one name, and finds no argument for None.
    if anatomy.is_tuple and (len(names) == 1 or None in names):
        return lambda call: give_streams(anatomy, *read_streams(anatomy, call))
    return operator.itemgetter(*names)


def read_streams(anatomy: ListAnatomy, call: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the image and the text among a block's arguments."""
    text = None if anatomy.text is None else call.get(anatomy.text)
    return call[anatomy.image], text


def give_streams(anatomy: ListAnatomy, image: Tensor, text: Tensor | None) -> Any:
    """Return full-size streams in the form in which a block returns them."""
    if not anatomy.is_tuple:
        return image
    if len(anatomy.returns) == 1:
        return (image,)
    if anatomy.returns[0] == "text":
        return (text, image)
    return (image, text)


class _SurveyPass:
    """A pass in which blocks return their inputs, which are examined.

    Attributes:
        poisons_text: whether the text after the last block is a separate stream, which is then NaN.
    """

    def __init__(self, model: str, anatomy: Anatomy, last: int, advice: str, *, checks: bool) -> None:
        self._model = model
        self._anatomy = anatomy
        self._last = last
        self._checks = checks
        self._advice = advice
        self.poisons_text = False
        self._lengths: dict[str, int] = {}  # tokens of each kind
        self._start = 0  # the first token that is made of the latents
        self._rows = 1
        self._latents = range(0) if anatomy.is_one_sequence else None
        self._before: tuple[Tensor, Tensor | None, int] | None = None  # the streams at the previous block
        self._glued: set[int] = set()  # blocks before which the forward makes new tokens
        self._fed: dict[
            str, Tensor
        ] = {}  # later blocks -> whether anything made of the latents comes past the first block

    def visit_block(self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
        """Record token lengths and NaN from the latents, check the arguments, and return the streams."""
        anatomy = hook.anatomy
        image, text = read_streams(anatomy, call)
        self._measure(hook, image, text)
        if self._checks:
            for name, value in call.items():
                if name in (anatomy.image, anatomy.text) or name.endswith(FOR_ATTENTION) or not list_tensors(value):
                    continue
                misfit = find_misfit(value, anatomy.arguments.get(name, ()), self._lengths)
                if misfit is not None:
                    raise ModelError(
                        f"{self._model}: {hook.name} is given {name} with {misfit}; how to cut it for a patch is not "
                        f"known, so {self._advice}, or leave out the option that adds it"
                    )
        # The inputs of the first block are made of the latents in any case.
        if hook.index:
            flags = []
            for x in list_tensors(call):
                if x.is_floating_point():
                    # Tables of positions may be on the CPU.
                    flags.append(torch.isnan(x).any().to(image.device))
            self._fed[hook.name] = torch.stack(flags).any()
        if self._before is not None:
            last_image, last_text, version = self._before
            is_new_text = text is not None and last_text is not None and text is not last_text
            # The forward has changed the streams since the previous block.
            if image is not last_image or image._version != version or is_new_text:
                self._glued.add(hook.index)
        if not hook.index:
            # Only inputs that reach later blocks without passing the first one should be NaN.
            image = torch.nan_to_num(image)
            if text is not None:
                text = torch.nan_to_num(text)
        self._before = (image, text, image._version)
        if hook.index == self._last and text is not None and not self._anatomy.is_one_sequence:
            self.poisons_text = True
            text = torch.full_like(text, float("nan"))
        return give_streams(anatomy, image, text)

    def is_fed(self) -> bool:
        """Return whether a block receives something made of the latents in addition to the tokens."""
        return bool(self._fed) and bool(torch.stack([*self._fed.values()]).any())

    def describe_call(self) -> CallForm:
        """Return the form of the surveyed call, in which each token counts as a row."""
        if not self._lengths:
            raise ModelError(f"{self._model} called none of its blocks")
        grid = Grid(self._lengths["N"], 1)
        text = self._lengths.get("T", 0)
        glued = frozenset(self._glued)
        return CallForm(grid, text, self._start, glued, self._fed, rows=self._rows, latents=self._latents)

    def _measure(self, hook: BlockHook, image: Tensor, text: Tensor | None) -> None:
        anatomy = hook.anatomy
        lengths = self._lengths
        length = image.shape[anatomy.tokens]
        if hook.index == 0:
            lengths["N"] = length
            self._rows = put_tokens_second(image, anatomy).shape[0]
            if self._anatomy.is_one_sequence:
                self._latents = find_nan_tokens(image, anatomy.tokens) or range(0)
                self._start = self._latents.start
        if text is not None:
            lengths["T"] = text.shape[anatomy.tokens]
        elif anatomy.joint != "none":
            lengths.setdefault("T", length - lengths["N"])
        lengths["J"] = lengths["N"] + lengths.get("T", 0)
        expected = lengths["J"]
        if anatomy.joint == "none":
            expected = lengths["N"]
        if length != expected:
            raise ModelError(
                f"{self._model}: {hook.name} is given {length} tokens and the blocks before it "
                f"had {expected}, so patches cannot be told apart in them; {self._advice}"
            )


def _leave_inference_mode(forward: Forward) -> Forward:
    """Wrap a forward to run outside inference mode, in which tensors do not count the writes into them."""

    @functools.wraps(forward)
    def forward_outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return forward(*args, **kwargs)
        # Leaving the mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            copies = pytree.tree_map_only(Tensor, lambda x: x.clone() if x.is_inference() else x, (args, kwargs))
            args, kwargs = copies
            return forward(*args, **kwargs)

    return forward_outside


def _rehearse_block(last: int, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
    """Return a block's inputs; the last block puts NaN in the places of rehearsed tokens."""
    anatomy = hook.anatomy
    image, text = read_streams(anatomy, call)
    if hook.index != last:
        return give_streams(anatomy, image, text)
    assert now.dry.patch is not None
    layout = now.tokens.layout
    start = layout.text if anatomy.joint == "text_first" else 0
    image = torch.nan_to_num(image)
    # The runs of a patch's tokens, or of every row in whose number bit `dry.bit` is set.
    runs = list(layout.locate_tokens(now.dry.patch))
    if now.dry.bit is not None:
        runs = []
        first_row = now.form.start
        for row in range(first_row, layout.grid.rows):
            if (row - first_row) >> now.dry.bit & 1:
                runs += layout.grid.locate_rows(row, row + 1)
    for run in merge_ranges(runs):
        image.narrow(anatomy.tokens, start + run.start, len(run)).fill_(float("nan"))
    if text is not None and now.form.returns_text and layout.carries_text(now.dry.patch):
        text = torch.full_like(text, float("nan"))
    return give_streams(anatomy, image, text)


class _PassedStreams(NamedTuple):
    """The full-size streams that a block returned while its tokens went directly to the next hook.

    Attributes:
        version: the number of writes into the image, as PyTorch counts them.
        block: the block's index.
    """

    image: Tensor
    text: Tensor | None
    version: int
    block: int


class _DividedPass:
    """A pass in which blocks compute this rank's tokens."""

    def __init__(self, policy: BlockPolicy, anatomy: Anatomy, last: int) -> None:
        self._policy = policy
        self._last = last
        self._apart: set[str] = set()  # lists whose streams are `[B, tokens, C]`, image and text not joined
        self._cut_arguments: dict[str, list[tuple[str, Kinds]]] = {}
        for name, blocks in anatomy.lists.items():
            if blocks.tokens == 1 and blocks.joint == "none":
                self._apart.add(name)
            self._cut_arguments[name] = [item for item in blocks.arguments.items() if is_cut(item[1])]
        self._passed: _PassedStreams | None = None
        self._no_tokens = TokenState(torch.empty(0), None)
        self._state = self._no_tokens
        self._joined: tuple[TokenState, Tensor] | None = None
        self._has_all_tokens = False  # in the current call

    def visit_block(self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
        """Run a block under the policy on its tokens, and return full-size streams."""
        anatomy = hook.anatomy
        index = hook.index
        image = call[anatomy.image]
        text = call.get(anatomy.text or "")
        passed = self._passed
        # This is inline to save a Python call for every block of every micro-step.
        is_passed_on = (
            index > 0
            and passed is not None
            and image is passed.image
            # The forward may write into the streams between two blocks.
            and image._version == passed.version
            and (text is None or text is passed.text or passed.text is None)
        )
        tokens = self._state if is_passed_on else self._find_state(now, hook, image, text)
        compute = functools.partial(self._compute_block, now, hook, call, forward)
        state = self._state = self._policy.run_block(index, compute, tokens)
        # After the last block the forward needs full-size streams again.
        if index == self._last:
            image, text = self._leave_blocks(now, anatomy, state, image, text)
            self.forget_tokens()
            return give_streams(anatomy, image, text)
        if self._has_all_tokens and state.image.shape[1] == now.tokens.layout.image_tokens:
            image, text = self._join_streams(anatomy, state)
        # If another stage computes this block, `state` is `tokens`, and nothing on this rank reads them.
        elif index + 1 in now.form.glued and state is not tokens:
            image, text = self._place_tokens(now, hook, state)
        self._passed = _PassedStreams(image, text, image._version, index)
        if not anatomy.is_tuple:
            return image
        return give_streams(anatomy, image, text)

    def forget_tokens(self) -> None:
        """Free the tokens, which nothing reads after the last block."""
        self._state = self._no_tokens
        self._passed = None
        self._joined = None

    def _find_state(self, now: Generation, hook: BlockHook, image: Tensor, text: Tensor | None) -> TokenState:
        """Cut this rank's tokens out of the forward's tensors before a block."""
        full = self._split_streams(now.form.text, hook.anatomy, image, text)
        # Within a call a rank either has all tokens or not, so it is enough to ask at the first block.
        if hook.index == 0:
            self._has_all_tokens = now.has_all_image_tokens
            return self._policy.enter_blocks(full)
        if self._has_all_tokens:
            return full
        assert self._passed is not None
        if now.form.glued.isdisjoint(range(self._passed.block + 1, hook.index + 1)):
            raise StateError(
                f"the forward changed the tokens before {hook.name} and did not when it was first called so; use "
                "a plan of data or cfg"
            )
        return self._policy.cut_tokens(full)

    def _compute_block(
        self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward, state: TokenState
    ) -> TokenState:
        anatomy = hook.anatomy
        is_apart = hook.list_name in self._apart
        call[anatomy.image], text = state if is_apart else self._join_streams(anatomy, state)
        if anatomy.text is not None:
            call[anatomy.text] = text
        if not self._has_all_tokens:
            patch = now.token_patch
            for name, kinds in self._cut_arguments[hook.list_name]:
                value = call.get(name)
                if value is not None:
                    # Most arguments are the same object in every step, so their parts are kept.
                    make = functools.partial(_cut_for_patch, value, kinds, now)
                    call[name] = now.memory.get_cached_slice((hook.list_name, name, now.branch, patch), value, make)
        out = forward(**call)
        image = out
        text = state.text
        if anatomy.is_tuple:
            streams = dict(zip(anatomy.returns, out, strict=True))
            image = streams["image"]
            text = streams.get("text")
        # Nothing has to be split or joined.
        if is_apart:
            return TokenState(image, text)
        text_tokens = 0 if state.text is None else state.text.shape[1]
        return self._split_streams(text_tokens, anatomy, image, text)

    # Conversion between the streams of the model and `[B, tokens, C]`

    def _split_streams(self, text_tokens: int, anatomy: ListAnatomy, image: Tensor, text: Tensor | None) -> TokenState:
        """Split the model's streams into image and text tokens; `text_tokens` of the image's stream are text."""
        image = put_tokens_second(image, anatomy)
        if anatomy.joint == "none":
            if text is not None:
                text = put_tokens_second(text, anatomy)
            return TokenState(image, text)
        if anatomy.joint == "image_first":
            length = image.shape[1] - text_tokens
            state = TokenState(image[:, :length], image[:, length:])
        else:
            state = TokenState(image[:, text_tokens:], image[:, :text_tokens])
        # If the next block takes the same tokens, they need not be joined again.
        self._joined = (state, image)
        return state

    def _join_streams(self, anatomy: ListAnatomy, state: TokenState) -> tuple[Tensor, Tensor | None]:
        """Join tokens into streams as the model has them."""
        text = state.text
        if anatomy.joint == "none":
            image = _put_tokens_back(state.image, anatomy)
            if text is None or anatomy.text is None:
                return image, None
            return image, _put_tokens_back(text, anatomy)
        if self._joined is not None and self._joined[0] is state:
            joined = self._joined[1]
        else:
            assert text is not None
            parts = (state.image, text) if anatomy.joint == "image_first" else (text, state.image)
            joined = torch.cat(parts, dim=1)
        return _put_tokens_back(joined, anatomy), None

    def _leave_blocks(
        self, now: Generation, anatomy: ListAnatomy, state: TokenState, image: Tensor, text: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the full-size streams after the last block, or the streams that came in if nobody reads them."""
        fresh = self._policy.leave_blocks(state)
        if fresh is None:
            return image, text
        if self._has_all_tokens:
            if fresh.image is not state.image:
                state = TokenState(fresh.image, state.text)
            return self._join_streams(anatomy, state)
        if anatomy.joint == "none":
            if fresh.text is not None:
                text = _put_tokens_back(fresh.text, anatomy)
            return _put_tokens_back(fresh.image, anatomy), text
        fresh_text = fresh.text
        if fresh_text is None:
            fresh_text = self._split_streams(now.form.text, anatomy, image, text).text
        return self._join_streams(anatomy, TokenState(fresh.image, fresh_text))

    def _place_tokens(self, now: Generation, hook: BlockHook, state: TokenState) -> tuple[Tensor, Tensor | None]:
        """Return full-size streams with this rank's tokens at their positions; nobody reads other positions."""
        part = now.tokens.get_own_part(now.token_patch)
        layout = now.tokens.layout
        key = (hook.index, now.branch, now.micro_batch)
        rows, _, channels = state.image.shape
        # There is one buffer for each block before which the forward makes new tokens.
        image_shape = (rows, layout.image_tokens, channels)
        image = now.memory.get_persistent_buffer((*key, "image"), image_shape, state.image)
        write_runs(image, state.image, part.image, 1)
        text = None
        if state.text is not None:
            text_shape = (rows, layout.text, state.text.shape[2])
            text = now.memory.get_persistent_buffer((*key, "text"), text_shape, state.text)
            if part.text:
                write_runs(text, state.text, (part.text,), 1)
        return self._join_streams(hook.anatomy, TokenState(image, text))


def _cut_for_patch(value: Any, kinds: Kinds, now: Generation) -> Any:
    # The runs are looked up only for a cut, because most blocks find a part that an earlier block has cut.
    return cut_argument(value, kinds, now.tokens.get_argument_runs(now.token_patch))


def put_tokens_second(x: Tensor, anatomy: ListAnatomy) -> Tensor:
    """Return a view `[B, tokens, C]` of `[tokens, B, C]` or `[tokens, C]`."""
    if anatomy.tokens:
        return x
    if x.ndim == 2:
        return x[None]
    return x.transpose(0, 1)


def _put_tokens_back(x: Tensor, anatomy: ListAnatomy) -> Tensor:
    if anatomy.tokens:
        return x
    if anatomy.has_no_batch:
        return x[0]
    return x.transpose(0, 1)
