"""Status 2 means that nothing was written; what goes wrong later is another one."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedlens.cli.main import main
from fedlens.report import draw
from fedlens.runs.folder import RunFolder
from fedlens.storage import files
from tests.command_line import only_line


def test_a_disk_that_fills_up_while_figures_are_drawn_is_no_mistake_in_the_command(
    here, fedlens, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(draw, "save", full)
    ended = fedlens("run", "a.toml", "--out", "run", "-q")
    assert ended.status == 1
    assert only_line(ended.err, "report")
    assert "No space left" in ended.err
    assert json.loads(Path("run/summary.json").read_text())["status"] == "finished"
    assert fedlens("sweep", "a.toml", "--seeds", 1, "--out", "sweep", "-q").status == 1


def test_a_disk_that_fills_up_in_a_round_gives_one_line_and_leaves_the_last_checkpoint(
    here, fedlens, monkeypatch
):
    assert fedlens("run", "a.toml", "rounds=3", "--out", "whole", "-q").status == 0
    monkeypatch.setattr("fedlens.runs.loop.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedlens.runs.loop.SAVING_SHARE", 1.0)
    written, syncs = os.fsync, iter(range(10**6))

    def full(handle: int) -> None:
        if next(syncs) > 16:  # from then on, whatever is written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        ended = fedlens("run", "a.toml", "rounds=3", "--out", "run", "-q")
    assert (ended.status, ended.out) == (1, "")
    assert only_line(ended.err, "No space left")
    assert ended.err.endswith("fedlens resume run\n")
    assert list(Path("run/checkpoint").glob("state-*.json"))
    assert not list(Path("run").rglob("*.part"))
    assert fedlens("resume", "run", "-q").status == 0
    models = [Path(name, "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert models[0] == models[1]


def test_a_sweep_on_a_full_disk_goes_on_once_there_is_room(here, fedlens, monkeypatch):
    written, syncs = os.fsync, iter(range(10**6))

    def full(handle: int) -> None:
        if next(syncs) > 16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(handle)

    command = ("sweep", "a.toml", "--seeds", "2", "--out", "runs/seeds", "-q")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        ended = fedlens(*command)
    line = "fedlens: No space left on device: free some space, and run the command again\n"
    assert (ended.status, ended.err) == (1, line)
    assert fedlens(*command).status == 0


def test_a_value_that_is_found_wrong_in_a_round_is_status_1(here, fedlens, monkeypatch):
    def wrong(*_):
        raise ValueError("a number does not fit")

    monkeypatch.setattr("fedlens.runs.loop.run_rounds", wrong)
    ended = fedlens("run", "a.toml", "--out", "run", "-q")
    assert (ended.status, ended.err) == (1, "fedlens: a number does not fit\n")
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"


WITH_A_HOLE = """
from dataclasses import replace
from tests.toys import toy

def images(source):
    made = toy()
    holed = made.test.images.clone()
    holed[0] = 3e38
    return replace(made, test=replace(made.test, images=holed))
