"""Recipes: each runs, goes on where it stopped, and says what is missing."""

import json
import re
import signal
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedlens as fl
from fedlens.config.experiment import Experiment
from fedlens.recipes import RECIPES
from fedlens.recipes.page import beside, curves, led_by_a_figure, opening
from fedlens.recipes.recipe import Measured, Results, Scale
from fedlens.recipes.reproduce import Together, plan, reproduce, show
from fedlens.recipes.store import STORE
from fedlens.recipes.stored import redraw
from fedlens.report.blocks import Bars, Curves, Table
from fedlens.runs.records import Run
from fedlens.storage.run_files import read_status

ITEMS = {
    "fedavg-cifar10": "headline figure12 figure13 figure14 figure16 figure17 figure18 "
    "architectures fedprox samples",
    "hsu2020": "table1 table2 table3 table4 table5 figure1 figure2 figure3 figure4 figure4-pilot "
    "figure5 figure6 figure7 figure8 figure9 figure10 composed",
    "fedns": "table1 table2 table3 figure1 figure2 figure3",
    "ghaemi": "centralised fedavg fedprox liadmm fedadmm why-liadmm-fails samples",
    "dp": "cifar10-dp-sgd fashion-mnist mnist pfl-cifar10 methods",
    "personal": "pfllib-dir fedrep moon map",
    "attacks": "bucketing byzfl-heat-map methods",
    "findings": "double-softmax step-size lost-data liadmm fedns virtual-clients fedns-network "
    "server-step communication importance traffic",
}


# typer 0.20 asks click for names that click is about to drop.
in_process = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")


pytestmark = pytest.mark.usefixtures("nothing_of_whoever_runs_the_tests")


class Stopped(Exception):
    pass


def test_every_item_of_every_paper_is_there():
    wanted = [f"{paper}/{item}" for paper, items in ITEMS.items() for item in items.split()]
    assert list(RECIPES) == wanted


