"""What a user says of the cache. Values, checked when made; nothing here imports torch.

The names are those that cache-dit documents, so that a script for it runs. A step below is one call of the transformer
and its branches of guidance, counted from 0.

What the configs of the cache have in common: their fields are checked, and they know which of them were given.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from ditile.cache.step_mask import check_preset_name
from ditile.errors import ModelError

__all__ = [
    "Calibration",
    "DBCacheConfig",
    "DBPruneConfig",
    "DMDCalibratorConfig",
    "FoCaCalibratorConfig",
    "ParamsModifier",
    "TaylorSeerCalibratorConfig",
    "choose_stored_value",
    "merge_configs",
    "format_cache_config",
]

StoreType = Literal["bfloat16", "float16", "float32"]


class Fields:
    """A frozen dataclass that refuses unknown fields, and remembers which were given.

    Two configs are equal where their values are, whether given or left at the default.
    """

    __slots__ = ("_given",)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    _given: frozenset[str]

    def __new__(cls, **values: Any) -> Any:
        """Raises `ModelError`, with the nearest known one, for a field that there is not."""
        for name in values:
            check_known(f"{cls.__name__}({name}=..)", name, cls.__dataclass_fields__)
        new = object.__new__(cls)
        object.__setattr__(new, "_given", frozenset(values))
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_config, (type(self), {name: getattr(self, name) for name in self._given}, self._given)

    @property
    def given(self) -> frozenset[str]:
        """The fields that were named when this was made, or in a `reset` since."""
        return self._given

    def values(self) -> dict[str, Any]:
        """All fields and their values, as they are."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def reset(self: C, **changes: Any) -> C:
        """A copy with some fields changed; this one stays as it is.

        Raises:
            ModelError: if a field is not known, or a value is out of its range.
        """
        for name in changes:
            check_known(f"{type(self).__name__}.reset({name}=..)", name, self.__dataclass_fields__)
        return _rebuild_config(type(self), self.values() | changes, self._given | set(changes))


