"""The documentation as a site: `make docs` installs Sphinx, builds the site and runs this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.report.browser import CHROMIUM, browser

ROOT = Path(__file__).parents[1]

pytest.importorskip("myst_parser", reason="without Sphinx: make docs installs it")


LEADS = {"a": "href", "img": "src"}


class Page(HTMLParser):
    """What a page links to, and what in it can be linked to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.ids |= {given["id"]} if "id" in given else set()
        self.links += [given[key] for key in [LEADS.get(tag, "")] if key in given]


def build(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    return subprocess.run([*command, docs, out], capture_output=True, text=True, check=False)


BUILT = pytest.mark.skipif("FEDLENS_SITE" not in os.environ, reason="make docs builds the site")
PHONE = 390, 844
WIDER = """[...document.querySelectorAll('article *')]
    .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
    .filter(one => !one.closest('pre, .table-wrapper, .highlight'))  // which scroll by themselves
    .map(one => one.outerHTML.slice(0, 90))"""
UNSEEN = """[...document.images].filter(one => { one.loading = 'eager'; return true })
    .map(one => one.decode().then(() => '', () => one.src))"""


@BUILT
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_every_page_fits_a_phone_and_its_images_load() -> None:
    site = Path(os.environ["FEDLENS_SITE"]).resolve()
    with browser() as page:
        for file in sorted(site.glob("*.html")):
            page.open(file.as_uri(), *PHONE)
            assert page.run("document.documentElement.scrollWidth") == PHONE[0], file.name
            assert page.run(WIDER) == [], file.name
            assert not any(page.run(f"Promise.all({UNSEEN})")), file.name
        assert page.problems == []


@BUILT
def test_every_link_of_the_site_leads_to_what_it_holds() -> None:
    site = Path(os.environ["FEDLENS_SITE"]).resolve()
    pages = {file: Page(file) for file in site.rglob("*.html")}
    copied = set()
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.is_relative_to(site) and target.exists(), (file.name, link)
            if parts.fragment:
                assert parts.fragment in pages[target].ids, (file.name, link)
            copied |= {target.name} if "_downloads" in target.parts else set()
    assert {"quickstart.toml", "first_run.ipynb", "README.md"} <= copied
    assert {"fedlens-run", "fedlens-fleet-keys"} <= pages[site / "commands.html"].ids
    assert any(link.startswith("gallery/") for link in pages[site / "gallery.html"].links)
    assert "fedlens.Algorithm.weigh" in pages[site / "api.html"].ids
    assert '"pretrain"' in (site / "searchindex.js").read_text("utf-8")


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs" / "conf.py", docs)
    (docs / "index.md").write_text("# Here\n\n[gone](../gone.toml) [page](../gone.md)\n")
    built = build(docs, tmp_path / "site")
    assert built.returncode != 0
    assert built.stderr.count("[myst.xref_missing]") == 2
