"""Paper 4's recipes describe what its equations and our hypotheses say."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fedlens.config.experiment import Named
from fedlens.recipes import RECIPES
from fedlens.recipes.ghaemi.algorithms import dead_runs, living, outcome, reached
from fedlens.recipes.ghaemi.why_liadmm_fails import ABOUT_TRAINING, CONTROL
from fedlens.recipes.page import beside, experiments
from fedlens.recipes.recipe import Results, Scale
from fedlens.recipes.reproduce import reproduce
from fedlens.report.blocks import Curves, places
from fedlens.report.palette import colour_of


@pytest.fixture(autouse=True)
def all_data_here(monkeypatch):
    monkeypatch.setattr(Scale, "has", lambda *_: True)


def takes_one_step(cell):
    return any(one.options.get("local") == "gradient" for one in cell.algorithm)


@pytest.mark.parametrize("item", ["liadmm", "why-liadmm-fails"])
def test_a_full_batch_step_has_no_epochs_and_no_momentum(item):
    cells = list(RECIPES[f"ghaemi/{item}"](Scale("paper")).cells.values())
    steps = [cell for cell in cells if takes_one_step(cell)]
    assert steps
    for cell in steps:
        assert (cell.local.epochs, cell.local.momentum, cell.local.weight_decay) == (1, 0, 0)
    assert any(cell.local.momentum == 0.9 for cell in cells if not takes_one_step(cell))


@pytest.mark.parametrize("item", ["fedavg", "fedprox", "liadmm", "fedadmm"])
def test_every_algorithm_is_run_in_both_loss_forms_and_both_splits(item):
    cells = RECIPES[f"ghaemi/{item}"](Scale("paper")).cells.values()
    run = {
        loss: {
            (rule.name, cell.clients.partition.name)
            for cell in cells
            for rule in cell.algorithm
            if cell.loss.name == loss
        }
        for loss in ("double_softmax", "cross_entropy")
    }
    assert run["double_softmax"] == run["cross_entropy"]
    assert {split for _, split in run["cross_entropy"]} == {"iid", "classes"}


def test_each_hypothesis_about_training_differs_from_the_control_in_one_thing():
    cells = RECIPES["ghaemi/why-liadmm-fails"](Scale("paper")).cells
    control = cells[f"{CONTROL}, non-iid"]
    (rule,) = control.algorithm
    changed = {
        "H1": replace(control, algorithm=(Named("liadmm", {**rule.options, "dual": "step"}),)),
        "H3": replace(control, local=replace(control.local, epochs=10)),
        "H4": replace(control, local=replace(control.local, momentum=0.9)),
    }
    assert tuple(changed) == ABOUT_TRAINING
    for hypothesis, cell in changed.items():
        assert cells[f"{hypothesis} alone, non-iid"] == cell


def test_lines_of_hypotheses_have_colours_of_their_own_and_say_what_they_are(tmp_path):
    done = reproduce("ghaemi/why-liadmm-fails", "smoke", tmp_path / "out")
    (picture,) = [block for block in done.blocks if isinstance(block, Curves)]
    names = [line.name for line in picture.lines]
    assert len(names) == 9 and "H1 alone, dual in every step" in names
    assert len({colour_of(place) for place in places(picture.lines).values()}) == 9
    room = 52 - len(": diverged in round 12")  # that a legend has left
    assert all(len(name) <= room for name in names)


def test_the_table_of_experiments_says_what_was_really_run(tmp_path):
    overrides = ["local.weight_decay=0.001", "augment.flip=true", "precision=fp64"]
    done = reproduce("ghaemi/fedavg", "smoke", tmp_path / "out", overrides=overrides)
    table = experiments(done.results)
    row = dict(zip(table.header, table.rows[0], strict=True))
    alike = ("augment.flip true;", "local.weight_decay 0.001;", "computed fp64, sequential")
    assert all(one in table.caption for one in alike)  # since it is the same in all
    assert (row["loss"], row["local.lr"]) == ("double_softmax", "0.05")


def test_clients_that_come_with_the_data_are_counted(tmp_path):
    done = reproduce("ghaemi/fedavg", "smoke", tmp_path / "out", overrides=["rounds=1"])
    (run,) = done.results.runs["iid, logits"]
    clients = {"per_round": 2, "partition": {"name": "natural", "column": "writer"}}
    of_writers = replace(run, experiment=run.experiment | {"clients": clients})
    table = experiments(Results(done.results.scale, {"by writer": [of_writers]}))
    assert "clients.per_round 2;" in table.caption and "clients.count 20;" in table.caption


def run_that_predicts(seed: int, classes: list[int], accuracy: float) -> Any:
    curves = {"test_classes_predicted": classes, "test_accuracy": [accuracy] * len(classes)}
    return SimpleNamespace(
        status="finished",
        experiment={"seed": seed},
        curve=lambda measure: (list(range(len(classes))), curves[measure]),
    )


def test_runs_that_ended_dead_are_counted_and_not_averaged():
    cell = "non-iid, double softmax"
    runs = [
        run_that_predicts(0, [4, 1, 1, 9, 1, 1, 9, 9], 0.7),
        run_that_predicts(1, [9, 9, 9, 1, 1, 1, 1, 1], 0.1),
        run_that_predicts(2, [9] * 8, 0.8),
    ]
    results = Results(Scale("paper"), {cell: runs})
    assert living(results).late(cell).mean == pytest.approx(0.75)
    assert dead_runs(results, [cell]).rows == [[cell, "1 of 3", "1", "75.00"]]
    all_dead = Results(Scale("paper"), {cell: runs[1:2]})
    assert dead_runs(all_dead, [cell]).rows == [[cell, "1 of 1", "1", "–"]]


def run_that_ended(status: str, num_rounds: int, accuracy: float, collapsed: bool) -> Any:
    return SimpleNamespace(
        status=status,
        num_rounds=num_rounds,
        summary={"collapsed": collapsed},
        final=lambda _: 2.3612 if collapsed else 0.9,
        curve=lambda _: ([1, 2, 3, 4], [accuracy] * 4),
    )


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([("finished", 80, 0.6, False), ("finished", 80, 0.7, False)], "65.0 ± 7.1"),
        (
            [("diverged", 14, 0.1, True), ("diverged", 12, 0.1, False)],
            "diverged in rounds 12 to 14 (2 of 2)",
        ),
        (
            [("finished", 80, 0.1, True), ("diverged", 58, 0.1, True)],
            "one class for all (1 of 2), diverged in round 58 (1 of 2)",
        ),
        (
            [("finished", 80, 0.6, False), ("diverged", 1200, 0.1, True)],
            "60.0, diverged in round 1,200 (1 of 2)",
        ),
        ([("diverged", 9, 0.1, False)], "diverged in round 9"),
        ([], "–"),
    ],
)
def test_what_became_of_runs_is_counted(runs, said):
    results = Results(Scale("paper"), {"cell": [run_that_ended(*run) for run in runs]})
    assert outcome(results, "cell") == said


def test_what_runs_had_before_they_diverged_is_not_compared_with_the_published_number():
    broken = [run_that_ended("diverged", end, 0.1, True) for end in (8, 16, 12)]
    results = Results(
        Scale("paper"), {"every step": broken, "once": [run_that_ended("finished", 80, 0.8, False)]}
    )
    rows = [(cell, 0.1, reached(results, cell)) for cell in results.runs]
    assert beside(rows, title="").rows == [
        ["every step", "10.00", "diverged in rounds 8 to 16 (3 of 3)", "–"],
        ["once", "10.00", "80.00", "+70.00"],
    ]
