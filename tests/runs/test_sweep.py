"""A sweep: each point as it would be alone, whatever stands beside it and whenever it stops."""

import shutil
import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedlens as fl
from fedlens.algorithm.slots import Draw, ExampleWeight
from fedlens.core import Batch, Local, Plan
from fedlens.core.federation import Holdings
from fedlens.runs.points import images_a_round
from fedlens.runs.sweep import prepare
from fedlens.setup import build
from fedlens.storage.locks import one_writer
from tests.runs.sweeps import DATASET, LOST, assert_alone, base, records, told

pytestmark = pytest.mark.usefixtures("one_thread")


def test_seeds_side_by_side_have_the_bytes_of_runs_alone(tmp_path):
    points = fl.grid(base(), {}, seeds=3)
    assert [len(stack) for stack in prepare(points).stacks] == [3]
    fl.sweep(points, tmp_path / "seeds")
    assert list(points) == ["seed=0", "seed=1", "seed=2"]
    assert_alone(points, tmp_path / "seeds", exact=True)


AXES = {
    "fedprox": {"local.lr": [0.02, 0.1], "algorithm.fedprox.mu": [0.0, 0.5]},
    "fedavgm": {"algorithm.fedavgm.momentum": [0.0, 0.9], "server.lr": [0.5, 1.0]},
    "scaffold": {"local.lr": [0.02, 0.1]},
    "fedadmm": {"algorithm.fedadmm.rho": [0.1, 1.0], "local.momentum": [0.0, 0.5]},
    "median": {"local.weight_decay": [0.0, 0.1], "clients.partition.alpha": [0.1, 10.0]},
}


@pytest.mark.parametrize("algorithm", AXES)
def test_numbers_side_by_side_give_what_runs_alone_give(tmp_path, algorithm):
    points = fl.grid(base(algorithm=algorithm, precision="fp64"), AXES[algorithm], seeds=2)
    assert len(prepare(points).stacks) == 1
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=False)


def test_numbers_of_optimisers_and_losses_are_numbers_too(tmp_path):
    points = {
        f"{beta1:g}": base(
            precision="fp64",
            loss={"name": "cross_entropy", "label_smoothing": smoothing},
            local={
                "optimizer": {"name": "adam", "beta1": beta1},
                **{"lr": 0.01, "clip": clip, "class_balance": 0.9 * beta1, "reset": False},
            },
        )
        for beta1, clip, smoothing in ((0.9, 0.1, 0.1), (0.5, 0.3, 0.2), (0.7, 1.0, 0.3))
    }
    assert [len(stack) for stack in prepare(points).stacks] == [3]
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=False)


@dataclass(frozen=True)
class ClassWeights(ExampleWeight):
    weights: Tensor  # [L]

    def __call__(self, batch: Batch, local: Local) -> Tensor:  # [C, B]
        return self.weights[batch.labels].to(batch.mask)


@dataclass(frozen=True)
class OfSomeSteps(Draw):
    """`inner`, of which the steps are left out that `kept` has not."""

    inner: Draw
    kept: Tensor  # [T]
    by_client: ClassVar[bool] = True

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan:
        plan = self.inner(holdings, client_keys)
        kept = self.kept[: plan.counts.shape[1]]
        return Plan(plan.index[:, : len(kept)][:, kept], plan.counts[:, : len(kept)][:, kept])


@fl.paper
def weighed(base: fl.Algorithm) -> fl.Algorithm:
    weights = ClassWeights(torch.linspace(1, 5, 6))
    draw = OfSomeSteps(base.draw, torch.tensor([True, False, True]))
    return replace(base, draw=draw, objective=base.objective.times(weights))


def test_a_tensor_that_is_no_number_is_the_same_for_all(tmp_path):
    own = f"{__name__}:weighed"
    points = fl.grid(base(algorithm=own, precision="fp64"), {"local.lr": [0.02, 0.1]}, seeds=2)
    assert [len(stack) for stack in prepare(points).stacks] == [4]
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=False)


@pytest.fixture(params=[0, 1], ids=["step by step", "a round ahead"])
def ahead(request, monkeypatch) -> None:
    """As on a CPU, and as on a GPU: the next round begins before the last is looked at."""
    monkeypatch.setattr(
        sys.modules["fedlens.runs.loop"], "rounds_ahead", lambda _setup: request.param
    )


