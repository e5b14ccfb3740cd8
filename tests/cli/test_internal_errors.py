"""Errors that nobody foresaw: one line on the terminal, and the traceback in a file."""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlens.version import __version__
from tests.command_line import Ended

pytestmark = [
    pytest.mark.usefixtures("here"),
    # typer 0.20 asks click for names that click is about to drop.
    pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning"),
]

MODEL = """
import os, signal
from torch import nn

HOME = os.getpid()  # workers are forked from it

class Net(nn.Sequential):
    calls = 0

    def __init__(self, shape, outputs):
        super().__init__(nn.Flatten(), nn.Linear(784, outputs))

    def forward(self, x):
        Net.calls += self.training
        if Net.calls > 3:
            self.fail()
        return super().forward(x)

class Raises(Net):
    def fail(self):
        raise RuntimeError("it broke\\nin two lines")

class Asserts(Net):
    def fail(self):
        assert self is None

class Kills(Net):
    def fail(self):
        if os.getpid() != HOME:
            os.kill(os.getpid(), signal.SIGKILL)

class Hungry(Net):
    def fail(self):
        raise MemoryError
"""
LINE = "fedlens: internal error, {}: this is a mistake in Fedlens; please report it with {}\n"


@pytest.fixture(autouse=True)
def models(here) -> Iterator[None]:
    Path("bad_model.py").write_text(MODEL)
    yield
    sys.modules.pop("bad_model", None)  # the next test's counts anew


def kept() -> list[Path]:
    """The files that tell of errors."""
    return sorted(Path(tempfile.gettempdir()).glob("fedlens-error-*.txt"))


def told(ended: Ended, error: str) -> str:
    """The traceback, of an error that was told of in one line."""
    (file,) = kept()
    assert ended == Ended(1, "", LINE.format(error, file))
    text = file.read_text()
    assert text.startswith(f"fedlens {__version__}\nfedlens run a.toml ")
    return text


def test_an_internal_error_is_one_line_with_a_file_to_report(fedlens, monkeypatch):
    monkeypatch.setattr("fedlens.runs.run.start", None)
    ended = fedlens("run", "a.toml", "rounds=1", "--out", "run", "-q")
    text = told(ended, "TypeError: 'NoneType' object is not callable")
    assert "Traceback (most recent call last)" in text


@pytest.mark.parametrize("engine", ["sequential", "processes"])
@pytest.mark.parametrize(
    ("model", "line", "error"),
    [("Raises", 21, "RuntimeError: it broke"), ("Asserts", 25, "AssertionError")],
)
def test_an_error_in_code_of_ones_own_is_told_with_its_place(fedlens, engine, model, line, error):
    words = (f"model=bad_model:{model}", f"engine={engine}", "--out", "run", "-q")
    status, out, err = fedlens("run", "a.toml", *words)
    expected = f"fedlens: bad_model.py, line {line}, in fail: {error}: fix it there"
    assert err.startswith(expected) and err.count("\n") == 1, err
    assert (status, out) == (1, "")
    assert kept() == []
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("Kills", "a worker process was killed 3 times over the same clients, perhaps because "
                  'memory ran out: choose engine = "sequential", or a smaller local.batch_size'),
        ("Hungry", "there is not enough memory"),
    ],
)  # fmt: skip
def test_what_the_machine_lacks_is_a_plain_line(fedlens, model, line):
    engine = "processes" if model == "Kills" else "sequential"
    words = (f"model=bad_model:{model}", f"engine={engine}", "--out", "run", "-q")
    ended = fedlens("run", "a.toml", *words)
    *before, last = ended.err.splitlines()
    assert (ended.status, ended.out) == (1, "")
    assert last.startswith(f"fedlens: {line}")
    again = "fedlens: a worker process was killed or stopped: another trains its clients"
    assert set(before) == ({again} if model == "Kills" else set())
    assert kept() == []


def test_the_traceback_is_shown_where_it_is_asked_for_or_cannot_be_kept(fedlens, monkeypatch):
    words = ("model=bad_model:Raises", "--out", "run", "-q", "--debug")
    for engine in ("sequential", "processes"):
        err = fedlens("run", "a.toml", *words, "--overwrite", f"engine={engine}").err
        assert "Traceback (most recent call last)" in err and "in fail" in err
    monkeypatch.setattr("fedlens.runs.run.start", None)
    monkeypatch.setattr(tempfile, "tempdir", str(Path("nowhere")))
    status, out, err = fedlens("run", "a.toml", "rounds=1", "--out", "other", "-q")
    assert (status, out) == (1, "")
    assert err.endswith("please report it with what --debug shows\n")