@dataclass(frozen=True, kw_only=True, slots=True)
class DBCacheConfig(Fields):
    """DBCache: the first blocks of a list say whether its middle is computed, or what it added before is added again.

    Attributes:
        Fn_compute_blocks: first blocks, which always compute; the change of what they add is the difference. With 0 it
            is the change of what comes into the first block, and a cached step computes no block at all.
        Bn_compute_blocks: last blocks, which always compute.
        residual_diff_threshold: a step is cached where the relative L1 difference to the last computed step is less;
            0 never caches, 1 or more always.
        max_warmup_steps: the first steps, which compute; all others may be cached.
        warmup_interval: compute every n-th warmup step.
        max_cached_steps: cached steps of a generation at most; -1 is no limit.
        max_continuous_cached_steps: cached steps in a row at most; -1 is no limit.
        max_accumulated_residual_diff_threshold: a step computes where its difference and those of the steps that were
            cached so far add up to this; None is no budget.
        accumulated_resets: the sum begins anew at a computed step (as in TeaCache, arXiv 2411.19108); else it is spent
            once per generation.
        steps_computation_mask: 1 for each step that computes, 0 for each that may be cached; or a preset that fits any
            number of steps: slow, medium, fast, ultra. A warmup longer than the mask's leading 1s is cut to
            them. None is no mask. A mask longer than the generation is cut, a shorter one is refused when it begins.
        steps_computation_policy: steps of the mask that are 0 are cached where the difference is small (dynamic), or
            always (static). A step without anything stored computes.
        enable_separate_cfg: whether branches of guidance are calls of their own, for a transformer without a pipeline;
            with one it is seen from the calls.
        cfg_compute_first: accepted; so is their order.
        cfg_diff_compute_separate: False takes the difference of the first branch of a step for all of them.
        num_inference_steps: steps of a generation where there is no pipeline to say so.
        l1_hidden_states_diff_threshold: compare what the first blocks return, not what they add, with this threshold
            in place of residual_diff_threshold; None does not.
        important_condition_threshold: above 0 the difference is the mean over those tokens alone whose own relative
            difference is more.
        downsample_factor: the difference is that of every n-th channel.
        couple: what decides for itself: each row of the batch, each image with all its rows of guidance, or the whole
            batch.
        store: what is kept of a computed step: what the middle blocks added, or what they returned.
        store_dtype: the type in which it is kept; None is its own.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    Fn_compute_blocks: int = 8
    Bn_compute_blocks: int = 0
    residual_diff_threshold: float = 0.08
    max_warmup_steps: int = 8
    warmup_interval: int = 1
    max_cached_steps: int = -1
    max_continuous_cached_steps: int = -1
    max_accumulated_residual_diff_threshold: float | None = None
    accumulated_resets: bool = False
    steps_computation_mask: Sequence[int] | str | None = None
    steps_computation_policy: Literal["dynamic", "static"] = "dynamic"
    enable_separate_cfg: bool | None = None
    cfg_compute_first: bool = False
    cfg_diff_compute_separate: bool = True
    num_inference_steps: int | None = None
    l1_hidden_states_diff_threshold: float | None = None
    important_condition_threshold: float = 0.0
    downsample_factor: int = 1
    couple: Literal["row", "image", "batch"] = "image"
    store: Literal["residual", "hidden"] = "residual"
    store_dtype: StoreType | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("Fn_compute_blocks", 0),
            ("Bn_compute_blocks", 0),
            ("max_warmup_steps", 0),
            ("warmup_interval", 1),
            ("max_cached_steps", -1),
            ("max_continuous_cached_steps", -1),
            ("downsample_factor", 1),
        ):
            check_whole_number(self, name, least)
        check_whole_number(self, "num_inference_steps", 1, none=True)
        check_finite_number(self, "residual_diff_threshold", 0, 0.08)
        check_finite_number(self, "max_accumulated_residual_diff_threshold", 0, 0.5, none=True)
        check_finite_number(self, "l1_hidden_states_diff_threshold", 0, 0.08, none=True)
        check_finite_number(self, "important_condition_threshold", 0, 0.0)
        for name in ("accumulated_resets", "cfg_compute_first", "cfg_diff_compute_separate"):
            check_one_of(self, name, True, False)
        check_one_of(self, "enable_separate_cfg", None, True, False)
        check_one_of(self, "steps_computation_policy", "dynamic", "static")
        check_one_of(self, "couple", "row", "image", "batch")
        check_one_of(self, "store", "residual", "hidden")
        check_one_of(self, "store_dtype", None, "bfloat16", "float16", "float32")
        if isinstance(self.steps_computation_mask, str):
            check_preset_name(self.steps_computation_mask)
        elif self.steps_computation_mask is not None:
            object.__setattr__(self, "steps_computation_mask", _check_step_mask(self.steps_computation_mask))

    def __str__(self) -> str:
        return format_cache_config(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DBPruneConfig(DBCacheConfig):
    """DBPrune: each block decides for itself, from the change of what it is given.

    Attributes:
        enable_dynamic_prune_threshold: the threshold of a step rises with the mean of its first five differences.
        max_dynamic_prune_threshold: how far it may rise; None is twice residual_diff_threshold.
        dynamic_prune_threshold_relax_ratio: times that mean.
        non_prune_block_ids: blocks that always compute, by their place in the list; the first Fn and the last Bn do.

    The others are those of `DBCacheConfig`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    enable_dynamic_prune_threshold: bool = False
    max_dynamic_prune_threshold: float | None = None
    dynamic_prune_threshold_relax_ratio: float = 1.25
    non_prune_block_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        DBCacheConfig.__post_init__(self)
        check_one_of(self, "enable_dynamic_prune_threshold", True, False)
        check_finite_number(self, "max_dynamic_prune_threshold", 0, 0.16, none=True)
        check_finite_number(self, "dynamic_prune_threshold_relax_ratio", 0, 1.25)
        ids = self.non_prune_block_ids
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(is_whole_number(k) and k >= 0 for k in ids):
            raise ModelError(f"non_prune_block_ids={ids!r} are no numbers of blocks; give some such as [16, 17]")
        object.__setattr__(self, "non_prune_block_ids", tuple(ids))

    @property
    def highest_threshold(self) -> float:
        """How far a dynamic threshold may rise."""
        limit = self.max_dynamic_prune_threshold
        return 2 * self.residual_diff_threshold if limit is None else limit

    def __str__(self) -> str:
        return format_cache_config(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Fields):
    """What the calibrators have in common: a cached step takes a forecast of what is stored, not the last of it.

    Attributes:
        enable_calibrator: forecast the image stream.
        enable_encoder_calibrator: forecast the text stream.
        calibrator_cache_type: what is stored and forecast: what the middle blocks added, or what they returned.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    enable_calibrator: bool = True
    enable_encoder_calibrator: bool = True
    calibrator_cache_type: Literal["residual", "hidden_states"] = "residual"

    def __post_init__(self) -> None:
        check_one_of(self, "enable_calibrator", True, False)
        check_one_of(self, "enable_encoder_calibrator", True, False)
        check_one_of(self, "calibrator_cache_type", "residual", "hidden_states")

    @property
    def tag(self) -> str:
        """The few letters that stand for it in `strify`."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaylorSeerCalibratorConfig(Calibration):
    """TaylorSeer: the polynomial through the last computed steps (arXiv 2503.06923).

    Attributes:
        taylorseer_order: its degree; 1 is a line, and 0 reuse.
        taylorseer_reach: how far it goes beyond the last computed step, in gaps between the last two of them; further
            on it stays as it is there. None is any distance.
        calibrator_type: accepted; says what the class says.

    The others are those of `Calibration`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    taylorseer_order: int = 1
    taylorseer_reach: float | None = None
    calibrator_type: Literal["taylorseer"] = "taylorseer"

    def __post_init__(self) -> None:
        Calibration.__post_init__(self)
        check_whole_number(self, "taylorseer_order", 0)
        check_finite_number(self, "taylorseer_reach", 0, 1, none=True)
        check_one_of(self, "calibrator_type", "taylorseer")

    @property
    def tag(self) -> str:
        """The few letters that stand for it in `strify`."""
        reach = "" if self.taylorseer_reach is None else f"E{self.taylorseer_reach:g}"
        return f"T1O{self.taylorseer_order}{reach}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoCaCalibratorConfig(Calibration):
    """FoCa: a forecast by the slope at the last computed step, corrected by the slope there (arXiv 2508.16211).

    Attributes:
        calibrator_type: accepted; says what the class says.

    The others are those of `Calibration`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    calibrator_type: Literal["foca"] = "foca"

    def __post_init__(self) -> None:
        Calibration.__post_init__(self)
        check_one_of(self, "calibrator_type", "foca")

    @property
    def tag(self) -> str:
        """The few letters that stand for it in `strify`."""
        return "FoCa"


