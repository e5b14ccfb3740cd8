"""Paper 3's pages say what is ours in them."""

from dataclasses import replace

import pytest

from fedlens.recipes.fedns.setting import CELLS, CIFAR, FASHION, TINY, remarks
from fedlens.recipes.recipe import Results, Scale
from fedlens.recipes.reproduce import reproduce


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    done = reproduce("fedns/table3", "smoke", tmp_path / "out", seeds=1)
    return done.results.runs[CELLS[0]][0]


def told(study, run, dataset):
    of = replace(run, experiment=run.experiment | {"dataset": {"name": dataset}})
    return " ".join(remarks(study, Results(Scale("paper"), {CELLS[0]: [of]})).paragraphs)


def test_networks_that_the_paper_does_not_describe_are_called_ours(run):
    assert "stem" in told(TINY, run, "tiny-imagenet")
    assert "AlexNet" in told(CIFAR, run, "cifar10")
    assert "stem" not in told(FASHION, run, "fashion-mnist")


def test_a_data_set_of_fewer_classes_is_not_taken_for_the_whole(run):
    words = "10 of the 200 classes"
    assert words in told(TINY, run, "tiny-imagenet")
    assert words not in told(TINY, run, "fashion-mnist-mini")
    assert "classes of" not in told(CIFAR, run, "cifar10")
