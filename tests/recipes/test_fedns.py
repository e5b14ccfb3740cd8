"""Paper 3's pages say what is ours in them."""

from dataclasses import replace

import pytest

from fedlens.recipes import RECIPES
from fedlens.recipes.fedns.setting import CELLS, CIFAR, FASHION, TINY, remarks
from fedlens.recipes.page import opening
from fedlens.recipes.recipe import Recorded, Results, Scale
from fedlens.recipes.reproduce import reproduce
from fedlens.report.blocks import Table


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    done = reproduce("fedns/table3", "smoke", tmp_path / "out", seeds=1)
    return done.results.runs[next(iter(CELLS))][0]


def told(name, run, dataset):
    """The opening of a page of runs on this data set."""
    of = replace(run, experiment=run.experiment | {"dataset": {"name": dataset}})
    scale = Scale("paper", recorded=Recorded(frozenset({"tiny-imagenet", "cifar10"}), ()))
    page = opening(RECIPES[name](scale), Results(scale, {next(iter(CELLS)): [of]}))
    return " ".join(page.paragraphs)


def test_networks_that_the_paper_does_not_describe_are_called_ours():
    said = {study.dataset: str(remarks(study).paragraphs) for study in (FASHION, CIFAR, TINY)}
    assert "stem" in said["tiny-imagenet"]
    assert "AlexNet" in said["cifar10"]
    assert "stem" not in said["fashion-mnist"]


@pytest.mark.parametrize(("count", "compared"), [(10, False), (200, True)])
def test_numbers_of_fewer_classes_have_no_difference_to_the_published_ones(run, count, compared):
    of_all = replace(run, manifest=run.manifest | {"classes": [str(i) for i in range(count)]})
    scale = Scale("paper", recorded=Recorded(frozenset({"tiny-imagenet"}), ()))
    recipe = RECIPES["fedns/table3"](scale)
    results = Results(scale, {cell: [of_all] for cell in CELLS})
    blocks = [one for one in recipe.blocks(results) if one.title == "Top-1 accuracy, %"]
    (table,) = (one for one in blocks if isinstance(one, Table))
    assert ("ours − published" in table.header) == compared
    assert table.rows[0][1] == "18.99"


def test_a_data_set_of_fewer_classes_is_not_taken_for_the_whole(run):
    words = "The data have 10 of the 200 classes of tiny-imagenet: that is an easier task"
    for item in ("fedns/table3", "fedns/figure3"):
        assert words in told(item, run, "tiny-imagenet")
        assert "classes of" not in told(item, run, "fashion-mnist-mini")
    assert "classes of" not in told("fedns/table2", run, "cifar10")
