"""What every family holds under every axis, for docs/matrix.md and `ditile models`, as `test_families.py` proves it:

python -m tests.zoo.matrix && python -m benchmarks.matrix_page > docs/matrix.md
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.matrix_page import ONE_PICTURE
from ditile.model.known import ASSETS
from tests.zoo import ZOO
from tests.zoo.holes import find_hole, has_row
from tests.zoo.rows import ROWS

TABLE = ASSETS / "support.json"
COLUMNS = ("proof", *ROWS)


def build_families() -> dict[str, Any]:
    """The columns, and of each entry its pipeline, its transformer, and the holes: column -> reason.

    A column that the pipeline itself has no call for is left out of its row with the reason that the collection gives.
    """
    families = []
    for name, entry in ZOO.items():
        pipe = entry.make()
        holes = {column: hole.reason for column in COLUMNS if (hole := find_hole(name, column)) is not None}
        if not has_row(name, "data"):
            holes["data"] = ONE_PICTURE
        transformer = type(getattr(pipe, entry.transformers[0])).__name__
        families.append({"pipeline": type(pipe).__name__, "name": name, "transformer": transformer, "holes": holes})
    # Each entry that refers to pictures -> why it does not hold `references`; empty if it does.
    asked = [name for name in ZOO if has_row(name, "references")]
    references = {name: hole.reason if (hole := find_hole(name, "references")) else "" for name in asked}
    return {"columns": list(COLUMNS), "families": families, "references": references}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(build_families(), indent=1) + "\n", "utf-8")
