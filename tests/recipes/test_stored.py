"""Pages drawn from stored runs are those that were drawn after running."""

import json
import lzma
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlens.config.experiment import Experiment
from fedlens.recipes import RECIPES
from fedlens.recipes import store as store_of
from fedlens.recipes.page import opening
from fedlens.recipes.recipe import Recorded, Results, Scale
from fedlens.recipes.reproduce import plan, reproduce
from fedlens.recipes.store import file_of, pack, read_index, runs_of
from fedlens.recipes.stored import keep, redraw, restore, take
from fedlens.report.blocks import Table, Text
from fedlens.runs.records import Run
from fedlens.storage.tables import to_toml

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
    """Run folders without models."""
    runs = shutil.copytree(done.page.parent / "runs", tmp_path / "stored")
    for place in runs.iterdir():
        (place / "model.safetensors").unlink()
    return runs


@pytest.fixture
def store(done, tmp_path):
    """A store with an index."""
    place = tmp_path / "store"
    count = sum(map(len, done.results.runs.values()))
    assert keep(place, NAME, done.results, ["local.lr=0.1"], "5fd728f") == count
    return place


def shown(done):
    return [block for block in done.blocks if block.title != "What was run"]


def test_a_page_from_records_shows_what_the_first_one_did(done, stored, tmp_path):
    again = redraw(NAME, "smoke", stored, tmp_path / "page")
    assert shown(again) == shown(done)
    assert again.page == tmp_path / "page" / "report.html"
    opening = next(block for block in again.blocks if isinstance(block, Text))
    assert f"Drawn from the records in {stored}" in " ".join(opening.paragraphs)
    assert not (tmp_path / "page" / "runs").exists()


def test_packed_runs_have_all_that_a_page_needs_in_the_digits_that_are_kept(done, store):
    file = file_of(store, f"{NAME}-lr-0.1")
    for cell, runs in restore(NAME, "smoke", file)[1].runs.items():
        for run, before in zip(runs, done.results.runs[cell], strict=True):
            assert (run.summary, run.partition) == (before.summary, before.partition)
            assert run.experiment == before.experiment
            own = {k: v for k, v in before.evaluation.items() if k != "calibration"}
            assert run.evaluation == own  # that is of a model, which is not stored
            assert run.manifest == before.manifest | {
                "revision": before.manifest["revision"] or "5fd728f"
            }
            for record, whole in zip(run.rounds, before.rounds, strict=True):
                assert whole.keys() - record.keys() == {"seconds", "evaluation_seconds"}
                for key, value in record.items():
                    assert value == pytest.approx(whole[key], rel=1e-5), key


