"""Experiments described in Python: tensors, modules, records and tables."""

import math
import tomllib
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.algorithms import fedavgm, fedprox
from fedlens.setup import partition

BASE: dict[str, Any] = {"dataset": "fashion-mnist-mini", "model": "linear", "rounds": 3}


def test_tensors_and_a_module_may_be_given_from_python():
    labels = torch.arange(12) % 3
    part = fl.Examples(torch.rand(12, 1, 2, 2), labels)
    dataset = fl.Dataset("mine", part, part, ("a", "b", "c"))
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    experiment = fl.Experiment(dataset=dataset, model=module, rounds=1)
    assert experiment.dataset is dataset
    assert "mine" in experiment.toml()
    with pytest.raises(ValueError, match=r"fl\.resume"):
        fl.Experiment.of(tomllib.loads(experiment.toml()))


def test_images_whose_channels_are_last_are_refused_with_the_remedy():
    labels = torch.arange(12) % 3
    part = fl.Examples(torch.zeros(12, 8, 9, 3, dtype=torch.uint8), labels)
    with pytest.raises(ValueError, match=r"permute\(0, 3, 1, 2\)"):
        fl.Dataset("mine", part, part, ("a", "b", "c"))
    part = fl.Examples(part.images.permute(0, 3, 1, 2), labels)
    assert fl.Dataset("mine", part, part, ("a", "b", "c")).shape == (3, 8, 9)


@fl.paper
def scaled(base: fl.Algorithm, *, times_: float = 1.0) -> fl.Algorithm:
    return base


def test_an_algorithm_may_be_a_paper_with_its_options():
    named = fl.Experiment(**BASE, algorithm=[fl.Named("fedprox", {"mu": 0.3}), "fedavgm"])
    assert fl.Experiment(**BASE, algorithm=[fedprox(0.3), "fedavgm"]) == named
    assert fl.Experiment(**BASE, algorithm=[fedprox(mu=0.3), fedavgm()]) == named
    own = fl.Experiment(**BASE, algorithm=scaled(times_=2.0))
    assert own.algorithm == (fl.Named(f"{__name__}:scaled", {"times": 2.0}),)
    assert fl.Experiment.of(tomllib.loads(own.toml())) == own
    with pytest.raises(ValueError, match="mu is 'x': expected a number"):
        fl.Experiment(**BASE, algorithm=fedprox(mu="x"))

    @fl.paper
    def inside(base: fl.Algorithm) -> fl.Algorithm:
        return base

    with pytest.raises(ValueError, match="top of a module"):
        fl.Experiment(**BASE, algorithm=inside())


def test_records_may_be_given_as_tables_from_python():
    plain = {"local": {"lr": 1}, "clients": {"count": 3}, "augment": {"crop": 1}}
    tables = fl.Experiment(**BASE | plain)
    records = fl.Experiment(
        **BASE,
        local=fl.LocalTraining(lr=1.0),
        clients=fl.Clients(count=3),
        augment=fl.Augment(crop=1),
    )
    assert tables == records
    assert type(tables.local.lr) is float


def test_the_split_follows_the_clients_seed_alone_where_there_is_one():
    def split(**changes: Any) -> np.ndarray:
        clients = fl.Clients(count=4, seed=changes.pop("clients_seed", None))
        experiment = fl.Experiment(**BASE, clients=clients, **changes)
        return partition(experiment)[2].index.numpy()

    assert (split(seed=1) != split(seed=2)).any()
    assert (split(seed=1, clients_seed=7) == split(seed=2, clients_seed=7)).all()
    assert (split(seed=1, clients_seed=7) != split(seed=1, clients_seed=8)).any()
    assert (split(seed=5) == split(seed=0, clients_seed=5)).all()


