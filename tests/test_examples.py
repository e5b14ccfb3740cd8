"""The files in examples/ run as they stand, and do what published settings say."""

import math
from pathlib import Path

import pytest

import fedlens as fl
from fedlens.setup import partition

FOLDER = Path(__file__).parents[1] / "examples"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".toml", ".json"))
ROUNDS = 2


def run_of(path: Path) -> tuple[fl.Experiment, fl.Result]:
    """The experiment in full, and its first rounds with one client in each, of twenty steps."""
    short = ["clients.per_round=1", "engine=sequential", "local.max_steps=20", f"rounds={ROUNDS}"]
    return fl.Experiment.read(path), fl.run(fl.Experiment.read(path, short))


every_example = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


@every_example
def test_its_clients_all_hold_something(path):
    _, _, held = partition(fl.Experiment.read(path))
    assert bool((held.sizes > 0).all())


@every_example
def test_an_example_runs(path):
    described, result = run_of(path)
    assert (result.status, len(result.records)) == ("finished", ROUNDS)
    numbers = [n for record in result.records for n in record.values() if isinstance(n, float)]
    assert numbers and all(map(math.isfinite, numbers))
    assert all(("train_loss" in record) != bool(described.privacy) for record in result.records)
    check = PUBLISHED.get(path.stem)
    if check is not None:
        check(described, result)


def cosine_and_steps(described, result):
    """T is that of the run: the cosine goes over all rounds."""
    start, end = 0.05, 0.0005
    falls = [end + (start - end) * (1 + math.cos(math.pi * t / ROUNDS)) / 2 for t in range(ROUNDS)]
    assert [record["lr"] for record in result.records] == pytest.approx(falls)
    assert [record["batches"] for record in result.records] == [20] * ROUNDS


def decay(described, result):
    assert [record["lr"] for record in result.records] == pytest.approx([0.1, 0.1 * 0.998])
    assert described.scheduled(99)["local.lr"] == pytest.approx(0.1 * 0.998**99)


def three_linear_layers(described, result):
    """28 · 28 pixels to 200, to 200, to 10 classes; AdamW has them."""
    weights = [tuple(t.shape) for name, t in result.model.items() if name.endswith("weight")]
    assert weights == [(200, 784), (200, 200), (10, 200)]
    assert described.local.optimizer.name == "adamw"


def momentum_under_scaffold(described, result):
    assert (described.algorithm[0].name, described.local.momentum) == ("scaffold", 0.9)


PUBLISHED = {
    "adamw": three_linear_layers,
    "cosine-steps": cosine_and_steps,
    "decay": decay,
    "scaffold-momentum": momentum_under_scaffold,
}


def test_every_published_setting_has_its_file():
    assert PUBLISHED.keys() <= {path.stem for path in FILES}


@pytest.mark.slow
def test_the_quickstart_learns_from_its_first_rounds():
    """At 10%, which is chance, a first run looks broken."""
    short = fl.Experiment.read(FOLDER / "quickstart.toml", ["engine=sequential", "rounds=4"])
    assert fl.run(short).final["test_accuracy"] > 0.2
