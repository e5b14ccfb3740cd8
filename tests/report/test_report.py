from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image

from fedlens.report import read, read_all, report, rows
from fedlens.report.blocks import Curves, places
from fedlens.report.palette import COLOURS, RUNS
from fedlens.report.runs import differences, headline, run_blocks
from fedlens.runs.records import settings
from fedlens.storage.locks import FolderLock

Make = Callable[..., Path]


class Ids(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]


def cell(folder: Path, column: str) -> str:
    header, body = rows([read(folder)])
    return body[0][header.index(column)]


def test_a_run_has_one_colour_in_all_curves(run_folder: Make) -> None:
    """Also where it is the only one that has something to show."""
    one, two = run_folder("one"), run_folder("two", algorithm="fedprox", spread=True)
    curves = [block for block in run_blocks(read_all([one, two])) if isinstance(block, Curves)]
    assert "Accuracy over clients" in [block.title for block in curves]
    assert {places(block.lines)["two"] for block in curves} == {1}


def test_a_run_folder_is_read_whole(run_folder: Make) -> None:
    run = read(run_folder("fedavg", rounds=6))
    assert (run.name, run.algorithm, run.status, run.num_rounds) == (
        "fedavg",
        "fedavg",
        "finished",
        6,
    )
    assert run.experiment["clients"]["count"] == 100
    assert run.manifest["parameters"] == 1_663_370
    assert run.partition is not None and run.partition["num_clients"] == 2
    assert run.curve("test_accuracy")[0] == [0, 2, 4, 6]


def test_a_folder_that_is_no_run_is_refused_with_what_it_lacks(
    tmp_path: Path, run_folder: Make
) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"manifest\.json"):
        read(tmp_path / "empty")
    run_folder("runs/a")
    with pytest.raises(ValueError, match=r"name them one by one \(a\)"):
        read(tmp_path / "runs")
    with pytest.raises(ValueError, match="name at least one"):
        report([])


def test_a_torn_last_line_is_passed_over_and_a_torn_line_before_it_is_not(run_folder: Make) -> None:
    folder = run_folder("killed", rounds=5, status="running")
    whole = (folder / "rounds.jsonl").read_bytes()
    (folder / "rounds.jsonl").write_bytes(whole + b'{"round": 6, "seconds": 1.\xe2')
    assert read(folder).num_rounds == 5
    (folder / "rounds.jsonl").write_bytes(b'{"round": 0, "tes\n' + whole)
    with pytest.raises(ValueError, match=r"line 1 cannot be read.*delete the line"):
        read(folder)


def test_a_round_that_was_run_again_counts_once_with_its_last_record(recorded: Make) -> None:
    lines = [{"round": n, "train_loss": y} for n, y in ((1, 3.0), (2, 9.0), (2, 2.0))]
    assert read(recorded("r", lines)).curve("train_loss") == ([1, 2], [3.0, 2.0])


def test_a_run_killed_before_its_summary_counts_as_interrupted(run_folder: Make) -> None:
    folder = run_folder("killed", rounds=7, planned=40)
    (folder / "summary.json").unlink()
    assert cell(folder, "status") == "interrupted"
    assert cell(folder, "rounds") == "7 of 40"
    assert cell(folder, "seconds") == "8.8"
    assert cell(folder, "MB up") == "465.7"


def test_a_run_killed_after_its_start_is_told_by_its_records(run_folder: Make) -> None:
    """Its summary is of the moment when it started, or was resumed."""
    folder = run_folder("killed", rounds=7, planned=40, status="running")
    expected = [cell(folder, column) for column in ("best accuracy (round)", "final loss", "MB up")]
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    zeros = {"total": 0.0, "training": 0.0, "evaluation": 0.0}
    summary |= {"rounds": 0, "seconds": zeros, "bytes_up": 0, "bytes_down": 0, "final": {}}
    path.write_text(json.dumps(summary | {"best": {}, "peak_memory_bytes": 0}))
    shown = [cell(folder, column) for column in ("best accuracy (round)", "final loss", "MB up")]
    assert shown == expected
    assert cell(folder, "seconds") == "8.8"
    assert (cell(folder, "rounds"), cell(folder, "status")) == ("7 of 40", "interrupted")
    assert read(folder).summary["emd"] == 0.92


