"""A page begins with whose settings and data it has, and claims no more than is so."""

from dataclasses import replace

import pytest

from fedlens.config.experiment import Experiment
from fedlens.recipes import RECIPES
from fedlens.recipes.page import OTHER_DATA, OUR_EXPERIMENTS, OWN_SETTINGS, opening
from fedlens.recipes.recipe import Recorded, Results, Scale
from fedlens.recipes.reproduce import reproduce


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    done = reproduce("ghaemi/fedavg", "smoke", out, only=["iid, logits"])
    return done.results.runs["iid, logits"][0]


def first_words(name, run, *here, **changed):
    """How the page of a recipe begins where its first cell was run, and these data are here."""
    scale = Scale("paper", recorded=Recorded(frozenset(here), ()))
    recipe = RECIPES[name](scale)
    cell, experiment = next(iter(recipe.cells.items()))
    tables = replace(experiment, **changed).plain()
    of_cell = replace(run, experiment=Experiment.of(tables).plain())
    return opening(recipe, Results(scale, {cell: [of_cell]})).paragraphs[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ghaemi/fedavg", f"{OWN_SETTINGS}."),
        ("hsu2020/figure4", f"{OWN_SETTINGS}."),
        ("hsu2020/figure4-pilot", OUR_EXPERIMENTS),
        ("hsu2020/composed", OUR_EXPERIMENTS),
        ("fedavg-cifar10/fedprox", OUR_EXPERIMENTS),
        ("ghaemi/why-liadmm-fails", OUR_EXPERIMENTS),
        *((f"hsu2020/table{number}", OTHER_DATA) for number in (1, 2, 3, 4, 5)),
        *((f"hsu2020/figure{number}", OTHER_DATA) for number in (5, 6, 7, 9)),
    ],
)
def test_settings_are_called_the_papers_only_where_they_are(name, said, run):
    here = "fashion-mnist", "cifar10", "cifar100", "femnist"
    assert first_words(name, run, *here) == said


def test_with_the_papers_data_the_settings_are_its_own(run):
    assert first_words("hsu2020/table3", run, "inaturalist-user-120k") == f"{OWN_SETTINGS}."


def test_settings_that_were_changed_are_not_called_the_papers(run):
    said = first_words("ghaemi/fedavg", run, "fashion-mnist", rounds=7)
    assert said == f"{OWN_SETTINGS}, but for some that were changed."


def test_of_fewer_classes_nothing_is_called_the_papers(run):
    of_ten = replace(run, manifest=run.manifest | {"classes": list("0123456789")})
    said = first_words("fedns/table3", of_ten, "tiny-imagenet")
    assert said.startswith("The data have 10 of the 200 classes")
