"""Paper 1's recipes: who was drawn, FedProx in both forms, networks alone compared."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from fedlens.recipes import RECIPES
from fedlens.recipes.fedavg_cifar10.setting import (
    ALIKE,
    NETWORKS,
    PRETRAINED,
    apart,
    drawn,
    how_often,
)
from fedlens.recipes.recipe import Results, Scale
from fedlens.recipes.reproduce import reproduce
from fedlens.report.blocks import Bars, Curves, Table


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.delenv("FEDLENS_DATA", raising=False)


@pytest.fixture(scope="module")
def figure18(tmp_path_factory):
    out = tmp_path_factory.mktemp("figure18") / "out"
    return reproduce("fedavg-cifar10/figure18", "smoke", out, seeds=3, overrides=["rounds=4"])


def test_figure_18_says_when_the_largest_client_was_drawn(figure18):
    table = drawn(figure18.results)
    rows = {(row[0], row[1]): row for row in table.rows}
    assert len(rows) == 3 * 3
    for (cell, seed), (*_, count, which, accuracy) in rows.items():
        run = figure18.results.runs[cell][int(str(seed))]
        there = [r["round"] for r in run.rounds if 9 in r["clients"]]
        assert (count, which) == (f"{len(there)} of 4", ", ".join(map(str, there)))
        assert accuracy == f"{100 * run.final('test_accuracy'):.2f}"
    assert len({row[3] for row in rows.values()}) > 1


def test_figure_18_draws_accuracy_by_how_often_the_largest_client_was_drawn(figure18):
    lines = how_often(figure18.results).lines
    table = drawn(figure18.results).rows
    points = [
        (line.name, f"{x} of 4", f"{100 * y:.2f}")
        for line in lines
        for x, y in zip(line.x, line.y, strict=True)
        if y is not None
    ]
    assert sorted(points) == sorted((run, rounds, y) for run, _, rounds, _, y in table)
    assert all(list(line.x) == sorted(line.x) for line in lines)


def test_bars_have_two_decimals(figure18):
    bars = next(block for block in figure18.blocks if isinstance(block, Bars))
    first = bars.series[0]
    assert first.errors is not None and first.heights[0] is not None
    height, error = (f"{100 * (y or 0):.2f}%" for y in (first.heights[0], first.errors[0]))
    assert height in bars.words() and f"± {error}" in bars.words()


def test_what_the_largest_client_weighs_in_both_forms_of_fedprox():
    sizes = [500] * 9 + [45_500]
    cohorts = list(itertools.combinations(range(10), 5))
    drawn_alike = sum(sizes[9] / sum(sizes[k] for k in c) for c in cohorts if 9 in c) / len(cohorts)
    assert pytest.approx(drawn_alike) == ALIKE
    assert sizes[9] / sum(sizes) == 0.91


def test_fedprox_is_also_run_as_printed(monkeypatch):
    monkeypatch.setattr(Scale, "has", lambda *_: True)
    cells = RECIPES["fedavg-cifar10/fedprox"](Scale("paper")).cells
    forms = {name: cell.algorithm[0].options["sampling"] for name, cell in cells.items()}
    assert forms["high, mu 0.1"] == "uniform"
    assert forms["high, mu 0.1, drawn by size"] == "by-size"
    assert all(cell.clients.partition.options["sizes"] != "homogeneous" for cell in cells.values())


def test_fedprox_has_a_table_of_both_levels_of_heterogeneity(tmp_path):
    done = reproduce("fedavg-cifar10/fedprox", "smoke", tmp_path / "out")
    (table,) = (one for one in done.blocks if one.title == "Accuracy after the last round, %")
    assert isinstance(table, Table)
    assert list(table.header) == ["", "low", "high"]
    rules = ["mu 0", "mu 0.1", "mu 0.1, drawn by size"]
    assert [row[0] for row in table.rows] == rules
    for rule, low, high in table.rows:
        ends = [done.results.final(f"{how}, {rule}") for how in ("low", "high")]
        assert [low, high] == [f"{100 * end.mean:.2f}" for end in ends if end]


def test_networks_are_compared_from_scratch_and_pretrained_ones_stand_apart(monkeypatch, tmp_path):
    (tmp_path / "resnet18-f37072fd.pth").touch()
    monkeypatch.setattr(Scale, "has", lambda *_: True)
    cells = RECIPES["fedavg-cifar10/architectures"](Scale("paper", tmp_path)).cells
    assert [name for name, cell in cells.items() if cell.weights] == [PRETRAINED]
    rates: dict[str, list[float]] = {name: [] for name in NETWORKS}
    for name, cell in cells.items():
        if not cell.weights:
            rates[name.split(", ")[0]].append(cell.local.lr)
    assert set(map(tuple, rates.values())) == {(0.001, 0.01)}


def test_the_fall_is_taken_apart_as_far_as_runs_are_there():
    reached = {"homogeneous": 0.55, "low, truncated": 0.41, "equal, a quarter of the images": 0.39}

    def told(accuracies):
        cells: dict[str, Any] = {
            f"λ rule, {name}": [SimpleNamespace(final=lambda _, value=value: value)]
            for name, value in accuracies.items()
        }
        return " ".join(apart(Results(Scale("paper"), cells)))

    assert "images, makes −16.00; unequal sizes on top of that +2.00." in told(reached)
    assert "over all" not in told(reached)
    assert "over all images, make −5.00." in told({**reached, "low, renormalised": 0.50})
    assert (
        told({"homogeneous": 0.55}) == "The runs that would take the fall apart are not all here."
    )


def test_figure_13_compares_runs_by_images_and_not_by_seconds(tmp_path):
    done = reproduce("fedavg-cifar10/figure13", "smoke", tmp_path / "out")
    (block,) = (one for one in done.blocks if one.title == "Test accuracy by images seen")
    assert isinstance(block, Curves)
    for line in block.lines:
        (run,) = done.results.runs[line.name]
        first, second = (record["examples"] for record in run.rounds)
        assert list(line.x) == [first / 1e6, (first + second) / 1e6]
        assert list(line.y) == run.curve("test_accuracy")[1]
    table = next(one for one in done.blocks if isinstance(one, Table))
    assert list(table.header) == ["run", "final accuracy, %", "rounds", "images seen"]


@pytest.mark.parametrize("item", ["architectures", "figure13"])
def test_means_over_seeds_have_their_spread(item, tmp_path):
    done = reproduce(f"fedavg-cifar10/{item}", "smoke", tmp_path / "out", seeds=2)
    table = next(block for block in done.blocks if isinstance(block, Table))
    column = next(i for i, name in enumerate(table.header) if "accuracy" in name)
    for cell, row in zip(done.results.runs, table.rows, strict=True):
        found = done.results.final(cell)
        assert found is not None and found.std is not None
        assert row[column] == f"{100 * found.mean:.2f} ± {100 * found.std:.2f}"
