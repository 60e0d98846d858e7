"""The notebooks of examples/ run from the first cell to the last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("examples/notebooks/*.ipynb"))


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook, with their text in one piece."""
    notebook = json.loads(path.read_text("utf-8"))
    return [cell | {"source": "".join(cell["source"])} for cell in notebook["cells"]]


def write_script(cells: list[dict[str, Any]], folder: Path) -> Path:
    """A script of the cells in order; `%%writefile` is done here, as it is all that they have of Jupyter's own."""
    parts = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        first, _, rest = cell["source"].partition("\n")
        if first.startswith("%%writefile "):
            (folder / first.split()[1]).write_text(rest + "\n", "utf-8")
            continue
        assert "\n%" not in cell["source"] and not first.startswith(("%", "!"))
        parts.append(cell["source"])
    script = folder / "notebook.py"
    script.write_text("\n\n".join(parts) + "\n", "utf-8")
    return script


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run_in_order(path: Path, tmp_path: Path) -> None:
    """Without Jupyter, which the developers' packages do not bring."""
    script = write_script(read_cells(path), tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
