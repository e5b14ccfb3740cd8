"""`fedlens open` opens the page of a run, and draws it first where there is none that is newer."""

import os
import webbrowser

import pytest


@pytest.fixture
def opened(monkeypatch):
    """The addresses that were opened."""
    found: list[str] = []

    def noted(address: str) -> bool:
        found.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", noted)
    return found


@pytest.mark.usefixtures("quick_pages")
def test_a_page_is_opened_as_it_is_and_drawn_again_after_more_rounds(run_folder, fedlens, opened):
    folder = run_folder("a", rounds=2)
    page = folder / "report.html"
    ended = fedlens("open", folder)
    assert ended.status == 0 and page.is_file(), ended.err
    assert opened == [page.as_uri()]
    page.write_text("as it is")
    assert str(page) in fedlens("open", folder).out
    assert page.read_text() == "as it is"
    later = page.stat().st_mtime + 5
    os.utime(folder / "rounds.jsonl", (later, later))
    fedlens("open", folder)
    assert "<html" in page.read_text() and len(opened) == 3


@pytest.mark.usefixtures("here")
def test_without_a_browser_or_a_run_one_line_says_what_to_do(fedlens, monkeypatch, tmp_path):
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "report.html").write_text("a page")
    assert "open this file" in fedlens("open", "page").err
    ended = fedlens("open", "nowhere")
    assert ended.status == 2 and ended.err.count("\n") == 1
