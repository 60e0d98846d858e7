"""Generation: the state of one batch of images while they are computed, from `set_timesteps` to the last `step`.

It has the micro-step and the guidance branch that the pipeline is at, and the memory that survives a step.
Hooks, attention and scheduler are given it before the call, and read it; only the loop writes it. All that it holds is
dropped when the call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ditile.model.hooks.block_policy import CallForm
from ditile.model.hooks.kv_store import GenerationMemory
from ditile.model.hooks.pieces import Piece
from ditile.model.hooks.token_arguments import Runs
from ditile.plan.anatomy import FURTHER
from ditile.plan.errors import StateError
from ditile.plan.layout import DUMMY_TEXT, Grid, Layout, Split, TokenShard, merge_ranges
from ditile.plan.schedule import MicroStep, Schedule


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """The tokens of an attention layer at a micro-step.

    Attributes:
        runs: for each rank that shares them out, where its tokens are in the whole sequence, in its own order.
        index: this rank among them.
        length: of the whole sequence.
        image: where the image is in it; empty in a layer of text alone.
        dummies: tokens here that stand for absent text, in front or behind; no other rank sees them.
        dummies_first: whether they are in front.
        are_none: whether no rank has any: the text is not computed at this micro-step.
        patches: of the sequence.
        rank_lengths: tokens of each rank, without dummies.
        real_tokens: this rank's tokens without the dummies.
    """

    runs: tuple[tuple[range, ...], ...]
    index: int
    length: int
    image: range
    dummies: int
    dummies_first: bool
    are_none: bool = False
    patches: int = 1
    rank_lengths: tuple[int, ...] = field(init=False, compare=False)
    real_tokens: slice = field(init=False, compare=False)

    def __post_init__(self) -> None:
        lengths = tuple(sum(map(len, runs)) for runs in self.runs)
        real = slice(self.dummies, None) if self.dummies_first else slice(0, lengths[self.index])
        object.__setattr__(self, "rank_lengths", lengths)
        object.__setattr__(self, "real_tokens", real if self.dummies else slice(None))

    def locate_further_keys(self, kind: str, own: int | None) -> int:
        """How many keys of tokens are in front of further ones, see `FURTHER` of `plan/anatomy.py`.

        Args:
            kind: of the attention call.
            own: keys of this rank's tokens, dummies among them; None for those of the whole sequence.
        """
        length = self.length if own is None else own
        if kind[0] == FURTHER:
            return 0
        if kind[1:] == FURTHER:
            return length
        image = len(self.image)
        if own is not None:
            image = sum(len(run) for run in self.runs[self.index] if run.start in self.image)
        return image if kind[0] == "N" else length - image


LayoutKey = tuple[int, bool]
"""A branch, and whether a call of it is computed whole."""


@dataclass(frozen=True, slots=True)
class RehearsedModel:
    """A call of a model in a rehearsal.

    Attributes:
        model: names it.
        is_whole: whether it was called to compute a whole.
        rows: of the batch.
    """

    model: object
    is_whole: bool
    rows: int


@dataclass(slots=True)
class Generation:
    """Where the pipeline is, and what must survive.

    Attributes:
        schedule: of the steps, as far as it is known.
        rounds_otherwise: whether products may round otherwise than those of one process, in any step.
        is_under_way: whether the pipeline's loop is running.
        split, index: which tokens this rank computes.
        branches: (step, calls) -> which of the calls this rank computes.
        token_patch: whose tokens are computed in it, None for all: with DistriFusion also those of the image without
            references.
        branch: counts the transformer calls since the last `scheduler.step`.
        calls: their number in a step, known after the first one.
        batch: rows of a call.
        micro_batch: counts the runs of rows, where a call is computed in several.
        batch_range: the rows of the micro-batch at hand; None is all.
        is_whole: whether the call at hand is computed whole by every rank that shares out tokens, see `Anatomy.modes`.
        whole_steps: the steps of such calls, as far as a rehearsal found them.
        layouts: of each branch, and of its calls that are computed whole; known once one of them has been surveyed.
        forms: of each call that was surveyed, by its branch, model, and the shapes and names of its arguments.
        form: of the call at hand.
        is_surveyed: whether blocks are passed by in the call at hand, or it is one of another model: it does not count.
        rehearsed_patch: the patch whose places a rehearsal finds out; None in a call that counts.
        blended_step: the step for whose latents an iteration is made in which nothing is computed, so that the pipeline
            blends them again; None in one that computes, and in a rehearsal.
        rehearsed_bit: in a rehearsal that finds out which rows of tokens come out: NaN is in those whose number has it.
        latent_rows: of the first call, what is made of latents, and the tokens between them that fill up a sequence.
        padding_rows: of the first call, those that fill it up, where reference pictures are looked for.
        reference_rows: of the first call, those of them that come out nowhere, as far as a rehearsal found them.
        called_models: in a step of a rehearsal, by branch.
        rehearsed_results: what the transformer's calls returned in a rehearsal, by branch.
        recognises_call: (its branch, model, names and shapes, as in `forms`; its arguments; the name of the first) ->
            whether a call of a dry iteration has its result in `rehearsed_results`; None where no call has.
        live_arguments: arguments of the model beside its first one that the pipeline makes of latents in each step.
        surveys_again: whether calls are surveyed that were before.
        reads_latents_everywhere: whether more than the first block reads them, so that every stage needs them.
        pieces: of the latents, by scheduler and patch; none where latents are not cut.
        prediction_pieces: of the transformer's predictions, by branch and patch; a call returns one or several.
        warmup_split, warmup_index: which tokens of whole steps, where a warmup group computes these together; None
            where there is no group, or it rests.
        is_stale: whether keys of the step before are read in the step at hand.
        keeps_keys: whether keys of the step at hand are, or may be, read in the next one.
        may_round: whether products may round otherwise in the step at hand.
    """

    schedule: Schedule = Schedule(stages=1, patches=1, steps=1, warmup=1)
    rounds_otherwise: bool = False
    is_under_way: bool = False
    split: Split = Split()
    index: int = 0
    branches: Callable[[int, int], Sequence[int]] = lambda step, calls: range(calls)
    memory: GenerationMemory = field(default_factory=GenerationMemory)
    micro_step: MicroStep = MicroStep(0, None)
    token_patch: int | None = None
    branch: int = 0
    calls: int | None = None
    batch: int = 1
    micro_batch: int = 0
    batch_range: range | None = None
    warmup_split: Split | None = None
    warmup_index: int = 0
    is_whole: bool = False
    is_stale: bool = False
    keeps_keys: bool = False
    may_round: bool = False
    whole_steps: frozenset[int] = frozenset()
    layouts: dict[LayoutKey, Layout] = field(default_factory=dict)
    forms: dict[tuple[object, ...], CallForm] = field(default_factory=dict)
    form: CallForm = field(default_factory=lambda: CallForm(Grid(1, 1), 0, 0, frozenset()))
    is_surveyed: bool = False
    rehearsed_patch: int | None = None
    blended_step: int | None = None
    rehearsed_bit: int | None = None
    latent_rows: range = range(0)
    padding_rows: frozenset[int] = frozenset()
    reference_rows: frozenset[int] = frozenset()
    called_models: dict[int, RehearsedModel] = field(default_factory=dict)
    rehearsed_results: dict[int, Any] = field(default_factory=dict)
    recognises_call: Callable[[tuple[object, ...], Mapping[str, Any], str], bool] | None = None
    live_arguments: frozenset[str] = frozenset()
    surveys_again: bool = False
    reads_latents_everywhere: bool = False
    pieces: list[list[Piece]] = field(default_factory=list)
    prediction_pieces: dict[int, dict[int, list[Piece]]] = field(default_factory=dict)
    _parts: dict[tuple[LayoutKey, int | None], tuple[TokenShard, ...]] = field(default_factory=dict)
    _own_parts: dict[tuple[LayoutKey, int | None], TokenShard] = field(default_factory=dict)
    _tokens: dict[tuple[LayoutKey, int | None, str], LayerTokens] = field(default_factory=dict)
    _runs: dict[tuple[LayoutKey, int | None], Runs] = field(default_factory=dict)

    def become(self, other: Generation) -> None:
        """Another generation begins, or there is none: all is as in `other`. Those who were given this one keep it."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def check_under_way(self) -> Generation:
        """Returns itself; raises `StateError` if the pipeline's loop is not running."""
        if not self.is_under_way:
            raise StateError(
                "the transformer was called outside the pipeline's loop over scheduler.timesteps; call the runner of a "
                "pipeline that has such a loop, or restore() it to use the transformer by itself"
            )
        return self

    def enter_micro_step(self, micro: MicroStep) -> None:
        """A micro-step begins."""
        self.micro_step, self.token_patch, schedule = micro, micro.patch, self.schedule
        if schedule.distrifusion > 1 and schedule.num_references and not schedule.computes_references(micro.step):
            self.token_patch = schedule.num_references
        self.is_stale, self.keeps_keys = (
            self.schedule.reads_stale_keys(micro.step),
            self.schedule.keeps_keys(micro.step),
        )
        self.may_round = self.rounds_otherwise or self.is_stale

    @property
    def is_dry(self) -> bool:
        """Whether nothing is computed in the iteration at hand: it is a rehearsal, or the pipeline blends latents."""
        return self.rehearsed_patch is not None or self.blended_step is not None

    @property
    def shown_step(self) -> int:
        """The step that the pipeline takes the iteration at hand for: latents are blended by the step before theirs."""
        return self.micro_step.step if self.blended_step is None else self.blended_step - 1

    @property
    def own_calls(self) -> Sequence[int]:
        """The calls of a step that this rank computes; in the first micro-step, of those so far."""
        return self.branches(self.micro_step.step, max(self.branch, 1) if self.calls is None else self.calls)

    @property
    def have_unlike_rows(self) -> bool:
        """Whether a patch has other places in one row of a prediction than in another one."""
        patches = (pieces for branch in self.prediction_pieces.values() for pieces in branch.values())
        return any(not piece.has_rows for pieces in patches for piece in pieces)

    @property
    def branch_layout(self) -> Layout:
        """The layout of the branch that is being computed."""
        return self.layouts[self.branch, self.is_whole]

    @property
    def num_references(self) -> int:
        """Patches of reference pictures; one if calls were not cut anew since references were found."""
        return max((layout.num_references for layout in self.layouts.values()), default=int(bool(self.reference_rows)))

    @property
    def layout_key(self) -> LayoutKey:
        """Names the layout of the call at hand."""
        return self.branch, self.is_whole

    def forget_layout(self) -> None:
        """Forgets how the tokens of the branch at hand are cut: it has others now."""
        self.layouts.pop(self.layout_key)
        for known in self._list_token_caches():
            for key in [key for key in known if key[0] == self.layout_key]:
                known.pop(key)

    def _list_token_caches(self) -> list[dict[Any, Any]]:
        """What is kept of layouts; the first part of each key names one."""
        return [self._parts, self._own_parts, self._tokens, self._runs]

    def list_rank_parts(self, patch: int | None, of: LayoutKey | None = None) -> tuple[TokenShard, ...]:
        """What each rank of the sequence axes has of a patch (None: of the image), in this call or one of a layout."""
        key = self.layout_key if of is None else of
        if (key, patch) not in self._parts:
            split, _ = self._get_split(patch, key[1])
            self._parts[key, patch] = split.shard_tokens(self.layouts[key], patch)
        return self._parts[key, patch]

    def get_own_part(self, patch: int | None, of: LayoutKey | None = None) -> TokenShard:
        """What this rank has of a patch (None: of the image)."""
        key = (self.branch, self.is_whole) if of is None else of
        if (key, patch) not in self._own_parts:
            _, index = self._get_split(patch, key[1])
            self._own_parts[key, patch] = self.list_rank_parts(patch, key)[index]
        return self._own_parts[key, patch]

    def forget_layouts(self) -> None:
        """Forgets how tokens are cut."""
        self.layouts.clear()
        self.prediction_pieces.clear()
        for known in self._list_token_caches():
            known.clear()

    def locate_rehearsed_tokens(self) -> tuple[range, ...]:
        """Where NaN is in a rehearsal: in a patch, or in the rows of the latents whose number has a bit."""
        layout, bit = self.branch_layout, self.rehearsed_bit
        assert self.rehearsed_patch is not None
        if bit is None:
            return layout.locate_tokens(self.rehearsed_patch)
        start = self.form.start
        rows = (row for row in range(start, layout.grid.rows) if (row - start) >> bit & 1)
        return merge_ranges(run for row in rows for run in layout.grid.locate_rows(row, row + 1))

    @property
    def has_all_image_tokens(self) -> bool:
        """Whether this rank computes all tokens of the image at this micro-step."""
        return self.token_patch is None and self._get_split(None, self.is_whole)[0].num_ranks == 1

    def _get_split(self, patch: int | None, is_whole: bool) -> tuple[Split, int]:
        """How ranks share out a patch (None: the image), and this rank's place among them."""
        if is_whole:
            return Split(), 0
        if patch is None and self.warmup_split is not None:
            return self.warmup_split, self.warmup_index
        return self.split, self.index

    def get_layer_tokens(self, kind: str) -> LayerTokens:
        """The tokens of an attention layer at this micro-step: `N` of the image, `T` of the text, `J` of both."""
        key = ((self.branch, self.is_whole), self.token_patch, kind)
        if key not in self._tokens:
            layout, parts = self.branch_layout, self.list_rank_parts(self.token_patch)
            _, own_index = self._get_split(self.token_patch, self.is_whole)
            sees_text = kind != "N" and layout.joint != "none"
            dummies = 0 if parts[own_index].text or not sees_text else DUMMY_TEXT
            first = layout.joint == "text_first"
            if kind == "T":
                runs: tuple[tuple[range, ...], ...] = tuple((part.text,) if part.text else () for part in parts)
                self._tokens[key] = LayerTokens(
                    runs, own_index, layout.text, range(0), dummies, first, not any(runs), layout.num_patches
                )
                return self._tokens[key]
            runs = tuple(layout.locate_in_sequence(part, joint=sees_text) for part in parts)
            length = layout.image_tokens + (layout.text if sees_text else 0)
            start = length - layout.image_tokens if first else 0
            image = range(start, start + layout.image_tokens)
            self._tokens[key] = LayerTokens(runs, own_index, length, image, dummies, first, patches=layout.num_patches)
        return self._tokens[key]

    def get_argument_runs(self, patch: int | None) -> Runs:
        """Where this rank's tokens of a patch (None: of the image) are among those of each kind."""
        key = ((self.branch, self.is_whole), patch)
        if key not in self._runs:
            layout, part = self.branch_layout, self.get_own_part(patch)
            # What belongs to a dummy is that of any token of the text, which may be of one token.
            text = (part.text,) if part.text else (range(min(1, layout.text)),) * DUMMY_TEXT
            first = layout.joint == "text_first"
            start = 0 if first else layout.image_tokens
            words = tuple(range(start + run.start, start + run.stop) for run in text)
            pixels = layout.locate_in_sequence(TokenShard(range(0), part.image), joint=True)
            self._runs[key] = {"N": part.image, "T": text, "J": words + pixels if first else pixels + words}
        return self._runs[key]

    def get_branch_constant(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A value that is constant in the calls of this branch and micro-batch; `make` computes it once."""
        return self.memory.get_constant((key, self.branch, self.micro_batch), make)

    def take_rehearsed_result(self) -> Any:
        """The result of a call in an iteration in which nothing is computed; the next branch is at hand then."""
        result = self.rehearsed_results[self.branch]
        self.advance_branch()
        return result

    def advance_branch(self) -> None:
        """Counts a transformer call that is over."""
        self.branch += 1
        self.micro_batch, self.batch_range = 0, None

    def end_micro_step(self) -> None:
        """Checks the number of calls of a micro-step, once the scheduler has stepped.

        Raises:
            StateError: if the pipeline called a divided transformer more or less often than before, and keys or
                messages that are still to come belong to its calls.
        """
        if self.calls != self.branch:
            if self.calls is not None and (self.pieces or self.is_stale):
                raise self.make_calls_error(self.branch)
            self.calls = self.branch
        self.branch = 0

    def make_calls_error(self, calls: int) -> StateError:
        """What to raise where the number of calls in a step must not change."""
        return StateError(
            f"the pipeline called the transformer {calls} times in step {self.micro_step.step} and {self.calls} times "
            "before, and stale keys and the messages of stages belong to calls; guide all steps, or use a plan without "
            "pipefusion, patches and distrifusion, such as ulysses"
        )
