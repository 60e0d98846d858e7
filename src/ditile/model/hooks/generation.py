"""Generation: the state of one batch of images while they are computed, from `set_timesteps` to the last `step`.

It has the pipeline's current micro-step and guidance branch, and the memory that survives a step. Hooks, attention and
scheduler receive it before the call, and read it. Its parts are divided by who writes them: the loop, the model's calls
(`LayoutTokens` among them), and the rehearsal (`DryIteration`, `Findings`). All of it is dropped when the call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from ditile.distributed.wire import SiteBases
from ditile.model.hooks.block_policy import CallForm
from ditile.model.hooks.kv_store import GenerationMemory
from ditile.model.hooks.pieces import Piece
from ditile.model.hooks.token_arguments import Runs
from ditile.plan.anatomy import FURTHER
from ditile.plan.errors import StateError
from ditile.plan.layout import DUMMY_TEXT, Grid, Layout, Split, TokenShard
from ditile.plan.plan import suggest_whole_images
from ditile.plan.schedule import MicroStep, PatchSchedule


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """The tokens of an attention layer at a micro-step.

    Attributes:
        runs: for each rank of the split, the places of its tokens in the whole sequence, in its own order.
        index: this rank's place in the split.
        length: the number of tokens in the whole sequence.
        image: the places of the image in the sequence; empty in a layer of text only.
        dummies: the number of this rank's tokens that stand for absent text; no other rank sees them.
        dummies_first: whether dummies come before the real tokens, and not after them.
        are_none: whether no rank has tokens: the text is not computed at this micro-step.
        patches: the number of patches in the sequence.
        rank_lengths: the number of each rank's tokens, without dummies.
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
        real_tokens = slice(None)
        if self.dummies and self.dummies_first:
            real_tokens = slice(self.dummies, None)
        elif self.dummies:
            real_tokens = slice(0, lengths[self.index])
        # They are computed once, as every attention layer of every micro-step reads them.
        object.__setattr__(self, "rank_lengths", lengths)
        object.__setattr__(self, "real_tokens", real_tokens)

    def locate_further_keys(self, kind: str, own: int | None) -> int:
        """Return the number of token keys before the extra keys, see `FURTHER` of `plan/anatomy.py`.

        Args:
            kind: the kind of the attention call.
            own: the number of keys of this rank's tokens, with its dummies; None for keys of the whole sequence.
        """
        length = self.length if own is None else own
        # The letters of a kind are in the order of its keys.
        if kind[0] == FURTHER:
            return 0
        if kind[1:] == FURTHER:
            return length
        num_image = len(self.image)
        if own is not None:
            num_image = sum(len(run) for run in self.runs[self.index] if run.start in self.image)
        if kind[0] == "N":
            return num_image
        return length - num_image


@dataclass(slots=True)
class TokenShares:
    """The split of a call's tokens over ranks, and this rank's place in it.

    Attributes:
        split, index: the split of a patch, or of the image, and this rank's place in it.
        warmup_split, warmup_index: the split of the whole image by a warmup group, and this rank's place in it; the
            split is None if there is no group, or it is inactive.
    """

    split: Split = Split()
    index: int = 0
    warmup_split: Split | None = None
    warmup_index: int = 0

    def select_split(self, patch: int | None, *, is_whole: bool) -> tuple[Split, int]:
        """Return the split of a patch (None: of the image) and this rank's place; `is_whole` calls are not split."""
        if is_whole:
            return Split(), 0
        if patch is None and self.warmup_split is not None:
            return self.warmup_split, self.warmup_index
        return self.split, self.index


