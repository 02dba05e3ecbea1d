"""Tells snippets with prompts from other Python, so that the copy button can leave prompts out."""

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name the language of each fence that begins with a prompt."""
    return markdown.replace("```python\n>>> ", "```pycon\n>>> ")
