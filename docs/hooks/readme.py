"""Puts the README on the start page, with links to where its pages are on the site."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
MARK = "<!-- README.md follows here on the site -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the mark; a link to a file that the site lacks becomes its text."""
    if MARK not in markdown:
        return markdown
    title, text = (ROOT / "README.md").read_text().split("\n", 1)
    page.title = "Home"
    text = text.replace("](docs/", "](")
    text = re.sub(r"\[([^]]+)\]\((?:(?:benchmarks|examples)[^)]*|notebooks|guides|[A-Z][^)]*)\)", r"\1", text)
    return f"{title}\n\n{markdown.replace(MARK, text)}"
