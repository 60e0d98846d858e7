"""The settings of a cache: frozen configs, which are checked when they are made. Nothing here imports torch.

The names are those of cache-dit, so that its scripts run. The type of a field limits its values. The table
`CACHE_WORDS` has the other names of a field: a flag, a word in a line, a letter in `strify`. In this module a step has
one transformer call for each branch of guidance, or one for all of them; steps are counted from 0.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field

from ditile.cache.step_mask import check_step_mask
from ditile.plan.errors import ModelError, quote_value, suggest_nearest
from ditile.plan.option_classes import check_values, checked
from ditile.plan.plan import Plan

StoreType = Literal["float32", "bfloat16", "float16"]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=-1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Fields:
    """A frozen dataclass that refuses unknown fields, and remembers which fields were given.

    Two configs are equal if their values are equal, whether given or left at the default.
    """

    __slots__ = ("_given",)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    _given: frozenset[str]
    INSTEAD: ClassVar[Mapping[str, str]] = {}
    """Fields of cache-dit that ditile does not have -> what to do instead."""

    def __new__(cls, *nameless: Any, **values: Any) -> Any:
        """Raise `ModelError` for a field that is not known or not named."""
        if nameless:
            first = next(iter(cls.__dataclass_fields__))
            raise ModelError(f"{cls.__name__}({quote_value(nameless[0])}) needs a name, as in {first}=..")
        cls._check_names(f"{cls.__name__}(%s=..)", values)
        new = object.__new__(cls)
        object.__setattr__(new, "_given", frozenset(values))
        return new

    def __post_init__(self) -> None:
        check_values(type(self), self.values())

    def __reduce__(self) -> tuple[Any, ...]:
        # Only given fields are pickled, so that the copy knows which were given.
        return _rebuild_config, (type(self), {name: getattr(self, name) for name in self._given}, self._given)

    @property
    def given(self) -> frozenset[str]:
        """Return the fields that were given when this config was made, or in a later `reset`."""
        return self._given

    def values(self) -> dict[str, Any]:
        """Return all fields and their values, unchanged."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    as_dict = values

    def update(self, **changes: Any) -> None:
        """Refuse to change a config; `reset` makes another one.

        Raises:
            ModelError: always.
        """
        raise ModelError(f"a {type(self).__name__} does not change; write config = config.reset(..)")

    empty = update

    @classmethod
    def _check_names(cls, where: str, names: Iterable[str]) -> None:
        for name in names:
            if name in cls.INSTEAD:
                raise ModelError(f"{where % name} is not offered; {cls.INSTEAD[name]}")
            check_known(where % name, name, cls.__dataclass_fields__)

    @checked()
    def reset(self: C, **changes: Any) -> C:
        """Return a copy with some fields changed; this one stays unchanged.

        Raises:
            ModelError: if a field is not known, or a value is out of its range.
        """
        self._check_names(f"{type(self).__name__}.reset(%s=..)", changes)
        return _rebuild_config(type(self), self.values() | changes, self._given | set(changes))


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig(Fields):
    """The settings that all caches share.

    Attributes:
        num_inference_steps: steps of a generation, for a transformer without a pipeline.
        enable_separate_cfg: whether branches of guidance are separate calls, for a transformer without a pipeline; in
            a pipeline the calls show it.
    """

    # These have no annotations, so that they are not fields.
    WORDS = dict[str, str]()
    """Word in the line of a cache -> field; the first word names the method."""
    HAS_FORECAST = False
    """Whether the method has its own forecast, and takes no calibrator."""

    num_inference_steps: Positive | None = None
    enable_separate_cfg: bool | None = None

    def __str__(self) -> str:
        return format_cache_config(self)

    strify = __str__