@pytest.mark.usefixtures("quick_pages")
def test_a_page_names_no_files_but_its_own_for_removal(run_folder: Make, tmp_path: Path) -> None:
    """A folder may come from anyone."""
    folder = run_folder("mailed", rounds=3)
    report([folder])
    outside = [tmp_path / "thesis.pdf", folder / "model.csv", tmp_path / "paper.csv"]
    for path in outside:
        path.write_text("years of work")
    mine = folder / "figures" / "own notes.csv"
    mine.write_text("")
    names = f"{tmp_path / 'thesis'} ../model ../../paper own.notes old"
    old = folder / "figures" / "old.csv"
    old.write_text("")
    page = folder / "report.html"
    text = re.sub(r'data-files="[^"]*"', f'data-files="{names}"', page.read_text("utf-8"))
    page.write_text(text, "utf-8")
    report([folder])
    assert all(path.exists() for path in (*outside, mine))
    assert not old.exists(), "a figure of an earlier page"


@pytest.mark.usefixtures("quick_pages")
def test_figures_that_lie_elsewhere_are_not_removed(run_folder: Make, tmp_path: Path) -> None:
    folder = run_folder("linked", rounds=3)
    (tmp_path / "home").mkdir()
    thesis = tmp_path / "home" / "thesis.pdf"
    thesis.write_text("years of work")
    (folder / "figures").symlink_to(tmp_path / "home")
    (folder / "report.html").write_text('<body data-files="thesis">')
    report([folder])
    assert thesis.exists()


def test_damaged_files_are_named(run_folder: Make) -> None:
    folder = run_folder("a")
    (folder / "summary.json").write_text("[1]")
    with pytest.raises(ValueError, match="list"):
        read(folder)
    (folder / "experiment.toml").write_text("rounds = ")
    with pytest.raises(ValueError, match="TOML"):
        read(folder)


def test_runs_of_one_report_have_distinct_names(run_folder: Make) -> None:
    folders = [run_folder(name, rounds=2) for name in ("x/seed1", "y/seed1", "y/other")]
    assert [run.name for run in read_all([*folders, folders[0]])] == ["x/seed1", "y/seed1", "other"]
    deep = [run_folder(f"{a}/b/c", rounds=2) for a in "pq"]
    assert [run.name for run in read_all(deep)] == ["p/b/c", "q/b/c"]


def test_the_table_tells_final_and_best(recorded: Make) -> None:
    lines = [
        {"round": 1, "test_accuracy": 0.5, "test_loss": 1.5, "bytes_up": 1_500_000},
        {"round": 2, "test_accuracy": 0.75, "test_loss": 0.8, "bytes_up": 1_500_000},
        {"round": 3, "test_accuracy": 0.7, "test_loss": 0.9, "test_f1": 0.69},
    ]
    run = read(recorded("r", lines))
    header, body = rows([run])
    assert dict(zip(header, body[0], strict=True)) == {
        "run": "r",
        "algorithm": "fedavg",
        "rounds": "3",
        "final accuracy": "70.0%",
        "best accuracy (round)": "75.0% (2)",
        "final loss": "0.900",
        "macro F1": "0.690",
        "MB up": "3.0",
        "MB down": "0.0",
        "seconds": "56.5",
        "status": "finished",
    }
    assert run.best("test_loss") == (0.8, 2)


def test_without_test_examples_validation_is_what_counts(recorded: Make) -> None:
    folder = recorded("r", [{"round": 3, "validation_accuracy": 0.625, "train_loss": 1.0}])
    assert cell(folder, "final accuracy") == "62.5%"
    assert headline([read(folder)]) == "r reached 62.5% validation accuracy after 3 rounds."


def test_the_headline_names_the_best_run_first(run_folder: Make) -> None:
    low = run_folder("low", top=0.5)
    high = run_folder("high", top=0.9)
    cut = run_folder("cut", top=0.5, rounds=10, planned=40, status="interrupted")
    blind = run_folder("blind", every=0)
    said = headline(read_all([low, high, cut, blind]))
    assert re.fullmatch(
        r"high reached [\d.]+% test accuracy after 40 rounds; low [\d.]+%; "
        r"cut [\d.]+% \(interrupted after 10 rounds\)\. "
        r"blind was not evaluated; its training loss was [\d.]+ after 40 rounds\.",
        said,
    )


