"""Which test accuracy pfl reaches on its CIFAR-10 benchmark: `long_runs.py pfl`, run by pfl itself.

    PYTHONPATH=src:benchmarks python benchmarks/simulators/pfl_long.py
        [--data DIR] [--rounds 1500] [--every 50] [--seed 0]

Run it in an environment that has pfl, in one process or in several under torchrun. The device is
PFL_PYTORCH_DEVICE. Clients, initial weights, normalised images and the test set are those of
Fedlens. The sampling of clients (independent draws, so a client may occur twice in a round), the
order of their images (always the same), the dropout masks and the precision are those of pfl.
Seconds count from the first round, evaluations included.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from by_pfl import Classifier, federated_averaging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.hyperparam import NNEvalHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics
from torch import Tensor

import fedlens as fl
from fedlens.models import MODELS
from fedlens.network.ops import normalise
from fedlens.setup import build
from long_runs import RUNS

TESTED_AT_ONCE = 1000  # images


class Judged(TrainingProcessCallback):
    """Prints the accuracy and loss of the server's model every `every` rounds and at the end."""

    def __init__(self, test: Dataset, rounds: int, every: int) -> None:
        self.test, self.rounds, self.every = test, rounds, every

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.start = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        done = central_iteration + 1
        if not is_first_process() or (done % self.every and done < self.rounds):
            return False, Metrics()
        at_once = NNEvalHyperParams(local_batch_size=TESTED_AT_ONCE)
        found = model.evaluate(self.test, eval_params=at_once).to_simple_dict(to_lowercase=True)
        row = {"round": done, "test_accuracy": found["accuracy"], "test_loss": found["loss"]}
        seconds = round(time.perf_counter() - self.start, 2)
        print(json.dumps(row | {"seconds": seconds}), flush=True)
        return False, Metrics()


def is_first_process() -> bool:
    return bool(pytorch_ops.distributed.global_rank == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=RUNS["pfl"]["rounds"])
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    plain = {"dataset": "cifar10", "engine": "sequential", "device": "cpu", "precision": "fp32"}
    experiment = fl.Experiment(seed=arguments.seed, **RUNS["pfl"] | plain)
    setup = build(experiment, arguments.data)
    dataset, device = setup.dataset, pytorch_ops.get_default_device()

    def inputs(images: Tensor) -> Tensor:  # [N, H, W, channels], as pfl has them
        seen = normalise(images, dataset.mean, dataset.std, torch.float32)
        return seen.permute(0, 2, 3, 1).contiguous().to(device)

    train, everyone = setup.federation.examples, setup.federation.everyone(0)
    images, labels = inputs(train.read(everyone.index)), train.labels[everyone.index].to(device)
    test = [inputs(dataset.test.read(slice(None))), dataset.test.labels.to(device)]
    module = MODELS[RUNS["pfl"]["model"]](dataset.shape, dataset.num_classes)
    module.load_state_dict(setup.network.params)

    rank, processes = pytorch_ops.distributed.global_rank, pytorch_ops.distributed.world_size
    np.random.seed(arguments.seed)  # all processes draw the same clients; each trains a part
    torch.manual_seed(arguments.seed * processes + rank)  # processes differ in dropout masks
    if is_first_process():
        versions = {package: version(package) for package in ("torch", "pfl")}
        start = {"seed": arguments.seed, "processes": processes, "device": str(device)}
        seconds = round(time.perf_counter() - begun, 2)
        print(json.dumps(start | versions | {"start_seconds": seconds}), flush=True)
    lr = setup.experiment.local.lr
    assert isinstance(lr, float), "what it is compared with has no schedules"
    federated_averaging(
        Classifier(module),
        images,
        labels,
        [slice(*ends) for ends in pairwise(everyone.offsets.tolist())],
        sampling="random",
        rounds=arguments.rounds,
        cohort=setup.experiment.clients.cohort,
        batch=setup.experiment.local.batch_size,
        lr=lr,
        callback=Judged(Dataset(raw_data=test), arguments.rounds, arguments.every),
    )


if __name__ == "__main__":
    main()
