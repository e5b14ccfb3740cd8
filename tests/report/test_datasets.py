"""Runs on data of different places: told apart, and not ranked without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fedlens.report import read_all, report
from fedlens.report.blocks import Heat
from fedlens.report.groups import data_names, different_data, group
from fedlens.report.holdings import class_blocks, partition_blocks
from fedlens.report.runs import headline, run_blocks

Make = Callable[..., Path]


def on(folder: Path, dataset: str, **about: object) -> Path:
    """The run, as if it had been on this data set; `about` goes into its manifest."""
    file = folder / "experiment.toml"
    file.write_text(file.read_text().replace('dataset = "fashion-mnist"', f"dataset = {dataset}"))
    manifest = json.loads((folder / "manifest.json").read_text()) | about
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def csv(path: str, options: str = "") -> str:
    return f'{{ name = "csv", path = "{path}"{options} }}'


def test_two_files_are_two_data_sets_and_not_two_seeds_of_one(run_folder: Make) -> None:
    folders = [
        on(run_folder("a", rounds=2), csv("/data/cats.csv"), partition="one"),
        on(run_folder("b", rounds=2), csv("/data/dogs.csv"), partition="two"),
    ]
    heats = [b for b in partition_blocks(group(read_all(folders))) if isinstance(b, Heat)]
    assert [heat.title.partition(", ")[0] for heat in heats] == [
        "Who holds what: csv cats.csv",
        "Who holds what: csv dogs.csv",
    ]
    assert not any("differ in their seed" in heat.caption for heat in heats)


def test_data_sets_that_were_dealt_alike_are_both_shown(run_folder: Make) -> None:
    """The fingerprint of a split is that of positions: two data sets may have the same."""
    folders = [on(run_folder(name, rounds=2), csv(f"/data/{name}.csv")) for name in "ab"]
    heats = [b for b in partition_blocks(group(read_all(folders))) if isinstance(b, Heat)]
    assert len(heats) == 2


def test_a_name_has_as_much_of_the_path_as_sets_it_apart_and_options_that_differ(
    run_folder: Make,
) -> None:
    folders = [
        on(run_folder("a", rounds=2), csv("/one/photos.csv")),
        on(run_folder("b", rounds=2), csv("/two/photos.csv", ", size = 8")),
        on(run_folder("c", rounds=2), csv("/two/photos.csv", ", size = 16")),
        run_folder("d", rounds=2),
    ]
    assert data_names(read_all(folders)) == [
        "csv one/photos.csv",
        "csv two/photos.csv size 8",
        "csv two/photos.csv size 16",
        "fashion-mnist",
    ]


def test_headline_and_bars_say_that_data_differ(run_folder: Make) -> None:
    folders = [
        on(run_folder("a", rounds=2, top=0.9), csv("/data/cats.csv"), data="1"),
        on(run_folder("b", rounds=2, top=0.5), csv("/data/dogs.csv"), data="2"),
    ]
    runs = read_all(folders)
    told = "They are on different data (csv cats.csv, csv dogs.csv): their accuracies do not say"
    assert told in headline(runs)
    (bars,) = [b for b in run_blocks(runs) if b.slug == "final_accuracy"]
    assert told in bars.caption
    assert told in report(folders).read_text()


def test_one_data_set_is_not_said_to_be_several(run_folder: Make) -> None:
    same = [run_folder("a", rounds=2), run_folder("b", rounds=2, seed=2)]
    assert different_data(read_all(same)) == ""
    moved = [
        on(run_folder("c", rounds=2), csv("/one/photos.csv"), data="1"),
        on(run_folder("d", rounds=2), csv("/two/photos.csv"), data="1"),
    ]
    assert different_data(read_all(moved)) == ""
    sized = [
        on(run_folder("e", rounds=2), csv("/data/photos.csv", ", size = 8"), data="1"),
        on(run_folder("f", rounds=2), csv("/data/photos.csv", ", size = 16"), data="2"),
    ]
    assert different_data(read_all(sized)) == ""


def test_recalls_of_other_classes_do_not_stand_under_the_names_of_the_first(
    run_folder: Make,
) -> None:
    folders = [
        on(run_folder("a", rounds=2), csv("/data/cats.csv"), classes=["tom", "tabby"]),
        on(run_folder("b", rounds=2), csv("/data/dogs.csv"), classes=["pug", "poodle"]),
    ]
    for folder in folders:
        details = {"part": "test", "confusion": [[3, 1, 0], [1, 3, 0]]}
        (folder / "evaluation.json").write_text(json.dumps(details))
    assert list(class_blocks(group(read_all(folders[:1]))))
    assert not list(class_blocks(group(read_all(folders))))