def test_names_and_tables_may_be_given_as_people_write_them():
    """Type checkers are content with this, too: mypy reads it with `make lint`."""
    experiment = fl.Experiment(
        dataset="fashion-mnist-mini",
        model={"name": "hsu-cnn", "padding": "same"},
        rounds=3,
        clients={"count": 5, "partition": {"name": "dirichlet", "alpha": 1}},
        evaluate=fl.Evaluate(on="train"),
        algorithm="fedprox",
    )
    count: int | None = experiment.clients.count
    partition: fl.Named = experiment.clients.partition
    algorithms: tuple[fl.Named, ...] = experiment.algorithm
    assert (count, partition.options["alpha"], algorithms[0].name) == (5, 1.0, "fedprox")
    assert experiment.evaluate.on == ("train",)
    listed = replace(experiment, algorithm=["fedprox", {"name": "fedavgm"}], clients={"count": 2})
    assert [named.name for named in listed.algorithm] == ["fedprox", "fedavgm"]


@pytest.mark.parametrize("missing", BASE)
def test_what_has_no_default_must_be_given(missing):
    given = {key: value for key, value in BASE.items() if key != missing}
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{missing}'"):
        fl.Experiment(**given)
    with pytest.raises(ValueError, match=f"the experiment needs '{missing}': set {missing} = "):
        fl.Experiment.of(given)


@pytest.mark.parametrize("given", ["a.toml", BASE, None])
def test_what_is_no_experiment_is_refused_with_how_one_is_made(given):
    with pytest.raises(ValueError, match=r"Experiment\.read"):
        fl.run(given)
    with pytest.raises(ValueError, match="sweep is given"):
        fl.sweep({"a": given})


def test_a_sweep_of_no_names_is_refused():
    with pytest.raises(ValueError, match="by name"):
        fl.sweep(fl.Experiment(**BASE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("run", fl.Experiment(**BASE)),
        ("resume", "nowhere"),
        ("sweep", {"a": fl.Experiment(**BASE)}),
    ],
)
def test_a_watch_that_cannot_be_called_is_refused_before_anything_is_run(name, first):
    with pytest.raises(
        ValueError, match=f"^{name} is given a watch of type int: give a function of one record"
    ):
        getattr(fl, name)(first, watch=3)


def of_two(record, other):
    raise AssertionError("never called")


async def later(record):
    raise AssertionError("never called")


def some_at_a_time(record):
    yield record


@pytest.mark.parametrize(
    ("watch", "said"),
    [
        (lambda: None, "a watch <lambda>: give a function of one record"),
        (of_two, "a watch of_two: give a function of one record"),
        (dict, "a watch dict: give a function of one record"),
        (later, "a watch later: give a function of one record"),
        (some_at_a_time, "a watch some_at_a_time: give a function of one record"),
        (fl.tracking([], "x", {}), r"a watch that was not begun: use with \.\.\. as watch"),
    ],
)
def test_a_watch_that_would_see_no_record_is_refused_before_anything_is_run(watch, said, tmp_path):
    with pytest.raises(ValueError, match=f"^run is given {said}$"):
        fl.run(fl.Experiment(**BASE), out=tmp_path / "run", watch=watch)
    assert not (tmp_path / "run").exists()


def test_a_watch_may_be_anything_that_takes_a_record():
    seen: list[object] = []

    class Counting:
        def __call__(self, record, more=None):
            seen.append(record)

    described = fl.Experiment(**BASE | {"rounds": 1})
    for watch in (seen.append, Counting(), print):
        fl.run(described, watch=watch)
    assert len(seen) == 2


