"""One call of a transformer whose blocks are divided: full-size tensors outside of blocks, inside the tokens at hand.

The model's own forward keeps tensors of full size. Behind a block that the next one follows directly, the tokens are
carried from hook to hook, and what passes through the forward are the full-size tensors that came in. Where the forward
makes tokens anew between two blocks (a concatenation, a slice, a ControlNet's residual), and behind the last block, it
gets a full-size tensor with the tokens at hand in their places. So what it does there must be of a token alone.

A first, cheap pass of each kind of call, in which blocks pass on what they are given, finds how many tokens there are
and where the forward makes them anew. A rehearsal of a patch puts NaN in the places of its tokens behind the last
block: where NaN comes out, there are the patch's latents.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.model.hooks.batch_rows import join_batch_results
from ditile.model.hooks.block_policy import (
    BlockHook,
    BlockPolicy,
    CallForm,
    SurveyedBlocks,
    TokenState,
    advise_whole_tokens,
)
from ditile.model.hooks.generation import Generation, RehearsedModel
from ditile.model.hooks.overrides import find_latents_parameter, list_parameter_names
from ditile.model.hooks.pieces import (
    Piece,
    RehearsedPrediction,
    UnmixedTokens,
    find_grid,
    find_nan_tokens,
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
from ditile.plan.anatomy import ROWS, Anatomy, Kinds, ListAnatomy, describe_mode, select_word
from ditile.plan.errors import ModelError, StateError
from ditile.plan.layout import Grid, Layout, merge_ranges

Forward = Callable[..., Any]
ReadGrid = Callable[[nn.Module, Mapping[str, Any]], Grid]

FOR_ATTENTION = "attention_kwargs"
"""How diffusers' names of arguments end that are for the attention alone, which cuts the masks that it is given."""


