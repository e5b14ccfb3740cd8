"""Problems whose answers are known: clients that hold quadratics, run by the real machinery.

A client's loss is 0.5 * sum a (w - c)^2, with a and c its own. Its examples all hold the same
(a, c), so that any batch gives its whole gradient a (w - c), and its size only weighs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import Epochs, Objective, Sgd, Uniformly
from fedlens.core.federation import Examples, Federation, Fixed, Holdings
from fedlens.engines import Stacked
from fedlens.network.network import Network
from fedlens.rounds import Outcome, State, begin, run_round
from fedlens.rounds.client import ClientProgram
from tests.federations import CPU

DOUBLE = torch.float64


class Point(nn.Module):
    """One parameter w [D]; what it predicts is w itself, beside the (a, c) of each example."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, images: Tensor) -> Tensor:  # [B, 2, 1, D] -> [B, 3 D]
        return torch.cat([self.w.expand(len(images), -1), images.flatten(1)], 1)


def quadratic(outputs: Tensor, labels: Tensor) -> Tensor:  # [C, B, 3 D], [C, B] -> [C, B]
    w, a, c = outputs.chunk(3, -1)
    return 0.5 * (a * (w - c).square()).sum(-1)


@dataclass(frozen=True)
class Quadratics:
    """K clients of these curvatures, minima and sizes, and where the server starts."""

    a: Tensor  # [K, D]
    c: Tensor  # [K, D]
    sizes: Tensor  # [K] int64
    start: Tensor  # [D]

    def __len__(self) -> int:
        return len(self.a)

    @cached_property
    def federation(self) -> Federation:
        each = torch.stack([self.a, self.c], 1)[:, :, None]  # [K, 2, 1, D]
        owner = torch.repeat_interleave(torch.arange(len(self)), self.sizes)
        labels = torch.zeros(len(owner), dtype=torch.int64)
        members = torch.arange(len(owner)).split(self.sizes.tolist())
        return Federation(Examples(each[owner], labels), 1, Fixed(Holdings.of(list(members))))

    @property
    def shares(self) -> Tensor:  # [K, 1]
        return (self.sizes.double() / self.sizes.sum())[:, None]

    @property
    def most_curved(self) -> float:
        """L, the largest curvature of the weighted sum."""
        return float((self.shares * self.a).sum(0).max())

    def slopes(self, x: Tensor) -> Tensor:  # [K, D]
        return self.a * (x - self.c)

    def slope(self, x: Tensor) -> Tensor:  # [D] of the weighted sum
        return (self.shares * self.slopes(x)).sum(0)

    @property
    def optimum(self) -> Tensor:  # [D] of the weighted sum
        return (self.shares * self.a * self.c).sum(0) / (self.shares * self.a).sum(0)

    @property
    def equal_optimum(self) -> Tensor:  # [D] of the plain sum
        return (self.a * self.c).sum(0) / self.a.sum(0)


def some(
    clients: int = 6, spread: float = 3.0, seed: int = 0, dims: int = 3, equal: bool = False
) -> Quadratics:
    """Quadratics with curvatures in 0.5..2, minima `spread` wide, and sizes 1 to 5 (or all 4)."""
    rng = torch.Generator().manual_seed(seed)
    a = 0.5 + 1.5 * torch.rand(clients, dims, generator=rng, dtype=DOUBLE)
    c = spread * torch.randn(clients, dims, generator=rng, dtype=DOUBLE)
    sizes = torch.randint(1, 6, (clients,), generator=rng)
    if equal:
        sizes = torch.full((clients,), 4)
    return Quadratics(a, c, sizes, torch.randn(dims, generator=rng, dtype=DOUBLE))


def plain(
    clients: int, lr: float = 0.1, epochs: int = 1, momentum: float = 0.0, batch_size: int = 1000
) -> Algorithm:
    """FedAvg on quadratics: full batches unless told otherwise."""
    return Algorithm(
        select=Uniformly(clients),
        draw=Epochs(epochs, batch_size),
        objective=Objective(loss=quadratic),
        solve=Sgd(lr, momentum),
    )


def rounds_of(
    algorithm: Algorithm,
    federation: Federation,
    module: nn.Module,
    rounds: int,
    seed: int = 0,
    dtype: torch.dtype = DOUBLE,
) -> Iterator[tuple[State, Outcome]]:
    """A run, one round after another; the clients of a round side by side, which is fastest."""
    network = Network(module, dtype=dtype)
    program = ClientProgram(algorithm, network.layout)
    engine = Stacked(network, federation.examples)
    state = begin(network, program, federation, CPU)
    for _ in range(rounds):
        state, outcome = run_round(program, federation, engine, state, seed)
        yield state, outcome


def follow(
    algorithm: Algorithm, problem: Quadratics, rounds: int, seed: int = 0
) -> Iterator[tuple[State, Outcome]]:
    return rounds_of(algorithm, problem.federation, Point(problem.start), rounds, seed)


def path(algorithm: Algorithm, problem: Quadratics, rounds: int, seed: int = 0) -> Tensor:
    """The server's model after each round. [rounds, D]"""
    return torch.stack([s.params["w"] for s, _ in follow(algorithm, problem, rounds, seed)])


def end(algorithm: Algorithm, problem: Quadratics, rounds: int = 1, seed: int = 0) -> Tensor:
    """The server's model after the last of these rounds. [D]"""
    return path(algorithm, problem, rounds, seed)[-1]


def local_steps(problem: Quadratics, x: Tensor, lr: float, steps: int | Tensor) -> Tensor:  # [K, D]
    """Where `steps` of gradient descent from x bring each client: c + (1 - lr a)^steps (x - c)."""
    return problem.c + (1 - lr * problem.a) ** steps * (x - problem.c)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative."""
    return float((found - expected).norm() / expected.norm())