class CallCacheConfig(CacheConfig):
    """The settings of a method that skips whole calls of the model, whose blocks may be unknown."""

    __slots__ = ()
    HAS_FORECAST = True

    def explain_plan_refusal(self, plan: Plan) -> str | None:
        """Explain why a plan cannot use this cache, or return None."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedScheduleConfig(CallCacheConfig):
    """A fitted schedule: some steps, fixed beforehand, compute; the rest are forecast from the last two computed steps.

    Attributes:
        steps: how many steps of a generation compute; None is half of them.
        schedule: a `Schedule`, or a file that `ditile fit` wrote; None takes the package's schedule for this model. If
            the package has none, the steps are spread over the generation, and forecasts are lines that end after half
            a gap.

    Other attributes are as in `CacheConfig`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    WORDS = {"steps": "steps", "schedule": "schedule"}

    steps: Positive | None = field(default=None, metadata={"example": 10})
    schedule: Any = None

    @checked()
    def count_computed(self, num_steps: int) -> int:
        """Return the number of steps of a generation that compute."""
        if self.steps is not None:
            return self.steps
        return -(-num_steps // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCacheConfig(CacheConfig, abc.ABC):
    """The settings that all caches of blocks share.

    Attributes:
        couple: the unit of a decision: a row of the batch, an image with all its rows of guidance, or the whole batch.
        store_dtype: the type in which values of computed steps are kept; None keeps their own type.

    Other attributes are as in `CacheConfig`.
    """

    HINT = "let mask and limits leave some out"
    """What a user can change if every step is computed."""

    couple: Literal["row", "image", "batch"] = "image"
    store_dtype: StoreType | None = None

    @abc.abstractmethod
    def resolve_for(self, steps: int, calibrator: Calibration | None) -> tuple[DBCacheConfig, Calibration | None]:
        """Return the rules and the forecast for a generation of `steps` steps. `calibrator` is the one from the
        user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DBCacheConfig(BlockCacheConfig):
    """DBCache: the first blocks of a list decide whether its middle blocks run, or reuse what they added before.

    Attributes:
        Fn_compute_blocks: number of first blocks, which always compute; the difference is the change of what they add.
            With 0 it is the change of the first block's input, and a cached step computes no block.
        Bn_compute_blocks: number of last blocks, which always compute.
        residual_diff_threshold: a step is cached if its relative L1 difference to the last computed step is smaller; 0
            never caches, 1 or more always.
        max_warmup_steps: number of first steps that always compute.
        warmup_interval: compute every n-th warmup step.
        max_cached_steps: the limit of cached steps in a generation; -1 sets none.
        max_continuous_cached_steps: the limit of cached steps in a row; -1 sets none.
        max_accumulated_residual_diff_threshold: a step computes if the sum of its difference and the differences of
            all cached steps reaches this; None or 0 sets no budget.
        accumulated_resets: whether the sum restarts at each computed step (as in TeaCache, arXiv 2411.19108) or runs
            over the whole generation.
        steps_computation_mask: 1 for each step that computes, 0 for each that may be cached; or a preset that fits any
            number of steps: slow, medium, fast, ultra. A warmup longer than the mask's leading 1s is cut to them. None
            uses no mask. A mask longer than the generation is cut, and a shorter one makes the generation fail.
        steps_computation_policy: whether steps with a 0 in the mask are cached if the difference is small (dynamic), or
            always (static). A step computes if nothing is stored yet.
        cfg_compute_first: ignored: branches keep the pipeline's order.
        cfg_diff_compute_separate: False uses the difference of a step's first branch for all branches.
        l1_hidden_states_diff_threshold: if set, replaces residual_diff_threshold, and compares what the first blocks
            return instead of what they add.
        important_condition_threshold: above 0, only tokens count whose own relative difference exceeds this.
        downsample_factor: n compares only every n-th channel.
        store: the value kept of a computed step: what the middle blocks added, or what they returned.

    Other attributes are as in `BlockCacheConfig`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    INSTEAD = {
        "cache_type": "the class says it: DBCacheConfig or DBPruneConfig",
        **dict.fromkeys(
            ("force_refresh_step_hint", "force_refresh_step_policy"),
            "compute that step by steps_computation_mask, such as [1, 0, 0, 0, 1, 0, 0, 0] for step 4 of 0 to 7",
        ),
    }

    Fn_compute_blocks: Count = 8
    Bn_compute_blocks: Count = 0
    residual_diff_threshold: Amount = 0.08
    max_warmup_steps: Count = 8
    warmup_interval: Positive = 1
    max_cached_steps: Limit = -1
    max_continuous_cached_steps: Limit = -1
    max_accumulated_residual_diff_threshold: Amount | None = field(default=None, metadata={"example": 0.5})
    accumulated_resets: bool = False
    steps_computation_mask: Sequence[int] | str | None = None
    steps_computation_policy: Literal["dynamic", "static"] = "dynamic"
    cfg_compute_first: bool = False
    cfg_diff_compute_separate: bool = True
    l1_hidden_states_diff_threshold: Amount | None = field(default=None, metadata={"example": 0.08})
    important_condition_threshold: Amount = 0.0
    downsample_factor: Positive = 1
    store: Literal["residual", "hidden"] = "residual"

    def __post_init__(self) -> None:
        Fields.__post_init__(self)
        object.__setattr__(self, "steps_computation_mask", check_step_mask(self.steps_computation_mask))

    @checked()
    def resolve_for(self, steps: int, calibrator: Calibration | None) -> tuple[DBCacheConfig, Calibration | None]:
        """Return these rules and the `calibrator`, for any number of `steps`."""
        return self, calibrator


@dataclass(frozen=True, kw_only=True, slots=True)
class DBPruneConfig(DBCacheConfig):
    """DBPrune: each block decides for itself, from the change of its input.

    Attributes:
        enable_dynamic_prune_threshold: whether the threshold of a step rises with the mean of its first 5 differences.
        max_dynamic_prune_threshold: the threshold never rises to this or more; None is twice residual_diff_threshold.
        dynamic_prune_threshold_relax_ratio: the factor for that mean.
        non_prune_block_ids: indices of further blocks that always compute, besides the first Fn and the last Bn.

    Other attributes are as in `DBCacheConfig`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    enable_dynamic_prune_threshold: bool = False
    max_dynamic_prune_threshold: Amount | None = field(default=None, metadata={"example": 0.16})
    dynamic_prune_threshold_relax_ratio: Amount = 1.25
    non_prune_block_ids: Sequence[Annotated[int, Field(ge=0)]] = field(default=(), metadata={"example": [16, 17]})

    def __post_init__(self) -> None:
        DBCacheConfig.__post_init__(self)
        object.__setattr__(self, "non_prune_block_ids", tuple(self.non_prune_block_ids))

    @property
    def highest_threshold(self) -> float:
        """Return the upper bound of a dynamic threshold."""
        if self.max_dynamic_prune_threshold is None:
            return 2 * self.residual_diff_threshold
        return self.max_dynamic_prune_threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Fields):
    """The fields that all calibrators share. With a calibrator a cached step uses a forecast, not the last value.

    Attributes:
        enable_calibrator: whether to forecast the image stream.
        enable_encoder_calibrator: whether to forecast the text stream.
        calibrator_cache_type: the stored and forecast value: what the middle blocks added, or what they returned.
        calibrator_type: the calibrator's name in a config file; each subclass has this field, with one allowed value.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    INSTEAD = {"calibrator_kwargs": "its entries are fields"}

    enable_calibrator: bool = True
    enable_encoder_calibrator: bool = True
    calibrator_cache_type: Literal["residual", "hidden_states"] = "residual"


BasicCacheConfig, CalibratorConfig = DBCacheConfig, Calibration
"""Other names of these configs, as in cache-dit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaylorSeerCalibratorConfig(Calibration):
    """TaylorSeer: the polynomial through the last computed steps (arXiv 2503.06923).

    Attributes:
        taylorseer_order: the degree of the polynomial; 1 is a line, and 0 reuses the last value.
        taylorseer_reach: how far the polynomial is followed beyond the last computed step, in gaps between the last two
            computed steps; after that the forecast is constant. None is any distance.

    Other attributes are as in `Calibration`.
    """

    taylorseer_order: Count = 1
    taylorseer_reach: Amount | None = field(default=None, metadata={"example": 1})
    calibrator_type: Literal["taylorseer"] = "taylorseer"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoCaCalibratorConfig(Calibration):
    """FoCa: a step along the mean of the slopes at the last computed step and at a first forecast (arXiv 2508.16211).

    Its fields are as in `Calibration`.
    """

    calibrator_type: Literal["foca"] = "foca"


@dataclass(frozen=True, kw_only=True, slots=True)
class DMDCalibratorConfig(Calibration):
    """Dynamic mode decomposition: a sum of exponentials through the last computed steps (Schmid 2010).

    Attributes:
        dmd_history: number of computed steps that are kept; fewer than 4 evenly spaced ones are continued by a line.
        dmd_rank: the limit of exponentials; None or 0 takes all whose singular value is not noise.
        dmd_ridge: added to each singular value before it divides, relative to the largest one.
        dmd_svd_precision: ignored: the decomposition is small, and always in double precision.

    Other attributes are as in `Calibration`.
    """

    dmd_history: Annotated[int, Field(ge=2)] = 6
    dmd_rank: Count | None = None
    dmd_ridge: Amount = 1e-8
    dmd_svd_precision: Literal["medium", "high", "highest"] | None = None
    calibrator_type: Literal["dmd"] = "dmd"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsModifier(Fields):
    """The settings of one list of blocks that differ from the pipeline's; `merge_configs` merges both.

    Attributes:
        cache_config: its given fields override the pipeline's.
        calibrator_config: its given fields override the pipeline's; one of another class replaces the pipeline's.

    Raises:
        ModelError: if a field is not known, or its value is not a config.
    """

    cache_config: BlockCacheConfig | None = None
    calibrator_config: Calibration | None = None

    def __post_init__(self) -> None:
        Fields.__post_init__(self)
        check_one_forecast(self.cache_config, self.calibrator_config)

    @checked()
    def over(
        self, cache_config: BlockCacheConfig, calibrator_config: Calibration | None
    ) -> tuple[BlockCacheConfig, Calibration | None]:
        """Merge the configs of this list with the pipeline's `cache_config` and `calibrator_config`."""
        cache = merge_configs(cache_config, self.cache_config)
        return cache or cache_config, merge_configs(calibrator_config, self.calibrator_config)


def check_one_forecast(cache: CacheConfig | None, calibrator: Calibration | None) -> None:
    """Raise `ModelError` if a method with its own forecast is given a calibrator."""
    if cache is not None and cache.HAS_FORECAST and calibrator is not None:
        raise ModelError(
            f"{type(cache).__name__} has a forecast of its own, and {type(calibrator).__name__} is another; leave the "
            "calibrator out"
        )


class CacheWord(NamedTuple):
    """The other names of a field of a config.

    Attributes:
        config: the config that has the field.
        field: its name, which is its key in a config file too. None: the word stands for the config itself.
        letters: its name in `strify`, which leaves out a field without letters.
        flag: the flag of `ditile generate`, named like the field of the command's options.
        help: the help of the flag.
        aliases: other names of the flag.
    """

    config: type[Fields]
    field: str | None = None
    letters: str = ""
    flag: str = ""
    help: str = ""
    aliases: tuple[str, ...] = ()


_CACHE = DBCacheConfig
_TAYLOR = TaylorSeerCalibratorConfig
_M = "max_cached_steps"
_MC = "max_continuous_cached_steps"
_RDT = "leave out where the first blocks' work changes less than this"
_MASK = "steps that compute: slow, medium, fast, ultra, or bins such as 6,1,1,1,1/1,2,5,5,5"
_POLICY = "steps that the mask lets go are left out where little changes, or always"
CACHE_WORDS = {
    "F": CacheWord(_CACHE, "Fn_compute_blocks", "F", "Fn", "first blocks, which always compute"),
    "B": CacheWord(_CACHE, "Bn_compute_blocks", "B", "Bn", "last blocks, which always compute"),
    "R": CacheWord(_CACHE, "residual_diff_threshold", "R", "rdt", _RDT),
    "W": CacheWord(_CACHE, "max_warmup_steps", "W", "max_warmup_steps", "first steps, which compute", ("--w",)),
    "I": CacheWord(
        _CACHE, "warmup_interval", "I", "warmup_interval", "compute every N-th of the warmup steps", ("--wi",)
    ),
    "M": CacheWord(_CACHE, _M, "M", _M, "cached steps at most; -1 is no limit", ("--mc",)),
    "MC": CacheWord(_CACHE, _MC, "MC", _MC, "cached steps in a row at most; -1 is no limit", ("--mcc",)),
    "budget": CacheWord(_CACHE, "max_accumulated_residual_diff_threshold"),
    "resets": CacheWord(_CACHE, "accumulated_resets"),
    "mask": CacheWord(_CACHE, "steps_computation_mask", "SCM", "steps_mask", _MASK),
    "policy": CacheWord(_CACHE, "steps_computation_policy", "", "steps_policy", _POLICY),
    "prune": CacheWord(DBPruneConfig),
    "taylor": CacheWord(_TAYLOR, "taylorseer_order", "T1O", "taylorseer_order", "its degree", ("-order",)),
    "dmd": CacheWord(DMDCalibratorConfig, "dmd_history", "DMDH"),
    "foca": CacheWord(FoCaCalibratorConfig, None, "FoCa"),
    "reach": CacheWord(_TAYLOR, "taylorseer_reach", "E"),
}
"""The words of a cache in one line, in the order in which errors name them."""


def format_cache_config(cache: CacheConfig, calibrator: Calibration | None = None) -> str:
    """Format the settings in one word, such as `DBCache_F1B0_W8I1M0MC3_R0.08_T1O1` or `SeaCache_0.3_MC1`.

    F and B: first and last blocks. W, I: warmup and its interval. M, MC: limits of cached steps, in all and in a row;
    0 is no limit. R: the threshold. SCM: the mask and its policy. T1O1, FoCa, DMDH6: the calibrator. Other methods show
    their first value, and the words of the values that were given.
    """
    parts = [type(cache).__name__.removesuffix("Config")]
    if isinstance(cache, DBCacheConfig):
        parts += [_show_words(cache, "F", "B"), _show_words(cache, "W", "I", "M", "MC"), _show_words(cache, "R")]
        if cache.steps_computation_mask is not None:
            parts.append(f"{_show_words(cache, 'mask')}_{cache.steps_computation_policy}")
    for place, (word, name) in enumerate(cache.WORDS.items()):
        value = getattr(cache, name)
        if value is None or (place and name not in cache.given):
            continue
        # A switch, a table and a file show only their word: their values say nothing or are long.
        if isinstance(value, int | float) and not isinstance(value, bool):
            word = word * (place > 0) + _show_value(value)  # the first word would repeat the method's name
        parts.append(word)
    if calibrator is not None:
        parts.append(_show_words(calibrator, "taylor", "dmd", "foca", "reach"))
    return "_".join(filter(None, parts))


def _show_words(config: Fields, *words: str) -> str:
    shown = ""
    for word in words:
        row = CACHE_WORDS[word]
        if not isinstance(config, row.config):
            continue
        value = "" if row.field is None else getattr(config, row.field)
        if value is not None:
            shown += row.letters + _show_value(value)
    return shown


def _show_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | tuple):
        return "".join(map(str, value))
    # No limit (-1) is shown as 0, as in cache-dit.
    return str(max(value, 0))


