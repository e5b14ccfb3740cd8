"""`fedlens reproduce` with several tables and figures, as people call it."""

import json
from pathlib import Path

import pytest

from fedlens.recipes import reproduce
from fedlens.recipes.reproduce import Together

# typer 0.20 asks click for names that click is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")

ITEMS = ["fedavg-cifar10/headline", "fedavg-cifar10/figure12"]  # 3 experiments, 2 of them the same
FOLDERS = [Path("reproductions") / f"{item}-smoke" for item in ITEMS]


@pytest.fixture
def command(here, fedlens):
    return lambda *words: fedlens("reproduce", *words, "--scale", "smoke")


def test_every_page_is_told_under_its_name(command):
    alone = [command(item, "--out", item, "-q").out for item in ITEMS]
    status, out, err = command(*ITEMS, "local.lr=0.01", "--out", "two")
    assert status == 0
    assert "2 items: round 1/6" in err and "2 items: round 6/6" in err
    assert "fedavg-cifar10/headline: The tenth of Fashion-MNIST" in err
    assert out.count("This is a smoke test") == 2
    first, second = out.split(f"page: two/{ITEMS[0]}-smoke/report.html\n\n")
    assert second.endswith(f"page: two/{ITEMS[1]}-smoke/report.html\n")
    for item, told, before in zip(ITEMS, (first, second), alone, strict=True):
        assert told.splitlines()[:3] == [item, "", before.splitlines()[0]]
        assert item not in before.splitlines()


def test_json_is_an_object_for_one_item_and_a_list_for_several(command):
    status, out, err = command(*ITEMS, "--json", "--quiet")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert [one["recipe"] for one in told] == ITEMS
    assert [one["page"] for one in told] == [str(folder / "report.html") for folder in FOLDERS]
    assert [len(one["runs"]) for one in told] == [3, 2]
    alone = json.loads(command(ITEMS[1], ITEMS[1], "--json", "--quiet").out)
    assert alone == told[1], "named twice it counts once"
    told = json.loads(command(*ITEMS, "--only", "λ rule", "--json", "--quiet").out)
    assert [one["recipe"] for one in told] == ITEMS[1:], "a list, whatever is left of it"


def test_a_plan_counts_runs_of_all_items_once(command):
    status, out, err = command(*ITEMS, "--plan")
    assert (status, out) == (0, "")
    assert "2 items: 3 runs of 3 to do, about" in err
    assert not Path("reproductions").exists()


def test_items_that_have_no_experiment_of_a_name_are_said(command):
    status, out, err = command(*ITEMS, "--only", "λ rule")
    assert status == 0
    assert f"{ITEMS[0]}: none of its experiments has such a name\n" in err
    assert [folder.exists() for folder in FOLDERS] == [False, True]
    assert out.count("page: ") == 1


@pytest.mark.parametrize("broken", [ITEMS[:1], ITEMS])
def test_a_page_that_cannot_be_drawn_is_said_and_the_others_are_drawn(command, monkeypatch, broken):
    draw = reproduce.draw

    def sometimes(name, *about):
        if name in broken:
            raise ValueError("its runs do not fit")
        return draw(name, *about)

    monkeypatch.setattr(reproduce, "draw", sometimes)
    status, out, err = command(*ITEMS, "--quiet")
    assert status == 1
    assert err == "".join(f"fedlens: {item}: its runs do not fit\n" for item in broken)
    assert out.count("page: ") == len(ITEMS) - len(broken)
    assert command(ITEMS[0], "-q").err == "fedlens: its runs do not fit\n", "one item, as ever"


def test_a_mistake_of_ours_on_one_page_leaves_the_others_and_is_reported(command, monkeypatch):
    draw = reproduce.draw

    def sometimes(name, *about):
        assert name != ITEMS[0]
        return draw(name, *about)

    monkeypatch.setattr(reproduce, "draw", sometimes)
    status, out, err = command(*ITEMS, "--quiet")
    assert (status, out.count("page: ")) == (1, 1)
    assert "AssertionError" in err
    assert err.count("\n") == 1


def test_after_an_interruption_the_same_command_goes_on(command, monkeypatch):
    go_on = Together.run

    def stopped(self, watch):
        def stop(record):
            watch(record)
            if record["done"] == 3:
                raise KeyboardInterrupt

        go_on(self, stop)

    monkeypatch.setattr(Together, "run", stopped)
    status, out, err = command(*ITEMS)
    assert (status, out) == (130, "")
    assert "stopped; run the same command again to go on" in err
    monkeypatch.setattr(Together, "run", go_on)
    status, out, err = command(*ITEMS)
    assert (status, out.count("page: ")) == (0, 2)
    assert "2 items: round 4/6" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((*ITEMS, "fedavg-cifar10/figure21"), "unknown recipe 'fedavg-cifar10/figure21': did you"),
        ((ITEMS[0], "rounds"), "unknown recipe 'rounds': "),
        (("fedns",), "unknown recipe 'fedns': choose from fedns/table1, fedns/table2, "),
        (("rounds=3",), "no table or figure is named: choose from `fedlens list recipes`"),
        ((*ITEMS, "--from", "x"), "--from draws one page, not 2: name one table or figure"),
        ((*ITEMS, "--only", "FedAvg", "--only", "x"), "no experiment is called 'x': there are "),
        ((*ITEMS, "--seeds", 0), "seeds is 0: choose 1 or more"),
        ((*ITEMS, "round=3"), "unknown key 'round': did you mean 'rounds'?"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(command, words, line):
    status, out, err = command(*words)
    assert (status, out) == (2, "")
    assert err.startswith(f"fedlens: {line}")
    assert err.count("\n") == 1
    assert not Path("reproductions").exists()
