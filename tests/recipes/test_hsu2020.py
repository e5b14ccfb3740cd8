"""Paper 2's recipes: what the tables need, by its own numbers, and what is picked by what."""

import itertools
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlens.recipes import RECIPES
from fedlens.recipes.hsu2020 import cifar
from fedlens.recipes.hsu2020.cifar import Point, Rate, best, momenta, rates
from fedlens.recipes.hsu2020.distributions import furthest_apart
from fedlens.recipes.hsu2020.setting import Method, at_budgets, schedule
from fedlens.recipes.page import opening
from fedlens.recipes.recipe import EMBEDDED, Results, Scale
from fedlens.recipes.reproduce import reproduce
from fedlens.report.blocks import Curves, Strip, Table
from tests.recipes.diverging import diverged


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.delenv("FEDLENS_DATA", raising=False)


@pytest.fixture
def paper(monkeypatch, tmp_path):
    """The paper's scale with all data, and weights, here."""
    (tmp_path / "mobilenet_v2-b0353104.pth").touch()
    monkeypatch.setattr(Scale, "has", lambda *_: True)
    return Scale("paper", tmp_path)


def named(cell):
    return [one.name for one in cell.algorithm]


@pytest.mark.parametrize("item", ["table5", "figure9"])
def test_runs_from_pretraining_and_from_scratch_have_virtual_clients(item, paper):
    cells = RECIPES[f"hsu2020/{item}"](paper).cells
    federated = [cell for name, cell in cells.items() if ", K " in name]
    assert len(federated) == 8
    assert all("fedvc" in named(cell) for cell in federated)


@pytest.mark.parametrize("here", [{"cifar10"}, {"cifar10", "cifar100"}, set()])
def test_weights_of_pretraining_fit_the_images_of_those_that_start_from_them(here, monkeypatch):
    """Models for embedded images, which are gray, cannot go on with those of CIFAR-10."""
    monkeypatch.setattr(Scale, "has", lambda _, name: name in here)
    recipe = RECIPES["hsu2020/table5"](Scale("small"))
    gray = {name: cell.dataset.name == EMBEDDED for name, cell in recipe.cells.items()}
    assert len(set(gray.values())) == 1
    starts = {name.split(", ")[0] for name in recipe.cells}
    if here == {"cifar10"}:
        assert starts == {"scratch"} and "only the runs from scratch" in recipe.stand_in
    else:
        assert starts == {"pretraining", "pretrained", "scratch"}


def test_rounds_are_known_to_two_percent_and_budgets_exactly():
    evaluate = schedule(Scale("paper"), 50_000)
    due = [r for r in range(1, 50_001) if evaluate.is_due(r, 50_000)]
    assert {1000, 2500, 5000, 6250, 12_500} <= set(due)
    assert all(b - a <= 0.02 * a + 1 for a, b in pairwise(due))
    assert len(due) < 1000
    short = schedule(Scale("paper"), 5000)
    assert max(short.at) <= 5000


def test_every_run_of_table_2_spends_its_budgets(tmp_path, monkeypatch):
    done = reproduce("hsu2020/table2", "smoke", tmp_path / "out")
    for cell, runs in done.results.runs.items():
        if "centralised" not in cell:
            assert runs[0].rounds[-1]["batches_total"] >= 12
    monkeypatch.setattr(Scale, "has", lambda _, name: name in ("cifar10", "femnist"))
    cells = RECIPES["hsu2020/table2"](Scale("paper")).cells
    for which, largest in (("geo", 11.39), ("user", 3.13)):  # batches a round, of the stand-ins
        assert cells[f"{which}, FedAvg"].rounds * largest >= 50_000
        assert cells[f"{which}, FedAvg, FedVC"].rounds * 4 >= 50_000


def test_a_mean_over_some_of_the_seeds_says_so():
    """Runs that broke off before a budget are not silently left to those that lived."""

    def run(rounds):
        return SimpleNamespace(rounds=[{"round": r, "test_accuracy": 0.5} for r in rounds])

    runs: Any = {"FedAvg": [run((1, 2, 3)), run((1, 2)), run((1, 2, 3))]}
    theirs = {"FedAvg": (31.3, 39.7, 43.9)}
    rows = [("", Method("FedAvg"))]
    table = at_budgets(Results(Scale("smoke"), runs), rows, theirs, of=("method",))
    assert [row[2::2] for row in table.rows] == [
        ["50.0 ± 0.0", "50.0 ± 0.0", "50.0 ± 0.0 (2 of 3)"]
    ]
    assert "2 of 3: this many of the runs got that far." in table.caption


