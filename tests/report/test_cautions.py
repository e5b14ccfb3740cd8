from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens.report.blocks import Curves, Intervals
from fedlens.report.cautions import cautions
from fedlens.report.curves import curve_blocks
from fedlens.report.groups import group
from fedlens.report.holdings import client_blocks
from fedlens.report.runs import caution_block, headline, run_blocks, title_of
from fedlens.runs.records import read, read_all

Record = Callable[..., Path]
KINDS = ["benign", "malignant"]


def judged(folder: Path, **evaluation: Any) -> Path:
    """The run with these details of its final model, on classes and clients with names."""
    (folder / "evaluation.json").write_text(json.dumps({"part": "test", **evaluation}))
    for file, entry in (
        ("manifest.json", {"classes": KINDS}),
        ("partition.json", {"client_names": ["north", "south", "west"]}),
    ):
        known = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(known | entry))
    return folder


def rounds(*accuracies: float, **more: Any) -> list[dict[str, Any]]:
    return [{"round": n, "test_accuracy": x, **more} for n, x in enumerate(accuracies, 1)]


def texts(folder: Path) -> str:
    return " ".join(one.text for one in cautions(read(folder)))


def test_a_class_that_is_rarely_recognised_is_named(recorded: Record) -> None:
    run = judged(recorded("a", rounds(0.6, 0.7, 0.785)), confusion=[[149, 1, 0], [38, 16, 0]])
    assert "weak at malignant (recall 29.6%, 95% interval 19.1% to 42.8%, 54 images)" in texts(run)
    assert "weak at malignant" in headline(read_all([run]))


def test_few_images_make_no_class_weak(recorded: Record) -> None:
    run = judged(recorded("a", rounds(0.6, 0.7, 0.77)), confusion=[[74, 16, 0], [7, 3, 0]])
    assert texts(run) == ""


def test_a_fall_that_was_made_good_is_told_with_its_rounds(recorded: Record) -> None:
    lines = rounds(0.6, 0.8, 0.39, 0.5, 0.78)
    run = judged(recorded("a", lines), confusion=[[80, 20, 0], [20, 80, 0]])
    told = "Accuracy fell on the way in 2 evaluations, rounds 3 to 4: to 39.0% in round 3, after "
    assert texts(run) == f"{told}80.0% in round 2."


def test_a_fall_within_the_noise_of_few_images_is_none(recorded: Record) -> None:
    run = judged(recorded("a", rounds(0.8, 0.5, 0.8)), confusion=[[4, 1, 0], [1, 4, 0]])
    assert texts(run) == ""


def test_a_site_that_is_left_behind_or_better_alone_is_named(recorded: Record) -> None:
    run = judged(
        recorded("a", rounds(0.6, 0.7, 0.75)),
        confusion=[[75, 25, 0], [25, 75, 0]],
        client_accuracy=[0.3, 0.8, 0.9],
        client_tested=[50, 50, 100],
        federated=[0.3, 0.8, 0.9],
        local_only=[0.8, 0.6, 0.6],
    )
    assert texts(run) == (
        "Left behind is north (accuracy 30.0%, 95% interval 19.1% to 43.8%, 50 images), the others "
        "85.0% on average. Trained alone, north would do better: 80.0%, 30.0% with this model."
    )


def test_where_clients_do_better_alone_on_average_it_is_told(recorded: Record) -> None:
    run = judged(
        recorded("a", rounds(0.6, 0.7, 0.81)),
        client_tested=[100, 100, 100],
        federated=[0.81, 0.81, 0.813],
        local_only=[0.88, 0.88, 0.886],
    )
    told = "Trained alone, the clients would do better: 88.2% on average, 81.1% with this model."
    assert texts(run) == told
    few = judged(
        recorded("b", rounds(0.6, 0.7, 0.81)),
        client_tested=[10, 10, 10],
        federated=[0.81, 0.81, 0.813],
        local_only=[0.88, 0.88, 0.886],
    )
    assert texts(few) == "", "of thirty images it may be chance"


def test_of_several_runs_the_headline_is_short_and_a_table_has_the_rest(recorded: Record) -> None:
    bad = judged(recorded("bad", rounds(0.6, 0.7, 0.75)), confusion=[[150, 0, 0], [50, 0, 0]])
    good = judged(recorded("good", rounds(0.6, 0.7, 0.8)), confusion=[[80, 20, 0], [20, 80, 0]])
    runs = read_all([bad, good])
    assert headline(runs).endswith("\nBut look closer: bad (weak at malignant).")
    (table,) = caution_block(runs)
    assert [row[0] for row in table.rows] == ["bad"]
    assert table.title in [block.title for block in run_blocks(runs)]
    assert title_of(runs) == "2 runs compared, one seed each"


def test_an_accuracy_stands_with_the_interval_of_the_only_test_set(recorded: Record) -> None:
    """Wilson's, of 160 right answers in 200."""
    runs = [
        judged(recorded(name, rounds(0.6, 0.7, 0.8)), confusion=[[80, 20, 0], [20, 80, 0]])
        for name in "ab"
    ]
    assert "80.0% test accuracy (95% interval 73.9% to 85.0%)" in headline(read_all(runs[:1]))
    (ends,) = (one for one in run_blocks(read_all(runs)) if one.slug == "final_accuracy")
    assert isinstance(ends, Intervals) and "on this test set alone" in ends.caption
    (marks,) = ends.series
    assert list(marks.low) == pytest.approx([0.7391, 0.7391], abs=1e-4)
    assert list(marks.high) == pytest.approx([0.8496, 0.8496], abs=1e-4)


def test_details_that_make_no_sense_caution_against_nothing(recorded: Record) -> None:
    run = recorded("a", rounds(0.6, 0.7, 0.8))
    for nonsense in (3, [[1]], [["x"]], [[1, 2, 3, 4]], [5.0], [None, "x", -1.0]):
        keys = ("confusion", "client_accuracy", "client_tested", "federated", "local_only")
        judged(run, **dict.fromkeys(keys, nonsense))
        assert texts(run) == ""


def test_each_of_a_few_named_clients_has_its_line(recorded: Record) -> None:
    shares = [[0.1, 0.2, None], [0.3, 0.4, 0.5]]
    lines = [
        {"round": n, "client_accuracy_median": 0.2, "client_accuracy": one}
        for n, one in enumerate(shares, 1)
    ]
    (curves,) = client_blocks(group(read_all([judged(recorded("a", lines))])))
    assert isinstance(curves, Curves)
    assert [(line.name, list(line.y)) for line in curves.lines] == [
        ("north", [0.1, 0.3]),
        ("south", [0.2, 0.4]),
        ("west", [None, 0.5]),
    ]


def test_accuracy_stands_beside_that_of_chance(recorded: Record) -> None:
    run = judged(recorded("a", rounds(0.6, 0.7, 0.8)))
    curves, *_ = curve_blocks(group(read_all([run])), "test")
    assert isinstance(curves, Curves)
    assert list(curves.levels) == [("chance", 0.5)]