def test_every_recipe_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\S+/\S+)`", page, re.MULTILINE) == list(RECIPES)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One place for all items, so that what they have in common is run once."""
    return tmp_path_factory.mktemp("reproductions")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_its_page_from_the_embedded_images(name, root):
    done = reproduce(name, "smoke", root / name)
    page = unescape(done.page.read_text(encoding="utf-8"))
    for block in done.blocks:
        assert block.title in page
    assert "None of its numbers can be compared" in page or not done.results.runs
    assert "the place of" in page or name == "hsu2020/figure10", "which needs no images"
    assert len(done.blocks) > 1
    for runs in done.results.runs.values():
        assert all(run.status in ("finished", "diverged") for run in runs)
    recipe, cells = RECIPES[name](done.results.scale), dict(done.results.runs)
    for some in [{cell: cells[cell]} for cell in cells] if len(cells) > 1 else []:
        results = Results(done.results.scale, some)
        told = opening(recipe, results)
        assert f"1 of the {len(cells)} experiments" in " ".join(told.paragraphs)
        for block in led_by_a_figure(recipe.blocks(results), told):
            assert not isinstance(block, Curves) or any(line.x for line in block.lines)
            assert not isinstance(block, Table) or block.rows
            for series in block.series if isinstance(block, Bars) else ():
                assert any(height is not None for height in series.heights)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_describes_the_papers_own_experiments(name, monkeypatch):
    monkeypatch.setattr(Scale, "has", lambda *_: True)
    recipe = RECIPES[name](Scale("paper"))
    for experiment in list(recipe.cells.values())[:20]:
        assert Experiment.of(experiment.plain()) == experiment
        assert experiment.dataset.name != "fashion-mnist-mini"


def test_what_is_done_is_kept_and_an_interrupted_reproduction_goes_on(tmp_path):
    def records(out):
        return [
            [[json.loads(line)[key] for key in ("train_loss", "test_loss")] for line in lines]
            for file in sorted(out.glob("runs/*/rounds.jsonl"))
            if (lines := file.read_text(encoding="utf-8").splitlines())
        ]

    seen = []

    def stop(record):
        seen.append(record["done"])
        if len(seen) == 3:
            raise Stopped

    name = "ghaemi/fedadmm"
    with pytest.raises(Stopped):
        reproduce(name, "smoke", tmp_path / "out", watch=stop)
    left = plan(name, "smoke", tmp_path / "out")
    runs = Together([left])
    assert runs.rounds_done == 3
    assert len(left.left) == len(left.cells) - 1
    reproduce(name, "smoke", tmp_path / "out", watch=lambda record: seen.append(record["done"]))
    assert seen == list(range(1, runs.rounds + 1))
    reproduce(name, "smoke", tmp_path / "elsewhere" / "out")
    assert records(tmp_path / "out") == records(tmp_path / "elsewhere" / "out")


def test_a_run_that_two_items_have_in_common_is_made_once(tmp_path):
    reproduce("fedavg-cifar10/headline", "smoke", tmp_path / "headline")
    watched: list[dict[str, Any]] = []
    reproduce("fedavg-cifar10/figure12", "smoke", tmp_path / "figure12", watch=watched.append)
    assert not watched
    first, again = (
        tmp_path / item / "runs" / run / "manifest.json"
        for item, run in (("headline", "lambda-rule-1000-outputs"), ("figure12", "lambda-rule"))
    )
    assert first.read_text(encoding="utf-8") == again.read_text(encoding="utf-8")


def test_a_folder_of_other_experiments_is_left_alone_unless_told(tmp_path):
    name = "fedavg-cifar10/figure12"
    reproduce(name, "smoke", tmp_path / "out")
    with pytest.raises(ValueError, match="--out"):
        plan(name, "smoke", tmp_path / "out", overrides=["local.lr=0.2"])
    planned = plan(name, "smoke", tmp_path / "out", overrides=["local.lr=0.2"], overwrite=True)
    assert len(planned.left) == 2
    Together([planned]).run()
    assert all(read_status(place) == "finished" for place in planned.cells)
    assert show(planned).page.exists()


def test_some_experiments_make_a_page_and_the_rest_may_follow(tmp_path):
    out, name = tmp_path / "out", "hsu2020/figure4"
    done = reproduce(name, "smoke", out, only=["*, α 0, *"])
    assert list(done.results.runs) == ["cifar10, α 0, FedAvg, K 2", "cifar10, α 0, FedAvgM, K 2"]
    assert "2 of the 5 experiments are here." in unescape(done.page.read_text(encoding="utf-8"))
    again = redraw(name, "smoke", out, tmp_path / "page")
    assert list(again.results.runs) == list(done.results.runs)
    assert len(reproduce(name, "smoke", out).results.runs) == 5


def test_experiments_are_chosen_by_patterns_of_their_names(tmp_path):
    planned = plan("fedns/table1", "smoke", tmp_path / "out", only=["iid, FedNS"])
    assert [place.name for place in planned.left] == ["iid-fedns-seed0", "iid-fedns-seed1"]
    with pytest.raises(ValueError, match="'x'"):
        plan("fedns/table1", "smoke", tmp_path / "out", only=["x"])


def test_experiments_that_are_done_keep_no_checkpoint(tmp_path):
    reproduce("hsu2020/figure4", "smoke", tmp_path / "out", only=["*, α 0, FedAvg, *"])
    (run,) = (tmp_path / "out" / "runs").iterdir()
    assert not any(run.glob("checkpoint/*"))
    with pytest.raises(ValueError, match="checkpoint"):
        fl.resume(run, rounds=9)
    assert len((run / "rounds.jsonl").read_text().splitlines()) == 2


def test_time_that_runs_spent_side_by_side_is_counted_once(tmp_path):
    done = reproduce("fedavg-cifar10/figure12", "smoke", tmp_path / "out")

    def share(run: Run) -> Run:
        rounds = [row | {"seconds": 10.0, "evaluation_seconds": 2.0} for row in run.rounds]
        return replace(run, rounds=rounds, summary=run.summary | {"seconds": {"total": 48.0}})

    runs = {cell: [share(run) for run in of_cell] for cell, of_cell in done.results.runs.items()}
    assert [len(run.rounds) for (run,) in runs.values()] == [2, 2]
    scale = done.results.scale
    told = opening(RECIPES["fedavg-cifar10/figure12"](scale), Results(scale, runs))
    assert "48 s of training and evaluation in all." in " ".join(told.paragraphs)


def test_seeds_are_as_many_as_asked_for(tmp_path):
    done = reproduce("fedavg-cifar10/figure12", "smoke", tmp_path / "out", seeds=2)
    assert {len(runs) for runs in done.results.runs.values()} == {2}
    found = done.results.final("FedAvg")
    assert found is not None and found.seeds == 2
    assert found.std is not None and found.std > 0
    tables = [block for block in done.blocks if isinstance(block, Table)]
    assert any("±" in str(cell) for table in tables for row in table.rows for cell in row)


def test_missing_data_is_told_with_the_remedy():
    with pytest.raises(ValueError, match="fedlens data get cifar10"):
        plan("fedavg-cifar10/headline", "paper")


def test_small_takes_the_embedded_images_where_the_others_are_not_and_says_so():
    planned = plan("ghaemi/fedavg", "small")
    assert {cell.dataset.name for cell in planned.cells.values()} == {"fashion-mnist-mini"}
    assert "which is not on this machine" in planned.recipe.stand_in


def test_mistakes_are_told():
    mistakes: dict[tuple[str, Any], str] = {
        ("ghaemi/fedavgg", "smoke"): "did you mean 'ghaemi/fedavg'",
        ("ghaemi/fedavg", "tiny"): "scale is 'tiny'",
    }
    for (name, scale), words in mistakes.items():
        with pytest.raises(ValueError, match=words):
            plan(name, scale)
    with pytest.raises(ValueError, match="seeds is 0"):
        plan("ghaemi/fedavg", "smoke", seeds=0)


@pytest.fixture
def fedlens(monkeypatch, capsys, tmp_path):
    """The command, in this process: its status, standard output and standard error."""
    from fedlens.cli import main as cli

    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["fedlens", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    yield command
    signal.signal(signal.SIGTERM, handler)


@in_process
def test_the_command_lists_recipes_one_a_line(fedlens):
    status, out, err = fedlens("list", "recipes")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(RECIPES)


def made_index(**about):
    item: dict[str, Any] = {
        "recipe": "ghaemi/fedavg",
        "command": "fedlens reproduce ghaemi/fedavg --scale paper",
    }
    item |= {"experiments": 1, "of": 5, "seeds": 1, "of_seeds": 3, "shorter": 0, "seconds": 9}
    item |= {"runs": [{"cell": "iid", "seed": 0, "rounds": 80, "revision": "5fd728f"}]} | about
    other = item | {"command": f"{item['command']} local.lr=0.05"}
    STORE.mkdir(parents=True, exist_ok=True)
    index = {"ghaemi/fedavg": item, "ghaemi/fedavg-lr-0.05": other}
    (STORE / "index.json").write_text(json.dumps(index))


@in_process
def test_the_command_says_which_recipes_were_measured(fedlens, here):
    assert "measured" not in fedlens("list", "recipes")[1]  # no checkout is here
    for about, much in (
        ({}, "(1 of 5 experiments, 1 run, 1 of 3 seeds)"),
        ({"experiments": 5}, "(1 run, 1 of 3 seeds)"),
        ({"experiments": 5, "seeds": 3, "shorter": 2}, "(1 run, 2 with fewer rounds)"),
    ):
        made_index(**about)
        marked = [line for line in fedlens("list", "recipes")[1].splitlines() if "measured" in line]
        assert len(marked) == 1 and marked[0].split()[0] == "ghaemi/fedavg"
        assert marked[0].endswith(f"measured: results/papers {much}")


@in_process
def test_the_long_list_says_what_recipes_are_and_how_much_was_measured(fedlens, here):
    made_index(experiments=5, seeds=3)
    status, out, err = fedlens("list", "recipes", "--long")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 2 * len(RECIPES)
    also = "; with other settings: results/papers/ghaemi/fedavg-lr-0.05.json.xz"
    much = "(5 of 5 experiments, 1 run)"
    said = lines.index(f"ghaemi/fedavg  measured: results/papers {much}{also}")
    assert lines[said + 1] == "    FedAvg, section 5.2: iid and non-iid clients over 80 rounds."


@in_process
def test_the_command_draws_a_page_from_stored_runs(fedlens, tmp_path):
    name = "fedavg-cifar10/figure12"
    before = fedlens("reproduce", name, "--scale", "smoke", "--out", "run", "--quiet")[1]
    status, out, err = fedlens(
        "reproduce", name, "--scale", "smoke", "--from", "run", "--out", "it", "--quiet"
    )
    assert (status, err) == (0, "")
    told, before_told = (text.partition("This is a smoke test")[0] for text in (out, before))
    assert told == before_told, "the same tables"
    assert "Drawn from the records in run; nothing was trained" in " ".join(out.split())
    assert out.endswith("page: it/report.html\n")
    status, out, err = fedlens("reproduce", name, "--from", "run", "rounds=3")
    assert status == 2
    assert "--from trains nothing" in err


@in_process
def test_the_command_shows_ours_beside_theirs(fedlens, tmp_path):
    status, out, err = fedlens("reproduce", "fedavg-cifar10/figure12", "--scale", "smoke")
    folder = Path("reproductions/fedavg-cifar10/figure12-smoke")
    assert status == 0
    assert "71.51" in out
    said = " ".join(out.split())
    assert "None of its numbers can be compared with the paper's." in said
    assert "The tenth of Fashion-MNIST inside Fedlens takes the place of cifar10." in said
    assert "takes the place of cifar10" in err, "before anything is trained, too"
    assert out.endswith(f"page: {folder / 'report.html'}\n")
    assert "round 4/4" in err
    status, out, err = fedlens(
        "reproduce", "fedavg-cifar10/figure12", "--scale", "smoke", "--json", "--quiet"
    )
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["page"] == str(folder / "report.html")
    assert [run["cell"] for run in told["runs"]] == ["λ rule", "FedAvg"]


@in_process
def test_the_command_can_only_plan(fedlens):
    status, out, err = fedlens("reproduce", "ghaemi/fedadmm", "--scale", "smoke", "--plan")
    assert (status, out) == (0, "")
    assert "9 runs of 9 to do, about" in err
    assert "takes the place of fashion-mnist" in err
    assert not Path("reproductions").exists()


@in_process
def test_the_command_says_in_a_line_what_data_are_missing(fedlens):
    status, out, err = fedlens("reproduce", "hsu2020/table3", "--scale", "paper")
    assert (status, out) == (2, "")
    assert err.startswith("fedlens: femnist is not in")
    assert err.count("\n") == 1
    assert not Path("reproductions").exists()


def run_of(accuracies: list[float], status: str = "finished") -> Any:
    rounds = list(range(1, len(accuracies) + 1))
    return SimpleNamespace(
        status=status, num_rounds=len(rounds), curve=lambda _: (rounds, accuracies)
    )


def test_a_mean_over_seeds_ends_where_the_first_of_its_runs_diverged():
    """The mean of those that are left would jump, for no reason of theirs."""
    broken = run_of([0.1, 0.1, 0.1], "diverged")
    runs = {"a": [run_of([0.5] * 5), broken], "b": [broken], "c": [run_of([0.5] * 5)] * 2}
    shown = curves(Results(Scale("smoke"), runs), list(runs), title="")
    mean, alone, whole = shown.lines
    assert list(mean.x) == [1, 2] and mean.y == pytest.approx([0.3, 0.3])
    assert [line.note for line in shown.lines] == [*["diverged in round 3"] * 2, ""]
    assert (list(alone.x), list(whole.x)) == ([1, 2, 3], [1, 2, 3, 4, 5])
    assert shown.caption == "A mean over seeds ends where the first of its runs diverged."
    assert not curves(Results(Scale("smoke"), runs), ["b", "c"], title="").caption


def test_numbers_that_are_none_do_not_count():
    assert Measured.of([None, float("nan")]) is None
    assert Measured.of([1.0]) == Measured(1.0, None, 1)
    assert Measured.of([1.0, None, 3.0]) == Measured(2.0, 2**0.5, 2, 3)


def test_a_mean_over_fewer_runs_than_there_are_says_over_how_many():
    def ours(*found: list[float | None]) -> list[object]:
        rows = [("", 0.5, Measured.of(values)) for values in found]
        return [row[2] for row in beside(rows, title="").rows]

    assert ours([0.25, None, None], [0.25, 0.75, None]) == ["25.00 (1)", "50.00 ± 35.36 (2)"]
    assert ours([0.25], [0.25, 0.25, 0.25]) == ["25.00 (1)", "25.00 ± 0.00 (3)"]
    assert ours([0.25], [None]) == ["25.00", "–"], "one run of each"
