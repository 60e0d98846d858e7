"""Makes docs/recipes.md: the commands that the planner would choose for the most used families, on 1 to 8 GPUs.

    python -m benchmarks.recipes                       # about two minutes
    python -m benchmarks.recipes --only z-image-turbo  # the sections of some models; others stay

The page's own words stay; a section has its place between `<!-- MODEL -->` and `<!-- end of MODEL -->`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import DOCS, fill_page_blocks
from ditile.distributed import files
from ditile.plan.errors import PlanError
from ditile.plan.numbers import format_number
from ditile.plan.plan import FEW_STEPS, Plan
from ditile.planner.hardware import load_profile
from ditile.planner.memory import count_host_memory
from ditile.planner.question import PlanQuestion
from ditile.planner.search import PlanSearch, SearchRequest
from ditile.planner.subject import PlanSubject
from ditile.runner.model_files import find_model_source

PAGE = DOCS / "recipes.md"


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, as `ditile plan` names it, what the page calls it, and how many of it a machine has."""

    hardware: str
    name: str
    devices: tuple[int, ...] = (1, 2, 4, 8)


MACHINES = (
    Machine("rtx-4090", "RTX 4090", (1, 2)),
    Machine("rtx-5090", "RTX 5090", (1, 2)),
    Machine("l40-pcie", "L40, PCIe"),
    Machine("h100-nvlink", "H100, NVLink"),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A family's model, and what its command says besides the plan.

    Attributes:
        family: as people call it.
        model: its name.
        prompt: of the command.
        images: the files that the command starts from, or refers to.
    """

    family: str
    model: str
    prompt: str = "a lighthouse at dawn"
    images: tuple[str, ...] = ()

    def write_command(self, plan: Plan) -> str:
        """The words of `ditile generate` under a plan."""
        words = [f'ditile generate "{self.prompt}" --model {self.model}', *(f"--image {name}" for name in self.images)]
        return " ".join(words if plan == Plan() else [*words, f'--plan "{plan}"'])


RECIPES = (
    Recipe("Qwen-Image-2.1", "qwen-image-2.1"),
    Recipe("LTX-2", "ltx-2"),
    Recipe("Z-Image", "z-image-turbo"),
    Recipe("Wan 2.2, image to video", "wan2.2-i2v-14b", "the boat sails away", ("boat.png",)),
    Recipe("Krea 2", "krea-2-turbo"),
    Recipe("Qwen-Image", "qwen-image"),
    Recipe("Qwen-Image-Edit", "qwen-image-edit-2511", "make it a snowy night", ("photo.png",)),
    Recipe("FLUX.2", "flux.2-dev"),
    Recipe("Wan 2.1", "wan2.1-t2v-14b"),
    Recipe("FLUX.1", "flux.1-dev"),
    Recipe("Stable Diffusion 3.5", "sd3.5-large"),
)
"""In the order of use."""


def write_recipe_section(recipe: Recipe) -> str:
    """The call, and a table with the command, the seconds and the memory of every machine."""
    call = PlanQuestion(model=recipe.model).fill_call_arguments()
    subject = PlanSubject.from_configs(recipe.model, find_model_source(recipe.model, weights=False))
    header = ["| GPUs | seconds | memory | command |", "|:--|--:|--:|:--|"]
    return "\n".join(["", describe_recipe_call(subject, call), "", *header, *_iterate_rows(recipe, subject, call), ""])


def describe_recipe_call(subject: PlanSubject, call: dict[str, Any]) -> str:
    """The size and the steps that are priced."""
    shape = subject.make_call_shape(call, 2)
    frames = f", {call['num_frames']} frames" if call.get("num_frames", 1) > 1 else ""
    seconds = "; seconds are those of the whole call" if shape.steps <= FEW_STEPS else ""
    return f"{shape.width} x {shape.height} px{frames}, {shape.steps} steps{seconds}."


def _iterate_rows(recipe: Recipe, subject: PlanSubject, call: dict[str, Any]) -> Iterator[str]:
    for machine in MACHINES:
        profile = load_profile(machine.hardware)
        for devices in machine.devices:
            place = f"{devices} x {machine.name}"
            try:
                found = PlanSearch(
                    subject, call, profile, SearchRequest(devices=devices, all_devices=True)
                ).find_fastest_plans()
            except PlanError as error:
                reason = str(error).partition(";")[0].replace("no plan", f"no plan of {devices}", 1)
                yield f"| {place} | | | {reason} |"
                continue
            best = found.prices[0]
            memory = f"{best.memory_bytes / 1e9:.0f} GB"
            if best.plan.offload == "blocks":
                job = subject.make_plan_job(best.plan, subject.make_call_shape(call, profile.element_size))
                memory += f", host {count_host_memory(subject, job).kept / 1e9:.0f} GB"
            yield f"| {place} | {format_number(best.call_s)} | {memory} | `{recipe.write_command(best.plan)}` |"


def main() -> None:
    """Writes the sections of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only", metavar="MODELS", help="with , between them")
    asked = parser.parse_args()
    models = [recipe.model for recipe in RECIPES] if asked.only is None else asked.only.split(",")
    blocks = {recipe.model: write_recipe_section(recipe) for recipe in RECIPES if recipe.model in models}
    files.write_atomically(asked.page, fill_page_blocks(asked.page.read_text("utf-8"), blocks))


if __name__ == "__main__":
    main()
