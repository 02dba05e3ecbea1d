"""What the guides name exists, and what they link to is there. Their snippets run as doctests."""

import re
from pathlib import Path

import pytest

import jaxbuf
from jaxbuf.compat import flashbax

GUIDES = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
OWNERS = [
    jaxbuf,
    jaxbuf.ItemBuffer,
    jaxbuf.TrajectoryBuffer,
    jaxbuf.Queue,
    jaxbuf.Mixture,
    jaxbuf.Slots,
    jaxbuf.Sample,
]


def last_cells():
    """Code in the last column of every table of the guide on moving."""
    text = next(path for path in GUIDES if path.name == "moving.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row.split(" | ")[-1])]


def test_every_call_that_replaces_another_exists():
    cells = last_cells()
    assert len(cells) > 80
    for cell in cells:
        for name in re.findall(r"(?<![\w.])([A-Za-z_]\w*(?:\.\w+)*)\(", cell):
            found = jaxbuf
            parts = name.split(".")
            if parts[0] == "jnp":
                continue
            if parts[0] in ("buffer", "jaxbuf"):
                parts = parts[1:]
            if not hasattr(jaxbuf, parts[0]):
                found = next((owner for owner in OWNERS if hasattr(owner, parts[0])), None)
            assert found is not None, f"{cell}: there is no {name}"
            for part in parts:
                assert hasattr(found, part), f"{cell}: there is no {name}"
                found = getattr(found, part)


def test_the_names_of_flashbax_are_those_of_the_facade():
    text = next(path for path in GUIDES if path.name == "moving.md").read_text()
    names = set(re.findall(r"`(make_\w+)\(", text))
    assert len(names) >= 7
    assert all(hasattr(flashbax, name) for name in names)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in link:
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