def test_the_headline_says_that_a_model_gives_every_image_the_same_class(run_folder: Make) -> None:
    folders = [run_folder(name, rounds=2, seed=i) for i, name in enumerate("ab")]
    told = {"status": "finished", "collapsed": True}
    (folders[0] / "summary.json").write_text(json.dumps(told))
    words = "model gives every image the same class."
    assert headline(read_all(folders[:1])).endswith(f"\nIts {words}")
    assert headline(read_all(folders)).endswith("\nBut look closer: a (one class for all).")
    assert words not in headline(read_all(folders[1:]))


def test_a_long_headline_sums_up_the_rest(run_folder: Make) -> None:
    folders = [run_folder(f"r{n}", rounds=2, top=0.1 * n) for n in range(1, 10)]
    assert re.search(
        r"; r5 [\d.]+%; 4 more between [\d.]+% and [\d.]+%\.$", headline(read_all(folders))
    )


def test_settings_are_spelled_as_on_the_command_line() -> None:
    experiment = {
        "rounds": 3,
        "clients": {"partition": {"name": "dirichlet", "alpha": 0.3}},
        "algorithm": [{"name": "fedvc", "size": 256}, {"name": "fedavgm", "momentum": 0.9}],
    }
    assert settings(experiment) == {
        "rounds": 3,
        "clients.partition": "dirichlet",
        "clients.partition.alpha": 0.3,
        "algorithm": "fedvc + fedavgm",
        "algorithm.fedvc.size": 256,
        "algorithm.fedavgm.momentum": 0.9,
    }
    assert settings({"algorithm": []}) == settings({}) == {"algorithm": "fedavg"}


def test_only_the_settings_that_differ_are_listed(run_folder: Make) -> None:
    runs = read_all([run_folder("a", alpha=0.1), run_folder("b", alpha=10.0, algorithm="fedprox")])
    keys, values = differences(runs)
    assert keys == ["clients.partition.alpha", "algorithm", "algorithm.fedprox.mu"]
    assert values == [["0.1", "fedavg", "–"], ["10.0", "fedprox", "0.01"]]


def test_one_run_is_reported_in_its_own_folder(run_folder: Make) -> None:
    folder = run_folder("alone", spread=True, extra=("train", "validation"))
    assert report([folder]) == folder / "report.html"
    drawn = {path.name for path in (folder / "figures").glob("*.png")}
    assert drawn == {
        *("accuracy.png", "loss.png", "clients.png"),
        "who_holds_what.png",
    }
    kinds = {path.suffix for path in (folder / "figures").glob("accuracy.*")}
    assert kinds == {".png", ".svg", ".pdf", ".csv"}
    with Image.open(folder / "figures" / "accuracy.png") as image:
        assert image.width >= 900
        assert image.getextrema() != ((255, 255),) * 4


@pytest.mark.usefixtures("quick_pages")
def test_several_runs_are_reported_in_the_folder_they_share(
    run_folder: Make, tmp_path: Path
) -> None:
    folders = [run_folder("x/a"), run_folder("y/b", algorithm="fedavgm", top=0.9)]
    page = report(folders)
    assert page == tmp_path / "report.html"
    assert (tmp_path / "figures" / "final_accuracy.png").is_file()
    assert report(folders, tmp_path / "new" / "place") == tmp_path / "new" / "place" / "report.html"
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.usefixtures("quick_pages")
def test_a_figure_of_an_earlier_report_does_not_linger(run_folder: Make, tmp_path: Path) -> None:
    folders = [run_folder("a"), run_folder("b")]
    report(folders, tmp_path / "out")
    report(folders[:1], tmp_path / "out")
    assert not (tmp_path / "out" / "figures" / "final_accuracy.png").exists()