@dataclass(frozen=True, kw_only=True, slots=True)
class DMDCalibratorConfig(Calibration):
    """Dynamic mode decomposition: a sum of exponentials through the last computed steps (Schmid 2010).

    Attributes:
        dmd_history: computed steps that are kept; it takes 4 that are evenly spaced, with fewer it is a line.
        dmd_rank: exponentials at most; None or 0 takes all that stand out from the noise.
        dmd_ridge: added to the singular values, relative to the first, where they are divided by.
        dmd_svd_precision: accepted; the decomposition is of a few numbers, and always in double precision.
        calibrator_type: accepted; says what the class says.

    The others are those of `Calibration`.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    dmd_history: int = 6
    dmd_rank: int | None = None
    dmd_ridge: float = 1e-8
    dmd_svd_precision: Literal["medium", "high", "highest"] | None = None
    calibrator_type: Literal["dmd"] = "dmd"

    def __post_init__(self) -> None:
        Calibration.__post_init__(self)
        check_whole_number(self, "dmd_history", 2)
        check_whole_number(self, "dmd_rank", 0, none=True)
        check_finite_number(self, "dmd_ridge", 0, 1e-8)
        check_one_of(self, "dmd_svd_precision", None, "medium", "high", "highest")
        check_one_of(self, "calibrator_type", "dmd")

    @property
    def tag(self) -> str:
        """The few letters that stand for it in `strify`."""
        return f"DMDH{self.dmd_history}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsModifier(Fields):
    """What is different for one list of blocks. How it meets the pipeline's own configs is said at `merged`.

    Attributes:
        cache_config: the fields that were given to it win.
        calibrator_config: the same; one of another kind takes the place of the pipeline's.

    Raises:
        ModelError: if a field is not known, or no config.
    """

    cache_config: DBCacheConfig | None = None
    calibrator_config: Calibration | None = None

    def __post_init__(self) -> None:
        for name, kind, example in (
            ("cache_config", DBCacheConfig, "DBCacheConfig"),
            ("calibrator_config", Calibration, "TaylorSeerCalibratorConfig"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ModelError(f"{name}={value!r} is no config; give a {example}(..)")

    def over(
        self, cache_config: DBCacheConfig, calibrator_config: Calibration | None
    ) -> tuple[DBCacheConfig, Calibration | None]:
        """The configs of its list, where the pipeline has `cache_config` and `calibrator_config`."""
        cache = merge_configs(cache_config, self.cache_config)
        return cache or cache_config, merge_configs(calibrator_config, self.calibrator_config)


def choose_stored_value(cache: DBCacheConfig, calibrator: Calibration | None) -> Literal["residual", "hidden"]:
    """What is stored of a computed step: what the middle blocks returned if either config says so."""
    returned = calibrator is not None and calibrator.calibrator_cache_type == "hidden_states"
    return "hidden" if returned else cache.store


def format_cache_config(cache: DBCacheConfig, calibrator: Calibration | None = None) -> str:
    """One word that says what was asked for, such as `DBCache_F1B0_W8I1M0MC3_R0.08_T1O1`.

    F and B: first and last blocks. W, I: warmup and its interval. M, MC: limits of cached steps and of those in a row,
    0 for none. R: the threshold. SCM: the mask and its policy. T1O1, FoCa, DMDH6: the calibrator.
    """
    mask, tag = cache.steps_computation_mask, calibrator.tag if calibrator is not None else ""
    parts = [
        "DBPrune" if isinstance(cache, DBPruneConfig) else "DBCache",
        f"F{cache.Fn_compute_blocks}B{cache.Bn_compute_blocks}",
        f"W{cache.max_warmup_steps}I{cache.warmup_interval}M{max(cache.max_cached_steps, 0)}"
        f"MC{max(cache.max_continuous_cached_steps, 0)}",
        f"R{cache.residual_diff_threshold:g}",
        *([] if mask is None else [f"SCM{''.join(map(str, mask))}_{cache.steps_computation_policy}"]),
        *([tag] if tag else []),
    ]
    return "_".join(parts)


def _check_step_mask(mask: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(mask, Sequence) or not mask or not all(isinstance(step, int) and step in (0, 1) for step in mask):
        raise ModelError(
            f"steps_computation_mask={mask!r} is no mask; give a 1 or 0 for each step, as steps_mask(..) does, or name "
            "a preset"
        )
    return tuple(map(int, mask))


C = TypeVar("C", bound="Fields")


def merge_configs(base: C | None, modifier: C | None) -> C | None:
    """The config of one list of blocks: that of the pipeline, with what its modifier says.

    A field that was given to the modifier, when it was made or by `reset`, wins, even where it names the default
    (`dataclasses.replace` gives all of them). All others are the base's. The result is of the narrower of the two
    kinds, such as `DBPruneConfig`; where neither is a kind of the other (two different calibrators) the modifier is the
    result. None gives way to the other.
    """
    if base is None or modifier is None:
        return modifier if base is None else base
    narrow = type(modifier) if isinstance(modifier, type(base)) else type(base)
    if not (isinstance(modifier, type(base)) or isinstance(base, type(modifier))):
        return modifier
    changes = {name: getattr(modifier, name) for name in modifier.given}
    return _rebuild_config(narrow, base.values() | changes, base.given | modifier.given)


def check_known(what: str, name: str, known: Any) -> None:
    """Raises `ModelError` about `what` unless `name` is one of `known`; says which is nearest."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ModelError(f"{what} is not known; " + (f"did you mean {near[0]}?" if near else _format_choices(known)))


