"""What results/README.md says of the papers is what is stored of them."""

import csv
import importlib
import io
import itertools
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedlens.experiment import Experiment, Named
from fedlens.names import DATASETS
from fedlens.recipes import RECIPES, part
from fedlens.recipes.hsu2020.chosen import chosen, chosen_rate
from fedlens.recipes.hsu2020.figure4_pilot import DIVERGED, best, best_rates
from fedlens.recipes.recipe import Measured, Recipe, Recorded, Results, Scale
from fedlens.recipes.reproduce import blocks_of
from fedlens.recipes.stored import coverage, restore
from fedlens.report.blocks import Curves, Table
from fedlens.report.look import LONGEST_TITLE
from fedlens.report.page import csv_of, distinct
from fedlens.report.pictures import is_drawn
from fedlens.run_files import OVER, read_status
from fedlens.runs.records import read, settings

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAPERS = RESULTS / "papers"
STORED = sorted(f"{place.parent.name}/{place.name}" for place in PAPERS.glob("*/*"))
UNTRAINED = [name for name in STORED if not (PAPERS / name / "runs").exists()]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the README, without its header."""
    below = _text(RESULTS / "README.md").partition(f"\n## {heading}\n")[2].splitlines()
    first = next(i for i, line in enumerate(below) if line.startswith("|"))
    rows = []
    for line in below[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


OWN = {  # what folders are called after, and the keys that their runs have in their own way
    "momentum": ["local.momentum"],
    "lr": ["local.lr"],
    "normalise": ["normalise"],
    "partition": ["clients.partition"],
    "precision": ["precision"],
}


SHORTER = {"hsu2020/table2"}  # its runs may end before its batch budgets are spent


def recipe_of(name: str) -> str:
    """The recipe whose runs a folder has: with a setting of its own its name is longer."""
    return re.sub(rf"-({'|'.join(OWN)})-.*", "", name)


@cache
def restored(name: str) -> tuple[Recipe, Results]:
    return restore(recipe_of(name), "paper", PAPERS / name)


class Row(NamedTuple):
    item: str
    said: str  # all of the row
    ours: str
    n: str


def published() -> list[Row]:
    """The rows of the opening table."""
    rows, item = [], ""
    for cells in table("Published numbers and ours"):
        *_, ours, count, runs, _ = cells
        item = runs.strip("`").removeprefix("papers/") if runs else item
        rows.append(Row(item, " ".join(cells), ours, count))
    return rows


NOT_ANSWERED = "Published numbers that are not answered yet"
ITEMS = sorted({row.item for row in published()})
SPREAD = r"\d+\.\d+ ± \d+\.\d+"


@cache
def shown(item: str) -> dict[str, set[str]]:
    """What the page of an item prints of ours, and what its runs end with: over how many runs
    (empty: it does not say)."""
    cells, ends = list[str](), list[Measured]()
    if item in UNTRAINED:
        for file in (PAPERS / item / "data").iterdir():
            cells += [cell for row in csv.reader(io.StringIO(_text(file))) for cell in row]
    else:
        recipe, results = restored(item)
        tables = [block for block in recipe.blocks(results) if isinstance(block, Table)]
        cells += [str(cell) for one in tables for row in one.rows for cell in row]
        ends += [end for cell in results.runs if (end := results.final(cell))]
    cells += [f"{100 * end.mean:.2f}" for end in ends]
    cells += [
        f"{100 * end.mean:.2f} ± {100 * end.std:.2f} ({end.seeds})"
        for end in ends
        if end.std is not None
    ]
    found: dict[str, set[str]] = {}
    for cell in cells:
        for value, count in re.findall(rf"({SPREAD}|^\d+\.\d+$)(?: \((\d+)\))?", cell):
            found.setdefault(value, set()).add(count)
    return found


@pytest.mark.parametrize("item", ITEMS)
def test_every_number_of_ours_is_one_that_the_stored_runs_give(item):
    found = shown(item)
    for row in published():
        if row.item == item:
            alone = re.findall(r"\d+\.\d+", row.ours) if row.n == "1" else []
            for value in (*re.findall(SPREAD, row.said), *alone):
                assert value in found, row.said
            for value in re.findall(SPREAD, row.ours):
                assert found[value] & {row.n, ""}, row.said


def test_of_every_published_number_it_is_said_where_ours_differs():
    for _, row, theirs, *_, differ in table("Published numbers and ours"):
        assert differ or theirs == "–", row


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_every_number_that_paper_2_has_in_a_table_stands_there(number):
    recipe = importlib.import_module(f"fedlens.recipes.hsu2020.table{number}")
    rows = [*table("Published numbers and ours"), *table(NOT_ANSWERED)]
    said = " ".join(" ".join(cells) for cells in rows)
    for row in recipe.PUBLISHED.values():
        for value in itertools.chain(*(one if isinstance(one, tuple) else [one] for one in row)):
            assert re.search(rf"(?<![\d.]){re.escape(str(value))}(?![\d.])", said), value


@pytest.mark.parametrize("name", [name for name in STORED if name not in UNTRAINED])
def test_the_figures_of_a_folder_are_those_of_its_page(name):
    drawn = list(filter(is_drawn, distinct(blocks_of(*restored(name)))))
    stored = {file.name for file in (PAPERS / name).glob("figures/*")}
    assert stored == {f"{block.slug}.svg" for block in drawn}
    assert all(len(block.title) <= LONGEST_TITLE for block in drawn), "a title would be cut"


def test_what_is_stored_of_figure_10_is_what_is_drawn():
    """It was drawn of CIFAR's own labels; splits go by how many there are of a class."""
    blocks = RECIPES["hsu2020/figure10"](Scale("paper")).blocks(Results(Scale("paper"), {}))
    place = PAPERS / "hsu2020" / "figure10"
    assert {file.stem for file in place.glob("data/*")} == {block.slug for block in blocks}
    for block in blocks:
        assert (place / "data" / f"{block.slug}.csv").read_bytes() == csv_of(block)
    drawn = {block.slug for block in blocks if is_drawn(block)}
    assert {file.name for file in place.glob("figures/*")} == {f"{slug}.svg" for slug in drawn}


