"""Hooks of mkdocs: README, the changelog and CONTRIBUTING are pages too, and links out of docs/ become text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files beside docs/ -> their pages."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand beside docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, page, content=_rewrite_links(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page of docs/ whose links to code are text."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return _rewrite_links(markdown, (ROOT / "docs" / page.file.src_uri).parent)


def _rewrite_links(text: str, folder: Path) -> str:
    """Return a text whose links lead to pages of the site, or are the path as text."""

    def rewrite(link: re.Match[str]) -> str:
        is_image, label, path, anchor = link[1], link[2], link[3], link[4] or ""
        target = (folder / path).resolve()
        # A page beside docs/ is at the top of the site.
        origin = ROOT / "docs" if folder == ROOT else folder
        top = "../" * len(origin.relative_to(ROOT / "docs").parts)
        if target.is_relative_to(ROOT / "docs") and target.is_file():
            return f"{is_image}[{label}]({top}{target.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        if target.parent == ROOT and target.name in PAGES:
            return f"[{label}]({top}{PAGES[target.name]}{anchor})"
        shown = target.relative_to(ROOT).as_posix()
        return f"`{shown}`" if label == shown else f"{label} (`{shown}`)"

    return LINK.sub(rewrite, text)
