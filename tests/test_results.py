"""What results/ says of the papers is what is stored of them."""

import csv
import itertools
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest

from fedlens.config.experiment import Experiment
from fedlens.config.names import DATASETS
from fedlens.recipes import RECIPES, slug
from fedlens.recipes.findings.items import ENDS
from fedlens.recipes.hsu2020 import setting
from fedlens.recipes.hsu2020.cifar import CENTRALISED, DIVERGED, best, chosen
from fedlens.recipes.recipe import (
    Recipe,
    Recorded,
    Results,
    Scale,
    _last_quarter,
    with_settings,
)
from fedlens.recipes.reproduce import blocks_of
from fedlens.recipes.store import file_of, item_of, lay_out, read_index
from fedlens.recipes.stored import keep, restore
from fedlens.report.blocks import Curves, Table, is_drawn
from fedlens.report.draw import LONGEST_TITLE
from fedlens.report.page import distinct
from fedlens.report.pairs import estimate
from fedlens.runs.records import at_batches, at_rounds, read, settings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAPERS = RESULTS / "papers"
INDEX = read_index(PAPERS)
SHORTER = {"hsu2020/table2"}  # its runs may end before its batch budgets are spent


@cache
def restored(name: str) -> tuple[Recipe, Results]:
    item = INDEX[name]
    return restore(item.recipe, "paper", PAPERS if item.recipe == name else file_of(PAPERS, name))


def settings_of(name: str) -> list[str]:
    """The settings, as key=value, that the runs of an item have in place of the recipe's."""
    return [word for word in INDEX[name].command.split() if "=" in word]


def rows_of(name: str) -> list[list[str]]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [*csv.reader(file)][1:]


class Row(NamedTuple):
    """A line of results/published.csv."""

    paper: str
    row: str
    theirs: str
    ours: str
    n: str
    item: str
    difference: str


PUBLISHED = [Row(*cells) for cells in rows_of("published")]
ITEMS = sorted({row.item for row in PUBLISHED})
SPREAD = r"\d+\.\d+ ± \d+\.\d+"


@cache
def shown(item: str) -> dict[str, set[str]]:
    """What the page of an item prints of ours, and what its runs end with: over how many runs
    (empty: it does not say)."""
    if item in INDEX:
        recipe, results = restored(item)
    else:  # nothing is trained for it
        scale = Scale("paper")
        recipe, results = RECIPES[item](scale), Results(scale, {})
    tables = [block for block in recipe.blocks(results) if isinstance(block, Table)]
    cells = [str(cell) for one in tables for row in one.rows for cell in row]
    ends = [end for cell in results.runs if (end := results.final(cell))]
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
    for row in PUBLISHED:
        if row.item == item:
            alone = re.findall(r"\d+\.\d+", row.ours) if row.n == "1" else []
            for value in (*re.findall(SPREAD, " ".join(row)), *alone):
                assert value in found, row
            for value in re.findall(SPREAD, row.ours):
                assert found[value] & {row.n, ""}, row


PAIRED = re.compile(r"([+−]\d+\.\d+) \((?:95% interval )?(−?\d+\.\d+) to (−?\d+\.\d+)[,)](?! corr)")


@cache
def read_outs(item: str) -> dict[str, dict[str, dict[int, float]]]:
    """Test accuracies in percent: by what is read, cell and seed."""
    _, results = restored(item)
    found: dict[str, dict[str, dict[int, float]]] = {}
    for cell, runs in results.runs.items():
        for run in runs:
            ends = {"end": run.final("test_accuracy"), "late": fmean(_last_quarter(run))}
            of_paper_2 = item.startswith("hsu2020/")
            for at, budgets in ((at_rounds, setting.rounds), (at_batches, setting.batches)):
                numbers = (5000, *budgets(Scale("paper"))) if of_paper_2 else ()
                ends |= {f"{at} {n}": at(run.rounds, [n])[n] for n in numbers}
            for what, value in ends.items():
                if value is not None:
                    by_seed = found.setdefault(what, {}).setdefault(cell, {})
                    by_seed[run.manifest["seed"]] = 100 * value
    return found


def is_of(paired: tuple[str, ...], item: str, other: str) -> bool:
    """Whether two cells of two items differ by this, with this 95% interval."""
    claim = [float(word.replace("−", "-")) for word in paired]
    half = 0.51 * 10.0 ** -len(paired[0].partition(".")[2])
    for what, cells in read_outs(item).items():
        others = read_outs(other).get(what, {})
        for a, b in itertools.product(cells.values(), others.values()):
            both = a.keys() & b.keys()
            mean = fmean(a[seed] - b[seed] for seed in both) if len(both) > 1 else math.nan
            if abs(mean - claim[0]) < half and a is not b:
                of_it = estimate([a[seed] - b[seed] for seed in both])
                assert of_it.low is not None and of_it.high is not None
                if np.allclose((of_it.low, of_it.high), claim[1:], rtol=0, atol=half):
                    return True
    return False


@pytest.mark.parametrize("row", [row for row in PUBLISHED if PAIRED.search(row.difference)])
def test_every_paired_difference_is_one_that_the_stored_runs_give(row):
    paper = row.item.partition("/")[0]
    items = [row.item, *(item for item in INDEX if item.startswith(f"{paper}/"))]
    for paired in PAIRED.findall(row.difference):
        assert any(is_of(paired, row.item, item) for item in items), paired


