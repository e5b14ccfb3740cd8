from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedlens.report import read_all
from fedlens.report.blocks import Heat, Intervals, Strip, Text
from fedlens.report.groups import group
from fedlens.report.holdings import (
    class_blocks,
    client_blocks,
    partition_blocks,
    partition_heat,
)
from fedlens.report.page import html
from fedlens.report.runs import run_blocks

Make = Callable[..., Path]


def detailed(folder: Path, **details: object) -> Path:
    (folder / "evaluation.json").write_text(json.dumps({"part": "test", **details}))
    return folder


def test_recall_and_confusion_are_those_of_the_final_model(run_folder: Make) -> None:
    folder = detailed(run_folder("a", rounds=2), confusion=[[3, 1, 0], [0, 0, 0]])
    recall, confusion = class_blocks(group(read_all([folder])))
    assert isinstance(recall, Intervals) and isinstance(confusion, Heat)
    assert list(recall.series[0].values) == [0.75, None]  # a class without examples has none
    assert list(recall.series[0].low) == [pytest.approx(0.3006, abs=1e-4), None]  # Wilson's
    assert list(recall.series[0].high) == [pytest.approx(0.9544, abs=1e-4), None]
    assert confusion.values == [[0.75, 0.25], [0.0, 0.0]]
    assert list(confusion.column_names) == ["0", "1"]


def test_answers_that_are_no_class_have_a_column_of_their_own(run_folder: Make) -> None:
    folder = detailed(run_folder("a", rounds=2), confusion=[[1, 0, 1], [0, 2, 0]])
    *_, confusion = class_blocks(group(read_all([folder])))
    assert isinstance(confusion, Heat)
    assert confusion.column_names[-1] == "none of them"
    assert confusion.values[0] == [0.5, 0.0, 0.5]


def test_confusions_of_repeats_are_added_up_and_several_runs_stand_side_by_side(
    run_folder: Make,
) -> None:
    folders = [
        detailed(run_folder(f"a{seed}", rounds=2, seed=seed), confusion=[[seed, 1, 0], [0, 1, 0]])
        for seed in (1, 3)
    ]
    other = run_folder("b", rounds=2, algorithm="fedprox")
    folders.append(detailed(other, confusion=[[1, 0, 0], [1, 0, 0]]))
    recall, first, second = class_blocks(group(read_all(folders)))
    assert isinstance(recall, Heat)
    assert recall.values == [[pytest.approx(4 / 6), 1.0], [1.0, 0.0]]
    assert list(recall.column_names) == ["fedavg", "b"]
    assert [first.title, second.title] == ["Confusion: fedavg", "Confusion: b"]
    assert list(recall.row_names) == ["0 (6)", "1 (2)"], "tested on other examples: of all runs"


def test_classes_of_repeats_have_as_many_examples_as_one_run_was_tested_on(
    run_folder: Make,
) -> None:
    folders = [
        detailed(run_folder(f"a{n}", rounds=2, seed=n), confusion=[[n, 3 - n, 0], [0, 1, 0]])
        for n in (1, 2)
    ]
    recall, _ = class_blocks(group(read_all(folders)))
    assert isinstance(recall, Intervals)
    assert list(recall.rows) == ["0 (3)", "1 (1)"]


@pytest.mark.parametrize("damaged", [None, 3, [], [[]], [[1], [1, 2]], [["x"]], [[1.5]], [[-1]]])
def test_details_that_make_no_sense_are_passed_over(run_folder: Make, damaged: object) -> None:
    folder = detailed(run_folder("a", rounds=2), confusion=damaged)
    assert list(class_blocks(group(read_all([folder])))) == []


def test_each_client_is_a_dot(run_folder: Make) -> None:
    folder = detailed(run_folder("a", rounds=2, spread=True), client_accuracy=[0.5, None, 1.0])
    curves, dots = client_blocks(group(read_all([folder])))
    assert curves.slug == "clients" and isinstance(dots, Strip)
    assert "2 dots from 50.0% to 100.0%" in dots.words()


def test_one_way_of_dealing_is_shown_once(run_folder: Make) -> None:
    folders = [run_folder(name, rounds=2) for name in "abc"]
    manifest = json.loads((folders[2] / "manifest.json").read_text()) | {"partition": "another"}
    (folders[2] / "manifest.json").write_text(json.dumps(manifest))
    heats = [b for b in partition_blocks(group(read_all(folders))) if isinstance(b, Heat)]
    (heat,) = heats
    assert heat.title == "Who holds what"
    assert heat.caption.endswith("The first of 2 splits that differ in their seed.")
    assert heats[0].values[0] == pytest.approx([1 / 3, 1.0])


def test_who_holds_what_needs_no_number_of_clients(run_folder: Make) -> None:
    folder = run_folder("a", rounds=2)
    partition = json.loads((folder / "partition.json").read_text())
    del partition["num_clients"]
    (folder / "partition.json").write_text(json.dumps(partition))
    (heat,) = partition_blocks(group(read_all([folder])))
    assert "2 clients" in heat.caption
    explained = "0: clients have classes in the same shares; 2: no class in common"
    assert f"EMD 0.640 ({explained})" in heat.caption
    (whole,) = (one for one in run_blocks(read_all([folder])) if one.title == "The run in full")
    assert isinstance(whole, Text) and f"EMD 0.92 ({explained})" in whole.paragraphs[0]


def test_many_unlike_clients_are_ordered_by_their_main_class() -> None:
    counts = np.zeros((80, 2), dtype=np.int64)
    counts[np.arange(80), np.arange(80) % 2] = 5
    heat = partition_heat(counts, ["even", "odd"], "x")
    assert heat.values[0] == [1.0] * 40 + [0.0] * 40
    assert list(heat.column_names[:3]) == ["0", "2", "4"]
    assert "80 clients of 5 examples each" in heat.caption


@pytest.mark.parametrize(("count", "told"), [(2, False), (3, True)])
def test_bands_as_tall_as_the_picture_are_seen_one_at_a_time(
    run_folder: Make, count: int, told: bool
) -> None:
    algorithms = ("fedavg", "fedprox", "fedavgm")[:count]
    runs = [run_folder(name, algorithm=name, rounds=2, spread=True) for name in algorithms]
    curves = next(client_blocks(group(read_all(runs))))
    page = html("", "", [curves], lambda _: "<svg></svg>")
    assert ("Point at a name to see its band" in page) == told
