import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.rounds import ClientMemory, State
from fedlens.runs.folder import Records, RunFolder, check_free
from fedlens.storage.run_files import checksum, last_saved, state_files, to_json
from tests.checkpoints import load_state, new_run

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
def folder(tmp_path) -> Iterator[RunFolder]:
    made = new_run(tmp_path / "run")
    yield made
    made.close()


@pytest.mark.parametrize("clients", [0, 2])
def test_a_state_is_read_as_it_was_saved(folder, clients):
    assert last_saved(folder.path) is None
    saved = state(clients=clients)
    folder.save_state(saved)
    assert last_saved(folder.path) == 3
    assert_same(load_state(folder), saved)


def test_a_state_whose_parts_share_memory_is_read_as_it_was_saved(folder):
    """An algorithm may tell clients where the server started: before a round, that is its model."""
    plain = state()
    tied = replace(
        plain, told={"start": plain.params, "rows": {"a": plain.params["fc.weight"][1:]}}
    )
    folder.save_state(tied)
    assert_same(load_state(folder), tied)


def test_names_come_back_in_their_order_and_clients_have_memory_of_their_own(folder):
    """Sums over all parameters go by it."""
    params = {name: torch.rand(2) for name in ("z", "a", "m")}
    folder.save_state(replace(state(), params=params))
    loaded = load_state(folder)
    assert list(loaded.params) == ["z", "a", "m"]
    one, two = (memory["solver.velocity"]["fc.bias"] for memory in loaded.clients.rows.values())
    assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()


def change_index(folder: RunFolder, round: int, **changed: object) -> None:
    """As another version would have written it, with the checksum that it then has."""
    _, path = state_files(folder.path, round)
    index = json.loads(path.read_text())["index"]
    index |= changed
    path.write_text(json.dumps({"sha256": checksum(index), "index": index}))


def test_a_state_of_another_version_is_refused_in_words(folder):
    folder.save_state(state())
    _, path = state_files(folder.path, 3)
    described = json.loads(path.read_text())["index"]["state"]
    for changed in ({"more": 1}, {"params": {"fc.weight": "unknown"}}):
        change_index(folder, 3, state=described | changed)
        with pytest.raises(ValueError, match=r"cannot be read \(it is of another version"):
            load_state(folder)


def test_the_two_newest_states_are_kept(folder):
    for round in (1, 2, 3):
        folder.save_state(state(round))
    names = {path.name for path in (folder.path / "checkpoint").iterdir()}
    assert names == {
        f"state-00000{round}.{kind}" for round in (2, 3) for kind in ("json", "safetensors")
    }


