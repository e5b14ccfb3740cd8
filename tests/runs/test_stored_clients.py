"""What clients remember in files, where it finds no room in memory."""

from pathlib import Path

import pytest
import torch

import fedlens as fl
from fedlens.core import Memory
from fedlens.runs.folder import Change, RunFolder
from fedlens.storage.reading import BadFile
from fedlens.storage.run_files import OF_CLIENTS, client_file, saved_rounds
from tests.checkpoints import load_state, new_run
from tests.runs.resumable import (
    Stop,
    assert_same_run,
    mindful,
    save_after_every_round,
    set_room,
)

pytestmark = pytest.mark.usefixtures("one_thread", "quick_pages")


def files(run: Path) -> list[tuple[int, int]]:
    """Of clients, each with its round."""
    found = (path.stem.split("-") for path in (run / OF_CLIENTS).rglob("*.safetensors"))
    return sorted((int(client), int(round)) for client, round in found)


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_where_it_is_changes_nothing(engine, tmp_path, monkeypatch):
    experiment = mindful(rounds=4, engine=engine)
    fl.run(experiment, tmp_path / "plain")
    assert not files(tmp_path / "plain")
    plain = load_state(RunFolder(tmp_path / "plain")).clients
    for room in (0, 3):
        set_room(monkeypatch, room)
        run = tmp_path / str(room)
        fl.run(experiment, run)
        assert_same_run(run, tmp_path / "plain")
        assert {client for client, _ in files(run)} == {*range(room, 6)}
        found = load_state(RunFolder(run)).clients
        assert plain.num_examples == found.num_examples
        assert plain.rows.keys() == found.rows.keys()
        for client, row in plain.rows.items():
            there = found.rows[client]
            assert [*row] == [*there]
            for part, tree in row.items():
                assert [*tree] == [*there[part]]
                assert all(torch.equal(t, there[part][name]) for name, t in tree.items())


def test_a_run_may_go_on_with_more_room_or_with_less(tmp_path, monkeypatch):
    experiment = mindful(rounds=6)
    fl.run(experiment, tmp_path / "plain")
    for rooms in ((0, 6), (6, 0), (4, 1)):
        run = tmp_path / str(rooms)
        set_room(monkeypatch, rooms[0])
        with pytest.raises(KeyboardInterrupt):
            fl.run(experiment, run, watch=Stop(3))
        set_room(monkeypatch, rooms[1])
        fl.resume(run, experiment=experiment)
        assert_same_run(run, tmp_path / "plain")


def test_only_what_a_checkpoint_or_the_last_round_needs_is_kept(tmp_path, monkeypatch):
    """All clients train in each round, so each has one file for each state that is needed."""
    set_room(monkeypatch, 0)
    most = 0

    def look(_: object) -> None:
        nonlocal most
        most = max(most, len(files(tmp_path / "run")))

    experiment = mindful(rounds=9, clients=fl.Clients(3), evaluate=fl.Evaluate(every=9))
    fl.run(experiment, tmp_path / "run", watch=look)  # too fast for checkpoints in between
    assert most == 3 * 3
    assert files(tmp_path / "run") == [(client, 9) for client in range(3)]
    save_after_every_round(monkeypatch)
    fl.run(experiment, tmp_path / "run", overwrite=True)
    assert files(tmp_path / "run") == [(client, round) for client in range(3) for round in (8, 9)]
    assert saved_rounds(tmp_path / "run") == [9, 8]
    RunFolder(tmp_path / "run").remove_states()
    assert not files(tmp_path / "run")


def memory(number: float) -> Memory:
    return {"own": {"w": torch.full((2, 2), number), "n": torch.tensor(7)}}


def test_a_file_that_has_changed_is_named(tmp_path):
    folder = new_run(tmp_path / "run")
    row = folder.store_client(3, 1, memory(0.5))
    assert torch.equal(row.read()["own"]["w"], torch.full((2, 2), 0.5))
    path = client_file(tmp_path / "run", 3, 1)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(BadFile, match=r"000003-000001.*checksum"):
        row.read()


def test_a_checkpoint_without_a_file_that_it_needs_is_passed_over(tmp_path, monkeypatch, caplog):
    save_after_every_round(monkeypatch)
    set_room(monkeypatch, 0)
    experiment = mindful(rounds=3, clients=fl.Clients(3))
    fl.run(experiment, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, tmp_path / "run", watch=Stop(2))
    assert saved_rounds(tmp_path / "run") == [2, 1]
    client_file(tmp_path / "run", 1, 2).unlink()
    fl.resume(tmp_path / "run", experiment=experiment)
    assert "000001-000002.safetensors" in caplog.text
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_changes_made_elsewhere_give_the_same_files(tmp_path):
    told: list[Change] = []
    folder = RunFolder(new_run(tmp_path / "here").path, on_change=told.append)
    for round in range(1, 6):
        folder.store_client(1, round, memory(round))
    there = new_run(tmp_path / "there")
    for change in told:
        there.make(change)
    assert files(there.path) == files(folder.path) == [(1, 3), (1, 4), (1, 5)]


def test_files_behind_a_link_are_left_alone(tmp_path):
    new_run(tmp_path / "run").close()
    (tmp_path / "run" / "checkpoint").mkdir()
    (tmp_path / "run" / OF_CLIENTS).symlink_to(tmp_path)
    with pytest.raises(ValueError, match="link"):
        RunFolder.open(tmp_path / "run")