@pytest.mark.parametrize("name", [name for name in STORED if name not in UNTRAINED])
def test_stored_runs_have_the_settings_of_their_cells(name):
    """Apart from seeds, what the folder is called after, and keys that there were not yet."""
    recipe, results = restored(name)
    own = [keys for word, keys in OWN.items() if f"-{word}-" in name]
    unlike = {"seed", *itertools.chain(*own)}
    if name in SHORTER:
        unlike |= {"rounds", "evaluate.at"}
    defaults = Experiment(dataset=Named("mnist"), model=Named("linear"), rounds=1)
    before = settings(defaults.plain())
    for cell, runs in results.runs.items():
        wanted = settings(recipe.cells[cell].plain())
        for run in runs:
            found = settings(run.experiment)
            assert found.keys() <= wanted.keys(), run.folder
            assert found["rounds"] <= wanted["rounds"], run.folder
            for key in wanted.keys() - unlike:
                assert wanted[key] == found.get(key, before.get(key)), (run.folder, key)


def test_stored_runs_can_be_laid_out_to_go_on_from(tmp_path):
    name = "ghaemi/centralised"
    tool = RESULTS.parent / "tools" / "store_results.py"
    command = [sys.executable, str(tool), "--back", str(PAPERS / name), str(tmp_path / "out")]
    for expected in ("6 of 6", "0 of 6"):  # what is there already stays
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert told.startswith(f"{expected} runs are laid out")
    stored = {run.folder.name: run for runs in restored(name)[1].runs.values() for run in runs}
    for place in (tmp_path / "out" / "runs").iterdir():
        assert read_status(place) in OVER
        assert read(place).rounds == stored.pop(place.name).rounds
    assert not stored


def test_figure_4_takes_what_the_stored_pilot_picks():
    results = restored("hsu2020/figure4-pilot")[1]
    picked, rates = best(results), best_rates(results)
    assert all(chosen_rate(dataset) == rates.get(dataset) for dataset in picked)
    assert len(picked["cifar10"]) == 8
    for dataset, by_alpha in picked.items():
        for alpha, by_base in by_alpha.items():
            for base, point in by_base.items():
                assert chosen(dataset, float(alpha), base) == pytest.approx(point), (alpha, base)