"""


def test_a_loss_that_is_no_number_is_said_and_is_status_1(here, fedlens):
    Path("with_a_hole.py").write_text(WITH_A_HOLE)
    given = ["dataset=with_a_hole:images", "clients.count=4"]
    ended = fedlens("run", "a.toml", *given, "--out", "run", "-q")
    assert ended.status == 1
    assert (
        "the run is over, but its final test_loss is no finite number below 1e+12: look"
        in ended.err
    )
    assert ended.err.count("\n") == 1
    assert "invalid" in ended.out
    assert fedlens("report", "run").status == 0
    assert (
        "(its loss is no finite number below 1e+12 after 2 rounds)"
        in Path("run/report.html").read_text()
    )
    ended = fedlens("sweep", "a.toml", *given, "--seeds", 1, "--out", "sweep", "-q")
    assert ended.status == 1
    assert (
        "1 of 1 points ended with a loss that is no finite number below 1e+12: seed=0" in ended.err
    )


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_disk_that_becomes_read_only_in_a_round_is_no_mistake_in_the_command(
    here, fedlens, monkeypatch, command
):
    monkeypatch.setattr("fedlens.runs.loop.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedlens.runs.loop.SAVING_SHARE", 1.0)
    make, made = files._new_part, iter(range(10**6))

    def read_only(path: Path) -> tuple[int, Path]:
        if next(made) > 10:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "a temporary name")
        return make(path)

    monkeypatch.setattr(files, "_new_part", read_only)
    more = ["--seeds", 1] if command == "sweep" else []
    ended = fedlens(command, "a.toml", "rounds=3", *more, "--out", "out", "-q")
    assert (ended.status, ended.out) == (1, "")
    assert "Read-only file system" in ended.err and "temporary" not in ended.err
    assert ("go on with: fedlens resume out\n" in ended.err) == (command == "run")


def test_a_second_writer_is_told_of_the_first_with_status_2(here, fedlens):
    assert fedlens("run", "a.toml", "--out", "run", "-q").status == 0
    folder = RunFolder.open(Path("run"))
    for words in (["resume", "run"], ["run", "a.toml", "--out", "run", "--overwrite"]):
        ended = fedlens(*words, "-q")
        assert ended.status == 2
        assert f"run is being written by process {os.getpid()} on " in ended.err
    folder.close()


def test_what_a_resume_finds_is_a_line_on_stderr(here, fedlens):
    assert fedlens("run", "a.toml", "--out", "run", "-q").status == 0
    manifest = json.loads(Path("run/manifest.json").read_text())
    Path("run/manifest.json").write_text(json.dumps(manifest | {"torch": "1.0"}))
    ended = fedlens("resume", "run", "--rounds", 3, "-q")
    assert ended.status == 0
    assert only_line(ended.err, "torch 1.0")
    assert torch.__version__ in ended.err
    assert len(Path("run/rounds.jsonl").read_text().splitlines()) == 3


def test_a_run_that_is_over_needs_not_all_fields_of_its_files(here, fedlens):
    assert fedlens("run", "a.toml", "--out", "run", "-q").status == 0
    for name, field in (("manifest.json", "left_out"), ("summary.json", "collapsed")):
        content = json.loads(Path("run", name).read_text())
        Path("run", name).write_text(json.dumps(content | {field: None}))
        assert fedlens("resume", "run", "-q").status == 0
        del content[field]
        Path("run", name).write_text(json.dumps(content))
        assert fedlens("resume", "run", "-q").status == 0


def test_a_terminal_that_knows_no_dash_ends_no_command(here, fedlens, monkeypatch):
    assert fedlens("run", "a.toml", "--out", "run–1", "-q").status == 0
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["fedlens", "report", "run–1"])
        patch.setattr(sys, "stdout", out)
        main()
    out.flush()
    assert ended.value.code == 0
    out.buffer.seek(0)
    assert b"report: run\\u20131" in out.buffer.read()


PROCESS = """
import atexit, sys, threading

from fedlens.__main__ import command

def last_words():
    threading.main_thread().join()
    print("a thread was waited for")

atexit.register(print, "what is left to do is done")
if sys.argv[1] == "thread":
    threading.Thread(target=last_words).start()
sys.argv = ["fedlens", *sys.argv[2:]]
command()
"""


@pytest.mark.parametrize("beside", ["nothing", "thread"])
def test_a_process_that_ends_at_once_leaves_nothing_undone(beside):
    words = [sys.executable, "-c", PROCESS, beside]
    ended = subprocess.run([*words, "--version"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    said = ended.stdout.splitlines()
    assert said[0].startswith("fedlens ") and "what is left to do is done" in said
    assert ("a thread was waited for" in said) == (beside == "thread")
    wrong = subprocess.run([*words, "no-such-verb"], capture_output=True, text=True)
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_words_that_reach_nobody_are_no_success():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-m", "fedlens", "--version"], stdout=full)
    assert ended.returncode == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_end_no_command(closed):
    words = f"exec {sys.executable} -m fedlens --version {closed}"
    ended = subprocess.run(["sh", "-c", words], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    mistaken = f"exec {sys.executable} -m fedlens no-such-verb {closed}"
    ended = subprocess.run(["sh", "-c", mistaken], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, ""), "no mistake is told as a result"


def test_a_run_whose_folder_is_moved_ends_and_goes_on_where_that_is_now(here, fedlens, monkeypatch):
    assert fedlens("run", "a.toml", "rounds=3", "--out", "whole", "-q").status == 0
    monkeypatch.setattr("fedlens.runs.loop.CHECKPOINT_SECONDS", 0.0)
    save = RunFolder.save_state

    def save_and_move(folder: RunFolder, *about: object) -> None:
        save(folder, *about)  # type: ignore[arg-type]
        if folder.path == Path("run"):
            folder.path.rename("moved")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_state", save_and_move)
        ended = fedlens("run", "a.toml", "rounds=3", "--out", "run", "-q")
    assert (ended.status, ended.err.count("\n")) == (1, 1)
    assert ended.err.startswith("fedlens: run is gone: if it was moved, resume it")
    assert not Path("run").exists()
    assert fedlens("resume", "moved", "-q").status == 0
    models = [Path(name, "model.safetensors").read_bytes() for name in ("moved", "whole")]
    assert models[0] == models[1]


def test_rounds_that_are_none_are_told_as_such(here, fedlens):
    assert fedlens("run", "a.toml", "--out", "run", "-q").status == 0
    text = Path("run/experiment.toml").read_text()
    Path("run/experiment.toml").write_text(re.sub("rounds = [0-9]+", 'rounds = "three"', text))
    ended = fedlens("resume", "run", "-q")
    assert ended.status == 2
    assert only_line(ended.err, "'three'")