def check_whole_number(config: Any, name: str, least: int, *, none: bool = False) -> None:
    """Raises `ModelError` unless a field is a whole number of at least `least`, or None where that is allowed."""
    value = getattr(config, name)
    if none and value is None:
        return
    if not is_whole_number(value) or value < least:
        raise ModelError(f"{name}={value!r} is not a whole number of at least {least}; try {name}={max(least, 1)}")


def check_finite_number(config: Any, name: str, least: float, example: float, *, none: bool = False) -> None:
    """Raises `ModelError` unless a field is a finite number of at least `least`, or None where that is allowed."""
    value = getattr(config, name)
    if none and value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value < math.inf:
        raise ModelError(f"{name}={value!r} is not a number of at least {least:g}; try {name}={example}")


def check_one_of(config: Any, name: str, *known: Any) -> None:
    """Raises `ModelError` unless a field has one of the known values."""
    value = getattr(config, name)
    if not any(value is word or (isinstance(word, str) and value == word) for word in known):
        raise ModelError(f"{name}={value!r} is not known; {_format_choices(known)}")


def is_whole_number(value: Any) -> bool:
    """Whether it is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _format_choices(known: Any) -> str:
    return f"try one of {', '.join(map(str, known))}"


def _rebuild_config(kind: type[C], values: dict[str, Any], given: frozenset[str]) -> C:
    new = kind(**values)
    object.__setattr__(new, "_given", frozenset(given))
    return new