def test_the_pilot_passes_over_the_rates_whose_stored_runs_diverged_and_no_others():
    runs = [run for of in restored("hsu2020/figure4-lr-0.1")[1].runs.values() for run in of]
    assert runs and all(run.status == "diverged" for run in runs)
    found: dict[str, dict[float, tuple[float, ...]]] = {}
    for run in runs:
        told = settings(run.experiment)
        alpha = told["clients.partition.alpha"]
        found.setdefault(str(told["dataset"]), {})[alpha] = (told["local.lr"],)
    assert found == DIVERGED
    lasting = restored("hsu2020/figure4")[1]
    assert all(run.status == "finished" for of in lasting.runs.values() for run in of)


def test_the_line_of_fedavgm_in_figure_4_has_points_only_of_runs_with_momentum():
    recipe, results = restored("hsu2020/figure4")
    with_momentum = {
        run.summary["emd"]
        for runs in results.runs.values()
        for run in runs
        if settings(run.experiment).get("algorithm.fedavgm.momentum")
    }
    lines = [
        line
        for block in recipe.blocks(results)
        if isinstance(block, Curves)
        for line in block.lines
    ]
    for line in lines:
        if line.name.startswith("FedAvgM"):
            assert set(line.x) <= with_momentum
    assert [len(line.x) for line in lines] == [8, 8, 3, 2]


def test_there_are_as_many_runs_as_the_front_page_says():
    """A run that several items have in common is one, and one that another has a copy of."""
    said = re.search(r"more than (\d+) runs", _text(RESULTS.parent / "README.md"))
    found = {file.read_bytes() for file in PAPERS.glob("*/*/runs/*/rounds.jsonl.gz")}
    assert said is not None and len(found) > int(said[1])


def test_how_much_of_each_item_was_run_is_said():
    rows = {re.findall(r"`(.*?)`", cells[0])[0]: cells for cells in table("papers")}
    named = {name for cells in table("papers") for name in re.findall(r"`(.*?)`", cells[0])}
    assert named == set(STORED)
    for name, (_, experiments, runs, seeds, _, revisions) in rows.items():
        if name in UNTRAINED:
            manifest = _manifest(PAPERS / name)
            assert (experiments, runs) == ("nothing is trained", "0")
            assert (manifest["revision"], manifest["command"]) == (
                revisions,
                f"fedlens reproduce {name} --scale paper",
            )
            continue
        folders = [place.parent for place in (PAPERS / name).glob("runs/*/manifest.json")]
        assert str(len(folders)) == runs
        found, every = coverage(recipe_of(name), PAPERS / name)
        assert re.match(f"all {every}\\b" if found == every else f"{found} of {every}", experiments)
        used, wanted = len({_manifest(place)["seed"] for place in folders}), _num_seeds(name)
        assert seeds == (f"{used}" if used >= wanted else f"{used} of {wanted}"), name
        few = seeds if used < wanted else ""
        assert part(name) == (found, every, few, IN_WORDS[_num_shorter(name)])
        if revisions != "the same runs":
            assert set(revisions.split(", ")) == {_manifest(it)["revision"][:7] for it in folders}


IN_WORDS = {0: "", 2: "two"}


def _num_shorter(name: str) -> int:
    """How many experiments have runs that end before the recipe's rounds, by their own settings."""
    if name not in SHORTER:  # which `test_stored_runs_have_the_settings_of_their_cells` sees to
        return 0
    recipe, results = restored(name)
    return sum(
        any(run.experiment["rounds"] < recipe.cells[cell].rounds for run in runs)
        for cell, runs in results.runs.items()
    )


def _num_seeds(name: str) -> int:
    everything = Recorded(frozenset(DATASETS), ())
    return len(RECIPES[recipe_of(name)](Scale("paper", recorded=everything)).seeds)


def _manifest(place: Path) -> Any:
    return json.loads(_text(place / "manifest.json"))