def test_one_run_twice_is_stored_once_and_a_store_grows_to_the_same_bytes(done, tmp_path):
    parts = [
        Results(
            done.results.scale, {cell: runs[n : n + 1] for cell, runs in done.results.runs.items()}
        )
        for n in range(2)
    ]
    for order in ("01", "10"):
        for n in map(int, order):
            keep(tmp_path / order, NAME, parts[n], ["local.lr=0.1"])
    files = [file_of(tmp_path / order, f"{NAME}-lr-0.1") for order in ("01", "10")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert read_index(tmp_path / "01") == read_index(tmp_path / "10")
    recipe = RECIPES[NAME](Scale("smoke"))
    name, item = "fedavg-cifar10/other", f"{NAME}-lr-0.1"
    runs = {f"as {cell}": of_cell for cell, of_cell in done.results.runs.items()}
    pack(tmp_path / "01", name, name, recipe, runs, command="made")
    assert not file_of(tmp_path / "01", name).exists()
    kept = read_index(tmp_path / "01")[name].runs
    assert {(one.item, one.cell) for one in kept} == {(item, f"as {one.as_cell}") for one in kept}
    assert runs_of(tmp_path / "01", name).keys() == runs.keys()


def test_runs_with_other_settings_are_stored_only_as_such(done, store, tmp_path):
    assert read_index(store).keys() == {f"{NAME}-lr-0.1"}
    with pytest.raises(ValueError, match="add it to the command"):
        keep(tmp_path / "other", NAME, done.results, [])
    assert not (tmp_path / "other").exists()


def test_what_a_store_has_is_not_run_again(done, store, tmp_path):
    again = plan(NAME, "smoke", tmp_path / "out", seeds=2, overrides=["local.lr=0.1"])
    take(store, again, ["local.lr=0.1"])
    assert not again.left
    other = plan(NAME, "smoke", tmp_path / "other", seeds=2, overrides=["local.lr=0.2"])
    take(store, other, ["local.lr=0.1"])
    assert len(other.left) == len(other.cells)  # these are other experiments


def packed_again(file, change):
    """A packed file after `change` of what is in it."""
    content = json.loads(lzma.decompress(file.read_bytes()))
    change(content)
    file.write_bytes(lzma.compress(json.dumps(content).encode()))


def set_first(*keys, to):
    def change(content):
        inner = content["runs"][0]
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (set_first("columns", "test_accuracy", to=2.0), "from 0 to 1"),
        (set_first("columns", "test_accuracy", to="high"), "numbers"),
        (set_first("summary", "final", "test_accuracy", to="high"), "from 0 to 1"),
        (set_first("columns", "train_loss", to=[1.0]), "train_loss|shorter"),
        (set_first("num_rounds", to=10**9), "more than"),
        (set_first("num_rounds", to=-1), "read"),
        (set_first("evaluations", to=[{"at": [10**6], "columns": {"a": 1}}]), "read"),
        (set_first("manifest", "seed", to="0"), "seed"),
        (set_first("experiment", to="dataset = ["), "experiment"),
        (set_first("partition", to=3), "partition"),
        (lambda content: content.update(runs=[1]), "table"),
        (lambda content: content.update(recipe="ghaemi/fedavg"), "ghaemi/fedavg"),
    ],
)
def test_a_packed_file_with_anything_else_in_it_is_refused_in_a_line(store, tmp_path, change, word):
    file = file_of(store, f"{NAME}-lr-0.1")
    packed_again(file, change)
    with pytest.raises(ValueError, match=word) as told:
        redraw(NAME, "smoke", file, tmp_path / "page")
    assert len(str(told.value).splitlines()) == 1
    assert not (tmp_path / "page").exists()


