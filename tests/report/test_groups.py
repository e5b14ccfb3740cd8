from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens.report import read_all, rows
from fedlens.report.blocks import Curves, Heat, Intervals, Table
from fedlens.report.curves import curve_blocks
from fedlens.report.groups import curve, group, mean_and_std, means, names_by_difference
from fedlens.report.runs import headline, run_blocks
from fedlens.runs.records import primary_part

Make = Callable[..., Path]


def test_runs_that_differ_in_their_seeds_alone_are_repeats(run_folder: Make) -> None:
    folders = [
        run_folder(f"{algorithm}-{seed}", algorithm=algorithm, seed=seed, rounds=4)
        for algorithm in ("fedavg", "fedprox")
        for seed in (1, 2, 3)
    ]
    groups = group(read_all(folders))
    assert [one.name for one in groups] == ["fedavg", "fedprox"]
    assert [run.name for run in groups[1].runs] == ["fedprox-1", "fedprox-2", "fedprox-3"]


def test_runs_that_differ_in_two_settings_are_a_matrix_of_their_values(run_folder: Make) -> None:
    ended = {10.0: "finished", 0.5: "finished", 2.0: "diverged"}
    folders = [
        run_folder(
            f"{algorithm}-{alpha}-{seed}",
            algorithm=algorithm,
            alpha=alpha,
            seed=seed,
            rounds=4,
            top=0.5 + alpha / 25,
            status=status,
        )
        for algorithm in ("fedavg", "fedprox")
        for alpha, status in ended.items()
        for seed in (1, 2)
    ]
    runs = read_all(folders[:-2])
    (matrix,) = [b for b in run_blocks(runs) if b.slug == "accuracy_by_settings"]
    assert isinstance(matrix, Heat)
    assert (matrix.row_label, matrix.row_names) == ("algorithm", ["fedavg", "fedprox"])
    assert matrix.column_label == "clients.partition.alpha"
    assert matrix.column_names == ["0.5", "2.0", "10.0"], "numbers go up"
    finals = [run.final("test_accuracy") or 0.0 for run in runs[:2]]
    assert matrix.values[0][2] == pytest.approx(sum(finals) / 2)
    assert math.isnan(matrix.values[1][1] or 0.0), "that was not run"
    assert {column for _, column in matrix.best} == {2}
    assert math.isnan(matrix.values[0][1] or 0.0), "and those diverged"
    assert "the mean over 2 runs" in matrix.caption and "2 of 10 runs did not" in matrix.caption


def test_a_cell_of_the_matrix_has_all_runs_of_its_values(run_folder: Make) -> None:
    """Also where one seed was run twice, so that they are no repeats."""
    folders = [
        run_folder(
            f"{algorithm}-{alpha}-{top}", algorithm=algorithm, alpha=alpha, top=top, rounds=2
        )
        for algorithm in ("fedavg", "fedavgm")
        for alpha in (1.0, 2.0)
        for top in (0.4, 0.8)
    ]
    runs = read_all(folders)
    (matrix,) = [b for b in run_blocks(runs) if b.slug == "accuracy_by_settings"]
    assert isinstance(matrix, Heat)
    finals = [run.final("test_accuracy") or 0.0 for run in runs[:2]]
    assert matrix.values[0][0] == pytest.approx(sum(finals) / 2)


def test_a_run_that_is_invalid_is_never_the_best(run_folder: Make) -> None:
    folders = [
        run_folder("high", alpha=1.0, top=0.9, status="invalid", rounds=4),
        run_folder("low", alpha=2.0, top=0.5, rounds=4),
    ]
    runs = read_all(folders)
    found = means(runs)
    assert found is not None and [words.partition(",")[0] for words in found[2]] == ["low"]
    assert headline(runs).startswith("low reached")


