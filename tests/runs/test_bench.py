"""Measuring rounds: the numbers are there, and fit together."""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlens.cli import main as cli
from fedlens.runs import bench

KEYS = {"seconds_per_round", "samples_per_second", "limit_share", "peak_memory_bytes"}
PARTS = ("server_seconds", "gather_seconds", "train_seconds")


@pytest.fixture
def tiny(monkeypatch):
    work = bench.Workload("lenet5", (1, 28, 28), clients=2, steps=2, batch=4)
    monkeypatch.setitem(bench.WORKLOADS, "pfl-cnn", work)
    return work


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_a_workload_is_measured_on_every_engine(tiny, engine):
    found = bench.bench("pfl-cnn", engine=engine, device="cpu", repeats=2, seconds=0.01)
    assert found.keys() >= KEYS
    assert found["engine"] == engine
    assert found["samples_per_second"] * found["seconds_per_round"] == pytest.approx(tiny.samples)
    assert 0 < found["limit_share"] < 1
    if engine == "processes":
        assert 0 <= found["waiting_share"] <= 1
    else:
        assert found["waiting_share"] is None
    assert sum(found[part] for part in PARTS) == pytest.approx(found["seconds_per_round"])
    assert min(found["server_seconds"], found["gather_seconds"], found["evaluate_seconds"]) >= 0


def test_several_workloads_are_one_table(tiny, monkeypatch, capsys):
    words = ["fedlens", "bench", "pfl-cnn", "pfl-cnn", "--engine", "sequential", "--quiet"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(
        bench.bench, "__kwdefaults__", (bench.bench.__kwdefaults__ or {}) | {"seconds": 0.01}
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    about, head, _, *rows = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0
    assert "sequential" in about and "steps/s" in head
    assert [row.split()[0] for row in rows] == ["pfl-cnn", "pfl-cnn"]


def test_an_unknown_workload_is_a_mistake_with_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedlens", "bench", "pfl-cn"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "did you mean 'pfl-cnn'?" in capsys.readouterr().err


def test_the_images_of_a_workload_can_be_learned(tiny):
    found = bench.examples(tiny)
    pixels = found.images.flatten(1).float()
    apart = torch.cdist(pixels, pixels)
    same = found.labels[:, None] == found.labels
    same.fill_diagonal_(False)
    assert apart[same].mean() < 0.9 * apart[found.labels[:, None] != found.labels].mean()


@pytest.mark.parametrize("name", bench.WORKLOADS)
def test_every_workload_is_a_model_that_can_be_built(name):
    work = bench.WORKLOADS[name]
    assert bench._operations(work) > 0


def test_the_command_prints_json_alone_and_says_what_it_does(tiny, monkeypatch, capsys):
    words = ["fedlens", "bench", "pfl-cnn", "--engine", "sequential", "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(
        bench.bench, "__kwdefaults__", (bench.bench.__kwdefaults__ or {}) | {"seconds": 0.01}
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 0
    assert json.loads(out).keys() >= KEYS
    assert "warming up" in err


def test_what_only_workers_may_use_is_measured_in_a_child():
    where_trained: Any = bench._where_trained  # of a device's name, too
    here, elsewhere = torch.device("cpu"), torch.device("cuda", 1)
    for device, apart in ((here, False), (elsewhere, True)):
        setup = SimpleNamespace(device=here, devices=(device,))
        assert (where_trained(setup, lambda _: os.getpid()) != os.getpid()) is apart
        assert where_trained(setup, str) == str(device)


def test_a_workload_for_workers_leaves_the_gpus_to_them(tiny, monkeypatch):
    here = os.getpid()

    def is_available():
        assert os.getpid() != here, "whoever asks for a GPU can fork no workers for it"
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    described = bench.experiment(tiny, "processes", "cuda", "auto")
    assert described.engine == "processes"


def test_a_step_costs_what_its_products_cost():
    """A linear model on one image of 28 x 28: the product forwards, and the weights' gradient."""
    work = bench.Workload("linear", (1, 28, 28), clients=1, steps=1, batch=8)
    assert bench._operations(work) == 2 * (2 * 8 * 784 * 10)
