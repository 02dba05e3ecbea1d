"""All names and links in the guides exist. Their snippets run as doctests."""

import importlib.util
import re
from pathlib import Path

import pytest

import jaxbuf
import jaxbuf.testing
from jaxbuf.interop import flashbax

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").rglob("*.md"))
MKDOCS = (ROOT / "mkdocs.yml").read_text()
PAGES = [*GUIDES, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
OWNERS = [
    jaxbuf,
    jaxbuf.ItemBuffer,
    jaxbuf.TrajectoryBuffer,
    jaxbuf.Queue,
    jaxbuf.Mixture,
    jaxbuf.ChunkAccumulator,
    jaxbuf.EpisodeAccumulator,
    jaxbuf.Holder,
    jaxbuf.Statistics,
    jaxbuf.Slots,
    jaxbuf.Sample,
]


ARGUMENTS = {"base", "fallback", "period", "sequence_length", "valid"}
STORIES = ["torchgfn", "stable-baselines3"]
OTHERS = ["di-engine", "alf", "minestudio"]


def guide(name):
    return next(path for path in GUIDES if path.name == name).read_text()


def section(text, name):
    """The section of a page that has this anchor."""
    return next(part for part in text.split("\n## ") if part.lower().startswith(f"{name}\n"))


def last_cells():
    """Code in the last column of every table of the guide on moving."""
    text = guide("moving.md")
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
            if parts[0] in ("buffer", "jaxbuf", "accumulator"):
                parts = parts[1:]
            if not hasattr(jaxbuf, parts[0]):
                found = next((owner for owner in OWNERS if hasattr(owner, parts[0])), None)
            assert found is not None, f"{cell}: there is no {name}"
            for part in parts:
                assert hasattr(found, part), f"{cell}: there is no {name}"
                found = getattr(found, part)


def test_the_names_of_flashbax_are_those_of_the_facade():
    names = set(re.findall(r"`(make_\w+)\(", guide("moving.md")))
    assert len(names) >= 7
    assert all(hasattr(flashbax, name) for name in names)


def test_every_choice_exists():
    rows = [line for line in guide("choosing.md").splitlines() if line.startswith("| ")]
    rows = [row.split(" | ") for row in rows if "---" not in row]
    assert len(rows) > 40
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    for row in rows:
        for code in re.findall(r"(?<!notebook )`([^`]+)`", " ".join(row[1:])):
            name = re.match(r"(jaxbuf\.)?(\w+)", code)[2]
            known = name in ARGUMENTS or any(name in dir(owner) for owner in OWNERS)
            known = known or (ROOT / code).is_file() or importlib.util.find_spec(code)
            assert known, f"{row[0]}: there is no {code}"
        named = set(re.findall(r"notebook `(\w+)`", row[-1]))
        assert named <= notebooks, row


@pytest.mark.parametrize(
    ("name", "page"),
    [
        *((name, f"from_{name.replace('-', '_')}.md") for name in STORIES),
        *((name, "from_others.md") for name in OTHERS),
    ],
)
def test_stories_and_tables_link_to_each_other(name, page):
    among_others = page == "from_others.md"
    story = section(guide(page), name) if among_others else guide(page)
    for title in ("Before", "After", "Left out on purpose"):
        assert f"\n{'###' if among_others else '##'} {title}\n" in story
    assert f"](moving.md#{name})" in guide(page)
    anchor = f"#{name}" if among_others else ""
    assert f"({page}{anchor})" in section(guide("moving.md"), name)


def misplaced(text):
    """Returns the lines of programs that stand outside of a code fence, and a fence left open."""
    found, fence = [], ""
    for line in text.splitlines():
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark:
            fence = "" if fence else line
        elif not fence and re.match(r"\s*(>>>|\.\.\.)( |$)", line):
            found.append(line)
    return found + [fence] * bool(fence)


def test_programs_stand_in_code_fences():
    assert not {str(path): found for path in PAGES if (found := misplaced(path.read_text()))}


def test_misplaced_programs_are_found():
    inside = "Text:\n\n```python\n>>> 1\n1\n\n```\n"
    assert not misplaced(inside)
    assert misplaced(inside.replace("```python\n", "").replace("```\n", "")) == [">>> 1"]
    assert misplaced(inside + "* a list:\n\n  >>> for i in x:\n  ...     pass\n") == [
        "  >>> for i in x:",
        "  ...     pass",
    ]
    assert misplaced(inside.removesuffix("```\n")) == ["```python"]


def test_links_lead_somewhere():
    for path in PAGES:
        text = path.read_text()
        for link in re.findall(r"\]\(([^)#]+)|^\[[^\]]+\]: ([^#\n]+)", text, re.MULTILINE):
            link = link[0] or link[1]
            # Notebooks are copied beside the pages of the site.
            base = ROOT if link.startswith("notebooks/") else path.parent
            assert "://" in link or (base / link).exists(), f"{path.name} links to {link}"


def test_addresses_of_earlier_pages_lead_to_sections():
    entries = re.findall(r"^ +guides/(\w+\.md): guides/(\w+\.md)#([\w-]+)$", MKDOCS, re.MULTILINE)
    assert entries
    for old, new, anchor in entries:
        assert not (ROOT / "docs" / "guides" / old).exists(), old
        titles = re.findall(r"^#+ (.+)$", guide(new), re.MULTILINE)
        anchors = {
            re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles
        }
        assert anchor in anchors, f"{old}: {new} has no section {anchor}"