def test_an_experiment_without_an_accuracy_keeps_its_place_among_the_bars(
    run_folder: Make,
) -> None:
    """Places are colours, which are the same in the curves."""
    folders = [run_folder(f"{n}", alpha=n, rounds=2, every=n != 2) for n in (1, 2, 3)]
    (bars,) = [b for b in run_blocks(read_all(folders)) if b.slug == "final_accuracy"]
    assert isinstance(bars, Intervals) and list(bars.rows) == ["1", "2", "3"]
    assert [height is None for height in bars.series[0].values] == [False, True, False]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("diverged", "(1 of 3 runs diverged in round 4)"),
        ("interrupted", "(1 of 3 runs interrupted after 4 rounds)"),
        ("invalid", "(of 1 of 3 runs the loss is "),
    ],
)
def test_of_repeats_it_is_said_how_many_did_not_finish(
    run_folder: Make, status: str, words: str
) -> None:
    ends = ("finished", status, "finished")
    folders = [run_folder(str(n), seed=n, rounds=4, status=one) for n, one in enumerate(ends)]
    assert words in headline(read_all(folders))


@pytest.mark.parametrize(("number", "matrices"), [(2, 0), (3, 1)])
def test_a_matrix_is_drawn_if_more_than_half_of_it_is_known(
    run_folder: Make, number: int, matrices: int
) -> None:
    settings = [("fedavg", 1.0), ("fedprox", 2.0), ("fedprox", 1.0)][:number]
    folders = [run_folder(f"{a}-{x}", algorithm=a, alpha=x, rounds=2) for a, x in settings]
    found = [b for b in run_blocks(read_all(folders)) if b.slug == "accuracy_by_settings"]
    assert len(found) == matrices


@pytest.mark.parametrize("number", [3, 4])
def test_of_runs_in_one_line_there_is_no_matrix(run_folder: Make, number: int) -> None:
    folders = [run_folder(str(k), alpha=2.0**k, rounds=2) for k in range(number)]
    assert not any(b.slug == "accuracy_by_settings" for b in run_blocks(read_all(folders)))


def test_one_seed_run_twice_is_no_repeat(run_folder: Make) -> None:
    runs = read_all([run_folder(name, rounds=2) for name in ("a", "b")])
    assert [one.name for one in group(runs)] == ["a", "b"]


def test_the_curve_of_repeats_is_their_mean_with_a_band_of_one_deviation(recorded: Make) -> None:
    folders = []
    for seed, values in enumerate(([0.25, 0.5, 0.75], [0.75, 1.0])):
        lines = [{"round": n, "test_accuracy": y} for n, y in enumerate(values, 1)]
        folder = recorded(f"run-{seed}", lines)
        (folder / "experiment.toml").write_text(f"rounds = 3\nseed = {seed}\n")
        folders.append(folder)
    (one,) = group(read_all(folders))
    line = curve(one, "test_accuracy")
    assert (line.x, line.y) == ([1, 2], [0.5, 0.75])  # round 3 was not recorded by all
    spread = math.sqrt(2) / 4
    assert line.low == pytest.approx([0.5 - spread, 0.75 - spread])
    assert line.high == pytest.approx([0.5 + spread, 0.75 + spread])


def test_a_name_says_what_sets_an_experiment_apart_and_no_more() -> None:
    fedavg: dict[str, Any] = {
        "model": "cnn",
        "algorithm": "fedavg",
        "algorithm.fedavg.over": "cohort",
    }
    prox: dict[str, Any] = {"model": "cnn", "algorithm": "fedprox", "algorithm.fedprox.mu": 0.1}
    assert names_by_difference([fedavg, prox]) == ["fedavg", "fedprox"]
    more = [fedavg, prox, prox | {"algorithm.fedprox.mu": 1.0}]
    assert names_by_difference(more) == ["fedavg", "fedprox, mu 0.1", "fedprox, mu 1.0"]
    assert names_by_difference([fedavg, fedavg | {"model": "mlp"}]) == [
        "fedavg, model cnn",
        "fedavg, model mlp",
    ]


