"""A result as people look at it: printed, drawn, as a table; and progress while it is made."""

import json
import re
import shutil
import sys
from base64 import b64decode
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.figure import Figure

import fedlens as fl
from fedlens.runs import progress
from tests.runs.small_runs import described


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
    with pytest.raises(ValueError, match="nonsense"):
        result.plot("nonsense", Figure().add_subplot())


def test_one_round_is_a_point(result):
    one = replace(result, records=result.records[:1])
    (line,) = one.plot("train_loss", Figure().add_subplot()).get_lines()
    assert line.get_marker() == "o" and "1 round," in repr(one)


def test_it_draws_itself_in_a_notebook(result):
    page = result._repr_html_()
    code = re.search(r"base64,([^\"]+)", page)
    assert code is not None and "<td>test_accuracy</td>" in page
    assert "Test accuracy" in " ".join(ElementTree.fromstring(b64decode(code[1])).itertext())


def test_it_becomes_a_data_frame_where_pandas_is(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match="pip install pandas"):
        result.to_pandas()
    monkeypatch.undo()
    pytest.importorskip("pandas")
    assert result.to_pandas()["test_accuracy"].iloc[-1] == result.final["test_accuracy"]


def test_a_run_folder_is_read_as_the_result_it_was_without_its_data(tmp_path):
    asked = fl.Evaluate(on=("validation", "test"), best=True)  # of data and a model from Python
    made = fl.run(described(evaluate=asked), tmp_path / "run")
    read = fl.Result.read(tmp_path / "run")
    assert repr(read) == repr(made) and read.final == made.final == made.summary["final"]
    assert (read.status, read.summary, read.records) == (made.status, made.summary, made.records)
    assert read.best_model is not None and made.best_model is not None
    for saved, model in ((read.model, made.model), (read.best_model, made.best_model)):
        assert saved.keys() == model.keys()
        assert all(torch.equal(saved[name], model[name]) for name in model)
    (tmp_path / "run" / "model.safetensors").unlink()
    assert fl.Result.read(str(tmp_path / "run")).model == {}


def test_it_has_the_accuracy_of_each_client(tmp_path):
    made = fl.run(described(clients=fl.Clients(count=3, holdout=0.4)), tmp_path / "run")
    shares = json.loads((tmp_path / "run" / "evaluation.json").read_text())["client_accuracy"]
    assert list(made.client_accuracy.values()) == shares == made.records[-1]["client_accuracy"]
    assert list(made.client_accuracy) == ["0", "1", "2"]
    assert fl.Result.read(tmp_path / "run").client_accuracy == made.client_accuracy
    assert fl.run(described()).client_accuracy == {}, "none was tested"


def test_a_folder_of_no_run_is_not_read_as_a_result(tmp_path):
    with pytest.raises(ValueError, match=r"experiment\.toml"):
        fl.Result.read(tmp_path)


def test_a_run_that_is_not_over_is_read_as_far_as_it_is(tmp_path):
    begun, whole = tmp_path / "begun", tmp_path / "whole"

    def copy(record):
        if record["round"] == 2:
            shutil.copytree(whole, begun)

    made = fl.run(described(), whole, watch=copy)
    shutil.copy(whole / "model.safetensors", begun)  # of an end before which it now stands again
    read = fl.Result.read(begun)
    assert (read.status, read.model) == ("interrupted", {})
    assert read.records == made.records[:2]
    assert read.final["test_accuracy"] == made.records[1]["test_accuracy"]
    (begun / "rounds.jsonl").write_text("")
    read = fl.Result.read(begun)
    assert repr(read) == f"<Result: interrupted, 0 rounds, {begun}>"
    assert read.final == {} and "<img" not in read._repr_html_()


def test_a_loss_that_was_not_finite_is_read_as_none(tmp_path):
    made = fl.run(described(rounds=1, evaluate=fl.Evaluate(on=())), tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").write_text(
        json.dumps({**made.records[0], "train_loss": None})
    )
    read = fl.Result.read(tmp_path / "run")
    assert repr(read) == f"<Result: finished, 1 round, {tmp_path / 'run'}>"
    assert "<img" not in read._repr_html_()


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
    with progress.in_rounds("[b]\x1b]0;title\x07", 1) as watch:
        watch({"round": 1, "done": 1, "point": "p\x1b[2J[/b]", "train_loss": 0.5})
    told = capsys.readouterr().err
    assert r"[b]\x1b]0;title\x07" in told and r"p\x1b[2J[/b]" in told
    assert "\x1b]0;" not in told and "\x1b[2J" not in told
