"""A sweep over a Ray cluster: folders are those of a sweep here, whatever becomes of actors."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens.config.consent import importable
from fedlens.core import Tree
from fedlens.runs import spread
from fedlens.runs.folder import Change, RunFolder
from fedlens.runs.records import Record
from fedlens.runs.spread import SpreadPoints, even_shares
from fedlens.runs.sweep import prepare
from fedlens.storage.run_files import MODEL, read_status, saved_rounds, state_files
from tests.clusters import LONG, RAY_MARKS
from tests.runs.sweeps import LOST, base, records, told

pytestmark = RAY_MARKS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is compared byte for byte is computed alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


AXES = {"local.weight_decay": [0.0, LOST], "algorithm.fedavgm.momentum": [0.0, 0.9]}
"""Of the four points two diverge."""


def points(engine: str, **changes: Any) -> dict[str, fl.Experiment]:
    evaluate = fl.Evaluate(on=("test", "validation"), best=True)
    described = {"engine": engine, "device": "cpu", "algorithm": "fedavgm", "evaluate": evaluate}
    return fl.grid(base(**described | changes), AXES)


def assert_same_folders(found: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir() if path.is_dir())
    assert sorted(path.name for path in found.iterdir() if path.is_dir()) == names
    for name in names:
        one, other = found / name, expected / name
        files = {path.name for path in other.glob("*")}
        assert {path.name for path in one.glob("*")} == files
        assert records(one) == records(other)
        assert told(one) == told(other)
        same = [other / file for file in files if file.endswith((".safetensors", "partition.json"))]
        assert other / MODEL in same
        for file in (*same, state_files(other, saved_rounds(other)[0])[0]):
            assert (one / file.relative_to(other)).read_bytes() == file.read_bytes(), file


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sweep by worker processes, one point after another."""
    out = tmp_path_factory.mktemp("here")
    fl.sweep(points("processes"), out)
    return out


def test_points_that_are_spread_have_the_folders_of_a_sweep_here(ray, here, tmp_path):
    seen: list[Record] = []
    made = prepare(points("ray"), tmp_path / "there")
    assert made.describe() == "4 points spread over the cores of the Ray cluster"
    results = made.run(seen.append)
    assert [one.status for one in results.values()] == ["finished"] * 2 + ["diverged"] * 2
    assert all(one.folder == tmp_path / "there" / name for name, one in results.items())
    assert_same_folders(tmp_path / "there", here)
    told_of = [(record["point"], record["round"]) for record in seen]
    rounds = [(name, r["round"]) for name in results for r in records(here / name)]
    assert sorted(told_of) == sorted(rounds)
    assert {record["total"] for record in seen} == {12}
    assert prepare(points("ray"), tmp_path / "there").describe() == "all 4 points are done"


def test_without_folders_the_results_are_the_same(ray, here):
    for name, result in fl.sweep(points("ray")).items():
        assert result.folder is None
        assert result.status == told(here / name)["status"]
        found = {key: t.shape for key, t in result.model.items()}
        assert found == {key: t.shape for key, t in result.model.items()}
        assert [r["round"] for r in result.records] == [r["round"] for r in records(here / name)]


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
def test_a_spread_sweep_that_was_stopped_goes_on_to_the_same_bytes(ray, here, tmp_path, error):
    out = tmp_path / "there"

    def stop(record: Record) -> None:
        if record["done"] >= 2:
            raise error

    with pytest.raises(error):
        fl.sweep(points("ray"), out, watch=stop)
    begun = {name: read_status(out / name) for name in points("ray") if (out / name).exists()}
    assert set(begun.values()) <= {"interrupted", "failed", "finished", "diverged"}
    going_on = prepare(points("ray"), out)
    assert going_on.done >= 2
    going_on.run()
    assert_same_folders(out, here)


def test_an_actor_killed_in_a_sweep_changes_no_byte(ray, here, tmp_path, monkeypatch):
    import ray as started

    apply = spread.Spread._apply
    left = killed = 0  # how many events until one is killed, how often one was

    def kill_once(self: spread.Spread, event: spread.Event) -> Any:
        nonlocal left, killed
        left -= 1
        if left < 0 and self.busy and killed == number:
            pid = started.get(
                random.choice(self.busy).handle.__ray_call__.remote(lambda _: os.getpid())
            )
            os.kill(pid, signal.SIGKILL)
            killed += 1
        return apply(self, event)

    monkeypatch.setattr(spread.Spread, "_apply", kill_once)
    for number in range(10 if LONG else 1):
        left = random.randrange(30)
        fl.sweep(points("ray"), tmp_path / str(number))
        assert killed == number + 1
        assert_same_folders(tmp_path / str(number), here)