@pytest.mark.usefixtures("ahead")
def test_points_of_other_lengths_and_algorithms_stand_side_by_side(tmp_path):
    """What only the server does may differ at will; a shorter point is over earlier."""
    points = {
        "shortest": base(rounds=1),
        "long": base(rounds=5, evaluate=fl.Evaluate(every=2)),
        "short": base(rounds=2),
        "other": base(algorithm="fedadam", seed=3),
        "fewer": base(clients=fl.Clients(12, 2), local=fl.LocalTraining(batch_size=8, lr=0.1)),
    }
    assert [len(stack) for stack in prepare(points).stacks] == [5]
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=True)


def own_net() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))


def test_what_cannot_be_stacked_runs_one_after_another(tmp_path):
    points = {
        "linear": base(),
        "net": base(model=own_net()),
        "epochs": base(local=fl.LocalTraining(batch_size=4, lr=0.1, epochs=2)),
        "validated": base(evaluate=fl.Evaluate(on=("validation",))),
        "kept": base(local=fl.LocalTraining(lr=0.1, momentum=0.9, reset=False)),
    }
    stacks = prepare(points).stacks
    assert [[point.name for point in stack] for stack in stacks] == [
        ["linear", "epochs"],
        ["net"],
        ["validated"],
        ["kept"],
    ]
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=True)


@pytest.mark.usefixtures("ahead")
def test_a_point_that_diverges_stops_alone(tmp_path):
    points = fl.grid(base(), {"local.weight_decay": [0.0, LOST, 0.1]})
    results = fl.sweep(points, tmp_path / "sweep")
    assert [result.status for result in results.values()] == ["finished", "diverged", "finished"]
    assert [len(result.records) for result in results.values()] == [3, 1, 3]
    sound = {name: e for name, e in points.items() if results[name].status == "finished"}
    name = f"weight_decay={LOST}"
    fl.run(points[name], tmp_path / "alone")
    assert told(tmp_path / "sweep" / name) == told(tmp_path / "alone")
    for name, experiment in sound.items():
        expected = fl.run(experiment)
        for key, value in expected.final.items():
            assert results[name].final[key] == pytest.approx(value, rel=1e-4)


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_a_sweep_that_was_stopped_goes_on_to_the_same_bytes(tmp_path, engine, error):
    points = fl.grid(base(engine=engine, algorithm="fedavgm"), {}, seeds=3)
    seen = []

    def stop(record):
        seen.append((record["point"], record["round"], record["done"]))
        if len(seen) == 5:
            raise error

    with pytest.raises(error):
        fl.sweep(points, tmp_path / "sweep", watch=stop)
    begun = [name for name in points if (tmp_path / "sweep" / name).exists()]
    assert len(begun) == (3 if engine == "stacked" else 2)
    word = "interrupted" if error is KeyboardInterrupt else "failed"
    assert told(tmp_path / "sweep" / "seed=1")["status"] == word

    going_on = prepare(points, tmp_path / "sweep")
    assert (going_on.done, going_on.total) == (5, 9)
    rest = []
    results = going_on.run(lambda record: rest.append(record["done"]))
    assert rest == [6, 7, 8, 9]
    assert [result.status for result in results.values()] == ["finished"] * 3
    assert_alone(points, tmp_path / "sweep", exact=True)


def test_no_lock_is_left_of_a_process_that_was_killed_when_all_was_written(tmp_path):
    points = fl.grid(base(rounds=1), {}, seeds=2)
    fl.sweep(points, tmp_path)
    for folder in (tmp_path, tmp_path / "seed=0"):
        (folder / ".lock").touch()
    with one_writer(tmp_path / "seed=1"):
        fl.sweep(points, tmp_path)
        assert [*tmp_path.rglob(".lock")] == [tmp_path / "seed=1" / ".lock"]


