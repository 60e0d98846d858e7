"""The models that ditile knows by name: small ones that come with the package, and published ones as configs only.

`assets/models.json` has the facts that ditile needs before it imports torch. A test compares it with the models.
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
    """The facts known of a model from its name only.

    Attributes:
        name: its name in ditile.
        hub_id: its id on the Hugging Face hub; None if its weights come with this package.
        transformer: the class of its transformer.
        blocks, heads: how many the transformer has.
        token_side: the side of a token, in pixels of the image.
        height, width: the default size of an image, in pixels.
        cuts_rows: whether patches are whole rows of its tokens; `check_call` checks only such models.
        bins_sizes: whether its pipeline by default replaces the given size by the nearest of a list of sizes.
        is_video: whether it is a bundled model that makes videos; False for all published ones, even of videos.
        base: the bundled model that provides the components that this model lacks.
        words: the words it knows; a prompt without any gets a note. Empty if it knows more than can be listed.
        example: a prompt that suits it.
    """

    name: str
    hub_id: str | None
    transformer: str
    blocks: int
    heads: int
    token_side: int
    height: int
    width: int
    cuts_rows: bool = True
    bins_sizes: bool = False
    is_video: bool = False
    base: str | None = None
    words: tuple[str, ...] = ()
    example: str = "a large red circle on the left on a gray background"

    @property
    def folder(self) -> Path:
        """Return the folder of its configs, and of its weights if they come with this package."""
        if self.hub_id is None:
            return ASSETS / self.name
        return CONFIGS / self.name

    def explain_unknown_prompt(self, prompt: str) -> str | None:
        """Return a note about a prompt without any word the model knows; None for other prompts."""
        words = "|".join(self.words)
        if not words or re.search(rf"\b({words})s?\b", prompt, re.IGNORECASE):
            return None
        return (
            f"{self.name} is small and knows {', '.join(self.words)} alone, and {prompt!r} names none; "
            f"try {self.example!r}"
        )

    def check_call(self, plan: Plan, call: Mapping[str, Any]) -> None:
        """Check a call under a plan without torch; the runner makes the other checks.

        Raises:
            ModelError: if a side is not a whole number of tokens.
            PlanError: if the plan does not fit.
        """
        # The runner checks the sizes of other models.
        if not self.cuts_rows:
            return
        check_image_size(call, self.token_side)
        if plan.divides_the_batch_alone:
            return
        facts = Facts(model=self.transformer, blocks=self.blocks, heads=self.heads)
        # With binning the size is known only after the pipeline has chosen it.
        if not call.get("use_resolution_binning", self.bins_sizes):
            facts = replace(
                facts,
                rows=int(call.get("height") or self.height) // self.token_side,
                tokens_per_row=int(call.get("width") or self.width) // self.token_side,
            )
        plan.check(facts)


@lru_cache(maxsize=1)
def list_known_models() -> tuple[KnownModel, ...]:
    """Return all known models, the bundled ones first."""
    table = json.loads((ASSETS / "models.json").read_text("utf-8"))
    models = []
    for name, facts in table.items():
        words = tuple(facts.get("words", ()))
        models.append(KnownModel(name=name, **facts | {"words": words}))
    return tuple(models)


def find_known_model(name: str) -> KnownModel | None:
    """Return the model with this name or hub id; None if ditile does not know it."""
    return next((model for model in list_known_models() if name in (model.name, model.hub_id)), None)


def find_component_folder(source: Path, name: str) -> Path:
    """Return the folder of a pipeline's component: in the model's own folder, or in that of its base model."""
    if not (source / name).exists() and source.resolve().parent == ASSETS.resolve():
        known = find_known_model(source.name)
        if known is not None and known.base is not None:
            return ASSETS / known.base / name
    return source / name


def name_component_source(source: Path | str, name: str) -> tuple[str, dict[str, str]]:
    """Return the arguments of `from_pretrained` or `load_config` for a component.

    They are a folder, or a hub id and a `subfolder`.
    """
    if isinstance(source, Path):
        return str(find_component_folder(source, name)), {}
    return source, {"subfolder": name}


def list_bundled_models() -> list[str]:
    """Return the names of the models in this package."""
    return [model.name for model in list_known_models() if model.hub_id is None]


def list_published_models() -> list[str]:
    """Return the names of the published models."""
    return [model.name for model in list_known_models() if model.hub_id is not None]
