"""Pages as a person meets them: in a browser, on wide and narrow screens, light and dark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlens.report import report
from fedlens.report.blocks import Curves, Line
from fedlens.report.live import serving
from fedlens.report.page import render_page
from fedlens.storage.locks import FolderLock
from tests.report.browser import CHROMIUM, Page, browser
from tests.report.run_folders import make_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="pages are tried in chromium: none here")

FIRST = "document.querySelector('#accuracy')"


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("runs")
    folders = [
        make_run(place / f"{algorithm}-{seed}", algorithm=algorithm, seed=seed, top=0.7 + seed / 50)
        for algorithm in ("fedavg", "fedprox")
        for seed in (1, 2)
    ]
    return report(folders).as_uri()


@pytest.fixture
def page(tab: Page, address: str) -> Iterator[Page]:
    tab.open(address)
    yield tab
    assert tab.problems == []


def box(page: Page) -> dict[str, float]:
    page.run(f"{FIRST}.scrollIntoView()")
    found = page.run(
        f"JSON.stringify({FIRST}.querySelector('.plot > svg').getBoundingClientRect())"
    )
    return dict(json.loads(found))


def ticks(page: Page) -> list[float]:
    """The numbers along the x axis of the first chart."""
    texts = f"[...{FIRST}.querySelectorAll('.plot > svg text[text-anchor=middle]')]"
    return [float(t) for t in page.run(f"{texts}.map((t) => t.textContent)") if t != "round"]


@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_its_screen_and_follows_its_colours(
    tab: Page, address: str, width: int, dark: bool
) -> None:
    tab.open(address, width=width, dark=dark)
    assert tab.run("document.documentElement.scrollWidth") <= width
    light = sum(
        map(int, tab.run("getComputedStyle(document.body).backgroundColor")[4:-1].split(","))
    )
    assert light < 100 if dark else light > 700
    assert tab.run(f"{FIRST}.classList.contains('alive')")
    assert tab.problems == []


@pytest.mark.parametrize("width", [1200, 800])
def test_there_are_no_holes_between_cards(tab: Page, tmp_path: Path, width: int) -> None:
    tab.open(report([make_run(tmp_path / "a", spread=True)]).as_uri(), width=width)
    for cards in (".facts > div", ".figures > figure"):
        find = f"[...document.querySelectorAll('{cards}')]"
        boxes = "((b) => [b.top, b.bottom, b.right])(one.getBoundingClientRect())"
        rows: dict[float, list[list[float]]] = {}
        for box in tab.run(f"{find}.map((one) => {boxes})"):
            rows.setdefault(box[0], []).append(box)
        assert len(rows) > 1
        edge = tab.run("document.querySelector('main').getBoundingClientRect().right")
        for row in rows.values():
            assert len({bottom for _, bottom, _ in row}) == 1
            assert row[-1][2] == pytest.approx(edge, abs=1)


def test_the_accuracy_of_chance_is_a_line_of_the_chart(tab: Page, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    about = json.loads((folder / "manifest.json").read_text()) | {"classes": ["cat", "dog"]}
    (folder / "manifest.json").write_text(json.dumps(about))
    tab.open(report([folder]).as_uri())
    assert tab.run(f"{FIRST}.querySelectorAll('.plot .level').length") == 1
    assert "chance: 50.0%" in tab.run(f"{FIRST}.querySelector('.legend').textContent")


def test_a_table_that_is_wider_than_the_screen_says_so(tab: Page, address: str) -> None:
    more = "document.querySelector('#results .scroll').classList.contains('more')"
    tab.open(address, width=360)
    tab.wait_for(more)
    header = "[...document.querySelectorAll('#results th')].map((h) => h.textContent)"
    assert tab.run(header)[1] == "final accuracy", "what matters most comes first"
    place = "document.querySelectorAll('#results thead th')[1].getBoundingClientRect()"
    assert tab.run(f"{place}.left") < 360
    tab.open(address, width=1200)
    tab.wait_for(f"!{more}")


def test_a_name_under_the_pointer_makes_its_line_stand_out(page: Page) -> None:
    name = f"{FIRST}.querySelector('.legend button')"
    faint = f"{FIRST}.querySelectorAll('.plot .faint').length"
    assert page.run(faint) == 0
    page.run(f"{name}.focus()")
    assert page.run(faint) > 0
    page.run(f"{name}.blur()")
    assert page.run(faint) == 0


def test_a_click_on_a_name_switches_its_line_off_and_on(page: Page) -> None:
    count = f"{FIRST}.querySelectorAll('.chart .line').length"
    name = f"{FIRST}.querySelector('.legend button')"
    before = page.run(count)
    page.run(f"{name}.click()")
    assert page.run(count) == before / 2
    assert page.run(f"{name}.getAttribute('aria-pressed')") == "false"
    page.run(f"{name}.focus()")
    page.key("Enter")
    assert page.run(count) == before
    assert page.run(f"{name}.getAttribute('aria-pressed')") == "true"


def test_a_hidden_line_under_the_pointer_fades_no_other(page: Page) -> None:
    name = f"{FIRST}.querySelector('.legend button')"
    page.run(f"{name}.focus()")
    page.run(f"{name}.click()")
    assert page.run(f"{name}.getAttribute('aria-pressed')") == "false"
    assert page.run(f"{FIRST}.querySelectorAll('.plot .faint').length") == 0
    page.run(f"{name}.click()")  # as it was, for the next test
    page.run(f"{name}.blur()")


def test_dragging_zooms_and_a_double_click_goes_back(page: Page) -> None:
    whole, place = ticks(page), box(page)
    middle, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    page.drag(middle, y, middle + place["width"] / 4, y + 3)
    assert min(ticks(page)) > min(whole) and max(ticks(page)) < max(whole)
    assert not page.run(f"{FIRST}.querySelector('.reset').hidden")
    for count in (1, 2):
        page.mouse("mousePressed", middle, y, button="left", clickCount=count)
        page.mouse("mouseReleased", middle, y, button="left", clickCount=count)
    assert ticks(page) == whole
    page.drag(middle, y, middle + place["width"] / 4, y + 3)
    page.run(f"{FIRST}.querySelector('.reset').click()")
    assert ticks(page) == whole


def test_a_box_shows_the_values_under_the_pointer_and_the_arrows(page: Page) -> None:
    place = box(page)
    tip = f"{FIRST}.querySelector('.tip')"
    tall = f"{FIRST}.getBoundingClientRect().height"
    assert page.run(f"{tip}.hidden")
    before = page.run(tall)
    page.mouse("mouseMoved", place["x"] + place["width"] / 2, place["y"] + 50)
    assert page.run(f"{tip}.querySelector('.value').textContent").endswith("%)")  # mean and band
    assert page.run(tall) == before, "a card keeps its size under the pointer"
    page.mouse("mouseMoved", 1, 1)
    assert page.run(f"{tip}.hidden")
    page.run(f"{FIRST}.querySelector('.plot > svg').focus()")
    page.key("ArrowRight")
    assert page.run(f"{FIRST}.querySelector('.at').textContent") == "round 0"
    page.key("+")
    page.key("Escape")
    assert page.run(f"{FIRST}.querySelector('.reset').hidden")


@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("log", [False, True])
def test_large_numbers_beside_axes_are_whole_and_not_rounded(
    tab: Page, tmp_path: Path, width: int, log: bool
) -> None:
    far = [1.0, 100_000.0, 1_000_000.0] if log else [0.0, 500_000.0, 1_000_000.0]
    high = [10.0, 1_000_000.0, 2e9] if log else [1_010_000.0, 1_030_000.0, 1_210_000.0]
    chart = Curves(
        title="Accuracy",
        caption="",
        lines=[Line("a", far, high)],
        x_label="images",
        y_label="bytes",
        log_x=log,
        log_y=log,
    )
    tab.open(render_page("a", "", [chart], tmp_path).as_uri(), width=width)
    found = tab.run(
        f"JSON.stringify((() => {{ const svg = {FIRST}.querySelector('.plot > svg'); "
        "const edge = svg.getBoundingClientRect(); "
        "return [...svg.querySelectorAll('text:not(.label)')].map((text) => { "
        "const box = text.getBoundingClientRect(); return [text.textContent, "
        "text.getAttribute('text-anchor'), box.left - edge.left, edge.right - box.right]; }); })())"
    )
    texts = json.loads(found)
    for label, _, left, right in texts:
        assert left >= 0 and right >= 0, f"{label} is cut off"
    along, beside = (
        [label for label, anchor, *_ in texts if anchor == wanted] for wanted in ("middle", "end")
    )
    assert along[-1] == "1M"
    assert ("100,000" if log else "500,000") in along
    assert all(re.fullmatch(r"[0-9,.]+[MB]?", label) for label in along + beside)
    if not log:  # steps of 50,000, of which two digits say nothing
        assert beside == ["1M", "1.05M", "1.1M", "1.15M", "1.2M"]
    else:
        assert beside == ["100", "10,000", "1M", "100M"]


def test_the_box_at_the_pointer_has_all_digits_of_large_numbers(tab: Page, tmp_path: Path) -> None:
    xs = [1_050_000.0, 2_000_000.0, 12_345_699.5]
    ys = [1_050_000.0, 12_345_699.0, 98_765_432_101.0]
    chart = Curves(title="Accuracy", caption="", lines=[Line("a", xs, ys)], x_label="images")
    tab.open(render_page("a", "", [chart], tmp_path).as_uri())
    tab.run(f"{FIRST}.querySelector('.plot > svg').focus()")
    read = f"[...{FIRST}.querySelectorAll('.tip .at, .tip .value')].map((one) => one.textContent)"
    told = []
    for _ in xs:
        tab.key("ArrowRight")
        told.append(tab.run(read))
    assert told == [
        ["images 1,050,000", "1,050,000"],
        ["images 2,000,000", "12,345,699"],
        ["images 12,345,699.5", "98,765,432,101"],
    ]


def test_the_box_at_the_pointer_writes_other_numbers_as_ever(tab: Page, tmp_path: Path) -> None:
    ys = [0.12345, 3.0, 1234.5, 0.00012, 2.5e13]
    chart = Curves(title="Accuracy", caption="", lines=[Line("a", [1, 2, 3, 4, 5], ys)])
    tab.open(render_page("a", "", [chart], tmp_path).as_uri())
    tab.run(f"{FIRST}.querySelector('.plot > svg').focus()")
    told = []
    for _ in ys:
        tab.key("ArrowRight")
        told.append(tab.run(f"{FIRST}.querySelector('.tip .value').textContent"))
    assert told == ["0.123", "3", "1235", "1.2e-4", "2.5e+13"]


def test_without_a_script_the_pictures_stay(tab: Page, address: str) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(address)
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)
    assert not tab.run(f"{FIRST}.classList.contains('alive')")
    assert tab.run(f"{FIRST}.querySelector('.still svg').getBoundingClientRect().height") > 100


def test_the_data_of_a_figure_can_be_taken_from_the_page(page: Page) -> None:
    text = page.run(f"atob({FIRST}.querySelector('a.get').href.split(',')[1])")
    assert text.startswith("line,style,round,test accuracy,low,high\nfedavg,test,0,0.1")


def test_a_live_page_renews_itself_and_keeps_what_was_switched_off(
    tab: Page, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "going", rounds=4, status="running")
    with FolderLock(folder), serving([folder]) as address:
        tab.open(address)
        tab.run(f"{FIRST}.querySelector('.legend button').click()")
        lines = (folder / "rounds.jsonl").read_text()
        more = json.dumps({"round": 5, "test_accuracy": 0.99, "test_loss": 0.1})
        (folder / "rounds.jsonl").write_text(f"{lines}{more}\n")
        tab.wait_for("document.querySelector('.headline').textContent.includes('5 rounds')")
        tab.wait_for(f"{FIRST}.classList.contains('alive')")
        assert tab.run(f"{FIRST}.querySelectorAll('.chart .line').length") == 0
        summary = json.loads((folder / "summary.json").read_text()) | {"status": "finished"}
        (folder / "summary.json").write_text(json.dumps(summary))
        tab.wait_for("document.body.dataset.live === 'ended'")
    assert tab.problems == []