def test_numbers_may_be_numpys():
    given = fl.Experiment(**BASE | {"rounds": np.int64(2)}, local={"lr": np.float32(0.5)})
    assert (type(given.rounds), type(given.local.lr)) == (int, float)
    assert fl.Experiment.of(tomllib.loads(given.toml())) == given
    with pytest.raises(ValueError, match=r"rounds is np.float32"):
        fl.Experiment(**BASE | {"rounds": np.float32(2)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear}, "model is <class .*: give a name, a table with a name, or a Module"),
        (
            {"dataset": torch.zeros(9, 9)},
            "dataset is a Tensor: give .*, or a Dataset, which fl.map",
        ),
        ({"loss": torch.zeros(9, 9)}, r"loss is tensor\(.* \.\.\.: give a name, or a table"),
        ({"loss": nn.functional.relu}, 'give "module:function" .a notebook.s is __main__., or'),
        ({"dataset": "a/b"}, r'dataset is .a/b., a path: write { name = "folder", path = "a/b" }'),
        ({"dataset": "a.csv"}, r'write { name = "csv", path = "a.csv" }'),
    ],
)
def test_what_cannot_be_a_part_is_refused_in_one_line_with_what_can(changes, message):
    with pytest.raises(ValueError, match=f"^.*{message}.*$") as refused:
        fl.Experiment(**BASE | changes)
    assert "\n" not in str(refused.value)


AB: Any = "ab"
NOTHING: Any = None


def part(count=6, labels=None):
    images = torch.zeros(count, 1, 2, 2, dtype=torch.uint8)
    return fl.Examples(images, torch.arange(count) % 2 if labels is None else labels)


def floats() -> fl.Examples:
    return fl.Examples(torch.rand(2, 1, 2, 2), torch.arange(2))


def normalised(mean: Any, std: Any) -> fl.Dataset:
    return fl.Dataset("d", part(), part(), ("a", "b"), mean, std)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fl.Dataset("d", part(), part(), ("a",)), "labels are 0 to 1, but there are 1 cl"),
        (lambda: fl.Dataset("d", part(), part(), AB), "classes are .ab.: give their names in"),
        (lambda: normalised((0.5,), (0.0,)), r"d: std is \(0.0,\): give one number a channel, abo"),
        (lambda: normalised((math.nan,), (0.2,)), r"d: mean is \(nan,\): give one number a chan"),
        (lambda: normalised(0.5, (0.2,)), "d: mean is 0.5: give one number a channel"),
        (lambda: fl.Dataset("d", part(), part(), ()), "there are 0 classes: name them, in the ord"),
        (lambda: fl.Dataset("d", part(), NOTHING, ("a", "b")), "d: examples are a NoneType: give"),
        (lambda: fl.Dataset("d", part(), floats(), ("a", "b")), "bytes, .* and others floats"),
        (lambda: part(6, torch.zeros(3)), "6 images but 3 labels: give one an image"),
        (lambda: fl.Examples(torch.zeros(3, 2, 2), torch.zeros(3)), r"give \[N, channels, height"),
    ],
)
def test_data_that_do_not_fit_together_are_refused_with_what_to_give(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_compiled_module_is_refused_before_workers_wait_for_each_other():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch imports for it
        model = torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    with pytest.raises(ValueError, match=r"torch\.compile"):
        fl.run(fl.Experiment(**BASE | {"model": model}))


def test_a_data_set_without_training_examples_is_refused_as_that():
    dataset = fl.Dataset("d", part(0), part(), ("a", "b"))
    with pytest.raises(ValueError, match="no images to train on"):
        fl.run(fl.Experiment(dataset, "linear", 1))


@pytest.mark.parametrize("values", [0.1, "fedprox"])
def test_an_axis_of_a_grid_that_is_no_list_is_refused(values):
    with pytest.raises(ValueError, match="list"):
        fl.grid(fl.Experiment(**BASE), {"local.lr": values})


@pytest.mark.parametrize("given", ["fedprox", fl.Algorithm()])
def test_what_is_no_paper_cannot_be_composed(given):
    with pytest.raises(ValueError, match=r"fedprox\(mu"):
        fl.compose(fl.Algorithm(), given)


def test_one_override_may_stand_by_itself(tmp_path):
    (tmp_path / "a.toml").write_text('dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1')
    assert fl.Experiment.read(tmp_path / "a.toml", "rounds=3").rounds == 3
