import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.rounds import ClientMemory, State
from fedlens.run_files import STATE
from fedlens.runs.folder import RunFolder, check_free, to_json

CPU = torch.device("cpu")


def state(round: int = 3, clients: int = 2) -> State:
    """A state with something in each of its places; a client's memory depends on the client."""
    params = {"fc.weight": torch.rand(2, 3), "fc.bias": torch.rand(2, dtype=torch.float64)}
    rows = {
        7 * k: {"solver.velocity": {"fc.bias": torch.full((2,), float(k))}} for k in range(clients)
    }
    return State(
        round=round,
        params=params,
        buffers={"bn.seen": torch.tensor(5), "bn.mean": torch.rand(4)},
        server={"velocity": {"fc.weight": torch.rand(1, 2, 3)}},
        told={"correction": {"fc.bias": torch.rand(2)}},
        clients=ClientMemory(rows),
    )


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every tensor and number in a state, by where it stands."""
    if isinstance(value, dict):
        return {
            k: v for name, part in value.items() for k, v in flat(part, f"{path}/{name}").items()
        }
    return {path: value}


def assert_same(one: State, two: State) -> None:
    assert one.round == two.round
    for name in ("params", "buffers", "server", "told"):
        ours, theirs = flat(getattr(one, name)), flat(getattr(two, name))
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert tensor.dtype == theirs[key].dtype
            assert torch.equal(tensor, theirs[key])
    ours, theirs = flat(dict(one.clients.rows)), flat(dict(two.clients.rows))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


@pytest.mark.parametrize("clients", [0, 2])
def test_a_state_is_read_as_it_was_saved(folder, clients):
    assert folder.last_saved is None
    saved = state(clients=clients)
    folder.save_state(saved)
    assert folder.last_saved == 3
    assert_same(folder.load_state(CPU), saved)


def test_a_state_whose_parts_share_memory_is_read_as_it_was_saved(folder):
    """An algorithm may tell clients where the server started: before a round, that is its model."""
    plain = state()
    tied = replace(
        plain, told={"start": plain.params, "rows": {"a": plain.params["fc.weight"][1:]}}
    )
    folder.save_state(tied)
    assert_same(folder.load_state(CPU), tied)


def test_names_come_back_in_their_order_and_clients_have_memory_of_their_own(folder):
    """Sums over all parameters go by it."""
    params = {name: torch.rand(2) for name in ("z", "a", "m")}
    folder.save_state(replace(state(), params=params))
    loaded = folder.load_state(CPU)
    assert list(loaded.params) == ["z", "a", "m"]
    one, two = (memory["solver.velocity"]["fc.bias"] for memory in loaded.clients.rows.values())
    assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()


def test_a_state_of_another_version_is_refused_in_words(folder):
    folder.save_state(state())
    index = json.loads((folder.path / STATE).read_text())
    for changed in ({"more": 1}, {"params": {"fc.weight": "unknown"}}):
        folder.write(STATE, json.dumps(index | {"state": index["state"] | changed}))
        with pytest.raises(
            ValueError, match=r"cannot be read \(it is of another version of Fedlens\)"
        ):
            folder.load_state(CPU)


def test_only_the_newest_state_is_kept(folder):
    for round in (1, 2, 3):
        folder.save_state(state(round))
    names = {path.name for path in (folder.path / "checkpoint").iterdir()}
    assert names == {"state.json", "state-000003.safetensors"}


def test_a_state_half_written_leaves_the_one_before(folder, monkeypatch):
    first = state(1)
    folder.save_state(first)
    written = Path.replace

    def die(self: Path, target: Path) -> Path:
        if target.name == "state.json":
            raise KeyboardInterrupt
        return written(self, target)

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        folder.save_state(state(2))
    assert_same(folder.load_state(CPU), first)


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: c[:0], flip])
def test_a_damaged_state_is_never_used(folder, damage):
    folder.save_state(state())
    path = folder.path / "checkpoint" / "state-000003.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        ValueError, match=r"state-000003.safetensors cannot be read .*: start .* anew"
    ):
        folder.load_state(CPU)


def test_a_state_that_is_gone_is_named(folder):
    folder.save_state(state())
    (folder.path / "checkpoint" / "state-000003.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"cannot be read \(No such file or directory\): start the run"
    ):
        folder.load_state(CPU)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"round": 3}', b"\xff\xff"])
def test_a_damaged_index_is_named(folder, content):
    folder.save_state(state())
    (folder.path / STATE).write_bytes(content)
    with pytest.raises(ValueError, match=r"state.json cannot be read \(.*\): start the run anew"):
        folder.load_state(CPU)


@given(st.lists(st.integers(1, 9), max_size=5), st.integers(0, 60), st.integers(0, 9))
def test_records_are_cut_at_a_round_or_where_a_line_is_torn(tmp_path_factory, more, cut, last):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    records = [{"round": place, "loss": value} for place, value in enumerate(more, 1)]
    for record in records:
        folder.append(record)
    path = folder.path / "rounds.jsonl"
    content = path.read_bytes() if more else b""
    path.write_bytes(content[: len(content) - cut])
    whole = content[: len(content) - cut].count(b"\n")
    kept = folder.cut_records(last)
    # A last line that lacks nothing but its end is whole.
    assert kept in (records[: min(whole, last)], records[: min(whole + 1, last)])
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept
    folder.append({"round": len(kept) + 1})
    assert len(path.read_text().splitlines()) == len(kept) + 1


def test_records_that_were_never_written_are_none(folder):
    assert folder.cut_records(5) == []


def test_a_place_that_is_free_is_free(tmp_path):
    check_free(tmp_path / "new" / "run", overwrite=False)
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", overwrite=True)


def test_what_exists_is_refused_unless_it_may_go(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    run.write("experiment.toml", "")
    run.write_json("manifest.json", {})
    with pytest.raises(ValueError, match=r"run exists: choose another, or set overwrite=True"):
        check_free(run.path, overwrite=False)
    RunFolder.create(run.path, overwrite=True)
    assert not list(run.path.iterdir())


def test_what_is_not_a_run_is_never_removed(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "experiment.toml").write_text("rounds = 1")  # somebody's own
    (project / "thesis.tex").write_text("years of work")
    file = tmp_path / "file"
    file.write_text("")
    for path in (project, file):
        with pytest.raises(ValueError, match="is not a run, so it is not overwritten"):
            RunFolder.create(path, overwrite=True)
    assert (project / "thesis.tex").exists()


def test_a_place_that_cannot_be_written_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(.*\): choose another"):
        RunFolder.create(tmp_path / "file" / "run")


def test_json_has_no_number_that_is_not_finite():
    content = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": "é"}
    assert json.loads(to_json(content), parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": None},
        "e": "é",
    }