C = TypeVar("C", bound="Fields")


def merge_configs(base: C | None, modifier: C | None) -> C | None:
    """Merge the pipeline's config with the changes of a list's modifier.

    Fields that were given to the modifier, when it was made or by `reset`, win, even with the default value
    (`dataclasses.replace` gives all fields). The other fields are the base's. The result has the more derived of the
    two classes, such as `DBPruneConfig`; if the classes are unrelated (two different calibrators), the modifier is the
    result. If one config is None, the result is the other.
    """
    if base is None:
        return modifier
    if modifier is None:
        return base
    if isinstance(modifier, type(base)):
        subclass = type(modifier)
    elif isinstance(base, type(modifier)):
        subclass = type(base)
    else:
        return modifier
    changes = {name: getattr(modifier, name) for name in modifier.given}
    return _rebuild_config(subclass, base.values() | changes, base.given | modifier.given)


def check_known(what: str, name: Any, known: Iterable[str]) -> None:
    """Raise `ModelError` about `what` unless `name` is one of `known`. The message names the nearest one."""
    if not isinstance(name, str) or name not in known:
        raise ModelError(f"{what} is not known; {suggest_nearest(str(name), known)}")


def _rebuild_config(kind: type[C], values: dict[str, Any], given: frozenset[str]) -> C:
    new = kind(**values)
    object.__setattr__(new, "_given", frozenset(given))
    return new
