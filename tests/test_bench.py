"""Measuring rounds: the numbers are there, and fit together."""

import json
import sys

import pytest

from fedlens import bench, cli

KEYS = {"seconds_per_round", "samples_per_second", "limit_share", "peak_memory_bytes"}


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


def test_the_command_prints_json_alone_and_says_what_it_does(tiny, monkeypatch, capsys):
    words = ["fedlens", "bench", "pfl-cnn", "--engine", "sequential", "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(
        bench.bench, "__kwdefaults__", {**bench.bench.__kwdefaults__, "seconds": 0.01}
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 0
    assert json.loads(out).keys() >= KEYS
    assert "warming up" in err


def test_a_step_costs_what_its_products_cost():
    """A linear model on one image of 28 x 28: the product forwards, and the weights' gradient."""
    work = bench.Workload("linear", (1, 28, 28), clients=1, steps=1, batch=8)
    assert bench._operations(work) == 2 * (2 * 8 * 784 * 10)
