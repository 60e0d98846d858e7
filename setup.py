"""Makes README.md fit for the page of a package index, where relative links and pictures lead nowhere.

All else is in pyproject.toml. With a `Repository` in its `[project.urls]` links and pictures become absolute; without
one links become text with the path, and pictures are left out. A plugin that does this, hatch-fancy-pypi-readme,
belongs to another build backend, and needs the address.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?://)([^)]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://)([^)]+)\)")
REPOSITORY = re.compile(r'^Repository\s*=\s*"(https://[^"]+)"', re.MULTILINE)


def make_index_page(readme: str, repository: str | None) -> str:
    """The text of README with absolute links, or without links.

    Args:
        readme: the text of README.md.
        repository: the address of the repository, as GitHub and GitLab lay it out; None where there is none yet.
    """
    if repository:
        readme = PICTURE.sub(rf"![\1]({repository}/raw/HEAD/\2)", readme)
        return LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)", readme)
    return LINK.sub(_write_path, PICTURE.sub("", readme))


def _write_path(link: re.Match[str]) -> str:
    """`[docs/x.md](docs/x.md)` is the path once; `[design](docs/design.md)` is both."""
    label, path = link[1], link[2].partition("#")[0]
    return f"`{path}`" if label == path else f"{label} (`{path}`)"


if __name__ == "__main__":
    root = Path(__file__).parent
    # A regular expression, as Python 3.10 has no tomllib.
    address = REPOSITORY.search((root / "pyproject.toml").read_text("utf-8"))
    page = make_index_page((root / "README.md").read_text("utf-8"), address and address[1])
    setup(long_description=page, long_description_content_type="text/markdown")