class LayoutTokens:
    """The tokens of each rank in calls with one layout.

    Everything is computed once, because blocks ask for it in every micro-step.

    Args:
        layout: how the tokens are cut into patches.
        shares: how ranks split the tokens.
    """

    def __init__(self, layout: Layout, shares: TokenShares, *, is_whole: bool) -> None:
        self.layout = layout
        self._shares = shares
        self._is_whole = is_whole
        self._rank_parts: dict[int | None, tuple[TokenShard, ...]] = {}
        self._own_parts: dict[int | None, TokenShard] = {}
        self._layers: dict[tuple[int | None, str], LayerTokens] = {}
        self._runs: dict[int | None, Runs] = {}

    def list_rank_parts(self, patch: int | None) -> tuple[TokenShard, ...]:
        """Return each sequence rank's tokens of a patch (None: of the image)."""
        if patch not in self._rank_parts:
            split, _ = self._shares.select_split(patch, is_whole=self._is_whole)
            self._rank_parts[patch] = split.shard_tokens(self.layout, patch)
        return self._rank_parts[patch]

    def get_own_part(self, patch: int | None) -> TokenShard:
        """Return this rank's tokens of a patch (None: of the image)."""
        if patch not in self._own_parts:
            _, index = self._shares.select_split(patch, is_whole=self._is_whole)
            self._own_parts[patch] = self.list_rank_parts(patch)[index]
        return self._own_parts[patch]

    def get_layer_tokens(self, patch: int | None, kind: str) -> LayerTokens:
        """Return the tokens of an attention layer: `N` of the image, `T` of the text, `J` of both."""
        key = (patch, kind)
        if key in self._layers:
            return self._layers[key]
        layout = self.layout
        parts = self.list_rank_parts(patch)
        _, index = self._shares.select_split(patch, is_whole=self._is_whole)
        has_text = kind != "N" and layout.joint != "none"
        dummies = DUMMY_TEXT if has_text and not parts[index].text else 0
        text_first = layout.joint == "text_first"
        if kind == "T":
            text_runs: list[tuple[range, ...]] = []
            for part in parts:
                runs_of_rank = (part.text,) if part.text else ()
                text_runs.append(runs_of_rank)
            are_none = not any(text_runs)
            tokens = LayerTokens(
                tuple(text_runs), index, layout.text, range(0), dummies, text_first, are_none, layout.num_patches
            )
        else:
            runs = tuple(layout.locate_in_sequence(part, joint=has_text) for part in parts)
            text = layout.text if has_text else 0
            start = text if text_first else 0
            image = range(start, start + layout.image_tokens)
            length = layout.image_tokens + text
            tokens = LayerTokens(runs, index, length, image, dummies, text_first, patches=layout.num_patches)
        self._layers[key] = tokens
        return tokens

    def get_argument_runs(self, patch: int | None) -> Runs:
        """Return, for each kind of tokens, the places of this rank's tokens of a patch (None: of the image)."""
        if patch not in self._runs:
            layout = self.layout
            part = self.get_own_part(patch)
            # A dummy gets the arguments of the text's first token, because the text may have only one.
            dummies = (range(min(1, layout.text)),) * DUMMY_TEXT
            text = (part.text,) if part.text else dummies
            image = layout.locate_in_sequence(TokenShard(range(0), part.image), joint=True)
            if layout.joint == "text_first":
                self._runs[patch] = {"N": part.image, "T": text, "J": text + image}
            else:
                start = layout.image_tokens
                after_image = tuple(range(start + run.start, start + run.stop) for run in text)
                self._runs[patch] = {"N": part.image, "T": text, "J": image + after_image}
        return self._runs[patch]


LayoutKey = tuple[int, bool]
"""A branch, and whether its call is computed whole."""


@dataclass(frozen=True, slots=True)
class RehearsedModel:
    """A call of a model in a rehearsal.

    Attributes:
        model: the id of the model.
        is_whole: whether the call computed the whole image.
        rows: the number of rows in its batch.
    """

    model: object
    is_whole: bool
    rows: int


@dataclass(slots=True)
class DryIteration:
    """An iteration of the pipeline's loop that computes no block; the rehearsal and the calls in it write this.

    Attributes:
        patch: the patch whose places a rehearsal finds; None in an iteration that computes, and in one that blends.
        bit: rows of tokens whose number has this bit are NaN, in a rehearsal that finds the rows that reach the result.
        blended_step: the step for which the pipeline blends its latents again; None in any other iteration.
        called_models: the model that each branch called.
        results: the results of the transformer's calls, by branch.
        recognises_call: (key of a call as in `Findings.forms`, its arguments, name of the latents among them) ->
            whether `results` already has its result, so that it is not made; None if every call is made.
        surveys_again: whether calls that were surveyed before are surveyed again.
        latent_rows: the tokens of the first call that are made of latents, with padding between such tokens.
        padding_rows: the tokens of the first call that pad it; they are found if there may be reference images.
    """

    patch: int | None = None
    bit: int | None = None
    blended_step: int | None = None
    called_models: dict[int, RehearsedModel] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    recognises_call: Callable[[tuple[object, ...], Mapping[str, Any], str], bool] | None = None
    surveys_again: bool = False
    latent_rows: range = range(0)
    padding_rows: frozenset[int] = frozenset()


