import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedlens as fl
from fedlens.setup import build

BASE: dict[str, Any] = {"dataset": "fashion-mnist-mini", "model": "linear", "rounds": 3}
DESIGNED = {
    *("dataset", "model", "rounds", "seed", "engine", "device", "precision", "loss", "augment"),
    *("outputs", "clients.count", "clients.per_round", "clients.partition", "clients.seed"),
    *("local.epochs", "local.batch_size", "local.lr", "local.momentum", "local.weight_decay"),
    *("local.reset", "server.lr", "evaluate.every", "evaluate.on", "algorithm"),
}


def described(*overrides: str, path: Path, **content: Any) -> fl.Experiment:
    file = path / "described.json"
    file.write_text(json.dumps(BASE | content))
    return fl.Experiment.read(file, overrides)


def refusal(*overrides: str, path: Path, **content: object) -> str:
    with pytest.raises(ValueError) as refused:
        described(*overrides, path=path, **content)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_key_below_a_section_that_belongs_above_it_is_told_so(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('dataset = "fashion-mnist-mini"\nmodel = "linear"\n[clients]\nrounds = 5\n')
    with pytest.raises(ValueError, match=r"\[clients\]"):
        fl.Experiment.read(file)


def test_a_key_without_its_section_is_told_with_it():
    with pytest.raises(ValueError, match=r"server\.lr"):
        fl.Experiment.of({"dataset": "fashion-mnist-mini", "model": "lenet5", "lr": 0.1})


def test_three_keys_are_enough_and_the_rest_is_fedavg():
    experiment = fl.Experiment(**BASE)
    assert experiment.algorithm == (fl.Named("fedavg", {"over": "cohort"}),)
    assert experiment.clients.cohort == experiment.clients.count == 10
    assert fl.Experiment.of(BASE) == experiment


def test_every_key_of_the_design_is_there_once_defaults_are_filled_in(tmp_path):
    tables = described(path=tmp_path, outputs=12, clients={"seed": 4}).plain()
    sections = {top: part for top, part in tables.items() if isinstance(part, dict)}
    keys = {f"{top}.{key}" for top, part in sections.items() for key in part}
    assert keys | set(tables) >= DESIGNED


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("round=3", "unknown key 'round': did you mean 'rounds'?"),
        ("local.lrr=1", "unknown key 'local.lrr': did you mean 'lr'?"),
        ("client.count=1", "unknown key 'client': did you mean 'clients'?"),
        ("clients.per_rond=1", "unknown key 'clients.per_rond': did you mean 'per_round'?"),
        ("server.rate=1", "unknown key 'server.rate': choose one of lr"),
        ("evaluate.evry=1", "unknown key 'evaluate.evry': did you mean 'every'?"),
        ("augment.flop=true", "unknown key 'augment.flop': did you mean 'flip'?"),
        ("dataset=fashion-mnist-min", "unknown dataset 'fashion-mnist-min': did you mean"),
        ("dataset.pth=x", "dataset 'fashion-mnist-mini' has no option 'pth': choose one of size"),
        ("model=lenet", "unknown model 'lenet': did you mean 'lenet5'?"),
        ("model.padding=same", "model 'linear' has no option 'padding': it takes none"),
        ("model={name='hsu-cnn', paddin='same'}", "no option 'paddin': did you mean 'padding'?"),
        ("clients.partition=dirichle", "unknown partition 'dirichle': did you mean 'dirichlet'?"),
        ("clients.partition=dirichlet", "partition 'dirichlet' needs 'alpha': set alpha = ..."),
        ("clients.partition={name='dirichlet', alpah=1}", "'alpah': did you mean 'alpha'?"),
        ("algorithm=fedpro", "unknown algorithm 'fedpro': did you mean 'fedprox'?"),
        ("algorithm={name='fedprox', nu=1}", "'fedprox' has no option 'nu': "),
        ("loss=crossentropy", "unknown loss 'crossentropy': did you mean 'cross"),
        ("engine=stackd", "engine is 'stackd': did you mean 'stacked'?"),
        ("precision=fp16", "'fp16': choose one of auto, bf16, fp32, fp64, tf32"),
        ("norm=groups", "norm is 'groups': did you mean 'group'?"),
        ("evaluate.on=tests", "evaluate.on is 'tests': did you mean 'test'?"),
        ("evaluate.on=['test', 'trian']", "evaluate.on is 'trian': did you mean 'train'?"),
    ],
)
def test_an_unknown_name_is_refused_at_every_level_with_the_nearest_one(
    tmp_path, override, message
):
    assert message in refusal(override, path=tmp_path)


