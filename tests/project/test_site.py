"""The site builds strictly, and a browser has nothing to complain of.

A strict build fails where a link or an anchor leads nowhere.
"""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import jaxbuf
from jaxbuf import interop, testing

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("mkdocs_jupyter")
pytest.importorskip("mkdocs_redirects")

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site: one that was just built (SITE), or a new one."""
    if "SITE" in os.environ:
        return ROOT / os.environ["SITE"]
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site):
    pages = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    ids = {*re.findall(r'\bid="([^"]+)"', pages)}
    missing = sorted(name for name in jaxbuf.__all__ if f"jaxbuf.{name}" not in ids)
    assert not missing, f"add ::: jaxbuf.NAME to a page in docs/reference for {missing}"
    for name in interop.__all__:
        found = getattr(interop, name)
        assert {f"jaxbuf.interop.{name}", f"{found.__module__}.{name}"} & ids, name
    for name in testing.__all__:
        assert f"jaxbuf.testing.{name}" in ids, name


def test_every_page_names_the_version(site):
    for folder in ("", "guides", "notebooks", "reference", "results"):
        for path in (site / folder).glob("[!4]*.html"):
            if "http-equiv" not in (text := path.read_text()):  # not one that leads to another
                assert re.search(rf"\bjaxbuf {re.escape(jaxbuf.__version__)}\s", text), path.name


def test_every_notebook_is_rendered(site):
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert (site / "notebooks" / f"{path.stem}.html").exists(), path.stem


def test_pages_of_classes_begin_with_what_is_used_first(site):
    text = (site / "reference" / "buffers.html").read_text()
    for name in ("ItemBuffer", "TrajectoryBuffer", "Mixture", "Sharded", "Hosted"):
        members = re.findall(rf'<h3 id="jaxbuf\.{name}\.(\w+)"', text)
        assert members[:4] == ["create", "add", "sample", "update_priority"], name
        # What a class inherits but does not have is not on its page.
        assert ("locate" in members) == (name != "ItemBuffer"), name
        assert ("insert" in members) == (name != "TrajectoryBuffer"), name
        internal = {"route", "shares", "by_slot", "home", "sample_some", "best"}
        assert not internal & {*members}, name
    # Of a strategy one chooses the numbers; what buffers call is on the page on extending.
    strategies = (site / "reference" / "strategies.html").read_text()
    for name in ("Prioritized", "Lowest", "Diversity", "Removable"):
        assert f'id="jaxbuf.{name}"' in strategies
        assert f'id="jaxbuf.{name}.' not in strategies
    extending = (site / "reference" / "extending.html").read_text()
    for name in ("Sampler.draw", "Sampler.by_slot", "Part.on_add", "Evictor.init"):
        assert f'id="jaxbuf.strategies.{name}"' in extending, name


def test_nothing_is_loaded_from_another_host(site):
    for path in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img)\b[^>]*>", text := path.read_text()):
            if 'rel="canonical"' not in tag:
                assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (path.name, tag)
        assert "cdn" not in "".join(re.findall(r"<script.*?</script>", text, re.DOTALL)), path.name


def test_prompts_are_marked_so_that_they_are_not_copied(site):
    guides = (ROOT / "docs" / "guides").glob("*.md")
    examples = [path.stem for path in guides if ">>> " in path.read_text()]
    assert len(examples) > 8
    for name in examples:
        path = site / "guides" / f"{name}.html"
        text = path.read_text()
        assert '<span class="gp">&gt;&gt;&gt; </span>' in text, path.name
        # Where the language was not recognized a prompt is an operator.
        assert '<span class="o">&gt;&gt;&gt;</span>' not in text, path.name
        assert "stylesheets/prompts.css" in text
    assert "[data-md-copying] .gp" in (site / "stylesheets/prompts.css").read_text()
    for path in [*(site / "guides").glob("*.html"), *(site / "reference").glob("*.html")]:
        # Prompts that were taken for prose are quotations.
        assert "<blockquote>" not in path.read_text(), path.name


def test_a_browser_has_nothing_to_complain_of(site, tmp_path):
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"there is no headless browser on PATH, such as {BROWSERS[0]}")
    missing = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def send_error(self, code, *args, **options):
            missing.append((code, self.path))
            super().send_error(code, *args, **options)

    shown = ["index.html", "guides/moving.html", "reference/buffers.html", "reference/mpi.html"]
    shown += [f"notebooks/{path.name}" for path in sorted((site / "notebooks").glob("*.html"))]
    handler = functools.partial(Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page in shown:
            done = subprocess.run(
                [
                    browser,
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--enable-logging=stderr",
                    f"--user-data-dir={tmp_path}",
                    "--virtual-time-budget=4000",
                    "--dump-dom",
                    f"http://127.0.0.1:{server.server_port}/{page}",
                ],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert "md-content" in done.stdout, done.stderr
            said = re.findall(r"CONSOLE.*", done.stderr)
            assert not said, f"{page}: {said}"
        server.shutdown()
    assert not missing
