"""Published numbers, as they are stored, agree with each other wherever the papers make them."""

import math
import re

import pytest

from fedlens.recipes.fedavg_cifar10 import setting
from fedlens.recipes.fedns.setting import CIFAR, FASHION
from fedlens.recipes.ghaemi import algorithms
from fedlens.recipes.ghaemi.algorithms import SPLITS, published
from fedlens.recipes.hsu2020 import tables
from fedlens.recipes.hsu2020.setting import PUBLISHED, STEPS, Method

FLOOR = math.log(1 + 9 / math.e)  # of a double softmax over ten classes


def test_every_row_of_a_table_has_its_published_numbers_and_every_such_number_a_row():
    layers = [(first, method) for first in tables.LAYERS for method in tables.TABLE4]
    keys = {"table3": [("", m) for m in tables.TABLE3], "table4": layers, "table5": tables.TABLE5}
    for table, rows in keys.items():
        assert [*PUBLISHED[table]] == [method.cell(first) for first, method in rows]
    for theirs in PUBLISHED["table2"].values():
        assert [*theirs] == [method.cell(which) for which, method in tables.TABLE2]


@pytest.mark.parametrize("cell", [m.cell(which) for which, m in tables.TABLE2 if m.vc])
def test_four_steps_a_round_make_2500_rounds_10000_batches(cell):
    at_rounds, at_batches = (PUBLISHED["table2"][by][cell] for by in ("rounds", "batches"))
    assert STEPS * 2_500 == 10_000
    assert at_rounds[1] == at_batches[0]  # 2,500 rounds, and 10,000 batches


def test_tables_2_and_3_have_runs_in_common():
    for base in ("FedAvg", "FedAvgM"):
        at_rounds = PUBLISHED["table2"]["rounds"][Method(base, vc=True).cell("user")]
        assert at_rounds == PUBLISHED["table3"][Method(base, goal=10).cell()]


def test_all_tables_have_one_accuracy_of_centralised_training():
    of = {name: row[-1] / 100 for name, row in PUBLISHED["table1"].items()}
    assert of["iNaturalist-Geo-3k"] == of["iNaturalist-User-120k"]
    assert of["iNaturalist-User-120k"] == pytest.approx(PUBLISHED["centralised"])
    assert of["iNaturalist-Geo-3k"] == pytest.approx(PUBLISHED["table5-centralised"]["pretrained"])
    landmarks = PUBLISHED["table4-centralised"]["all layers"]
    assert of["Landmarks-User-160k"] == pytest.approx(landmarks)


def test_table_5_counts_in_rounds_to_ten_percent():
    wrong = []
    for row, cells in PUBLISHED["table5"].items():
        first, *_ = (int(cell.split()[0].replace(",", "")) for cell in cells if "×" in cell)
        for cell in cells:
            if found := re.fullmatch(r"([\d,]+) \((.*)×\)", cell):
                times = int(found[1].replace(",", "")) / first
                if abs(times - float(found[2])) > 0.0501:
                    wrong.append((row, cell))
    assert wrong == [("pretrained, FedAvgM, K 100", "420 (6.9×)")]  # 420 / 60 is 7


def test_recall_by_class_has_the_mean_that_is_printed():
    recall, ends = algorithms.PUBLISHED["recall"], algorithms.PUBLISHED["at-the-end"]
    assert sum(recall) / 10 == pytest.approx(ends["test_recall"], abs=5e-5)
    assert ends["test_recall"] == ends["test_accuracy"]  # the test images have equal classes


def test_the_f1_of_paper_4_is_possible_and_those_of_paper_3_are_not():
    ghaemi = algorithms.PUBLISHED["at-the-end"]
    assert ghaemi["test_f1"] <= (ghaemi["test_precision"] + ghaemi["test_recall"]) / 2
    for study in (FASHION, CIFAR):
        columns = (study.published[n] for n in ("accuracy", "macro precision", "macro F-score"))
        for recall, precision, f in zip(*columns, strict=True):
            assert f > (precision + recall) / 2 + 0.06


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("algorithm", ["FedAvg", "FedProx", "LIADMM"])
def test_the_losses_of_paper_4_are_those_of_a_double_softmax(algorithm, split):
    curves = published(algorithm, split)
    late = zip(curves["test_loss"][20:], curves["test_acc"][20:], strict=True)
    apart = [
        abs(loss - FLOOR - (1 - accuracy))
        for loss, accuracy in late
        if loss is not None and accuracy is not None
    ]
    assert len(apart) == 60
    assert sum(apart) / len(apart) < 0.005
    assert max(apart) < 0.0155


def test_accuracy_falls_as_paper_1_says():
    whole, fallen = setting.HEADLINE, setting.FALLEN
    assert whole[0] - fallen[0] == pytest.approx(0.1075)  # "almost 10 percent"
    assert fallen[1] > whole[1]