def test_a_mistake_that_shows_at_an_actor_is_one_line(ray, tmp_path, monkeypatch):
    sent = spread.sent_point

    def spoilt(*args: Any) -> spread.SentPoint:
        found = sent(*args)
        return found._replace(settings=found.settings | {"seed": 9})

    monkeypatch.setattr(spread, "sent_point", spoilt)
    with pytest.raises(ValueError, match="was started with seed = 0, not 9") as caught:
        fl.sweep(points("ray"), tmp_path)
    assert "\n" not in str(caught.value)


def test_few_points_run_on_all_of_the_cluster_one_after_another(ray):
    clients = fl.Clients(12, 4)
    alone = prepare({"one": base(engine="ray", device="cpu", clients=clients)})
    assert alone.describe() == "1 point"
    assert not SpreadPoints.among([point for stack in alone.stacks for point in stack]).points


def test_shares_are_even_and_in_order():
    numbers: list[Any] = list(range(7))
    expected: list[Any] = [[0, 1], [2, 3], [4, 5, 6]]
    assert even_shares(numbers, 3) == expected
    assert [len(share) for share in even_shares(numbers, 9)] == [1] * 7


@pytest.mark.parametrize("seed", range(5))
def test_a_folder_follows_changes_even_if_some_are_made_twice(tmp_path, seed):
    """Whatever interrupts who follows: it makes the last change once more, and goes on."""
    rng = random.Random(seed)
    told: list[Change] = []
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = RunFolder(tmp_path / "a", on_change=told.append)
    second = RunFolder(tmp_path / "b")
    size = 0
    for _ in range(30):
        content = rng.randbytes(rng.randrange(5))
        match rng.choice(["append", "write", "sync", "remove"]):
            case "append":
                first.make(Change("append", "log", content, size))
                size += len(content)
            case "write":
                first.make(Change("write", f"deep/{rng.randrange(3)}", content))
            case "sync":
                first.make(Change("sync", "log"))
            case _:
                first.make(Change("remove", f"deep/{rng.randrange(3)}"))
    for change in told:
        for _ in range(rng.choice([1, 2])):
            second.make(change)
    files = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*")}
    assert {str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*")} == files
    for file in files:
        one, other = tmp_path / "a" / file, tmp_path / "b" / file
        assert one.is_dir() or one.read_bytes() == other.read_bytes()


OWN = """
from torch import nn

def flat(shape, num_classes):
    channels, height, width = shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes))
"""


def test_workers_know_functions_beside_the_experiment_and_those_of_a_notebook(
    ray, tmp_path, monkeypatch
):
    def counted(counts: torch.Tensor) -> torch.Tensor:
        return counts.sum().float()

    counted.__module__ = "__main__"  # as if a cell had it
    monkeypatch.setattr(sys.modules["__main__"], "counted", counted, raising=False)
    (tmp_path / "model_of_ones_own.py").write_text(OWN)
    metrics = fl.Evaluate(metrics=("__main__:counted",))
    with importable(tmp_path):
        described = base(engine="ray", model="model_of_ones_own:flat", evaluate=metrics)
    results = fl.sweep(fl.grid(described, {"local.lr": [0.01, 0.02, 0.03, 0.04]}))
    sys.modules.pop("model_of_ones_own")
    assert [one.status for one in results.values()] == ["finished"] * 4
    assert all(one.final["test_counted"] > 0 for one in results.values())


def test_an_error_in_code_of_ones_own_at_an_actor_is_told_with_its_place(ray, monkeypatch):
    def late(base: fl.Algorithm) -> fl.Algorithm:
        rounds: list[int] = []

        def measure(before: Tree, after: Tree) -> dict[str, torch.Tensor]:
            rounds.append(1)
            if len(rounds) > 4:  # it is tried in two before
                raise KeyError("gone")
            return {}

        return replace(base, measures=(measure,))

    late.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "late", fl.paper(late), raising=False)
    described = base(engine="ray", algorithm="__main__:late", rounds=9)
    with pytest.raises(ValueError, match=r"test_spread\.py.*KeyError"):
        fl.sweep(fl.grid(described, {"local.lr": [0.01, 0.02, 0.03, 0.04]}))