@dataclass(slots=True)
class Findings:
    """The results of surveys and a rehearsal of a pipeline's call; later calls with the same shapes reuse them.

    Attributes:
        forms: the form of each surveyed call, by its branch, model, mode, and the shapes and names of its arguments.
        prediction_pieces: by branch and patch, the patch's piece of each prediction that the call returns.
        whole_steps: steps with calls that are computed whole.
        changed_steps: steps that must be synchronous: they call another model than the step before, or in another mode,
            or compute the whole image.
        reference_rows: the tokens of reference images in the first call.
        num_references: the number of patches of reference images.
        live_arguments: arguments of the model, apart from its first one, that the pipeline makes of latents in each
            step.
        reads_latents_everywhere: whether more than the first block reads the latents, so that every stage needs them.
    """

    forms: dict[tuple[object, ...], CallForm] = field(default_factory=dict)
    prediction_pieces: dict[int, dict[int, list[Piece]]] = field(default_factory=dict)
    whole_steps: frozenset[int] = frozenset()
    changed_steps: frozenset[int] = frozenset()
    reference_rows: frozenset[int] = frozenset()
    num_references: int = 0
    live_arguments: frozenset[str] = frozenset()
    reads_latents_everywhere: bool = False

    def have_unlike_rows(self) -> bool:
        """Return whether the places of a patch differ from row to row of a prediction."""
        for pieces_of_patches in self.prediction_pieces.values():
            for pieces in pieces_of_patches.values():
                if any(not piece.has_rows for piece in pieces):
                    return True
        return False


