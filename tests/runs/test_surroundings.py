"""Folders that can only be read, and disks and shared memory that are full: real ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import everything, only_line
from tests.data.naturalists import make
from tests.mounts import fill, mount_disk, mount_read_only, why_not_in_own_mounts

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="mounts are Linux's"),
    pytest.mark.usefixtures("here", "one_thread"),
]

Work = Callable[[], object]


@pytest.fixture(scope="module")
def in_own_mounts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Work], None]:
    """Has a child process do some work, which may mount what it likes."""
    place = tmp_path_factory.mktemp("disk")
    why = why_not_in_own_mounts(lambda: mount_disk(place, 64))
    if why:
        pytest.skip("this account may not mount anything: root may, and so may users in `unshare`")

    def do(work: Work) -> None:
        if why := why_not_in_own_mounts(work):
            pytest.fail(why, pytrace=False)

    return do


def model(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


def test_a_folder_that_can_only_be_read_is_refused_and_stays_as_it_was(fedlens, in_own_mounts):
    assert fedlens("run", "a.toml", "--out", "runs/run", "-q").status == 0
    before = everything()

    def tried() -> None:
        mount_read_only(Path("runs"))
        for words in (
            ("run", "a.toml", "--out", "runs/new"),
            ("run", "a.toml", "--out", "runs/run", "--overwrite"),
            ("resume", "runs/run", "--rounds", 3),
            ("sweep", "a.toml", "--seeds", 2, "--out", "runs/sweep"),
            ("report", "runs/run"),
        ):
            ended = fedlens(*words)
            assert ended.status == 2
            line = ended.err.splitlines()[-1]
            assert " cannot be written " in line and "(Read-only file system): " in line

    in_own_mounts(tried)
    assert everything() == before


@pytest.mark.parametrize(
    ("words", "kilobytes"),
    [
        ((), 112),  # a checkpoint takes 36 kB, and two are kept
        (("algorithm=scaffold",), 400),  # what each of three clients remembers takes as much
    ],
)
def test_a_disk_that_is_full_in_a_round_keeps_the_last_checkpoint(
    words, kilobytes, fedlens, in_own_mounts, monkeypatch
):
    monkeypatch.setattr("fedlens.runs.loop.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedlens.runs.loop.SAVING_SHARE", 1.0)
    asked = "run", "a.toml", "rounds=4", *words
    assert fedlens(*asked, "--out", "whole", "-q").status == 0

    def tried() -> None:
        monkeypatch.setattr("fedlens.runs.loop.room_of_clients", lambda: 0)
        mount_disk(Path("disk"), 2000)
        filler = fill(Path("disk"), kilobytes)
        ended = fedlens(*asked, "--out", "disk/run", "-q")
        assert (ended.status, ended.out) == (1, "")
        assert only_line(ended.err, "No space left")
        assert ended.err.endswith("fedlens resume disk/run\n")
        assert list(Path("disk/run/checkpoint").glob("state-*.json"))
        assert not list(Path("disk").rglob("*.part"))
        filler.unlink()
        assert fedlens("resume", "disk/run", "-q").status == 0
        assert model("disk/run") == model("whole")

    in_own_mounts(tried)


def test_a_disk_that_is_full_as_figures_are_drawn_keeps_the_run(fedlens, in_own_mounts):
    def tried() -> None:
        mount_disk(Path("disk"), 200)
        ended = fedlens("run", "a.toml", "--out", "disk/run", "-q")
        assert (ended.status, ended.err.count("\n")) == (1, 1)
        assert "the report cannot be written to disk/run (No space left on device)" in ended.err
        assert json.loads(Path("disk/run/summary.json").read_text())["status"] == "finished"
        assert not list(Path("disk").rglob("*.part"))
        assert fedlens("report", "disk/run", "--out", "page").status == 0

    in_own_mounts(tried)


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_full_temporary_folder_and_full_shared_memory_make_no_difference(
    fedlens, in_own_mounts, engine
):
    words = ("run", "a.toml", f"engine={engine}", "-q", "--out")
    assert fedlens(*words, "whole").status == 0

    def tried() -> None:
        for folder in (Path(os.environ["TMPDIR"]), Path("/dev/shm")):
            mount_disk(folder, 64)
            fill(folder)
        ended = fedlens(*words, "run")
        assert (ended.status, ended.err) == (0, "")
        assert model("run") == model("whole")

    in_own_mounts(tried)


def test_a_set_that_does_not_fit_on_a_disk_is_said_before_it_is_decoded(fedlens, in_own_mounts):
    nature = make(Path("nature"), {1: 101, 2: 103, 3: 20}, num_val=5)

    def tried() -> None:
        mount_disk(Path("disk"), 256)
        words = ["inaturalist-user-120k", "--from", nature, "--images", nature, "--size", 96]
        ended = fedlens("data", "prepare", *words, "--data", "disk", "-q")
        assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
        assert "images.part needs 5.8 MB (No space left on device): free some space" in ended.err
        assert not list(Path("disk").rglob("*.part"))

    in_own_mounts(tried)
