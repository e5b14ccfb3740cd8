"""Pages drawn from stored runs are those that were drawn after running."""

import gzip
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens.experiment import Experiment
from fedlens.recipes import RECIPES
from fedlens.recipes.page import opening
from fedlens.recipes.recipe import Recorded, Results, Scale
from fedlens.recipes.reproduce import reproduce
from fedlens.recipes.stored import redraw, restore
from fedlens.report.blocks import Table, Text
from fedlens.runs.records import Run

NAME = "fedavg-cifar10/figure18"


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.delenv("FEDLENS_DATA", raising=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("stored") / "out"
    return reproduce(NAME, "smoke", out, seeds=2, overrides=["local.lr=0.1"])


@pytest.fixture
def stored(done, tmp_path):
    """Run folders with packed rounds and no models."""
    shutil.copytree(done.page.parent / "runs", tmp_path / "stored")
    for place in (tmp_path / "stored").iterdir():
        (place / "model.safetensors").unlink()
        rounds = place / "rounds.jsonl"
        (place / "rounds.jsonl.gz").write_bytes(gzip.compress(rounds.read_bytes()))
        rounds.unlink()
    return tmp_path / "stored"


def shown(done):
    return [block for block in done.blocks if block.title != "What was run"]


def test_a_page_from_packed_records_shows_what_the_first_one_did(done, stored, tmp_path):
    again = redraw(NAME, "smoke", stored, tmp_path / "page")
    assert shown(again) == shown(done)
    assert again.page == tmp_path / "page" / "report.html"
    opening = next(block for block in again.blocks if isinstance(block, Text))
    assert f"Drawn from the records in {stored}" in " ".join(opening.paragraphs)
    assert not (tmp_path / "page" / "runs").exists()


def test_the_folder_of_a_reproduction_will_do_too(done, tmp_path):
    assert shown(redraw(NAME, "smoke", done.page.parent, tmp_path / "page")) == shown(done)


def test_what_was_changed_by_hand_stands_on_the_page(done):
    notes = [note for block in done.blocks for note in getattr(block, "paragraphs", ())]
    assert "Not as in the recipe: local.lr=0.1." in notes


def test_when_a_run_was_evaluated_is_no_other_experiment_and_long_lists_are_cut(done):
    """Runs that are part of another item as well were evaluated by its rounds."""

    def as_if(run: Run) -> Run:
        tables = Experiment.of(run.experiment).plain()
        tables["evaluate"] |= {"every": 2, "at": list(range(1, 301))}
        tables["clients"]["partition"]["sizes"] = [1 / 40] * 40
        return replace(run, experiment=tables)

    runs = {cell: [as_if(run) for run in of_cell] for cell, of_cell in done.results.runs.items()}
    scale = done.results.scale
    told = " ".join(opening(RECIPES[NAME](scale), Results(scale, runs)).paragraphs)
    assert "evaluate" not in told
    assert "clients.partition.sizes=[0.025, 0.025, 0.025, ... (40 in all)]" in told


def test_what_was_not_run_is_said_and_the_rest_is_drawn(stored, tmp_path):
    for seed in range(2):
        shutil.rmtree(stored / f"lambda-rule-high-3-a-round-seed{seed}")
    again = redraw(NAME, "smoke", stored, tmp_path / "page")
    opening = next(block for block in again.blocks if isinstance(block, Text))
    assert "Not run yet: λ rule, high, 3 a round." in " ".join(opening.paragraphs)


def test_cells_are_compared_by_the_seeds_that_both_have(done, stored, tmp_path):
    shutil.rmtree(stored / "lambda-rule-high-3-a-round-seed0")
    results = redraw(NAME, "smoke", stored, tmp_path / "page").results
    cell, other = "λ rule, high, 3 a round", "λ rule, low, 3 a round"
    assert [len(results.runs[name]) for name in (cell, other)] == [1, 2]
    assert results.differences(cell, other) == done.results.differences(cell, other)[1:]


def test_mistakes_are_told(stored, tmp_path):
    for name, folder, words in (
        (NAME, tmp_path / "nowhere", "is not a folder"),
        (NAME, tmp_path, "holds no run"),
        ("ghaemi/fedavg", stored, "has no run of ghaemi/fedavg, which would be called"),
        ("ghaemi/samples", stored, "trains nothing"),
        ("hsu2020/figure10", tmp_path, "trains nothing"),
        ("ghaemi/fedavgg", stored, "did you mean"),
    ):
        with pytest.raises(ValueError, match=words):
            redraw(name, "smoke", folder, tmp_path / "page")


def test_records_of_another_scale_are_not_shown_as_this_one(stored, tmp_path):
    with pytest.raises(ValueError, match="has runs of the scale smoke: add --scale smoke"):
        redraw(NAME, "small", stored, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_runs_of_another_item_that_are_called_alike_are_refused(tmp_path):
    reproduce("fedns/table2", "smoke", tmp_path / "other")
    for place in (tmp_path / "other" / "runs").iterdir():
        file = place / "experiment.toml"
        file.write_text(file.read_text().replace("fashion-mnist-mini", "cifar10"))
    with pytest.raises(ValueError, match="trained on cifar10, which is not what fedns/table1 is"):
        redraw("fedns/table1", "smoke", tmp_path / "other", tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_a_seed_is_not_counted_twice(stored, tmp_path):
    name = "lambda-rule-high-3-a-round"
    shutil.copytree(stored / f"{name}-seed0", stored / name)
    with pytest.raises(ValueError, match=f"{name} and .*{name}-seed0 have one seed: take one"):
        redraw(NAME, "smoke", stored, tmp_path / "page")


def test_a_table_of_data_sets_has_the_rows_whose_data_records_have(monkeypatch):
    """Runs of another item serve it, too, if they are called alike; the data need not be here."""
    monkeypatch.setattr(Scale, "holds", lambda *_: False)
    papers = Path(__file__).parents[2] / "results" / "papers"
    recipe, results = restore("hsu2020/table1", "paper", papers / "hsu2020" / "figure4")
    (table,) = [block for block in recipe.blocks(results) if isinstance(block, Table)]
    assert {row[0]: row[-1] for row in table.rows} == {
        "CIFAR-10": "85.22",
        "CIFAR-100": "55.20",
        "iNaturalist-Geo-3k": "–",
    }
    assert "data that are not here, or was not run" in table.caption
    with pytest.raises(ValueError, match="no run on femnist"):
        restore("hsu2020/table1", "paper", papers / "ghaemi" / "centralised")


def test_records_say_which_data_and_weights_there_were(tmp_path):
    recorded = Recorded(frozenset({"cifar10"}), ("/there/resnet18-f37072fd.pth",))
    scale = Scale("paper", tmp_path, recorded)
    assert scale.dataset("cifar10") == "cifar10"
    assert scale.weights("resnet18") == "/there/resnet18-f37072fd.pth"
    assert scale.weights("mobilenet_v2") is None
    with pytest.raises(ValueError, match="no run on femnist"):
        scale.dataset("femnist")


def test_the_records_that_are_read_are_counted(stored, tmp_path):
    told = []
    redraw(NAME, "smoke", stored, tmp_path / "page", watch=lambda *about: told.append(about))
    total = len(list(stored.glob("*/experiment.toml")) or list(stored.glob("runs/*/")))
    reading = [about for about in told if about[2:] == ("reading records",)]
    assert reading == [(done, total, "reading records") for done in range(1, total + 1)]
    assert told[: len(reading)] == reading and len(told) > len(reading)  # figures come after them
