"""A result as people look at it: printed, drawn, as a table; and progress while it is made."""

import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

import fedlens as fl
from fedlens.runs import progress


@pytest.fixture(scope="module")
def result():
    return fl.run(fl.Experiment(dataset="fashion-mnist-mini", model="linear", rounds=2))


def test_it_prints_one_short_line(result):
    assert repr(result).startswith("<Result: finished, 2 rounds, test_accuracy 0.")
    assert "\n" not in str(result) and len(str(result)) < 80


def test_it_plots_what_was_recorded(result):
    axes = result.plot(axes=Figure().add_subplot())
    (line,) = axes.get_lines()
    assert line.get_xydata()[:, 0].tolist() == [1, 2]
    assert line.get_xydata()[-1, 1] == result.final["test_accuracy"]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert result.plot("test_loss", Figure().add_subplot()).get_ylabel() == "test loss"
    with pytest.raises(ValueError, match=r"'nonsense' was not recorded: choose one of .*test_f1"):
        result.plot("nonsense", Figure().add_subplot())


def test_one_round_is_a_point(result):
    one = replace(result, records=result.records[:1])
    (line,) = one.plot("train_loss", Figure().add_subplot()).get_lines()
    assert line.get_marker() == "o" and "1 round," in repr(one)


def test_it_draws_itself_in_a_notebook(result):
    page = result._repr_html_()
    assert "<svg" in page and "<td>test_accuracy</td>" in page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def test_it_becomes_a_data_frame_where_pandas_is(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match="pip install pandas"):
        result.to_pandas()
    monkeypatch.undo()
    pytest.importorskip("pandas")
    assert result.to_pandas()["test_accuracy"].iloc[-1] == result.final["test_accuracy"]


@pytest.mark.parametrize(("told", "terminal"), [(None, False), (None, True), (True, False)])
def test_progress_is_shown_to_people_unless_told(told, terminal, monkeypatch, capsys):
    monkeypatch.setattr("fedlens.runs.progress.sys.stderr.isatty", lambda: terminal)
    experiment = fl.Experiment(dataset="fashion-mnist-mini", model="linear", rounds=1)
    fl.run(experiment, progress=told)
    said = capsys.readouterr().err
    assert ("fashion-mnist-mini" in said) == (terminal or bool(told))
    fl.sweep({"a": experiment}, progress=told)
    assert ("sweep" in capsys.readouterr().err) == (terminal or bool(told))


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_names_in_progress_move_no_cursor(monkeypatch, capsys, on_a_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_a_terminal)
    with progress.rounds("[b]\x1b]0;title\x07", 1) as watch:
        watch({"round": 1, "done": 1, "point": "p\x1b[2J[/b]", "train_loss": 0.5})
    told = capsys.readouterr().err
    assert r"[b]\x1b]0;title\x07" in told and r"p\x1b[2J[/b]" in told
    assert "\x1b]0;" not in told and "\x1b[2J" not in told
