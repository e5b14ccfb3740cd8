"""The table of experiments says what was really run, in few words."""

from dataclasses import replace

import pytest

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.page import experiments
from fedlens.recipes.recipe import Results, Scale
from fedlens.recipes.reproduce import reproduce


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    done = reproduce("ghaemi/fedavg", "smoke", out, only=["iid, logits"])
    return done.results.runs["iid, logits"][0]


def table(run, **cells):
    """The table of these experiments, as if each had this run."""
    runs = {name: [replace(run, experiment=cell.plain())] for name, cell in cells.items()}
    return experiments(Results(Scale("paper"), runs))


def of(model="linear", **more):
    return Experiment(dataset=Named("cifar10"), model=Named(model), rounds=1, **more)


def test_numbers_have_four_digits(run):
    momentum = Named("fedavgm", {"momentum": 1 - 10**-2.5})
    shown = table(run, a=of(algorithm=(momentum,), local={"lr": 10**-5.5})).caption
    assert "algorithm fedavgm (momentum 0.9968, nesterov false);" in shown
    assert "local.lr 3.162e-06;" in shown


def test_what_papers_often_do_not_say_is_always_told_and_other_settings_if_they_are_no_defaults(
    run,
):
    shown = table(run, a=of()).caption
    assert "dataset cifar10; model linear;" in shown and "normalise dataset;" in shown
    assert "local.weight_decay 0.0;" in shown and "flip" not in shown and "seed" not in shown
    shown = table(
        run, a=of(augment={"flip": True}, normalise={"mean": 0.5, "deviation": 1})
    ).caption
    assert "augment.flip true;" in shown and 'normalise {"mean": 0.5, "deviation": 1.0};' in shown


def test_one_client_a_round_is_told_from_all(run):
    both = table(run, one=of(clients={"per_round": 1}), all=of())
    assert [row[1:] for row in both.rows] == [("1",), ("1.0",)]


def test_settings_that_differ_have_a_column(run):
    schedule = Named("cosine", {"start": 0.1})
    both = table(run, a=of("linear"), b=of("hsu-cnn", local={"lr": schedule}))
    assert list(both.header) == ["experiment", "model", "local.lr"]
    assert [row[0] for row in both.rows] == ["a", "b"] and both.rows[0][1:] == ("linear", "0.1")
    assert str(both.rows[1][2]).startswith("cosine (start 0.1")


def test_settings_that_an_algorithm_replaces_are_not_told(run):
    gradient = Named("liadmm", {"gamma": 0.05})
    trained = Named("liadmm", {"gamma": 0.05, "local": "training"})
    virtual = Named("fedvc", {"size": 64})
    cells = {"a": gradient, "b": trained, "c": virtual}
    shown = table(run, **{name: of(algorithm=(one,)) for name, one in cells.items()})
    columns = list(zip(*shown.rows, strict=True))
    header = list(shown.header)
    assert columns[header.index("local.epochs")] == ("–", "1", "–")
    assert columns[header.index("local.batch_size")] == ("–", "32", "32")
