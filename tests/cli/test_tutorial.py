"""The tutorial as it stands: every command of its pages is run, with fewer and shorter rounds.

The second page, docs/sites.md, has a test of its own; tests/test_docs.py runs the Python of all.
"""

import shlex
import webbrowser
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks, saved

SHORT = ["rounds=2", "local.epochs=1", "local.max_steps=2", "engine=sequential"]
TRAINING = ("run", "sweep", "compare")


def commands(page: Path) -> list[list[str]]:
    """What a page has a reader type, its files being written."""
    found = []
    for block in blocks(page):
        if block.language == "sh":
            found += [shlex.split(line, comments=True)[1:] for line in block.text.splitlines()]
        elif block.language:
            saved(block.text)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first-run", "first-algorithm", "compare-honestly"])
def test_every_command_of_a_page_runs(name, here, fedlens, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda _: True)
    wanted = commands(ROOT / "docs" / f"{name}.md")
    assert len(wanted) >= 2
    for words in wanted:
        ended = fedlens(*words, *(SHORT if words[0] in TRAINING else []))
        assert ended.status == 0, (words, ended.err)


def test_a_fleet_is_invited_as_the_page_says(here, fedlens):
    """`fedlens fleet try` is run by tests/fleet, in processes."""
    (attempt, *rest) = commands(ROOT / "docs" / "first-fleet.md")
    assert attempt[:2] == ["fleet", "try"]
    for words in rest:
        ended = fedlens(*words)
        assert ended.status == 0, (words, ended.err)
    assert Path("ann.invite").is_file()
