"""The pages about attacks: what their runs are, and how they are read."""

from types import SimpleNamespace
from typing import Any

import pytest

from fedlens.recipes.attacks import bucketing, heat_map
from fedlens.recipes.recipe import Results, Scale
from fedlens.setup.algorithm import make_algorithm


def test_five_of_25_clients_attack_and_buckets_are_before_a_defence():
    cells = bucketing.bucketing(Scale("smoke")).cells
    one = cells["mimic, bucketing, krum"]
    assert one.attack is not None and one.attack.options["clients"] == (20, 21, 22, 23, 24)
    assert [paper.name for paper in one.algorithm] == ["krum", "bucketing"]
    assert make_algorithm(one).combine.withstands(25) == 5
    assert cells["long-tail, plain, mean"].attack is None


def test_with_a_tail_of_classes_accuracy_weighs_them_so():
    run: Any = SimpleNamespace(evaluation={"confusion": [[10, 0, 0], [5, 5, 0]]})
    assert bucketing.on_tail(run) == pytest.approx((10 + 5 / 2) / (10 + 10 / 2))


def test_the_worst_of_the_attacks_is_that_with_the_least_mean():
    runs: dict[str, Any] = {
        heat_map.cell("1", 1, attack): [SimpleNamespace(final=lambda _, x=x: x)]
        for attack, x in zip(heat_map.ATTACKS, (0.9, 0.7, 0.8), strict=True)
    }
    found = heat_map.worst(Results(Scale("smoke"), runs), "1", 1)
    assert found is not None and found.mean == 0.7


def test_momentum_that_clients_send_is_kept_from_round_to_round():
    one = next(iter(heat_map.byzfl_heat_map(Scale("small")).cells.values()))
    algorithm = make_algorithm(one)
    assert not algorithm.reset and algorithm.carries == {"velocity"}
    assert one.local.lr == pytest.approx(0.01) and one.local.steps == 1
