"""What a summary says of time and memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fedlens as fl
from fedlens.runs.summary import _is_constant

EXPERIMENT = fl.Experiment(
    dataset=fl.Named("fashion-mnist-mini"),
    model=fl.Named("linear"),
    rounds=2,
    engine="sequential",
    clients=fl.Clients(count=30, per_round=2),
)


def test_a_resumed_run_remembers_how_long_its_earlier_parts_took(tmp_path):
    run = tmp_path / "run"
    spent = fl.run(EXPERIMENT, run).summary["seconds"]
    after = fl.resume(run, experiment=replace(EXPERIMENT, rounds=4)).summary["seconds"]
    written = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert after["evaluation"] == pytest.approx(sum(r["evaluation_seconds"] for r in written))
    last = sum(r["seconds"] + r["evaluation_seconds"] for r in written[2:])
    assert after["total"] >= spent["total"] + last
    (run / "summary.json").unlink()  # a killed run's is of its start: then the records count
    again = fl.resume(run, experiment=replace(EXPERIMENT, rounds=4)).summary["seconds"]
    assert again["training"] == after["training"]
    assert again["total"] >= again["training"] + again["evaluation"]


GREEDY = """
import fedlens.setup.tryouts, fedlens.engines.processes as processes, torch
from fedlens.engines.trainer import largest_yet
from dataclasses import replace
from fedlens.runs.loop import train
from fedlens.runs.summary import peak_memory
from tests.runs.test_summary import EXPERIMENT

class Greedy(torch.nn.Module):  # it takes 200 MB in training, and gives them back
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(784, 10)

    def forward(self, images):
        if self.training:
            torch.ones(50_000_000).sum()
        return self.layer(images.flatten(1))

fedlens.setup.tryouts._try_training = lambda *_: None  # which would take them in this process, too
processes.num_cores = lambda: 2
once = {"batch_size": 1000}  # a step for each client
setup = fedlens.setup.build(
    replace(EXPERIMENT, model=Greedy(), engine="processes", rounds=1, local=once)
)
before = largest_yet()
train(setup)
own, theirs = largest_yet() - before, setup.engine.worker_bytes
print(own, theirs, peak_memory(setup) - largest_yet())
"""


def test_the_peak_of_memory_counts_the_workers():
    """Two workers take 200 MB each, which the process that forked them never had.

    It is a process of its own: one that has had much memory has it to give to its workers.
    """
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", GREEDY],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    own, theirs, counted = map(int, done.stdout.split())
    assert own < theirs / 2
    assert theirs > 350e6
    assert counted == theirs


@pytest.mark.parametrize(
    ("predicted", "constant"),
    [
        ({"test": 1}, True),
        ({"test": 1, "validation": 1}, True),
        ({"test": 2, "validation": 1}, False),
        ({"test": 1, "validation": 2}, False),
        ({}, False),
    ],
)
def test_a_model_is_constant_if_it_gives_one_class_to_all_it_was_evaluated_on(predicted, constant):
    record = {f"{part}_classes_predicted": count for part, count in predicted.items()}
    assert _is_constant(record) is constant