def test_a_place_that_cannot_be_written_is_named(run_folder: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written to .*file .*name another folder"):
        report([run_folder("a")], tmp_path / "file")


@pytest.mark.usefixtures("svg_alone")
def test_the_page_stands_alone_and_its_ids_are_its_own(run_folder: Make) -> None:
    folders = [run_folder("a", spread=True), run_folder("b", spread=True, status="diverged")]
    page = report(folders).read_text("utf-8")
    assert "://" not in page
    ids = Ids(page).ids
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', page.split("<script>")[0]))
    assert used and used <= set(ids)
    assert Ids(page).tags.count("figure") == page.count('role="img" aria-label="')
    assert "Line chart of test accuracy by round. a: 10.0% at round 0" in page
    assert '<span class="diverged">diverged</span>' in page
    assert "prefers-color-scheme: dark" in page
    assert len(RUNS) == 9
    assert not any(f": {COLOURS[name]}" in page.split("</style>")[1] for name in RUNS)
    style = page.split("</style>")[0]
    assert all(style.count(f"--{name}: ") == 2 for name in RUNS), "dark ones, too"


@pytest.mark.usefixtures("svg_alone")
def test_names_are_escaped_and_drawn_as_they_are(run_folder: Make) -> None:
    names = ("<img src=x onerror=alert(1)>", "_hidden", "cost $5 or $6^2$", "连邦 & co")
    page = report([run_folder(name) for name in names]).read_text("utf-8")
    assert "img" not in Ids(page).tags
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    for name in ("_hidden", "cost $5 or $6^2$", "连邦 &amp; co"):
        assert f"{name}: 10.0% at round 0" in page


def test_the_same_records_give_the_same_bytes(run_folder: Make, tmp_path: Path) -> None:
    folders = [run_folder("a", spread=True), run_folder("b")]
    pages = [report(folders, tmp_path / out).parent for out in ("one", "two")]
    for path in pages[0].rglob("*.*"):
        assert path.read_bytes() == (pages[1] / path.relative_to(pages[0])).read_bytes()


def test_settings_of_matplotlib_are_left_as_they_were(run_folder: Make) -> None:
    with matplotlib.rc_context({"axes.titlesize": 31}):
        before = dict(matplotlib.rcParams)
        report([run_folder("a")])
        assert dict(matplotlib.rcParams) == before


def test_a_run_that_was_never_evaluated_still_gives_a_page(run_folder: Make) -> None:
    folder = run_folder("blind", every=0)
    page = report([folder]).read_text("utf-8")
    assert "Line chart of training loss by round" in page
    assert (folder / "figures" / "loss.png").exists()
    assert not (folder / "figures" / "accuracy.png").exists()


def test_measures_that_are_not_there_are_said_to_be_on_no_examples(
    run_folder: Make, recorded: Make
) -> None:
    blind = [run_folder(f"blind-{seed}", every=0, seed=seed) for seed in (1, 2)]
    trained = "Nothing was evaluated: the loss is that of local training. A megabyte"
    for folders, told in (
        (blind[:1], trained),
        (blind, f"over seeds. {trained}"),
        ([recorded("new", [], status="interrupted")], "Nothing was evaluated. A megabyte"),
    ):
        results = next(one for one in run_blocks(read_all(folders)) if one.title == "Results")
        assert told in results.caption
        assert "examples" not in results.caption


def test_a_run_without_a_single_round_still_gives_a_page(recorded: Make) -> None:
    folder = recorded("new", [], status="running")
    with FolderLock(folder):
        page = report([folder]).read_text("utf-8")
    assert "new was not evaluated (running, 0 rounds)." in page
    assert "Line chart" not in page


@hypothesis_settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    values=st.lists(
        st.sampled_from(
            [None, math.nan, math.inf, -math.inf, "x", True, 0, 0.5, -1.0, 1e30, 1e-30]
        ),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_was_recorded_there_is_a_page(recorded: Make, values: list[object]) -> None:
    keys = ("test_accuracy", "test_loss", "train_loss", "test_f1", "seconds", "bytes_up")
    spread = tuple(f"client_accuracy_{word}" for word in ("min", "p10", "median", "max"))
    folders = [recorded("a", []), recorded("b", [])]
    for folder, order in zip(folders, (values, values[::-1]), strict=True):
        lines = [{"round": n} | dict.fromkeys(keys + spread, v) for n, v in enumerate(order)]
        (folder / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (folder / "summary.json").write_text(json.dumps({"final": None, "best": {"test_loss": 3}}))
    assert report(folders).is_file()
