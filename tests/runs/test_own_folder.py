"""Which folder a run takes, what it may replace there, and what it needs to go on."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fedlens as fl
from fedlens.cli.run import _reserved
from tests.command_line import EXPERIMENT
from tests.runs.resumable import Stop, assert_same_run, contents, forgetful

pytestmark = pytest.mark.usefixtures("one_thread", "quick_pages")


def stopped(run: Path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        fl.run(forgetful(), run, watch=Stop(2))
    return run


def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(tmp_path):
    run = stopped(tmp_path / "run")
    shutil.move(run / "checkpoint", tmp_path / "kept")
    (run / "checkpoint").write_text("a file, as a file system without links may leave it")
    before = contents(run)
    with pytest.raises(ValueError, match="cannot be read"):
        fl.resume(run, experiment=forgetful())
    assert contents(run) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be two")
def test_checkpoints_of_another_account_are_not_taken_for_none(tmp_path):
    run = stopped(tmp_path / "run")
    (run / "checkpoint").chmod(0o000)
    found = """
import os, sys
from pathlib import Path
from fedlens.storage.run_files import last_saved
os.chdir(sys.argv[1])
os.setuid(65534)
try:
    last_saved(Path("."))
except ValueError as error:
    print(error)
"""
    line = [sys.executable, "-c", found, str(run)]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert "checkpoint cannot be read (Permission denied)" in ended.stdout


@pytest.mark.parametrize("torn", ["", '{"status": "runn'])
def test_a_torn_summary_does_not_stop_a_run_from_going_on(tmp_path, torn):
    run = stopped(tmp_path / "run")
    fl.run(forgetful(), tmp_path / "whole")
    (run / "summary.json").write_text(torn)
    assert fl.resume(run, experiment=forgetful()).status == "finished"
    assert_same_run(run, tmp_path / "whole")


def test_only_what_a_run_wrote_is_overwritten(tmp_path):
    run = tmp_path / "run"
    fl.run(forgetful(), run)
    fl.run(forgetful(), run, overwrite=True)
    (run / "notes.txt").write_text("mine")
    before = contents(run)
    with pytest.raises(ValueError, match=r"notes\.txt"):
        fl.run(forgetful(), run, overwrite=True)
    assert contents(run) == before
    other = tmp_path / "other"
    other.mkdir()
    for name in ("experiment.toml", "manifest.json", "thesis.tex"):
        (other / name).write_text("x")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        fl.run(forgetful(), other, overwrite=True)
    assert sorted(contents(other)) == ["experiment.toml", "manifest.json", "thesis.tex"]
    for name in ("manifest.json", "thesis.tex"):
        (other / name).unlink()
    with pytest.raises(ValueError, match="not a run"):
        fl.run(forgetful(), other, overwrite=True)
    assert contents(other) == {"experiment.toml": b"x"}


def test_runs_that_begin_at_once_take_a_number_each(tmp_path):
    (tmp_path / "a.toml").write_text(EXPERIMENT)
    line = [sys.executable, "-m", "fedlens", "run", "a.toml", "--quiet", "rounds=1"]

    def ran(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(ran, range(3)))
    assert [one.returncode for one in ended] == [0, 0, 0], [one.stderr for one in ended]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "a-2", "a-3"]
    for run in (tmp_path / "runs").iterdir():
        assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_a_place_is_taken_before_its_run_begins(tmp_path):
    with _reserved(tmp_path / "runs" / "a") as one, _reserved(tmp_path / "runs" / "a") as two:
        assert (one.name, two.name) == ("a", "a-2")
    assert not list(tmp_path.iterdir())


def test_a_command_that_is_refused_leaves_no_folder(fedlens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(EXPERIMENT)
    assert fedlens("run", "a.toml", "clients.count=100000000").status == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]