def test_what_is_finished_is_kept(tmp_path):
    points = fl.grid(base(), {"local.weight_decay": [0.0, LOST]})
    first = fl.sweep(points, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    more = fl.grid(base(), {"local.weight_decay": [0.0, LOST, 0.1]})
    made = prepare(more, tmp_path)
    assert made.describe() == "2 of 3 points are done; 1 point"
    results = made.run()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert list(results) == list(more)
    for name, result in first.items():
        assert results[name].status == result.status
        assert results[name].summary["final"].keys() == result.summary["final"].keys()
        assert [r["round"] for r in results[name].records] == [r["round"] for r in result.records]
        for key, tensor in result.model.items():
            torch.testing.assert_close(
                results[name].model[key], tensor, rtol=0, atol=0, equal_nan=True
            )
    assert prepare(more, tmp_path).describe() == "all 3 points are done"


def test_a_folder_that_died_before_its_first_round_is_gone_on_with(tmp_path):
    points = fl.grid(base(), {}, seeds=2)
    fl.sweep(points, tmp_path / "sweep")
    for name in points:
        for file in ("summary.json", "rounds.jsonl", "model.safetensors"):
            (tmp_path / "sweep" / name / file).unlink()
        shutil.rmtree(tmp_path / "sweep" / name / "checkpoint")
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=True)


def test_another_experiment_in_the_folder_is_refused_or_replaced(tmp_path):
    points = fl.grid(base(), {}, seeds=1)
    fl.sweep(points, tmp_path)
    others = {name: replace(e, rounds=2) for name, e in points.items()}
    with pytest.raises(ValueError, match="seed=0 holds another experiment: choose another folder"):
        fl.sweep(others, tmp_path)
    fl.sweep(others, tmp_path, overwrite=True)
    assert len(records(tmp_path / "seed=0")) == 2
    with pytest.raises(ValueError, match="is a run: choose another folder"):
        fl.sweep(points, tmp_path / "seed=0")
    (tmp_path / "seed=1").mkdir()
    with pytest.raises(ValueError, match="seed=1 is not a run: choose another folder"):
        fl.sweep(fl.grid(base(rounds=2), {}, seeds=2), tmp_path)


def test_a_mistake_in_any_point_is_found_before_the_first_is_run(tmp_path):
    partition = fl.Named("classes", {"per_client": 9})
    points = {"a": base(), "b": base(clients=fl.Clients(12, 4, partition))}
    with pytest.raises(ValueError, match="per_client"):
        fl.sweep(points, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../elsewhere", "a/b", "/a"])
def test_a_point_whose_folder_would_lie_elsewhere_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="choose a name that a folder can have"):
        fl.sweep({name: base()}, tmp_path / "sweep")
    assert not list(tmp_path.iterdir())


def test_a_point_whose_name_is_too_long_is_refused_before_any_is_run(tmp_path):
    with pytest.raises(ValueError, match="shorter"):
        fl.sweep({"a": base(), "b" * 250: base()}, tmp_path / "sweep")
    assert not list(tmp_path.iterdir())


def test_what_is_left_of_a_sweep_counts_by_the_work_in_its_rounds():
    """A round of all clients is a dozen times that of one, and as few rounds are soon over."""
    apart = {"engine": "sequential", "evaluate": fl.Evaluate(every=4)}
    points = {
        "all": base(rounds=1, clients=fl.Clients(12), **apart),
        "one": base(rounds=4, clients=fl.Clients(12, 1), **apart),
    }
    tested, all_of_them = len(DATASET.test), len(DATASET.train)
    work = {"all": 3 * all_of_them + tested, "one": 3 * all_of_them / 12 + tested / 4}
    mean = (work["all"] + 4 * work["one"]) / 5
    seen: list[dict[str, Any]] = []
    fl.sweep(points, watch=seen.append)
    assert [record["point"] for record in seen] == ["all", *["one"] * 4]
    expected = [rounds * work["one"] / mean for rounds in (4, 3, 2, 1, 0)]
    assert [record["left"] for record in seen] == pytest.approx(expected)


def test_what_is_left_counts_the_updates_that_a_server_waits_for():
    buffered = base(clients=fl.Clients(12, 6), algorithm={"name": "fedbuff", "buffer": 3})
    setup = build(buffered)
    assert images_a_round(setup) == 3 * len(DATASET.train) / 12 * 3 + len(DATASET.test)
