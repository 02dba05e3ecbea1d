"""Puts the README on the start page, with links that lead to the site, and the version on all."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
MARK = "<!-- README.md follows here on the site -->"


def on_config(config: Any) -> Any:
    """Name the version at the end of each page, read as the build reads it."""
    text = (ROOT / "jaxbuf" / "__init__.py").read_text()
    config.copyright = "jaxbuf " + re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the mark; a link to a file that the site lacks becomes its text."""
    if MARK not in markdown:
        return markdown
    title, text = (ROOT / "README.md").read_text().split("\n", 1)
    page.title = "Home"
    text = text.replace("](docs/", "](")
    text = re.sub(
        r"\[([^]]+)\]\((?:(?:benchmarks|examples)[^)]*|notebooks|guides|[A-Z][^)]*)\)", r"\1", text
    )
    return f"{title}\n\n{markdown.replace(MARK, text)}"
