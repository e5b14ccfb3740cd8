"""Training with privacy reaches the accuracy of loops written by hand, and loses as much by noise.

The loops share no code with ours: softmax regression with its gradients on paper, noise of
`torch.randn`. Where noise is large, twice or half as much moves accuracy by ten points.
"""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlens as fl
from fedlens.setup import build

SEEDS = range(4)
POINTS = 0.04
MODEL = {"dataset": "fashion-mnist-mini", "model": "linear", "engine": "sequential"}
BATCH, STEPS = 200, 40  # of DP-SGD
CLIENTS, COHORT, ROUNDS, LR = 200, 20, 12, 0.03  # of privacy of clients


def accuracy(*, seed: int, rounds: int, clients: Any, local: Any, privacy: Any) -> float:
    found = fl.run(
        fl.Experiment.of(
            MODEL
            | {"seed": seed, "rounds": rounds, "clients": clients, "local": local}
            | {"privacy": {"delta": 1e-5} | privacy, "evaluate": {"every": rounds}}
        )
    )
    return float(found.final["test_accuracy"])


class ByHand:
    """Softmax regression: weights and bias as one matrix [10, 785]."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        made = build(fl.Experiment.of(MODEL | {"rounds": 1, "seed": seed}))
        network, dataset = made.network, made.dataset
        assert network.mean is not None and network.std is not None
        (mean,), (std,) = network.mean, network.std
        parts = [
            torch.cat([((one.images / 255 - mean) / std).flatten(1), torch.ones(len(one), 1)], 1)
            for one in (dataset.train, dataset.test)
        ]
        (self.x, self.test), (self.y, self.truth) = (
            parts,
            (dataset.train.labels, dataset.test.labels),
        )
        self.w = torch.cat([network.params["fc.weight"], network.params["fc.bias"][:, None]], 1)

    def drawn(self, count: int, rate: float) -> Tensor:
        return torch.rand(count, generator=self.random) < rate

    def noise(self) -> Tensor:
        return torch.randn(self.w.shape, generator=self.random)

    def outer(self, rows: Tensor) -> Tensor:  # [n, 10]
        """p - [y = c] of each example: its gradient is the outer product with x."""
        wrong = (self.x[rows] @ self.w.T).softmax(1)
        wrong[torch.arange(len(wrong)), self.y[rows]] -= 1
        return wrong

    def accuracy(self) -> float:
        return float(((self.test @ self.w.T).argmax(1) == self.truth).float().mean())


def examples_by_hand(seed: int, noise: float, clip: float) -> float:
    one = ByHand(seed)
    for _ in range(STEPS):
        rows = one.drawn(len(one.x), BATCH / len(one.x)).nonzero()[:, 0]
        wrong = one.outer(rows)
        norms = wrong.norm(dim=1) * one.x[rows].norm(dim=1)
        total = (wrong * (clip / norms).clamp(max=1)[:, None]).T @ one.x[rows]
        one.w = one.w - (total + noise * clip * one.noise()) / (BATCH * clip)
    return one.accuracy()


def examples(seed: int, noise: float, clip: float) -> float:
    return accuracy(
        seed=seed,
        rounds=1,
        clients={"count": 1},
        local={"steps": STEPS, "batch_size": BATCH, "lr": 1 / clip},
        privacy={"unit": "example", "noise": noise, "clip": clip},
    )


def clients_by_hand(seed: int, noise: float, clip: float) -> float:
    """Each client takes one step on all that it holds."""
    one = ByHand(seed)
    held = torch.randperm(len(one.x), generator=one.random).view(CLIENTS, -1)
    for _ in range(ROUNDS):
        total = noise * clip * one.noise()
        for rows in held[one.drawn(CLIENTS, COHORT / CLIENTS)]:
            update = -LR * one.outer(rows).T @ one.x[rows] / len(rows)
            total = total + update * min(1.0, clip / float(update.norm()))
        one.w = one.w + total / COHORT
    return one.accuracy()


def clients(seed: int, noise: float, clip: float) -> float:
    return accuracy(
        seed=seed,
        rounds=ROUNDS,
        clients={"count": CLIENTS, "per_round": COHORT},
        local={"batch_size": 30, "lr": LR},
        privacy={"noise": noise, "clip": clip},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs", "noise", "clip"),
    [
        (examples, examples_by_hand, 0.5, 1.0),
        (examples, examples_by_hand, 8.0, 1.0),
        (examples, examples_by_hand, 8.0, 0.1),
        (clients, clients_by_hand, 0.3, 0.3),
        (clients, clients_by_hand, 2.0, 0.3),
    ],
)
def test_accuracy_is_that_of_a_loop_by_hand(
    ours: Callable[..., float], theirs: Callable[..., float], noise: float, clip: float
) -> None:
    found, expected = (
        statistics.fmean(one(seed, noise, clip) for seed in SEEDS) for one in (ours, theirs)
    )
    assert found == pytest.approx(expected, abs=POINTS)
