"""The centralised twin: what it is, when it is trained anew, and what a run tells of it."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.core.federation import AT_ONCE
from fedlens.data.partitions.by_draw import Drawn
from fedlens.report import read, report, rows
from fedlens.runs import progress
from fedlens.runs.loop import train as plainly
from fedlens.runs.progress import Watching, all_of
from fedlens.runs.records import Record
from fedlens.runs.twin import accuracy, plain_training, trained, twin
from fedlens.setup import build, partition


@pytest.fixture(autouse=True)
def twins(tmp_path, monkeypatch):
    """Where twins are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedlens" / "twins"


def toy(num_examples=120, num_classes=3):
    """Noisy images of 1x4x4 whose brightness is their label."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(num_examples) % num_classes
    images = torch.randn(num_examples, 1, 4, 4, generator=rng) + labels.view(-1, 1, 1, 1)
    test = fl.Examples(images[:30] + 0.1, labels[:30])
    return fl.Dataset("toy", fl.Examples(images, labels), test, tuple("abc"))


def described(**changes):
    plain = {
        "dataset": toy(),
        "model": "linear",
        "rounds": 4,
        "engine": "sequential",
        "clients": fl.Clients(count=6, per_round=3),
        "local": fl.LocalTraining(batch_size=10, lr=0.05, momentum=0.5),
        "evaluate": fl.Evaluate(twin=True),
    }
    return fl.Experiment(**plain | changes)


def test_the_twin_of_centralised_training_is_that_run():
    local = fl.LocalTraining(batch_size=10, lr=0.05, momentum=0.5, reset=False)
    result = fl.run(described(clients=fl.Clients(count=1), local=local))
    assert result.records[-1]["relative_accuracy"] == 1.0
    central = fl.run(twin(described(clients=fl.Clients(count=1), local=local)))
    assert all(torch.equal(central.model[name], t) for name, t in result.model.items())


HIGH = {"count": 10, "per_round": 3, "partition": {"name": "proportions", "sizes": "high"}}


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, 2),  # 4 rounds x 3 clients x 20 examples, of 120
        ({"local": fl.LocalTraining(epochs=5)}, 10),
        ({"rounds": 7, "clients": fl.Clients(count=6)}, 7),
        ({"rounds": 1, "clients": fl.Clients(count=120, per_round=1)}, 1),
        ({"clients": fl.Clients(count=6, per_round=3, holdout=0.5)}, 2),  # 10 examples, of 60
        ({"algorithm": {"name": "fedvc", "size": 64}, "local": {"batch_size": 32}}, 6),  # 768 / 120
        ({"clients": {"count": 5, "partition": {"name": "fresh", "per_class": 8}}}, 4),  # 480 / 120
        # The client with 91%, 109 examples, stands in 0.91 of the places of a cohort.
        ({"algorithm": {"name": "fedprox", "sampling": "by-size"}, "clients": HIGH}, 10),
        ({"clients": HIGH}, 1),
        # A round is over when so many have arrived, however many train: 24 x 2 x 20, 24 x 20.
        ({"rounds": 24, "algorithm": {"name": "fedbuff", "buffer": 2}}, 8),
        ({"rounds": 24, "algorithm": "fedasync"}, 4),
    ],
)
def test_the_twin_processes_as_many_examples_as_the_clients_of_all_rounds(changes, passes):
    central = twin(described(**changes))
    assert (central.rounds, central.local.epochs) == (passes, 1)
    _, _, held = partition(central)
    assert len(held) == 1


@pytest.mark.parametrize(("name", "all_there_are"), [("fresh", True), ("drawn", False)])
def test_the_twin_has_what_clients_drew_and_all_if_they_go_on_drawing(name, all_there_are):
    clients = fl.Clients(count=3, partition=fl.Named(name, {"per_class": 2}))
    experiment = described(clients=clients)
    _, train, held = partition(experiment)
    drawn = range(len(train)) if all_there_are else sorted(set(held.index.tolist()))
    central = twin(experiment)
    assert partition(central)[2].index.tolist() == list(drawn)
    assert central.rounds == max(round(4 * 3 * 6 / len(drawn)), 1)  # rounds x clients x examples


@pytest.mark.parametrize("name", ["iid", "shifted", "noisy-labels"])
def test_the_twin_trains_on_the_examples_of_its_run_where_they_are(name, monkeypatch):
    options = {"rotation": 30.0} if name == "shifted" else {}
    clients = fl.Clients(count=4, partition=fl.Named(name, options))
    setup = build(described(clients=clients))
    central = []

    def train(setup, watch):
        central.append(setup)
        return plainly(setup, watch)

    monkeypatch.setattr("fedlens.runs.twin.train", train)
    found = trained(setup)
    assert central[0].federation.examples is setup.federation.examples
    assert central[0].parts is setup.parts
    alone = fl.run(twin(described(clients=clients)))  # whose examples are its own
    assert alone.final["test_accuracy"] == found.accuracy


def test_many_clients_of_few_examples_are_asked_for_them_together_and_until_all_are_found(
    monkeypatch,
):
    asked = []

    def holdings(self, round, cohort):
        asked.append(len(cohort))
        return drawn_by(self, round, cohort)

    drawn_by = Drawn.holdings
    monkeypatch.setattr(Drawn, "holdings", holdings)
    count = 20 * AT_ONCE
    partition = fl.Named("drawn", {"per_class": 2})
    made = twin(described(clients=fl.Clients(count=count, per_round=30, partition=partition)))
    assert made.rounds == 4 * 30 * 6 / 120
    # All at once for what they process; and one block, which has all 120, for what is held.
    assert sorted(asked)[-2:] == [AT_ONCE, count]


def test_the_twin_trains_on_nothing_that_clients_are_tested_on():
    setup = build(described(clients=fl.Clients(count=6, per_round=3, holdout=0.3)))
    assert setup.client_tests is not None
    held = plain_training(setup).federation.everyone(0).index.tolist()
    assert sorted(held) == sorted(setup.federation.everyone(0).index.tolist())
    assert not set(held) & set(setup.client_tests.holdings.index.tolist())


def test_the_twin_of_a_file_is_a_file():
    experiment = described(dataset="fashion-mnist-mini")
    central = twin(experiment)
    assert fl.Experiment.of(tomllib.loads(central.toml())) == central


def test_the_twin_is_plain_training_with_the_same_model_and_settings():
    experiment = described(
        seed=7,
        server=fl.Server(lr=0.5),
        algorithm=("fedprox", "fedavgm"),
        clients=fl.Clients(count=6, seed=3, partition=fl.Named("dirichlet", {"alpha": 0.1})),
    )
    central = twin(experiment)
    assert [named.name for named in central.algorithm] == ["fedavg"]
    assert (central.server.lr, central.local.reset, central.evaluate.twin) == (1.0, False, False)
    assert replace(central.local, reset=True) == experiment.local
    first, second = (build(one).network.params for one in (experiment, central))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "clients",
    [
        {"count": 5, "partition": {"name": "proportions", "sizes": "low", "mode": "truncate"}},
        {"count": 4, "partition": {"name": "noisy-labels", "of": "shards", "high": 0.9}},
        {"count": 4, "partition": {"name": "shifted", "rotation": 90.0, "noise": 0.3}, "seed": 5},
    ],
)
def test_the_twin_has_what_all_clients_hold_as_they_see_it(clients):
    experiment = described(clients=clients)
    _, seen, held = partition(experiment)
    _, central, together = partition(twin(experiment))
    assert together.index.tolist() == sorted(held.index.tolist())
    assert torch.equal(central.labels, seen.labels)
    assert torch.equal(central.images, seen.images)


def test_the_twin_is_judged_on_the_same_validation_examples():
    on = fl.Evaluate(on=("train", "validation"), validation=0.3, twin=True)
    experiment = described(evaluate=on)
    parts, central = (build(one).parts for one in (experiment, twin(experiment)))
    assert torch.equal(parts["validation"].images, central["validation"].images)
    result = fl.run(experiment)
    last, found = result.records[-1], result.summary["twin"]["accuracy"]
    assert last["relative_accuracy"] == last["validation_accuracy"] / found


def test_a_twin_is_trained_once_for_all_splits_and_algorithms(twins):
    told: list[Record] = []
    first = fl.run(described(), watch=told.append)
    assert [r.get("twin") for r in told] == [1, 2, None, None, None, None]
    assert all(r["of"] == 2 and r["train_loss"] > 0 for r in told[:2])
    assert told[2:] == first.records
    assert first.summary["twin"]["cached"] is False
    skewed = fl.Clients(count=6, per_round=3, partition=fl.Named("shards"))
    again = fl.run(described(clients=skewed, algorithm="fedprox"), watch=told.append)
    assert told[6:] == again.records
    assert again.summary["twin"] == {**first.summary["twin"], "cached": True}
    (file,) = twins.iterdir()
    kept = json.loads(file.read_text())
    assert kept["records"][-1]["test_accuracy"] == first.summary["twin"]["accuracy"]
    assert accuracy(described()) == first.summary["twin"]["accuracy"]


class Sharp(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.power, self.layer = power, nn.Linear(16, 3)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, images):
        return self.layer(images.flatten(1) ** self.power)

    def extra_repr(self):
        return f"power={self.power}"


def brighter(part):
    dataset = toy()
    changed = getattr(dataset, part)
    images = changed.images.clone()
    images[-1] += 0.01
    return replace(dataset, **{part: replace(changed, images=images)})


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"rounds": 9},
        {"local": fl.LocalTraining(batch_size=10, lr=0.06, momentum=0.5)},
        {"precision": "fp64"},
        {"loss": "double_softmax"},
        {"augment": fl.Augment(flip=True)},
        {"dataset": brighter("train")},
        {"dataset": brighter("test")},
        {"dataset": replace(toy(), mean=(0.1,), std=(1.0,))},
        {"model": Sharp(2)},
        {"clients": fl.Clients(count=6, per_round=3, holdout=0.2)},
    ],
    ids=str,
)
def test_whatever_the_twin_depends_on_makes_another(twins, changes):
    trained(build(described(model=Sharp(1))))
    one = trained(build(described(**{"model": Sharp(1)} | changes)))
    assert not one.cached
    assert len(list(twins.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b'{"records": []}', b"[1]", b"\xff"])
def test_a_damaged_file_is_made_anew(twins, content):
    found = trained(build(described()))
    (file,) = twins.iterdir()
    file.write_bytes(content)
    assert trained(build(described())) == found
    assert trained(build(described())).cached


def test_a_cache_that_cannot_be_written_only_costs_time(twins):
    twins.parent.mkdir(parents=True)
    twins.touch()
    result = fl.run(described())
    assert result.status == "finished"
    assert not fl.run(described()).summary["twin"]["cached"]


def test_evaluated_rounds_and_the_summary_tell_how_near_the_run_came(tmp_path):
    experiment = described(rounds=6, evaluate=fl.Evaluate(every=2, twin=True))
    result = fl.run(experiment, tmp_path / "run")
    written = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in written]
    assert [r["round"] for r in records if "relative_accuracy" in r] == [2, 4, 6]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    best = summary["twin"]["accuracy"]
    for record in records[1::2]:
        assert record["relative_accuracy"] == record["test_accuracy"] / best
    assert summary["final"]["relative_accuracy"] == records[-1]["relative_accuracy"]
    assert summary["best"]["relative_accuracy"]["round"] in (2, 4, 6)
    assert summary["rounds_to"].keys() == {"80", "90", "95", "99"}
    for share, found in summary["rounds_to"].items():
        reached = [r["round"] for r in records[1::2] if r["relative_accuracy"] >= int(share) / 100]
        assert found == (reached[0] if reached else None)
    assert result.summary == summary
    plain = fl.run(replace(experiment, evaluate=fl.Evaluate(every=2)))
    assert not {"twin", "rounds_to"} & plain.summary.keys()
    assert "relative_accuracy" not in plain.final


def test_a_resumed_run_has_the_same_twin(tmp_path):
    def stop(record):
        if record.get("round") == 2:
            raise KeyboardInterrupt

    whole = fl.run(described())
    with pytest.raises(KeyboardInterrupt):
        fl.run(described(), tmp_path / "run", watch=stop)
    resumed = fl.resume(tmp_path / "run", experiment=described())
    told = [r["relative_accuracy"] for r in resumed.records]
    assert told == [r["relative_accuracy"] for r in whole.records]


def test_a_twin_that_diverges_is_told_before_anything_is_written(tmp_path):
    experiment = described(local=fl.LocalTraining(lr=1e38))
    with pytest.raises(ValueError, match="diverged"):
        fl.run(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_twin_needs_something_to_be_compared_on():
    with pytest.raises(ValueError, match=r"evaluate\.on"):
        fl.Evaluate(on=(), twin=True)


def test_progress_says_that_the_twin_is_trained(capsys):
    with progress.in_rounds("a", 4) as watch:
        fl.run(described(), watch=watch)
    first, second, third, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("a: training its centralised twin, pass 1/2  train loss ")
    assert second.startswith("a: training its centralised twin, pass 2/2")
    assert third.startswith("a: round 1/4")


@pytest.mark.usefixtures("quick_pages")
def test_progress_says_how_many_clients_are_counted_and_a_watch_of_ones_own_is_not_told(
    monkeypatch, capsys
):
    monkeypatch.setattr("fedlens.runs.twin.PLANNED", 1)
    monkeypatch.setattr("fedlens.runs.twin.FEWEST", 2)
    records: list[Record] = []
    within: list[Record] = []
    fl.run(described(), watch=all_of(records.append, Watching(within.append)))
    told = [{"planned": 0, "of": 6}, {"planned": 2, "of": 6}, {"planned": 4, "of": 6}]
    assert [record for record in within if "planned" in record] == told
    assert not any("planned" in record for record in records)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    with progress.in_rounds("a", 4) as watch:
        watch(told[0])
    assert capsys.readouterr().err == "a: counting what clients train on, client 0/6\n"


def test_clients_are_counted_from_none_in_what_is_left(monkeypatch, capsys):
    """Two of six in 4 s: the other four take 8."""
    now = [0.0]
    monkeypatch.setattr("fedlens.runs.progress.time.monotonic", lambda: now[0])
    with progress.in_rounds("a", 4) as watch:
        watch({"planned": 0, "of": 6})
        now[0] += 4
        watch({"planned": 2, "of": 6})
    told = "a: counting what clients train on, client 2/6  about 8 s left\n"
    assert capsys.readouterr().err == told


def test_a_report_shows_relative_accuracy_where_it_was_recorded(tmp_path):
    clients = fl.Clients(count=6, per_round=3, holdout=0.3)
    folders = [tmp_path / "with", tmp_path / "without"]
    fl.run(described(clients=clients), folders[0])
    fl.run(described(evaluate=fl.Evaluate()), folders[1])
    header, body = rows([read(folder) for folder in folders])
    place = header.index("relative accuracy")
    assert header[place : place + 3] == [
        "relative accuracy",
        "rounds to 90% of it",
        "worst tenth of clients",
    ]
    assert body[0][place].endswith("%")
    assert body[1][place : place + 3] == ["–", "–", "–"]
    page = report(folders, tmp_path / "out").read_text()
    assert "Line chart of relative accuracy by round. with: " in page
    assert "centralised twin" in page
    assert Path(tmp_path / "out" / "figures" / "relative_accuracy.png").is_file()
    alone = report(folders[1:]).read_text().lower()
    assert "relative accuracy" not in alone
