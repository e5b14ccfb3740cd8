"""The points of a sweep: which train side by side, and what they share."""

from typing import Any

import pytest

import fedlens as fl
from fedlens.runs.points import MOST, on_a_gpu
from fedlens.runs.sweep import prepare
from tests.runs.sweeps import assert_alone, base

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_stack_is_as_large_as_the_engine_is_wide(tmp_path):
    clients = fl.Clients(12, 10)
    points = fl.grid(base(clients=clients), {}, seeds=10)
    made = prepare(points)
    assert [len(stack) for stack in made.stacks] == [5, 5]
    assert made.describe() == "10 points in 2 stacks, up to 5 side by side on cpu"
    alone = prepare(fl.grid(base(engine="sequential"), {}, seeds=2))
    assert [len(stack) for stack in alone.stacks] == [1, 1]
    assert alone.describe() == "2 points one after another: engine sequential is busy with one"


def test_points_whose_clients_train_long_stand_together(tmp_path):
    parts = {how: fl.Named("proportions", {"sizes": how}) for how in ("high", "homogeneous")}
    points = {
        f"{how}-{seed}": base(seed=seed, clients=fl.Clients(10, 10, partition))
        for seed in range(5)
        for how, partition in parts.items()
    }
    stacks = prepare(points).stacks
    assert [{point.name.partition("-")[0] for point in stack} for stack in stacks] == [
        {"homogeneous"},
        {"high"},
    ]
    assert list(fl.sweep(points, tmp_path / "sweep")) == list(points)


@pytest.mark.parametrize(
    ("cohorts", "expected"),
    [([39, 40, 1], [39, 41]), ([1, 3, 12] * 6, [48, 48]), ([10] * 13, [40, 50, 40])],
)
def test_no_stack_has_more_clients_than_are_trained_at_once(cohorts, expected):
    points = {
        f"point {i}": base(seed=i, clients=fl.Clients(40, cohort))
        for i, cohort in enumerate(cohorts)
    }
    stacks = prepare(points).stacks
    sizes = [sum(point.setup.experiment.clients.cohort for point in stack) for stack in stacks]
    assert sizes == expected and max(sizes) <= 64


def test_on_a_gpu_a_stack_is_as_large_as_half_its_memory_is_taken_to_hold():
    gigabytes = 10**9
    for memory, parameters, expected in (
        (141 * gigabytes, 11_700_000, 125),
        (8 * gigabytes, 11_700_000, 7),
        (8 * gigabytes, 10**9, 1),
        (141 * gigabytes, 1_000_000, MOST),
    ):
        assert on_a_gpu(memory, parameters, keeps_uploads=False) == expected
    assert on_a_gpu(141 * gigabytes, 11_700_000, keeps_uploads=True) == 125 // 2


@pytest.mark.parametrize(("seeds", "expected"), [(3, [30, 30, 30]), (1, [4, 3, 3] * 3)])
def test_all_clients_of_several_points_train_at_once_from_the_first_round_on(seeds, expected):
    made = prepare(fl.grid(base(clients=fl.Clients(12, 10)), {}, seeds=seeds))
    (stack,) = made.stacks
    engines: list[Any] = [point.setup.engine for point in stack]
    blocks: list[int] = []
    for engine in engines:
        engine.at_once = 4
    train = engines[0]._train_block

    def seen(prepared: Any, shared: Any, work: Any) -> Any:
        blocks.append(len(work))
        return train(prepared, shared, work)

    engines[0]._train_block = seen
    made.run()
    assert blocks == expected
    assert len({engine.at_once for engine in engines}) == 1  # each manifest says it


COUNTING = """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.layer, self.calls = nn.Linear(shape[0] * shape[1] * shape[2], num_classes), 0

    def forward(self, x):
        self.calls += self.training
        return self.layer(x.flatten(1)) / (1 + 0.01 * self.calls)

def net(shape, num_classes):
    return Net(shape, num_classes)
"""


def test_a_model_of_the_users_own_is_made_for_each_point(tmp_path, monkeypatch):
    (tmp_path / "counting_net.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    described = base(
        dataset="fashion-mnist-mini",
        model="counting_net:net",
        engine="sequential",
        clients=fl.Clients(12, 2),
        rounds=1,
    )
    points = fl.grid(described, {"local.lr": [0.1, 0.05]})
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=True)


@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_points_of_one_seed_share_their_network_and_end_as_they_would_alone(engine, tmp_path):
    points = fl.grid(
        base(
            dataset="fashion-mnist-mini",
            model="lenet5",
            engine=engine,
            train=2,
            clients=fl.Clients(12, 2),
            rounds=1,
        ),
        {"local.lr": [0.1, 0.05]},
        seeds=2,
    )
    networks = [point.setup.network for stack in prepare(points).stacks for point in stack]
    assert len(networks) == 4 and len({id(network) for network in networks}) == 2
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=True)
