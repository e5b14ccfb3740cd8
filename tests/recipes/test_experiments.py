"""The table of experiments says what was really run, in few words."""

from dataclasses import replace

import pytest
import torch

from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import MODELS
from fedlens.network.layout import Layout
from fedlens.recipes.experiments import experiments
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


def of(model, **more):
    return Experiment(dataset=Named("cifar10"), model=Named(model), rounds=1, **more)


def test_numbers_have_four_digits(run):
    momentum = Named("fedavgm", {"momentum": 1 - 10**-2.5})
    shown = table(run, a=of("linear", algorithm=(momentum,), local={"lr": 10**-5.5})).caption
    assert "algorithm fedavgm (momentum 0.9968, nesterov False);" in shown
    assert "lr 3.162e-06," in shown


def test_how_images_are_normalised_is_always_said(run):
    for how, words in (
        ("dataset", "normalised by the data set"),
        ("imagenet", "normalised as ImageNet's"),
        ("none", "not normalised"),
        ({"mean": 0.5, "deviation": 0.5}, "normalised by a mean of 0.5 and a deviation of 0.5"),
    ):
        assert f"data cifar10, images {words};" in table(run, a=of("linear", normalise=how)).caption


def test_normalisation_layers_are_named_where_there_are_any(run):
    assert "normalisation" not in table(run, a=of("hsu-cnn"), b=of("linear")).caption
    assert "normalisation shared;" in table(run, a=of("resnet18"), b=of("resnet18")).caption
    assert "normalisation shared;" in table(run, a=of("timm:resnet10t")).caption  # it may have some
    both = table(run, a=of("linear"), b=of("resnet18"))
    column = list(both.header).index("normalisation")
    assert [row[column] for row in both.rows] == ["–", "shared"]


@pytest.mark.parametrize("name", MODELS)
def test_our_models_with_normalisation_layers_have_an_option_for_their_kind(name):
    with torch.device("meta"):
        module = MODELS[name]((3, 64, 64), 10)
    has_layers = bool(Layout.of(module).norm_layers)
    cell = Experiment.of(of(name).plain())
    assert isinstance(cell.model, Named)
    assert ("norm" in cell.model.options) == has_layers
