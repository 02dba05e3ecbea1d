"""Takes the executed notebooks into the site, in the order in which one would read them."""

import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parent.parent.parent
ORDER = [
    "quickstart",
    "prioritized_replay",
    "trajectories",
    "hindsight",
    "gflownet",
    "gymnasium_loop",
    "manager_worker",
    "offline",
]


# Scripts of other hosts, which draw diagrams and formulas; the notebooks have none of these.
FOREIGN = re.compile(
    r"<script(?: type=\"module\"| data-mkdocs-jupyter-mathjax=)"
    r"(?:(?!</script>).)*(?:mermaid|mathjax)(?:(?!</script>).)*</script>",
    re.DOTALL,
)


@event_priority(-100)  # after the plugin that adds them
def on_post_page(output: str, **_: Any) -> str:
    """Leave out of a page what would be loaded from another host."""
    return FOREIGN.sub("", output)


def on_config(config: Any) -> Any:
    """Copy the notebooks to where pages are looked for, and list them in the navigation."""
    target = Path(config.docs_dir) / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    found = sorted(
        (ROOT / "notebooks").glob("*.ipynb"),
        key=lambda path: (ORDER.index(path.stem) if path.stem in ORDER else len(ORDER), path.stem),
    )
    for path in found:
        shutil.copy(path, target)
    pages = [f"notebooks/{path.name}" for path in found]
    config.nav = [entry if entry != "notebooks" else {"Notebooks": pages} for entry in config.nav]
    return config