class CallRecorder(Protocol):
    """Records calls of a model, see `ditile.model.recording`."""

    def run_call(self, now: Generation, model: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of a model, from a recording or not; `forward` may be called a second time after it raised."""

    def note_code(self, reason: str) -> None:
        """Note a call that bypasses the recorder, with the reason."""


_NO_LAYOUT = Layout.cut_into_patches(Grid(1, 1), 1, 0, "none")


@dataclass(slots=True)
class Generation:
    """The pipeline's position, and the state that survives a step.

    The loop writes, at the beginning:
        schedule: the micro-steps of all steps, as far as they are known.
        is_under_way: whether the pipeline's loop is running.
        shares: which tokens this rank computes.
        branches: (step, calls) -> which of the calls this rank computes.
        memory: keys, values, and what is remembered.
        is_read: whether the model's result is read, as on the last stage.
        recorder: records calls of the model and plays them in later steps; None if every call runs its code.
        pieces: by scheduler and patch, the patch's piece of the latents; empty if latents are not cut.

    The loop writes, in each micro-step:
        micro_step: the current micro-step; its number of the step counts only steps that compute.
        loop_step: the step of the pipeline's loop, which also counts steps whose predictions are forecast.
        computes: whether the model's calls are made; None if the first call decides.
        token_patch: the patch whose tokens are computed, None for all patches. With DistriFusion it may be the patch
            that is the whole image without its references.
        is_stale: whether attention reads keys of the step before.
        keeps_keys: whether the keys are, or may be, read in the next step.
        sends_in_full: whether no message may be a difference from an earlier one.

    Calls of the model write:
        branch: counts the transformer calls since the last `scheduler.step`.
        calls: the number of transformer calls in a step, known after the first step.
        is_forecast: whether the last call was not made.
        batch: the number of rows in a call.
        micro_batch: the number of the current micro-batch, if a call is computed in several.
        batch_range: the rows of the current micro-batch; None is all rows.
        is_whole: whether every rank computes all tokens of the current call, see `Anatomy.modes`.
        form: the form of the current call.
        is_surveyed: whether the current call does not count: it computes no block, or is a call of another model.
        layouts: the tokens of each branch, separately for calls that are computed whole; known after a survey.
        tokens: the tokens of the current call, out of `layouts`.

    The rehearsal writes `dry` and `findings`.
    """

    schedule: PatchSchedule = PatchSchedule(stages=1, patches=1, steps=1, warmup=1)
    is_under_way: bool = False
    shares: TokenShares = field(default_factory=TokenShares)
    branches: Callable[[int, int], Sequence[int]] = lambda step, calls: range(calls)
    memory: GenerationMemory = field(default_factory=GenerationMemory)
    is_read: bool = True
    recorder: CallRecorder | None = None
    pieces: list[list[Piece]] = field(default_factory=list)

    micro_step: MicroStep = MicroStep(0, None)
    loop_step: int = 0
    computes: bool | None = None
    token_patch: int | None = None
    is_stale: bool = False
    keeps_keys: bool = False
    sends_in_full: bool = False

    branch: int = 0
    calls: int | None = None
    is_forecast: bool = False
    batch: int = 1
    micro_batch: int = 0
    batch_range: range | None = None
    is_whole: bool = False
    form: CallForm = field(default_factory=lambda: CallForm(Grid(1, 1), 0, 0, frozenset()))
    is_surveyed: bool = False
    layouts: dict[LayoutKey, LayoutTokens] = field(default_factory=dict)
    tokens: LayoutTokens = field(default_factory=lambda: LayoutTokens(_NO_LAYOUT, TokenShares(), is_whole=True))

    dry: DryIteration = field(default_factory=DryIteration)
    findings: Findings = field(default_factory=Findings)

    def become(self, other: Generation) -> None:
        """Take over the state of another generation; hooks hold this object for as long as the model is divided."""
        for state in fields(self):
            setattr(self, state.name, getattr(other, state.name))

    def check_under_way(self) -> Generation:
        """Return itself; raise `StateError` if the pipeline's loop is not running."""
        if not self.is_under_way:
            raise StateError(
                "the transformer was called outside the pipeline's loop over scheduler.timesteps; call the runner of a "
                "pipeline that has such a loop, or restore() it to use the transformer by itself"
            )
        return self

    def enter_micro_step(self, micro: MicroStep) -> None:
        """Begin a micro-step."""
        schedule = self.schedule
        self.micro_step = micro
        self.token_patch = micro.patch
        if schedule.distrifusion > 1 and schedule.num_references and not schedule.computes_references(micro.step):
            # The patches before this one are references, whose keys do not change.
            self.token_patch = schedule.num_references
        self.is_stale = schedule.reads_stale_keys(micro.step)
        self.keeps_keys = schedule.keeps_keys(micro.step)
        self.sends_in_full = schedule.sends_in_full(micro.step)
        if self.sends_in_full:
            self.memory.bases.clear()

    def find_bases(self, *site: Hashable) -> SiteBases | None:
        """Find what last arrived at the site of a message of the current call.

        The site includes the sizes of the message on all ranks, so that all agree on whether the site is new. Returns
        None in a step whose messages travel in full.
        """
        if self.sends_in_full:
            return None
        return self.memory.bases.setdefault((self.branch, self.token_patch, self.micro_batch, *site), {})

    @property
    def is_dry(self) -> bool:
        """Return whether this iteration computes nothing: it is a rehearsal, or the pipeline blends latents."""
        return self.dry.patch is not None or self.dry.blended_step is not None

    @property
    def own_calls(self) -> Sequence[int]:
        """Return this rank's calls in a step; in the first micro-step, among the calls made so far."""
        # The number of calls is known only after the first step.
        calls = self.calls
        if calls is None:
            calls = max(self.branch, 1)
        return self.branches(self.micro_step.step, calls)

    @property
    def num_references(self) -> int:
        """Return the number of patches of reference images; until calls are cut, 1 if there are such images."""
        counts = [tokens.layout.num_references for tokens in self.layouts.values()]
        if counts:
            return max(counts)
        return int(bool(self.findings.reference_rows))

    @property
    def has_all_image_tokens(self) -> bool:
        """Return whether this rank computes all image tokens at this micro-step."""
        if self.token_patch is not None:
            return False
        split, _ = self.shares.select_split(None, is_whole=self.is_whole)
        return split.num_ranks == 1

    def forget_layouts(self) -> None:
        """Forget how tokens are cut."""
        self.layouts.clear()
        self.findings.prediction_pieces.clear()

    def take_rehearsed_result(self) -> Any:
        """Return the result of a call in an iteration that computes nothing, and count the call."""
        result = self.dry.results[self.branch]
        self.advance_branch()
        return result

    def advance_branch(self) -> None:
        """Count a transformer call that is over."""
        self.branch += 1
        # The next call begins with its whole batch again.
        self.micro_batch = 0
        self.batch_range = None

    def end_micro_step(self) -> None:
        """Check the number of calls in a micro-step, after the scheduler has stepped.

        Raises:
            StateError: if the pipeline called a divided transformer more or less often than before, while keys or
                messages still to come belong to its calls.
        """
        if self.calls != self.branch:
            # Whole latents and fresh keys belong to no call, so guidance may begin or end.
            if self.calls is not None and (self.pieces or self.is_stale):
                raise self.make_calls_error(self.branch)
            self.calls = self.branch
        self.branch = 0

    def make_calls_error(self, calls: int) -> StateError:
        """Make the error for a step with another number of calls."""
        return StateError(
            f"the pipeline called the transformer {calls} times in step {self.micro_step.step} and {self.calls} times "
            "before, and stale keys and the messages of stages belong to calls; guide all steps, or use "
            f"{suggest_whole_images(stale_keys=True)}"
        )