def test_of_every_published_number_it_is_said_where_ours_differs():
    for row in PUBLISHED:
        assert row.difference or row.theirs == "–", row


def test_the_tables_of_the_readme_are_those_of_the_records():
    tool = [sys.executable, str(ROOT / "tools" / "results_tables.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_every_number_that_paper_2_has_in_a_table_stands_there(number):
    table = setting.PUBLISHED[f"table{number}"]
    parts = table.values() if number == 2 else [table]
    rows = [*PUBLISHED, *rows_of("unanswered")]
    said = " ".join(" ".join(cells) for cells in rows)
    for row in itertools.chain.from_iterable(part.values() for part in parts):
        for value in row:
            assert re.search(rf"(?<![\d.]){re.escape(str(value))}(?![\d.])", said), value


@pytest.mark.parametrize("name", INDEX)
def test_no_title_of_a_figure_would_be_cut(name):
    drawn = filter(is_drawn, distinct(blocks_of(*restored(name))))
    assert all(len(block.title) <= LONGEST_TITLE for block in drawn)


@pytest.mark.parametrize("name", INDEX)
def test_stored_runs_have_the_settings_of_their_cells(name):
    """Apart from seeds; keys that there were not yet have their defaults."""
    recipe, results = restored(name)
    recipe = with_settings(recipe, settings_of(name))
    unlike = {"seed"}
    if name in SHORTER:
        unlike |= {"rounds", "evaluate.at"}
    for cell, runs in results.runs.items():
        wanted = settings(recipe.cells[cell].plain())
        for run in runs:
            found = settings(run.experiment)
            filled = settings(Experiment.of(run.experiment).plain())
            assert found.keys() <= filled.keys() == wanted.keys(), run.folder
            assert found["rounds"] <= wanted["rounds"], run.folder
            for key in wanted.keys() - unlike:
                assert wanted[key] == filled[key], (run.folder, key)


def test_stored_runs_laid_out_as_folders_are_packed_again_to_the_same_bytes(tmp_path):
    name = "ghaemi/centralised"
    folder = tmp_path / "runs"
    for cell, runs in restored(name)[1].runs.items():
        for run in runs:
            place = folder / f"{slug(cell)}-seed{run.manifest['seed']}"
            lay_out(run, place)
            assert read(place).rounds == run.rounds
    again = restore(name, "paper", folder)[1]
    assert keep(tmp_path / "store", name, again, []) == len(INDEX[name].runs) == 6
    assert file_of(tmp_path / "store", name).read_bytes() == file_of(PAPERS, name).read_bytes()
    assert read_index(tmp_path / "store") == {name: INDEX[name]}


def test_figure_4_takes_what_the_stored_pilot_picks():
    results = restored("hsu2020/figure4-pilot")[1]
    picked = best(results)
    rates = {dataset: found.pop(CENTRALISED) for dataset, found in picked.items()}
    assert all(chosen(dataset, CENTRALISED) == list(rate) for dataset, rate in rates.items())
    assert len(picked["cifar10"]) == 8
    for dataset, by_alpha in picked.items():
        for alpha, by_base in by_alpha.items():
            for base, point in by_base.items():
                assert chosen(dataset, alpha, base) == pytest.approx(point), (alpha, base)


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


@pytest.mark.parametrize("name", [name for name in INDEX if name.startswith("findings/")])
def test_what_findings_compare_stands_on_their_page_with_corrected_intervals_and_n(name):
    """All tables of a finding that have intervals, row by row."""
    said = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/findings*.md"))
    recipe, results = restored(name)
    rows = [
        [str(cell) for cell in row]
        for block in recipe.blocks(results)
        if isinstance(block, Table) and block.header[-1] == "n" and block.title != ENDS
        for row in block.rows
    ]
    assert rows
    for row in rows:
        whole, short = f"| {' | '.join(row)} |", f"{row[1]} ({row[2]})"
        assert whole in said or (short in said and int(row[-1]) == 10), row


def test_there_are_as_many_runs_as_the_front_page_says():
    """A run that several items have in common is one."""
    said = re.search(r"more than (\d+) runs", (ROOT / "README.md").read_text(encoding="utf-8"))
    own = [kept for item in INDEX.values() for kept in item.runs if not kept.item]
    assert said is not None and len(own) > int(said[1])


@pytest.mark.parametrize("name", INDEX)
def test_the_index_says_how_much_of_an_item_was_run_and_by_what(name):
    item, (recipe, results) = INDEX[name], restored(name)
    every = RECIPES[item.recipe](Scale("paper", recorded=Recorded(frozenset(DATASETS), ())))
    assert name == item_of(item.recipe, settings_of(name))
    assert (item.experiments, item.of) == (len(results.runs), len(recipe.cells))
    assert (item.seeds, item.of_seeds) == (len(recipe.seeds), len(every.seeds))
    runs = {
        (cell, run.manifest["seed"]): run for cell in results.runs for run in results.runs[cell]
    }
    assert {(kept.cell, kept.seed) for kept in item.runs} == runs.keys()
    for kept in item.runs:
        run = runs[kept.cell, kept.seed]
        assert run.experiment["rounds"] == kept.rounds
        assert run.manifest["revision"] == kept.revision
    cut = [
        c
        for c in recipe.cells
        if any(
            r.num_rounds < recipe.cells[c].rounds for r in results.runs[c] if r.status == "finished"
        )
    ]
    assert len(cut) == item.shorter and (not cut or name in SHORTER)