def test_a_file_that_unpacks_to_more_than_memory_should_hold_is_refused(store, monkeypatch):
    file = file_of(store, f"{NAME}-lr-0.1")
    whole = file.read_bytes()
    for content, word in (
        (lzma.compress(bytes(store_of.LARGEST_CONTENT + 1), preset=0), "unpacks to more"),
        (whole[:-20], "cut off"),
        (whole + b"more", "after its end"),
        (b"no xz", "read"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=word):
            restore(NAME, "smoke", file)
    monkeypatch.setattr(store_of, "LARGEST_FILE", 100)
    file.write_bytes(whole)
    with pytest.raises(ValueError, match="more than 100"):
        restore(NAME, "smoke", file)


def test_an_index_that_names_files_elsewhere_is_refused(store):
    index = json.loads((store / "index.json").read_text())
    index[NAME] = index.pop(f"{NAME}-lr-0.1")
    index[NAME]["runs"][0]["item"] = "../../etc"
    (store / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no name of an item"):
        restore(NAME, "smoke", store)


@pytest.mark.parametrize("table", ["local", "evaluate", ""])
def test_no_code_that_records_name_is_imported(stored, tmp_path, monkeypatch, table):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    named: dict[str, dict[str, Any]] = {
        "local": {"lr": "evil:net"},
        "evaluate": {"metrics": ["evil:net"]},
    }
    for place in stored.iterdir():
        file = place / "experiment.toml"
        tables = tomllib.loads(file.read_text())
        into = tables[table] if table else tables
        into.update(named.get(table, {"model": "evil:net"}))
        file.write_text(to_toml(tables))
    with pytest.raises(ValueError, match="code of its own, evil:net"):
        redraw(NAME, "smoke", stored, tmp_path / "page")


def test_nothing_in_records_moves_the_cursor(stored, tmp_path, fedlens):
    for place in stored.iterdir():
        file = place / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "\x1b[2J"}))
    status, out, err = fedlens(
        "reproduce", NAME, "--scale", "smoke", "--from", stored, "--out", tmp_path / "page"
    )
    assert status == 0 and "\\x1b[2J" in out
    assert "\x1b" not in out + err


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
    with pytest.raises(ValueError, match="--scale smoke"):
        redraw(NAME, "small", stored, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_runs_of_another_item_that_are_called_alike_are_refused(tmp_path):
    reproduce("fedns/table2", "smoke", tmp_path / "other")
    for place in (tmp_path / "other" / "runs").iterdir():
        file = place / "experiment.toml"
        file.write_text(file.read_text().replace("fashion-mnist-mini", "cifar10"))
    with pytest.raises(ValueError, match="cifar10"):
        redraw("fedns/table1", "smoke", tmp_path / "other", tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_a_seed_is_not_counted_twice(stored, tmp_path):
    name = "lambda-rule-high-3-a-round"
    shutil.copytree(stored / f"{name}-seed0", stored / name)
    with pytest.raises(ValueError, match=f"{name} and .*{name}-seed0 have one seed: take one"):
        redraw(NAME, "smoke", stored, tmp_path / "page")


def test_a_folder_with_runs_of_another_item_is_refused(stored, tmp_path):
    one = next(stored.iterdir())
    shutil.copytree(one, stored / "cifar10-centralised")
    with pytest.raises(ValueError, match="cifar10-centra"):
        redraw(NAME, "smoke", stored, tmp_path / "page")


def test_figure_8_is_not_drawn_from_a_folder_of_figure_4(tmp_path):
    """They have one run in common, centralised training: without a refusal it alone is drawn."""
    reproduce("hsu2020/figure4", "smoke", tmp_path / "figure4")
    with pytest.raises(ValueError, match="none of hsu2020/figure8"):
        redraw("hsu2020/figure8", "smoke", tmp_path / "figure4", tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_a_table_of_data_sets_has_the_rows_whose_data_records_have(monkeypatch):
    """The data need not be here."""
    monkeypatch.setattr(Scale, "holds", lambda *_: False)
    papers = Path(__file__).parents[2] / "results" / "papers"
    recipe, results = restore("hsu2020/table1", "paper", papers)
    (table,) = [block for block in recipe.blocks(results) if isinstance(block, Table)]
    assert {row[0]: row[-1] != "–" for row in table.rows}["CIFAR-10"]
    for name, other in (("table1", "ghaemi/centralised"), ("figure8", "hsu2020/figure4")):
        with pytest.raises(ValueError, match=f"runs of {other}"):
            restore(f"hsu2020/{name}", "paper", file_of(papers, other))


def test_records_say_which_data_and_weights_there_were(tmp_path):
    recorded = Recorded(frozenset({"cifar10"}), ("/there/resnet18-f37072fd.pth",))
    scale = Scale("paper", tmp_path, recorded)
    assert scale.dataset("cifar10") == "cifar10"
    assert scale.weights("resnet18") == "/there/resnet18-f37072fd.pth"
    assert scale.weights("mobilenet_v2") is None
    with pytest.raises(ValueError, match="no run on femnist"):
        scale.dataset("femnist")


def test_the_records_that_are_read_are_counted(stored):
    told = []
    restore(NAME, "smoke", stored, watch=lambda *about: told.append(about))
    total = len(list(stored.glob("*/experiment.toml")) or list(stored.glob("runs/*/")))
    assert told == [(done, total, "reading records") for done in range(1, total + 1)]