@pytest.mark.parametrize(
    ("has", "called", "compared"),
    [
        (("cifar10", "femnist"), "iNaturalist-Geo-3k (here: imbalanced CIFAR-10)", False),
        (("inaturalist-geo-3k", "inaturalist-user-120k"), "iNaturalist-Geo-3k", True),
    ],
)
def test_numbers_of_other_data_are_named_so_and_have_no_difference(
    has, called, compared, monkeypatch
):
    monkeypatch.setattr(Scale, "has", lambda _, name: name in has)
    run: Any = SimpleNamespace(final=lambda _: 0.73, rounds=[])
    blocks = RECIPES["hsu2020/table2"](Scale("paper")).blocks(
        Results(Scale("paper"), {"geo, centralised": [run]})
    )
    (table,) = (one for one in blocks if one.title == "Centralised, %")
    assert isinstance(table, Table)
    assert list(table.rows[0]) == [called, "57.90", "73.00", *(["+15.10"] if compared else [])]
    assert ("ours − published" in table.header) == compared
    assert ("Published numbers are of other data than ours." in table.caption) != compared
    at_rounds = next(one for one in blocks if one.title == "Accuracy at rounds")
    assert isinstance(at_rounds, Table) and at_rounds.rows[0][0] == called


def test_composed_has_each_method_with_and_without_the_others(monkeypatch):
    monkeypatch.setattr(Scale, "has", lambda _, name: name in ("cifar10", "femnist"))
    cells = RECIPES["hsu2020/composed"](Scale("paper")).cells
    assert [len([c for c in cells if c.startswith(w)]) for w in ("geo", "user")] == [9, 9]
    both = cells["geo, FedAvgM, FedVC, FedIR"]
    assert [one.name for one in both.algorithm] == ["fedvc", "fedir", "fedavgm"]
    table3 = RECIPES["hsu2020/table3"](Scale("paper")).cells
    for added in ("", ", FedIR"):  # which has FedVC in all cells
        assert cells[f"user, FedAvg, FedVC{added}"] == table3[f"FedAvg{added}, K 10"]


def test_figure_6c_is_relative_and_has_the_users(tmp_path):
    done = reproduce("hsu2020/figure6", "smoke", tmp_path / "out")
    (block,) = [b for b in done.blocks if b.title == "Relative accuracy against EMD"]
    assert isinstance(block, Curves)
    assert "iNaturalist-User-120k" in block.caption
    centralised = done.results.final("geo, centralised")
    assert centralised is not None
    whole = centralised.mean
    run = done.results.runs["α 100, FedAvg, FedVC"][0]
    relative = run.curve("test_accuracy")[1][run.curve("test_accuracy")[0].index(2)] / whole
    assert relative in block.lines[0].y


def test_every_partitioning_starts_from_the_same_weights(paper):
    cells = RECIPES["hsu2020/figure6"](paper).cells
    starts = {(cell.weights, cell.norm) for name, cell in cells.items() if "Geo-" in name}
    assert starts == {(cells["geo, FedAvg"].weights, "frozen")}
    assert cells["geo, FedAvg"].weights is not None


def test_the_pilot_never_sees_test_images_and_picks_by_those_set_apart(tmp_path):
    done = reproduce("hsu2020/figure4-pilot", "smoke", tmp_path / "out")
    for runs in done.results.runs.values():
        assert not any(key.startswith("test") for run in runs for row in run.rounds for key in row)
    picked = best(done.results)["cifar10"]["0"]
    found = {}
    for rate, left in itertools.product(rates(done.results.scale), momenta(done.results.scale)):
        cell = f"cifar10, α 0, η_eff {rate:.2g}, 1-β {left:.2g}"
        measured = done.results.final(cell, "validation_accuracy")
        assert measured is not None
        found[Point(rate * left, 1 - left)] = measured.mean
    assert found[picked["FedAvgM"]] == max(found.values())
    plain = {point: y for point, y in found.items() if point.momentum == 0}
    assert found[picked["FedAvg"]] == max(plain.values())
    assert len(set(found.values())) > 1
    alone = best(done.results)["cifar10"]["centralised"]
    judged = {}
    for lr, how in itertools.product(rates(done.results.scale), ("constant", "cosine")):
        cell = f"cifar10, centralised, lr {lr:.2g}, {how}"
        measured = done.results.final(cell, "validation_accuracy")
        assert measured is not None
        judged[Rate(lr, how)] = measured.mean
    assert judged[alone] == max(judged.values())