class BlockPass(Protocol):
    """What blocks do in one call of the transformer's forward."""

    def visit_block(self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
        """What a block that is given `call` returns; `forward` takes the same by name."""


class SurveyWatch(Protocol):
    """Remembers what modules outside of blocks return, such as `OutputMemoizer`."""

    def survey_call(self, run: Callable[[], Any], blocks: Collection[str], survey: SurveyedBlocks) -> Any: ...


class BlockCalls:
    """The calls of one transformer in a pipeline's call.

    Args:
        transformer: the model.
        chain: its blocks.
        anatomy: what its dimensions count.
        policy: decides at each block.
        now: the generation under way.
        memo: remembers what modules outside of blocks return.
        read_grid: (transformer, arguments) -> the rows of tokens, which patches do not cut; None where any may be cut.
    """

    def __init__(
        self,
        transformer: nn.Module,
        chain: Sequence[BlockHook],
        anatomy: Anatomy,
        policy: BlockPolicy,
        now: Generation,
        memo: SurveyWatch,
        read_grid: ReadGrid | None = None,
    ) -> None:
        self._transformer, self._last, self._anatomy, self._policy = transformer, len(chain) - 1, anatomy, policy
        self._now, self._memo, self._read_grid = now, memo, read_grid
        self._advice = advise_whole_tokens(transformer, anatomy, policy.plan)
        self._names, self._key = list_parameter_names(transformer), id(transformer)
        self._latents = find_latents_parameter(transformer)
        self._divided = _DividedPass(policy, anatomy, self._last)
        self._every = range(len(chain))
        self._active: Collection[int] = self._every
        self._pass: BlockPass = self._divided
        self._visits = 0  # of blocks, in the call at hand

    def wrap_transformer(self, forward: Forward) -> Forward:
        """The transformer's forward, in micro-batches, after a survey of each kind of call."""

        @functools.wraps(forward)
        def forward_divided(*args: Any, **kwargs: Any) -> Any:
            now = self._now.check_under_way()
            if now.dry.blended_step is not None:
                return now.take_rehearsed_result()
            inputs = dict(zip(self._names, args, strict=False)) | kwargs
            now.is_whole = self._is_computed_whole(now, mode := describe_mode(inputs))
            given = (now.branch, self._key, mode, *inputs, *_describe_inputs(inputs.values()))
            if now.dry.recognises_call is not None and now.dry.recognises_call(given, inputs, self._latents):
                return now.take_rehearsed_result()
            form = now.findings.forms.get(given)
            if form is None or now.dry.surveys_again:
                self._policy.begin_survey()
                form = now.findings.forms[given] = self._survey_call(forward, inputs, form, not now.is_whole)
            now.form = form
            self._policy.begin_branch(form)
            if now.dry.patch is not None:
                return self._rehearse_call(now, forward, inputs)
            micro_batches = self._policy.begin_transformer_call(self._count_rows(inputs, form))
            self._visits = 0
            self._active = self._policy.select_active_blocks(self._every)
            if len(micro_batches) == 1:
                result = forward(*args, **kwargs)
            else:
                result = self._run_micro_batches(forward, inputs, micro_batches)
            self._divided.forget_tokens()
            self._check_visits(form.visits * len(micro_batches))
            self._policy.end_transformer_call()
            return result

        return forward_divided

    def wrap_block(self, hook: BlockHook, forward: Forward) -> Forward:
        """A block's forward, for the tokens at hand."""
        names, index, anatomy, now = list_parameter_names(hook.block), hook.index, hook.anatomy, self._now
        # What a block at which nothing happens returns of what it is given.
        pass_on = _make_pass_on(anatomy)

        def forward_at_hook(*args: Any, **kwargs: Any) -> Any:
            call = dict(zip(names, args, strict=False)) | kwargs
            self._visits += 1
            if index not in self._active:
                return pass_on(call)
            if len(args) <= len(names):
                return self._pass.visit_block(now, hook, call, forward)
            # What a block takes as `*args` is passed on as it is.
            rest = functools.partial(_call_with_rest, forward, names, args[len(names) :])
            return self._pass.visit_block(now, hook, call, rest)

        return forward_at_hook

    def _check_visits(self, expected: int) -> None:
        """Raises `StateError` if the forward left out blocks, which may be those at which stages meet."""
        if self._visits != expected:
            # A plan of tensor too looks at the blocks of a call before it makes it.
            raise StateError(
                f"{type(self._transformer).__name__} ran {self._visits} blocks at {self._now.micro_step}, and "
                f"{expected} when it was first called so; it must run the same blocks in every call, so use a plan of "
                "data or cfg, in which calls are made as the pipeline makes them"
            )

    def _run_micro_batches(self, forward: Forward, inputs: Mapping[str, Any], micro_batches: Sequence[range]) -> Any:
        rows, known = micro_batches[-1].stop, self._anatomy.inputs
        if (name := find_unknown_rows(inputs, known, self._latents, rows)) is not None:
            raise ModelError(
                f"whether {name} of {type(self._transformer).__name__} has a row for each of {rows} pictures is not "
                "known, so warmup_mode=pipelined cannot split it; use warmup_mode=serial"
            )
        results = []
        for index, batch_range in enumerate(micro_batches):
            self._policy.begin_micro_batch(index)
            select = operator.itemgetter(slice(batch_range.start, batch_range.stop))
            results.append(forward(**slice_rows(inputs, known, select)))
        return join_batch_results(results)

    def _count_rows(self, inputs: Mapping[str, Any], form: CallForm) -> int:
        """Rows of the batch of a call: those of its arguments, or where none is known to have any those in blocks."""
        for name, kinds in self._anatomy.inputs.items():
            value: Any = inputs.get(name)
            if kinds == (ROWS,) and isinstance(value, list):
                return len(value)
            word = select_word(kinds[0], value.ndim) if isinstance(value, Tensor) else None
            if word is not None and "B" in word:
                return int(value.shape[word.index("B")])
        return form.rows

    def _is_computed_whole(self, now: Generation, mode: str) -> bool:
        """Whether every rank that shares out tokens computes all tokens of a call of this mode."""
        modes = self._anatomy.modes
        if modes and mode not in modes:
            raise ModelError(
                f"{type(self._transformer).__name__} is called with {mode or 'no mode'}, and known are "
                f"{', '.join(modes)}; let the pipeline keep keys in a cache, as it does by default, or {self._advice}"
            )
        is_whole = modes.get(mode, False)
        if is_whole and now.micro_step.patch is not None:
            raise StateError(
                f"a call with {mode} is computed whole, and comes in a step of patches, at {now.micro_step}"
            )
        return is_whole

    def _survey_call(self, forward: Forward, inputs: dict[str, Any], known: CallForm | None, checks: bool) -> CallForm:
        """Runs the forward with blocks that pass on what they are given, to see what a call looks like."""
        grid = self._read_grid(self._transformer, inputs) if self._read_grid is not None else None
        if grid is None and self._policy.row_parts > 1:
            grid = self._find_video_grid(forward, inputs)
        name = type(self._transformer).__name__
        survey = _SurveyPass(name, self._anatomy, self._last, self._advice, checks=checks)
        padding = frozenset[int]()
        if self._now.schedule.references is not None and self._anatomy.is_one_sequence:
            with UnmixedTokens():
                flags = self._flag_nan_tokens(forward, poison_latents(inputs, self._latents))
            padding = frozenset() if flags is None else frozenset((~flags).nonzero().flatten().tolist())
        poisoned = poison_latents(inputs, self._latents, *self._now.findings.live_arguments)
        self._visits = 0
        run = functools.partial(self._run_pass, survey, forward, poisoned)
        result = self._memo.survey_call(run, self._anatomy.lists, survey)
        # With more than the latents NaN, the result says nothing of the text.
        returns_text = survey.poisons_text and has_nan(result) if known is None else known.returns_text
        form = survey.describe_call(grid)
        return form._replace(returns_text=returns_text, visits=self._visits, padding=padding)

    def _flag_nan_tokens(self, forward: Forward, inputs: Mapping[str, Any]) -> Tensor | None:
        """Which tokens in front of the first block are NaN; None if no block was called."""
        look = _FirstBlockPass(self._anatomy)
        self._run_pass(look, forward, inputs)
        return look.flags

    def _find_video_grid(self, forward: Forward, inputs: Mapping[str, Any]) -> Grid | None:
        """The frames and rows of tokens that are made of latents `[B, .., H, W]` or `[B, F, H, W, C]` of a video.

        None where a row of the latents is not one row of tokens in each frame, or rows are too few to be cut.
        """
        name, grids = self._latents, []
        latents = inputs[name]
        if not isinstance(latents, Tensor) or latents.ndim != 5:
            return None
        for dim in (2, 3):
            marked = latents.clone()
            marked.narrow(dim, 0, 1).fill_(float("nan"))
            flags = self._flag_nan_tokens(forward, {**inputs, name: marked})
            grid = None if flags is None else find_grid(flags)
            if grid is not None and grid.frames > 1:
                grids.append(grid)
        # Columns look like rows of one token, in more frames.
        found = min(grids, key=operator.attrgetter("frames"), default=None)
        return None if found is None or found.rows < self._policy.row_parts else found

    def _rehearse_call(self, now: Generation, forward: Forward, inputs: Mapping[str, Any]) -> Any:
        """Runs the forward without its blocks, with NaN in the places of a patch's tokens."""
        now.dry.called_models[now.branch] = RehearsedModel(self._key, now.is_whole, self._count_rows(inputs, now.form))
        self._visits = 0
        result = self._run_pass(_RehearsalPass(self._anatomy, self._last), forward, inputs)
        self._check_visits(now.form.visits)
        pieces = [Piece.from_mask(torch.isnan(prediction)) for prediction in list_predictions(result)]
        assert now.dry.patch is not None
        now.findings.prediction_pieces.setdefault(now.branch, {})[now.dry.patch] = pieces
        result = pytree.tree_map_only(Tensor, lambda x: x.as_subclass(RehearsedPrediction), result)
        now.dry.results[now.branch] = result
        return now.take_rehearsed_result()

    def _run_pass(self, block_pass: BlockPass, forward: Forward, inputs: Mapping[str, Any]) -> Any:
        now, self._pass, self._active = self._now, block_pass, self._every
        now.is_surveyed = True
        try:
            with torch.no_grad():
                return forward(**inputs)
        finally:
            now.is_surveyed, self._pass = False, self._divided


def _describe_inputs(values: Iterable[Any]) -> list[Any]:
    """The shape of each argument of a call, the shapes of those in a list, or a type."""
    described: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            described.append(value.shape)
        elif isinstance(value, list | tuple | dict):
            described.append(tuple([x.shape for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]))
        else:
            described.append(type(value))
    return described


def _call_with_rest(forward: Forward, names: Sequence[str], rest: Sequence[Any], **call: Any) -> Any:
    return forward(*(call.pop(name) for name in names), *rest, **call)


def _make_pass_on(anatomy: ListAnatomy) -> Callable[[Mapping[str, Any]], Any]:
    """What makes of a block's arguments what it returns if nothing happens at it."""
    streams = {"image": anatomy.image, "text": anatomy.text}
    names = [streams[name] for name in anatomy.returns]
    # Of one name it gives a value and no tuple, and None is the name of none.
    if anatomy.is_tuple and (len(names) == 1 or None in names):
        return lambda call: give_streams(anatomy, *read_streams(anatomy, call))
    return operator.itemgetter(*names)


def read_streams(anatomy: ListAnatomy, call: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The image and the text among the arguments of a block."""
    return call[anatomy.image], call.get(anatomy.text) if anatomy.text is not None else None


def give_streams(anatomy: ListAnatomy, image: Tensor, text: Tensor | None) -> Any:
    """Full-size streams in the form in which a block returns them."""
    if not anatomy.is_tuple:
        return image
    if len(anatomy.returns) == 1:
        return (image,)
    return (text, image) if anatomy.returns[0] == "text" else (image, text)


class _SurveyPass:
    """Blocks pass on what they are given, which is looked at.

    Attributes:
        poisons_text: whether the text behind the last block is a stream of its own, which is NaN then.
        has_begun: whether the first block was called.
    """

    def __init__(self, model: str, anatomy: Anatomy, last: int, advice: str, *, checks: bool) -> None:
        self._model, self._anatomy, self._last, self._checks = model, anatomy, last, checks
        self._advice = advice
        self.poisons_text = self.has_begun = False
        self._lengths: dict[str, int] = {}
        self._start, self._rows, self._latents = 0, 1, None if not anatomy.is_one_sequence else range(0)
        self._before: tuple[Tensor, Tensor | None, int] | None = None
        self._glued: set[int] = set()
        self._fed: dict[str, Tensor] = {}

    def visit_block(self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
        """Notes lengths and what is NaN as the latents are, checks arguments, and passes on the streams."""
        anatomy = hook.anatomy
        image, text = read_streams(anatomy, call)
        self._measure(hook, image, text)
        if self._checks:
            self._check_arguments(hook, call)
        if hook.index:
            given = [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor) and x.is_floating_point()]
            # Tables of positions may be on the CPU.
            self._fed[hook.name] = torch.stack([torch.isnan(x).any().to(image.device) for x in given]).any()
        self.has_begun = True
        if self._before is not None:
            last_image, last_text, version = self._before
            is_same = image is last_image and image._version == version
            if not is_same or (text is not None and last_text is not None and text is not last_text):
                self._glued.add(hook.index)
        if not hook.index:
            image = torch.nan_to_num(image)
            text = text if text is None else torch.nan_to_num(text)
        self._before = (image, text, image._version)
        if hook.index == self._last and text is not None and not self._anatomy.is_one_sequence:
            self.poisons_text, text = True, torch.full_like(text, float("nan"))
        return give_streams(anatomy, image, text)

    def is_fed(self) -> bool:
        """Whether a block was given something that the forward makes of the latents, beside the tokens."""
        return bool(self._fed) and bool(torch.stack([*self._fed.values()]).any())

    def describe_call(self, grid: Grid | None) -> CallForm:
        """What was seen."""
        if not self._lengths:
            raise ModelError(f"{self._model} called none of its blocks")
        tokens = self._lengths["N"]
        if grid is None or grid.num_tokens != tokens:
            grid = Grid(tokens, 1)
        text, glued, fed = self._lengths.get("T", 0), frozenset(self._glued), self._fed
        return CallForm(grid, text, self._start, glued, fed, rows=self._rows, latents=self._latents)

    def _measure(self, hook: BlockHook, image: Tensor, text: Tensor | None) -> None:
        anatomy = hook.anatomy
        if hook.index == 0:
            self._lengths["N"], self._rows = image.shape[anatomy.tokens], put_tokens_second(image, anatomy).shape[0]
            if self._anatomy.is_one_sequence:
                run = find_nan_tokens(image, anatomy.tokens)
                self._latents = run or range(0)
                self._start = self._latents.start
        if text is not None:
            self._lengths["T"] = text.shape[anatomy.tokens]
        elif anatomy.joint != "none":
            self._lengths.setdefault("T", image.shape[anatomy.tokens] - self._lengths["N"])
        self._lengths["J"] = self._lengths["N"] + self._lengths.get("T", 0)
        kind = "N" if anatomy.joint == "none" else "J"
        if image.shape[anatomy.tokens] != self._lengths[kind]:
            raise ModelError(
                f"{self._model}: {hook.name} is given {image.shape[anatomy.tokens]} tokens and the blocks before it "
                f"had {self._lengths[kind]}, so patches cannot be told apart in them; {self._advice}"
            )

    def _check_arguments(self, hook: BlockHook, call: Mapping[str, Any]) -> None:
        anatomy = hook.anatomy
        for name, value in call.items():
            if name in (anatomy.image, anatomy.text) or value is None or name.endswith(FOR_ATTENTION):
                continue
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            misfit = find_misfit(value, anatomy.arguments.get(name, ()), self._lengths) if leaves else None
            if misfit is not None:
                raise ModelError(
                    f"{self._model}: {hook.name} is given {name} with {misfit}; which of it belongs to a patch is not "
                    f"known, so {self._advice}, or leave out what brings it"
                )


class _FirstBlockPass:
    """Blocks pass on what they are given.

    Attributes:
        flags: which tokens in front of the first block are NaN.
    """

    flags: Tensor | None = None

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy

    def visit_block(self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
        """Passes on the streams."""
        image, text = read_streams(hook.anatomy, call)
        if not hook.index:
            self.flags = torch.isnan(image).movedim(hook.anatomy.tokens, 0).flatten(1).any(1)
            image = torch.nan_to_num(image)
        return give_streams(hook.anatomy, image, text)


class _RehearsalPass:
    """Blocks pass on what they are given; behind the last one there is NaN in the places of rehearsed tokens."""

    def __init__(self, anatomy: Anatomy, last: int) -> None:
        self._anatomy, self._last = anatomy, last

    def visit_block(self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
        """Passes on the streams."""
        anatomy = hook.anatomy
        image, text = read_streams(anatomy, call)
        if hook.index == self._last:
            assert now.dry.patch is not None
            layout = now.tokens.layout
            start = layout.text if anatomy.joint == "text_first" else 0
            image = torch.nan_to_num(image)
            for run in _locate_rehearsed_tokens(now, layout):
                image.narrow(anatomy.tokens, start + run.start, len(run)).fill_(float("nan"))
            if text is not None and now.form.returns_text and layout.carries_text(now.dry.patch):
                text = torch.full_like(text, float("nan"))
        return give_streams(anatomy, image, text)


def _locate_rehearsed_tokens(now: Generation, layout: Layout) -> tuple[range, ...]:
    """Where NaN is in a rehearsal: in a patch, or in the rows of tokens whose number has a bit."""
    assert now.dry.patch is not None
    if now.dry.bit is None:
        return layout.locate_tokens(now.dry.patch)
    start = now.form.start
    runs: list[range] = []
    for row in range(start, layout.grid.rows):
        if (row - start) >> now.dry.bit & 1:
            runs += layout.grid.locate_rows(row, row + 1)
    return merge_ranges(runs)


class _DividedPass:
    """Blocks compute the tokens at hand."""

    def __init__(self, policy: BlockPolicy, anatomy: Anatomy, last: int) -> None:
        self._policy, self._last = policy, last
        # Lists whose streams are `[B, tokens, C]`, each by itself.
        self._apart = {name for name, each in anatomy.lists.items() if each.tokens == 1 and each.joint == "none"}
        self._cut = {
            name: [(argument, kinds) for argument, kinds in each.arguments.items() if is_cut(kinds)]
            for name, each in anatomy.lists.items()
        }
        self._passed: tuple[Tensor, Tensor | None, int, int] | None = None
        self._state = self._no_tokens = TokenState(torch.empty(0), None)
        self._joined: tuple[TokenState, Tensor] | None = None
        self._has_all_tokens = False  # in the call at hand

    def visit_block(self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward) -> Any:
        """Runs a block under the policy on its tokens; returns full-size streams."""
        anatomy, index, passed, state = hook.anatomy, hook.index, self._passed, self._state
        image, text = call[anatomy.image], call.get(anatomy.text or "")
        if not (
            index
            and passed is not None
            and image is passed[0]
            and image._version == passed[2]
            and (text is None or text is passed[1] or passed[1] is None)
        ):
            state = self._find_state(now, hook, image, text)
        compute = functools.partial(self._compute_block, now, hook, call, forward)
        state = self._state = self._policy.run_block(index, compute, state)
        if index == self._last:
            image, text = self._leave_blocks(now, anatomy, state, image, text)
            self.forget_tokens()
            return give_streams(anatomy, image, text)
        if self._has_all_tokens and state.image.shape[1] == now.tokens.layout.image_tokens:
            image, text = self._join_streams(anatomy, state)
        elif index + 1 in now.form.glued:
            image, text = self._place_tokens(now, hook, state, image, text)
        self._passed = (image, text, image._version, index)
        return image if not anatomy.is_tuple else give_streams(anatomy, image, text)

    def forget_tokens(self) -> None:
        """What is no longer read must not lie in memory behind the last block."""
        self._state, self._passed, self._joined = self._no_tokens, None, None

    def _find_state(self, now: Generation, hook: BlockHook, image: Tensor, text: Tensor | None) -> TokenState:
        """The tokens at hand in front of a block, cut out of what the forward made."""
        full = self._split_streams(now.form.text, hook.anatomy, image, text)
        if hook.index == 0:
            self._has_all_tokens = now.has_all_image_tokens
            return self._policy.enter_blocks(full)
        if self._has_all_tokens:
            return full
        assert self._passed is not None
        if now.form.glued.isdisjoint(range(self._passed[3] + 1, hook.index + 1)):
            raise StateError(
                f"the forward changed the tokens in front of {hook.name} and did not when it was first called so; use "
                "a plan of data or cfg"
            )
        return self._policy.cut_tokens(full)

    def _compute_block(
        self, now: Generation, hook: BlockHook, call: dict[str, Any], forward: Forward, state: TokenState
    ) -> TokenState:
        anatomy, is_apart = hook.anatomy, hook.list_name in self._apart
        call[anatomy.image], text = state if is_apart else self._join_streams(anatomy, state)
        if anatomy.text is not None:
            call[anatomy.text] = text
        if not self._has_all_tokens:
            patch = now.token_patch
            for name, kinds in self._cut[hook.list_name]:
                if (value := call.get(name)) is not None:
                    make = functools.partial(_cut_for_patch, value, kinds, now)
                    call[name] = now.memory.get_cached_slice((hook.list_name, name, now.branch, patch), value, make)
        out = forward(**call)
        image, text = out, state.text
        if anatomy.is_tuple:
            named = dict(zip(anatomy.returns, out, strict=True))
            image, text = named["image"], named.get("text")
        if is_apart:
            return TokenState(image, text)
        return self._split_streams(0 if state.text is None else state.text.shape[1], anatomy, image, text)

    # Between the streams of the model and `[B, tokens, C]`

    def _split_streams(self, length: int, anatomy: ListAnatomy, image: Tensor, text: Tensor | None) -> TokenState:
        """The tokens of streams as the model has them; `length` is that of the text within the image's stream."""
        image = put_tokens_second(image, anatomy)
        if anatomy.joint == "none":
            return TokenState(image, None if text is None else put_tokens_second(text, anatomy))
        own = image.shape[1] - length
        if anatomy.joint == "image_first":
            state = TokenState(image[:, :own], image[:, own:])
        else:
            state = TokenState(image[:, length:], image[:, :length])
        self._joined = (state, image)
        return state

    def _join_streams(self, anatomy: ListAnatomy, state: TokenState) -> tuple[Tensor, Tensor | None]:
        """The streams as the model has them."""
        if anatomy.joint == "none":
            text = None if state.text is None or anatomy.text is None else state.text
            return _put_tokens_back(state.image, anatomy), None if text is None else _put_tokens_back(text, anatomy)
        if self._joined is not None and self._joined[0] is state:
            joined = self._joined[1]
        else:
            assert state.text is not None
            parts = (state.image, state.text) if anatomy.joint == "image_first" else (state.text, state.image)
            joined = torch.cat(parts, dim=1)
        return _put_tokens_back(joined, anatomy), None

    def _leave_blocks(
        self, now: Generation, anatomy: ListAnatomy, state: TokenState, image: Tensor, text: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The full-size streams behind the last block; what nobody reads is what came in."""
        fresh = self._policy.leave_blocks(state)
        if fresh is None:
            return image, text
        if self._has_all_tokens:
            return self._join_streams(
                anatomy, state if fresh.image is state.image else TokenState(fresh.image, state.text)
            )
        if anatomy.joint == "none":
            fresh_text = text if fresh.text is None else _put_tokens_back(fresh.text, anatomy)
            return _put_tokens_back(fresh.image, anatomy), fresh_text
        full = self._split_streams(now.form.text, anatomy, image, text)
        return self._join_streams(anatomy, TokenState(fresh.image, full.text if fresh.text is None else fresh.text))

    def _place_tokens(
        self, now: Generation, hook: BlockHook, state: TokenState, image: Tensor, text: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Full-size streams with the tokens at hand in their places; what is elsewhere is read by nobody."""
        anatomy, part = hook.anatomy, now.tokens.get_own_part(now.token_patch)
        key = (hook.index, now.branch, now.micro_batch)
        layout, like = now.tokens.layout, state.image
        whole = now.memory.get_persistent_buffer(
            (*key, "image"), (like.shape[0], layout.image_tokens, like.shape[2]), like
        )
        write_tokens(whole, state.image, part.image)
        words = None
        if state.text is not None:
            shape = (like.shape[0], layout.text, state.text.shape[2])
            words = now.memory.get_persistent_buffer((*key, "text"), shape, state.text)
            if part.text:
                write_tokens(words, state.text, (part.text,))
        return self._join_streams(anatomy, TokenState(whole, words))


def write_tokens(whole: Tensor, values: Tensor, runs: Sequence[range]) -> None:
    """Writes tokens `[B, n, C]` at the places `runs` of a whole sequence `[B, S, C]`."""
    write_runs(whole, values, runs, 1)


def _cut_for_patch(value: Any, kinds: Kinds, now: Generation) -> Any:
    return cut_argument(value, kinds, now.tokens.get_argument_runs(now.token_patch))


def put_tokens_second(x: Tensor, anatomy: ListAnatomy) -> Tensor:
    """`[B, tokens, C]` of `[tokens, B, C]` or `[tokens, C]`: a view."""
    if anatomy.tokens:
        return x
    return x[None] if x.ndim == 2 else x.transpose(0, 1)


def _put_tokens_back(x: Tensor, anatomy: ListAnatomy) -> Tensor:
    if anatomy.tokens:
        return x
    return x[0] if anatomy.has_no_batch else x.transpose(0, 1)