def test_a_state_half_written_leaves_the_one_before(folder, monkeypatch):
    first = state(1)
    folder.save_state(first)
    written = Path.replace

    def die(self: Path, target: Path) -> Path:
        if target.name == "state-000002.json":
            raise KeyboardInterrupt
        return written(self, target)

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        folder.save_state(state(2))
    assert_same(load_state(folder), first)


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda c: c[: len(c) // 2],
    "emptied": lambda c: c[:0],
    "flipped": flip,
}


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("how", [*DAMAGE, "removed"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_is_used(folder, caplog, kind, how):
    first = state(1)
    folder.save_state(first)
    folder.save_state(state(2))
    path = folder.path / "checkpoint" / f"state-000002.{kind}"
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(DAMAGE[how](path.read_bytes()))
    with caplog.at_level(logging.WARNING, "fedlens"):
        assert_same(load_state(folder), first)
    (said,) = caplog.messages
    assert said.startswith(str(path))
    assert said.endswith("going on from the checkpoint of round 1")


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_with_none_before_it_is_an_error(folder, kind, how):
    folder.save_state(state())
    path = folder.path / "checkpoint" / f"state-000003.{kind}"
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    with pytest.raises(
        ValueError, match=rf"state-000003.{kind} cannot be read .*: run the .* again"
    ):
        load_state(folder)


def test_a_state_that_is_gone_is_named(folder):
    folder.save_state(state())
    (folder.path / "checkpoint" / "state-000003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot be read \(No such file .*\): run the experiment"):
        load_state(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"round": 3}', b"\xff\xff"])
def test_a_damaged_index_is_named(folder, content):
    folder.save_state(state())
    state_files(folder.path, 3)[1].write_bytes(content)
    with pytest.raises(ValueError, match=r"state-000003\.json"):
        load_state(folder)


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        ("in a line", "it has 3 of the 6 records"),
        ("after a line", "it has 3 of the 6 records"),
        ("a bit", "its checksum is wrong"),
        ("the rest of a line", "its checksum is wrong"),
        ("all", "it has 0 of the 6 records"),
    ],
)
def test_the_records_that_a_checkpoint_rests_on_are_checked_and_the_one_before_is_used(
    folder, caplog, cut, why
):
    path = folder.path / "rounds.jsonl"
    records = Records(folder)
    for round in range(1, 7):
        records.append({"round": round, "loss": round / 7})
        if round in (2, 6):
            records.sync()
            folder.save_state(state(round), records.mark)
    records.append({"round": 7})
    found = folder.load_checkpoint(CPU)
    assert found is not None
    assert [record["round"] for record in found.records] == [1, 2, 3, 4, 5, 6]

    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    first = b"".join(lines[:3])
    damaged = {
        "in a line": whole[: len(first) + 4],
        "after a line": first,
        "a bit": first + flip(lines[3]) + b"".join(lines[4:]),
        "the rest of a line": first + b"{\n" + b"".join(lines[4:]),
        "all": b"",
    }
    path.write_bytes(damaged[cut])
    if cut == "all":
        with pytest.raises(ValueError, match=rf"rounds.jsonl cannot be read \({why}"):
            folder.load_checkpoint(CPU)
        return
    with caplog.at_level(logging.WARNING, "fedlens"):
        found = folder.load_checkpoint(CPU)
    assert found is not None
    assert found.state.round == 2
    assert [record["round"] for record in found.records] == [1, 2]
    (said,) = caplog.messages
    assert f"rounds.jsonl cannot be read ({why}" in said
    assert said.endswith("going on from the checkpoint of round 2")


@pytest.mark.parametrize("seconds", [None, [], {}, {"total": "long"}])
def test_a_summary_whose_fields_are_not_what_they_should_be_is_refused(folder, seconds):
    folder.write_json("summary.json", {"rounds": 2, "seconds": seconds})
    assert folder.summary(3) == {}
    with pytest.raises(ValueError, match=r"summary\.json"):
        folder.summary(2)


def test_a_place_that_is_free_is_free(tmp_path):
    check_free(tmp_path / "new" / "run", overwrite=False)
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", overwrite=True)


def test_what_exists_is_refused_unless_it_may_go(tmp_path):
    run = new_run(tmp_path / "run")
    run.write("experiment.toml", "")
    run.write_json("manifest.json", {})
    run.close()
    with pytest.raises(ValueError, match="overwrite"):
        check_free(run.path, overwrite=False)
    new_run(run.path, overwrite=True).close()
    assert not list(run.path.iterdir())


def test_states_are_not_removed_where_a_link_points(tmp_path):
    others, run = tmp_path / "others", tmp_path / "run"
    others.mkdir()
    run.mkdir()
    (run / "checkpoint").symlink_to(others)
    for number in range(5):
        (others / f"state-{number:06d}.json").write_text("somebody's own")
    with pytest.raises(ValueError, match="is a link to another folder: put a copy"):
        RunFolder.open(run)
    assert len(list(others.iterdir())) == 5


def test_what_is_not_a_run_is_never_removed(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "experiment.toml").write_text("rounds = 1")  # somebody's own
    (project / "thesis.tex").write_text("years of work")
    file = tmp_path / "file"
    file.write_text("")
    for path in (project, file):
        with pytest.raises(ValueError, match="overwritten"):
            new_run(path, overwrite=True)
    assert (project / "thesis.tex").exists()


def test_a_place_that_cannot_be_written_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(.*\): choose another"):
        new_run(tmp_path / "file" / "run")


def test_json_has_no_number_that_is_not_finite():
    content = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": "é"}
    assert json.loads(to_json(content), parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": None},
        "e": "é",
    }