@pytest.mark.parametrize(
    "override",
    [
        *("rounds=0", "rounds=-1", "rounds=1.5", "rounds=ten", "rounds=true", "rounds=[3]"),
        *("seed=-1", "seed=0.5", "clients.seed=-1", "clients.seed=x", "outputs=0", "outputs=x"),
        *("clients.count=0", "clients.count=-2", "clients.count=2.0", "clients=5"),
        *("clients.per_round=0", "clients.per_round=-1", "clients.per_round=11"),
        *("clients.per_round=0.0", "clients.per_round=1.01", "clients.per_round=nan"),
        *("clients.per_round=inf", "clients.per_round=true", "clients.per_round=half"),
        *("clients.holdout=1", "clients.holdout=-0.1", "clients.holdout=nan"),
        *("clients.partition=3", "clients.partition={alpha=1}"),
        *("local.epochs=0", "local.epochs=-2", "local.batch_size=0", "local.batch_size=inf"),
        *("local.lr=-0.1", "local.lr=inf", "local.lr=nan", "local.lr=fast", "local.lr=true"),
        *("local.momentum=-1", "local.momentum=nan", "local.weight_decay=inf", "local.reset=1"),
        *("server.lr=-1", "server.lr=nan", "server.lr=inf", "server=fast"),
        *("evaluate.every=0", "evaluate.validation=0", "evaluate.validation=1", "evaluate.on=3"),
        *("augment.crop=-1", "augment.crop=1.5", "augment.crop=x", "augment.flip=yes"),
        *("device=3", "deterministic=yes", "algorithm=3", "algorithm=[3]", "dataset=3", "model=3"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_key(tmp_path, override):
    key = override.partition("=")[0]
    message = refusal(override, path=tmp_path)
    assert key.rpartition(".")[2] in message.partition(":")[0], message
    assert ": " in message


@pytest.mark.parametrize(("missing"), ["dataset", "model", "rounds"])
def test_what_must_be_given_is_asked_for(missing):
    content = {key: value for key, value in BASE.items() if key != missing}
    with pytest.raises(ValueError, match=f"needs '{missing}': set {missing} = ..."):
        fl.Experiment.of(content)


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("rounds=7", lambda e: e.rounds == 7),
        ("seed=5", lambda e: e.seed == 5),
        ("engine=stacked", lambda e: e.engine == "stacked"),
        ("device='cpu'", lambda e: e.device == "cpu"),
        ("precision=fp64", lambda e: e.precision == "fp64"),
        ("deterministic=true", lambda e: e.deterministic),
        ("augment.crop=4", lambda e: e.augment == fl.Augment(crop=4)),
        ("augment={flip=true}", lambda e: e.augment == fl.Augment(flip=True)),
        ("outputs=1000", lambda e: e.outputs == 1000),
        ("norm=group", lambda e: e.norm == "group"),
        ("model=lenet5", lambda e: e.model == fl.Named("lenet5")),
        ("model={name='hsu-cnn', padding='same'}", lambda e: e.model.options["padding"] == "same"),
        ("clients.count=99", lambda e: e.clients.count == 99),
        ("clients.per_round=0.29", lambda e: e.clients.per_round == 0.29),
        ("clients.per_round=1", lambda e: e.clients.cohort == 1),
        ("clients.per_round=1.0", lambda e: e.clients.cohort == 10),
        ("clients.partition=shards", lambda e: e.clients.partition.name == "shards"),
        ("clients.seed=3", lambda e: e.clients.seed == 3),
        ("clients.holdout=0.2", lambda e: e.clients.holdout == 0.2),
        ("local.epochs=3", lambda e: e.local.epochs == 3),
        ("local.batch_size=8", lambda e: e.local.batch_size == 8),
        ("local.lr=1", lambda e: e.local.lr == 1.0 and type(e.local.lr) is float),
        ("local.momentum=0.9", lambda e: e.local.momentum == 0.9),
        ("local.weight_decay=1e-4", lambda e: e.local.weight_decay == 1e-4),
        ("local.reset=false", lambda e: not e.local.reset),
        ("server.lr=0.5", lambda e: e.server.lr == 0.5),
        ("evaluate.every=5", lambda e: e.evaluate.every == 5),
        ("evaluate.on=train", lambda e: e.evaluate.on == ("train",)),
        ("evaluate.on=['test', 'validation']", lambda e: e.evaluate.on == ("test", "validation")),
        ("evaluate.validation=0.3", lambda e: e.evaluate.validation == 0.3),
        ("algorithm=fedprox", lambda e: [a.name for a in e.algorithm] == ["fedprox"]),
        ("algorithm=['fedprox', 'fedavgm']", lambda e: len(e.algorithm) == 2),
        ("loss=double_softmax", lambda e: e.loss.name == "double_softmax"),
        ("dataset={name='npz', path='/x.npz'}", lambda e: e.dataset.options["path"] == "/x.npz"),
    ],
)
def test_every_key_can_be_overridden(tmp_path, override, found):
    assert found(described(override, path=tmp_path))


def test_later_overrides_win_and_options_may_follow_a_name(tmp_path):
    experiment = described(
        *("clients.partition=dirichlet", "clients.partition.alpha=5", "clients.partition.alpha=2"),
        *("algorithm=fedprox", "algorithm.fedprox.mu=1"),
        path=tmp_path,
    )
    assert experiment.clients.partition.name == "dirichlet"
    assert experiment.clients.partition.options["alpha"] == 2.0
    assert experiment.algorithm[0].name == "fedprox"
    assert experiment.algorithm[0].options["mu"] == 1.0


TOML = """
dataset = "fashion-mnist-mini"
model = { name = "hsu-cnn", padding = "same" }
rounds = 8
augment = { crop = 2, flip = true }

[clients]
count = 100
per_round = 0.1
partition = { name = "classes", per_client = 2 }

[local]
lr = 1

[[algorithm]]
name = "fedprox"
mu = 0.01

[[algorithm]]
name = "fedavgm"
"""


def test_toml_and_json_with_the_same_keys_are_the_same_experiment(tmp_path):
    toml, as_json = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text(TOML)
    as_json.write_text(json.dumps(tomllib.loads(TOML)))
    experiment = fl.Experiment.read(toml)
    assert fl.Experiment.read(as_json) == experiment
    assert experiment.clients.cohort == 10
    assert [named.name for named in experiment.algorithm] == ["fedprox", "fedavgm"]


shares = st.floats(0.01, 0.99)
rates = st.floats(0, 10)
experiments = st.builds(
    fl.Experiment,
    dataset=st.sampled_from(["fashion-mnist-mini", "cifar10"])
    | st.text(st.characters(exclude_categories=["Cs"])).map(
        lambda path: fl.Named("npz", {"path": path})
    ),
    model=st.sampled_from(["linear", fl.Named("hsu-cnn", {"padding": "same"})]),
    rounds=st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
    engine=st.sampled_from(["auto", "sequential", "stacked", "processes"]),
    precision=st.sampled_from(["fp32", "tf32", "bf16", "fp64"]),
    augment=st.builds(fl.Augment, crop=st.integers(0, 9), flip=st.booleans()),
    outputs=st.none() | st.integers(1, 1000),
    norm=st.sampled_from(["shared", "local", "group"]),
    clients=st.builds(
        fl.Clients,
        count=st.integers(10, 10**6),
        per_round=st.integers(1, 10) | shares,
        partition=st.sampled_from(["iid", "shards"])
        | (st.floats(0, 1e38) | st.just(float("inf"))).map(
            lambda a: fl.Named("dirichlet", {"alpha": a})
        )
        | st.lists(st.floats(0, 10, exclude_min=True), min_size=1).map(
            lambda s: fl.Named("proportions", {"sizes": s})
        ),
        seed=st.none() | st.integers(0, 9),
        holdout=shares,
    ),
    local=st.builds(fl.LocalTraining, lr=rates, momentum=st.floats(0, 0.99), reset=st.booleans()),
    server=st.builds(fl.Server, lr=rates),
    evaluate=st.builds(
        fl.Evaluate,
        every=st.integers(1, 9),
        on=st.lists(st.sampled_from(["test", "validation", "train"]), max_size=3).map(tuple),
        validation=shares,
    ),
    algorithm=st.sampled_from(["fedprox", ("fedprox", "fedavgm"), (), "lambda-sum"]),
)


@given(experiments)
def test_the_resolved_file_describes_the_same_experiment_byte_for_byte(experiment):
    text = experiment.toml()
    again = fl.Experiment.of(tomllib.loads(text))
    assert again == experiment
    assert again.toml() == text
    as_json = json.loads(json.dumps(experiment.plain()))
    assert fl.Experiment.of(as_json) == experiment


def test_paths_are_relative_to_the_experiment_file_and_those_of_a_command_to_its_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "study").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = tmp_path / "study" / "a.toml"
    file.write_text('dataset = { name = "npz", path = "../d.npz" }\nmodel = "linear"\nrounds = 1')
    experiment = fl.Experiment.read(file)
    assert isinstance(experiment.dataset, fl.Named)
    assert experiment.dataset.options["path"] == str(tmp_path / "d.npz")
    file.with_name("resolved.toml").write_text(experiment.toml())
    assert fl.Experiment.read(file.with_name("resolved.toml")) == experiment
    other = fl.Experiment.read(file, ["dataset.path=x.npz", "weights=runs/first"])
    assert isinstance(other.dataset, fl.Named)
    assert other.dataset.options["path"] == str(tmp_path / "elsewhere" / "x.npz")
    assert other.weights == str(tmp_path / "elsewhere" / "runs" / "first")


