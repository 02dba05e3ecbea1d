"""Takes the executed notebooks into the site, in the order in which one would read them."""

import re
import shutil
from pathlib import Path
from typing import Any

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


# Draws diagrams, which the notebooks have none of, by code of another host.
MERMAID = re.compile(
    r'<script type="module">(?:(?!</script>).)*mermaid(?:(?!</script>).)*</script>', re.DOTALL
)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Leave out of a notebook's page what would be loaded from another host."""
    return MERMAID.sub("", output) if page.file.src_uri.startswith("notebooks/") else output


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
