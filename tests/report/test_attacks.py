"""Attacks beside defences: the page, its numbers, and `fedlens attack` as people call it."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedlens.cli.attack import cells_of
from fedlens.config.experiment import Experiment
from fedlens.report.attacks import Board, Detection, detection
from fedlens.report.blocks import Heat
from fedlens.runs.records import Run, read

# typer 0.20 asks click for names that click is about to drop.
COMMAND_LINE = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")

EXPERIMENT = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 2
engine = "stacked"
algorithm = ["fedavgm", { name = "krum", byzantine = 1, keep = 3 }]
attack = { name = "backdoor", clients = 2, share = 1.0 }

[clients]
count = 8

[local]
lr = 0.05
steps = 2
"""


def a_run(accuracy: float, status: str = "finished", **more: Any) -> Run:
    rounds = [{"round": 1, "test_accuracy": accuracy, **more.pop("record", {})}]
    return Run(
        name="a",
        folder=Path(),
        experiment=more.pop("experiment", {}),
        toml="",
        manifest={"classes": ["a", "b", "c", "d"], "seed": 0},
        rounds=rounds,
        summary={"status": status, "final": {"test_accuracy": accuracy}, **more},
        partition=None,
    )


def test_the_worst_attack_of_each_defence_is_framed_and_told_in_one_sentence():
    board = Board(
        {
            ("", ""): [a_run(0.9), a_run(0.8)],
            ("alie", ""): [a_run(0.7), a_run(0.7)],
            ("ipm", ""): [a_run(0.9, "diverged"), a_run(0.3)],
            ("", "krum+nnm"): [a_run(0.8), a_run(0.8)],
            ("alie", "krum+nnm"): [a_run(0.6), a_run(0.5)],
            ("ipm", "krum+nnm"): [a_run(0.7), a_run(0.7)],
        }
    )
    assert board.accuracies("ipm", "") == [0.25, 0.3]  # a run that diverged guesses
    matrix = board.blocks()[0]
    assert isinstance(matrix, Heat)
    assert matrix.column_names == ["no attack", "alie", "ipm"]
    assert matrix.best == {(0, 2), (1, 1)}
    assert board.verdict() == (
        "Krum with nnm keeps most under its worst attack: 55.0% by alie; without a defence it is "
        "27.5% by ipm. When nobody attacks it costs 5.0 points."
    )


def test_dropped_is_who_counts_less_than_half_and_hostile_who_the_summary_says():
    record = {"clients": [3, 0, 2, 1], "trust": [0.5, 0.12, 0.13, 0.0]}
    attacked = {"attack": "alie"}
    seen = detection([a_run(0.5, experiment=attacked, hostile=[1], record=record)])
    assert seen == Detection(honest=3, honest_dropped=1, hostile=1, hostile_dropped=1)
    assert (seen.precision, seen.recall) == (0.5, 1.0)
    assert detection([a_run(0.5, experiment=attacked, record=record)]) is None  # drawn anew
    assert detection([a_run(0.5, experiment=attacked, hostile=[1])]) is None
    nobody = detection([a_run(0.5, record=record)])
    assert nobody is not None and nobody.recall is None and nobody.hostile == 0


def test_a_file_keeps_its_say_and_other_defences_are_told_how_many_are_hostile(tmp_path):
    (tmp_path / "a.toml").write_text(EXPERIMENT)
    base = Experiment.read(tmp_path / "a.toml")
    cells = cells_of(base, ["alie", "backdoor"], ["krum", "mda+nnm", "trimmed-mean"])
    assert len(cells) == 3 * 4
    assert cells["", ""].attack is None
    assert [one.name for one in cells["alie", ""].algorithm] == ["fedavgm"]
    krum = cells["alie", "krum"]
    assert krum.algorithm[1].options == {"byzantine": 1, "keep": 3}
    assert krum.attack is not None and krum.attack.options["clients"] == 2
    told = [one.options.get("byzantine") for one in cells["", "mda+nnm"].algorithm]
    assert told == [None, 2, 2]
    assert cells["", "trimmed-mean"].algorithm[1].options["share"] == 0.25
    backdoor = cells["backdoor", "krum"].attack
    assert backdoor is not None and backdoor.options["share"] == 1.0


@pytest.fixture
def command(tmp_path, monkeypatch, capsys, quick_pages):
    from fedlens.cli import main as cli

    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(EXPERIMENT)

    def called(*words):
        monkeypatch.setattr(sys, "argv", ["fedlens", "attack", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return called


@COMMAND_LINE
def test_the_command_writes_runs_and_a_page_and_goes_on_where_it_stopped(command):
    words = (
        "a.toml",
        "--attacks",
        "sign-flip,backdoor",
        "--defences",
        "krum",
        "--seeds",
        "1",
        "-q",
    )
    code, out, _ = command(*words)
    assert code == 0 and "plain mean" in out and "report: runs/attack-a/report.html" in out
    folder = Path("runs/attack-a")
    assert read(folder / "sign-flip,krum,seed=0").summary["hostile"]
    assert "hostile" not in read(folder / "no-attack,krum,seed=0").summary
    with (folder / "figures/accuracy_under_attack.csv").open() as file:
        rows = [*csv.reader(file)]
    assert rows[0][1:] == ["no attack", "sign-flip", "backdoor"] and len(rows) == 3
    assert (folder / "figures/success.csv").exists()
    with (folder / "figures/detection.csv").open() as file:
        assert [row["attack"] for row in csv.DictReader(file)] == [
            "no attack",
            "sign-flip",
            "backdoor",
        ]
    code, out, _ = command(*words, "--json")  # nothing is run again
    found = json.loads(out)
    assert code == 0 and found["defences"]["krum"]["worst"] in ("sign-flip", "backdoor")


@COMMAND_LINE
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--attacks", "alien"), "alie"),
        (("--defences", "krum,krum"), "each once"),
        (("--defences", "fedprox"), "--defences"),
        (("--seeds", "0"), "--seeds"),
        (("--defences", "bulyan", "attack.clients=3"), "choose at most 1"),
    ],
)
def test_a_mistake_is_one_line(command, words, said):
    code, out, err = command("a.toml", *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and said in err