def test_a_report_of_repeats_speaks_of_means(run_folder: Make) -> None:
    runs = read_all([run_folder(f"r{seed}", seed=seed, rounds=6) for seed in (1, 2)])
    assert headline(runs).startswith("fedavg reached ") and " ± " in headline(runs)
    assert "test accuracy (mean of 2 seeds) after 6 rounds" in headline(runs)
    blocks = run_blocks(runs)
    titles = [block.title for block in blocks]
    assert titles[:2] == ["Test accuracy", "Results"] and "Each run" in titles
    assert "bands ± one standard deviation" in blocks[0].caption
    assert primary_part(runs) == "test"


def test_a_mean_of_one_has_no_deviation() -> None:
    assert mean_and_std([0.5], percent=True) == "50.0%"
    assert mean_and_std([0.25, 0.75], percent=True) == "50.0% ± 35.4%"
    assert mean_and_std([]) == "–"


def test_pictures_of_many_experiments_show_the_best(run_folder: Make) -> None:
    folders = [run_folder(f"r{n}", rounds=4, alpha=0.1 * n, top=0.05 * n) for n in range(1, 12)]
    lead, results, *others = run_blocks(read_all(folders))
    assert isinstance(lead, Curves) and isinstance(results, Table)
    assert [line.name for line in lead.lines if not line.off] == [f"r{n}" for n in range(11, 3, -1)]
    assert "Drawn are the best 8 of 11" in lead.caption
    assert [row[0] for row in results.rows][:2] == ["r11", "r10"] and results.dots == 8
    assert sum(block.title.startswith("Confusion") for block in others) <= 1


def test_costs_of_repeats_are_means(recorded: Make) -> None:
    folders = []
    for algorithm, sent in (("fedavg", 1e6), ("fedprox", 2e6)):
        for seed in (0, 1):
            lines = [{"round": n, "test_accuracy": 0.2 * n + 0.1 * seed,
                      "bytes_up": sent * (1 + seed)} for n in (1, 2)]  # fmt: skip
            folder = recorded(f"{algorithm}-{seed}", lines)
            (folder / "experiment.toml").write_text(
                f'rounds = 2\nseed = {seed}\n[[algorithm]]\nname = "{algorithm}"\n'
            )
            folders.append(folder)
    (cost,) = [b for b in run_blocks(read_all(folders)) if b.slug == "accuracy_by_bytes"]
    assert isinstance(cost, Curves)
    assert list(cost.lines[1].x) == [3.0, 6.0] and cost.lines[1].y == pytest.approx([0.25, 0.45])


def test_the_loss_on_what_is_trained_on_is_not_that_of_local_training(recorded: Make) -> None:
    seen = {"round": 3, "train_accuracy": 0.5, "train_set_loss": 1.0, "train_loss": 9.0}
    runs = read_all([recorded("r", [seen])])
    header, (cells,) = rows(runs)
    assert cells[header.index("final loss")] == "1.000"
    _, loss = curve_blocks(group(runs), "train")
    assert isinstance(loss, Curves)
    assert loss.lines[0].y == [1.0]


def test_means_over_seeds_have_the_best_first(variants):
    runs = read_all(variants({"fedavg": [0.7, 0.72], "fedprox": [0.8, 0.82]}))
    found = means(runs)
    assert found is not None
    header, rows, (best,) = found
    assert header == ["experiment", "final test accuracy", "seeds"]
    assert [(row[0], row[2]) for row in rows] == [("fedprox", "2"), ("fedavg", "2")]
    assert best.startswith("fedprox, 81.0% ±")
    assert best.endswith(" test accuracy over 2 seeds")
    assert means(runs[:2]) is None


def test_of_several_data_sets_each_has_a_best_of_its_own(variants):
    digits = variants({"fedavg": [0.9], "fedprox": [0.8]})
    others = variants({"fedavg": [0.5], "fedprox": [0.6]}, dataset="birds")
    alone = variants({"fedavg": [0.99]}, dataset="one")
    found = means(read_all([*digits, *others, *alone]))
    assert found is not None
    assert [(words.split("-")[0], words.partition(", ")[2]) for words in found[2]] == [
        ("digits/fedavg", "90.0% test accuracy on digits"),
        ("birds/fedprox", "60.0% test accuracy on birds"),
    ]