def test_the_pilot_gives_strong_momentum_all_rounds_and_the_rest_a_tenth(paper):
    cells = RECIPES["hsu2020/figure4-pilot"](paper).cells
    whole = RECIPES["hsu2020/figure4"](paper).cells["cifar10, α 1, FedAvg, K 10"].rounds
    rounds = {
        left: {
            cells[f"cifar10, α {alpha}, η_eff {rate:.2g}, 1-β {left:.2g}"].rounds
            for alpha, rate in itertools.product(("100", "0"), rates(paper))
        }
        for left in momenta(paper)
    }
    short = {left for left, found in rounds.items() if found == {whole // 10}}
    assert short == {left for left in momenta(paper) if left >= 0.1}
    assert all(found == {whole} for left, found in rounds.items() if left not in short)


def test_figure_4_takes_the_point_that_the_pilot_picked(paper, monkeypatch):
    picked = {
        "cifar10": {
            "0.5": {"FedAvg": [0.03, 0.0], "FedAvgM": [0.001, 0.97]},
            "0.1": {"FedAvg": [0.1, 0.0], "FedAvgM": [0.1, 0.0]},
        }
    }
    monkeypatch.setattr(cifar, "_chosen", lambda: picked)
    cells = RECIPES["hsu2020/figure4"](paper).cells

    def point(alpha, base):
        cell = cells[f"cifar10, α {alpha}, {base}, K 10"]
        return cell.local.lr, cell.algorithm[0].options.get("momentum", 0.0)

    assert point("0.5", "FedAvg") == (0.03, 0.0)
    assert point("0.5", "FedAvgM") == (0.001, 0.97)
    assert point("0.1", "FedAvg") == (0.1, 0.0)
    assert "cifar10, α 0.1, FedAvgM, K 10" not in cells  # it would be the same run
    assert point("1", "FedAvg") == (0.01, 0.0)
    assert point("1", "FedAvgM") == (0.01, 0.9)
    small = RECIPES["hsu2020/figure4"](Scale("small")).cells["cifar10, α 0, FedAvgM, K 10"]
    assert small.local.lr == 0.05


@pytest.mark.parametrize(
    ("item", "cell"),
    [
        ("hsu2020/figure4", "cifar10, centralised"),
        ("hsu2020/figure8", "cifar10, centralised"),
        ("hsu2020/table1", "cifar10, centralised"),
    ],
)
def test_centralised_training_has_the_rate_that_the_pilot_picked(paper, monkeypatch, item, cell):
    def lr(**picked):
        monkeypatch.setattr(cifar, "_chosen", lambda: picked)
        return RECIPES[item](paper).cells[cell].local.lr

    assert lr() == 0.01
    assert lr(cifar10={"centralised": [0.03, "constant"]}) == 0.03
    falling = lr(cifar10={"centralised": [0.1, "cosine"]})
    assert (falling.name, falling.options["start"]) == ("cosine", 0.1)


def test_the_strip_of_figure_4_marks_the_weighted_mean(tmp_path):
    done = reproduce("hsu2020/figure4", "smoke", tmp_path / "out")
    strip = next(block for block in done.blocks if isinstance(block, Strip))
    runs = done.results.runs["cifar10, α 100, FedAvg, K 2"]
    assert strip.stroke(0) == runs[0].summary["emd"]
    assert "weighted mean" in strip.words()


def test_a_page_names_the_runs_that_diverged(tmp_path):
    done = reproduce("hsu2020/figure4", "smoke", tmp_path / "out")
    cell = "cifar10, α 0, FedAvgM, K 2"
    results = diverged(done.results, cell)
    recipe = RECIPES["hsu2020/figure4"](done.results.scale)
    said = opening(recipe, results).paragraphs
    assert f"1 of 5 runs diverged: {cell}. Such a run has no point in the figure." in said
    assert not any("diverged" in one for one in opening(recipe, done.results).paragraphs)
    curves = next(block for block in recipe.blocks(results) if isinstance(block, Curves))
    assert [line.note for line in curves.lines] == ["", "diverged at α 0"]
    assert [[y is None for y in line.y] for line in curves.lines] == [[False] * 2, [False, True]]
    assert "Runs that diverged have no point" in curves.caption


def test_figure_10_has_the_spread_over_splits(tmp_path):
    done = reproduce("hsu2020/figure10", "smoke", tmp_path / "out")
    table = next(block for block in done.blocks if isinstance(block, Table))
    rows = {row[0]: row[2] for row in table.rows}
    assert rows["α 0"] == "1.800 ± 0.000 (2)"
    assert str(rows["α 1"]).endswith(" (2)")
    assert "± 0.000" not in str(rows["α 1"])


def test_what_stands_in_for_clients_and_network_is_said():
    told = RECIPES["hsu2020/table3"](Scale("smoke")).stand_in
    assert told == (
        "In the place of iNaturalist-User-120k: imbalanced embedded images, with linear in that of "
        "MobileNetV2. Numbers on other data cannot be compared with the published ones."
    )


def test_the_two_classes_furthest_apart_are_found():
    shares = torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.2, 0.2], [0.0, 0.2, 0.8]])
    assert furthest_apart(shares) == (0, 2)
