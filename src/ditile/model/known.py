"""Models that are known by name: those that come with this package, and published ones, of which it has the configs.

`assets/models.json` has what can be said of them before torch is imported. A test compares it with the models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ditile.plan.plan import Facts, Plan
from ditile.plan.shape import check_image_size

ASSETS = Path(__file__).parent / "assets"
CONFIGS = ASSETS / "configs"
"""Configs of published models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """What is known of a model by its name.

    Attributes:
        name: how ditile calls it.
        hub_id: where its weights are; None if they come with this package.
        transformer: the class of its transformer.
        blocks, heads: of the transformer.
        token_side: pixels of a token's side.
        height, width: the size of an image by default.
        has_spec: whether its family has a `ModelSpec`.
        bins_sizes: whether its pipeline takes the nearest of some sizes instead of the given one, by default.
        is_video: whether it makes videos; said of bundled models alone.
        base: the bundled model whose components it takes where it has none of its own.
        words: of which a prompt must have one; empty if it knows more than can be listed.
        example: a prompt that it knows.
    """

    name: str
    hub_id: str | None
    transformer: str
    blocks: int
    heads: int
    token_side: int
    height: int
    width: int
    has_spec: bool = True
    bins_sizes: bool = False
    is_video: bool = False
    base: str | None = None
    words: tuple[str, ...] = ()
    example: str = "a large red circle on the left on a gray background"

    @property
    def folder(self) -> Path:
        """Its configs, and its weights if they come with this package."""
        if self.hub_id is None:
            return ASSETS / self.name
        return CONFIGS / self.name

    def knows_word_of(self, prompt: str) -> bool:
        """Whether a prompt names something that the model knows."""
        if not self.words:
            return True
        return re.search(rf"\b({'|'.join(self.words)})s?\b", prompt, re.IGNORECASE) is not None

    def check_call(self, plan: Plan, call: Mapping[str, Any]) -> None:
        """Checks a call under a plan, as far as that needs no torch; the runner checks all of it.

        Raises:
            ModelError: if a side is not a whole number of tokens.
            PlanError: if the plan does not fit.
        """
        if not self.has_spec:
            return
        check_image_size(call, self.token_side)
        if plan.divides_the_batch_alone:
            return
        facts = Facts(model=self.transformer, blocks=self.blocks, heads=self.heads)
        # Which size is taken is not known before the pipeline chose it.
        if not call.get("use_resolution_binning", self.bins_sizes):
            facts = replace(
                facts,
                rows=int(call.get("height") or self.height) // self.token_side,
                tokens_per_row=int(call.get("width") or self.width) // self.token_side,
            )
        plan.check(facts)


@lru_cache(maxsize=1)
def list_known_models() -> tuple[KnownModel, ...]:
    """All of them: those that come with this package first."""
    table = json.loads((ASSETS / "models.json").read_text("utf-8"))
    models = []
    for name, facts in table.items():
        words = tuple(facts.get("words", ()))
        models.append(KnownModel(name=name, **facts | {"words": words}))
    return tuple(models)


def find_known_model(name: str) -> KnownModel | None:
    """The model of a name or a hub id; None if it is not known."""
    return next((model for model in list_known_models() if name in (model.name, model.hub_id)), None)


def find_component_folder(source: Path, name: str) -> Path:
    """The folder of a component of a pipeline: one in its own folder, or in that of the model that it is based on."""
    if not (source / name).exists() and source.resolve().parent == ASSETS.resolve():
        known = find_known_model(source.name)
        if known is not None and known.base is not None:
            return ASSETS / known.base / name
    return source / name


def name_component_source(source: Path | str, name: str) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` and `load_config` take for a component: its folder, or a hub id with its `subfolder`."""
    if isinstance(source, Path):
        return str(find_component_folder(source, name)), {}
    return source, {"subfolder": name}


def list_bundled_models() -> list[str]:
    """The names of the models that come with this package."""
    return [model.name for model in list_known_models() if model.hub_id is None]


def list_published_models() -> list[str]:
    """The names of the published models."""
    return [model.name for model in list_known_models() if model.hub_id is not None]