@pytest.mark.parametrize(
    ("count", "per_round", "cohort"),
    [(100, 0.29, 29), (100, 0.1, 10), (10, 0.01, 1), (7, 1.0, 7), (7, 1, 1), (3, 0.67, 2)],
)
def test_per_round_is_a_number_of_clients_or_a_share_of_them(count, per_round, cohort):
    assert fl.Clients(count=count, per_round=per_round).cohort == cohort


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_share_of_so_many_clients_is_so_many_clients(count, some):
    some = min(some, count)
    assert fl.Clients(count=count, per_round=some / count).cohort == some


@pytest.mark.parametrize("name", ["noisy-labels", "shifted"])
def test_clients_found_in_the_data_are_not_counted_beforehand_whatever_they_see(name):
    def count(of):
        clients = {"partition": {"name": name, "of": of}}
        return fl.Experiment(**BASE | {"clients": clients}).clients.count

    assert count({"name": "natural", "column": "writer"}) is None
    assert count({"name": "s2", "n_max": 9}) is None
    assert count("iid") == count({"name": "dirichlet", "alpha": 1}) == 10


def test_the_path_of_a_partition_that_another_is_of_is_relative_to_the_file(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(
        'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1\n[clients]\n'
        'partition = { name = "shifted", of = { name = "published", path = "split.csv" } }\n'
    )
    read = fl.Experiment.read(file)
    assert read.clients.partition.options["of"]["path"] == str(tmp_path / "split.csv")
    assert read.clients.count is None


def test_more_clients_a_round_than_there_are_is_refused_with_the_choice():
    with pytest.raises(ValueError, match="per_round is 11"):
        fl.Clients(count=10, per_round=11)


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        (("fedavgm", {"name": "fedadam", "lr": 0.5}), "fedavgm and fedadam"),
        (("lambda-sum", {"name": "fedavg", "over": "population"}), "lambda-sum and fedavg"),
    ],
)
def test_two_papers_on_one_slot_are_refused_by_name(algorithm, names):
    with pytest.raises(ValueError, match=f"{names} both refill `"):
        build(fl.Experiment(**BASE, algorithm=algorithm))


def test_a_paper_that_stands_twice_is_refused_whatever_it_is_called_by():
    twice = ("fedprox", {"name": "fedlens.algorithms:fedprox", "mu": 0.1})
    with pytest.raises(ValueError, match="twice"):
        build(fl.Experiment(**BASE, algorithm=twice))


def test_papers_that_refill_different_slots_go_together():
    both = BASE | {"algorithm": ("fedprox", "fedavgm")}
    made: Any = build(fl.Experiment(**both)).program.algorithm
    assert made.objective.penalties
    assert made.advance.momentum == 0.9
