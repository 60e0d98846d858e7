"""The script in README.md runs as it stands. A failure means that the first thing a new user tries does not work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]


def test_the_script_of_the_readme_draws_its_picture(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "script.py").write_text(script, "utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("torchao|torchvision|Enum subclass", done.stderr), "nothing is logged by our imports"
    with Image.open(tmp_path / "circle.png") as picture:
        red, green, blue = picture.convert("RGB").getpixel((32, 64))
    assert red > 150 > max(green, blue), "a large red circle on the left"
