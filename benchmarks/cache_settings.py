"""Settings of caches that are measured, each a line of text (`cache.config_text`), for ditile and for cache-dit."""

from __future__ import annotations

from dataclasses import dataclass

from ditile.cache.config import Calibration, DBCacheConfig
from ditile.cache.config_text import parse_cache_line
from ditile.plan.errors import ModelError

OURS = "ditile"
THEIRS = "cache-dit"
ENGINES = (OURS, THEIRS)

COMMON = (
    "F=1 W=4 R=0.08",
    "F=1 W=4 R=0.12",
    "F=1 W=4 R=0.2 MC=4",
    "F=1 W=4 R=0.24 MC=6",
    "F=1 W=8 I=2 R=0.8 MC=8",
    "F=1 W=8 I=4 R=0.8 MC=10",
    "F=1 W=4 R=0.12 taylor=1",
    "F=1 W=4 R=0.2 MC=4 taylor=1",
    "F=1 W=4 R=0.24 MC=6 taylor=1",
    "F=1 W=8 I=4 R=0.8 MC=10 taylor=1",
    "F=1 W=4 R=0.2 MC=4 taylor=2",
    "F=1 W=4 R=0.2 MC=4 foca",
    "F=1 W=4 R=0.2 MC=4 dmd=6",
    "F=2 B=1 W=4 R=0.2 MC=4 taylor=1",
    "F=4 W=4 R=0.2 MC=4",
    "F=1 mask=medium policy=static taylor=1",
    "F=1 mask=fast policy=static taylor=1",
    "F=1 mask=ultra policy=static taylor=1",
    "F=1 W=3 R=1 MC=1 taylor=1",
    "F=1 W=3 R=1 MC=2 taylor=1",
    "F=1 W=3 R=1 MC=4 taylor=1",
    "F=1 W=2 R=1 MC=6 taylor=1",
    "F=1 W=2 R=1 MC=6",
    "F=1 W=1 R=1 MC=8",
    "F=1 mask=3,1,1,1,1,1,1/1,2,2,3,3,2 policy=static taylor=1",
    "F=1 mask=2,1,1,1,1,1/1,2,2,4,5 policy=static taylor=1",
)
"""The settings for both engines: the published ones for 57 blocks, and ditile's best ones that both engines have."""

OWN = (
    "F=0 W=4 R=1 MC=1 taylor=1",
    "F=0 W=3 R=1 MC=1 taylor=1",
    "F=0 W=3 R=1 MC=2 taylor=1",
    "F=0 W=2 R=1 MC=3 taylor=1",
    "F=0 W=2 R=1 MC=4 taylor=1",
    "F=0 W=2 R=1 MC=6 taylor=1",
    "F=0 W=3 R=1 MC=2",
    "F=0 W=2 R=1 MC=4",
    "F=0 W=2 R=1 MC=6",
    "F=0 mask=3,1,1,1,1,1,1/1,2,2,3,3,2 policy=static taylor=1",
    "F=0 mask=2,1,1,1,1,1/2,2,3,3,3 policy=static taylor=1",
    "F=0 mask=2,1,1,1,1,1/1,2,2,4,5 policy=static taylor=1",
)
"""The settings that only ditile has: no block runs to decide."""


@dataclass(frozen=True, slots=True)
class CacheSetting:
    """One line for one engine; none is no cache.

    Attributes:
        engine: one of `ENGINES`, or "" without a cache.
        text: the line.
    """

    engine: str
    text: str

    @property
    def cache_config(self) -> DBCacheConfig:
        """The config.

        Raises:
            ModelError: if a name or value is not known.
        """
        config: DBCacheConfig = parse_cache_line(self.text)["cache_config"]
        return config

    def fits_num_steps(self, steps: int) -> bool:
        """Whether its mask, if it has one of bins, is long enough for so many steps."""
        mask = self.cache_config.steps_computation_mask
        return mask is None or isinstance(mask, str) or len(mask) >= steps

    @property
    def calibrator(self) -> Calibration | None:
        """The calibrator; None if there is none.

        Raises:
            ModelError: if there are two, or a value is not known.
        """
        calibrator: Calibration | None = parse_cache_line(self.text).get("calibrator_config")
        return calibrator


def parse_cache_settings(engines: str, lines: str) -> list[CacheSetting]:
    """Settings with ; between them, for each of some engines.

    Raises:
        ModelError: if an engine or a setting is not known.
    """
    names = [name.strip() for name in engines.split(",")]
    if unknown := [name for name in names if name not in ENGINES]:
        raise ModelError(f"engine {unknown[0]!r} is not known; there are {', '.join(ENGINES)}")
    made = [CacheSetting(name, " ".join(line.split())) for line in lines.split(";") if line.strip() for name in names]
    for setting in made:
        _ = setting.cache_config, setting.calibrator
    own = [s for s in made if s.engine == OURS]
    return [s for s in made if s in own or (s.cache_config.Fn_compute_blocks > 0 and "reach" not in s.text)]
